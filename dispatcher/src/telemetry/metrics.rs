//! What is counted here, for Prometheus. Every series is made once, with words of what it means, and then is an atomic:
//! nothing on a delivery's way takes a lock to count.
//!
//! Invariant: labels have few values, known when the program is built. No tenant, no URL, no endpoint.

mod database;
mod pools;

use std::{sync::LazyLock, time::Duration};

use chrono::{DateTime, Utc};
use metrics::{Counter, Gauge, Histogram, Label};
use postrider_proto::{DeadReason, OutcomeKind};

pub use database::watch as watch_database;
pub use pools::{sample as sample_pools, watch as watch_pool};

use crate::deliver::lane::Activity;

/// A counter that is seen before it first counts.
pub fn counter(name: &'static str, means: &'static str) -> Counter {
    labelled_counter(name, means, &[])
}

pub fn labelled_counter(
    name: &'static str,
    means: &'static str,
    labels: &[(&'static str, &'static str)],
) -> Counter {
    metrics::describe_counter!(name, means);
    let made = metrics::counter!(name, made_of(labels));
    made.increment(0);
    made
}

pub fn gauge(name: &'static str, means: &'static str) -> Gauge {
    labelled_gauge(name, means, &[])
}

pub fn labelled_gauge(
    name: &'static str,
    means: &'static str,
    labels: &[(&'static str, &'static str)],
) -> Gauge {
    metrics::describe_gauge!(name, means);
    let made = metrics::gauge!(name, made_of(labels));
    made.set(0.0);
    made
}

pub fn histogram(name: &'static str, means: &'static str) -> Histogram {
    labelled_histogram(name, means, &[])
}

pub fn labelled_histogram(
    name: &'static str,
    means: &'static str,
    labels: &[(&'static str, &'static str)],
) -> Histogram {
    metrics::describe_histogram!(name, means);
    metrics::histogram!(name, made_of(labels))
}

fn made_of(labels: &[(&'static str, &'static str)]) -> Vec<Label> {
    labels
        .iter()
        .map(|(key, value)| Label::from_static_parts(key, value))
        .collect()
}

pub(crate) static METERS: LazyLock<Meters> = LazyLock::new(Meters::new);

/// Makes the series of a dispatcher, so that they are seen from the start. After the recorder is there.
pub fn start() {
    LazyLock::force(&METERS);
}

pub(crate) struct Meters {
    /// In the order of [`OutcomeKind::ALL`].
    attempts: [Counter; OutcomeKind::ALL.len()],
    pub(crate) attempt_seconds: Histogram,
    first_attempt_delay: Histogram,
    /// In the order of [`DeadReason::ALL`].
    dead_letters: Vec<Counter>,
    pub(crate) record_seconds: Histogram,
    pub(crate) record_rows: Histogram,
    pub(crate) refill_seconds: Histogram,
    pub(crate) results_void: Counter,
    pub(crate) own_faults: Counter,
    pub(crate) tail_missed: Counter,
    pub(crate) filtered: Counter,
    pub(crate) dropped: Counter,
    pub(crate) relayed: Counter,
    pub(crate) relay_refused: Counter,
    pub(crate) lease_renewed: Counter,
    pub(crate) lease_failed: Counter,
    pub(crate) lease_expired: Counter,
    shards_owned: Gauge,
    in_flight: Gauge,
    in_flight_max: Gauge,
    unrecorded: Gauge,
    bulkhead_places: Gauge,
    bulkheads_full: Gauge,
    waiting: Gauge,
    spilled: Gauge,
    oldest_by_endpoint: Gauge,
    oldest_by_dispatcher: Gauge,
    circuits_closed: Gauge,
    circuits_open: Gauge,
    circuits_probing: Gauge,
}

