//! The engine owns every lane of this process and decides what is read next and what is sent next. It alone changes
//! lanes, and it awaits nothing but messages, so that a slow database or endpoint never blocks it.
//!
//! In: shards from `ownership/shards.rs`, rows from `reader.rs`, finished attempts from `attempt.rs` and
//! `recorder.rs`.
//! Out: read cycles to `reader.rs`, picked deliveries to `attempt.rs`.

mod found;
mod reads;
mod shards;
mod state;

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
    clock::Clock,
    deliver::{
        attempt::{InFlightGuard, Picked},
        breaker::Monotonic,
        capacity::Capacity,
        change_watcher::Commits,
        division::Holder,
        draining::Draining,
        endpoint::EndpointRow,
        lane::{Action, Activity, AttemptResult, Lane, Pace, ReadNumber, Withdrawal},
        queued_delivery::QueuedDelivery,
        reader::{Cycle, QueueRow, ReaderMessage},
        recorder::{Fate, Finished, Recorded},
        sending_switch::SendingSwitch,
        survey::{self, Found, Reason, Report},
    },
    health::{Load, Vital},
    telemetry::metrics::{EngineGauges, METRICS},
    vault::Vault,
};

pub(crate) use state::State;
use state::{keep_in_order, pop_up_to};

/// Delay between two reads while there is work and commits are not notified.
const BUSY_WAIT: Duration = Duration::from_millis(3);
/// The longest sleep before timers are checked again.
const SLEEP_MAX: Duration = Duration::from_millis(500);
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// A slow sweep, because Postgres skips many dead rows, runs less often: it uses at most this fraction of the time.
const SWEEP_PART: u32 = 20;
const PUBLISH_EVERY: Duration = Duration::from_secs(1);
/// Lanes refilled in one cycle, and lanes whose retries are read in one.
const READS_MAX: usize = 256;
/// Lanes whose ordering keys are looked up in one cycle: each costs a statement.
const KEY_READS_MAX: usize = 32;

/// Everything sent to the engine. One queue, so that messages are handled in the order they were sent.
#[derive(Debug)]
pub(crate) enum EngineMessage {
    Gained(Vec<(Shard, Epoch)>),
    Lost(Vec<Shard>),
    /// Release these shards once none of their attempts is in flight.
    Drain(Vec<Shard>),
    /// The lease expired: nothing may start.
    Suspended,
    /// A new term of the lease. Attempts picked under it end with it.
    Resumed(CancellationToken),
    /// An attempt has ended. Without a result the delivery is handed back.
    AttemptEnded {
        endpoint: EndpointId,
        epoch: Epoch,
        event: EventId,
        number: u16,
        result: Option<AttemptResult>,
    },
    Recorded(Vec<Recorded>),
    /// Queued deliveries of cancelled replays have been returned to their previous state.
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
    pub(crate) inbox: mpsc::UnboundedSender<EngineMessage>,
    /// Indexed by the pace of the lane.
    pub(crate) picked: [mpsc::UnboundedSender<Picked>; Pace::COUNT],
    pub(crate) finished: mpsc::UnboundedSender<Finished>,
    pub(crate) started: Instant,
    pub(crate) cycles: mpsc::Sender<Cycle>,
    pub(crate) commits: Commits,
    /// Ends a read that waits for changes.
    pub(crate) interrupt: Wake,
    pub(crate) drained: mpsc::UnboundedSender<Shard>,
    /// Endpoints deleted while rows of theirs were pending.
    pub(crate) deleted: mpsc::UnboundedSender<EndpointId>,
    pub(crate) withdrawals: mpsc::UnboundedSender<Withdrawal>,
    /// Searches for work that the tail does not show.
    pub(crate) surveys: mpsc::UnboundedSender<survey::Request>,
    /// The latest snapshot whose settings have been applied.
    pub(crate) applied: watch::Sender<Option<String>>,
    /// The latest of these after which no attempt of an endpoint that it pauses was in flight or unrecorded any more.
    pub(crate) quiet: watch::Sender<Option<String>>,
    /// Load of each endpoint, published about once a second.
    pub(crate) activity: watch::Sender<Vec<Activity>>,
    pub(crate) vital: Arc<Vital>,
    pub(crate) capacity: Capacity,
    pub(crate) switch: SendingSwitch,
    pub(crate) state: State,
}

