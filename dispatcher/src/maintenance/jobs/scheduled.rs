//! Hourly duties, run by one of the nodes.

use std::time::Duration;

use apalis::prelude::{BoxDynError, Data};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

use crate::{
    health::database::warn_unless_outage,
    maintenance::{partitions, planned_rotation, retention, rollup, usage},
    vault::Vault,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Duty {
    MakePartitions,
    RotateSecrets,
    DeleteExpiredResponses,
    RollUpStatistics,
    DropOld,
}

/// How long events are kept.
#[derive(Debug, Clone, Copy)]
pub(super) struct Retention(pub(super) Duration);

/// A duty that takes longer is abandoned, and continued by the next run: its connection may have been cut off silently.
const DUTY_MAX: Duration = Duration::from_secs(50 * 60);
/// Rows removed by one statement.
const DELETED_MAX: i64 = 5_000;
/// Trace contexts of producers are useful for a week. A replay after that starts its own trace.
const EXPIRED_TRACES: &str = "delete from postrider.traces where event_id in (
    select event_id from postrider.traces
    where event_id < postrider.uuid_floor(clock_timestamp() - interval '7 days') order by event_id limit $1)";
/// Responses to requests with an `Idempotency-Key` are kept for 72 hours.
const EXPIRED_RESPONSES: &str = "delete from postrider.idempotency where scope in (
    select scope from postrider.idempotency
    where created_at < clock_timestamp() - interval '72 hours' order by created_at limit $1)";
/// Statements per run; the rest waits for the next run.
const FORGETTING_STEPS_MAX: usize = 1_000;

impl Duty {
    pub(super) const ALL: [Self; 5] = [
        Self::MakePartitions,
        Self::RotateSecrets,
        Self::DeleteExpiredResponses,
        Self::RollUpStatistics,
        Self::DropOld,
    ];
}

/// Every duty is idempotent.
pub(super) async fn perform(
    duty: Duty,
    pool: Data<PgPool>,
    vault: Data<Vault>,
    kept: Data<Retention>,
) -> Result<(), BoxDynError> {
    let Data(Retention(kept)) = kept;
    tokio::time::timeout(DUTY_MAX, carry_out(duty, &pool, &vault, kept)).await??;
    tracing::debug!(?duty, "duty finished");
    Ok(())
}

async fn carry_out(duty: Duty, pool: &PgPool, vault: &Vault, kept: Duration) -> Result<(), sqlx::Error> {
    match duty {
        Duty::MakePartitions => partitions::make_ahead(pool, kept).await?,
        Duty::RotateSecrets => {
            let done = planned_rotation::run(pool, vault).await?;
            if done != planned_rotation::Done::default() {
                tracing::info!(
                    announced = done.announced,
                    rotated = done.rotated,
                    "rotated secrets as planned"
                );
            }
        }
        Duty::DeleteExpiredResponses => {
            delete(pool, EXPIRED_RESPONSES).await?;
            delete(pool, EXPIRED_TRACES).await?;
        }
        Duty::RollUpStatistics => rollup::run(pool).await?,
        Duty::DropOld => {
            match retention::run(pool, kept).await {
                Ok(done) => tracing::debug!(?done, "retention finished"),
                // Usually blocked by an open transaction. The next run continues from here.
                Err(error) => {
                    warn_unless_outage!(error, "dropping expired data failed; retrying with the next run")
                }
            }
            usage::run(pool, kept).await?;
        }
    }
    Ok(())
}

async fn delete(pool: &PgPool, statement: &'static str) -> Result<(), sqlx::Error> {
    for _ in 0..FORGETTING_STEPS_MAX {
        let done = sqlx::query(statement).bind(DELETED_MAX).execute(pool).await?;
        if done.rows_affected() == 0 {
            break;
        }
    }
    Ok(())
}