impl Meters {
    fn new() -> Self {
        let oldest = |held_by| {
            labelled_gauge(
                "postrider_oldest_due_seconds",
                "How long the oldest delivery that is due has waited, by what holds it up",
                &[("held_by", held_by)],
            )
        };
        let circuits = |state| {
            labelled_gauge(
                "postrider_circuits",
                "Endpoints that this dispatcher has had work for, by the state of their circuit breaker",
                &[("state", state)],
            )
        };
        let lease = |result| {
            labelled_counter(
                "postrider_lease_renewals_total",
                "Tries to renew the lease, one a second",
                &[("result", result)],
            )
        };
        let dead = |reason: &DeadReason| {
            labelled_counter(
                "postrider_dead_letters_total",
                "Deliveries that became dead letters, by the reason",
                &[("reason", reason.as_str())],
            )
        };
        Self {
            attempts: OutcomeKind::ALL.map(|kind| {
                labelled_counter(
                    "postrider_attempts_total",
                    "Attempts, by what came of them",
                    &[("outcome", kind.as_str())],
                )
            }),
            attempt_seconds: histogram("postrider_attempt_seconds", "How long attempts took"),
            first_attempt_delay: histogram(
                "postrider_first_attempt_delay_seconds",
                "From an emit to the start of its first attempt, one for each delivery",
            ),
            dead_letters: DeadReason::ALL.iter().map(dead).collect(),
            record_seconds: histogram("postrider_record_seconds", "One statement that records results"),
            record_rows: histogram(
                "postrider_record_rows",
                "Results in one such statement, 500 at most",
            ),
            refill_seconds: histogram(
                "postrider_refill_seconds",
                "One read for endpoints whose backlog does not fit in memory",
            ),
            results_void: counter(
                "postrider_results_void_total",
                "Results that did not count, because the lease was lost: those events are sent again",
            ),
            own_faults: counter(
                "postrider_own_faults_total",
                "Requests that were not sent for a fault on this side, such as no more files to open; they are sent later",
            ),
            tail_missed: counter(
                "postrider_tail_missed_total",
                "Times that the sweep found deliveries late; it should stay 0",
            ),
            filtered: counter(
                "postrider_deliveries_filtered_total",
                "Deliveries that an endpoint's filter did not want",
            ),
            dropped: counter(
                "postrider_deliveries_dropped_total",
                "Deliveries that went with a deleted endpoint",
            ),
            relayed: counter(
                "postrider_relayed_total",
                "Events taken from producers' own outboxes",
            ),
            relay_refused: counter(
                "postrider_relay_refused_total",
                "Events of outboxes that were refused",
            ),
            lease_renewed: lease("renewed"),
            lease_failed: lease("failed"),
            lease_expired: counter(
                "postrider_lease_expirations_total",
                "Times that the lease ran out and nothing was sent until it was renewed",
            ),
            shards_owned: gauge(
                "postrider_shards_owned",
                "Shards that this dispatcher owns; all have 64",
            ),
            in_flight: gauge("postrider_in_flight", "Requests on the wire"),
            in_flight_max: gauge(
                "postrider_in_flight_max",
                "The most requests that may be on the wire of this dispatcher",
            ),
            unrecorded: gauge(
                "postrider_results_unrecorded",
                "Attempts on the wire, and results that wait for the database",
            ),
            bulkhead_places: gauge(
                "postrider_bulkhead_places",
                "Requests that endpoints with work may have in flight, all together",
            ),
            bulkheads_full: gauge(
                "postrider_bulkheads_full",
                "Endpoints that have as many requests in flight as they may",
            ),
            waiting: gauge(
                "postrider_deliveries_waiting",
                "Deliveries in memory that are due",
            ),
            spilled: gauge(
                "postrider_endpoints_spilled",
                "Endpoints with more waiting on disk than fits in memory",
            ),
            oldest_by_endpoint: oldest("endpoint"),
            oldest_by_dispatcher: oldest("dispatcher"),
            circuits_closed: circuits("closed"),
            circuits_open: circuits("open"),
            circuits_probing: circuits("probing"),
        }
    }

    pub(crate) fn attempted(&self, kind: OutcomeKind, duration: Duration) {
        // Their numbers count from 1.
        if let Some(counter) = self.attempts.get(kind as usize - 1) {
            counter.increment(1);
        }
        self.attempt_seconds.record(duration);
    }

    pub(crate) fn first_attempt(&self, emitted_ms: i64, started_at: DateTime<Utc>) {
        let delay = (started_at.timestamp_millis() - emitted_ms).max(0);
        self.first_attempt_delay.record(delay as f64 / 1000.0);
    }

    pub(crate) fn died(&self, reason: DeadReason) {
        if let Some(counter) = self.dead_letters.get(reason as usize) {
            counter.increment(1);
        }
    }

