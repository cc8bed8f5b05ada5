//! Prometheus metrics. Every series is registered once, with its help text, and is an atomic from then on: the delivery
//! path takes no lock to count.
//!
//! Invariant: labels have few values, known at compile time. No tenant, no URL, no endpoint, except in
//! `top_endpoints.rs`, which operators turn on and which is bounded.

mod database;
pub(crate) mod freshness;
mod pools;
mod table_bytes;
mod top_endpoints;

use std::{sync::LazyLock, time::Duration};

use chrono::{DateTime, Utc};
use metrics::{Counter, Gauge, Histogram, Label};
use postrider_proto::{DeadReason, OutcomeKind};

pub use database::watch as watch_database;
pub use freshness::without_stale;
pub use pools::{sample as sample_pools, watch as watch_pool};
pub use table_bytes::watch as watch_table_bytes;
pub use top_endpoints::{text as top_endpoints_text, watch as watch_top_endpoints};

use crate::deliver::lane::Activity;

type Labels<'a> = &'a [(&'static str, &'static str)];

/// A counter that is exported before it is first incremented.
pub fn counter(name: &'static str, help: &'static str) -> Counter {
    labelled_counter(name, help, &[])
}

pub fn labelled_counter(name: &'static str, help: &'static str, labels: Labels<'_>) -> Counter {
    metrics::describe_counter!(name, help);
    let metric = metrics::counter!(name, labels_of(labels));
    metric.increment(0);
    metric
}

pub fn gauge(name: &'static str, help: &'static str) -> Gauge {
    labelled_gauge(name, help, &[])
}

pub fn labelled_gauge(name: &'static str, help: &'static str, labels: Labels<'_>) -> Gauge {
    metrics::describe_gauge!(name, help);
    let metric = metrics::gauge!(name, labels_of(labels));
    metric.set(0.0);
    metric
}

pub fn histogram(name: &'static str, help: &'static str) -> Histogram {
    labelled_histogram(name, help, &[])
}

pub fn labelled_histogram(name: &'static str, help: &'static str, labels: Labels<'_>) -> Histogram {
    metrics::describe_histogram!(name, help);
    metrics::histogram!(name, labels_of(labels))
}

fn labels_of(labels: Labels<'_>) -> Vec<Label> {
    let label = |(key, value): &(&'static str, &'static str)| Label::from_static_parts(key, value);
    labels.iter().map(label).collect()
}

pub(crate) static METRICS: LazyLock<Metrics> = LazyLock::new(Metrics::new);

/// Registers the series of a dispatcher, so that they are exported from the start. Call after the recorder is
/// installed.
pub fn start() {
    LazyLock::force(&METRICS);
}