impl Engine {
    /// Runs until `stop` and until every attempt in flight is recorded, or a grace period after that.
    pub(crate) async fn run(
        mut self,
        mut inbox: mpsc::UnboundedReceiver<EngineMessage>,
        mut messages: mpsc::Receiver<ReaderMessage>,
        wake: Wake,
        stop: CancellationToken,
    ) {
        let mut received = Vec::new();
        let mut read_at = Instant::now();
        self.state.sweep_at = Some(Instant::now() + SWEEP_EVERY);
        let mut publish_at = Instant::now();
        let mut give_up_at = None;
        loop {
            self.report_drained();
            self.report_quiet();
            self.pump();
            if self.state.stopping {
                let over = give_up_at.is_some_and(|at| Instant::now() >= at);
                if over || self.state.lanes.values().all(Lane::is_drained) {
                    return;
                }
            }
            let now = Instant::now();
            if now >= publish_at {
                publish_at = now + PUBLISH_EVERY;
                self.publish_load();
            }
            if !self.state.sweeping && self.state.sweep_at.is_some_and(|at| now >= at) {
                self.sweep();
            }
            if now >= read_at {
                self.read_if_idle();
            }
            let sleep_until = self.next_wake(read_at, give_up_at);
            tokio::select! {
                n = inbox.recv_many(&mut received, 1024) => {
                    if n == 0 { return }
                    for message in received.drain(..) {
                        self.handle(message);
                    }
                    if self.wants_to_read() {
                        read_at = Instant::now();
                        self.interrupt.now();
                    }
                }
                Some(message) = messages.recv() => {
                    if let Some(rows) = self.apply(message) {
                        let busy = (rows > 0 || self.capacity.in_use()) && !self.commits.are_notified();
                        read_at = Instant::now() + if busy { BUSY_WAIT } else { Duration::ZERO };
                        self.state.may_wait = !busy;
                        if self.wants_to_read() { read_at = Instant::now() + Duration::from_millis(1) }
                    }
                }
                () = wake.wait(), if !self.state.reading && !self.commits.are_notified() => {
                    read_at = Instant::now();
                    self.state.may_wait = false;
                }
                () = tokio::time::sleep_until(sleep_until.into()) => {
                    if self.wants_to_read() {
                        read_at = Instant::now();
                        self.interrupt.now();
                    }
                }
                () = stop.cancelled(), if !self.state.stopping => {
                    self.state.stopping = true;
                    give_up_at = Some(Instant::now() + self.settings.timeout + Duration::from_secs(2));
                }
            }
        }
    }

    /// Publishes the load of all lanes, for the dashboard and for metrics.
    fn publish_load(&self) {
        let (elapsed, now) = (self.started.elapsed(), self.clock.now());
        let mut gauges = EngineGauges {
            shards: self.state.owned.len(),
            in_flight: self.capacity.in_flight(),
            in_flight_max: self.capacity.count(),
            unrecorded: self.capacity.unrecorded(),
            ..EngineGauges::default()
        };
        let mut activities = Vec::new();
        for (id, lane) in &self.state.lanes {
            // Nothing is late while nothing may be sent.
            if !self.switch.is_on() {
                break;
            }
            let activity = lane.activity();
            let due = self.state.due_of.get(id).copied();
            gauges.add(activity.as_ref(), due, lane.is_ready(elapsed), now);
            activities.extend(activity);
        }
        METRICS.set_gauges(&gauges);
        self.vital.engine_runs(Load {
            shards: gauges.shards,
            oldest_by_endpoint: gauges.oldest_by_endpoint,
            oldest_by_dispatcher: gauges.oldest_by_dispatcher,
        });
        self.activity.send_replace(activities);
    }

