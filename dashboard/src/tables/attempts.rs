//! `attempts`: read here; the recorder writes them and a replay clears `final`.
//! A finished delivery is its attempt with `final` set.

use chrono::{DateTime, Utc};
use postrider_dispatcher::bind::BindAll;
use postrider_proto::{DeliveryId, EndpointId, TenantId};
use sqlx::{FromRow, PgExecutor};

use crate::tables::deliveries::{DeliveryKey, Filter, Span};

#[derive(Debug, FromRow)]
pub(crate) struct AttemptRow {
    pub(crate) number: i16,
    pub(crate) started_at: DateTime<Utc>,
    pub(crate) duration_ms: i32,
    pub(crate) outcome: i16,
    pub(crate) status: Option<i16>,
    pub(crate) error: Option<String>,
    pub(crate) signature: Option<String>,
    pub(crate) response_head: Option<String>,
    pub(crate) response_body: Option<Vec<u8>>,
    pub(crate) replay_id: Option<String>,
    pub(crate) timing: Option<String>,
}

/// Attempts shown of one delivery; the newest are kept.
const ATTEMPTS_SHOWN_MAX: i64 = 500;

/// Newest first.
pub(crate) async fn of_delivery(db: impl PgExecutor<'_>, id: DeliveryId) -> sqlx::Result<Vec<AttemptRow>> {
    sqlx::query_as(include_str!("sql/attempts_of_delivery.sql"))
        .bind_all((id.event, id.endpoint, ATTEMPTS_SHOWN_MAX))
        .fetch_all(db)
        .await
}

pub(crate) async fn list_ended_of_endpoint(
    db: impl PgExecutor<'_>,
    endpoint: EndpointId,
    span: Span<'_>,
) -> sqlx::Result<Vec<DeliveryKey>> {
    sqlx::query_as(
        "select event_id, endpoint_id, ($6::int[] is null or type_id = any($6)) and ($7::smallint is null or status is not distinct from $7) as may_match
         from postrider.attempts
         where final is not null and endpoint_id = $1
           and event_id between $2 and $3 and (event_id < $3 or endpoint_id < $4)
         order by event_id desc limit $5",
    )
    .bind(endpoint)
    .bind_all(span.values())
    .bind(span.status)
    .fetch_all(db)
    .await
}

/// Includes an entry that can't match for each event without an ended delivery, so that a page examines a bounded number of
/// events.
pub(crate) async fn list_ended_of_tenant(
    db: impl PgExecutor<'_>,
    tenant: TenantId,
    span: Span<'_>,
) -> sqlx::Result<Vec<DeliveryKey>> {
    sqlx::query_as(include_str!("sql/attempts_list_ended_of_tenant.sql"))
        .bind(tenant)
        .bind_all(span.values())
        .bind(span.status)
        .fetch_all(db)
        .await
}

/// Deliveries of a bulk replay.
pub(crate) async fn list_of_replay(
    db: impl PgExecutor<'_>,
    replay: &str,
    filter: &Filter,
    span: Span<'_>,
) -> sqlx::Result<Vec<DeliveryKey>> {
    sqlx::query_as(include_str!("sql/attempts_list_of_replay.sql"))
        .bind(replay)
        .bind_all(span.values())
        .bind(filter.endpoint)
        .fetch_all(db)
        .await
}

/// Across all tenants: scans the primary key, where nearly every row is a final one.
pub(crate) async fn list_ended(db: impl PgExecutor<'_>, span: Span<'_>) -> sqlx::Result<Vec<DeliveryKey>> {
    sqlx::query_as(
        "select event_id, endpoint_id, ($5::int[] is null or type_id = any($5)) and ($6::smallint is null or status is not distinct from $6) as may_match
         from postrider.attempts
         where final is not null and event_id between $1 and $2 and (event_id < $2 or endpoint_id < $3)
         order by event_id desc, endpoint_id desc limit $4",
    )
    .bind_all(span.values())
    .bind(span.status)
    .fetch_all(db)
    .await
}

/// Deliveries whose latest attempt got this unsuccessful status code. The condition on the range of codes lets
/// Postgres use the index of unsuccessful attempts.
pub(crate) async fn list_refused(
    db: impl PgExecutor<'_>,
    code: i16,
    filter: &Filter,
    span: Span<'_>,
) -> sqlx::Result<Vec<DeliveryKey>> {
    sqlx::query_as(include_str!("sql/attempts_list_refused.sql"))
        .bind(code)
        .bind_all(span.values())
        .bind_all((filter.tenant, filter.endpoint))
        .bind(filter.state.map(|state| state.as_str()))
        .fetch_all(db)
        .await
}
