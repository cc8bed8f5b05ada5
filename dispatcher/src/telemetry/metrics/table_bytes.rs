//! Disk space of the tables, indexes and TOAST included. The same in all processes; take the maximum.

use std::time::Duration;

use metrics::Gauge;
use sqlx::PgExecutor;
use tokio_util::sync::CancellationToken;

use super::{freshness::TABLE_BYTES, labelled_gauge};
use crate::db_timeout::WithDbTimeout;

/// Sizes change slowly, and each partition costs a few calls of the file system.
const LOOK_EVERY: Duration = Duration::from_secs(60);
const LOOK_AGAIN_AFTER_ERROR: Duration = Duration::from_secs(5);
/// Tables that grow with events and deliveries; `other` is the sum of all others.
const TABLES: [&str; 7] = [
    "events",
    "attempts",
    "event_ids",
    "queue",
    "retries",
    "dead_letters",
    "other",
];

/// Runs until stopped.
pub async fn watch<P>(pool: P, stop: CancellationToken)
where
    for<'p> &'p P: PgExecutor<'p>,
{
    // Registered with the first successful read.
    let mut gauges: Option<[Gauge; TABLES.len()]> = None;
    loop {
        let wait = match read(&pool).with_db_timeout().await {
            Ok(sizes) => {
                set(gauges.get_or_insert_with(register), &sizes);
                TABLE_BYTES.was_read();
                LOOK_EVERY
            }
            Err(error) => {
                tracing::debug!(%error, "reading table sizes failed; retrying");
                LOOK_AGAIN_AFTER_ERROR
            }
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = stop.cancelled() => return,
        }
    }
}

fn register() -> [Gauge; TABLES.len()] {
    let help = "Disk space of a table with its indexes; the same in all processes";
    TABLES.map(|table| labelled_gauge("postrider_table_bytes", help, &[("table", table)]))
}

fn set(gauges: &[Gauge; TABLES.len()], sizes: &[(String, i64)]) {
    for (table, gauge) in TABLES.iter().zip(gauges) {
        let found = sizes.iter().find(|(name, _)| name == table);
        gauge.set(found.map_or(0.0, |(_, bytes)| *bytes as f64));
    }
}

/// Partitions are added up under the name of their table. One that is being dropped has no size.
async fn read(db: impl PgExecutor<'_>) -> Result<Vec<(String, i64)>, sqlx::Error> {
    sqlx::query_as(
        "select case when coalesce(p.relname, c.relname)::text = any($1) then coalesce(p.relname, c.relname)::text
                     else 'other' end,
                coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint
         from pg_class c
         left join pg_inherits i on i.inhrelid = c.oid
         left join pg_class p on p.oid = i.inhparent
         where c.relnamespace = 'postrider'::regnamespace and c.relkind = 'r'
         group by 1",
    )
    .bind(TABLES)
    .fetch_all(db)
    .await
}