    fn next_wake(&self, read_at: Instant, give_up_at: Option<Instant>) -> Instant {
        let now = Instant::now();
        let mut at = if self.state.reading {
            now + SLEEP_MAX
        } else {
            read_at
        };
        if self.capacity.has_more_to_call() {
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
            || !state.refill_queue.is_empty()
            || state.found.len() > state.loading.len()
            || state.due.first().is_some_and(|(at, _)| *at <= self.clock.now())
    }

    /// Starts every delivery that may start now, one per lane in turn.
    pub(crate) fn pump(&mut self) {
        let Some(term) = self.state.term.clone().filter(|term| !term.is_cancelled()) else {
            return;
        };
        if self.state.stopping {
            return;
        }
        let now = self.started.elapsed();
        self.wake_lanes(now);
        if !self.switch.is_on() {
            return;
        }
        while let Some(id) = self.state.ready.front().copied() {
            if !self.capacity.any_free() {
                return;
            }
            let Some(result_permit) = self.capacity.result_permit() else {
                return;
            };
            self.state.ready.pop_front();
            self.state.is_ready.remove(&id);
            let Some(lane) = self.state.lanes.get_mut(&id) else {
                continue;
            };
            if !self.state.draining.lets_start(lane, now) {
                continue;
            }
            let (pace, in_flight) = (lane.pace(), lane.in_flight());
            let holder = Holder {
                endpoint: id,
                tenant: lane.endpoint().tenant,
            };
            if let Err(full) = self.capacity.check(holder, pace, in_flight) {
                self.capacity.wait_for(full, holder);
                continue;
            }
            match lane.pick(now) {
                Some((delivery, Action::Send)) => {
                    let number = delivery.number();
                    let attempt = (id, delivery.event, number);
                    self.capacity.begin(now, attempt, holder, pace, in_flight);
                    let _ = self.picked[pace as usize].send(Picked {
                        endpoint: lane.endpoint().clone(),
                        epoch: lane.epoch(),
                        term: term.clone(),
                        guard: InFlightGuard {
                            endpoint: id,
                            epoch: lane.epoch(),
                            event: delivery.event,
                            number,
                            engine: self.inbox.clone(),
                            result: None,
                        },
                        delivery,
                        result_permit,
                    });
                }
                Some((delivery, Action::DeadLetter(reason))) => {
                    let dead = Finished::dead_without_attempt(
                        lane.endpoint(),
                        lane.epoch(),
                        &delivery,
                        reason,
                        self.clock.now(),
                        result_permit,
                    );
                    let _ = self.finished.send(dead);
                }
                None => {}
            }
            self.settle(id);
        }
    }

    /// Requeues lanes whose timer or capacity wait is over, and marks those that became slow.
    fn wake_lanes(&mut self, now: Monotonic) {
        while let Some((_, id)) = self.state.timers.first().copied().filter(|(at, _)| *at <= now) {
            self.state.timers.pop_first();
            self.state.timer_of.remove(&id);
            self.settle(id);
        }
        for id in self.capacity.slowed(now) {
            if let Some(lane) = self.state.lanes.get_mut(&id) {
                lane.slowed();
            }
        }
        for id in self.capacity.called() {
            self.settle(id);
        }
    }

    /// Puts a lane into the lists it belongs in. Called after every change to it.
    fn settle(&mut self, id: EndpointId) {
        let now = self.started.elapsed();
        let state = &mut self.state;
        let lane = state.lanes.get(&id);
        if let Some(lane) = lane.filter(|lane| !state.draining.is_stopped(lane.endpoint().shard)) {
            if lane.is_ready(now) && state.is_ready.insert(id) {
                state.ready.push_back(id);
            }
            if (lane.wants_refill().is_some() || lane.wants_keys()) && state.in_refill_queue.insert(id) {
                state.refill_queue.push_back(id);
            }
        }
        let due = lane.and_then(Lane::next_due);
        keep_in_order(&mut state.due, &mut state.due_of, id, due);
        let timer = lane.and_then(Lane::ready_at).filter(|at| *at > now);
        keep_in_order(&mut state.timers, &mut state.timer_of, id, timer);
    }

    pub(crate) fn handle(&mut self, message: EngineMessage) {
        match message {
            EngineMessage::Gained(shards) => {
                for (shard, epoch) in shards {
                    self.drop_lanes(shard);
                    self.state.draining.remove(shard);
                    self.state.owned.insert(shard, epoch);
                    self.state.taken.push(shard);
                }
            }
            EngineMessage::Lost(shards) => {
                for shard in shards {
                    self.state.owned.remove(&shard);
                    self.state.draining.remove(shard);
                    self.state.taken.retain(|taken| *taken != shard);
                    self.drop_lanes(shard);
                }
            }
            EngineMessage::Drain(shards) => {
                // Repeated when a shard could not be released: then it is reported again.
                for shard in shards.iter().filter(|shard| self.state.owned.contains_key(shard)) {
                    self.state.draining.begin(*shard);
                }
            }
            EngineMessage::Suspended => self.state.term = None,
            EngineMessage::Resumed(term) => self.state.term = Some(term),
            EngineMessage::AttemptEnded {
                endpoint,
                epoch,
                event,
                number,
                result,
            } => {
                self.capacity.leave(&(endpoint, event, number));
                let now = self.clock.now();
                // An attempt of an earlier ownership says nothing about this lane.
                let lane = self.state.lanes.get_mut(&endpoint);
                if let Some(lane) = lane.filter(|lane| lane.epoch() == epoch) {
                    self.state.draining.ended(lane.endpoint().shard);
                    match result {
                        Some(result) => lane.attempt_ended(event, number, result, self.started.elapsed()),
                        None => {
                            lane.handed_back(event, number, now);
                            self.withdraw(endpoint);
                        }
                    }
                    self.settle(endpoint);
                }
            }
            EngineMessage::Withdrawn { endpoint, epoch } => {
                let next_read = self.state.reads + 1;
                self.state.withdrawn.push_back((next_read, (endpoint, epoch)));
            }
            EngineMessage::Recorded(results) => {
                for result in results {
                    self.recorded(result);
                }
            }
            EngineMessage::Surveyed(report) => self.surveyed(report),
        }
    }

    /// Starts withdrawing queued deliveries of cancelled replays of this endpoint.
    fn withdraw(&mut self, id: EndpointId) {
        let now = self.clock.now();
        let lane = self.state.lanes.get_mut(&id);
        if let Some(withdrawal) = lane.and_then(|lane| lane.withdraw(now)) {
            let _ = self.withdrawals.send(withdrawal);
        }
    }

    fn recorded(&mut self, result: Recorded) {
        let (endpoint, event, number) = (result.endpoint, result.event, result.number);
        let now = self.clock.now();
        let lane = self.state.lanes.get_mut(&endpoint);
        let Some(lane) = lane.filter(|lane| lane.epoch() == result.epoch) else {
            return;
        };
        self.state.draining.ended(lane.endpoint().shard);
        let due = match result.fate {
            Fate::Ended => None,
            Fate::Due(at) => Some(at),
            // It may have been recorded without our knowing: read the retries again.
            Fate::Discarded => {
                METRICS.results_void.increment(1);
                lane.search_retries();
                Some(now)
            }
        };
        lane.recorded(event, number, due);
        // A read in progress began before this record; the one after it is the first that can't show an old copy.
        let next_read = self.state.reads + 1;
        let recorded = (endpoint, event, number);
        self.state.recorded.push_back((next_read, recorded));
        self.settle(endpoint);
    }
}

#[cfg(test)]
mod simulated {
    use super::*;

    impl Engine {
        /// The settings that each lane sends with.
        pub(crate) fn lanes(
            &self,
        ) -> impl Iterator<Item = &std::sync::Arc<crate::deliver::endpoint::Endpoint>> {
            self.state.lanes.values().map(Lane::endpoint)
        }

        pub(crate) fn missed_count(&self) -> u64 {
            self.state.missed_count
        }

        pub(crate) fn is_sweeping(&self) -> bool {
            self.state.sweeping
        }
    }
}
