//! Several dispatchers on a simulated database and simulated time, in thousands of random histories: leases that are
//! renewed late, lost and taken over, clocks that step, processes that sleep and die, records whose reply is lost,
//! endpoints that fail until the breaker opens, schedules that are exhausted.
//!
//! Checked in each: never more in flight to an endpoint than its bulkhead, across all senders; every delivery ends
//! once, delivered or after its whole schedule; no attempt is counted under a lost lease; no retry is early; an open
//! breaker lets one attempt through; anything sent more often than recorded was interrupted by a fault.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use chrono::{DateTime, TimeDelta, Utc};
use postrider_proto::{
    EndpointState, Epoch, EventId, Outcome, Response, Shard, TenantId, TypeId, limits::SHARDS,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    deliver::{
        endpoint::Endpoint,
        lane::{Action, AttemptResult, DueRows, Lane},
        queued_delivery::QueuedDelivery,
        retry::{self, Jitter, Next, Schedule},
    },
    ownership::{
        decision::{DispatcherRow, LEASE, MARGIN, RENEW_EVERY, ShardRow, View},
        lease::Lease,
    },
};

const HISTORIES: u64 = 8_000;
const THREADS: u64 = 2;
/// How long faults are injected.
const TROUBLE: Duration = Duration::from_secs(10);
/// By then everything must have ended.
const END: Duration = Duration::from_secs(3_600);
const ASK_MAX: Duration = Duration::from_secs(2);
const FAILURES_TO_OPEN: u32 = 10;

type Delivery = (usize, EventId);

/// One row of `queue` or `retries`.
#[derive(Clone)]
struct Row {
    delivery: QueuedDelivery,
    /// The transaction that inserted it.
    xid: u64,
    due: Option<DateTime<Utc>>,
}

/// The tables, and the effect of a dispatcher's statements on them.
struct Database {
    /// Added to simulated time: the wall clock may step.
    step: TimeDelta,
    dispatchers: BTreeMap<Uuid, DateTime<Utc>>,
    shards: Vec<ShardRow>,
    queue: BTreeMap<Delivery, Row>,
    retries: BTreeMap<Delivery, Row>,
    attempts: BTreeSet<(Delivery, u16)>,
    ended: HashMap<Delivery, Next>,
    xid: u64,
}

struct Customer {
    shard: Shard,
    concurrency: usize,
    /// Responds only with failures until then.
    fails_until: Duration,
    hangs: bool,
}

struct InFlight {
    endpoint: usize,
    delivery: QueuedDelivery,
    epoch: Epoch,
    term: CancellationToken,
    /// When the request is sent, if it still may be.
    starts: Duration,
    started: bool,
    ends: Duration,
}

struct Finished {
    endpoint: usize,
    delivery: QueuedDelivery,
    epoch: Epoch,
    next: Next,
    /// It was committed, but the reply was lost.
    committed: bool,
}

/// The database's reply to a renewal, in transit.
struct Renewal {
    asked: Duration,
    arrives: Duration,
    tables: Option<(Vec<DispatcherRow>, Vec<ShardRow>)>,
}

struct Node {
    id: Uuid,
    view: View,
    lease: Lease,
    term: Option<CancellationToken>,
    owned: HashMap<Shard, Epoch>,
    lanes: BTreeMap<usize, Lane>,
    failures: HashMap<usize, u32>,
    wire: Vec<InFlight>,
    results: Vec<Finished>,
    /// Rows of transactions below this were seen.
    seen: u64,
    renew_at: Duration,
    renewal: Option<Renewal>,
    sleeps_until: Duration,
    /// It can't reach the database until then.
    cut_until: Duration,
}

impl Node {
    fn new(number: u128, now: Duration) -> Self {
        let id = Uuid::from_u128(number);
        Self {
            id,
            view: View::new(id),
            lease: Lease::new(),
            term: None,
            owned: HashMap::new(),
            lanes: BTreeMap::new(),
            failures: HashMap::new(),
            wire: Vec::new(),
            results: Vec::new(),
            seen: 0,
            renew_at: now,
            renewal: None,
            sleeps_until: Duration::ZERO,
            cut_until: Duration::ZERO,
        }
    }
}

