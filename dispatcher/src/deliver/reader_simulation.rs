//! Engine, reader and ownership together: several real engines, each with its reader's known endpoints
//! (`reader::Known`), on one simulated database, in thousands of random histories. Shards are taken, drained,
//! released and lost while endpoints get their first events and change their settings; readers are slow, lose their
//! connections and complete cycles requested before a shard was lost; surveys come late.
//!
//! Checked in each: once the system is quiet every delivery was sent, without help from the sweep, and none by two
//! owners at a time; and every lane has the newest settings of its endpoint.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    time::Duration,
    time::Instant,
};

use chrono::Utc;
use postrider_proto::{EndpointId, Epoch, EventId, Shard, TenantId, TypeId};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    Settings, Wake,
    clock::Clock,
    deliver::{
        attempt::Picked,
        capacity::Capacity,
        change_watcher::Commits,
        endpoint::EndpointRow,
        engine::{Engine, EngineMessage, State},
        lane::{AttemptResult, DueRows, Pace},
        queued_delivery::QueuedDelivery,
        reader::{Cycle, Known, QueueRow, ReaderMessage},
        recorder::{Fate, Recorded},
        sending_switch::SendingSwitch,
        survey::{self, Found, Reason, Report},
    },
    vault::Vault,
};

const HISTORIES: u64 = 800;
const STEPS: usize = 800;
const SHARDS: i16 = 4;
const ENDPOINTS: i32 = 200;

/// A row of the queue, and the transaction that inserted it.
#[derive(Clone)]
struct Row {
    delivery: QueuedDelivery,
    xid: u64,
}

#[derive(Default)]
struct Database {
    queue: BTreeMap<(EndpointId, EventId), Row>,
    /// The transaction that last changed each endpoint.
    endpoints: BTreeMap<EndpointId, u64>,
    /// Settings that can't be opened until they are changed again.
    broken: BTreeSet<EndpointId>,
    shards: BTreeMap<Shard, (Option<usize>, i64)>,
    xid: u64,
}

impl Database {
    fn next_xid(&mut self) -> u64 {
        self.xid += 1;
        self.xid
    }

    fn settings(&self, ids: impl IntoIterator<Item = EndpointId>) -> Vec<EndpointRow> {
        let known = ids.into_iter().filter(|id| self.endpoints.contains_key(id));
        known
            .map(|id| {
                let version = self.endpoints.get(&id).copied();
                let version = version.filter(|_| !self.broken.contains(&id));
                EndpointRow::for_simulation(id, shard_of(id), version)
            })
            .collect()
    }

    fn owns(&self, node: usize, shard: Shard) -> bool {
        self.shards
            .get(&shard)
            .is_some_and(|(owner, _)| *owner == Some(node))
    }
}

fn shard_of(id: EndpointId) -> Shard {
    Shard(i16::try_from(id.0).expect("few endpoints") % SHARDS)
}

/// One dispatcher: the real engine, and substitutes for the tasks around it.
struct Node {
    engine: Engine,
    picked: Vec<mpsc::UnboundedReceiver<Picked>>,
    cycles: mpsc::Receiver<Cycle>,
    surveys: mpsc::UnboundedReceiver<survey::Request>,
    /// What a sweep has seen and not reported yet.
    swept: Option<Report>,
    drained: mpsc::UnboundedReceiver<Shard>,
    events: mpsc::UnboundedReceiver<EngineMessage>,
    /// Channel ends that are not read here.
    _ignored: Box<dyn std::any::Any>,
    /// Endpoints known on the reader's connection.
    known: Known,
    previous: Option<u64>,
    /// The reader's current cycle, and messages in transit to the engine.
    cycle: Option<Cycle>,
    messages: VecDeque<ReaderMessage>,
    /// Results in transit to the recorder, with the epoch they were picked under.
    finished: Vec<(Picked, Epoch)>,
    term: CancellationToken,
}

