//! Whether endpoints work, of one tenant or of all: `endpoint_health`, `endpoint_activity` and the minute statistics. Read
//! here; dispatchers write them.
//!
//! Invariant: the cost of a page does not depend on the number of endpoints. At most [`SCANNED_MAX`] are looked at; then
//! the page ends, short if need be, and its cursor continues there.

use chrono::{DateTime, Utc};
use postrider_dispatcher::{
    bind::BindAll,
    store::transitions::{FAILING_DAYS, FAILING_PAUSE_DAYS_MAX},
};
use postrider_proto::{
    EndpointId, EndpointState, TenantId,
    state::{CircuitState, HealthStatus},
};
use sqlx::{FromRow, PgExecutor};

use crate::Pool;

const SCANNED_MAX: i64 = 5_000;

#[derive(Debug, Clone, FromRow)]
pub(crate) struct HealthRow {
    pub(crate) id: EndpointId,
    pub(crate) public_id: String,
    pub(crate) tenant: String,
    pub(crate) url: String,
    pub(crate) description: Option<String>,
    pub(crate) state: EndpointState,
    /// `Paused` if the tenant is.
    pub(crate) effective_state: EndpointState,
    pub(crate) failing_since: Option<DateTime<Utc>>,
    pub(crate) disabled_after: Option<DateTime<Utc>>,
    pub(crate) in_flight: i32,
    pub(crate) oldest_at: Option<DateTime<Utc>>,
    pub(crate) circuit_open: bool,
}

/// Filter of a list.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct HealthFilter {
    pub(crate) tenant: Option<TenantId>,
    pub(crate) health: Option<HealthStatus>,
    pub(crate) circuit: Option<CircuitState>,
}

impl HealthFilter {
    /// The state and whether it fails; `None` for any.
    fn conditions(&self) -> (Option<EndpointState>, Option<bool>) {
        match self.health {
            None => (None, None),
            Some(HealthStatus::Healthy) => (Some(EndpointState::Active), Some(false)),
            Some(HealthStatus::Failing) => (Some(EndpointState::Active), Some(true)),
            Some(HealthStatus::Paused) => (Some(EndpointState::Paused), None),
            Some(HealthStatus::Disabled) => (Some(EndpointState::Disabled), None),
        }
    }
}

/// In order of creation, after an endpoint; and where the next page continues, if there may be more.
pub(crate) async fn list(
    pool: &Pool,
    filter: &HealthFilter,
    after: EndpointId,
    limit: i64,
) -> sqlx::Result<(Vec<HealthRow>, Option<EndpointId>)> {
    let scanned = scan(pool, filter, after).await?;
    let mut rows = of(pool, &scanned, filter, limit + 1).await?;
    if rows.len() as i64 > limit {
        rows.truncate(limit as usize);
        let last = rows.last().map(|row| row.id);
        return Ok((rows, last));
    }
    let next = scanned.last().filter(|_| scanned.len() as i64 == SCANNED_MAX);
    Ok((rows, next.copied()))
}

/// Endpoints that may match. Failing ones, and those with an open circuit, are found without looking at all others.
async fn scan(pool: &Pool, filter: &HealthFilter, after: EndpointId) -> sqlx::Result<Vec<EndpointId>> {
    let (failing, open) = (
        filter.health == Some(HealthStatus::Failing),
        filter.circuit == Some(CircuitState::Open),
    );
    let statement = match filter.tenant {
        Some(tenant) => {
            return sqlx::query_scalar(
                "select id from postrider.endpoints
                 where tenant_id = $1 and state <> 'deleted' and id > $2 order by id limit $3",
            )
            .bind_all((tenant, after, SCANNED_MAX))
            .fetch_all(pool)
            .await;
        }
        None if open => sqlx::query_scalar(
            "select endpoint_id from postrider.endpoint_activity where endpoint_id > $1 order by endpoint_id limit $2",
        ),
        None if failing => sqlx::query_scalar(
            "select endpoint_id from postrider.endpoint_health where endpoint_id > $1 order by endpoint_id limit $2",
        ),
        None => sqlx::query_scalar(
            "select id from postrider.endpoints where state <> 'deleted' and id > $1 order by id limit $2",
        ),
    };
    statement.bind_all((after, SCANNED_MAX)).fetch_all(pool).await
}

/// Those of these endpoints that match, in order of creation.
pub(crate) async fn of(
    db: impl PgExecutor<'_>,
    endpoints: &[EndpointId],
    filter: &HealthFilter,
    limit: i64,
) -> sqlx::Result<Vec<HealthRow>> {
    let (state, failing) = filter.conditions();
    let open = filter.circuit.map(|circuit| circuit == CircuitState::Open);
    sqlx::query_as(include_str!("sql/endpoint_health.sql"))
        .bind_all((endpoints, state, failing, open))
        .bind_all((limit, FAILING_DAYS, FAILING_PAUSE_DAYS_MAX))
        .fetch_all(db)
        .await
}

/// Attempts of an endpoint that had any.
#[derive(Debug, Clone, FromRow)]
pub(crate) struct AttemptsRow {
    pub(crate) id: EndpointId,
    pub(crate) delivered: i64,
    pub(crate) failed: i64,
    /// By `Class`.
    pub(crate) classes: Vec<i64>,
}

pub(crate) async fn attempts_since(
    db: impl PgExecutor<'_>,
    endpoints: &[EndpointId],
    since: DateTime<Utc>,
) -> sqlx::Result<Vec<AttemptsRow>> {
    sqlx::query_as(include_str!("sql/endpoint_last_hour.sql"))
        .bind_all((endpoints, since))
        .fetch_all(db)
        .await
}