/// One row makes a field and registers its series.
macro_rules! series {
    ($($(#[$doc:meta])* $field:ident: $type:ty = $series:expr;)+) => {
        pub(crate) struct Metrics {
            $($(#[$doc])* pub(crate) $field: $type,)+
        }

        impl Metrics {
            fn new() -> Self {
                Self { $($field: $series,)+ }
            }
        }
    };
}

series! {
    /// In the order of [`OutcomeKind::ALL`].
    attempts: [Counter; OutcomeKind::ALL.len()] = OutcomeKind::ALL.map(|kind| {
        labelled_counter("postrider_attempts_total", "Delivery attempts by outcome", &[("outcome", kind.as_str())])
    });
    attempt_seconds: Histogram = histogram("postrider_attempt_seconds", "Duration of delivery attempts");
    first_attempt_delay: Histogram = histogram("postrider_first_attempt_delay_seconds",
        "Delay from emit to the start of the first attempt of each delivery");
    delivery_seconds: Histogram = histogram("postrider_delivery_seconds",
        "Time from emit to the accepted response of each delivery, retries included");
    /// In the order of [`DeadReason::ALL`].
    dead_letters: Vec<Counter> = DeadReason::ALL.iter().map(dead_letters).collect();
    record_seconds: Histogram = histogram("postrider_record_seconds", "Duration of one statement that records results");
    record_rows: Histogram = histogram("postrider_record_rows", "Results recorded by one statement, at most 500");
    refill_seconds: Histogram = histogram("postrider_refill_seconds",
        "Duration of one read for endpoints whose backlog does not fit in memory");
    results_void: Counter = counter("postrider_results_void_total",
        "Results discarded because the lease was lost; those events are sent again");
    own_faults: Counter = counter("postrider_own_faults_total",
        "Requests not sent because of a local fault, such as the open file limit; they are sent later");
    tail_missed: Counter = counter("postrider_tail_missed_total",
        "Times the sweep found deliveries that the tail had missed; should stay 0");
    filtered: Counter = counter("postrider_deliveries_filtered_total", "Deliveries excluded by an endpoint's filter");
    dropped: Counter = counter("postrider_deliveries_dropped_total",
        "Deliveries dropped because their endpoint was deleted");
    relayed: Counter = counter("postrider_relayed_total", "Events relayed from producers' outboxes");
    relay_refused: Counter = counter("postrider_relay_refused_total", "Events from outboxes that were rejected");
    relay_failures: Counter = counter("postrider_home_relay_failures_total",
        "Times relaying from the home database failed; it is retried");
    relay_lag: Gauge = gauge("postrider_home_relay_lag_seconds",
        "In a cell: age of the oldest event that was just relayed, or how long relaying has failed; 0 when nothing waits");
    lease_renewed: Counter = lease_renewals("renewed");
    lease_failed: Counter = lease_renewals("failed");
    lease_expired: Counter = counter("postrider_lease_expirations_total",
        "Lease expirations; sending stops until the lease is renewed");
    lease_valid: Gauge = gauge("postrider_lease_valid", "Whether this dispatcher may send: 1 or 0");
    shards_owned: Gauge = gauge("postrider_shards_owned", "Shards owned by this dispatcher under a valid lease, of 64");
    in_flight: Gauge = gauge("postrider_in_flight", "Requests in flight");
    in_flight_max: Gauge = gauge("postrider_in_flight_max", "Maximum requests in flight in this dispatcher");
    unrecorded: Gauge = gauge("postrider_results_unrecorded", "Attempts in flight and results not yet recorded");
    bulkhead_places: Gauge = gauge("postrider_bulkhead_places", "Sum of the concurrency limits of endpoints with work");
    bulkheads_full: Gauge = gauge("postrider_bulkheads_full", "Endpoints at their concurrency limit");
    waiting: Gauge = gauge("postrider_deliveries_waiting", "Due deliveries waiting in memory");
    spilled: Gauge = gauge("postrider_endpoints_spilled", "Endpoints with a backlog that does not fit in memory");
    oldest_by_endpoint: Gauge = oldest_due("endpoint");
    oldest_by_dispatcher: Gauge = oldest_due("dispatcher");
    circuits_closed: Gauge = circuits("closed");
    circuits_open: Gauge = circuits("open");
    circuits_probing: Gauge = circuits("probing");
}

fn dead_letters(reason: &DeadReason) -> Counter {
    let help = "Deliveries that became dead letters, by reason";
    labelled_counter(
        "postrider_dead_letters_total",
        help,
        &[("reason", reason.as_str())],
    )
}

fn lease_renewals(result: &'static str) -> Counter {
    let help = "Lease renewals, one per second";
    labelled_counter("postrider_lease_renewals_total", help, &[("result", result)])
}

fn oldest_due(held_by: &'static str) -> Gauge {
    let help = "Age of the oldest due delivery, by what delays it";
    labelled_gauge("postrider_oldest_due_seconds", help, &[("held_by", held_by)])
}

fn circuits(state: &'static str) -> Gauge {
    let help = "Endpoints served by this dispatcher, by circuit breaker state";
    labelled_gauge("postrider_circuits", help, &[("state", state)])
}

impl Metrics {
    pub(crate) fn attempted(&self, kind: OutcomeKind, duration: Duration) {
        // Outcome numbers start at 1.
        if let Some(counter) = self.attempts.get(kind as usize - 1) {
            counter.increment(1);
        }
        self.attempt_seconds.record(duration);
    }

    pub(crate) fn first_attempt(&self, emitted_ms: i64, started_at: DateTime<Utc>) {
        let delay = (started_at.timestamp_millis() - emitted_ms).max(0);
        self.first_attempt_delay.record(delay as f64 / 1000.0);
    }

    /// The id of the event tells when it was emitted, so that nothing has to be read or stored for this.
    pub(crate) fn delivered(&self, emitted_ms: i64, started_at: DateTime<Utc>, duration: Duration) {
        let until_start = (started_at.timestamp_millis() - emitted_ms).max(0);
        self.delivery_seconds
            .record(until_start as f64 / 1000.0 + duration.as_secs_f64());
    }

    pub(crate) fn died(&self, reason: DeadReason) {
        if let Some(counter) = self.dead_letters.get(reason as usize) {
            counter.increment(1);
        }
    }

    /// `health::sample` sets the others when they are scraped: the lease may end at any time.
    pub(crate) fn set_gauges(&self, gauges: &EngineGauges) {
        self.in_flight.set(gauges.in_flight as f64);
        self.in_flight_max.set(gauges.in_flight_max as f64);
        self.unrecorded.set(gauges.unrecorded as f64);
        self.bulkhead_places.set(gauges.bulkhead_places as f64);
        self.bulkheads_full.set(gauges.bulkheads_full as f64);
        self.waiting.set(gauges.waiting as f64);
        self.spilled.set(gauges.spilled as f64);
        self.circuits_closed
            .set(gauges.lanes.saturating_sub(gauges.open + gauges.probing) as f64);
        self.circuits_open.set(gauges.open as f64);
        self.circuits_probing.set(gauges.probing as f64);
        freshness::ENGINE.was_read();
    }
}

/// Load of a dispatcher, summed over its lanes.
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
    /// `activity` is `None` for a lane without load. A lane that could send and has not is delayed by this process:
    /// capacity, CPU or database.
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
        let held_by = if can_send {
            &mut self.oldest_by_dispatcher
        } else {
            &mut self.oldest_by_endpoint
        };
        *held_by = held_by.max(waited);
        let Some(one) = activity else { return };
        self.bulkhead_places += one.limit;
        self.bulkheads_full += usize::from(one.in_flight >= one.limit);
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
    fn numbers_of_outcomes_and_reasons_are_indexes_into_the_lists() {
        for (index, kind) in OutcomeKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize - 1, index);
        }
        for (index, reason) in DeadReason::ALL.iter().enumerate() {
            assert_eq!(*reason as usize, index);
        }
    }

    #[test]
    fn waiting_deliveries_are_attributed_to_what_delays_them() {
        let now = DateTime::from_timestamp(1_000, 0).expect("a time");
        let ago = |seconds| now - TimeDelta::seconds(seconds);
        let busy = Activity {
            endpoint: EndpointId(1),
            in_flight: 16,
            limit: 16,
            waiting: 5,
            more_waiting: true,
            oldest: Some(ago(30)),
            circuit_open: false,
        };
        let probed = Activity {
            in_flight: 1,
            limit: 1,
            oldest: None,
            circuit_open: true,
            ..busy
        };
        let mut gauges = EngineGauges::default();
        gauges.add(Some(&busy), Some(ago(-60)), false, now);
        gauges.add(Some(&probed), Some(ago(90)), false, now);
        gauges.add(
            Some(&Activity {
                in_flight: 2,
                oldest: Some(ago(4)),
                ..busy
            }),
            None,
            true,
            now,
        );
        gauges.add(None, Some(ago(-1)), false, now);
        assert_eq!(
            (gauges.oldest_by_endpoint, gauges.oldest_by_dispatcher),
            (90.0, 4.0)
        );
        assert_eq!(
            (gauges.lanes, gauges.open, gauges.probing, gauges.bulkheads_full),
            (4, 0, 1, 2)
        );
        assert_eq!(
            (gauges.bulkhead_places, gauges.waiting, gauges.spilled),
            (33, 15, 3)
        );
    }
}