impl Node {
    #[expect(clippy::disallowed_methods, reason = "any time will do")]
    fn new() -> Self {
        let (events, received) = mpsc::unbounded_channel();
        let picked = Pace::ALL.map(|_| mpsc::unbounded_channel());
        let (senders, receivers): (Vec<_>, Vec<_>) = picked.into_iter().unzip();
        let (finished, finished_out) = mpsc::unbounded_channel();
        let (cycles, cycles_out) = mpsc::channel(1);
        let (drained, drained_out) = mpsc::unbounded_channel();
        let (deleted, deleted_out) = mpsc::unbounded_channel();
        let (withdrawals, withdrawals_out) = mpsc::unbounded_channel();
        let (surveys, surveys_out) = mpsc::unbounded_channel();
        let (applied, applied_out) = watch::channel(None);
        let (quiet, quiet_out) = watch::channel(None);
        let (activity, activity_out) = watch::channel(Vec::new());
        let term = CancellationToken::new();
        let mut engine = Engine {
            settings: Settings::default(),
            vault: Vault::parse(&data_encoding::BASE64.encode(&[7; 32])).expect("a key"),
            clock: Clock::new(Instant::now(), Utc::now()),
            inbox: events,
            picked: senders.try_into().expect("one for each pace"),
            finished,
            started: Instant::now(),
            cycles,
            commits: Commits::default(),
            interrupt: Wake::default(),
            drained,
            deleted,
            withdrawals,
            surveys,
            applied,
            quiet,
            activity,
            vital: std::sync::Arc::new(crate::health::Vital::new(crate::ownership::lease::Lease::new())),
            capacity: Capacity::new(64),
            switch: SendingSwitch::default(),
            state: State::default(),
        };
        engine.handle(EngineMessage::Resumed(term.clone()));
        engine.switch.set(true);
        Self {
            engine,
            picked: receivers,
            cycles: cycles_out,
            surveys: surveys_out,
            swept: None,
            drained: drained_out,
            events: received,
            _ignored: Box::new((
                finished_out,
                deleted_out,
                withdrawals_out,
                applied_out,
                quiet_out,
                activity_out,
            )),
            known: Known::default(),
            previous: None,
            cycle: None,
            messages: VecDeque::new(),
            finished: Vec::new(),
            term,
        }
    }

    /// Handles its tasks' messages, starts what may start, requests the next cycle.
    fn run_engine(&mut self) {
        while let Ok(event) = self.events.try_recv() {
            self.engine.handle(event);
        }
        self.engine.report_drained();
        self.engine.pump();
        self.engine.read_if_idle();
    }

    /// The reader accepts a cycle: from here on the request is fixed.
    fn begin_cycle(&mut self) {
        if self.cycle.is_none() {
            self.cycle = self.cycles.try_recv().ok();
        }
    }

    /// One snapshot: tail, settings, requests. Mirrors `Session::cycle`.
    fn read(&mut self, db: &Database) {
        let Some(cycle) = self.cycle.take() else { return };
        self.known.forget(&cycle.forget);
        let now = db.xid;
        let mut rows = 0;
        if let Some(previous) = self.previous {
            let changed = db.endpoints.iter().filter(|(_, xid)| **xid > previous);
            let changed: Vec<EndpointId> = changed
                .map(|(id, _)| *id)
                .filter(|id| self.known.contains(id))
                .collect();
            self.say_settings(db, changed);
            let tail: Vec<((EndpointId, EventId), Row)> = db
                .queue
                .iter()
                .filter(|((id, _), row)| row.xid > previous && cycle.owned.contains(&shard_of(*id)))
                .map(|(key, row)| (*key, row.clone()))
                .collect();
            rows = tail.len();
            let new = self.known.introduce(tail.iter().map(|((id, _), _)| *id));
            self.say_settings(db, new);
            let rows = tail.into_iter().map(|((endpoint, _), row)| QueueRow {
                endpoint,
                shard: shard_of(endpoint),
                delivery: row.delivery,
            });
            self.messages.push_back(ReaderMessage::Page {
                rows: rows.collect(),
                cut: None,
            });
        }
        if !cycle.load.is_empty() {
            self.known.introduce(cycle.load.iter().copied());
            self.say_settings(db, cycle.load);
        }
        for (endpoint, asked) in cycle.refills {
            let above = db.queue.range((endpoint, asked.floor)..);
            let rows = above
                .filter(|((id, event), _)| *id == endpoint && *event > asked.floor)
                .take(asked.limit)
                .map(|(_, row)| row.delivery.clone());
            self.messages.push_back(ReaderMessage::Refilled {
                endpoint,
                asked,
                rows: rows.collect(),
            });
        }
        for (endpoint, _) in cycle.due {
            let due = DueRows::default();
            self.messages.push_back(ReaderMessage::Due { endpoint, due });
        }
        self.previous = Some(now);
        self.messages.push_back(ReaderMessage::Done {
            number: cycle.number,
            tailed: true,
            queue_read: true,
            rows,
            settings: None,
        });
    }

