//! One endpoint's lane: which of its deliveries are known here, which may be sent now. A pure state machine; time and
//! read numbers are passed in, so that it can be simulated.
//!
//! Invariants:
//! - never more than `concurrency` attempts on the wire;
//! - a bounded number of ids in memory. Past it the lane is *spilled*: rows above its floor are on disk only, and are
//!   read again from there;
//! - a delivery that is on the wire or being recorded is not taken a second time, whatever an older snapshot says.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use chrono::{DateTime, Utc};
use postrider_proto::{EndpointState, Epoch, EventId};

use crate::{endpoint::Endpoint, job::Job};

const CAPACITY_LEAST: usize = 64;
const CAPACITY_MOST: usize = 1024;

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
    stage: Stage,
}

/// Rows of the queue to read: those above the floor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refill {
    pub(crate) floor: EventId,
    pub(crate) limit: usize,
}

#[derive(Debug)]
pub(crate) struct Lane {
    endpoint: Arc<Endpoint>,
    epoch: Epoch,
    fresh: VecDeque<Job>,
    due: VecDeque<Job>,
    /// Rows of the queue with an id above this are on disk only.
    floor: Option<EventId>,
    busy: HashMap<EventId, Busy>,
    on_wire: usize,
    next_due: Option<DateTime<Utc>>,
    /// The earliest due time recorded since the latest read of `retries` began: that read may not know of it.
    due_since_read: Option<DateTime<Utc>>,
    due_next: bool,
}

impl Lane {
    /// `spilled` when the queue holds rows of it that no tail will show.
    pub(crate) fn new(
        endpoint: Arc<Endpoint>,
        epoch: Epoch,
        spilled: bool,
        next_due: Option<DateTime<Utc>>,
    ) -> Self {
        let mut lane = Self {
            endpoint,
            epoch,
            fresh: VecDeque::new(),
            due: VecDeque::new(),
            floor: spilled.then_some(EventId::LOWEST),
            busy: HashMap::new(),
            on_wire: 0,
            next_due,
            due_since_read: None,
            due_next: false,
        };
        lane.stop_unless_active();
        lane
    }

    pub(crate) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    pub(crate) fn epoch(&self) -> Epoch {
        self.epoch
    }

    pub(crate) fn on_wire(&self) -> usize {
        self.on_wire
    }

    /// Takes new settings. What may no longer be sent is dropped from memory; it is still in the tables.
    pub(crate) fn change(&mut self, endpoint: Arc<Endpoint>, now: DateTime<Utc>) {
        let resumed = self.endpoint.state != EndpointState::Active && endpoint.state == EndpointState::Active;
        if endpoint.state != EndpointState::Active {
            self.endpoint.stop();
        }
        self.endpoint = endpoint;
        self.stop_unless_active();
        if resumed {
            self.next_due = Some(now);
        }
    }

    fn stop_unless_active(&mut self) {
        if !self.is_active() {
            self.fresh.clear();
            self.due.clear();
            self.floor = Some(EventId::LOWEST);
        }
    }

    fn is_active(&self) -> bool {
        self.endpoint.state == EndpointState::Active
    }

    fn capacity(&self) -> usize {
        (self.endpoint.concurrency * 4).clamp(CAPACITY_LEAST, CAPACITY_MOST)
    }

    /// A row that the tail saw.
    pub(crate) fn offer(&mut self, job: Job) {
        if self.floor.is_some_and(|floor| job.event > floor) || self.is_stale(&job) {
            return;
        }
        // A person asked for a waiting retry to be sent now: the copy that was read from `retries` gives way.
        if job.attempt > 0 {
            self.due.retain(|waiting| waiting.event != job.event);
        }
        if self.fresh.len() < self.capacity() {
            self.fresh.push_back(job);
        } else {
            self.lower_floor(job.event.pred());
        }
    }

    /// The tail left out this endpoint's rows above an id.
    pub(crate) fn cut(&mut self, last: EventId) {
        self.lower_floor(last);
    }

    fn lower_floor(&mut self, floor: EventId) {
        let floor = self.floor.map_or(floor, |old| old.min(floor));
        self.floor = Some(floor);
        self.fresh.retain(|job| job.event <= floor);
    }

    /// An older snapshot still shows a delivery that is on the wire or just recorded.
    fn is_stale(&self, job: &Job) -> bool {
        self.busy
            .get(&job.event)
            .is_some_and(|busy| job.attempt < busy.number)
    }

    /// What to read from the queue, when the lane is spilled and half empty.
    pub(crate) fn wants_refill(&self) -> Option<Refill> {
        let floor = self.floor.filter(|_| self.is_active())?;
        let room = self.capacity() - self.fresh.len().min(self.capacity());
        (room * 2 > self.capacity()).then_some(Refill { floor, limit: room })
    }

