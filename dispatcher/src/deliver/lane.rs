//! One endpoint's lane: which of its deliveries are in memory and which may be sent now. A pure state machine; time
//! and read numbers are passed in, so that it can be simulated.
//!
//! Invariants:
//! - never more than `concurrency` attempts in flight, one while the breaker is open, two before the first response;
//! - replays use at most a quarter of that, and are sent only when no live delivery could be;
//! - a bounded number of ids in memory. Beyond it the lane is *spilled*: rows above its floor are on disk only and
//!   are read again from there;
//! - nothing of a cancelled replay is picked while the replay is being withdrawn;
//! - a delivery that is in flight or being recorded is not picked a second time, whatever an older snapshot says;
//! - an ordered endpoint has one delivery per key in flight, and it is the key's first.

mod rows;
mod types;

use std::{
    collections::{BTreeSet, HashMap, HashSet, VecDeque},
    sync::Arc,
};

use chrono::{DateTime, Utc};
use postrider_proto::{EndpointState, Epoch, EventId};

use crate::deliver::{
    breaker::{Breaker, Monotonic},
    endpoint::Endpoint,
    queued_delivery::QueuedDelivery,
    rate::Rate,
};

pub(crate) use types::{
    Action, Activity, AttemptResult, DueRead, DueRows, Pace, ReadNumber, Refill, Withdrawal,
};
use types::{Busy, EARLIEST, LATEST, Stage};

const BUFFER_LEAST: usize = 64;
const BUFFER_MOST: usize = 1024;
/// Replays in memory. Bulk replays queue fewer; single replays beyond this count as live deliveries.
const REPLAYS_MAX: usize = 1024;
/// The fraction of the bulkhead that replays may use.
pub(crate) const REPLAY_SHARE: usize = 4;
/// Live deliveries after which a replay has its turn, so that an endless backlog does not starve it.
pub(crate) const LIVE_IN_A_ROW_MAX: u8 = 16;
/// Attempts in flight for an endpoint that has not responded yet.
const UNKNOWN_LIMIT: usize = 2;
/// Keys looked up in one read.
const KEYS_MAX: usize = 256;

#[derive(Debug)]
pub(crate) struct Lane {
    endpoint: Arc<Endpoint>,
    epoch: Epoch,
    fresh: VecDeque<QueuedDelivery>,
    due: VecDeque<QueuedDelivery>,
    /// Due replays, sent after everything else.
    replays: VecDeque<QueuedDelivery>,
    /// Ordered endpoints: the first delivery of each key.
    heads: VecDeque<QueuedDelivery>,
    /// Keys whose first delivery has to be looked up.
    key_lookups: BTreeSet<i64>,
    /// Keys with a delivery in `heads`, in flight or being recorded.
    active: HashSet<i64>,
    turn: u8,
    /// Live deliveries picked since the last replay.
    live_in_a_row: u8,
    /// Rows of the queue with an id above this are on disk only.
    floor: Option<EventId>,
    /// The lowest row at or below the floor that was seen and not kept: its key is looked up later, or its replay is
    /// being withdrawn.
    lowest_skipped: Option<EventId>,
    busy: HashMap<EventId, Busy>,
    /// With the start of each attempt.
    in_flight: HashMap<EventId, Monotonic>,
    /// How many of them are replays.
    replays_in_flight: usize,
    next_due: Option<DateTime<Utc>>,
    /// The earliest due time recorded since the latest read of `retries` began, which may not have seen it.
    due_since_read: Option<DateTime<Utc>>,
    /// No row of `retries` is due before this, so that dead rows before it are not scanned again.
    due_from: DateTime<Utc>,
    pace: Pace,
    /// It has responded or failed since this lane was created.
    has_responded: bool,
    breaker: Breaker,
    rate: Option<Rate>,
    /// The rate limit allows nothing before this.
    rate_at: Option<Monotonic>,
    /// Cancelled replays whose deliveries are being withdrawn.
    withdrawing: Vec<String>,
    /// Another replay was cancelled during the withdrawal.
    withdraw_again: bool,
}