    fn say_settings(&mut self, db: &Database, ids: Vec<EndpointId>) {
        if !ids.is_empty() {
            self.messages
                .push_back(ReaderMessage::Endpoints(db.settings(ids)));
        }
    }

    fn lose_connection(&mut self) {
        // A requested cycle fails.
        if self.cycle.take().is_some() {
            self.known = Known::default();
            self.previous = None;
            self.messages.push_back(ReaderMessage::Lost);
        }
    }

    /// What a sweep saw a while ago is reported before anything new is looked for.
    fn survey(&mut self, db: &Database) {
        if let Some(seen) = self.swept.take() {
            self.engine.handle(EngineMessage::Surveyed(seen));
            self.engine
                .handle(EngineMessage::Surveyed(Report::Swept(Duration::from_millis(1))));
            return;
        }
        let Ok(request) = self.surveys.try_recv() else {
            return;
        };
        let shards: HashSet<Shard> = request.shards.iter().map(|(shard, _)| *shard).collect();
        let mut firsts: BTreeMap<EndpointId, EventId> = BTreeMap::new();
        for (endpoint, event) in db.queue.keys() {
            if shards.contains(&shard_of(*endpoint)) {
                firsts.entry(*endpoint).or_insert(*event);
            }
        }
        let endpoints = firsts.into_iter().map(|(endpoint, first)| Found {
            endpoint,
            shard: shard_of(endpoint),
            first: Some(first),
            next_due: None,
        });
        let report = Report::Found {
            reason: request.reason,
            epochs: request.shards,
            endpoints: endpoints.collect(),
        };
        match request.reason {
            Reason::Taken => self.engine.handle(EngineMessage::Surveyed(report)),
            Reason::Sweep => self.swept = Some(report),
        }
    }

    fn sweep(&mut self) {
        if !self.engine.is_sweeping() {
            self.engine.sweep();
        }
    }
}

