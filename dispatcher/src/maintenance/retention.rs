//! Retention: drops expired data, whole partitions at a time. A duty of `jobs`.
//!
//! Invariant: an event is dropped only when no delivery of it is pending and no dead letter of it is kept. One that
//! outlives its partition is moved to `archived_events`, where an attempt's body read looks second.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use postrider_proto::{EventId, TenantId};
use sqlx::{AssertSqlSafe, PgConnection, PgPool};

use crate::{
    bind::BindAll,
    maintenance::partitions::{self, Partition, TABLES},
    store::transitions,
};

/// Rows per statement, so that none takes long.
const BATCH: i64 = 2_000;
/// Statements per run and kind; the rest waits for the next run.
const BATCHES_MAX: usize = 2_000;
/// Added to the retention, so that readers within it never find anything half deleted.
const MARGIN: TimeDelta = TimeDelta::seconds(10);
/// Keys of deleted tenants in one run.
const KEYS_MAX: i64 = 100_000;
/// How long finished jobs can be looked up.
const JOBS_KEPT_DAYS: i32 = 7;

/// Counts for the log and for tests.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    pub partitions_dropped: u64,
    pub dead_letters_expired: u64,
    pub events_archived: u64,
    pub events_released: u64,
    pub events_deleted: u64,
}

/// A time range of events, and their tenant.
#[derive(Clone, Copy)]
struct Span {
    from: EventId,
    below: EventId,
    tenant: Option<TenantId>,
}

impl Span {
    fn of(partition: &Partition) -> Self {
        Self {
            from: EventId::first_of(partition.slice.begin().timestamp_millis()),
            below: EventId::first_of(partition.slice.end().timestamp_millis()),
            tenant: None,
        }
    }

    /// Of a tenant, up to shortly before a time.
    fn before(time: DateTime<Utc>, tenant: TenantId) -> Self {
        Self {
            from: EventId::LOWEST,
            below: EventId::first_of((time - MARGIN).timestamp_millis()),
            tenant: Some(tenant),
        }
    }

    /// From the first to the last of these events.
    fn around(ids: &[EventId], tenant: Option<TenantId>) -> Option<Self> {
        let (from, last) = (*ids.first()?, ids.last()?);
        let below = EventId(uuid::Uuid::from_u128(last.0.as_u128() + 1));
        Some(Self { from, below, tenant })
    }
}

/// Does everything due by the database's clock. If several run at once, one does the work.
pub async fn run(pool: &PgPool, retention: Duration) -> Result<Done, sqlx::Error> {
    // A dedicated connection: a partition can't be detached concurrently within a transaction, and the lock belongs
    // to the session.
    let mut connection = pool.acquire().await?.detach();
    sqlx::raw_sql(
        "set lock_timeout = '1s'; set enable_seqscan = off; set enable_hashjoin = off; set enable_mergejoin = off",
    )
    .execute(&mut connection)
    .await?;
    let alone: bool = sqlx::query_scalar("select pg_try_advisory_lock(hashtext('postrider.retention'))")
        .fetch_one(&mut connection)
        .await?;
    let mut done = Done::default();
    let result = if alone {
        forget(&mut connection, retention, &mut done).await
    } else {
        Ok(())
    };
    // The lock is released with the session.
    let closed = sqlx::Connection::close(connection).await;
    result.and(closed).map(|()| done)
}

async fn forget(db: &mut PgConnection, retention: Duration, done: &mut Done) -> Result<(), sqlx::Error> {
    let now: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()")
        .fetch_one(&mut *db)
        .await?;
    let cutoff = now - TimeDelta::from_std(retention).unwrap_or(TimeDelta::days(30));
    finish_interrupted(db).await?;
    drop_old(db, cutoff, done).await?;
    forget_in_nets(db, cutoff, done).await?;
    forget_short(db, now, cutoff, done).await?;
    release(db, cutoff, done).await?;
    forget_relayed(db, cutoff).await?;
    forget_finished(db, cutoff).await
}