impl Lane {
    /// A lane without any known pending delivery.
    pub(crate) fn new(endpoint: Arc<Endpoint>, epoch: Epoch) -> Self {
        let (breaker, pace) = if endpoint.was_failing {
            (Breaker::opened(), Pace::Slow)
        } else {
            (Breaker::default(), Pace::Unknown)
        };
        Self {
            rate: endpoint.rate_per_second.map(Rate::new),
            endpoint,
            epoch,
            fresh: VecDeque::new(),
            due: VecDeque::new(),
            replays: VecDeque::new(),
            heads: VecDeque::new(),
            key_lookups: BTreeSet::new(),
            active: HashSet::new(),
            turn: 0,
            live_in_a_row: 0,
            floor: None,
            lowest_skipped: None,
            busy: HashMap::new(),
            in_flight: HashMap::new(),
            replays_in_flight: 0,
            next_due: None,
            due_since_read: None,
            due_from: LATEST,
            has_responded: pace != Pace::Unknown,
            pace,
            breaker,
            rate_at: None,
            withdrawing: Vec::new(),
            withdraw_again: false,
        }
    }

    /// Rows that no tail will show were found: the lowest in the queue, and the earliest retry.
    pub(crate) fn found(&mut self, first: Option<EventId>, next_due: Option<DateTime<Utc>>) {
        if let Some(first) = first {
            self.lower_floor(first.pred());
        }
        if let Some(due) = next_due {
            self.expect_due(due);
        }
    }

    fn expect_due(&mut self, due: DateTime<Utc>) {
        self.next_due = Some(self.next_due.map_or(due, |at| at.min(due)));
        self.due_from = self.due_from.min(due);
    }

    pub(crate) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    pub(crate) fn epoch(&self) -> Epoch {
        self.epoch
    }

    pub(crate) fn pace(&self) -> Pace {
        self.pace
    }

    /// Attempts in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether an attempt in flight began before this.
    pub(crate) fn has_attempt_before(&self, instant: Monotonic) -> bool {
        self.in_flight.values().any(|began| *began < instant)
    }

    /// The current load, if there is any.
    pub(crate) fn activity(&self) -> Option<Activity> {
        let waiting = self.fresh.len() + self.due.len() + self.heads.len() + self.replays.len();
        let circuit_open = self.breaker.is_open();
        if self.is_paused() || (waiting == 0 && self.in_flight.is_empty() && !circuit_open) {
            return None;
        }
        // First attempts only: a retry or a replay of an old event is not late.
        let first = self
            .fresh
            .iter()
            .chain(&self.heads)
            .filter(|delivery| delivery.attempt == 0);
        let oldest = first.map(|delivery| delivery.event).min();
        Some(Activity {
            endpoint: self.endpoint.id,
            in_flight: self.in_flight.len(),
            limit: self.breaker.limit(self.endpoint.concurrency),
            waiting,
            more_waiting: self.floor.is_some() || !self.key_lookups.is_empty(),
            oldest: oldest.and_then(|event| DateTime::from_timestamp_millis(event.unix_ms())),
            circuit_open,
        })
    }

    /// Applies new settings. Deliveries that may no longer be sent are dropped from memory; they remain in the
    /// tables.
    pub(crate) fn change(&mut self, endpoint: Arc<Endpoint>, now: DateTime<Utc>) {
        let other_way = self.endpoint.state != endpoint.state || self.endpoint.ordered != endpoint.ordered;
        // Deliveries picked with the old settings that have not started are handed back and sent with the new ones.
        self.endpoint.stop();
        if endpoint.state == EndpointState::Active && self.endpoint.state != EndpointState::Active {
            self.breaker = Breaker::default();
        }
        if self.rate.as_ref().map(Rate::per_second) != endpoint.rate_per_second {
            self.rate = endpoint.rate_per_second.map(Rate::new);
            self.rate_at = None;
        }
        self.endpoint = endpoint;
        if other_way {
            self.reload(now);
        }
    }

    /// Paused or deleted: nothing is read and nothing is sent.
    fn is_paused(&self) -> bool {
        matches!(
            self.endpoint.state,
            EndpointState::Paused | EndpointState::Deleted
        )
    }

    fn action(&self) -> Action {
        match self.endpoint.state {
            EndpointState::Disabled => Action::DeadLetter(self.endpoint.disabled_reason),
            EndpointState::Active | EndpointState::Paused | EndpointState::Deleted => Action::Send,
        }
    }

