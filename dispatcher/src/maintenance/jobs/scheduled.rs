//! What has to be done every hour, whoever does it.

use std::time::Duration;

use apalis::prelude::{BoxDynError, Data};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

use crate::{
    maintenance::{partitions, planned_rotation, retention, rollup},
    vault::Vault,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Duty {
    MakePartitions,
    RotateSecrets,
    ForgetAnswers,
    RollUpStatistics,
    DropOld,
}

/// How long events are kept.
#[derive(Debug, Clone, Copy)]
pub(super) struct Retention(pub(super) Duration);

/// Answers to repeated requests removed by one statement.
const ANSWERS_FORGOTTEN_MAX: i64 = 5_000;
const TRACES_FORGOTTEN_MAX: i64 = 5_000;
/// Statements of one run: what is left waits for the next.
const FORGETTING_STEPS_MAX: usize = 1_000;

impl Duty {
    pub(super) const ALL: [Self; 5] = [
        Self::MakePartitions,
        Self::RotateSecrets,
        Self::ForgetAnswers,
        Self::RollUpStatistics,
        Self::DropOld,
    ];
}

/// Each duty can be done twice without harm.
pub(super) async fn perform(
    duty: Duty,
    pool: Data<PgPool>,
    vault: Data<Vault>,
    kept: Data<Retention>,
) -> Result<(), BoxDynError> {
    let Data(Retention(kept)) = kept;
    match duty {
        Duty::MakePartitions => partitions::make_ahead(&pool, kept).await?,
        Duty::RotateSecrets => {
            let done = planned_rotation::run(&pool, &vault).await?;
            if done != planned_rotation::Done::default() {
                tracing::info!(
                    announced = done.announced,
                    rotated = done.rotated,
                    "planned rotations"
                );
            }
        }
        Duty::ForgetAnswers => {
            forget_answers(&pool).await?;
            forget_traces(&pool).await?;
        }
        Duty::RollUpStatistics => rollup::run(&pool).await?,
        Duty::DropOld => match retention::run(&pool, kept).await {
            Ok(done) => tracing::debug!(?done, "retention"),
            // An open transaction was in the way, most often. The next run goes on from here.
            Err(error) => tracing::warn!(%error, "what is past its retention could not be dropped yet"),
        },
    }
    tracing::debug!(?duty, "done");
    Ok(())
}

/// Where events belong in their producers' traces is of use for a week. A replay after that begins a trace of its own.
async fn forget_traces(pool: &PgPool) -> Result<(), sqlx::Error> {
    for _ in 0..FORGETTING_STEPS_MAX {
        let done = sqlx::query(
            "delete from postrider.traces where event_id in (
                select event_id from postrider.traces
                where event_id < postrider.uuid_floor(clock_timestamp() - interval '7 days') order by event_id limit $1)",
        )
        .bind(TRACES_FORGOTTEN_MAX)
        .execute(pool)
        .await?;
        if done.rows_affected() < TRACES_FORGOTTEN_MAX as u64 {
            break;
        }
    }
    Ok(())
}

/// What came with an `Idempotency-Key` is remembered for 72 hours.
async fn forget_answers(pool: &PgPool) -> Result<(), sqlx::Error> {
    for _ in 0..FORGETTING_STEPS_MAX {
        let done = sqlx::query(
            "delete from postrider.idempotency where scope in (
                select scope from postrider.idempotency
                where created_at < clock_timestamp() - interval '72 hours' order by created_at limit $1)",
        )
        .bind(ANSWERS_FORGOTTEN_MAX)
        .execute(pool)
        .await?;
        if done.rows_affected() == 0 {
            break;
        }
    }
    Ok(())
}
