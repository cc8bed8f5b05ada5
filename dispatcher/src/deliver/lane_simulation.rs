//! A lane on a simulated database, in thousands of random histories: commits in any order, reads that are applied
//! late, records that are reported late, attempts that fail, hang and are abandoned, pauses, cancelled replays.
//!
//! Checked in each: every delivery is delivered, none is sent twice unless its attempt was abandoned, never more in
//! flight than allowed, each key in sequence, replays within their share and after live deliveries, and nothing that
//! was withdrawn.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use chrono::{DateTime, TimeDelta, Utc};
use postrider_proto::{EndpointState, Epoch, EventId, TenantId, TypeId};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use uuid::Uuid;

use crate::deliver::{
    endpoint::Endpoint,
    lane::{
        AttemptResult, DueRead, DueRows, LIVE_IN_A_ROW_MAX, Lane, REPLAY_SHARE, ReadNumber, Refill,
        Withdrawal,
    },
    queued_delivery::QueuedDelivery,
};

const HISTORIES: u64 = 4_000;
const STEPS: usize = 300;
const KEYS: i64 = 3;

#[derive(Clone)]
struct Row {
    delivery: QueuedDelivery,
    sequence: i64,
    due: DateTime<Utc>,
}

/// The result of one read, to be applied later.
struct Read {
    number: ReadNumber,
    tail: Vec<QueuedDelivery>,
    refill: Option<(Refill, Vec<QueuedDelivery>)>,
    due: Option<DueRows>,
    keys: Option<Vec<QueuedDelivery>>,
}