    pub(crate) fn show(&self, hand: &EngineGauges) {
        self.shards_owned.set(hand.shards as f64);
        self.in_flight.set(hand.in_flight as f64);
        self.in_flight_max.set(hand.in_flight_max as f64);
        self.unrecorded.set(hand.unrecorded as f64);
        self.bulkhead_places.set(hand.bulkhead_places as f64);
        self.bulkheads_full.set(hand.bulkheads_full as f64);
        self.waiting.set(hand.waiting as f64);
        self.spilled.set(hand.spilled as f64);
        self.oldest_by_endpoint.set(hand.oldest_by_endpoint);
        self.oldest_by_dispatcher.set(hand.oldest_by_dispatcher);
        self.circuits_closed
            .set(hand.lanes.saturating_sub(hand.open + hand.probing) as f64);
        self.circuits_open.set(hand.open as f64);
        self.circuits_probing.set(hand.probing as f64);
    }
}

/// What a dispatcher has in hand, added up over its lanes.
#[derive(Debug, Default)]
pub(crate) struct EngineGauges {
    pub(crate) shards: usize,
    pub(crate) in_flight: usize,
    pub(crate) in_flight_max: usize,
    pub(crate) unrecorded: usize,
    pub(crate) bulkhead_places: usize,
    pub(crate) bulkheads_full: usize,
    pub(crate) waiting: usize,
    pub(crate) spilled: usize,
    pub(crate) oldest_by_endpoint: f64,
    pub(crate) oldest_by_dispatcher: f64,
    pub(crate) lanes: usize,
    pub(crate) open: usize,
    pub(crate) probing: usize,
}

impl EngineGauges {
    /// `activity` is none of a lane that has nothing in hand. One that could send and has not is held up by this
    /// process: places, processor or database.
    pub(crate) fn add(
        &mut self,
        activity: Option<&Activity>,
        due: Option<DateTime<Utc>>,
        can_send: bool,
        now: DateTime<Utc>,
    ) {
        self.lanes += 1;
        let oldest = activity.and_then(|one| one.oldest).into_iter().chain(due).min();
        let waited = oldest.map_or(0.0, |at| (now - at).num_milliseconds().max(0) as f64 / 1000.0);
        let held_by = match can_send {
            true => &mut self.oldest_by_dispatcher,
            false => &mut self.oldest_by_endpoint,
        };
        *held_by = held_by.max(waited);
        let Some(one) = activity else { return };
        self.bulkhead_places += one.places;
        self.bulkheads_full += usize::from(one.in_flight >= one.places);
        self.waiting += one.waiting;
        self.spilled += usize::from(one.more_waiting);
        match (one.circuit_open, one.in_flight) {
            (false, _) => {}
            (true, 0) => self.open += 1,
            (true, _) => self.probing += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::TimeDelta;
    use postrider_proto::EndpointId;

    #[test]
    fn numbers_of_outcomes_and_reasons_are_places_in_the_lists() {
        for (place, kind) in OutcomeKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize - 1, place);
        }
        for (place, reason) in DeadReason::ALL.iter().enumerate() {
            assert_eq!(*reason as usize, place);
        }
    }

    #[test]
    fn what_waits_is_told_by_what_holds_it_up() {
        let now = DateTime::from_timestamp(1_000, 0).expect("a time");
        let ago = |seconds| now - TimeDelta::seconds(seconds);
        let busy = Activity {
            endpoint: EndpointId(1),
            in_flight: 16,
            places: 16,
            waiting: 5,
            more_waiting: true,
            oldest: Some(ago(30)),
            circuit_open: false,
        };
        let probed = Activity {
            in_flight: 1,
            places: 1,
            oldest: None,
            circuit_open: true,
            ..busy
        };
        let mut hand = EngineGauges::default();
        hand.add(Some(&busy), Some(ago(-60)), false, now);
        hand.add(Some(&probed), Some(ago(90)), false, now);
        hand.add(
            Some(&Activity {
                in_flight: 2,
                oldest: Some(ago(4)),
                ..busy
            }),
            None,
            true,
            now,
        );
        hand.add(None, Some(ago(-1)), false, now);
        assert_eq!((hand.oldest_by_endpoint, hand.oldest_by_dispatcher), (90.0, 4.0));
        assert_eq!(
            (hand.lanes, hand.open, hand.probing, hand.bulkheads_full),
            (4, 0, 1, 2)
        );
        assert_eq!((hand.bulkhead_places, hand.waiting, hand.spilled), (33, 15, 3));
    }
}
