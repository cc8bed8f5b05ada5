//! What has to be done every hour, whoever does it.

use apalis::prelude::{BoxDynError, Data};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

use crate::{partitions, planned_rotation, vault::Vault};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Duty {
    MakePartitions,
    RotateSecrets,
}

impl Duty {
    pub(super) const ALL: [Self; 2] = [Self::MakePartitions, Self::RotateSecrets];
}

/// Each duty can be done twice without harm.
pub(super) async fn perform(duty: Duty, pool: Data<PgPool>, vault: Data<Vault>) -> Result<(), BoxDynError> {
    match duty {
        Duty::MakePartitions => partitions::make_ahead(&pool).await?,
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
    }
    tracing::debug!(?duty, "done");
    Ok(())
}
