//! What a run leaves behind, as plain data: what the producers know, what the receivers saw, what was done to whom, and
//! what the database holds at the end. The checker judges this and nothing else, so that it can be judged itself.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use bytes::Bytes;

/// Since the run began.
pub(crate) type Moment = Duration;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Timeline(Instant);

impl Timeline {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    pub(crate) fn now(self) -> Moment {
        self.0.elapsed()
    }
}

/// What every event carries in its data: the name by which producers, receivers and the database speak of it.
pub(crate) type Mark = String;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The commit was acknowledged, and the journal has it on disk.
    Committed,
    /// Rolled back, or never asked to commit.
    RolledBack,
    /// Asked to commit; the answer was lost.
    Unknown,
}

#[derive(Debug, Clone)]
pub(crate) struct Emitted {
    pub(crate) mark: Mark,
    pub(crate) tenant: &'static str,
    pub(crate) type_name: &'static str,
}

/// Events that are there together or not at all.
#[derive(Debug, Clone)]
pub(crate) struct Transaction {
    pub(crate) events: Vec<Emitted>,
    pub(crate) outcome: Outcome,
    pub(crate) began: Moment,
    pub(crate) ended: Moment,
}

#[derive(Debug, Clone)]
pub(crate) struct SecretLife {
    pub(crate) secret: String,
    /// When it was asked for, and when the answer said that it is in effect; none when the answer was lost.
    pub(crate) asked: Moment,
    pub(crate) in_effect: Option<Moment>,
    /// From when on it may sign no more, by the clock of the day; none while it is current.
    pub(crate) retires_unix: Option<i64>,
}

#[derive(Debug, Clone)]
pub(crate) struct EndpointLife {
    pub(crate) id: String,
    pub(crate) tenant: &'static str,
    pub(crate) types: &'static str,
    pub(crate) ordered: bool,
    pub(crate) standard: bool,
    pub(crate) bulkhead: usize,
    /// When it was asked for and when it was there.
    pub(crate) made: (Moment, Moment),
    /// When its deletion was asked for, and when it was confirmed.
    pub(crate) deleted: Option<(Moment, Option<Moment>)>,
    /// From a confirmed pause to the request to go on.
    pub(crate) pauses: Vec<(Moment, Moment)>,
    /// The newest last.
    pub(crate) secrets: Vec<SecretLife>,
}

impl EndpointLife {
    pub(crate) fn wants(&self, event: &Emitted) -> bool {
        let pattern = self.types.strip_suffix('*');
        let of_type = pattern.map_or(self.types == event.type_name, |start| {
            event.type_name.starts_with(start)
        });
        self.tenant == event.tenant && of_type
    }
}

/// One request as a receiver saw it.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    /// Place in the list of endpoints.
    pub(crate) endpoint: usize,
    pub(crate) mark: Mark,
    pub(crate) event_id: String,
    pub(crate) sequence: Option<(String, i64)>,
    pub(crate) body: Bytes,
    pub(crate) signature: String,
    pub(crate) timestamp: String,
    pub(crate) replay: bool,
    pub(crate) at: Moment,
    pub(crate) unix: i64,
    /// When it was answered, or its sender went away.
    pub(crate) ended: Moment,
    pub(crate) status: Option<u16>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Harm {
    /// A dispatcher died with what it had on the wire and what it had not recorded.
    Death,
    /// A dispatcher slept: its sockets stayed open.
    Sleep,
    /// A dispatcher could not reach its database.
    Outage,
    /// A shard was taken from its owner without asking.
    Robbery,
    /// Nothing that may repeat a request.
    None,
}

/// Something that was done, from when to when.
#[derive(Debug, Clone)]
pub(crate) struct Spell {
    pub(crate) what: String,
    pub(crate) kind: &'static str,
    pub(crate) harm: Harm,
    /// Whether it is done to the installation itself, so that deliveries of everybody may be late for it.
    pub(crate) disturbs: bool,
    pub(crate) from: Moment,
    pub(crate) to: Moment,
}

#[derive(Debug, Clone)]
pub(crate) struct StoredAttempt {
    pub(crate) number: i16,
    pub(crate) status: Option<u16>,
    pub(crate) signature: Option<String>,
    /// `delivered` or `dead` on the one that ended the delivery.
    pub(crate) ended: Option<String>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct StoredDelivery {
    pub(crate) queued: bool,
    pub(crate) waiting: bool,
    pub(crate) dead_letter: bool,
    pub(crate) replays: usize,
    pub(crate) attempts: Vec<StoredAttempt>,
}

/// The database at the end. Deliveries by mark and endpoint.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stored {
    pub(crate) bodies: HashMap<Mark, Vec<u8>>,
    pub(crate) deliveries: HashMap<(Mark, usize), StoredDelivery>,
    /// A line for each bulk replay that has not done what it was asked for.
    pub(crate) unfinished_replays: Vec<String>,
    /// Marks that more than one event has, and how many.
    pub(crate) copies: HashMap<Mark, usize>,
}

/// Something that a tenant asked for that does no harm, to see how soon it is done.
#[derive(Debug, Clone)]
pub(crate) struct Probe {
    pub(crate) kind: &'static str,
    pub(crate) mark: Mark,
    /// Place in the list of endpoints.
    pub(crate) endpoint: usize,
    pub(crate) replay: bool,
    pub(crate) asked: Moment,
}

#[derive(Debug, Clone)]
pub(crate) struct History {
    pub(crate) transactions: Vec<Transaction>,
    pub(crate) endpoints: Vec<EndpointLife>,
    pub(crate) requests: Vec<Request>,
    pub(crate) spells: Vec<Spell>,
    pub(crate) stored: Stored,
    pub(crate) probes: Vec<Probe>,
    /// What still waits although everything was healed; of every tenant, the bad ones too.
    pub(crate) undrained: Option<String>,
    /// Lines of the processes' logs that must not be there.
    pub(crate) alarms: Vec<String>,
    /// Whether what was never acknowledged may have been seen, and be gone: on a server that another has replaced.
    pub(crate) loses_unacknowledged: bool,
}