    /// The ordering key of a delivery, if this endpoint is ordered.
    fn ordering_key_of(&self, delivery: &QueuedDelivery) -> Option<i64> {
        delivery
            .key
            .filter(|_| self.endpoint.ordered && self.action() == Action::Send)
    }

    fn buffer_size(&self) -> usize {
        (self.endpoint.concurrency * 4).clamp(BUFFER_LEAST, BUFFER_MOST)
    }

    fn free_slots(&self) -> usize {
        self.buffer_size()
            .saturating_sub(self.fresh.len() + self.heads.len() + self.key_lookups.len())
    }

    fn limit(&self) -> usize {
        let limit = self.breaker.limit(self.endpoint.concurrency);
        if self.has_responded {
            limit
        } else {
            limit.min(UNKNOWN_LIMIT)
        }
    }

    pub(crate) fn has_live(&self) -> bool {
        !(self.fresh.is_empty() && self.due.is_empty() && self.heads.is_empty())
    }

    fn has_deliveries(&self) -> bool {
        self.has_live() || !self.replays.is_empty()
    }

    /// Whether a replay may start.
    fn has_room_for_replays(&self) -> bool {
        self.replays_in_flight < (self.limit() / REPLAY_SHARE).max(1)
    }

    /// Whether there is a delivery that the lane's own limits allow.
    fn has_pickable(&self) -> bool {
        self.has_live() || !self.replays.is_empty() && self.has_room_for_replays()
    }

    /// Whether a delivery could be picked now.
    pub(crate) fn is_ready(&self, now: Monotonic) -> bool {
        match self.action() {
            _ if self.is_paused() || !self.has_deliveries() => false,
            Action::DeadLetter(_) => true,
            Action::Send => {
                self.has_pickable()
                    && self.in_flight.len() < self.limit()
                    && self.not_before().is_none_or(|at| at <= now)
            }
        }
    }

    /// When a delivery that waits only for time may be picked.
    pub(crate) fn ready_at(&self) -> Option<Monotonic> {
        let waits = !self.is_paused() && self.has_pickable() && self.in_flight.len() < self.limit();
        self.not_before().filter(|_| waits)
    }

    fn not_before(&self) -> Option<Monotonic> {
        self.rate_at.max(self.breaker.not_before())
    }

    /// Picks a delivery: the first delivery of a key, fresh deliveries and due retries in turn, replays after them.
    pub(crate) fn pick(&mut self, now: Monotonic) -> Option<(QueuedDelivery, Action)> {
        while self.is_ready(now) {
            let action = self.action();
            if action == Action::Send
                && let Some(Err(at)) = self.rate.as_ref().map(|rate| rate.take(now))
            {
                self.rate_at = Some(at);
                return None;
            }
            let (delivery, replay) = self.next_in_turn()?;
            let key = self.ordering_key_of(&delivery);
            if self.is_stale(&delivery) {
                continue;
            }
            self.live_in_a_row = if replay {
                0
            } else {
                self.live_in_a_row.saturating_add(1)
            };
            if let Some(key) = key {
                self.active.insert(key);
            }
            let stage = if action == Action::Send {
                Stage::InFlight
            } else {
                Stage::Recording
            };
            let before = self.busy.insert(
                delivery.event,
                Busy {
                    number: delivery.number(),
                    key,
                    replay,
                    queued: delivery.step == 0,
                    stage,
                },
            );
            // Replayed before its record was reported; the late report will match no known attempt.
            if let Some(before) = before.filter(|before| before.stage != Stage::Recorded) {
                self.release_key(before.key.filter(|_| before.key != key));
            }
            if stage == Stage::InFlight {
                self.in_flight.insert(delivery.event, now);
                self.replays_in_flight += usize::from(replay);
            }
            return Some((delivery, action));
        }
        None
    }

