//! `attempts`: read here; the recorder writes them and a replay clears `final`.
//! A finished delivery is its attempt with `final` set.

use chrono::{DateTime, Utc};
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
}

/// Attempts shown of one delivery; the newest are kept.
const ATTEMPTS_SHOWN_MAX: i64 = 500;

/// Newest first.
pub(crate) async fn of_delivery(
    db: impl PgExecutor<'_>,
    id: DeliveryId,
) -> Result<Vec<AttemptRow>, sqlx::Error> {
    sqlx::query_as(
        "select number, started_at, duration_ms, outcome, status, error, signature, response_head,
            response_body, replay_id
         from postrider.attempts where event_id = $1 and endpoint_id = $2
         union all
         select number, started_at, duration_ms, outcome, status, error, signature, response_head,
            response_body, replay_id
         from postrider.attempts_held where event_id = $1 and endpoint_id = $2
         order by number desc limit $3",
    )
    .bind(id.event)
    .bind(id.endpoint)
    .bind(ATTEMPTS_SHOWN_MAX)
    .fetch_all(db)
    .await
}

pub(crate) async fn list_ended_of_endpoint(
    db: impl PgExecutor<'_>,
    endpoint: EndpointId,
    span: Span<'_>,
) -> Result<Vec<DeliveryKey>, sqlx::Error> {
    sqlx::query_as(
        "select event_id, endpoint_id, ($6::int[] is null or type_id = any($6)) and ($7::smallint is null or status is not distinct from $7) as may_match
         from postrider.attempts
         where final is not null and endpoint_id = $1
           and event_id between $2 and $3 and (event_id < $3 or endpoint_id < $4)
         order by event_id desc limit $5",
    )
    .bind(endpoint)
    .bind(span.lowest)
    .bind(span.before.event)
    .bind(span.before.endpoint)
    .bind(span.limit)
    .bind(span.types)
    .bind(span.status)
    .fetch_all(db)
    .await
}

pub(crate) async fn list_ended_of_tenant(
    db: impl PgExecutor<'_>,
    tenant: TenantId,
    span: Span<'_>,
) -> Result<Vec<DeliveryKey>, sqlx::Error> {
    sqlx::query_as(
        "select event_id, endpoint_id, ($6::int[] is null or type_id = any($6)) and ($7::smallint is null or status is not distinct from $7) as may_match
         from postrider.attempts
         where final is not null and tenant_id = $1
           and event_id between $2 and $3 and (event_id < $3 or endpoint_id < $4)
         order by event_id desc, endpoint_id desc limit $5",
    )
    .bind(tenant)
    .bind(span.lowest)
    .bind(span.before.event)
    .bind(span.before.endpoint)
    .bind(span.limit)
    .bind(span.types)
    .bind(span.status)
    .fetch_all(db)
    .await
}

/// Across all tenants: scans the primary key, where nearly every row is a final one.
pub(crate) async fn list_ended(
    db: impl PgExecutor<'_>,
    span: Span<'_>,
) -> Result<Vec<DeliveryKey>, sqlx::Error> {
    sqlx::query_as(
        "select event_id, endpoint_id, ($5::int[] is null or type_id = any($5)) and ($6::smallint is null or status is not distinct from $6) as may_match
         from postrider.attempts
         where final is not null and event_id between $1 and $2 and (event_id < $2 or endpoint_id < $3)
         order by event_id desc, endpoint_id desc limit $4",
    )
    .bind(span.lowest)
    .bind(span.before.event)
    .bind(span.before.endpoint)
    .bind(span.limit)
    .bind(span.types)
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
) -> Result<Vec<DeliveryKey>, sqlx::Error> {
    sqlx::query_as(
        "select x.event_id, x.endpoint_id,
            ($6::int[] is null or x.type_id = any($6)) and ($7::int is null or x.tenant_id = $7)
            and ($8::int is null or x.endpoint_id = $8)
            and ($9::text is null or x.final::text = $9 or (x.final is null and $9 <> 'delivered'))
            and not exists (select from postrider.attempts b where b.event_id = x.event_id
                and b.endpoint_id = x.endpoint_id and b.number > x.number) as may_match
         from (
            select distinct on (event_id, endpoint_id) event_id, endpoint_id, number, tenant_id, type_id, final
            from postrider.attempts
            where status = $1 and (status < 200 or status > 299)
              and event_id between $2 and $3 and (event_id < $3 or endpoint_id < $4)
            order by event_id desc, endpoint_id desc, number desc limit $5
         ) x
         order by x.event_id desc, x.endpoint_id desc",
    )
    .bind(code)
    .bind(span.lowest)
    .bind(span.before.event)
    .bind(span.before.endpoint)
    .bind(span.limit)
    .bind(span.types)
    .bind(filter.tenant)
    .bind(filter.endpoint)
    .bind(filter.state.map(|state| state.as_str()))
    .fetch_all(db)
    .await
}