#[derive(Default)]
struct Tally {
    sends: u32,
    recorded: u32,
    /// Abandoned, or lost with a process or a lease.
    cut_off: u32,
}

struct World {
    rng: StdRng,
    base: Instant,
    now: Duration,
    db: Database,
    customers: Vec<Customer>,
    nodes: Vec<Node>,
    born: u128,
    events: u128,
    tallies: HashMap<Delivery, Tally>,
    schedule: Schedule,
    /// The database's clock stepped in this history.
    stepped: bool,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let shards = (0..SHARDS)
            .map(|shard| ShardRow {
                shard: Shard(shard),
                owner: None,
                epoch: Epoch(0),
            })
            .collect();
        let customers = (0..rng.random_range(1..6))
            .map(|_| Customer {
                shard: Shard(rng.random_range(0..SHARDS)),
                concurrency: rng.random_range(1..5),
                fails_until: Duration::from_millis(rng.random_range(0..12_000)),
                hangs: rng.random_bool(0.2),
            })
            .collect();
        let waits = (0..rng.random_range(3..7)).map(|_| Duration::from_millis(rng.random_range(0..2_000)));
        let schedule = Schedule::new(waits.collect()).expect("within bounds");
        let mut world = Self {
            db: Database {
                step: TimeDelta::zero(),
                dispatchers: BTreeMap::new(),
                shards,
                queue: BTreeMap::new(),
                retries: BTreeMap::new(),
                attempts: BTreeSet::new(),
                ended: HashMap::new(),
                xid: 1,
            },
            base: Instant::now(),
            now: Duration::ZERO,
            customers,
            nodes: Vec::new(),
            born: 0,
            events: 0,
            tallies: HashMap::new(),
            schedule,
            stepped: rng.random_bool(0.3),
            rng,
        };
        for _ in 0..world.rng.random_range(1..4) {
            world.add_node();
        }
        world
    }

    fn add_node(&mut self) {
        self.born += 1;
        self.nodes.push(Node::new(self.born, self.now));
    }

    fn clock(&self) -> DateTime<Utc> {
        let now = TimeDelta::from_std(self.now).unwrap_or_default();
        DateTime::<Utc>::UNIX_EPOCH + TimeDelta::hours(1) + now + self.db.step
    }

    fn millis(&mut self, least: u64, most: u64) -> Duration {
        Duration::from_millis(self.rng.random_range(least..most))
    }

    fn emit(&mut self) {
        self.events += 1;
        let endpoint = self.rng.random_range(0..self.customers.len());
        let event = EventId(Uuid::from_u128(self.events));
        let delivery = QueuedDelivery {
            event,
            tenant: TenantId(1),
            type_id: TypeId(1),
            attempt: 0,
            step: 0,
            key: None,
            replay: None,
        };
        let xid = self.db.xid;
        self.db.xid += 1;
        self.db.queue.insert(
            (endpoint, event),
            Row {
                delivery,
                xid,
                due: None,
            },
        );
        self.tallies.insert((endpoint, event), Tally::default());
    }

    fn trouble(&mut self) {
        let node = self.rng.random_range(0..self.nodes.len());
        match self.rng.random_range(0..100) {
            0..3 if self.nodes.len() > 1 => self.die(node),
            3..6 if self.nodes.len() < 4 => self.add_node(),
            6..10 => self.nodes[node].sleeps_until = self.now + self.millis(100, 9_000),
            10..14 => self.nodes[node].cut_until = self.now + self.millis(100, 9_000),
            14..16 if self.stepped => self.db.step += TimeDelta::seconds(self.rng.random_range(-20..20)),
            _ => {}
        }
    }

    /// Anything in flight and not recorded is unknown now.
    fn die(&mut self, node: usize) {
        let dead = self.nodes.swap_remove(node);
        let started = dead.wire.iter().filter(|attempt| attempt.started);
        let lost = started.map(|attempt| (attempt.endpoint, attempt.delivery.event));
        let unrecorded = dead.results.iter().filter(|result| !result.committed);
        let lost = lost.chain(unrecorded.map(|result| (result.endpoint, result.delivery.event)));
        for pair in lost {
            self.tally(pair).cut_off += 1;
        }
    }

    fn tally(&mut self, pair: Delivery) -> &mut Tally {
        self.tallies.entry(pair).or_default()
    }

    fn tick(&mut self) {
        let passed = self.millis(1, 250);
        self.now += passed;
        if self.now < TROUBLE {
            (0..self.rng.random_range(0..2)).for_each(|_| self.emit());
            self.trouble();
        }
        for node in 0..self.nodes.len() {
            if self.nodes[node].sleeps_until > self.now && self.now < TROUBLE {
                continue;
            }
            // A process may run its tasks in any order.
            let mut duties: [fn(&mut Self, usize); 6] = [
                Self::watch_lease,
                Self::renew,
                Self::read,
                Self::pick,
                Self::send,
                Self::record,
            ];
            for place in (1..duties.len()).rev() {
                duties.swap(place, self.rng.random_range(0..=place));
            }
            for duty in duties {
                duty(self, node);
            }
        }
        self.check_bulkheads();
    }

    fn is_cut(&self, node: usize) -> bool {
        self.nodes[node].cut_until > self.now && self.now < TROUBLE
    }

    fn watch_lease(&mut self, node: usize) {
        let now = self.base + self.now;
        let node = &mut self.nodes[node];
        if node.lease.expire(now) {
            node.term = None;
        }
    }

    fn renew(&mut self, node: usize) {
        self.hear_renewal(node);
        if self.nodes[node].renewal.is_some() || self.now < self.nodes[node].renew_at {
            return;
        }
        let (cut, clock, id) = (self.is_cut(node), self.clock(), self.nodes[node].id);
        let tables = (!cut).then(|| {
            self.db
                .dispatchers
                .insert(id, clock + TimeDelta::from_std(LEASE).unwrap_or_default());
            let dispatchers = self.db.dispatchers.iter().map(|(id, expires_at)| DispatcherRow {
                id: *id,
                expires_at: *expires_at,
                expired: *expires_at <= clock,
                leaving: false,
            });
            (dispatchers.collect(), self.db.shards.clone())
        });
        // It is done; the reply may be late or lost.
        let slow = self.rng.random_bool(0.05);
        let late = if slow {
            self.millis(0, 4_000)
        } else {
            self.millis(0, 30)
        };
        self.nodes[node].renewal = Some(Renewal {
            asked: self.now,
            arrives: self.now + late,
            tables,
        });
    }

    fn hear_renewal(&mut self, node: usize) {
        let now = self.now;
        let Some(renewal) = self.nodes[node].renewal.take() else {
            return;
        };
        if now - renewal.asked >= ASK_MAX {
            self.nodes[node].renew_at = now;
            return;
        }
        let Some((dispatchers, shards)) = renewal.tables.as_ref().filter(|_| renewal.arrives <= now) else {
            self.nodes[node].renewal = Some(renewal);
            return;
        };
        let instant = self.base + now;
        let one = &mut self.nodes[node];
        one.renew_at = renewal.asked + RENEW_EVERY;
        let until = self.base + renewal.asked + LEASE - MARGIN;
        let term = one.lease.extend_at(instant, until);
        let changes = one.view.update(dispatchers, shards, instant);
        for shard in changes.lost {
            self.drop_lanes(node, shard);
        }
        self.gain(node, changes.found);
        if let Some(term) = term {
            self.nodes[node].term = Some(term);
        }
        let wanted = self.nodes[node].view.wanted(dispatchers, shards, instant);
        if !wanted.is_empty() && !self.is_cut(node) {
            let taken = self.take(node, &wanted);
            // The reply may be lost: then the next update finds them.
            if self.rng.random_bool(0.9) {
                self.nodes[node].view.gained(&taken);
                self.gain(node, taken);
            }
        }
        // No waiting here: a drained lane is released at once.
        let surplus = self.nodes[node].view.surplus(dispatchers);
        let drained: Vec<Shard> = surplus
            .into_iter()
            .filter(|shard| self.is_drained(node, *shard))
            .collect();
        if !self.is_cut(node) {
            let id = self.nodes[node].id;
            let mine = |row: &&mut ShardRow| row.owner == Some(id) && drained.contains(&row.shard);
            for row in self.db.shards.iter_mut().filter(mine) {
                row.owner = None;
                row.epoch.0 += 1;
            }
            self.nodes[node].view.released(&drained);
            for shard in drained {
                self.drop_lanes(node, shard);
            }
        }
    }

    fn is_drained(&self, node: usize, shard: Shard) -> bool {
        let mut lanes = self.nodes[node].lanes.iter();
        lanes.all(|(endpoint, lane)| self.customers[*endpoint].shard != shard || lane.is_drained())
    }

    /// Mirrors the statement in `shards.rs`.
    fn take(&mut self, node: usize, wanted: &[(Shard, Epoch)]) -> Vec<(Shard, Epoch)> {
        let (clock, id) = (self.clock(), self.nodes[node].id);
        let mut taken = Vec::new();
        for row in &mut self.db.shards {
            let lives = row
                .owner
                .and_then(|owner| self.db.dispatchers.get(&owner))
                .is_some_and(|at| *at > clock);
            if wanted.contains(&(row.shard, row.epoch)) && !lives {
                row.owner = Some(id);
                row.epoch.0 += 1;
                taken.push((row.shard, row.epoch));
            }
        }
        taken
    }

    fn gain(&mut self, node: usize, shards: Vec<(Shard, Epoch)>) {
        for (shard, epoch) in shards {
            self.drop_lanes(node, shard);
            self.nodes[node].owned.insert(shard, epoch);
        }
    }

    fn drop_lanes(&mut self, node: usize, shard: Shard) {
        let customers = &self.customers;
        let one = &mut self.nodes[node];
        one.owned.remove(&shard);
        one.lanes.retain(|endpoint, lane| {
            let gone = customers[*endpoint].shard == shard;
            if gone {
                lane.endpoint().stop();
            }
            !gone
        });
        one.failures
            .retain(|endpoint, _| customers[*endpoint].shard != shard);
    }

    /// The tail and the lanes' requests, in one snapshot.
    fn read(&mut self, node: usize) {
        if self.is_cut(node) {
            return;
        }
        let clock = self.clock();
        let one = &mut self.nodes[node];
        for (endpoint, customer) in self.customers.iter().enumerate() {
            let Some(epoch) = one.owned.get(&customer.shard) else {
                continue;
            };
            let range = (endpoint, EventId::LOWEST)..(endpoint + 1, EventId::LOWEST);
            let lane = one.lanes.entry(endpoint).or_insert_with(|| {
                let first = self
                    .db
                    .queue
                    .range(range.clone())
                    .next()
                    .map(|((_, event), _)| *event);
                let next_due = self
                    .db
                    .retries
                    .range(range.clone())
                    .filter_map(|(_, row)| row.due)
                    .min();
                let settings = Endpoint::for_simulation(customer.concurrency, false, EndpointState::Active);
                let mut lane = Lane::new(Arc::new(settings), *epoch);
                lane.found(first, next_due);
                lane
            });
            for (_, row) in self.db.queue.range(range.clone()) {
                if row.xid >= one.seen {
                    lane.offer(row.delivery.clone());
                }
            }
            if let Some(asked) = lane.wants_refill() {
                let rows = self.db.queue.range(range.clone());
                let rows = rows.filter(|((_, event), _)| *event > asked.floor);
                lane.refilled(
                    asked,
                    rows.take(asked.limit)
                        .map(|(_, row)| row.delivery.clone())
                        .collect(),
                );
            }
            if let Some(asked) = lane.wants_due(clock) {
                lane.due_read_begins();
                let rows = self.db.retries.range(range.clone()).map(|(_, row)| row);
                let mut rows: Vec<&Row> = rows.filter(|row| row.due >= Some(asked.from)).collect();
                rows.sort_by_key(|row| row.due);
                rows.truncate(asked.limit);
                let due = rows.iter().filter(|row| row.due.is_some_and(|due| due <= clock));
                lane.due_read(DueRows {
                    rows: due.map(|row| row.delivery.clone()).collect(),
                    first: rows.first().and_then(|row| row.due),
                    later: rows.iter().filter_map(|row| row.due).find(|due| *due > clock),
                });
            }
        }
        one.seen = self.db.xid;
    }

    fn pick(&mut self, node: usize) {
        let Some(term) = self.nodes[node].term.clone().filter(|term| !term.is_cancelled()) else {
            return;
        };
        let now = self.now;
        for endpoint in 0..self.customers.len() {
            let read = self.millis(0, 60);
            let one = &mut self.nodes[node];
            let open = one
                .failures
                .get(&endpoint)
                .is_some_and(|n| *n >= FAILURES_TO_OPEN);
            let Some(lane) = one.lanes.get_mut(&endpoint) else {
                continue;
            };
            while let Some((delivery, action)) = lane.pick(now) {
                assert_eq!(action, Action::Send);
                assert!(!open || lane.in_flight() <= 1, "an open breaker lets one through");
                one.wire.push(InFlight {
                    endpoint,
                    delivery,
                    epoch: lane.epoch(),
                    term: term.clone(),
                    starts: now + read,
                    started: false,
                    ends: Duration::MAX,
                });
            }
        }
    }

    fn send(&mut self, node: usize) {
        let (now, instant, clock) = (self.now, self.base + self.now, self.clock());
        let mut wire = std::mem::take(&mut self.nodes[node].wire);
        let mut kept = Vec::with_capacity(wire.len());
        for mut attempt in wire.drain(..) {
            let pair = (attempt.endpoint, attempt.delivery.event);
            // Mirrors `attempt.rs`: checked before every step.
            let valid = !attempt.term.is_cancelled() && self.nodes[node].lease.is_valid_at(instant);
            if !valid {
                if attempt.started {
                    self.tally(pair).cut_off += 1;
                }
                if let Some(lane) = self.nodes[node].lanes.get_mut(&attempt.endpoint) {
                    lane.handed_back(attempt.delivery.event, attempt.delivery.number(), clock);
                }
                continue;
            }
            if !attempt.started && attempt.starts <= now {
                attempt.started = true;
                if !self.stepped
                    && let Some(due) = self.db.retries.get(&pair).and_then(|row| row.due)
                {
                    assert!(due <= clock, "a retry is early");
                }
                self.tally(pair).sends += 1;
                let hangs = self.customers[attempt.endpoint].hangs && self.rng.random_bool(0.3);
                attempt.ends = now
                    + if hangs {
                        self.millis(2_000, 3_000)
                    } else {
                        self.millis(1, 400)
                    };
            }
            if attempt.ends <= now {
                self.respond(node, attempt);
            } else {
                kept.push(attempt);
            }
        }
        self.nodes[node].wire = kept;
    }

    fn respond(&mut self, node: usize, attempt: InFlight) {
        let failing = self.customers[attempt.endpoint].fails_until > self.now;
        let success = !failing && self.rng.random_bool(0.9);
        let outcome = if success {
            Outcome::Accepted {
                status: 204,
                response: Response::default(),
            }
        } else {
            Outcome::Refused {
                status: 500,
                retry_after: None,
                response: Response::default(),
            }
        };
        let jitter = Jitter::new(0.2).expect("a share");
        let (step, number) = (attempt.delivery.step, attempt.delivery.number());
        let next = retry::decide(&outcome, step, number, &self.schedule, jitter, &mut self.rng);
        let one = &mut self.nodes[node];
        if let Some(lane) = one.lanes.get_mut(&attempt.endpoint)
            && lane.epoch() == attempt.epoch
        {
            let failures = one.failures.entry(attempt.endpoint).or_default();
            *failures = if success { 0 } else { *failures + 1 };
            lane.attempt_ended(
                attempt.delivery.event,
                attempt.delivery.number(),
                AttemptResult {
                    success,
                    slow: false,
                    about_endpoint: true,
                },
                self.now,
            );
        }
        one.results.push(Finished {
            endpoint: attempt.endpoint,
            delivery: attempt.delivery,
            epoch: attempt.epoch,
            next,
            committed: false,
        });
    }

    /// Mirrors the statement in `recorder.rs`: one transaction, whose reply may be lost. Then it is retried.
    fn record(&mut self, node: usize) {
        if self.is_cut(node) || self.nodes[node].results.is_empty() || self.rng.random_bool(0.5) {
            return;
        }
        let results = std::mem::take(&mut self.nodes[node].results);
        let heard = self.rng.random_bool(0.95);
        let (clock, id) = (self.clock(), self.nodes[node].id);
        let mut again = Vec::new();
        for mut result in results {
            let pair = (result.endpoint, result.delivery.event);
            let number = result.delivery.number();
            let row = &self.db.shards[self.customers[result.endpoint].shard.0 as usize];
            let ours = row.owner == Some(id) && row.epoch == result.epoch;
            // An attempt number is used once: it reveals a second try of the same batch.
            let new = !self.db.attempts.contains(&(pair, number));
            let waits = self.db.queue.contains_key(&pair) || self.db.retries.contains_key(&pair);
            let (mut due, void) = (Some(clock), !(ours && new && waits));
            if !void {
                due = self.write(pair, &result, clock);
                result.committed = true;
            }
            if !heard {
                again.push(result);
                continue;
            }
            if !result.committed {
                self.tally(pair).cut_off += 1;
            }
            if let Some(lane) = self.nodes[node].lanes.get_mut(&result.endpoint)
                && lane.epoch() == result.epoch
            {
                if void {
                    lane.search_retries();
                }
                lane.recorded(result.delivery.event, number, due);
                // Reads are applied at once here: the next one begins after this.
                lane.forget(result.delivery.event, number);
            }
        }
        self.nodes[node].results = again;
    }

    fn write(&mut self, pair: Delivery, result: &Finished, clock: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let number = result.delivery.number();
        let row = self.db.queue.remove(&pair);
        let row = row.or_else(|| self.db.retries.remove(&pair));
        let mut row = row.expect("it waits in one of them");
        assert!(self.db.attempts.insert((pair, number)));
        self.tally(pair).recorded += 1;
        match result.next {
            Next::Retry { step, wait } => {
                let due = clock + TimeDelta::from_std(wait).unwrap_or_default();
                (row.delivery.attempt, row.delivery.step, row.due) = (number, step, Some(due));
                self.db.retries.insert(pair, row);
                Some(due)
            }
            ended => {
                let before = self.db.ended.insert(pair, ended);
                assert!(before.is_none(), "a pair ended twice");
                None
            }
        }
    }

    /// What a receiver would see. A process that sleeps past its lease keeps its sockets: those are not counted.
    fn check_bulkheads(&self) {
        let mut in_flight = vec![0; self.customers.len()];
        for node in &self.nodes {
            let asleep = node.sleeps_until > self.now && self.now < TROUBLE;
            if asleep && !node.lease.is_valid_at(self.base + self.now) {
                continue;
            }
            for attempt in node.wire.iter().filter(|attempt| attempt.started) {
                in_flight[attempt.endpoint] += 1;
            }
        }
        for (endpoint, count) in in_flight.into_iter().enumerate() {
            let bulkhead = self.customers[endpoint].concurrency;
            assert!(
                count <= bulkhead,
                "{count} on the wire of endpoint {endpoint}, allowed are {bulkhead}, at {:?}",
                self.now
            );
        }
    }

    fn check_end(&self) {
        for (pair, tally) in &self.tallies {
            let ended = self.db.ended.get(pair);
            assert!(ended.is_some(), "{pair:?} never ended");
            assert_eq!(
                tally.sends,
                tally.recorded + tally.cut_off,
                "{pair:?} was sent more often than is explained"
            );
            if !matches!(ended, Some(Next::Delivered)) {
                let steps = self.schedule.waits().len() as u32;
                assert_eq!(
                    tally.recorded, steps,
                    "{pair:?} died before its schedule was over"
                );
            }
        }
    }
}

fn live(seed: u64) {
    let mut world = World::new(seed);
    while world.now < END {
        world.tick();
        if world.now > TROUBLE && world.db.ended.len() == world.tallies.len() {
            break;
        }
    }
    world.check_end();
}

#[test]
fn every_delivery_ends_once_whatever_dispatchers_clocks_and_answers_do() {
    let threads: Vec<_> = (0..THREADS)
        .map(|first| {
            std::thread::spawn(move || {
                for seed in (first..HISTORIES).step_by(THREADS as usize) {
                    if let Err(panic) = std::panic::catch_unwind(|| live(seed)) {
                        eprintln!("the history of seed {seed} failed");
                        std::panic::resume_unwind(panic);
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("every history holds");
    }
}

#[test]
fn the_same_seed_is_the_same_history() {
    let end = |seed| {
        let mut world = World::new(seed);
        (0..400).for_each(|_| world.tick());
        (world.now, world.db.attempts.len(), world.db.ended.len())
    };
    assert_eq!(end(7), end(7));
    assert_ne!(end(7), end(8));
}