async fn drop_old(db: &mut PgConnection, cutoff: DateTime<Utc>, done: &mut Done) -> Result<(), sqlx::Error> {
    let is_old = |partition: &Partition| partition.slice.end() + MARGIN <= cutoff;
    let attempts = partitions::attached(db, "attempts").await?;
    for events in partitions::attached(db, "events").await? {
        if !is_old(&events) {
            continue;
        }
        let span = Span::of(&events);
        done.dead_letters_expired += expire(db, span, cutoff).await?;
        done.events_archived += archive(db, span, "postrider.events").await?;
        forget_ids(db, span).await?;
        // Attempts first: from then on nothing of this time can be replayed but dead letters, whose events are
        // archived.
        for partition in attempts.iter().filter(|one| one.slice == events.slice) {
            detach_and_drop(db, partition).await?;
            done.partitions_dropped += 1;
        }
        done.events_archived += archive(db, span, "postrider.events").await?;
        detach_and_drop(db, &events).await?;
        done.partitions_dropped += 1;
    }
    // Partitions whose width differs from that of the events.
    for partition in partitions::attached(db, "attempts").await? {
        if is_old(&partition) {
            detach_and_drop(db, &partition).await?;
            done.partitions_dropped += 1;
        }
    }
    Ok(())
}

/// Blocks nobody: emits and attempts continue, and it waits for open transactions for a second at most. Otherwise it
/// is completed next time.
async fn detach_and_drop(db: &mut PgConnection, partition: &Partition) -> Result<(), sqlx::Error> {
    let (table, name) = (partition.table, partition.name());
    let word = if partition.pending {
        "finalize"
    } else {
        "concurrently"
    };
    let detach = format!("alter table postrider.{table} detach partition {name} {word}");
    partitions::execute(db, detach).await?;
    drop_table(db, partition).await
}

async fn drop_table(db: &mut PgConnection, partition: &Partition) -> Result<(), sqlx::Error> {
    let name = partition.name();
    partitions::execute(db, format!("drop table {name}")).await?;
    tracing::info!(partition = name, "dropped an expired partition");
    Ok(())
}

async fn finish_interrupted(db: &mut PgConnection) -> Result<(), sqlx::Error> {
    for table in TABLES {
        for partition in partitions::attached(db, table).await? {
            if partition.pending {
                if table == "events" {
                    // Its table no longer shows it.
                    archive(db, Span::of(&partition), &partition.name()).await?;
                }
                detach_and_drop(db, &partition).await?;
            }
        }
        for partition in partitions::detached(db, table).await? {
            drop_table(db, &partition).await?;
        }
    }
    Ok(())
}

/// Archives events of a table that deliveries still need.
async fn archive(db: &mut PgConnection, span: Span, table: &str) -> Result<u64, sqlx::Error> {
    const COLUMNS: &str =
        "id, tenant_id, type_id, schema_id, chosen_id, ordering_key, sequence, body, full_data";
    let copy = format!(
        "insert into postrider.archived_events ({COLUMNS})
         select {COLUMNS} from unnest($1::uuid[], $2::int[]) u (id, tenant_id) join {table} e using (tenant_id, id)
         on conflict do nothing"
    );
    let (mut after, mut archived) = (span.from.pred(), 0);
    loop {
        let (ids, tenants): (Vec<EventId>, Vec<TenantId>) =
            needed(db, span, after).await?.into_iter().unzip();
        let Some(last) = ids.last().copied() else {
            return Ok(archived);
        };
        after = last;
        let copied = sqlx::query(AssertSqlSafe(copy.as_str())).bind_all((ids, tenants));
        archived += copied.execute(&mut *db).await?.rows_affected();
    }
}

/// The lowest events after `after` that are pending or dead letters, each once. Deleted endpoints need none.
async fn needed(
    db: &mut PgConnection,
    span: Span,
    after: EventId,
) -> Result<Vec<(EventId, TenantId)>, sqlx::Error> {
    sqlx::query_as(include_str!("sql/needed_events.sql"))
        .bind_all((after, span.below, BATCH, span.tenant))
        .fetch_all(db)
        .await
}

/// Which of these events, all those of the span in ascending order, nothing needs.
async fn unneeded(
    db: &mut PgConnection,
    span: Span,
    mut ids: Vec<EventId>,
) -> Result<Vec<EventId>, sqlx::Error> {
    let needed = needed(db, span, span.from.pred()).await?;
    // A query returns a bounded number of needed events: beyond the last one nothing is known.
    if needed.len() as i64 >= BATCH {
        let known = needed.last().map(|(id, _)| *id);
        ids.retain(|id| Some(*id) <= known);
    }
    ids.retain(|id| needed.binary_search_by_key(id, |(id, _)| *id).is_err());
    Ok(ids)
}

