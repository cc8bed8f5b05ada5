//! `listeners`: temporary endpoints whose requests a client reads. Their ids start with `lis_`, so that no endpoint
//! operation finds them.

use std::time::Duration;

use chrono::{DateTime, Utc};
use postrider_dispatcher::bind::BindAll;
pub(crate) use postrider_dispatcher::store::transitions::remove_forwarded as remove;
use postrider_proto::{EndpointId, EventId, TenantId, state::SignatureFormat};
use sqlx::{FromRow, PgExecutor};
use uuid::Uuid;

use super::is_public_id;

pub(crate) const PREFIX: &str = "lis";
/// Removed by one sweep; the next one is soon.
const SWEPT_MAX: i64 = 100;

#[derive(Debug, FromRow)]
pub(crate) struct ListenerRow {
    pub(crate) id: EndpointId,
    pub(crate) tenant_id: TenantId,
    pub(crate) signature: SignatureFormat,
}

/// A pending event, and when it was read.
#[derive(Debug, FromRow)]
pub(crate) struct TakenRow {
    pub(crate) id: EventId,
    chosen_id: Option<String>,
    pub(crate) type_name: String,
    pub(crate) body: Vec<u8>,
    pub(crate) now: DateTime<Utc>,
}

impl TakenRow {
    pub(crate) fn public_id(&self) -> String {
        self.chosen_id.clone().unwrap_or_else(|| self.id.generated())
    }
}

pub(crate) async fn insert(
    db: impl PgExecutor<'_>,
    endpoint: EndpointId,
    life: Duration,
) -> sqlx::Result<DateTime<Utc>> {
    sqlx::query_scalar(
        "insert into postrider.listeners (endpoint_id, expires_at)
         values ($1, clock_timestamp() + make_interval(secs => $2)) returning expires_at",
    )
    .bind_all((endpoint, life.as_secs_f64()))
    .fetch_one(db)
    .await
}

pub(crate) async fn find(
    db: impl PgExecutor<'_>,
    tenant: TenantId,
    public_id: &str,
) -> sqlx::Result<Option<ListenerRow>> {
    if !is_public_id(PREFIX, public_id) {
        return Ok(None);
    }
    sqlx::query_as(
        "select e.id, e.tenant_id, e.signature from postrider.listeners l join postrider.endpoints e on e.id = l.endpoint_id
         where e.public_id = $1 and e.tenant_id = $2 and e.state = 'paused' and l.expires_at > clock_timestamp()",
    )
    .bind_all((public_id, tenant))
    .fetch_optional(db)
    .await
}

pub(crate) async fn count(db: impl PgExecutor<'_>, tenant: TenantId) -> sqlx::Result<i64> {
    sqlx::query_scalar(
        "select count(*) from postrider.listeners l join postrider.endpoints e on e.id = l.endpoint_id
         where e.tenant_id = $1 and e.state = 'paused'",
    )
    .bind(tenant)
    .fetch_one(db)
    .await
}

/// The latest reader takes over; the previous one finds out when it renews.
pub(crate) async fn hold(
    db: impl PgExecutor<'_>,
    endpoint: EndpointId,
    holder: Uuid,
    life: Duration,
) -> sqlx::Result<()> {
    sqlx::query(
        "update postrider.listeners set holder = $2, expires_at = clock_timestamp() + make_interval(secs => $3)
         where endpoint_id = $1",
    )
    .bind_all((endpoint, holder, life.as_secs_f64()))
    .execute(db)
    .await?;
    Ok(())
}

/// Whether this reader still holds it, and the tenant is still here.
pub(crate) async fn renew(
    db: impl PgExecutor<'_>,
    endpoint: EndpointId,
    holder: Uuid,
    life: Duration,
) -> sqlx::Result<bool> {
    let done = sqlx::query(
        "update postrider.listeners l set expires_at = clock_timestamp() + make_interval(secs => $3)
         from postrider.endpoints e join postrider.tenants t on t.id = e.tenant_id and t.is_here
         where l.endpoint_id = $1 and l.holder = $2 and e.id = l.endpoint_id and e.state = 'paused'",
    )
    .bind_all((endpoint, holder, life.as_secs_f64()))
    .execute(db)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// The oldest pending events, if this reader holds the listener.
pub(crate) async fn waiting(
    db: impl PgExecutor<'_>,
    endpoint: EndpointId,
    holder: Uuid,
    limit: i64,
) -> sqlx::Result<Vec<TakenRow>> {
    sqlx::query_as(include_str!("sql/listeners_waiting.sql"))
        .bind_all((endpoint, holder, limit))
        .fetch_all(db)
        .await
}

/// The dispatcher drops pending deliveries of a deleted endpoint.
pub(crate) async fn end(db: impl PgExecutor<'_>, endpoint: EndpointId) -> sqlx::Result<()> {
    sqlx::query(
        "with ended as (delete from postrider.listeners where endpoint_id = $1 returning endpoint_id)
         update postrider.endpoints e set state = 'deleted', updated_at = clock_timestamp()
         from ended where e.id = ended.endpoint_id",
    )
    .bind(endpoint)
    .execute(db)
    .await?;
    Ok(())
}

/// Ends listeners that nobody reads any more.
pub(crate) async fn sweep(db: impl PgExecutor<'_>) -> sqlx::Result<u64> {
    let done = sqlx::query(include_str!("sql/listeners_sweep.sql"))
        .bind(SWEPT_MAX)
        .execute(db)
        .await?;
    Ok(done.rows_affected())
}
