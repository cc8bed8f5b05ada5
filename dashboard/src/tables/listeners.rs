//! `listeners`: temporary endpoints whose requests a client reads. Their ids start with `lis_`, so that no endpoint
//! operation finds them.

use std::time::Duration;

use chrono::{DateTime, Utc};
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
) -> Result<DateTime<Utc>, sqlx::Error> {
    sqlx::query_scalar(
        "insert into postrider.listeners (endpoint_id, expires_at)
         values ($1, clock_timestamp() + make_interval(secs => $2)) returning expires_at",
    )
    .bind(endpoint)
    .bind(life.as_secs_f64())
    .fetch_one(db)
    .await
}

pub(crate) async fn find(
    db: impl PgExecutor<'_>,
    tenant: TenantId,
    public_id: &str,
) -> Result<Option<ListenerRow>, sqlx::Error> {
    if !is_public_id(PREFIX, public_id) {
        return Ok(None);
    }
    sqlx::query_as(
        "select e.id, e.tenant_id, e.signature from postrider.listeners l join postrider.endpoints e on e.id = l.endpoint_id
         where e.public_id = $1 and e.tenant_id = $2 and e.state = 'paused' and l.expires_at > clock_timestamp()",
    )
    .bind(public_id)
    .bind(tenant)
    .fetch_optional(db)
    .await
}

pub(crate) async fn count(db: impl PgExecutor<'_>, tenant: TenantId) -> Result<i64, sqlx::Error> {
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
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "update postrider.listeners set holder = $2, expires_at = clock_timestamp() + make_interval(secs => $3)
         where endpoint_id = $1",
    )
    .bind(endpoint)
    .bind(holder)
    .bind(life.as_secs_f64())
    .execute(db)
    .await?;
    Ok(())
}

/// Whether this reader still holds it.
pub(crate) async fn renew(
    db: impl PgExecutor<'_>,
    endpoint: EndpointId,
    holder: Uuid,
    life: Duration,
) -> Result<bool, sqlx::Error> {
    let done = sqlx::query(
        "update postrider.listeners l set expires_at = clock_timestamp() + make_interval(secs => $3)
         from postrider.endpoints e
         where l.endpoint_id = $1 and l.holder = $2 and e.id = l.endpoint_id and e.state = 'paused'",
    )
    .bind(endpoint)
    .bind(holder)
    .bind(life.as_secs_f64())
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
) -> Result<Vec<TakenRow>, sqlx::Error> {
    sqlx::query_as(
        "select e.id, e.chosen_id, y.name as type_name, e.body, clock_timestamp() as now
         from (
            select q.event_id from postrider.queue q
            where q.endpoint_id = $1 and exists (select from postrider.listeners where endpoint_id = $1 and holder = $2)
            order by q.event_id limit $3
         ) q
         join postrider.events e on e.id = q.event_id join postrider.event_types y on y.id = e.type_id
         order by e.id",
    )
    .bind(endpoint)
    .bind(holder)
    .bind(limit)
    .fetch_all(db)
    .await
}

/// The dispatcher drops pending deliveries of a deleted endpoint.
pub(crate) async fn end(db: impl PgExecutor<'_>, endpoint: EndpointId) -> Result<(), sqlx::Error> {
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
pub(crate) async fn sweep(db: impl PgExecutor<'_>) -> Result<u64, sqlx::Error> {
    let done = sqlx::query(
        "with old as (
            select endpoint_id from postrider.listeners where expires_at < clock_timestamp()
            order by expires_at limit $1 for update skip locked
         ), ended as (
            delete from postrider.listeners l using old where l.endpoint_id = old.endpoint_id returning l.endpoint_id
         )
         update postrider.endpoints e set state = 'deleted', updated_at = clock_timestamp()
         from ended where e.id = ended.endpoint_id",
    )
    .bind(SWEPT_MAX)
    .execute(db)
    .await?;
    Ok(done.rows_affected())
}
