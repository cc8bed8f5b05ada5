//! One endpoint's lane: which of its deliveries are known here, which may be sent now. A pure state machine; time and
//! read numbers are passed in, so that it can be simulated.
//!
//! Invariants:
//! - never more than `concurrency` attempts on the wire, one while the breaker is open, two before the first answer;
//! - replays hold at most a quarter of that, and go only when nothing live could;
//! - a bounded number of ids in memory. Past it the lane is *spilled*: rows above its floor are on disk only, and are
//!   read again from there;
//! - nothing of a cancelled replay is picked while it is taken back;
//! - a delivery that is on the wire or being recorded is not taken a second time, whatever an older snapshot says;
//! - an ordered endpoint has one delivery of a key on the wire, and it is the key's first.

use std::{
    collections::{BTreeSet, HashMap, HashSet, VecDeque},
    sync::Arc,
};

use chrono::{DateTime, Utc};
use postrider_proto::{DeadReason, EndpointState, Epoch, EventId};

use crate::{
    breaker::{Breaker, Monotonic},
    endpoint::Endpoint,
    job::Job,
    rate::Rate,
    replays::withdraw::Withdrawal,
    statistics::Activity,
};

const CAPACITY_LEAST: usize = 64;
const CAPACITY_MOST: usize = 1024;
/// Replays in memory. A job keeps fewer in line; more than this, of people who replay one by one, count as live ones.
const REPLAYS_MAX: usize = 1024;
/// The part of the bulkhead that replays may hold.
pub(crate) const REPLAY_SHARE: usize = 4;
/// Live deliveries after which a replay has its turn, so that an endless backlog does not starve it.
pub(crate) const LIVE_IN_A_ROW_MAX: u8 = 16;
/// Attempts of an endpoint that has not answered yet.
const UNKNOWN_LIMIT: usize = 2;
/// Keys looked at in one read.
const KEYS_MAX: usize = 256;

/// Counts the reads of the queue. A recorded id is forgotten only after a read that began after its record.
pub(crate) type ReadNumber = u64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    OnWire,
    /// The answer is in; its record is on the way to the database.
    Recording,
    Recorded,
}

#[derive(Debug, Clone, Copy)]
struct Busy {
    /// The number of the attempt being made. A row that has this number or more is a replay, not an old copy.
    number: u16,
    key: Option<i64>,
    /// Picked as a replay. The retry of one is a retry like any other.
    replay: bool,
    /// Its row is in `queue`, as far as is known, and not in `retries`.
    queued: bool,
    stage: Stage,
}

/// Rows of the queue to read: those above the floor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refill {
    pub(crate) floor: EventId,
    pub(crate) limit: usize,
}

/// Rows of `retries` to read: the earliest, or whatever waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DueRead {
    pub(crate) limit: usize,
    pub(crate) even_later: bool,
    /// None is due before this.
    pub(crate) from: DateTime<Utc>,
}

/// What a read of `retries` brought.
#[derive(Debug, Default)]
pub(crate) struct DueRows {
    pub(crate) rows: Vec<Job>,
    /// When the first of all was due, and when the first of those that are not due yet is.
    pub(crate) first: Option<DateTime<Utc>>,
    pub(crate) later: Option<DateTime<Utc>>,
}

/// Before any retry, and after all of them.
const EARLIEST: DateTime<Utc> = DateTime::UNIX_EPOCH;
const LATEST: DateTime<Utc> = match DateTime::from_timestamp(253_402_300_799, 0) {
    Some(end_of_9999) => end_of_9999,
    None => DateTime::UNIX_EPOCH,
};

/// What is to be done with a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Deed {
    Send,
    /// The endpoint is disabled: it becomes a dead letter without an attempt.
    Bury(DeadReason),
}

/// How an attempt went, as far as the lane needs to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) success: bool,
    pub(crate) slow: bool,
    /// Whether it says anything about the endpoint. A fault of our own way out does not.
    pub(crate) its_own: bool,
}

/// What the latest answer says of the endpoint: how many places on the wire it may compete for.
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

