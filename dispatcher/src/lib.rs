//! The dispatcher: owns shards, reads the queue, signs, sends and records. `deliver/mod.rs` describes the path of a delivery.
//!
//! Invariant: no coordination per delivery. A single owner per endpoint, fenced by an epoch, makes the bulkhead exact
//! across machines.

mod backoff;
pub mod bind;
pub mod cells;
mod clock;
pub mod connector;
pub mod db_timeout;
mod dedicated_connection;
mod deliver;
pub mod diagnosis;
pub mod health;
pub mod http;
mod lock;
pub mod maintenance;
mod ownership;
pub mod settings;
pub mod store;
pub mod telemetry;
pub mod vault;
mod wake;
mod wiring;

use std::time::Instant;

use connector::Connector;
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;

use clock::Clock;
use health::database::{pause_before_retry, reports};

pub use deliver::retry;
pub use http::{guard, proxy, tls};
pub use maintenance::{
    erasure, moves, notices, partitions, planned_rotation, relay, replays, retention, rollup, usage,
};
pub use ownership::{decision::LEASE, lease, owners};
pub use settings::Settings;
pub use store::{schema, sending};
pub use telemetry::{statistics, traces};
pub use vault::{key_holders, sealed};
pub use wake::Wake;

/// Everything a dispatcher needs; built by the composition root.
pub struct Dispatcher {
    pub pool: PgPool,
    /// For the reader's connection: never through a pooler, because a snapshot is valid only on the connection that
    /// took it.
    pub direct: Connector,
    pub settings: Settings,
    pub guard: http::guard::Guard,
    pub vault: vault::Vault,
    pub wake: Wake,
    /// Producers' own databases to relay from.
    pub sources: Vec<Connector>,
    /// In a cell: the home database to relay from.
    pub home: Option<Connector>,
    pub tracer: telemetry::traces::Tracer,
}

#[derive(Debug, thiserror::Error)]
pub enum DispatcherError {
    #[error("database error: {0}")]
    Database(#[from] sqlx::Error),
    #[error("creating the HTTP client failed: {0}")]
    Client(#[from] http::client::HttpSenderError),
}

impl Dispatcher {
    /// Runs until `stop` is cancelled; then starts no attempt, finishes those in flight and releases its shards.
    pub async fn run(self, stop: CancellationToken) -> Result<(), DispatcherError> {
        telemetry::metrics::start();
        let clock = loop {
            match self.prepare().await {
                Ok(clock) => break clock,
                Err(error) if reports(&error) => {}
                Err(error) => return Err(error.into()),
            }
            if pause_before_retry(&stop).await.is_break() {
                return Ok(());
            }
        };
        wiring::run(self, clock, stop).await
    }

    /// What has to be true before anything is read. An outage may interrupt it at any point: it can be repeated.
    async fn prepare(&self) -> Result<Clock, sqlx::Error> {
        if self.settings.start_paused {
            store::sending::stop_at_start(&self.pool).await?;
        }
        store::sending::warn_if_stopped(&self.pool).await?;
        store::restored::renumber(&self.pool).await?;
        let asked_at = Instant::now();
        let now = sqlx::query_scalar("select clock_timestamp()")
            .fetch_one(&self.pool)
            .await?;
        Ok(Clock::new(asked_at, now))
    }
}
