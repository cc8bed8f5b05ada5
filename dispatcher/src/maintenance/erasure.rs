//! Erases everything stored for a deleted tenant, as a durable job. Its endpoints no longer send and its keys no
//! longer work when this begins. The tenant's row, its endpoints' ids and the audit log remain.
//! Invariant: it ends only after every transaction that could still emit for the tenant has ended.

use std::{io::ErrorKind, time::Duration};

use chrono::{DateTime, Utc};
use postrider_proto::{EventId, TenantId};
use sqlx::{AssertSqlSafe, FromRow, PgConnection, PgExecutor, PgPool};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    bind::BindAll,
    db_timeout::WithDbTimeout,
    health::database::warn_unless_outage,
    maintenance::{
        jobs::{self, RequestedJob},
        retention::delete_batch,
    },
    store::transitions::{self, TenantRows},
};

const WAIT: Duration = Duration::from_millis(500);
/// A pass that takes longer is begun again and goes on where it was: its connection may have been cut off silently.
const PASS_MAX: Duration = Duration::from_secs(3_600);
const BATCH: i64 = 2_000;
/// Events counted in the request that deletes the tenant, which has only seconds. The job counts the rest.
const COUNTED_AT_ONCE_MAX: i64 = 10_000;
/// Tables with rows for an endpoint, in an order in which they can be deleted.
const OF_ENDPOINTS: [&str; 11] = [
    "planned_rotations",
    "secrets",
    "endpoint_health",
    "endpoints_to_disable",
    "trials",
    "listeners",
    "alerts",
    "notices",
    "minute_statistics",
    "hour_statistics",
    "endpoint_activity",
];
/// Events counted in one statement of the job.
const COUNTED_MAX: i64 = 100_000;

#[derive(Debug, Clone, FromRow)]
pub struct Erasure {
    pub id: i64,
    pub public_id: String,
    pub slug: String,
    pub total: i64,
    pub done: i64,
    pub asked_by: String,
    pub created_at: DateTime<Utc>,
    pub ended_at: Option<DateTime<Utc>>,
}

/// The process stops or the database is unavailable: another process continues.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Interrupted {
    #[error("stopped before the tenant was erased")]
    Stopped,
    #[error(transparent)]
    Database(#[from] sqlx::Error),
}

/// Runs in the transaction that deletes the tenant.
pub async fn begin(
    connection: &mut PgConnection,
    tenant: TenantId,
    public_id: &str,
    asked_by: &str,
) -> Result<(), sqlx::Error> {
    // Forces the index on the tenant's events, even where the planner has no statistics yet.
    sqlx::query(
        "select set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true)",
    )
    .execute(&mut *connection)
    .await?;
    let counted: i64 = sqlx::query_scalar(
        "select count(*) from (
            select e.id from postrider.events e where e.tenant_id = $1 order by e.id limit $2) e",
    )
    .bind_all((tenant, COUNTED_AT_ONCE_MAX + 1))
    .fetch_one(&mut *connection)
    .await?;
    sqlx::raw_sql("set local enable_seqscan to default; set local enable_bitmapscan to default")
        .execute(&mut *connection)
        .await?;
    let id: i64 = sqlx::query_scalar(
        "insert into postrider.erasures (public_id, tenant_id, slug, total, counted, asked_by)
         select $2, t.id, t.slug, $4::bigint, $4 <= $5, $3 from postrider.tenants t where t.id = $1
         returning id",
    )
    .bind_all((tenant, public_id, asked_by, counted, COUNTED_AT_ONCE_MAX))
    .fetch_one(&mut *connection)
    .await?;
    jobs::push(connection, &RequestedJob::Erase { id }).await
}

pub async fn find(db: impl PgExecutor<'_>, public_id: &str) -> Result<Option<Erasure>, sqlx::Error> {
    sqlx::query_as(
        "select id, public_id, slug, total, done, asked_by, created_at, ended_at
         from postrider.erasures where public_id = $1",
    )
    .bind(public_id)
    .fetch_optional(db)
    .await
}

/// The latest of a tenant.
pub async fn find_of_tenant(
    db: impl PgExecutor<'_>,
    tenant: TenantId,
) -> Result<Option<String>, sqlx::Error> {
    sqlx::query_scalar(
        "select public_id from postrider.erasures where tenant_id = $1 order by id desc limit 1",
    )
    .bind(tenant)
    .fetch_optional(db)
    .await
}

/// Newest first.
pub async fn list(db: impl PgExecutor<'_>, before: i64, limit: i64) -> Result<Vec<Erasure>, sqlx::Error> {
    sqlx::query_as(
        "select id, public_id, slug, total, done, asked_by, created_at, ended_at
         from postrider.erasures where id < $1 order by id desc limit $2",
    )
    .bind_all((before, limit))
    .fetch_all(db)
    .await
}