#[derive(Debug)]
pub(crate) struct Lane {
    endpoint: Arc<Endpoint>,
    epoch: Epoch,
    fresh: VecDeque<Job>,
    due: VecDeque<Job>,
    /// Replays that are due: they wait behind everything else.
    replays: VecDeque<Job>,
    /// Of an ordered endpoint: the first deliveries of their keys.
    heads: VecDeque<Job>,
    /// Keys that may have a first delivery to send.
    look: BTreeSet<i64>,
    /// Keys with a delivery in `heads`, on the wire or being recorded.
    active: HashSet<i64>,
    turn: u8,
    /// Live ones picked since the last replay.
    live_in_a_row: u8,
    /// Rows of the queue with an id above this are on disk only.
    floor: Option<EventId>,
    /// The lowest row at or below the floor that was seen and not kept: of a key that is looked up when its turn comes, or of
    /// a replay that is being taken back.
    passed_over: Option<EventId>,
    busy: HashMap<EventId, Busy>,
    /// With when each began.
    on_wire: HashMap<EventId, Monotonic>,
    /// How many of them are replays.
    replays_on_wire: usize,
    next_due: Option<DateTime<Utc>>,
    /// The earliest due time recorded since the latest read of `retries` began: that read may not know of it.
    due_since_read: Option<DateTime<Utc>>,
    /// No row of `retries` is due before this. What came and went before it is not read over again.
    due_from: DateTime<Utc>,
    pace: Pace,
    /// It has answered, or failed, since this lane was made.
    heard: bool,
    breaker: Breaker,
    rate: Option<Rate>,
    /// The rate allows nothing before this.
    rate_at: Option<Monotonic>,
    /// Cancelled replays whose deliveries are being taken back.
    withdrawing: Vec<String>,
    /// More of them came to be in line meanwhile.
    withdraw_again: bool,
}

impl Lane {
    /// Of an endpoint with nothing that waits, as far as is known.
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
            look: BTreeSet::new(),
            active: HashSet::new(),
            turn: 0,
            live_in_a_row: 0,
            floor: None,
            passed_over: None,
            busy: HashMap::new(),
            on_wire: HashMap::new(),
            replays_on_wire: 0,
            next_due: None,
            due_since_read: None,
            due_from: LATEST,
            heard: pace != Pace::Unknown,
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

    /// Attempts under way.
    pub(crate) fn on_wire(&self) -> usize {
        self.on_wire.len()
    }

    /// Whether an attempt is under way that began before this.
    pub(crate) fn has_attempt_before(&self, instant: Monotonic) -> bool {
        self.on_wire.values().any(|began| *began < instant)
    }

    /// What it has in hand, when that is anything.
    pub(crate) fn activity(&self) -> Option<Activity> {
        let waiting = self.fresh.len() + self.due.len() + self.heads.len() + self.replays.len();
        let circuit_open = self.breaker.is_open();
        if self.is_held() || (waiting == 0 && self.on_wire.is_empty() && !circuit_open) {
            return None;
        }
        // Of first attempts: a retry or a replay is of an old event without being late.
        let first = self
            .fresh
            .iter()
            .chain(&self.heads)
            .filter(|job| job.attempt == 0);
        let oldest = first.map(|job| job.event).min();
        Some(Activity {
            endpoint: self.endpoint.id,
            in_flight: self.on_wire.len(),
            places: self.breaker.limit(self.endpoint.concurrency),
            waiting,
            more_waiting: self.floor.is_some() || !self.look.is_empty(),
            oldest: oldest.and_then(|event| DateTime::from_timestamp_millis(event.unix_ms())),
            circuit_open,
        })
    }