struct World {
    rng: StdRng,
    lane: Lane,
    concurrency: usize,
    ordered: bool,
    queue: BTreeMap<EventId, Row>,
    retries: BTreeMap<EventId, Row>,
    /// Committed and not yet seen by a tail.
    unseen: Vec<EventId>,
    reads: ReadNumber,
    reading: Option<Read>,
    wire: Vec<QueuedDelivery>,
    recording: Vec<(QueuedDelivery, bool)>,
    unheard: Vec<(QueuedDelivery, Option<DateTime<Utc>>)>,
    forgettable: Vec<(ReadNumber, EventId, u16)>,
    delivered: HashSet<EventId>,
    given_up: HashMap<EventId, u32>,
    sends: HashMap<EventId, u32>,
    attempts: HashMap<EventId, u32>,
    emitted: HashMap<EventId, Option<(i64, i64)>>,
    sequences: HashMap<i64, i64>,
    /// The last sequence of each key that was delivered.
    ended: HashMap<i64, i64>,
    /// Live deliveries picked since the latest replay.
    live_in_a_row: u8,
    minute: i64,
    state: EndpointState,
    /// The running replay. Each cancellation begins the next one.
    replay_number: u32,
    /// A requested withdrawal, and one that was carried out but not reported.
    asked: Option<Withdrawal>,
    withdrawn_after: Option<ReadNumber>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let concurrency = rng.random_range(1..10);
        let ordered = rng.random_bool(0.4);
        let endpoint = Endpoint::for_simulation(concurrency, ordered, EndpointState::Active);
        Self {
            lane: Lane::new(Arc::new(endpoint), Epoch(1)),
            rng,
            concurrency,
            ordered,
            queue: BTreeMap::new(),
            retries: BTreeMap::new(),
            unseen: Vec::new(),
            reads: 0,
            reading: None,
            wire: Vec::new(),
            recording: Vec::new(),
            unheard: Vec::new(),
            forgettable: Vec::new(),
            delivered: HashSet::new(),
            given_up: HashMap::new(),
            sends: HashMap::new(),
            attempts: HashMap::new(),
            emitted: HashMap::new(),
            sequences: HashMap::new(),
            ended: HashMap::new(),
            live_in_a_row: 0,
            minute: 0,
            state: EndpointState::Active,
            replay_number: 1,
            asked: None,
            withdrawn_after: None,
        }
    }

    fn now(&self) -> DateTime<Utc> {
        DateTime::<Utc>::UNIX_EPOCH + TimeDelta::minutes(self.minute)
    }

    fn elapsed(&self) -> Duration {
        Duration::from_secs(60 * self.minute as u64)
    }

    /// Ids come in any order: a transaction that began early may commit late.
    fn emit(&mut self) {
        let event = EventId(Uuid::from_u128(self.rng.random_range(1..=u128::MAX >> 1)));
        let line = (self.ordered && self.rng.random_bool(0.8)).then(|| self.rng.random_range(0..KEYS));
        let line = line.map(|key| {
            let sequence = self.sequences.entry(key).or_default();
            *sequence += 1;
            (key, *sequence)
        });
        let delivery = QueuedDelivery {
            event,
            tenant: TenantId(1),
            type_id: TypeId(1),
            attempt: 0,
            step: 0,
            key: line.map(|(key, _)| key),
            replay: None,
        };
        self.emitted.insert(event, line);
        let row = Row {
            delivery,
            sequence: line.map_or(0, |(_, sequence)| sequence),
            due: self.now(),
        };
        self.queue.insert(event, row);
        self.unseen.push(event);
    }

    /// A delivered one is queued again, outside the order, with the number of its latest attempt.
    fn replay(&mut self, most: usize) {
        let mut delivered: Vec<EventId> = self.delivered.iter().copied().collect();
        delivered.sort_unstable();
        for _ in 0..most.min(delivered.len()) {
            let event = delivered.swap_remove(self.rng.random_range(0..delivered.len()));
            self.delivered.remove(&event);
            let delivery = QueuedDelivery {
                event,
                tenant: TenantId(1),
                type_id: TypeId(1),
                attempt: self.attempts[&event] as u16,
                step: 0,
                key: None,
                replay: Some(format!("rpl_{}", self.replay_number).into()),
            };
            let (sequence, due) = (0, self.now());
            self.queue.insert(
                event,
                Row {
                    delivery,
                    sequence,
                    due,
                },
            );
            self.unseen.push(event);
        }
    }

    fn begin_read(&mut self) {
        self.reads += 1;
        let tail = self
            .unseen
            .drain(..)
            .filter_map(|id| self.queue.get(&id))
            .map(|row| row.delivery.clone())
            .collect();
        let refill = self.lane.wants_refill().map(|asked| {
            let above = self
                .queue
                .range(asked.floor..)
                .filter(|(id, _)| **id > asked.floor);
            (
                asked,
                above
                    .take(asked.limit)
                    .map(|(_, row)| row.delivery.clone())
                    .collect(),
            )
        });
        let now = self.now();
        let due = self.lane.wants_due(now).map(|asked| self.read_due(asked, now));
        let keys = self.lane.wants_keys().then(|| {
            let keys = self.lane.key_read_begins();
            keys.iter().filter_map(|key| self.head_of(*key)).collect()
        });
        self.reading = Some(Read {
            number: self.reads,
            tail,
            refill,
            due,
            keys,
        });
    }

    fn read_due(&mut self, asked: DueRead, now: DateTime<Utc>) -> DueRows {
        self.lane.due_read_begins();
        let rows = self.retries.values().filter(|row| row.due >= asked.from);
        let mut rows: Vec<&Row> = rows.collect();
        rows.sort_by_key(|row| row.due);
        rows.truncate(asked.limit);
        let mut later = rows.iter().map(|row| row.due).find(|due| *due > now);
        if rows.len() == asked.limit && later.is_none() {
            later = Some(now);
        }
        DueRows {
            first: rows.first().map(|row| row.due),
            rows: rows
                .into_iter()
                .filter(|row| row.due <= now)
                .map(|row| row.delivery.clone())
                .collect(),
            later,
        }
    }

    fn head_of(&self, key: i64) -> Option<QueuedDelivery> {
        let of_key = |rows: &BTreeMap<EventId, Row>| {
            rows.values()
                .filter(|row| row.delivery.key == Some(key))
                .min_by_key(|row| row.sequence)
                .cloned()
        };
        let first = of_key(&self.queue)?;
        let before = of_key(&self.retries).is_some_and(|retry| retry.sequence < first.sequence);
        (!before).then_some(first.delivery)
    }

    fn apply_read(&mut self) {
        let Some(read) = self.reading.take() else { return };
        for delivery in read.tail {
            self.lane.offer(delivery);
        }
        if let Some((asked, rows)) = read.refill {
            self.lane.refilled(asked, rows);
        }
        if let Some(due) = read.due {
            self.lane.due_read(due);
        }
        if let Some(heads) = read.keys {
            self.lane.keys_read(heads);
        }
        let lane = &mut self.lane;
        self.forgettable.retain(|(after, event, number)| {
            let keep = *after > read.number;
            if !keep {
                lane.forget(*event, *number);
            }
            keep
        });
        if self.withdrawn_after.is_some_and(|after| after <= read.number) {
            self.withdrawn_after = None;
            self.asked = self.lane.withdrawn(self.now());
        }
    }

    /// Committed, and applied as settings are. Everything older was applied before.
    fn cancel(&mut self) {
        if self.reading.is_some() {
            return;
        }
        self.replay_number += 1;
        self.apply_settings();
    }

    /// One statement: queued deliveries of cancelled replays that are not being attempted become delivered again.
    fn take_back(&mut self) {
        let Some(asked) = self.asked.take() else { return };
        let attempted: HashMap<EventId, u16> = asked.attempted.into_iter().collect();
        let is_taken = |row: &Row| {
            let of_it = |replay: &str| asked.replays.iter().any(|one| one == replay);
            row.delivery.replay.as_deref().is_some_and(of_it)
                && attempted
                    .get(&row.delivery.event)
                    .is_none_or(|number| row.delivery.attempt >= *number)
        };
        let taken: Vec<EventId> = self
            .queue
            .values()
            .filter(|row| is_taken(row))
            .map(|row| row.delivery.event)
            .collect();
        for event in taken {
            self.queue.remove(&event);
            assert!(self.delivered.insert(event));
        }
        self.withdrawn_after = Some(self.reads + 1);
    }

    fn pick(&mut self) {
        let Some((delivery, _)) = self.lane.pick(self.elapsed()) else {
            return;
        };
        assert!(
            !self.delivered.contains(&delivery.event),
            "{:?} was delivered already",
            delivery.event
        );
        let is_replay = delivery.replay.is_some() && delivery.step == 0;
        assert!(
            !is_replay || !self.lane.has_live() || self.live_in_a_row >= LIVE_IN_A_ROW_MAX,
            "a replay went before a live delivery"
        );
        self.live_in_a_row = if is_replay {
            0
        } else {
            self.live_in_a_row.saturating_add(1)
        };
        if let (None, Some(Some((key, sequence)))) = (&delivery.replay, self.emitted.get(&delivery.event)) {
            let ended = self.ended.get(key).copied().unwrap_or(0);
            assert_eq!(*sequence, ended + 1, "key {key}: sent out of its order");
        }
        *self.sends.entry(delivery.event).or_default() += 1;
        self.wire.push(delivery);
        assert!(self.wire.len() <= self.concurrency, "the bulkhead was broken");
        let replays = self
            .wire
            .iter()
            .filter(|delivery| delivery.replay.is_some() && delivery.step == 0);
        assert!(
            replays.count() <= (self.concurrency / REPLAY_SHARE).max(1),
            "replays hold more than their share"
        );
    }

    fn end_one_attempt(&mut self) {
        if self.wire.is_empty() {
            return;
        }
        let delivery = self.wire.swap_remove(self.rng.random_range(0..self.wire.len()));
        if self.rng.random_bool(0.1) {
            *self.given_up.entry(delivery.event).or_default() += 1;
            self.lane
                .handed_back(delivery.event, delivery.number(), self.now());
            self.withdraw();
            return;
        }
        let (success, now) = (self.rng.random_bool(0.7), self.elapsed());
        self.lane.attempt_ended(
            delivery.event,
            delivery.number(),
            AttemptResult {
                success,
                slow: false,
                about_endpoint: true,
            },
            now,
        );
        self.recording.push((delivery, success));
    }

    /// One statement commits; the lane is notified later.
    fn commit_records(&mut self) {
        for (delivery, success) in std::mem::take(&mut self.recording) {
            let row = self
                .queue
                .remove(&delivery.event)
                .or_else(|| self.retries.remove(&delivery.event));
            let mut row = row.expect("a delivery being recorded is in one of the tables");
            *self.attempts.entry(delivery.event).or_default() += 1;
            let mut due = None;
            if success {
                assert!(self.delivered.insert(delivery.event));
                if let (None, Some((key, sequence))) = (&delivery.replay, self.emitted[&delivery.event]) {
                    self.ended.insert(key, sequence);
                }
            } else {
                row.delivery.attempt = delivery.number();
                row.delivery.step += 1;
                row.due = self.now() + TimeDelta::minutes(self.rng.random_range(0..5));
                due = Some(row.due);
                self.retries.insert(delivery.event, row);
            }
            self.unheard.push((delivery, due));
        }
    }

    fn hear_of_records(&mut self) {
        for (delivery, due) in std::mem::take(&mut self.unheard) {
            self.lane.recorded(delivery.event, delivery.number(), due);
            self.forgettable
                .push((self.reads + 1, delivery.event, delivery.number()));
        }
    }

    fn change_state(&mut self, state: EndpointState) {
        self.state = state;
        self.apply_settings();
    }

    fn apply_settings(&mut self) {
        let mut endpoint = Endpoint::for_simulation(self.concurrency, self.ordered, self.state);
        endpoint.cancelled = (1..self.replay_number)
            .map(|number| format!("rpl_{number}"))
            .filter(|id| {
                self.queue
                    .values()
                    .any(|row| row.delivery.replay.as_deref() == Some(id))
            })
            .collect();
        let now = self.now();
        self.lane.change(Arc::new(endpoint), now);
        self.withdraw();
    }

    fn withdraw(&mut self) {
        if let Some(asked) = self.lane.withdraw(self.now()) {
            assert!(
                self.asked.is_none() && self.withdrawn_after.is_none(),
                "one at a time"
            );
            self.asked = Some(asked);
        }
    }

    fn step(&mut self) {
        match self.rng.random_range(0..100) {
            0..18 => self.emit(),
            18 => self.replay(1),
            19 if self.rng.random_bool(0.3) => self.replay(60),
            20..21 => (0..100).for_each(|_| self.emit()),
            21..35 if self.reading.is_none() => self.begin_read(),
            35..50 => self.apply_read(),
            50..70 => self.pick(),
            70..84 => self.end_one_attempt(),
            84..90 => self.commit_records(),
            90..94 => self.hear_of_records(),
            94 => self.take_back(),
            95..97 => self.minute += 1,
            97 => self.cancel(),
            98 => self.change_state(EndpointState::Paused),
            99 => self.change_state(EndpointState::Active),
            _ => {}
        }
    }

    fn drain(&mut self) {
        self.change_state(EndpointState::Active);
        for _ in 0..20_000 {
            if self.delivered.len() == self.emitted.len() {
                return;
            }
            self.apply_read();
            self.begin_read();
            (0..self.concurrency).for_each(|_| self.pick());
            (0..self.concurrency).for_each(|_| self.end_one_attempt());
            self.commit_records();
            self.hear_of_records();
            self.take_back();
            self.minute += 1;
        }
        panic!(
            "{} of {} were delivered: something is stuck",
            self.delivered.len(),
            self.emitted.len()
        );
    }

    fn check(&self) {
        for (event, sends) in &self.sends {
            let explained = self.attempts[event] + self.given_up.get(event).copied().unwrap_or(0);
            assert_eq!(
                *sends, explained,
                "{event:?} was sent more often than its attempts explain"
            );
        }
    }
}

#[test]
fn every_delivery_ends_once_in_every_history() {
    for seed in 0..HISTORIES {
        let history = std::panic::catch_unwind(|| {
            let mut world = World::new(seed);
            (0..STEPS).for_each(|_| world.step());
            world.drain();
            world.check();
        });
        if let Err(panic) = history {
            eprintln!("the history of seed {seed} failed");
            std::panic::resume_unwind(panic);
        }
    }
}
