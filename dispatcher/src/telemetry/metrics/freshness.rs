//! A gauge whose source is silent has no series: its last value would be taken for the current one. The exporter keeps every
//! series that it has seen, so they are removed from its text.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use crate::lock::lock;

/// What several gauges are read from at the same time.
pub(crate) struct Source {
    gauges: &'static [&'static str],
    /// A few intervals between two reads.
    silent_after: Duration,
    read_at: Mutex<Option<Instant>>,
}

pub(crate) static ENGINE: Source = Source::new(
    Duration::from_secs(10),
    &[
        "postrider_in_flight",
        "postrider_results_unrecorded",
        "postrider_bulkhead_places",
        "postrider_bulkheads_full",
        "postrider_deliveries_waiting",
        "postrider_endpoints_spilled",
        "postrider_circuits",
    ],
);
pub(crate) static CLOCK: Source = Source::new(Duration::from_secs(10), &["postrider_clock_offset_seconds"]);
pub(super) static TABLES: Source = Source::new(
    Duration::from_secs(15),
    &["postrider_table_rows", "postrider_table_dead_rows"],
);
pub(super) static SWITCHES: Source = Source::new(
    Duration::from_secs(15),
    &["postrider_sending_stopped", "postrider_tenants_paused"],
);
pub(super) static TABLE_BYTES: Source = Source::new(Duration::from_secs(150), &["postrider_table_bytes"]);

impl Source {
    const fn new(silent_after: Duration, gauges: &'static [&'static str]) -> Self {
        Self {
            gauges,
            silent_after,
            read_at: Mutex::new(None),
        }
    }

    /// Its gauges were just set.
    pub(crate) fn was_read(&self) {
        *lock(&self.read_at) = Some(Instant::now());
    }

    fn is_silent(&self, now: Instant) -> bool {
        lock(&self.read_at).is_none_or(|at| now.saturating_duration_since(at) > self.silent_after)
    }
}

/// The exporter's text without gauges whose source is silent.
pub fn without_stale(text: &str) -> String {
    let now = Instant::now();
    let silent = [&ENGINE, &CLOCK, &TABLES, &SWITCHES, &TABLE_BYTES]
        .into_iter()
        .filter(|source| source.is_silent(now));
    without(
        text,
        &silent
            .flat_map(|source| source.gauges)
            .copied()
            .collect::<Vec<_>>(),
    )
}

fn without(text: &str, gauges: &[&str]) -> String {
    let is_kept = |line: &&str| {
        let series = line.trim_start_matches("# HELP ").trim_start_matches("# TYPE ");
        let name = series.split([' ', '{']).next().unwrap_or_default();
        !gauges.contains(&name)
    };
    text.split_inclusive('\n').filter(is_kept).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_gauges_whose_source_is_silent_are_removed() {
        let text =
            "# HELP a_b Help\n# TYPE a_b gauge\na_b{x=\"1\"} 1\na_b 2\n\n# TYPE a_b_c gauge\na_b_c 3\n";
        assert_eq!(without(text, &["a_b"]), "\n# TYPE a_b_c gauge\na_b_c 3\n");
        assert_eq!(without(text, &[]), text);
    }

    #[test]
    fn a_source_is_silent_until_it_is_read_and_when_it_was_read_too_long_ago() {
        let source = Source::new(Duration::from_secs(10), &[]);
        assert!(source.is_silent(Instant::now()));
        source.was_read();
        assert!(!source.is_silent(Instant::now()));
        assert!(source.is_silent(Instant::now() + Duration::from_secs(11)));
    }
}
