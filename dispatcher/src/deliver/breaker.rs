//! The circuit breaker of one endpoint. Pure: time is passed in.
//! After a run of failures only one attempt at a time probes the endpoint; the first success closes the breaker.

use std::time::Duration;

const FAILURES_TO_OPEN: u32 = 10;
/// Between a failed probe and the next one.
const PROBE_PAUSE: Duration = Duration::from_millis(20);

/// Time since the dispatcher started, by a clock that never steps.
pub(crate) type Monotonic = Duration;

#[derive(Debug, Default)]
pub(crate) struct Breaker {
    failures: u32,
    probe_at: Option<Monotonic>,
}

impl Breaker {
    /// Initial state for an endpoint that another dispatcher has seen failing for a while.
    pub(crate) fn opened() -> Self {
        Self {
            failures: FAILURES_TO_OPEN,
            probe_at: None,
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.failures >= FAILURES_TO_OPEN
    }

    pub(crate) fn succeeded(&mut self) {
        *self = Self::default();
    }

    pub(crate) fn failed(&mut self, now: Monotonic) {
        self.failures = self.failures.saturating_add(1);
        if self.is_open() {
            self.probe_at = Some(now + PROBE_PAUSE);
        }
    }

    /// How many attempts may be in flight at once.
    pub(crate) fn limit(&self, concurrency: usize) -> usize {
        if self.is_open() { 1 } else { concurrency }
    }

    pub(crate) fn not_before(&self) -> Option<Monotonic> {
        self.probe_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_of_failures_opens_it_and_one_success_closes_it() {
        let mut breaker = Breaker::default();
        for second in 0..FAILURES_TO_OPEN {
            assert_eq!(breaker.limit(16), 16);
            breaker.failed(Duration::from_secs(second.into()));
        }
        assert_eq!(breaker.limit(16), 1);
        assert_eq!(breaker.not_before(), Some(Duration::from_secs(9) + PROBE_PAUSE));
        breaker.succeeded();
        assert_eq!((breaker.limit(16), breaker.not_before()), (16, None));
    }

    #[test]
    fn a_success_in_between_starts_the_count_again() {
        let mut breaker = Breaker::default();
        for _ in 0..5 {
            (1..FAILURES_TO_OPEN).for_each(|_| breaker.failed(Duration::ZERO));
            assert!(!breaker.is_open());
            breaker.succeeded();
        }
    }
}
