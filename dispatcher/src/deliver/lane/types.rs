//! The values a lane takes and returns.

use chrono::{DateTime, Utc};
use postrider_proto::{DeadReason, EndpointId, Epoch, EventId, Shard};

use crate::deliver::queued_delivery::QueuedDelivery;

/// Counts the reads of the queue. A recorded id is forgotten only after a read that began after its record.
pub(crate) type ReadNumber = u64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    InFlight,
    /// The response is in; the record is being written.
    Recording,
    Recorded,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Busy {
    /// The number of the current attempt. A row with this number or more is a replay, not an old copy.
    pub(super) number: u16,
    pub(super) key: Option<i64>,
    /// Picked as a replay. The retry of a replay is an ordinary retry.
    pub(super) replay: bool,
    /// Its row is in `queue`, as far as is known, and not in `retries`.
    pub(super) queued: bool,
    pub(super) stage: Stage,
}

/// Rows of the queue to read: those above the floor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refill {
    pub(crate) floor: EventId,
    pub(crate) limit: usize,
}

/// Rows of `retries` to read: only due ones, or all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DueRead {
    pub(crate) limit: usize,
    pub(crate) even_later: bool,
    /// None is due before this.
    pub(crate) from: DateTime<Utc>,
}

/// Result of a read of `retries`.
#[derive(Debug, Default)]
pub(crate) struct DueRows {
    pub(crate) rows: Vec<QueuedDelivery>,
    /// When the earliest row of all is due, and when the earliest that is not due yet is.
    pub(crate) first: Option<DateTime<Utc>>,
    pub(crate) later: Option<DateTime<Utc>>,
}

/// Before any retry, and after all of them.
pub(super) const EARLIEST: DateTime<Utc> = DateTime::UNIX_EPOCH;
pub(super) const LATEST: DateTime<Utc> = match DateTime::from_timestamp(253_402_300_799, 0) {
    Some(end_of_9999) => end_of_9999,
    None => DateTime::UNIX_EPOCH,
};

/// What to do with a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    Send,
    /// The endpoint is disabled: it becomes a dead letter without an attempt.
    DeadLetter(DeadReason),
}

/// Result of an attempt, as far as the lane needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AttemptResult {
    pub(crate) success: bool,
    pub(crate) slow: bool,
    /// Whether it says anything about the endpoint. A failure of the egress proxy does not.
    pub(crate) about_endpoint: bool,
}

/// What the latest response says about the endpoint: decides which share of capacity it competes for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    Unknown,
    Fast,
    Slow,
}

impl Pace {
    pub(crate) const ALL: [Self; Self::COUNT] = [Self::Unknown, Self::Fast, Self::Slow];
    pub(crate) const COUNT: usize = 3;
}

/// Queued deliveries of cancelled replays, to be put back where they came from.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Withdrawal {
    pub(crate) endpoint: EndpointId,
    pub(crate) shard: Shard,
    pub(crate) epoch: Epoch,
    pub(crate) replays: Vec<String>,
    /// In flight or being recorded, with the numbers of these attempts.
    pub(crate) attempted: Vec<(EventId, u16)>,
}

/// The load of one endpoint, as its owner sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Activity {
    pub(crate) endpoint: EndpointId,
    pub(crate) in_flight: usize,
    pub(crate) limit: usize,
    pub(crate) waiting: usize,
    pub(crate) more_waiting: bool,
    pub(crate) oldest: Option<DateTime<Utc>>,
    pub(crate) circuit_open: bool,
}
