//! `api_keys`: key hashes and roles. The key itself is not stored.

use chrono::{DateTime, Utc};
use postrider_dispatcher::bind::BindAll;
use postrider_proto::{TenantId, state::KeyRole};
use sqlx::{FromRow, PgExecutor};

use super::is_public_id;

#[derive(Debug, Clone, FromRow)]
pub(crate) struct KeyRow {
    pub(crate) id: i32,
    pub(crate) public_id: String,
    pub(crate) role: KeyRole,
    pub(crate) tenant_id: Option<TenantId>,
    pub(crate) tenant: Option<String>,
    pub(crate) name: String,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) revoked_at: Option<DateTime<Utc>>,
    pub(crate) prefix: String,
    pub(crate) expires_at: Option<DateTime<Utc>>,
    pub(crate) is_expired: bool,
    /// At most a minute older than the last use.
    pub(crate) last_used_at: Option<DateTime<Utc>>,
}

/// A key to store.
pub(crate) struct NewKey<'a> {
    pub(crate) public_id: &'a str,
    pub(crate) hash: &'a [u8; 32],
    pub(crate) prefix: &'a str,
    pub(crate) role: KeyRole,
    pub(crate) tenant: Option<TenantId>,
    pub(crate) name: &'a str,
    pub(crate) expires_at: Option<DateTime<Utc>>,
}

/// An active key.
pub(crate) async fn find_by_hash(db: impl PgExecutor<'_>, hash: &[u8; 32]) -> sqlx::Result<Option<KeyRow>> {
    sqlx::query_as(
        "select k.id, k.public_id, k.role, k.tenant_id, null as tenant, k.name, k.created_at, k.revoked_at,
                k.prefix, k.expires_at, k.last_used_at,
                coalesce(k.expires_at <= clock_timestamp(), false) as is_expired
         from postrider.api_keys k where k.hash = $1 and k.revoked_at is null
           and (k.expires_at is null or k.expires_at > clock_timestamp())",
    )
    .bind(hash.as_slice())
    .fetch_optional(db)
    .await
}

pub(crate) async fn insert(db: impl PgExecutor<'_>, new: NewKey<'_>) -> sqlx::Result<DateTime<Utc>> {
    sqlx::query_scalar(
        "insert into postrider.api_keys (public_id, hash, role, tenant_id, name, prefix, expires_at)
         values ($1, $2, $3::postrider.key_role, $4, $5, $6, $7) returning created_at",
    )
    .bind_all((new.public_id, new.hash.as_slice(), new.role, new.tenant))
    .bind_all((new.name, new.prefix, new.expires_at))
    .fetch_one(db)
    .await
}

/// Written by several processes, so a newer time stays.
pub(crate) async fn note_use(db: impl PgExecutor<'_>, id: i32, seconds: f64) -> sqlx::Result<()> {
    sqlx::query(
        "update postrider.api_keys set last_used_at = clock_timestamp()
         where id = $1
           and (last_used_at is null or last_used_at < clock_timestamp() - make_interval(secs => $2))",
    )
    .bind_all((id, seconds))
    .execute(db)
    .await?;
    Ok(())
}

pub(crate) async fn list(db: impl PgExecutor<'_>, after: i32, limit: i64) -> sqlx::Result<Vec<KeyRow>> {
    sqlx::query_as(
        "select k.id, k.public_id, k.role, k.tenant_id, t.slug as tenant, k.name, k.created_at, k.revoked_at,
                k.prefix, k.expires_at, k.last_used_at,
                coalesce(k.expires_at <= clock_timestamp(), false) as is_expired
         from postrider.api_keys k left join postrider.tenants t on t.id = k.tenant_id
         where k.id > $1 order by k.id limit $2",
    )
    .bind_all((after, limit))
    .fetch_all(db)
    .await
}

/// Active keys, newest first.
pub(crate) async fn list_of_tenant(
    db: impl PgExecutor<'_>,
    tenant: TenantId,
    limit: i64,
) -> sqlx::Result<Vec<KeyRow>> {
    sqlx::query_as(
        "select k.id, k.public_id, k.role, k.tenant_id, t.slug as tenant, k.name, k.created_at, k.revoked_at,
                k.prefix, k.expires_at, k.last_used_at,
                coalesce(k.expires_at <= clock_timestamp(), false) as is_expired
         from postrider.api_keys k join postrider.tenants t on t.id = k.tenant_id
         where k.tenant_id = $1 and k.revoked_at is null order by k.id desc limit $2",
    )
    .bind_all((tenant, limit))
    .fetch_all(db)
    .await
}

/// Newest first, active keys before revoked ones.
pub(crate) async fn list_newest(db: impl PgExecutor<'_>, limit: i64) -> sqlx::Result<Vec<KeyRow>> {
    sqlx::query_as(
        "select k.id, k.public_id, k.role, k.tenant_id, t.slug as tenant, k.name, k.created_at, k.revoked_at,
                k.prefix, k.expires_at, k.last_used_at,
                coalesce(k.expires_at <= clock_timestamp(), false) as is_expired
         from postrider.api_keys k left join postrider.tenants t on t.id = k.tenant_id
         order by k.revoked_at is not null, k.id desc limit $1",
    )
    .bind(limit)
    .fetch_all(db)
    .await
}

pub(crate) async fn revoke(db: impl PgExecutor<'_>, public_id: &str) -> sqlx::Result<bool> {
    if !is_public_id("key", public_id) {
        return Ok(false);
    }
    let done = sqlx::query(
        "update postrider.api_keys set revoked_at = clock_timestamp() where public_id = $1 and revoked_at is null",
    )
    .bind(public_id)
    .execute(db)
    .await?;
    Ok(done.rows_affected() > 0)
}

pub(crate) async fn revoke_all(db: impl PgExecutor<'_>, tenant: TenantId) -> sqlx::Result<()> {
    sqlx::query(
        "update postrider.api_keys set revoked_at = clock_timestamp() where tenant_id = $1 and revoked_at is null",
    )
    .bind(tenant)
    .execute(db)
    .await?;
    Ok(())
}
