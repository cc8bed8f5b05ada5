//! Current activity of dispatchers: `endpoint_activity`, `dispatchers` and `shards`. Read here; dispatchers write
//! them.

use chrono::{DateTime, Utc};
use postrider_dispatcher::{
    bind::BindAll,
    store::transitions::{FAILING_DAYS, FAILING_PAUSE_DAYS_MAX},
};
use postrider_proto::{EndpointId, TenantId};
use sqlx::{FromRow, PgExecutor};

#[derive(Debug, Clone, FromRow)]
pub(crate) struct SystemRow {
    pub(crate) now: DateTime<Utc>,
    pub(crate) in_flight: i64,
    /// When the oldest event with a due first attempt was emitted.
    pub(crate) oldest_at: Option<DateTime<Utc>>,
    pub(crate) circuits_open: i64,
    pub(crate) dead_letters: i64,
}

impl SystemRow {
    /// Of two databases.
    pub(crate) fn and(self, other: Self) -> Self {
        let oldest = [self.oldest_at, other.oldest_at].into_iter().flatten().min();
        Self {
            now: self.now,
            in_flight: self.in_flight + other.in_flight,
            oldest_at: oldest,
            circuits_open: self.circuits_open + other.circuits_open,
            dead_letters: self.dead_letters + other.dead_letters,
        }
    }
}

pub(crate) async fn system(db: impl PgExecutor<'_>, tenant: Option<TenantId>) -> sqlx::Result<SystemRow> {
    sqlx::query_as(include_str!("sql/activity_system.sql"))
        .bind(tenant)
        .fetch_one(db)
        .await
}

#[derive(Debug, Clone, FromRow)]
pub(crate) struct ActivityRow {
    pub(crate) endpoint_id: EndpointId,
    pub(crate) in_flight: i32,
    pub(crate) concurrency: i32,
    pub(crate) oldest_at: Option<DateTime<Utc>>,
    pub(crate) circuit_open: bool,
}

/// Only endpoints with current activity.
pub(crate) async fn of_endpoints(
    db: impl PgExecutor<'_>,
    endpoints: &[EndpointId],
) -> sqlx::Result<Vec<ActivityRow>> {
    sqlx::query_as(
        "select a.endpoint_id, a.in_flight, a.concurrency, a.oldest_at, a.circuit_open
         from postrider.endpoint_activity a
         join postrider.dispatchers d on d.id = a.writer and d.expires_at > clock_timestamp()
         where a.endpoint_id = any($1)",
    )
    .bind(endpoints)
    .fetch_all(db)
    .await
}

/// Whether an endpoint works, beside what its owner has set.
#[derive(Debug, Clone, Copy, Default, FromRow)]
pub(crate) struct HealthRow {
    pub(crate) circuit_open: bool,
    /// Since its first failure after its last success.
    pub(crate) failing_since: Option<DateTime<Utc>>,
    /// It is disabled by the first failure after this, unless a delivery succeeds before. None after a break in the
    /// failures: they start to count again.
    pub(crate) disabled_after: Option<DateTime<Utc>>,
}

pub(crate) async fn health(db: impl PgExecutor<'_>, endpoint: EndpointId) -> sqlx::Result<HealthRow> {
    sqlx::query_as(
        "select exists (select from postrider.endpoint_activity a
                        join postrider.dispatchers d on d.id = a.writer and d.expires_at > clock_timestamp()
                        where a.endpoint_id = $1 and a.circuit_open) as circuit_open,
                h.failing_since,
                case when h.last_failed_on >= (clock_timestamp() at time zone 'UTC')::date - $3::int
                     then h.failing_since + $2::int * interval '1 day' end as disabled_after
         from (select $1::int as id) e left join postrider.endpoint_health h on h.endpoint_id = e.id",
    )
    .bind_all((endpoint, FAILING_DAYS, FAILING_PAUSE_DAYS_MAX))
    .fetch_one(db)
    .await
}

#[derive(Debug, Clone, FromRow)]
pub(crate) struct DispatcherRow {
    pub(crate) name: String,
    pub(crate) started_at: DateTime<Utc>,
    pub(crate) leaving: bool,
    pub(crate) shards: i64,
    pub(crate) in_flight: i64,
}

/// Dispatchers whose lease is valid.
pub(crate) async fn dispatchers(db: impl PgExecutor<'_>, limit: i64) -> sqlx::Result<Vec<DispatcherRow>> {
    sqlx::query_as(
        "select d.name, d.started_at, d.leaving,
                (select count(*) from postrider.shards s where s.owner = d.id) as shards,
                (select coalesce(sum(a.in_flight), 0)::bigint from postrider.endpoint_activity a
                 where a.writer = d.id) as in_flight
         from postrider.dispatchers d where d.expires_at > clock_timestamp() order by d.started_at limit $1",
    )
    .bind(limit)
    .fetch_all(db)
    .await
}
