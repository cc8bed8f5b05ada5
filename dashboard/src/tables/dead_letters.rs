//! `dead_letters`: read here by endpoint or tenant; the recorder adds them and a replay removes them.

use postrider_proto::{DeadReason, EndpointId, EndpointState, TenantId};
use serde::Serialize;
use sqlx::{FromRow, PgExecutor};
use utoipa::ToSchema;

use crate::{
    deliveries::{Place, Span},
    openapi::shapes,
};

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

/// Dead letters of one endpoint, type and reason.
#[derive(Debug, Clone, Serialize, FromRow, ToSchema)]
#[schema(as = DeadLetterGroup)]
pub(crate) struct Group {
    #[serde(skip)]
    pub(crate) tenant: String,
    pub(crate) endpoint: String,
    pub(crate) url: String,
    #[serde(rename = "type")]
    pub(crate) event_type: String,
    #[schema(schema_with = shapes::dead_reason)]
    pub(crate) reason: DeadReason,
    pub(crate) count: i64,
    #[schema(schema_with = shapes::any_endpoint_state)]
    pub(crate) endpoint_state: EndpointState,
}

/// The largest first, without a look at the dead letters themselves.
pub(crate) async fn groups(
    db: impl PgExecutor<'_>,
    tenant: Option<TenantId>,
    endpoint: Option<EndpointId>,
    limit: i64,
) -> Result<Vec<Group>, sqlx::Error> {
    sqlx::query_as(
        "select t.slug as tenant, e.public_id as endpoint, e.url, y.name as event_type, c.reason, c.count,
            e.state as endpoint_state
         from postrider.dead_letter_counts c
         join postrider.endpoints e on e.id = c.endpoint_id
         join postrider.tenants t on t.id = c.tenant_id and t.deleted_at is null
         join postrider.event_types y on y.id = c.type_id
         where c.count > 0 and ($1::int is null or c.tenant_id = $1) and ($2::int is null or c.endpoint_id = $2)
         order by c.count desc, c.endpoint_id, c.type_id, c.reason limit $3",
    )
    .bind(tenant)
    .bind(endpoint)
    .bind(limit)
    .fetch_all(db)
    .await
}
