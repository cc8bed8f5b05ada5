//! Settings of a dispatcher, read and validated by the composition root and fixed at startup.

use std::time::Duration;

use crate::deliver::retry::{Jitter, Schedule};

#[derive(Debug, Clone)]
pub struct Settings {
    /// Delay before each attempt; endpoints may have their own.
    pub schedule: Schedule,
    pub jitter: Jitter,
    /// One attempt, from connect to the last byte needed; endpoints may have their own.
    pub timeout: Duration,
    /// Default concurrency of an endpoint.
    pub concurrency: u16,
    /// Maximum attempts in flight in this process.
    pub max_in_flight: usize,
    /// How long events, attempts and dead letters are kept; tenants may have a shorter retention.
    pub retention: Duration,
    /// Stop all sending when the dispatcher starts, until an operator resumes it.
    pub start_paused: bool,
    /// Base of links in operational events, if known.
    pub public_url: Option<String>,
    /// Name shown to other dispatchers and the dashboard.
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
            start_paused: false,
            public_url: None,
            name: "dispatcher".to_owned(),
        }
    }
}
