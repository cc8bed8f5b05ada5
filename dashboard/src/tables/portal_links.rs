//! `portal_links`: hashes of unused links. Redeeming one deletes its row.

use chrono::{DateTime, Utc};
use postrider_dispatcher::bind::BindAll;
use postrider_proto::TenantId;
use sqlx::{FromRow, PgExecutor};

#[derive(Debug, FromRow)]
pub(crate) struct LinkedTenant {
    pub(crate) id: TenantId,
    pub(crate) slug: String,
}

/// Returns when it expires.
pub(crate) async fn insert(
    db: impl PgExecutor<'_>,
    token_hash: &[u8; 32],
    tenant: TenantId,
    minutes: i32,
) -> sqlx::Result<DateTime<Utc>> {
    sqlx::query_scalar(
        "insert into postrider.portal_links (token_hash, tenant_id, expires_at)
         values ($1, $2, clock_timestamp() + make_interval(mins => $3)) returning expires_at",
    )
    .bind_all((token_hash.as_slice(), tenant, minutes))
    .fetch_one(db)
    .await
}

/// The delete is the guard: of two concurrent requests with the same link, one succeeds.
pub(crate) async fn take(
    db: impl PgExecutor<'_>,
    token_hash: &[u8; 32],
) -> sqlx::Result<Option<LinkedTenant>> {
    sqlx::query_as(
        "delete from postrider.portal_links l using postrider.tenants t
         where l.token_hash = $1 and l.expires_at > clock_timestamp()
           and t.id = l.tenant_id and t.deleted_at is null
         returning t.id, t.slug",
    )
    .bind(token_hash.as_slice())
    .fetch_optional(db)
    .await
}

pub(crate) async fn delete_expired(db: impl PgExecutor<'_>) -> sqlx::Result<()> {
    sqlx::query("delete from postrider.portal_links where expires_at <= clock_timestamp()")
        .execute(db)
        .await?;
    Ok(())
}

pub(crate) async fn delete_of_tenant(db: impl PgExecutor<'_>, tenant: TenantId) -> sqlx::Result<()> {
    sqlx::query("delete from postrider.portal_links where tenant_id = $1")
        .bind(tenant)
        .execute(db)
        .await?;
    Ok(())
}
