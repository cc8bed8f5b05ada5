//! What a dispatcher is told at its start, read and checked by the root, never changed afterwards.

use std::time::Duration;

use crate::deliver::retry::{Jitter, Schedule};

#[derive(Debug, Clone)]
pub struct Settings {
    /// Wait before each attempt; endpoints may have their own.
    pub schedule: Schedule,
    pub jitter: Jitter,
    /// One attempt, connect to last needed byte; endpoints may have their own.
    pub timeout: Duration,
    /// Bulkhead of an endpoint that has none of its own.
    pub concurrency: u16,
    /// Attempts on the wire in this process.
    pub max_in_flight: usize,
    /// How long events, attempts and dead letters are kept; tenants may have a shorter one.
    pub retention: Duration,
    /// The base of links in operational events, where it is known.
    pub public_url: Option<String>,
    /// What other dispatchers and the dashboard call this one.
    pub name: String,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            schedule: Schedule::default(),
            jitter: Jitter::default(),
            timeout: Duration::from_secs(10),
            concurrency: 16,
            max_in_flight: 4096,
            retention: Duration::from_secs(30 * 24 * 60 * 60),
            public_url: None,
            name: "dispatcher".to_owned(),
        }
    }
}
