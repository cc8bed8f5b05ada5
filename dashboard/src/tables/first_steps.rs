//! How far a new installation has been set up. Reads several tables, each of them small.

use sqlx::{FromRow, PgExecutor};

#[derive(Debug, Clone, PartialEq, Eq, FromRow)]
pub(crate) struct FirstSteps {
    /// The latest tenant.
    pub(crate) tenant: Option<String>,
    /// The latest event type.
    pub(crate) event_type: Option<String>,
    /// The latest endpoint.
    pub(crate) endpoint: Option<String>,
    /// An event was emitted.
    pub(crate) has_event: bool,
    /// A probe found a receiver that verifies signatures.
    pub(crate) is_verified: bool,
    /// The first tenant is older than the given number of days.
    pub(crate) is_old: bool,
}

impl FirstSteps {
    /// Of home and a cell. Home has the tenants and the event types.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            endpoint: self.endpoint.or(other.endpoint),
            has_event: self.has_event || other.has_event,
            is_verified: self.is_verified || other.is_verified,
            ..self
        }
    }
}

pub(crate) async fn find(db: impl PgExecutor<'_>, old_days: i32) -> sqlx::Result<FirstSteps> {
    sqlx::query_as(include_str!("sql/first_steps.sql"))
        .bind(old_days)
        .fetch_one(db)
        .await
}
