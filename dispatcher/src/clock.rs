//! The database's clock, as seen from this process. Leases, due times and the `t` of signatures follow it, so that a
//! machine with a wrong clock neither retries early nor signs with a time that receivers reject.

use std::{
    sync::{Arc, RwLock},
    time::{Duration, Instant},
};

use chrono::{DateTime, TimeDelta, Utc};

/// The database read its clock some time during the round trip. After a long round trip the previous reading is more
/// accurate.
const ROUND_TRIP_MAX: Duration = Duration::from_millis(500);

#[derive(Debug, Clone)]
pub(crate) struct Clock(Arc<RwLock<Reading>>);

#[derive(Debug, Clone, Copy)]
struct Reading {
    at: Instant,
    database: DateTime<Utc>,
}

impl Clock {
    pub(crate) fn new(at: Instant, database: DateTime<Utc>) -> Self {
        Self(Arc::new(RwLock::new(Reading { at, database })))
    }

    /// `at` is the instant just before the query was sent; the result has just arrived.
    pub(crate) fn set(&self, at: Instant, database: DateTime<Utc>) {
        if at.elapsed() > ROUND_TRIP_MAX {
            return;
        }
        *self.0.write().unwrap_or_else(|e| e.into_inner()) = Reading { at, database };
    }

    pub(crate) fn now(&self) -> DateTime<Utc> {
        let reading = *self.0.read().unwrap_or_else(|e| e.into_inner());
        reading.database + TimeDelta::from_std(reading.at.elapsed()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "any time will do")]
    fn an_answer_that_was_held_up_does_not_move_the_clock() {
        let (began, then) = (Instant::now(), Utc::now());
        let clock = Clock::new(began, then);
        let off = |clock: &Clock| {
            (clock.now() - then - TimeDelta::from_std(began.elapsed()).expect("short")).num_seconds()
        };
        let long_ago = began
            .checked_sub(Duration::from_secs(6))
            .expect("a machine that is up");
        clock.set(long_ago, then);
        assert_eq!(off(&clock), 0, "the question was on its way for six seconds");
        clock.set(Instant::now(), then + TimeDelta::seconds(60));
        assert!((59..=60).contains(&off(&clock)), "a quick answer counts");
    }
}