    /// The rows of a refill, ascending, from a snapshot whose tail was applied before.
    pub(crate) fn refilled(&mut self, asked: Refill, rows: Vec<Job>) {
        // The tail of the same read may have lowered the floor: then these rows begin in the wrong place.
        if self.floor != Some(asked.floor) || !self.is_active() {
            return;
        }
        self.floor = match rows.last() {
            Some(last) if rows.len() >= asked.limit => Some(last.event),
            _ => None,
        };
        for job in rows {
            if !self.is_stale(&job) {
                self.fresh.push_back(job);
            }
        }
    }

    /// How many rows of `retries` to read, when some are due and there is room for them.
    pub(crate) fn wants_due(&self, now: DateTime<Utc>) -> Option<usize> {
        let due = self.next_due.is_some_and(|at| at <= now);
        let room = self.capacity() - self.due.len().min(self.capacity());
        (due && self.is_active() && room * 2 > self.capacity())
            .then(|| room + self.due.len() + self.busy.len())
    }

    pub(crate) fn next_due(&self) -> Option<DateTime<Utc>> {
        self.next_due.filter(|_| self.is_active())
    }

    /// A read of `retries` begins now.
    pub(crate) fn due_read_begins(&mut self) {
        self.due_since_read = None;
    }

    /// The earliest rows of `retries`, those due first; `later` is when the first of the others is due.
    pub(crate) fn due_read(&mut self, rows: Vec<Job>, later: Option<DateTime<Utc>>) {
        self.next_due = match (later, self.due_since_read) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        if !self.is_active() {
            return;
        }
        for job in rows {
            let known = self.is_stale(&job) || self.due.iter().any(|waiting| waiting.event == job.event);
            if !known {
                self.due.push_back(job);
            }
        }
    }

    /// Whether an attempt could start now.
    pub(crate) fn is_ready(&self) -> bool {
        self.is_active()
            && self.on_wire < self.endpoint.concurrency
            && !(self.fresh.is_empty() && self.due.is_empty())
    }

    /// Takes a delivery to send; fresh ones and due retries in turn.
    pub(crate) fn pick(&mut self) -> Option<Job> {
        while self.is_ready() {
            let (first, second) = if self.due_next {
                (&mut self.due, &mut self.fresh)
            } else {
                (&mut self.fresh, &mut self.due)
            };
            let job = first.pop_front().or_else(|| second.pop_front())?;
            self.due_next = !self.due_next;
            if self.is_stale(&job) {
                continue;
            }
            self.busy.insert(
                job.event,
                Busy {
                    number: job.number(),
                    stage: Stage::OnWire,
                },
            );
            self.on_wire += 1;
            return Some(job);
        }
        None
    }

    /// The answer is in and on its way to be recorded.
    pub(crate) fn answered(&mut self, event: EventId, number: u16) {
        if let Some(busy) = self.busy.get_mut(&event)
            && busy.number == number
            && busy.stage == Stage::OnWire
        {
            busy.stage = Stage::Recording;
            self.on_wire -= 1;
        }
    }

    /// The attempt was given up before it began or without an answer: the delivery is read from the tables again.
    pub(crate) fn handed_back(&mut self, event: EventId, number: u16, now: DateTime<Utc>) {
        if let Some(busy) = self.busy.get(&event)
            && busy.number == number
        {
            if busy.stage == Stage::OnWire {
                self.on_wire -= 1;
            }
            self.busy.remove(&event);
            self.lower_floor(event.pred());
            self.next_due = Some(now);
        }
    }

    /// The record is committed; `due` is when the next attempt is. The id stays known until [`forget`](Self::forget).
    pub(crate) fn recorded(&mut self, event: EventId, number: u16, due: Option<DateTime<Utc>>) {
        if let Some(busy) = self.busy.get_mut(&event)
            && busy.number == number
        {
            busy.stage = Stage::Recorded;
        }
        if let Some(due) = due {
            self.next_due = Some(self.next_due.map_or(due, |at| at.min(due)));
            self.due_since_read = Some(self.due_since_read.map_or(due, |at| at.min(due)));
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
            && self.fresh.is_empty()
            && self.due.is_empty()
            && self.busy.is_empty()
    }

    /// Rows were found that neither the tail nor a refill brought.
    pub(crate) fn missed(&mut self) {
        self.lower_floor(EventId::LOWEST);
    }

    /// Everything is read again; what is on the wire or being recorded stays known.
    pub(crate) fn reload(&mut self, now: DateTime<Utc>) {
        self.lower_floor(EventId::LOWEST);
        self.due.clear();
        self.next_due = Some(now);
    }
}