/// Dead letters that died before the cutoff, and those of deleted endpoints.
async fn expire(db: &mut PgConnection, span: Span, cutoff: DateTime<Utc>) -> Result<u64, sqlx::Error> {
    let mut expired = 0;
    for _ in 0..BATCHES_MAX {
        let batch =
            transitions::expire_dead_letters(&mut *db, span.tenant, span.from, span.below, cutoff).await?;
        if batch == 0 {
            break;
        }
        expired += batch;
    }
    Ok(expired)
}

/// Producer-chosen ids of events that are dropped and not archived: from then on the same id is a new event.
async fn forget_ids(db: &mut PgConnection, span: Span) -> Result<(), sqlx::Error> {
    for _ in 0..BATCHES_MAX {
        let gone = sqlx::query(
            "delete from postrider.event_ids where ctid = any (array(
                select i.ctid from postrider.event_ids i
                where i.event_id >= $1 and i.event_id < $2
                  and not exists (select from postrider.archived_events h where h.id = i.event_id)
                limit $3))",
        )
        .bind_all((span.from, span.below, BATCH))
        .execute(&mut *db)
        .await?;
        if gone.rows_affected() == 0 {
            break;
        }
    }
    Ok(())
}

/// A net that is in use covers more time than is kept: old events are deleted row by row.
async fn forget_in_nets(
    db: &mut PgConnection,
    cutoff: DateTime<Utc>,
    done: &mut Done,
) -> Result<(), sqlx::Error> {
    let attached = partitions::attached(db, "events").await?;
    let holds_old = |partition: &Partition| partition.slice.is_net() && partition.slice.begin() < cutoff;
    if !attached.iter().any(holds_old) {
        return Ok(());
    }
    let tenants: Vec<TenantId> =
        sqlx::query_scalar("select id from postrider.tenants where deleted_at is null order by id")
            .fetch_all(&mut *db)
            .await?;
    for tenant in tenants {
        let span = Span::before(cutoff, tenant);
        done.dead_letters_expired += expire(db, span, cutoff).await?;
        done.events_deleted += delete_events(db, span, tenant).await?;
    }
    Ok(())
}

/// Tenants with a shorter retention than the platform: their rows are deleted in batches.
async fn forget_short(
    db: &mut PgConnection,
    now: DateTime<Utc>,
    cutoff: DateTime<Utc>,
    done: &mut Done,
) -> Result<(), sqlx::Error> {
    let tenants: Vec<(TenantId, i16)> = sqlx::query_as(
        "select id, retention_days from postrider.tenants
         where retention_days is not null and deleted_at is null order by id",
    )
    .fetch_all(&mut *db)
    .await?;
    for (tenant, days) in tenants {
        let own = now - TimeDelta::days(i64::from(days));
        if own <= cutoff {
            continue;
        }
        let span = Span::before(own, tenant);
        done.dead_letters_expired += expire(db, span, own).await?;
        done.events_deleted += delete_events(db, span, tenant).await?;
    }
    Ok(())
}

async fn delete_events(db: &mut PgConnection, span: Span, tenant: TenantId) -> Result<u64, sqlx::Error> {
    let (mut after, mut deleted) = (span.from, 0);
    for _ in 0..BATCHES_MAX {
        let Some(batch) = delete_batch(db, tenant, after, span.below).await? else {
            break;
        };
        after = batch.last;
        deleted += batch.deleted;
    }
    Ok(deleted)
}

/// What one statement deleted, and the last event it examined.
pub(crate) struct Batch {
    pub(crate) last: EventId,
    pub(crate) deleted: u64,
}

