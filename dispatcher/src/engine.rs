//! The engine: owns every lane of this process, decides what is read next and what is sent next. It alone changes
//! lanes, and it awaits nothing but messages, so that a slow database or a slow endpoint never holds it up.
//!
//! In: shards from `shards.rs`, rows from `read.rs`, places and results from `attempt.rs` and `record.rs`.
//! Out: cycles to `read.rs`, picked deliveries to `attempt.rs`.

use std::{
    collections::{BTreeSet, HashMap, HashSet, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use postrider_proto::{EndpointId, EndpointState, Epoch, EventId, Shard};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::{
    Settings, Wake,
    attempt::{Picked, Place},
    breaker::Monotonic,
    clock::Clock,
    division::Holder,
    draining::Draining,
    endpoint::EndpointRow,
    job::Job,
    lane::{Deed, Lane, Pace, ReadNumber, Verdict},
    meters::{Hand, METERS},
    places::Places,
    read::{Cycle, Message},
    record::{Fate, Finished, Recorded},
    replays::withdraw::Withdrawal,
    statistics::Activity,
    survey::{self, Found, Reason, Report},
    vault::Vault,
};

/// Between two reads while there is work.
const BUSY_WAIT: Duration = Duration::from_millis(3);
/// The longest between two looks at what waits for time.
const LOOK_WAIT: Duration = Duration::from_millis(500);
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// A sweep that takes long, because Postgres passes over many rows that are gone, comes less often: it takes at most this part
/// of the time.
const SWEEP_PART: u32 = 20;
const SHOW_EVERY: Duration = Duration::from_secs(1);
/// Lanes that refill in one cycle, and lanes whose retries are read in one.
const READS_MAX: usize = 256;
/// Lanes whose ordering keys are looked up in one cycle: each is a statement of its own.
const KEY_READS_MAX: usize = 32;

/// What others tell the engine. One queue, so that what happened first is heard first.
#[derive(Debug)]
pub(crate) enum Event {
    Gained(Vec<(Shard, Epoch)>),
    Lost(Vec<Shard>),
    /// Give these back once nothing of them is on the wire.
    Drain(Vec<Shard>),
    /// The lease ran out: nothing may start.
    Suspended,
    /// A new term of the lease. What is picked under it ends with it.
    Resumed(CancellationToken),
    /// A place on the wire is free again. Without an answer the delivery is handed back.
    Left {
        endpoint: EndpointId,
        epoch: Epoch,
        event: EventId,
        number: u16,
        verdict: Option<Verdict>,
    },
    Recorded(Vec<Recorded>),
    /// What could be taken back of cancelled replays is back where it was.
    Withdrawn {
        endpoint: EndpointId,
        epoch: Epoch,
    },
    Surveyed(Report),
}

pub(crate) struct Engine {
    pub(crate) settings: Settings,
    pub(crate) vault: Vault,
    pub(crate) clock: Clock,
    pub(crate) events: mpsc::UnboundedSender<Event>,
    /// By the pace of the lane.
    pub(crate) picked: [mpsc::UnboundedSender<Picked>; Pace::COUNT],
    pub(crate) finished: mpsc::UnboundedSender<Finished>,
    pub(crate) started: Instant,
    pub(crate) cycles: mpsc::Sender<Cycle>,
    /// Ends a patient read.
    pub(crate) hurry: Wake,
    pub(crate) drained: mpsc::UnboundedSender<Shard>,
    /// Endpoints that were deleted while rows of them waited.
    pub(crate) deleted: mpsc::UnboundedSender<EndpointId>,
    pub(crate) withdrawals: mpsc::UnboundedSender<Withdrawal>,
    /// What is to be looked for beside the tail.
    pub(crate) surveys: mpsc::UnboundedSender<survey::Request>,
    /// The snapshot of settings that has been applied.
    pub(crate) applied: watch::Sender<Option<String>>,
    /// What each endpoint has in hand, said about once a second.
    pub(crate) activity: watch::Sender<Vec<Activity>>,
    pub(crate) places: Places,
    pub(crate) state: State,
}

#[derive(Default)]
pub(crate) struct State {
    owned: HashMap<Shard, Epoch>,
    /// Owned, but not yet tailed.
    taken: Vec<Shard>,
    /// Tailed from the end of the cycle under way: what they hold then is looked for.
    begun: Vec<Shard>,
    /// Endpoints with work and no lane, to be loaded, with what was found of them.
    found: HashMap<EndpointId, Found>,
    /// Of those, the ones that the cycle under way loads.
    loading: Vec<EndpointId>,
    /// The reader has a new connection: the settings of all lanes are read again.
    reload: bool,
    /// Rows that a sweep has seen. By a read of this number the tail must have shown them.
    suspects: VecDeque<(ReadNumber, Found)>,
    /// Rows that the tail did not show, if they are still there when they are read.
    missed: HashMap<EndpointId, (Shard, EventId)>,
    missed_count: u64,
    /// Endpoints whose settings can't be used. They have no lane until those change.
    unusable: HashMap<EndpointId, Shard>,
    sweeping: bool,
    /// Shards that are searched as if they had just been taken, since the sweep under way began: what it sees of them says
    /// nothing about the tail.
    sweep_outdated: HashSet<Shard>,
    sweep_at: Option<Instant>,
    /// To be given back.
    draining: Draining,
    /// The term of the lease that deliveries are picked under, once there is one.
    term: Option<CancellationToken>,
    stopping: bool,
    lanes: HashMap<EndpointId, Lane>,
    /// Lanes that can send, each once, served in turn.
    ready: VecDeque<EndpointId>,
    is_ready: HashSet<EndpointId>,
    /// Spilled lanes with room, each once, refilled in turn.
    hungry: VecDeque<EndpointId>,
    is_hungry: HashSet<EndpointId>,
    /// When lanes have retries due.
    due: BTreeSet<(DateTime<Utc>, EndpointId)>,
    due_of: HashMap<EndpointId, DateTime<Utc>>,
    /// When lanes that wait for their rate or for a probe may go on.
    timers: BTreeSet<(Monotonic, EndpointId)>,
    timer_of: HashMap<EndpointId, Monotonic>,
    /// Recorded deliveries, to be forgotten after a read of this number.
    recorded: VecDeque<(ReadNumber, EndpointId, EventId, u16)>,
    /// Taken back of cancelled replays; until a read of this number older ones may still show it.
    withdrawn: VecDeque<(ReadNumber, EndpointId, Epoch)>,
    forget: Vec<EndpointId>,
    reads: ReadNumber,
    reading: bool,
    /// Nothing was on the wire and nothing new came: the next read may wait for something.
    patient: bool,
}

impl Engine {
    /// Runs until told to stop and everything on the wire is recorded, or the given time after that.
    pub(crate) async fn run(
        mut self,
        mut events: mpsc::UnboundedReceiver<Event>,
        mut messages: mpsc::Receiver<Message>,
        wake: Wake,
        stop: CancellationToken,
    ) {
        let mut heard = Vec::new();
        let mut read_at = Instant::now();
        self.state.sweep_at = Some(Instant::now() + SWEEP_EVERY);
        let mut show_at = Instant::now();
        let mut give_up_at = None;
        loop {
            self.report_drained();
            self.pump();
            if self.state.stopping {
                let over = give_up_at.is_some_and(|at| Instant::now() >= at);
                if over || self.state.lanes.values().all(Lane::is_drained) {
                    return;
                }
            }
            let now = Instant::now();
            if now >= show_at {
                show_at = now + SHOW_EVERY;
                self.show();
            }
            if !self.state.sweeping && self.state.sweep_at.is_some_and(|at| now >= at) {
                self.sweep();
            }
            if now >= read_at {
                self.read_if_idle();
            }
            let sleep_until = self.next_look(read_at, give_up_at);
            tokio::select! {
                n = events.recv_many(&mut heard, 1024) => {
                    if n == 0 { return }
                    for event in heard.drain(..) {
                        self.hear(event);
                    }
                    if self.wants_to_read() {
                        read_at = Instant::now();
                        self.hurry.now();
                    }
                }
                Some(message) = messages.recv() => {
                    if let Some(rows) = self.apply(message) {
                        let busy = rows > 0 || self.places.in_use();
                        read_at = Instant::now() + if busy { BUSY_WAIT } else { Duration::ZERO };
                        self.state.patient = !busy;
                        if self.wants_to_read() { read_at = Instant::now() + Duration::from_millis(1) }
                    }
                }
                () = wake.wait(), if !self.state.reading => read_at = Instant::now(),
                () = tokio::time::sleep_until(sleep_until.into()) => {
                    if self.wants_to_read() {
                        read_at = Instant::now();
                        self.hurry.now();
                    }
                }
                () = stop.cancelled(), if !self.state.stopping => {
                    self.state.stopping = true;
                    give_up_at = Some(Instant::now() + self.settings.timeout + Duration::from_secs(2));
                }
            }
        }
    }

    /// What the lanes have in hand: for the pages, and for the figures.
    fn show(&self) {
        let (elapsed, now) = (self.started.elapsed(), self.clock.now());
        let mut hand = Hand {
            shards: self.state.owned.len(),
            in_flight: self.places.in_flight(),
            in_flight_max: self.places.count(),
            unrecorded: self.places.unrecorded(),
            ..Hand::default()
        };
        let mut shown = Vec::new();
        for (id, lane) in &self.state.lanes {
            let activity = lane.activity();
            let due = self.state.due_of.get(id).copied();
            hand.add(activity.as_ref(), due, lane.is_ready(elapsed), now);
            shown.extend(activity);
        }
        METERS.show(&hand);
        self.activity.send_replace(shown);
    }

    fn next_look(&self, read_at: Instant, give_up_at: Option<Instant>) -> Instant {
        let now = Instant::now();
        let mut at = if self.state.reading {
            now + LOOK_WAIT
        } else {
            read_at
        };
        if self.places.has_more_to_call() {
            at = at.min(now + Duration::from_millis(1));
        }
        if let Some((timer, _)) = self.state.timers.first() {
            at = at.min(self.started + *timer);
        }
        if let Some((due, _)) = self.state.due.first() {
            let wait = (*due - self.clock.now()).to_std().unwrap_or_default();
            at = at.min(now + wait.max(Duration::from_millis(1)));
        }
        give_up_at.map_or(at, |give_up| at.min(give_up))
    }

    fn wants_to_read(&self) -> bool {
        let state = &self.state;
        !state.taken.is_empty()
            || !state.hungry.is_empty()
            || state.found.len() > state.loading.len()
            || state.due.first().is_some_and(|(at, _)| *at <= self.clock.now())
    }

    /// Deals with what may be dealt with, one delivery a lane in turn.
    pub(crate) fn pump(&mut self) {
        let Some(term) = self.state.term.clone().filter(|term| !term.is_cancelled()) else {
            return;
        };
        if self.state.stopping {
            return;
        }
        let now = self.started.elapsed();
        self.wake_lanes(now);
        while let Some(id) = self.state.ready.front().copied() {
            if !self.places.any_free() {
                return;
            }
            let Some(room) = self.places.room() else { return };
            self.state.ready.pop_front();
            self.state.is_ready.remove(&id);
            let Some(lane) = self.state.lanes.get_mut(&id) else {
                continue;
            };
            if !self.state.draining.lets_start(lane, now) {
                continue;
            }
            let (pace, on_wire) = (lane.pace(), lane.on_wire());
            let holder = Holder {
                endpoint: id,
                tenant: lane.endpoint().tenant,
            };
            if let Err(full) = self.places.check(holder, pace, on_wire) {
                self.places.wait_for(full, holder);
                continue;
            }
            match lane.pick(now) {
                Some((job, Deed::Send)) => {
                    let number = job.number();
                    let attempt = (id, job.event, number);
                    self.places.begin(now, attempt, holder, pace, on_wire);
                    let _ = self.picked[pace as usize].send(Picked {
                        endpoint: lane.endpoint().clone(),
                        epoch: lane.epoch(),
                        term: term.clone(),
                        place: Place {
                            endpoint: id,
                            epoch: lane.epoch(),
                            event: job.event,
                            number,
                            events: self.events.clone(),
                            verdict: None,
                        },
                        job,
                        room,
                    });
                }
                Some((job, Deed::Bury(reason))) => {
                    let buried = Finished::buried(
                        lane.endpoint(),
                        lane.epoch(),
                        &job,
                        reason,
                        self.clock.now(),
                        room,
                    );
                    let _ = self.finished.send(buried);
                }
                None => {}
            }
            self.settle(id);
        }
    }

    /// Lanes that waited for their time or for a place, and those that have turned out slow.
    fn wake_lanes(&mut self, now: Monotonic) {
        while let Some((_, id)) = self.state.timers.first().copied().filter(|(at, _)| *at <= now) {
            self.state.timers.pop_first();
            self.state.timer_of.remove(&id);
            self.settle(id);
        }
        for id in self.places.slowed(now) {
            if let Some(lane) = self.state.lanes.get_mut(&id) {
                lane.slowed();
            }
        }
        for id in self.places.called() {
            self.settle(id);
        }
    }

    /// Puts a lane into the lists it belongs in. Called after every change of one.
    fn settle(&mut self, id: EndpointId) {
        let now = self.started.elapsed();
        let state = &mut self.state;
        let lane = state.lanes.get(&id);
        if let Some(lane) = lane.filter(|lane| !state.draining.is_stopped(lane.endpoint().shard)) {
            if lane.is_ready(now) && state.is_ready.insert(id) {
                state.ready.push_back(id);
            }
            if (lane.wants_refill().is_some() || lane.wants_keys()) && state.is_hungry.insert(id) {
                state.hungry.push_back(id);
            }
        }
        let due = lane.and_then(Lane::next_due);
        keep_in_order(&mut state.due, &mut state.due_of, id, due);
        let timer = lane.and_then(Lane::ready_at).filter(|at| *at > now);
        keep_in_order(&mut state.timers, &mut state.timer_of, id, timer);
    }

    /// Asks the reader for the tail, and for what the lanes want beside it. One cycle at a time.
    pub(crate) fn read_if_idle(&mut self) {
        if self.state.reading {
            return;
        }
        let now = self.clock.now();
        let state = &mut self.state;
        let wanted = !state.taken.is_empty() || !state.hungry.is_empty() || !state.found.is_empty();
        let wanted = wanted || state.reload;
        let wanted = wanted || state.due.first().is_some_and(|(at, _)| *at <= now);
        let mut load: Vec<EndpointId> = state.found.keys().copied().take(READS_MAX).collect();
        // All at once: the snapshot of this cycle is published as the one whose settings are applied.
        let reload = std::mem::take(&mut state.reload);
        if reload {
            load.extend(state.lanes.keys());
        }
        let mut cycle = Cycle {
            patient: state.patient && !wanted,
            number: state.reads + 1,
            owned: state
                .owned
                .keys()
                .copied()
                .filter(|shard| !state.taken.contains(shard))
                .collect(),
            taken: std::mem::take(&mut state.taken),
            load,
            forget: std::mem::take(&mut state.forget),
            ..Cycle::default()
        };
        while cycle.refills.len() < READS_MAX
            && cycle.keys.len() < KEY_READS_MAX
            && let Some(id) = state.hungry.pop_front()
        {
            state.is_hungry.remove(&id);
            let Some(lane) = state.lanes.get_mut(&id) else {
                continue;
            };
            cycle
                .refills
                .extend(lane.wants_refill().map(|refill| (id, refill)));
            if lane.wants_keys() {
                cycle.keys.push((id, lane.key_read_begins()));
            }
        }
        for (_, id) in state.due.iter().take_while(|(at, _)| *at <= now) {
            if cycle.due.len() == READS_MAX {
                break;
            }
            if let Some(lane) = state.lanes.get_mut(id)
                && let Some(asked) = lane.wants_due(now)
            {
                lane.due_read_begins();
                cycle.due.push((*id, asked));
            }
        }
        let (taken, load) = (cycle.taken.clone(), cycle.load.clone());
        match self.cycles.try_send(cycle) {
            Ok(()) => {
                state.reads += 1;
                state.reading = true;
                state.begun = taken;
                state.loading = load;
            }
            Err(mpsc::error::TrySendError::Full(cycle) | mpsc::error::TrySendError::Closed(cycle)) => {
                state.taken = cycle.taken;
                state.forget = cycle.forget;
                state.reload = reload;
                for (id, keys) in cycle.keys {
                    if let Some(lane) = self.state.lanes.get_mut(&id) {
                        lane.look_again(keys);
                    }
                    self.settle(id);
                }
                for (id, _) in cycle.refills {
                    self.settle(id);
                }
            }
        }
    }

    pub(crate) fn hear(&mut self, event: Event) {
        match event {
            Event::Gained(shards) => {
                for (shard, epoch) in shards {
                    self.drop_lanes(shard);
                    self.state.draining.remove(shard);
                    self.state.owned.insert(shard, epoch);
                    self.state.taken.push(shard);
                }
            }
            Event::Lost(shards) => {
                for shard in shards {
                    self.state.owned.remove(&shard);
                    self.state.draining.remove(shard);
                    self.state.taken.retain(|taken| *taken != shard);
                    self.drop_lanes(shard);
                }
            }
            Event::Drain(shards) => {
                // Said again when one could not be released: then it is reported again.
                for shard in shards.iter().filter(|shard| self.state.owned.contains_key(shard)) {
                    self.state.draining.begin(*shard);
                }
            }
            Event::Suspended => self.state.term = None,
            Event::Resumed(term) => self.state.term = Some(term),
            Event::Left {
                endpoint,
                epoch,
                event,
                number,
                verdict,
            } => {
                self.places.leave(&(endpoint, event, number));
                let now = self.clock.now();
                // One of an earlier ownership says nothing of what this lane has under way.
                let lane = self.state.lanes.get_mut(&endpoint);
                if let Some(lane) = lane.filter(|lane| lane.epoch() == epoch) {
                    self.state.draining.ended(lane.endpoint().shard);
                    match verdict {
                        Some(verdict) => lane.answered(event, number, verdict, self.started.elapsed()),
                        None => {
                            lane.handed_back(event, number, now);
                            self.withdraw(endpoint);
                        }
                    }
                    self.settle(endpoint);
                }
            }
            Event::Withdrawn { endpoint, epoch } => {
                self.state
                    .withdrawn
                    .push_back((self.state.reads + 1, endpoint, epoch));
            }
            Event::Recorded(results) => {
                for result in results {
                    self.recorded(result);
                }
            }
            Event::Surveyed(report) => self.surveyed(report),
        }
    }

    /// Looks for rows that the tail did not show. There should be none.
    pub(crate) fn sweep(&mut self) {
        if self.state.owned.is_empty() {
            self.state.sweep_at = Some(Instant::now() + SWEEP_EVERY);
            return;
        }
        self.state.sweeping = true;
        self.state.sweep_outdated.clear();
        // Shards that are not tailed yet have rows that no tail has shown.
        let state = &self.state;
        let is_tailed = |shard: &Shard| !state.taken.contains(shard) && !state.begun.contains(shard);
        let tailed = state.owned.keys().copied().filter(is_tailed).collect();
        self.survey(tailed, Reason::Sweep);
    }

    fn survey(&mut self, shards: Vec<Shard>, reason: Reason) {
        if reason == Reason::Taken {
            self.state.sweep_outdated.extend(&shards);
            self.state
                .suspects
                .retain(|(_, found)| !shards.contains(&found.shard));
        }
        let owned = |shard: Shard| self.state.owned.get(&shard).map(|epoch| (shard, *epoch));
        let shards = shards.into_iter().filter_map(owned).collect();
        let _ = self.surveys.send(survey::Request { shards, reason });
    }

    fn surveyed(&mut self, report: Report) {
        match report {
            Report::Found {
                reason,
                epochs,
                endpoints,
            } => {
                let epochs: HashMap<Shard, Epoch> = epochs.into_iter().collect();
                for found in endpoints {
                    // The shard may have been lost, or lost and gained, since it was asked for.
                    if self.state.owned.get(&found.shard) != epochs.get(&found.shard) {
                        continue;
                    }
                    match reason {
                        Reason::Taken => self.found(found),
                        Reason::Sweep if self.state.sweep_outdated.contains(&found.shard) => {}
                        Reason::Sweep => self.state.suspects.push_back((self.state.reads + 1, found)),
                    }
                }
            }
            Report::Swept(took) => {
                self.state.sweeping = false;
                self.state.sweep_at = Some(Instant::now() + SWEEP_EVERY.max(took * SWEEP_PART));
            }
        }
    }

    /// There are rows that no tail will show.
    fn found(&mut self, found: Found) {
        match self.state.lanes.get_mut(&found.endpoint) {
            Some(lane) => {
                lane.found(found.first, found.next_due);
                self.settle(found.endpoint);
            }
            None if self.state.unusable.contains_key(&found.endpoint) => {}
            None => {
                let known = self.state.found.entry(found.endpoint).or_insert(found);
                known.first = known.first.into_iter().chain(found.first).min();
                known.next_due = known.next_due.into_iter().chain(found.next_due).min();
            }
        }
    }

    /// Rows that a sweep saw before a read whose tail should have shown them began. Where the lane has nothing to do they were
    /// sent meanwhile, or missed: reading them says which.
    fn check_suspects(&mut self, number: ReadNumber) {
        while let Some((after, found)) = self.state.suspects.front().copied() {
            if after > number {
                break;
            }
            self.state.suspects.pop_front();
            let lane = self.state.lanes.get(&found.endpoint);
            let is_owned = self.state.owned.contains_key(&found.shard);
            // Its rows were found by a survey and are about to be read.
            let is_expected = self.state.found.contains_key(&found.endpoint);
            // Its rows wait for settings that can be used.
            let is_unusable = self.state.unusable.contains_key(&found.endpoint);
            if !is_owned || is_expected || is_unusable || lane.is_some_and(|lane| !lane.is_idle()) {
                continue;
            }
            if let Some(first) = found.first {
                self.state.missed.insert(found.endpoint, (found.shard, first));
            }
            self.found(found);
        }
    }

    /// Rows that a lane without work was given to read again.
    fn note_missed(&mut self, endpoint: EndpointId, rows: &[Job]) {
        if let Some((_, missed)) = self.state.missed.remove(&endpoint)
            && rows.iter().any(|row| row.event == missed)
        {
            tracing::error!(%endpoint, "the sweep found rows that the tail had missed");
            METERS.tail_missed.increment(1);
            self.state.missed_count += 1;
        }
    }

    /// Of an endpoint that has deliveries of cancelled replays in line.
    fn withdraw(&mut self, id: EndpointId) {
        let now = self.clock.now();
        let lane = self.state.lanes.get_mut(&id);
        if let Some(withdrawal) = lane.and_then(|lane| lane.withdraw(now)) {
            let _ = self.withdrawals.send(withdrawal);
        }
    }

    fn recorded(&mut self, result: Recorded) {
        let Recorded {
            endpoint,
            epoch,
            event,
            number,
            fate,
        } = result;
        let now = self.clock.now();
        let lane = self.state.lanes.get_mut(&endpoint);
        let Some(lane) = lane.filter(|lane| lane.epoch() == epoch) else {
            return;
        };
        self.state.draining.ended(lane.endpoint().shard);
        let due = match fate {
            Fate::Ended => None,
            Fate::Due(at) => Some(at),
            // Perhaps it was recorded without our hearing of it: look at the retries again.
            Fate::Void => {
                METERS.results_void.increment(1);
                lane.search_retries();
                Some(now)
            }
        };
        lane.recorded(event, number, due);
        // A read under way began before we knew of the record; the one after it is the first that can't show an old copy.
        self.state
            .recorded
            .push_back((self.state.reads + 1, endpoint, event, number));
        self.settle(endpoint);
    }

    /// Answers the number of rows when the message ends a cycle.
    pub(crate) fn apply(&mut self, message: Message) -> Option<usize> {
        match message {
            Message::Endpoints(rows) => {
                for row in rows {
                    self.introduce(&row);
                }
            }
            Message::Page { rows, cut } => {
                let mut touched = HashSet::new();
                for row in rows {
                    let Some(lane) = self.state.lanes.get_mut(&row.endpoint) else {
                        if !self.state.owned.contains_key(&row.shard) {
                            continue;
                        }
                        // Whatever the reason, it is found again: the reader is asked for the endpoint's settings.
                        self.found(Found {
                            endpoint: row.endpoint,
                            shard: row.shard,
                            first: Some(row.job.event),
                            next_due: None,
                        });
                        continue;
                    };
                    lane.offer(row.job);
                    if touched.insert(row.endpoint) && lane.endpoint().state == EndpointState::Deleted {
                        let _ = self.deleted.send(row.endpoint);
                    }
                }
                if let Some((endpoint, last)) = cut
                    && let Some(lane) = self.state.lanes.get_mut(&endpoint)
                {
                    lane.cut(last);
                }
                for endpoint in touched {
                    self.settle(endpoint);
                }
            }
            Message::Refilled {
                endpoint,
                asked,
                rows,
            } => {
                self.note_missed(endpoint, &rows);
                if let Some(lane) = self.state.lanes.get_mut(&endpoint) {
                    lane.refilled(asked, rows);
                }
                self.settle(endpoint);
            }
            Message::Due { endpoint, due } => {
                if let Some(lane) = self.state.lanes.get_mut(&endpoint) {
                    lane.due_read(due);
                }
                self.settle(endpoint);
            }
            Message::Keys { endpoint, heads } => {
                if let Some(lane) = self.state.lanes.get_mut(&endpoint) {
                    lane.keys_read(heads);
                }
                self.settle(endpoint);
            }
            Message::Done {
                number,
                tailed,
                rows,
                settings,
            } => {
                self.state.reading = false;
                self.forget_recorded(number);
                self.go_on_after_withdrawals(number);
                self.after_loading();
                if tailed {
                    self.check_suspects(number);
                }
                if let Some(snapshot) = settings {
                    self.applied.send_replace(Some(snapshot));
                }
                return Some(rows);
            }
            Message::Lost => {
                self.state.reading = false;
                self.reload();
                return Some(0);
            }
        }
        None
    }

    /// A lane for an endpoint that has none, or new settings for one that has.
    fn introduce(&mut self, row: &EndpointRow) {
        let id = row.id();
        if !self.state.owned.contains_key(&row.shard()) {
            // Lost while it was read. Should the shard come back, the endpoint is told of again before its first row.
            self.state.found.remove(&id);
            self.state.forget.push(id);
            return;
        }
        let now = self.clock.now();
        let endpoint = match row.open(&self.vault, &self.settings) {
            Ok(endpoint) => Arc::new(endpoint),
            Err(error) => {
                tracing::error!(endpoint = %id, %error, "an endpoint can't be served: its deliveries wait");
                // Not with the settings before these either: they may have been replaced because a secret leaked.
                if let Some(lane) = self.state.lanes.remove(&id) {
                    lane.endpoint().stop();
                    self.settle(id);
                }
                // It stays known, so that better settings are told of.
                self.state.found.remove(&id);
                self.state.unusable.insert(id, row.shard());
                return;
            }
        };
        let was_unusable = self.state.unusable.remove(&id).is_some();
        let deleted = endpoint.state == EndpointState::Deleted;
        match self.state.lanes.get_mut(&id) {
            Some(lane) => lane.change(endpoint, now),
            None => {
                let Some(epoch) = self.state.owned.get(&endpoint.shard) else {
                    return;
                };
                self.state.lanes.insert(id, Lane::new(endpoint, *epoch));
                self.state.forget.retain(|gone| *gone != id);
            }
        }
        if let Some(found) = self.state.found.remove(&id) {
            self.found(found);
        }
        // What came for it meanwhile was not kept.
        if was_unusable {
            self.survey(vec![row.shard()], Reason::Taken);
        }
        if deleted {
            let _ = self.deleted.send(id);
        }
        self.withdraw(id);
        self.settle(id);
    }

    /// The shards that this cycle began to tail are searched for what was there before; endpoints that it looked for and did
    /// not find are gone.
    fn after_loading(&mut self) {
        for id in std::mem::take(&mut self.state.loading) {
            self.state.found.remove(&id);
        }
        let begun = std::mem::take(&mut self.state.begun);
        if !begun.is_empty() {
            self.survey(begun, Reason::Taken);
        }
    }

    fn forget_recorded(&mut self, number: ReadNumber) {
        while let Some((after, endpoint, event, attempt)) = self.state.recorded.front().copied() {
            if after > number {
                break;
            }
            self.state.recorded.pop_front();
            if let Some(lane) = self.state.lanes.get_mut(&endpoint) {
                lane.forget(event, attempt);
            }
        }
    }

    fn go_on_after_withdrawals(&mut self, number: ReadNumber) {
        while let Some((after, endpoint, epoch)) = self.state.withdrawn.front().copied() {
            if after > number {
                break;
            }
            self.state.withdrawn.pop_front();
            let now = self.clock.now();
            let lane = self.state.lanes.get_mut(&endpoint);
            if let Some(lane) = lane.filter(|lane| lane.epoch() == epoch) {
                if let Some(again) = lane.withdrawn(now) {
                    let _ = self.withdrawals.send(again);
                }
                self.settle(endpoint);
            }
        }
    }

    /// What was known came from a connection that is gone: every lane reads its rows again. What is on the wire stays.
    fn reload(&mut self) {
        let now = self.clock.now();
        self.state.taken = self.state.owned.keys().copied().collect();
        self.state.reload = true;
        self.state.begun.clear();
        self.state.loading.clear();
        // The next connection knows no endpoint: these are looked for with all others.
        self.state.found.clear();
        self.state.unusable.clear();
        self.state.suspects.clear();
        self.state.missed.clear();
        self.state.sweep_outdated.extend(self.state.owned.keys());
        let ids: Vec<EndpointId> = self.state.lanes.keys().copied().collect();
        for id in ids {
            if let Some(lane) = self.state.lanes.get_mut(&id) {
                lane.reload(now);
            }
            self.settle(id);
        }
    }

    fn drop_lanes(&mut self, shard: Shard) {
        let gone: Vec<EndpointId> = self
            .state
            .lanes
            .iter()
            .filter(|(_, lane)| lane.endpoint().shard == shard)
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            if let Some(lane) = self.state.lanes.remove(&id) {
                lane.endpoint().stop();
            }
            self.state.forget.push(id);
            self.settle(id);
        }
        self.state.found.retain(|_, found| found.shard != shard);
        self.state.suspects.retain(|(_, found)| found.shard != shard);
        self.state.missed.retain(|_, (of, _)| *of != shard);
        let forget = &mut self.state.forget;
        self.state.unusable.retain(|id, of| {
            if *of == shard {
                forget.push(*id);
            }
            *of != shard
        });
    }

    pub(crate) fn report_drained(&mut self) {
        let now = self.started.elapsed();
        if !self.state.draining.wants_a_look(now) {
            return;
        }
        let lanes = self.state.lanes.values();
        let look = self.state.draining.look(lanes, now, self.state.stopping);
        for shard in look.drained {
            let _ = self.drained.send(shard);
        }
        if look.resumed.is_empty() {
            return;
        }
        let lanes = self.state.lanes.iter();
        let resumed = lanes.filter(|(_, lane)| look.resumed.contains(&lane.endpoint().shard));
        for id in resumed.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.settle(id);
        }
    }
}

#[cfg(test)]
impl Engine {
    /// The settings that each lane sends with.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = &std::sync::Arc<crate::endpoint::Endpoint>> {
        self.state.lanes.values().map(Lane::endpoint)
    }

    pub(crate) fn missed_count(&self) -> u64 {
        self.state.missed_count
    }

    pub(crate) fn is_sweeping(&self) -> bool {
        self.state.sweeping
    }
}

/// A set in order of time that holds each endpoint at most once.
fn keep_in_order<T: Ord + Copy>(
    order: &mut BTreeSet<(T, EndpointId)>,
    times: &mut HashMap<EndpointId, T>,
    id: EndpointId,
    time: Option<T>,
) {
    if times.get(&id) == time.as_ref() {
        return;
    }
    if let Some(old) = times.remove(&id) {
        order.remove(&(old, id));
    }
    if let Some(time) = time {
        times.insert(id, time);
        order.insert((time, id));
    }
}