pub(crate) async fn run(pool: &PgPool, id: i64, stop: &CancellationToken) -> Result<(), Interrupted> {
    loop {
        let passed = tokio::time::timeout(PASS_MAX, pass(pool, id, stop));
        let lost = |_| Err(Interrupted::Database(sqlx::Error::Io(ErrorKind::TimedOut.into())));
        match passed.await.unwrap_or_else(lost) {
            Ok(true) => return Ok(()),
            // Nothing more is removed before the last of those transactions has ended.
            Ok(false) => wait_for_the_last(pool, id, stop).await?,
            Err(Interrupted::Stopped) => return Err(Interrupted::Stopped),
            Err(Interrupted::Database(error)) => {
                warn_unless_outage!(error, erasure = id, "erasing a tenant failed; retrying");
                pause(stop).await?;
            }
        }
    }
}

async fn pause(stop: &CancellationToken) -> Result<(), Interrupted> {
    let paused = stop.run_until_cancelled(tokio::time::sleep(WAIT)).await;
    paused.ok_or(Interrupted::Stopped)
}

fn go_on(stop: &CancellationToken) -> Result<(), Interrupted> {
    match stop.is_cancelled() {
        true => Err(Interrupted::Stopped),
        false => Ok(()),
    }
}

/// Waits until no transaction is left that may have seen the tenant before it was deleted.
async fn wait_for_the_last(pool: &PgPool, id: i64, stop: &CancellationToken) -> Result<(), Interrupted> {
    loop {
        pause(stop).await?;
        match under_way(pool, id).with_db_timeout().await {
            Ok(Some(State { settled: false, .. })) => {}
            Ok(_) => return Ok(()),
            Err(error) => {
                warn_unless_outage!(error, erasure = id, "reading an erasure failed; retrying")
            }
        }
    }
}

#[derive(FromRow)]
struct State {
    tenant_id: TenantId,
    counted: bool,
    settled: bool,
}

async fn under_way(pool: &PgPool, id: i64) -> Result<Option<State>, sqlx::Error> {
    sqlx::query_as(
        "select tenant_id, counted, coalesce(pg_snapshot_xmin(pg_current_snapshot()) >= barrier, false) as settled
         from postrider.erasures where id = $1 and ended_at is null",
    )
    .bind(id)
    .fetch_optional(pool)
    .await
}

/// Sets the barrier once, after the deletion was committed. A barrier in the future was set in another cluster with
/// other transaction ids: after a restore it is set again.
async fn set_barrier(pool: &PgPool, id: i64) -> Result<(), sqlx::Error> {
    sqlx::query(
        "update postrider.erasures set barrier = pg_snapshot_xmax(pg_current_snapshot())
         where id = $1 and ended_at is null
           and (barrier is null or barrier > pg_snapshot_xmax(pg_current_snapshot()))",
    )
    .bind(id)
    .execute(pool)
    .await?;
    Ok(())
}

/// Removes everything that exists. Returns whether nothing more can be added.
async fn pass(pool: &PgPool, id: i64, stop: &CancellationToken) -> Result<bool, Interrupted> {
    set_barrier(pool, id).await?;
    // Queried before anything is removed: later commits are seen by the next pass.
    let Some(State {
        tenant_id: tenant,
        counted,
        settled,
    }) = under_way(pool, id).await?
    else {
        return Ok(true);
    };
    let mut db = pool.acquire().await?;
    if !counted {
        count(&mut db, id, tenant, stop).await?;
    }
    erase_rows(&mut db, tenant, Some(id), stop).await?;
    forget_settings(&mut db, tenant).await?;
    if settled {
        // The table has no index for this, which every request with a key would pay for: it is scanned once.
        sqlx::query("delete from postrider.idempotency where tenant_id = $1")
            .bind(tenant)
            .execute(&mut *db)
            .await?;
        sqlx::query(
            "update postrider.erasures set ended_at = clock_timestamp(), done = greatest(done, total),
                total = greatest(done, total) where id = $1",
        )
        .bind(id)
        .execute(&mut *db)
        .await?;
    }
    Ok(settled)
}