/// A few events of a tenant with their attempts and ids, except those still needed. `None` when there are no more.
pub(crate) async fn delete_batch(
    db: &mut PgConnection,
    tenant: TenantId,
    after: EventId,
    below: EventId,
) -> Result<Option<Batch>, sqlx::Error> {
    let found: Vec<(EventId, Option<String>)> = sqlx::query_as(
        "select id, chosen_id from postrider.events
         where tenant_id = $1 and id > $2 and id < $3 order by id limit $4",
    )
    .bind_all((tenant, after, below, BATCH))
    .fetch_all(&mut *db)
    .await?;
    let ids: Vec<EventId> = found.iter().map(|(id, _)| *id).collect();
    let (Some(span), Some(last)) = (Span::around(&ids, Some(tenant)), ids.last().copied()) else {
        return Ok(None);
    };
    let ids = unneeded(db, span, ids).await?;
    let gone = found.iter().filter(|(id, _)| ids.binary_search(id).is_ok());
    let chosen: Vec<&str> = gone.filter_map(|(_, chosen)| chosen.as_deref()).collect();
    let mut tx = sqlx::Connection::begin(&mut *db).await?;
    sqlx::query("delete from postrider.event_ids where tenant_id = $1 and id = any($2)")
        .bind_all((tenant, chosen))
        .execute(&mut *tx)
        .await?;
    transitions::delete_attempts(&mut *tx, &ids).await?;
    sqlx::query("delete from postrider.traces t using unnest($1::uuid[]) u (id) where t.event_id = u.id")
        .bind(&ids)
        .execute(&mut *tx)
        .await?;
    sqlx::query(
        "delete from postrider.events e using unnest($2::uuid[]) u (id) where e.tenant_id = $1 and e.id = u.id",
    )
    .bind_all((tenant, &ids))
    .execute(&mut *tx)
    .await?;
    tx.commit().await?;
    Ok(Some(Batch {
        last,
        deleted: ids.len() as u64,
    }))
}

/// Archived events that are no longer needed.
async fn release(db: &mut PgConnection, cutoff: DateTime<Utc>, done: &mut Done) -> Result<(), sqlx::Error> {
    let mut after = EventId::LOWEST;
    for _ in 0..BATCHES_MAX {
        let ids: Vec<EventId> =
            sqlx::query_scalar("select id from postrider.archived_events where id > $1 order by id limit $2")
                .bind_all((after, BATCH))
                .fetch_all(&mut *db)
                .await?;
        let (Some(span), Some(last)) = (Span::around(&ids, None), ids.last().copied()) else {
            break;
        };
        done.dead_letters_expired += expire(db, span, cutoff).await?;
        let gone = unneeded(db, span, ids).await?;
        after = last;
        done.events_released += gone.len() as u64;
        sqlx::query(
            "delete from postrider.event_ids i using postrider.archived_events h
             where h.id = any($1) and i.tenant_id = h.tenant_id and i.id = h.chosen_id and i.event_id = h.id",
        )
        .bind(&gone)
        .execute(&mut *db)
        .await?;
        transitions::delete_archived_attempts(&mut *db, &gone).await?;
        sqlx::query("delete from postrider.archived_events where id = any($1)")
            .bind(&gone)
            .execute(&mut *db)
            .await?;
    }
    Ok(())
}

/// Replays and jobs that ended long ago, in whatever state.
async fn forget_finished(db: &mut PgConnection, cutoff: DateTime<Utc>) -> Result<(), sqlx::Error> {
    sqlx::query("delete from postrider.replays where ended_at < $1")
        .bind(cutoff)
        .execute(&mut *db)
        .await?;
    sqlx::query(
        "delete from apalis.jobs
         where (status in ('Done', 'Killed') or status = 'Failed' and attempts >= max_attempts)
           and coalesce(done_at, lock_at, run_at) < now() - make_interval(days => $1)",
    )
    .bind(JOBS_KEPT_DAYS)
    .execute(&mut *db)
    .await?;
    Ok(())
}

/// What is left at home of events for other cells: those that were refused, quotas that were used, and the keys of deleted tenants.
/// A producer with an open transaction may hold a key.
async fn forget_relayed(db: &mut PgConnection, cutoff: DateTime<Utc>) -> Result<(), sqlx::Error> {
    sqlx::query(
        "delete from postrider.cell_outbox_refused r
         where r.refused_at < $1
            or exists (select from postrider.tenants t where t.id = r.tenant_id and t.deleted_at is not null)",
    )
    .bind(cutoff)
    .execute(&mut *db)
    .await?;
    sqlx::query("delete from postrider.cell_quotas_used where until < clock_timestamp() - interval '1 hour'")
        .execute(&mut *db)
        .await?;
    sqlx::query(
        "delete from postrider.cell_outbox_keys where ctid = any (array(
             select k.ctid from postrider.cell_outbox_keys k join postrider.tenants t on t.id = k.tenant_id
             where t.deleted_at is not null limit $1 for update of k skip locked))",
    )
    .bind(KEYS_MAX)
    .execute(db)
    .await?;
    Ok(())
}
