//! Totals of the whole installation, from Postgres' own table statistics: no table is read. Every process exports the
//! same values; take the maximum.

use std::{collections::HashMap, time::Duration};

use metrics::{Counter, Gauge};
use sqlx::PgExecutor;
use tokio_util::sync::CancellationToken;

use super::{
    counter,
    freshness::{SWITCHES, TABLES as TABLES_READ},
    gauge, labelled_gauge,
};
use crate::db_timeout::WithDbTimeout;

const LOOK_EVERY: Duration = Duration::from_secs(10);
const EVENTS_STORED: &str =
    "Events stored from any source since this process started; the same in all processes";
const DELIVERIES_QUEUED: &str = "Deliveries queued, including replays; the same in all processes";
/// Tables of pending deliveries and dead letters.
const TABLES: [&str; 3] = ["queue", "retries", "dead_letters"];

struct TableMetrics {
    sending_stopped: Gauge,
    tenants_paused: Gauge,
    rows: Vec<(Gauge, Gauge)>,
    events_stored: Counter,
    deliveries_queued: Counter,
    /// Rows ever inserted at the last read. None for a table that did not exist yet.
    inserted: HashMap<String, i64>,
    has_read: bool,
}

/// Runs until stopped.
pub async fn watch<P>(pool: P, stop: CancellationToken)
where
    for<'p> &'p P: PgExecutor<'p>,
{
    // Registered with the first successful read.
    let mut metrics = None;
    loop {
        match read_statistics(&pool).with_db_timeout().await {
            Ok(rows) => metrics.get_or_insert_with(TableMetrics::new).take(&rows),
            Err(error) => tracing::debug!(%error, "reading table statistics failed; retrying"),
        }
        match read_switches(&pool).with_db_timeout().await {
            Ok(switches) => metrics
                .get_or_insert_with(TableMetrics::new)
                .take_switches(switches),
            Err(error) => tracing::debug!(%error, "reading the switches failed; retrying"),
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            () = stop.cancelled() => return,
        }
    }
}

/// Name, whether it is a partition of events, rows inserted, live rows, dead rows.
type TableRow = (String, bool, i64, i64, i64);

/// One row per partition of events, plus three.
async fn read_statistics(db: impl PgExecutor<'_>) -> Result<Vec<TableRow>, sqlx::Error> {
    sqlx::query_as(
        "select s.relname::text, i.inhrelid is not null, s.n_tup_ins, s.n_live_tup, s.n_dead_tup
         from pg_stat_user_tables s
         left join pg_inherits i on i.inhrelid = s.relid and i.inhparent = 'postrider.events'::regclass
         where s.schemaname = 'postrider' and (i.inhrelid is not null or s.relname = any($1))",
    )
    .bind(TABLES)
    .fetch_all(db)
    .await
}

/// Whether all sending is stopped, and how many tenants are paused.
async fn read_switches(db: impl PgExecutor<'_>) -> Result<(bool, i64), sqlx::Error> {
    sqlx::query_as(
        "select s.stopped, (select count(*) from postrider.tenants t where t.paused_at is not null and t.deleted_at is null)
         from postrider.sending_state() s",
    )
    .fetch_one(db)
    .await
}

impl TableMetrics {
    fn take_switches(&self, (stopped, paused): (bool, i64)) {
        SWITCHES.was_read();
        self.sending_stopped.set(f64::from(u8::from(stopped)));
        self.tenants_paused.set(paused as f64);
    }

    fn new() -> Self {
        let rows = |table| {
            let label = [("table", table)];
            let live = "Estimated live rows; the same in all processes";
            let dead = "Dead rows not yet removed by autovacuum; the same in all processes";
            (
                labelled_gauge("postrider_table_rows", live, &label),
                labelled_gauge("postrider_table_dead_rows", dead, &label),
            )
        };
        Self {
            sending_stopped: gauge(
                "postrider_sending_stopped",
                "1 while all sending is stopped, also in a restored copy that is not confirmed; the same in all processes",
            ),
            tenants_paused: gauge(
                "postrider_tenants_paused",
                "Paused tenants; the same in all processes",
            ),
            rows: TABLES.map(rows).into(),
            events_stored: counter("postrider_events_stored_total", EVENTS_STORED),
            deliveries_queued: counter("postrider_deliveries_queued_total", DELIVERIES_QUEUED),
            inserted: HashMap::new(),
            has_read: false,
        }
    }

    fn take(&mut self, tables: &[TableRow]) {
        for (name, is_events, inserted, live, dead) in tables {
            let more = self.more(name, *inserted);
            if *is_events {
                self.events_stored.increment(more);
            } else if name == "queue" {
                self.deliveries_queued.increment(more);
            }
            if let Some(place) = TABLES.iter().position(|table| table == name) {
                self.rows[place].0.set(*live as f64);
                self.rows[place].1.set(*dead as f64);
            }
        }
        self.has_read = true;
        TABLES_READ.was_read();
        // Partitions that were dropped.
        if self.inserted.len() > tables.len() {
            let exists = |name: &String| tables.iter().any(|(found, ..)| found == name);
            self.inserted.retain(|name, _| exists(name));
        }
    }

    /// Since the last read. Rows that existed at the first one are not counted; statistics that were reset count from
    /// 0.
    fn more(&mut self, name: &str, inserted: i64) -> u64 {
        let before = match self.inserted.get_mut(name) {
            Some(before) => std::mem::replace(before, inserted),
            None => {
                self.inserted.insert(name.to_owned(), inserted);
                if self.has_read { 0 } else { inserted }
            }
        };
        let since = inserted - if inserted < before { 0 } else { before };
        u64::try_from(since).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_came_since_the_first_look_is_counted() {
        let mut metrics = TableMetrics::new();
        assert_eq!(metrics.more("a", 100), 0, "there before");
        metrics.has_read = true;
        assert_eq!(metrics.more("a", 130), 30);
        assert_eq!(metrics.more("b", 7), 7, "a new day");
        assert_eq!(metrics.more("a", 4), 4, "the statistics were reset");
    }
}