    /// Also returns whether it counts as a replay.
    fn next_in_turn(&mut self) -> Option<(QueuedDelivery, bool)> {
        let replay_is_due = self.live_in_a_row >= LIVE_IN_A_ROW_MAX || !self.has_live();
        let may_replay = self.has_room_for_replays() || self.action() != Action::Send;
        if replay_is_due
            && may_replay
            && let Some(delivery) = self.replays.pop_front()
        {
            return Some((delivery, true));
        }
        for _ in 0..3 {
            self.turn = (self.turn + 1) % 3;
            let delivery = match self.turn {
                0 => self.heads.pop_front(),
                1 => self.fresh.pop_front(),
                _ => self.due.pop_front(),
            };
            if let Some(delivery) = delivery {
                return Some((delivery, false));
            }
        }
        None
    }

    /// The response is in and about to be recorded.
    pub(crate) fn attempt_ended(
        &mut self,
        event: EventId,
        number: u16,
        result: AttemptResult,
        now: Monotonic,
    ) {
        if let Some(busy) = self.busy.get_mut(&event)
            && busy.number == number
            && busy.stage == Stage::InFlight
        {
            busy.stage = Stage::Recording;
            let replay = busy.replay;
            self.leave_flight(event, replay);
        }
        if !result.about_endpoint {
            return;
        }
        self.has_responded = true;
        self.pace = if result.success && !result.slow {
            Pace::Fast
        } else {
            Pace::Slow
        };
        if result.success {
            self.breaker.succeeded();
        } else {
            self.breaker.failed(now);
        }
    }

    /// An attempt takes long. Known before its response, so that the next ones do not use fast capacity.
    pub(crate) fn slowed(&mut self) {
        self.pace = Pace::Slow;
    }

    /// The attempt was abandoned before it began or without a result: the delivery is read from the tables again.
    pub(crate) fn handed_back(&mut self, event: EventId, number: u16, now: DateTime<Utc>) {
        if let Some(busy) = self.busy.get(&event).copied()
            && busy.number == number
        {
            if busy.stage == Stage::InFlight {
                self.leave_flight(event, busy.replay);
            }
            self.busy.remove(&event);
            self.release_key(busy.key);
            if busy.queued {
                self.lower_floor(event.pred());
            }
            self.next_due = Some(now);
        }
    }

    /// The record is committed; `due` is the time of the next attempt. The id stays known until
    /// [`forget`](Self::forget).
    pub(crate) fn recorded(&mut self, event: EventId, number: u16, due: Option<DateTime<Utc>>) {
        if let Some(busy) = self.busy.get_mut(&event)
            && busy.number == number
        {
            busy.stage = Stage::Recorded;
            let key = busy.key;
            self.release_key(key);
        }
        if let Some(due) = due {
            self.expect_due(due);
            self.due_since_read = Some(self.due_since_read.map_or(due, |at| at.min(due)));
        }
    }

    fn leave_flight(&mut self, event: EventId, replay: bool) {
        if self.in_flight.remove(&event).is_some() && replay {
            self.replays_in_flight = self.replays_in_flight.saturating_sub(1);
        }
    }

    /// The next delivery of the same key may be first now.
    fn release_key(&mut self, key: Option<i64>) {
        if let Some(key) = key {
            self.active.remove(&key);
            self.key_lookups.insert(key);
        }
    }

    /// A read that began after the record has been applied: no older copy can appear any more.
    pub(crate) fn forget(&mut self, event: EventId, number: u16) {
        if self
            .busy
            .get(&event)
            .is_some_and(|busy| busy.number == number && busy.stage == Stage::Recorded)
        {
            self.busy.remove(&event);
            self.forget_skipped();
        }
    }

    /// Nothing in flight and nothing being recorded.
    pub(crate) fn is_drained(&self) -> bool {
        self.busy.values().all(|busy| busy.stage == Stage::Recorded)
    }

    /// Sends nothing any more, but has an attempt in flight or unrecorded.
    pub(crate) fn is_ending(&self) -> bool {
        self.is_paused() && !self.is_drained()
    }

    /// Nothing in memory, and nothing known on disk.
    pub(crate) fn is_idle(&self) -> bool {
        self.floor.is_none()
            && self.next_due.is_none()
            && !self.has_deliveries()
            && self.key_lookups.is_empty()
            && self.busy.is_empty()
    }

    /// Nothing is pending or in flight: the skipped rows are gone with the keys they belonged to.
    fn forget_skipped(&mut self) {
        if self.is_idle() {
            self.lowest_skipped = None;
        }
    }
}
