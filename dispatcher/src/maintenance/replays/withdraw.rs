//! What a cancelled replay gives back: deliveries that were put in line and not sent become what they were, dead letters,
//! delivered, waiting for their time, or not there at all.
//!
//! Asked for by the engine, which alone knows what is on the wire and lets go of the rest first; it holds back whatever is
//! left of these replays until it hears that this is done.
//! Invariant: one statement, and only while the shard has the owner and the epoch it was asked under, so that no delivery
//! is taken back that somebody sends.

use std::time::Duration;

use sqlx::PgPool;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::BEGIN_STEP;
use crate::{
    db_timeout::WithDbTimeout,
    deliver::{engine::EngineMessage, lane::Withdrawal},
    store::transitions::{self, Fence},
};

const AGAIN_WAIT: Duration = Duration::from_millis(50);
const AGAIN_WAIT_MAX: Duration = Duration::from_secs(1);

pub(crate) struct Withdrawer {
    pub(crate) pool: PgPool,
    pub(crate) owner: Uuid,
    pub(crate) withdrawals: mpsc::UnboundedReceiver<Withdrawal>,
    pub(crate) out: mpsc::UnboundedSender<EngineMessage>,
    pub(crate) stop: CancellationToken,
}

impl Withdrawer {
    /// Until the engine is gone. What could not be done then is done by the next owner of the shard.
    pub(crate) async fn run(mut self) {
        while let Some(asked) = self.withdrawals.recv().await {
            let mut wait = AGAIN_WAIT;
            while let Err(error) = withdraw(&self.pool, self.owner, &asked).with_db_timeout().await {
                tracing::warn!(%error, endpoint = %asked.endpoint, "a cancelled replay could not be taken back yet; trying again");
                tokio::select! {
                    () = tokio::time::sleep(wait) => wait = (wait * 2).min(AGAIN_WAIT_MAX),
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
