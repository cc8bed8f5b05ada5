//! `dead_letters`: read here by endpoint or tenant; the recorder adds them and a replay removes them.

use postrider_proto::{EndpointId, TenantId};
use sqlx::PgExecutor;

use crate::deliveries::{Place, Span};

pub(crate) async fn list_of_endpoint(
    db: impl PgExecutor<'_>,
    endpoint: EndpointId,
    span: Span<'_>,
) -> Result<Vec<Place>, sqlx::Error> {
    sqlx::query_as(
        "select event_id, endpoint_id, $6::int[] is null or type_id = any($6) as may_match from postrider.dead_letters
         where endpoint_id = $1 and event_id between $2 and $3 and (event_id < $3 or endpoint_id < $4)
         order by event_id desc limit $5",
    )
    .bind(endpoint)
    .bind(span.lowest)
    .bind(span.before.event)
    .bind(span.before.endpoint)
    .bind(span.limit)
    .bind(span.types)
    .fetch_all(db)
    .await
}

pub(crate) async fn list_of_tenants(
    db: impl PgExecutor<'_>,
    tenants: &[TenantId],
    span: Span<'_>,
) -> Result<Vec<Place>, sqlx::Error> {
    let tenants: Vec<i32> = tenants.iter().map(|id| id.0).collect();
    sqlx::query_as(
        "select d.event_id, d.endpoint_id, $6::int[] is null or d.type_id = any($6) as may_match from unnest($1::int[]) as t (id)
         cross join lateral (
            select d.event_id, d.endpoint_id, d.type_id from postrider.dead_letters d
            where d.tenant_id = t.id and d.event_id between $2 and $3 and (d.event_id < $3 or d.endpoint_id < $4)
            order by d.event_id desc, d.endpoint_id desc limit $5) d
         order by d.event_id desc, d.endpoint_id desc limit $5",
    )
    .bind(tenants)
    .bind(span.lowest)
    .bind(span.before.event)
    .bind(span.before.endpoint)
    .bind(span.limit)
    .bind(span.types)
    .fetch_all(db)
    .await
}

/// Who has any, by the counts that are kept beside them.
pub(crate) async fn tenants_with_any(
    db: impl PgExecutor<'_>,
    limit: i64,
) -> Result<Vec<TenantId>, sqlx::Error> {
    sqlx::query_scalar(
        "select distinct tenant_id from postrider.dead_letter_counts where count > 0 order by tenant_id limit $1",
    )
    .bind(limit)
    .fetch_all(db)
    .await
}
