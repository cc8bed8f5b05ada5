//! `minute_statistics` and `hour_statistics`: read here; dispatchers write them.
//! Each endpoint is looked up by the index (`offset 0` prevents other join orders): the table of all endpoints'
//! minutes is large, and the planner would underestimate a scan because it can't tell how few rows are new.

use chrono::{DateTime, TimeDelta, Utc};
use postrider_dispatcher::bind::BindAll;
use postrider_proto::{EndpointId, TenantId};
use sqlx::{FromRow, PgExecutor};

/// Endpoint and minute pairs read to find the top failing endpoints.
const FAILURES_WALKED_MAX: i64 = 10_000;

/// The counters of a minute or an hour.
#[derive(Debug, Clone, FromRow)]
pub(crate) struct CountRow {
    pub(crate) at: DateTime<Utc>,
    pub(crate) delivered: i32,
    pub(crate) retried: i32,
    pub(crate) dead: i32,
    /// By `Class`.
    pub(crate) classes: Vec<i32>,
    /// By `BOUNDS_MS`.
    pub(crate) durations: Vec<i32>,
}

/// The minutes of these endpoints since a point in time, unordered. Each dispatcher's count of a minute is a row.
pub(crate) async fn minutes(
    db: impl PgExecutor<'_>,
    endpoints: &[EndpointId],
    since: DateTime<Utc>,
) -> sqlx::Result<Vec<CountRow>> {
    sqlx::query_as(
        "select m.minute as at, m.delivered, m.retried, m.dead, m.classes, m.durations
         from unnest($1::int[]) as e (id)
         cross join lateral (
             select * from postrider.minute_statistics m where m.endpoint_id = e.id and m.minute >= $2 offset 0) m",
    )
    .bind_all((endpoints, since))
    .fetch_all(db)
    .await
}

/// The counters of these endpoints since a point in time: hours, and the minutes that are not part of an aggregated one.
pub(crate) async fn hours(
    db: impl PgExecutor<'_>,
    endpoints: &[EndpointId],
    since: DateTime<Utc>,
) -> sqlx::Result<Vec<CountRow>> {
    sqlx::query_as(include_str!("sql/statistics_hours.sql"))
        .bind_all((endpoints, since))
        .fetch_all(db)
        .await
}

/// An endpoint's minute or hour without its durations.
#[derive(Debug, Clone, Copy, FromRow)]
pub(crate) struct PlainRow {
    pub(crate) endpoint_id: EndpointId,
    pub(crate) at: DateTime<Utc>,
    pub(crate) delivered: i64,
    pub(crate) retried: i64,
    pub(crate) dead: i64,
}

impl From<PlainRow> for CountRow {
    fn from(row: PlainRow) -> Self {
        let count = |count: i64| i32::try_from(count).unwrap_or(i32::MAX);
        Self {
            at: row.at,
            delivered: count(row.delivered),
            retried: count(row.retried),
            dead: count(row.dead),
            classes: Vec::new(),
            durations: Vec::new(),
        }
    }
}

/// Like `hours`, for a list of many endpoints: minutes that are not aggregated yet are added to their hours.
pub(crate) async fn plain_hours(
    db: impl PgExecutor<'_>,
    endpoints: &[EndpointId],
    since: DateTime<Utc>,
) -> sqlx::Result<Vec<PlainRow>> {
    sqlx::query_as(include_str!("sql/statistics_plain_hours.sql"))
        .bind_all((endpoints, since))
        .fetch_all(db)
        .await
}

/// The sums of an endpoint's minutes since a point in time, one row for each step of so many minutes.
pub(crate) async fn steps(
    db: impl PgExecutor<'_>,
    endpoint: EndpointId,
    since: DateTime<Utc>,
    step: TimeDelta,
) -> sqlx::Result<Vec<PlainRow>> {
    sqlx::query_as(
        "select endpoint_id, date_bin($3 * interval '1 minute', minute, $2) as at, sum(delivered) as delivered,
                sum(retried) as retried, sum(dead) as dead
         from postrider.minute_statistics where endpoint_id = $1 and minute >= $2 group by 1, 2",
    )
    .bind_all((endpoint, since, step.num_minutes() as f64))
    .fetch_all(db)
    .await
}

/// The sums of these endpoints' minutes since a point in time, one row for each endpoint.
pub(crate) async fn sums_of_minutes(
    db: impl PgExecutor<'_>,
    endpoints: &[EndpointId],
    since: DateTime<Utc>,
) -> sqlx::Result<Vec<PlainRow>> {
    sqlx::query_as(
        "select e.id as endpoint_id, $2 as at, sum(m.delivered) as delivered, sum(m.retried) as retried, sum(m.dead) as dead
         from unnest($1::int[]) as e (id)
         cross join lateral (
             select * from postrider.minute_statistics m where m.endpoint_id = e.id and m.minute >= $2 offset 0) m
         group by e.id",
    )
    .bind_all((endpoints, since))
    .fetch_all(db)
    .await
}

/// A failing endpoint with its display name.
#[derive(Debug, Clone, FromRow)]
pub(crate) struct WorstRow {
    pub(crate) id: EndpointId,
    pub(crate) endpoint: String,
    pub(crate) url: String,
    pub(crate) tenant: String,
    pub(crate) state: postrider_proto::EndpointState,
    pub(crate) failing_since: Option<DateTime<Utc>>,
}

/// Endpoints with the most failed attempts since a point in time, of all tenants or one. Reads only minutes with
/// failures, newest first, so that it knows nothing of their successes.
pub(crate) async fn worst(
    db: impl PgExecutor<'_>,
    tenant: Option<TenantId>,
    since: DateTime<Utc>,
    limit: i64,
) -> sqlx::Result<Vec<WorstRow>> {
    sqlx::query_as(include_str!("sql/statistics_worst.sql"))
        .bind_all((since, tenant, FAILURES_WALKED_MAX, limit))
        .fetch_all(db)
        .await
}