struct World {
    rng: StdRng,
    /// Whether dispatchers sweep. A sweep also finds what nobody else does, so that most histories go without.
    sweeps: bool,
    db: Database,
    nodes: Vec<Node>,
    events: u128,
    /// How often each delivery was sent, and which node is sending it.
    sends: HashMap<(EndpointId, EventId), u32>,
    handed_back: HashMap<(EndpointId, EventId), u32>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let nodes = (0..rng.random_range(1..4)).map(|_| Node::new()).collect();
        let mut db = Database::default();
        for shard in 0..SHARDS {
            db.shards.insert(Shard(shard), (None, 0));
        }
        Self {
            rng,
            sweeps: false,
            db,
            nodes,
            events: 0,
            sends: HashMap::new(),
            handed_back: HashMap::new(),
        }
    }

    fn any_node(&mut self) -> usize {
        self.rng.random_range(0..self.nodes.len())
    }

    fn emit(&mut self) {
        let endpoint = EndpointId(self.rng.random_range(1..=ENDPOINTS));
        self.emit_to(endpoint);
    }

    /// The first event of an endpoint, just when its shard has no owner.
    fn emit_first(&mut self, shard: Shard) {
        let unused = (1..=ENDPOINTS).map(EndpointId);
        let mut unused = unused.filter(|id| shard_of(*id) == shard && !self.db.endpoints.contains_key(id));
        if let Some(endpoint) = unused.next() {
            self.emit_to(endpoint);
        }
    }

    fn emit_to(&mut self, endpoint: EndpointId) {
        let xid = self.db.next_xid();
        self.db.endpoints.entry(endpoint).or_insert(xid);
        self.events += 1;
        // Ids are not in the order of commits.
        let event = EventId(Uuid::from_u128(self.rng.random::<u128>() >> 1));
        let delivery = QueuedDelivery {
            event,
            tenant: TenantId(1),
            type_id: TypeId(1),
            attempt: 0,
            step: 0,
            key: None,
            replay: None,
        };
        self.db.queue.insert((endpoint, event), Row { delivery, xid });
        self.sends.insert((endpoint, event), 0);
    }

    fn change_settings(&mut self) {
        let endpoint = EndpointId(self.rng.random_range(1..=ENDPOINTS));
        if self.db.endpoints.contains_key(&endpoint) {
            let xid = self.db.next_xid();
            self.db.endpoints.insert(endpoint, xid);
            if self.rng.random_bool(0.3) {
                self.db.broken.insert(endpoint)
            } else {
                self.db.broken.remove(&endpoint)
            };
        }
    }

    /// A free shard gets an owner.
    fn take(&mut self) {
        let node = self.any_node();
        let shard = Shard(self.rng.random_range(0..SHARDS));
        self.give(shard, node);
    }

    fn give(&mut self, shard: Shard, node: usize) {
        let Some((owner @ None, epoch)) = self.db.shards.get_mut(&shard) else {
            return;
        };
        (*owner, *epoch) = (Some(node), *epoch + 1);
        let gained = vec![(shard, Epoch(*epoch))];
        self.nodes[node].engine.handle(EngineMessage::Gained(gained));
    }

    fn drain(&mut self) {
        let shard = Shard(self.rng.random_range(0..SHARDS));
        if let Some((Some(owner), _)) = self.db.shards.get(&shard) {
            self.nodes[*owner]
                .engine
                .handle(EngineMessage::Drain(vec![shard]));
        }
    }

    fn release(&mut self, node: usize) {
        while let Ok(shard) = self.nodes[node].drained.try_recv() {
            if self.db.owns(node, shard) {
                self.free(shard);
                self.nodes[node].engine.handle(EngineMessage::Lost(vec![shard]));
                self.emit_first(shard);
            }
        }
    }

    fn free(&mut self, shard: Shard) {
        if let Some((owner, epoch)) = self.db.shards.get_mut(&shard) {
            (*owner, *epoch) = (None, *epoch + 1);
        }
    }

    /// The lease expires: attempts in progress are abandoned, and the shards are free.
    fn lose_lease(&mut self) {
        let node = self.any_node();
        let mine: Vec<Shard> = (0..SHARDS)
            .map(Shard)
            .filter(|shard| self.db.owns(node, *shard))
            .collect();
        self.nodes[node].term.cancel();
        self.nodes[node].engine.handle(EngineMessage::Suspended);
        for (picked, _) in std::mem::take(&mut self.nodes[node].finished) {
            self.count_handed_back(&picked);
        }
        mine.iter().for_each(|shard| self.free(*shard));
        let one = &mut self.nodes[node];
        one.engine.handle(EngineMessage::Lost(mine));
        one.term = CancellationToken::new();
        one.engine.handle(EngineMessage::Resumed(one.term.clone()));
    }

    fn count_handed_back(&mut self, picked: &Picked) {
        let key = (picked.endpoint.id, picked.delivery.event);
        *self.handed_back.entry(key).or_default() += 1;
    }

    /// Attempts begin and end at once, or are abandoned.
    fn attempt(&mut self, node: usize) {
        let one = &mut self.nodes[node];
        let picked: Vec<Picked> = one
            .picked
            .iter_mut()
            .flat_map(|picked| std::iter::from_fn(|| picked.try_recv().ok()))
            .collect();
        for mut picked in picked {
            let key = (picked.endpoint.id, picked.delivery.event);
            if picked.term.is_cancelled() || !picked.endpoint.may_start() {
                continue;
            }
            assert!(
                self.db.owns(node, shard_of(key.0)),
                "{key:?} was sent by one that does not own it"
            );
            *self.sends.entry(key).or_default() += 1;
            if self.rng.random_bool(0.1) {
                self.count_handed_back(&picked);
                continue;
            }
            picked.guard.result = Some(AttemptResult {
                success: true,
                slow: false,
                about_endpoint: true,
            });
            let epoch = picked.epoch;
            self.nodes[node].finished.push((picked, epoch));
        }
    }

    /// Results whose owner and epoch still match count.
    fn record(&mut self, node: usize) {
        let results = std::mem::take(&mut self.nodes[node].finished);
        let mut recorded = Vec::new();
        for (picked, epoch) in results {
            let key = (picked.endpoint.id, picked.delivery.event);
            let (owner, current) = self.db.shards[&shard_of(key.0)];
            let counts = owner == Some(node) && current == epoch.0 && self.db.queue.remove(&key).is_some();
            if !counts {
                self.count_handed_back(&picked);
            }
            recorded.push(Recorded {
                endpoint: key.0,
                epoch,
                event: key.1,
                number: picked.delivery.number(),
                fate: if counts { Fate::Ended } else { Fate::Discarded },
            });
            // The attempt ends before its record is reported.
            drop(picked);
        }
        let one = &mut self.nodes[node];
        one.run_engine();
        one.engine.handle(EngineMessage::Recorded(recorded));
    }

    fn step(&mut self) {
        let node = self.any_node();
        match self.rng.random_range(0..100) {
            0..15 => self.emit(),
            15..17 => self.change_settings(),
            17..22 => self.take(),
            22..27 => self.drain(),
            27 => self.lose_lease(),
            28..35 => self.release(node),
            35..50 => self.nodes[node].run_engine(),
            50..56 => self.nodes[node].begin_cycle(),
            56..60 => self.nodes[node].read(&self.db),
            60 if self.rng.random_bool(0.2) => self.nodes[node].lose_connection(),
            60..70 => self.deliver_message(node),
            70..82 => self.serve(node),
            82 if self.sweeps => self.nodes[node].sweep(),
            82..86 => self.nodes[node].survey(&self.db),
            86..94 => self.attempt(node),
            _ => self.record(node),
        }
    }

    fn deliver_message(&mut self, node: usize) {
        let one = &mut self.nodes[node];
        if let Some(message) = one.messages.pop_front() {
            one.engine.apply(message);
        }
    }

    /// Every action of a node, once.
    fn serve(&mut self, node: usize) {
        self.release(node);
        self.nodes[node].run_engine();
        self.nodes[node].begin_cycle();
        self.nodes[node].read(&self.db);
        while !self.nodes[node].messages.is_empty() {
            self.deliver_message(node);
        }
        self.nodes[node].survey(&self.db);
        self.nodes[node].run_engine();
        self.attempt(node);
        self.record(node);
    }

    /// No more faults, and every shard has an owner.
    fn quiet_down(&mut self) {
        for endpoint in std::mem::take(&mut self.db.broken) {
            let xid = self.db.next_xid();
            self.db.endpoints.insert(endpoint, xid);
        }
        for _ in 0..400 {
            for shard in (0..SHARDS).map(Shard) {
                let node = self.any_node();
                self.give(shard, node);
            }
            (0..self.nodes.len()).for_each(|node| self.serve(node));
            if self.db.queue.is_empty() {
                return;
            }
        }
    }

    /// Each lane has the current settings of its endpoint, even without a new event.
    fn check_settings(&mut self) {
        for endpoint in self.db.endpoints.keys().copied().collect::<Vec<_>>() {
            let xid = self.db.next_xid();
            self.db.endpoints.insert(endpoint, xid);
        }
        for _ in 0..3 {
            (0..self.nodes.len()).for_each(|node| self.serve(node));
        }
        for node in &self.nodes {
            for endpoint in node.engine.lanes() {
                let version = self.db.endpoints[&endpoint.id];
                assert_eq!(
                    endpoint.url.path(),
                    format!("/{version}"),
                    "{:?} has old settings",
                    endpoint.id
                );
            }
        }
    }

    /// One more event for each endpoint once everything is quiet: none may be missed.
    fn check(&mut self) {
        self.quiet_down();
        self.check_settings();
        for endpoint in self.db.endpoints.keys().copied().collect::<Vec<_>>() {
            let xid = self.db.next_xid();
            let event = EventId(Uuid::from_u128(u128::MAX - u128::from(endpoint.0.unsigned_abs())));
            let delivery = QueuedDelivery {
                event,
                tenant: TenantId(1),
                type_id: TypeId(1),
                attempt: 0,
                step: 0,
                key: None,
                replay: None,
            };
            self.db.queue.insert((endpoint, event), Row { delivery, xid });
        }
        self.quiet_down();
        let left: Vec<_> = self.db.queue.keys().collect();
        assert!(left.is_empty(), "never sent: {left:?}");
        for (key, sends) in &self.sends {
            let again = self.handed_back.get(key).copied().unwrap_or(0);
            assert!(*sends <= 1 + again, "{key:?} was sent {sends} times");
        }
    }
}

fn play(sweeps: bool, judge: impl Fn(&mut World) + std::panic::RefUnwindSafe) {
    for seed in 0..HISTORIES {
        let history = std::panic::catch_unwind(|| {
            let mut world = World::new(seed);
            world.sweeps = sweeps;
            (0..STEPS).for_each(|_| world.step());
            judge(&mut world);
        });
        if let Err(panic) = history {
            eprintln!("the history of seed {seed} failed");
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn no_endpoint_is_deaf_whatever_moves_while_it_is_read() {
    play(false, World::check);
}

#[test]
fn a_sweep_takes_no_row_for_missed_that_the_tail_was_not_to_show() {
    play(true, |world| {
        world.check();
        let missed: u64 = world.nodes.iter().map(|node| node.engine.missed_count()).sum();
        assert_eq!(missed, 0, "rows that were on their way were taken for missed");
    });
}
