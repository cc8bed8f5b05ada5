//! The quotas of `tenants`, and `tenant_usage`.

use postrider_dispatcher::bind::BindAll;
use postrider_proto::TenantId;
use sqlx::{FromRow, PgExecutor};

#[derive(Debug, Clone, FromRow)]
pub(crate) struct QuotaRow {
    pub(crate) emits_per_minute: Option<i32>,
    pub(crate) stored_bytes: Option<i64>,
    /// In the current minute.
    pub(crate) emits_used: i64,
    pub(crate) stored_bytes_used: i64,
    /// What was stored before the quota was set is included.
    pub(crate) is_measured: bool,
}

pub(crate) async fn find(db: impl PgExecutor<'_>, tenant: TenantId) -> sqlx::Result<QuotaRow> {
    sqlx::query_as(
        "select t.emits_per_minute, t.stored_bytes_max as stored_bytes, t.usage_measured as is_measured,
                coalesce(u.emits, 0)::bigint as emits_used, coalesce(u.bytes, 0)::bigint as stored_bytes_used
         from postrider.tenants t
         cross join lateral (
             select sum(u.emits) filter (where u.minute = date_trunc('minute', clock_timestamp())) as emits,
                    sum(u.bytes) as bytes
             from postrider.tenant_usage u where u.tenant_id = t.id and t.usage_since is not null
         ) u
         where t.id = $1",
    )
    .bind(tenant)
    .fetch_one(db)
    .await
}

/// Emits are counted from the first quota on, until there is none. What was counted stays until the hourly duty: producers with
/// an open transaction hold these rows.
pub(crate) async fn put(
    db: impl PgExecutor<'_>,
    tenant: TenantId,
    emits_per_minute: Option<i32>,
    stored_bytes: Option<i64>,
) -> sqlx::Result<()> {
    sqlx::query(
        "update postrider.tenants
         set emits_per_minute = $2, stored_bytes_max = $3,
             usage_since = case when $2::int is not null or $3::bigint is not null
                                then coalesce(usage_since, clock_timestamp()) end,
             usage_measured = usage_measured and ($2::int is not null or $3::bigint is not null)
         where id = $1",
    )
    .bind_all((tenant, emits_per_minute, stored_bytes))
    .execute(db)
    .await?;
    Ok(())
}
