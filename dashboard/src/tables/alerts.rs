//! `alerts`: written here; a dispatcher records when one has fired.

use chrono::{DateTime, Utc};
use postrider_dispatcher::bind::BindAll;
use postrider_proto::{EndpointId, TenantId};
use serde::Serialize;
use sqlx::{FromRow, PgExecutor};
use utoipa::ToSchema;

// A response as well: every column is shown as it is stored.
#[derive(Debug, Clone, Serialize, FromRow, ToSchema)]
#[schema(as = Alert)]
pub(crate) struct AlertRow {
    pub(crate) dead_letters: i64,
    /// Since when the threshold has been exceeded. The next event is sent only after the count has dropped below it.
    #[serde(rename = "triggered_at")]
    pub(crate) passed_at: Option<DateTime<Utc>>,
    #[serde(rename = "created_by")]
    pub(crate) asked_by: String,
    pub(crate) created_at: DateTime<Utc>,
}

/// A changed threshold is armed again.
pub(crate) async fn put(
    db: impl PgExecutor<'_>,
    endpoint: EndpointId,
    dead_letters: i64,
    asked_by: &str,
) -> sqlx::Result<AlertRow> {
    sqlx::query_as(
        "insert into postrider.alerts as a (endpoint_id, dead_letters, asked_by) values ($1, $2, $3)
         on conflict (endpoint_id) do update
         set dead_letters = excluded.dead_letters, asked_by = excluded.asked_by,
             passed_at = case when a.dead_letters = excluded.dead_letters then a.passed_at end
         returning dead_letters, passed_at, asked_by, created_at",
    )
    .bind_all((endpoint, dead_letters, asked_by))
    .fetch_one(db)
    .await
}

pub(crate) async fn find(db: impl PgExecutor<'_>, endpoint: EndpointId) -> sqlx::Result<Option<AlertRow>> {
    sqlx::query_as(
        "select dead_letters, passed_at, asked_by, created_at from postrider.alerts where endpoint_id = $1",
    )
    .bind(endpoint)
    .fetch_optional(db)
    .await
}

/// Whether an endpoint would get the events of this tenant's alerts: one of its own, or of the team that gets those of all
/// tenants. `patterns` are those that match the event type.
pub(crate) async fn has_receiver(
    db: impl PgExecutor<'_>,
    tenant: TenantId,
    patterns: &[String],
) -> sqlx::Result<bool> {
    sqlx::query_scalar(
        "select exists (
            select from postrider.endpoints where tenant_id = $1 and state = 'active' and types && $2
        ) or exists (
            select from postrider.tenants t join postrider.endpoints e on e.tenant_id = t.id
            where t.all_operational_events and t.deleted_at is null and e.state = 'active' and e.types && $2
        )",
    )
    .bind_all((tenant, patterns))
    .fetch_one(db)
    .await
}

pub(crate) async fn delete(db: impl PgExecutor<'_>, endpoint: EndpointId) -> sqlx::Result<bool> {
    let done = sqlx::query("delete from postrider.alerts where endpoint_id = $1")
        .bind(endpoint)
        .execute(db)
        .await?;
    Ok(done.rows_affected() > 0)
}
