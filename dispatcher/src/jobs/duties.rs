//! What has to be done every hour, whoever does it.

use apalis::prelude::{BoxDynError, Data};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

use crate::partitions;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Duty {
    MakePartitions,
}

impl Duty {
    pub(super) const ALL: [Self; 1] = [Self::MakePartitions];
}

/// Each duty can be done twice without harm.
pub(super) async fn perform(duty: Duty, pool: Data<PgPool>) -> Result<(), BoxDynError> {
    match duty {
        Duty::MakePartitions => partitions::make_ahead(&pool).await?,
    }
    tracing::debug!(?duty, "done");
    Ok(())
}
