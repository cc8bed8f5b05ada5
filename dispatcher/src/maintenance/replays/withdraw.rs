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
    health::database::warn_unless_outage,
    store::transitions::{self, Fence},
};

const RETRY: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(1));

/// Runs until the engine is gone. The next owner of the shard completes what is left.
pub(crate) async fn run(
    pool: PgPool,
    owner: Uuid,
    mut withdrawals: mpsc::UnboundedReceiver<Withdrawal>,
    out: mpsc::UnboundedSender<EngineMessage>,
    stop: CancellationToken,
) {
    while let Some(asked) = withdrawals.recv().await {
        let mut backoff = RETRY;
        while let Err(error) = withdraw(&pool, owner, &asked).with_db_timeout().await {
            warn_unless_outage!(error, endpoint = %asked.endpoint, "withdrawing a cancelled replay failed; retrying");
            tokio::select! {
                () = tokio::time::sleep(backoff.delay()) => {}
                () = stop.cancelled() => return,
            }
        }
        let (endpoint, epoch) = (asked.endpoint, asked.epoch);
        let _ = out.send(EngineMessage::Withdrawn { endpoint, epoch });
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