    /// Takes new settings. What may no longer be sent is dropped from memory; it is still in the tables.
    pub(crate) fn change(&mut self, endpoint: Arc<Endpoint>, now: DateTime<Utc>) {
        let other_way = self.endpoint.state != endpoint.state || self.endpoint.ordered != endpoint.ordered;
        // What was picked with the old settings and has not started is handed back, and goes out with the new ones.
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

    /// Paused, or deleted: nothing is read and nothing is sent.
    fn is_held(&self) -> bool {
        matches!(
            self.endpoint.state,
            EndpointState::Paused | EndpointState::Deleted
        )
    }

    fn deed(&self) -> Deed {
        match self.endpoint.state {
            EndpointState::Disabled => Deed::Bury(self.endpoint.disabled_reason),
            EndpointState::Active | EndpointState::Paused | EndpointState::Deleted => Deed::Send,
        }
    }

    /// The key that a delivery waits in line under, if this endpoint keeps order.
    fn line_of(&self, job: &Job) -> Option<i64> {
        job.key
            .filter(|_| self.endpoint.ordered && self.deed() == Deed::Send)
    }

    fn capacity(&self) -> usize {
        (self.endpoint.concurrency * 4).clamp(CAPACITY_LEAST, CAPACITY_MOST)
    }

    fn room(&self) -> usize {
        self.capacity()
            .saturating_sub(self.fresh.len() + self.heads.len() + self.look.len())
    }

    /// A row that the tail saw.
    pub(crate) fn offer(&mut self, job: Job) {
        if let Some(busy) = self
            .busy
            .get_mut(&job.event)
            .filter(|busy| job.attempt < busy.number)
        {
            // A person may have moved it here from `retries` while it was attempted.
            busy.queued = true;
            return;
        }
        if self.endpoint.state == EndpointState::Deleted {
            return;
        }
        if self.floor.is_some_and(|floor| job.event > floor) {
            return;
        }
        if self.is_withdrawn(&job) {
            return self.pass_over(job.event);
        }
        // A person asked for a waiting retry to be sent now: the copy that was read from `retries` gives way.
        if job.attempt > 0 {
            self.due.retain(|waiting| waiting.event != job.event);
        }
        match self.line_of(&job) {
            Some(key) if self.active.contains(&key) || self.look.contains(&key) => self.pass_over(job.event),
            None if job.replay.is_some() && self.replays.len() < REPLAYS_MAX => self.replays.push_back(job),
            _ if self.room() == 0 => self.lower_floor(job.event.pred()),
            Some(key) => {
                self.look.insert(key);
                self.pass_over(job.event);
            }
            None => self.fresh.push_back(job),
        }
    }

    fn pass_over(&mut self, event: EventId) {
        self.passed_over = Some(self.passed_over.map_or(event, |lowest| lowest.min(event)));
    }

    /// Below every row of the queue that is known, when there is one.
    fn below_all(&self) -> Option<EventId> {
        let waiting = self.fresh.iter().chain(&self.replays).chain(&self.heads);
        let waiting = waiting.map(|job| job.event);
        let busy = self.busy.iter().filter(|(_, busy)| busy.queued);
        let rows = waiting
            .chain(busy.map(|(event, _)| *event))
            .chain(self.passed_over);
        rows.map(EventId::pred).chain(self.floor).min()
    }

    /// The tail left out this endpoint's rows above an id.
    pub(crate) fn cut(&mut self, last: EventId) {
        self.lower_floor(last);
    }

    fn lower_floor(&mut self, floor: EventId) {
        let floor = self.floor.map_or(floor, |old| old.min(floor));
        self.floor = Some(floor);
        self.fresh.retain(|job| job.event <= floor);
        self.replays.retain(|job| job.event <= floor);
    }

    /// An older snapshot still shows a delivery that is on the wire or just recorded.
    fn is_stale(&self, job: &Job) -> bool {
        self.busy
            .get(&job.event)
            .is_some_and(|busy| job.attempt < busy.number)
    }

    /// Whether it is being taken back. Everything is read again afterwards.
    fn is_withdrawn(&self, job: &Job) -> bool {
        !self.withdrawing.is_empty()
            && job
                .replay
                .as_deref()
                .is_some_and(|replay| self.withdrawing.iter().any(|one| one == replay))
    }

    /// Lets go of what is in line of cancelled replays, and says what is to be taken back: all but what is on the wire.
    pub(crate) fn withdraw(&mut self, now: DateTime<Utc>) -> Option<Withdrawal> {
        if self.endpoint.cancelled.is_empty() {
            return None;
        }
        let under_way = !self.withdrawing.is_empty();
        self.withdrawing.clone_from(&self.endpoint.cancelled);
        self.reload(now);
        if under_way {
            self.withdraw_again = true;
            return None;
        }
        let busy = self.busy.iter();
        let attempted = busy.filter(|(_, busy)| busy.stage != Stage::Recorded);
        Some(Withdrawal {
            endpoint: self.endpoint.id,
            shard: self.endpoint.shard,
            epoch: self.epoch,
            replays: self.withdrawing.clone(),
            attempted: attempted.map(|(event, busy)| (*event, busy.number)).collect(),
        })
    }

    /// They are where they were, and no read that is still to be applied can show them in line.
    pub(crate) fn withdrawn(&mut self, now: DateTime<Utc>) -> Option<Withdrawal> {
        self.withdrawing.clear();
        // A retry that goes back is due when it was.
        self.search_retries();
        if std::mem::take(&mut self.withdraw_again) {
            return self.withdraw(now);
        }
        self.reload(now);
        None
    }

    /// What to read from the queue, when the lane is spilled and half empty.
    pub(crate) fn wants_refill(&self) -> Option<Refill> {
        let floor = self.floor.filter(|_| !self.is_held())?;
        let room = self.room();
        (room * 2 > self.capacity()).then_some(Refill { floor, limit: room })
    }

    /// The rows of a refill, ascending, from a snapshot whose tail was applied before.
    pub(crate) fn refilled(&mut self, asked: Refill, rows: Vec<Job>) {
        // The tail of the same read may have lowered the floor: then these rows begin in the wrong place.
        if self.floor != Some(asked.floor) || self.is_held() {
            return;
        }
        self.floor = match rows.last() {
            Some(last) if rows.len() >= asked.limit => Some(last.event),
            _ => None,
        };
        for job in rows {
            self.offer(job);
        }
    }

    /// Whether keys wait to have their first delivery looked up.
    pub(crate) fn wants_keys(&self) -> bool {
        !self.look.is_empty() && !self.is_held() && self.heads.len() * 2 <= self.capacity()
    }

    /// A read of these keys begins now. They are no longer marked: whatever happens to one from here on, which the read
    /// may not see, marks it again.
    pub(crate) fn key_read_begins(&mut self) -> Vec<i64> {
        let keys: Vec<i64> = self.look.iter().copied().take(KEYS_MAX).collect();
        self.look.retain(|key| keys.binary_search(key).is_err());
        keys
    }

    /// The read did not take place.
    pub(crate) fn look_again(&mut self, keys: Vec<i64>) {
        self.look.extend(keys);
    }

    /// The first deliveries of the keys asked for, where they are fresh. A key whose first one is a retry is not among
    /// them: that one comes when it is due, and the key is looked at again when it has ended.
    pub(crate) fn keys_read(&mut self, heads: Vec<Job>) {
        for job in heads {
            let Some(key) = self.line_of(&job) else { continue };
            if self.is_withdrawn(&job) {
                continue;
            }
            if self.is_stale(&job) {
                self.look.insert(key);
            } else if !self.is_held() && self.active.insert(key) {
                self.heads.push_back(job);
            }
        }
    }

    /// Which rows of `retries` to read, when some are due and there is room for them.
    pub(crate) fn wants_due(&self, now: DateTime<Utc>) -> Option<DueRead> {
        let even_later = self.deed() != Deed::Send;
        let due = self.next_due.is_some_and(|at| at <= now || even_later);
        let room = self.capacity().saturating_sub(self.due.len());
        let limit = room + self.due.len() + self.busy.len();
        let asked = DueRead {
            limit,
            even_later,
            from: self.due_from,
        };
        (due && !self.is_held() && room * 2 > self.capacity()).then_some(asked)
    }

    /// When `retries` are to be read again; not while there is no room for what is due.
    pub(crate) fn next_due(&self) -> Option<DateTime<Utc>> {
        let due = self.next_due?;
        self.wants_due(due).map(|_| due)
    }

    /// A read of `retries` begins now.
    pub(crate) fn due_read_begins(&mut self) {
        self.due_since_read = None;
    }

    /// The rows of `retries` that were asked for. Those that are being attempted are among them, so that nothing waits before
    /// the first but what was recorded meanwhile.
    pub(crate) fn due_read(&mut self, DueRows { rows, first, later }: DueRows) {
        let earliest = |a: Option<DateTime<Utc>>, b: Option<DateTime<Utc>>| a.into_iter().chain(b).min();
        self.next_due = earliest(later, self.due_since_read);
        self.due_from = earliest(first, self.due_since_read).unwrap_or(LATEST);
        if self.is_held() {
            return;
        }
        let waiting: HashSet<EventId> = self.due.iter().map(|job| job.event).collect();
        for job in rows {
            if !self.is_stale(&job) && !waiting.contains(&job.event) {
                self.due.push_back(job);
            }
        }
    }

    fn limit(&self) -> usize {
        let limit = self.breaker.limit(self.endpoint.concurrency);
        if self.heard {
            limit
        } else {
            limit.min(UNKNOWN_LIMIT)
        }
    }

    pub(crate) fn has_live(&self) -> bool {
        !(self.fresh.is_empty() && self.due.is_empty() && self.heads.is_empty())
    }

    fn has_jobs(&self) -> bool {
        self.has_live() || !self.replays.is_empty()
    }

    /// Whether a replay may have a place on the wire.
    fn has_room_for_replays(&self) -> bool {
        self.replays_on_wire < (self.limit() / REPLAY_SHARE).max(1)
    }

    /// Whether there is something that its own limits let go.
    fn has_pickable(&self) -> bool {
        self.has_live() || !self.replays.is_empty() && self.has_room_for_replays()
    }

    /// Whether a delivery could be picked now.
    pub(crate) fn is_ready(&self, now: Monotonic) -> bool {
        match self.deed() {
            _ if self.is_held() || !self.has_jobs() => false,
            Deed::Bury(_) => true,
            Deed::Send => {
                self.has_pickable()
                    && self.on_wire.len() < self.limit()
                    && self.not_before().is_none_or(|at| at <= now)
            }
        }
    }

    /// When a delivery that waits only for time may be picked.
    pub(crate) fn ready_at(&self) -> Option<Monotonic> {
        let waits = !self.is_held() && self.has_pickable() && self.on_wire.len() < self.limit();
        self.not_before().filter(|_| waits)
    }

    fn not_before(&self) -> Option<Monotonic> {
        self.rate_at.max(self.breaker.not_before())
    }

    /// Takes a delivery: first ones of keys, fresh ones and due retries in turn, replays behind them.
    pub(crate) fn pick(&mut self, now: Monotonic) -> Option<(Job, Deed)> {
        while self.is_ready(now) {
            let deed = self.deed();
            if deed == Deed::Send
                && let Some(Err(at)) = self.rate.as_ref().map(|rate| rate.take(now))
            {
                self.rate_at = Some(at);
                return None;
            }
            let (job, replay) = self.next_in_turn()?;
            let key = self.line_of(&job);
            if self.is_stale(&job) {
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
            let stage = if deed == Deed::Send {
                Stage::OnWire
            } else {
                Stage::Recording
            };
            let before = self.busy.insert(
                job.event,
                Busy {
                    number: job.number(),
                    key,
                    replay,
                    queued: job.step == 0,
                    stage,
                },
            );
            // Replayed before we heard that it was recorded: what we hear then is of no attempt we know.
            if let Some(before) = before.filter(|before| before.stage != Stage::Recorded) {
                self.leave_line(before.key.filter(|_| before.key != key));
            }
            if stage == Stage::OnWire {
                self.on_wire.insert(job.event, now);
                self.replays_on_wire += usize::from(replay);
            }
            return Some((job, deed));
        }
        None
    }

    /// And whether it is taken as a replay.
    fn next_in_turn(&mut self) -> Option<(Job, bool)> {
        let replay_is_due = self.live_in_a_row >= LIVE_IN_A_ROW_MAX || !self.has_live();
        let may_replay = self.has_room_for_replays() || self.deed() != Deed::Send;
        if replay_is_due
            && may_replay
            && let Some(job) = self.replays.pop_front()
        {
            return Some((job, true));
        }
        for _ in 0..3 {
            self.turn = (self.turn + 1) % 3;
            let job = match self.turn {
                0 => self.heads.pop_front(),
                1 => self.fresh.pop_front(),
                _ => self.due.pop_front(),
            };
            if let Some(job) = job {
                return Some((job, false));
            }
        }
        None
    }

    /// The answer is in and on its way to be recorded.
    pub(crate) fn answered(&mut self, event: EventId, number: u16, verdict: Verdict, now: Monotonic) {
        if let Some(busy) = self.busy.get_mut(&event)
            && busy.number == number
            && busy.stage == Stage::OnWire
        {
            busy.stage = Stage::Recording;
            let replay = busy.replay;
            self.leave_wire(event, replay);
        }
        if !verdict.its_own {
            return;
        }
        self.heard = true;
        self.pace = if verdict.success && !verdict.slow {
            Pace::Fast
        } else {
            Pace::Slow
        };
        if verdict.success {
            self.breaker.succeeded();
        } else {
            self.breaker.failed(now);
        }
    }

    /// An attempt takes long. Known before its answer is, so that what follows it has no place among the fast.
    pub(crate) fn slowed(&mut self) {
        self.pace = Pace::Slow;
    }

    /// The attempt was given up before it began or without an answer: the delivery is read from the tables again.
    pub(crate) fn handed_back(&mut self, event: EventId, number: u16, now: DateTime<Utc>) {
        if let Some(busy) = self.busy.get(&event).copied()
            && busy.number == number
        {
            if busy.stage == Stage::OnWire {
                self.leave_wire(event, busy.replay);
            }
            self.busy.remove(&event);
            self.leave_line(busy.key);
            if busy.queued {
                self.lower_floor(event.pred());
            }
            self.next_due = Some(now);
        }
    }

    /// The record is committed; `due` is when the next attempt is. The id stays known until [`forget`](Self::forget).
    pub(crate) fn recorded(&mut self, event: EventId, number: u16, due: Option<DateTime<Utc>>) {
        if let Some(busy) = self.busy.get_mut(&event)
            && busy.number == number
        {
            busy.stage = Stage::Recorded;
            let key = busy.key;
            self.leave_line(key);
        }
        if let Some(due) = due {
            self.expect_due(due);
            self.due_since_read = Some(self.due_since_read.map_or(due, |at| at.min(due)));
        }
    }

    fn leave_wire(&mut self, event: EventId, replay: bool) {
        if self.on_wire.remove(&event).is_some() && replay {
            self.replays_on_wire = self.replays_on_wire.saturating_sub(1);
        }
    }

    /// The one behind in the same line may be first now.
    fn leave_line(&mut self, key: Option<i64>) {
        if let Some(key) = key {
            self.active.remove(&key);
            self.look.insert(key);
        }
    }

    /// A read that began after the record has been applied: no older copy can come any more.
    pub(crate) fn forget(&mut self, event: EventId, number: u16) {
        if self
            .busy
            .get(&event)
            .is_some_and(|busy| busy.number == number && busy.stage == Stage::Recorded)
        {
            self.busy.remove(&event);
            self.forget_passed_over();
        }
    }

    /// Nothing on the wire and nothing being recorded.
    pub(crate) fn is_drained(&self) -> bool {
        self.busy.values().all(|busy| busy.stage == Stage::Recorded)
    }

    /// Nothing here and nothing on disk that this lane would have to remember.
    pub(crate) fn is_idle(&self) -> bool {
        self.floor.is_none()
            && self.next_due.is_none()
            && !self.has_jobs()
            && self.look.is_empty()
            && self.busy.is_empty()
    }

    /// Nothing waits and nothing is under way: what was passed over has gone with the keys it belonged to.
    fn forget_passed_over(&mut self) {
        if self.is_idle() {
            self.passed_over = None;
        }
    }

    /// Nobody knows what became of a result: its row may be among the retries, due whenever.
    pub(crate) fn search_retries(&mut self) {
        self.due_from = EARLIEST;
        // Also when a read is under way that began further up.
        self.due_since_read = Some(EARLIEST);
    }

    /// Everything is read again, from the lowest row that is known; what is on the wire or being recorded stays known.
    pub(crate) fn reload(&mut self, now: DateTime<Utc>) {
        if let Some(floor) = self.below_all() {
            self.lower_floor(floor);
        }
        self.passed_over = None;
        self.due.clear();
        self.heads.clear();
        self.look.clear();
        self.active = self
            .busy
            .values()
            .filter(|busy| busy.stage != Stage::Recorded)
            .filter_map(|busy| busy.key)
            .collect();
        self.next_due = Some(now);
    }
}
