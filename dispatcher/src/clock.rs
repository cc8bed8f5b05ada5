//! The database's clock, seen from here. Leases, due times and the `t` of signatures follow it, so that a machine
//! whose own clock is wrong neither retries early nor signs with a time receivers refuse.

use std::{
    sync::{Arc, RwLock},
    time::Instant,
};

use chrono::{DateTime, TimeDelta, Utc};

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

    /// `at` is the instant just before the database was asked.
    pub(crate) fn set(&self, at: Instant, database: DateTime<Utc>) {
        *self.0.write().unwrap_or_else(|e| e.into_inner()) = Reading { at, database };
    }

    pub(crate) fn now(&self) -> DateTime<Utc> {
        let reading = *self.0.read().unwrap_or_else(|e| e.into_inner());
        reading.database + TimeDelta::from_std(reading.at.elapsed()).unwrap_or_default()
    }
}
