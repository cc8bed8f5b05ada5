//! Reverts a cancelled replay: queued deliveries that were not sent become what they were: dead letters, delivered,
//! pending retries, or nonexistent.
//!
//! Requested by the engine, which alone knows what is in flight and drops the rest from memory first; it holds back
//! the remaining deliveries of these replays until the withdrawal is reported complete.
//! Invariant: one statement, and only while the shard has the owner and epoch it was requested under, so that no
//! delivery is withdrawn that another dispatcher sends.

use std::time::Duration;

use sqlx::PgPool;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::BEGIN_STEP;
use crate::{
    backoff::Backoff,
    db_timeout::WithDbTimeout,
    deliver::{engine::EngineMessage, lane::Withdrawal},
    store::transitions::{self, Fence},
};

const RETRY: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(1));

pub(crate) struct Withdrawer {
    pub(crate) pool: PgPool,
    pub(crate) owner: Uuid,
    pub(crate) withdrawals: mpsc::UnboundedReceiver<Withdrawal>,
    pub(crate) out: mpsc::UnboundedSender<EngineMessage>,
    pub(crate) stop: CancellationToken,
}

impl Withdrawer {
    /// Runs until the engine is gone. The next owner of the shard completes what is left.
    pub(crate) async fn run(mut self) {
        while let Some(asked) = self.withdrawals.recv().await {
            let mut backoff = RETRY;
            while let Err(error) = withdraw(&self.pool, self.owner, &asked).with_db_timeout().await {
                tracing::warn!(%error, endpoint = %asked.endpoint, "withdrawing a cancelled replay failed; retrying");
                tokio::select! {
                    () = tokio::time::sleep(backoff.delay()) => {}
                    () = self.stop.cancelled() => return,
                }
            }
            let _ = self.out.send(EngineMessage::Withdrawn {
                endpoint: asked.endpoint,
                epoch: asked.epoch,
            });
        }
    }
}

async fn withdraw(pool: &PgPool, owner: Uuid, asked: &Withdrawal) -> Result<(), sqlx::Error> {
    let fence = Fence {
        shard: asked.shard,
        owner,
        epoch: asked.epoch,
    };
    let mut tx = pool.begin_with(BEGIN_STEP).await?;
    transitions::withdraw(&mut *tx, fence, asked.endpoint, &asked.replays, &asked.attempted).await?;
    tx.commit().await
}