/// Events, deliveries and attempts, and what replays and deduplication know. Batches are counted in the erasure, if there is one.
async fn erase_rows(
    db: &mut PgConnection,
    tenant: TenantId,
    erasure: Option<i64>,
    stop: &CancellationToken,
) -> Result<(), Interrupted> {
    // A producer that commits late may add to these.
    for rows in TenantRows::BY_ENDPOINT {
        erase(db, rows, tenant, stop).await?;
    }
    let (mut after, highest) = (EventId::LOWEST, EventId(Uuid::max()));
    while let Some(batch) = delete_batch(db, tenant, after, highest).await? {
        after = batch.last;
        if let Some(id) = erasure {
            sqlx::query("update postrider.erasures set done = done + $2 where id = $1")
                .bind_all((id, batch.deleted as i64))
                .execute(&mut *db)
                .await?;
        }
        go_on(stop)?;
    }
    // Before the archived events, which they are found by.
    erase(db, TenantRows::ArchivedAttempts, tenant, stop).await?;
    for table in ["event_ids", "ordering_keys", "archived_events", "replays"] {
        erase_table(db, table, tenant, stop).await?;
    }
    Ok(())
}

/// Removes a tenant that lives in another cell now, down to its row. Nothing can be added here any more.
pub(crate) async fn erase_moved(
    db: &mut PgConnection,
    tenant: TenantId,
    stop: &CancellationToken,
) -> Result<(), Interrupted> {
    // Dispatchers forget deleted endpoints; they would keep those whose rows just disappear.
    sqlx::query(
        "update postrider.endpoints set state = 'deleted' where tenant_id = $1 and state <> 'deleted'",
    )
    .bind(tenant)
    .execute(&mut *db)
    .await?;
    erase_rows(db, tenant, None, stop).await?;
    for table in OF_ENDPOINTS {
        delete_of_endpoints(db, table, tenant).await?;
    }
    for table in ["endpoints", "tenant_usage", "idempotency"] {
        erase_table(db, table, tenant, stop).await?;
    }
    Ok(())
}

/// Counts all of a large tenant's events in batches.
async fn count(
    db: &mut PgConnection,
    id: i64,
    tenant: TenantId,
    stop: &CancellationToken,
) -> Result<(), Interrupted> {
    let (mut after, mut total) = (EventId::LOWEST, 0);
    loop {
        let (count, last): (i64, Option<EventId>) = sqlx::query_as(
            "select count(*), max(e.id::text)::uuid from (
                select e.id from postrider.events e
                where e.tenant_id = $1 and e.id > $2 order by e.id limit $3) e",
        )
        .bind_all((tenant, after, COUNTED_MAX))
        .fetch_one(&mut *db)
        .await?;
        total += count;
        let Some(last) = last else { break };
        after = last;
        go_on(stop)?;
    }
    sqlx::query("update postrider.erasures set total = done + $2, counted = true where id = $1")
        .bind_all((id, total))
        .execute(&mut *db)
        .await?;
    Ok(())
}

async fn erase(
    db: &mut PgConnection,
    rows: TenantRows,
    tenant: TenantId,
    stop: &CancellationToken,
) -> Result<(), Interrupted> {
    while transitions::erase_tenant(&mut *db, rows, tenant).await? > 0 {
        go_on(stop)?;
    }
    Ok(())
}

async fn erase_table(
    db: &mut PgConnection,
    table: &'static str,
    tenant: TenantId,
    stop: &CancellationToken,
) -> Result<(), Interrupted> {
    let delete = format!(
        "delete from postrider.{table} where ctid = any (array(
            select ctid from postrider.{table} where tenant_id = $1 limit $2))"
    );
    loop {
        let delete = sqlx::query(AssertSqlSafe(delete.as_str())).bind_all((tenant, BATCH));
        if delete.execute(&mut *db).await?.rows_affected() == 0 {
            return Ok(());
        }
        go_on(stop)?;
    }
}

async fn delete_of_endpoints(
    db: &mut PgConnection,
    table: &'static str,
    tenant: TenantId,
) -> Result<(), sqlx::Error> {
    let delete = format!(
        "delete from postrider.{table} where endpoint_id in (select id from postrider.endpoints where tenant_id = $1)"
    );
    sqlx::query(AssertSqlSafe(delete))
        .bind(tenant)
        .execute(db)
        .await?;
    Ok(())
}

/// The endpoints' ids remain, so that no late row can be attributed to another endpoint; their settings are erased.
async fn forget_settings(db: &mut PgConnection, tenant: TenantId) -> Result<(), sqlx::Error> {
    for table in OF_ENDPOINTS {
        delete_of_endpoints(db, table, tenant).await?;
    }
    for statement in [
        "delete from postrider.portal_links where tenant_id = $1",
        "delete from postrider.sessions where tenant_id = $1",
        "delete from postrider.api_keys where tenant_id = $1",
        "update postrider.endpoints set url = 'https://erased.invalid/', description = null, types = '{erased}',
            versions = null, filter = null, headers = null, tls = null
         where tenant_id = $1 and url <> 'https://erased.invalid/'",
        "update postrider.tenants set name = null where id = $1 and name is not null",
    ] {
        sqlx::query(statement).bind(tenant).execute(&mut *db).await?;
    }
    Ok(())
}
