//! What tenants with a quota have stored. Emits count themselves; this measures what was stored before the quota was set,
//! forgets days that are past their retention, and combines the rows that concurrent emits have left.

use std::time::Duration;

use postrider_proto::TenantId;
use sqlx::{PgConnection, PgPool};

/// The row that holds what was combined.
const TOTAL: &str = "00000000-0000-0000-0000-000000000000";
const SECONDS_PER_DAY: u64 = 24 * 60 * 60;

/// A duty: for all tenants with a quota.
pub async fn run(pool: &PgPool, retention: Duration) -> Result<(), sqlx::Error> {
    let mut connection = pool.acquire().await?;
    let unmeasured: Vec<TenantId> = sqlx::query_scalar(
        "select id from postrider.tenants where usage_since is not null and not usage_measured and deleted_at is null",
    )
    .fetch_all(&mut *connection)
    .await?;
    for tenant in unmeasured {
        measure(&mut connection, tenant).await?;
    }
    combine(&mut connection).await?;
    forget(&mut connection, retention).await
}

/// Adds what a tenant has stored and emits did not count. Rows of an earlier quota may still be there, and open transactions
/// may hold them: a new row corrects the sum, so that nobody waits.
pub async fn measure(connection: &mut PgConnection, tenant: TenantId) -> Result<(), sqlx::Error> {
    sqlx::query(
        "with marked as (
             update postrider.tenants set usage_measured = true
             where id = $1 and usage_since is not null and not usage_measured
             returning id
         ), known as (
             select (postrider.uuid_time(e.id) at time zone 'UTC')::date as day,
                    octet_length(e.body) + coalesce(octet_length(e.full_data), 0)::bigint as bytes
             from postrider.events e where e.tenant_id = $1
             union all
             select u.day, -u.bytes from postrider.tenant_usage u where u.tenant_id = $1
         )
         insert into postrider.tenant_usage (tenant_id, day, bytes)
         select m.id, k.day, sum(k.bytes)::bigint from marked m cross join known k
         group by m.id, k.day having sum(k.bytes) <> 0",
    )
    .bind(tenant)
    .execute(connection)
    .await?;
    Ok(())
}

/// Nobody adds to the rows of the day before yesterday any more.
async fn combine(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::query(
        "with past as (
             delete from postrider.tenant_usage u
             where u.slot <> $1::uuid and u.day < (clock_timestamp() at time zone 'UTC')::date - 1
             returning u.tenant_id, u.day, u.bytes
         )
         insert into postrider.tenant_usage as u (tenant_id, day, slot, bytes)
         select p.tenant_id, p.day, $1::uuid, sum(p.bytes)::bigint from past p group by p.tenant_id, p.day
         on conflict (tenant_id, day, slot) do update set bytes = u.bytes + excluded.bytes",
    )
    .bind(TOTAL)
    .execute(connection)
    .await?;
    Ok(())
}

/// Rows that an open transaction holds are left for the next time.
async fn forget(connection: &mut PgConnection, retention: Duration) -> Result<(), sqlx::Error> {
    let days = i32::try_from(retention.as_secs().div_ceil(SECONDS_PER_DAY)).unwrap_or(i32::MAX);
    sqlx::query(
        "with gone as (
             select u.tenant_id, u.day, u.slot
             from postrider.tenant_usage u join postrider.tenants t on t.id = u.tenant_id
             where t.usage_since is null or t.deleted_at is not null
                or u.day < (clock_timestamp() at time zone 'UTC')::date - least(coalesce(t.retention_days, $1), $1)
             for update of u skip locked
         )
         delete from postrider.tenant_usage u using gone g
         where u.tenant_id = g.tenant_id and u.day = g.day and u.slot = g.slot",
    )
    .bind(days)
    .execute(connection)
    .await?;
    Ok(())
}
