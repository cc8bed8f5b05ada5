//! What the whole installation has stored, from Postgres' own statistics of its tables: no table is read. Every process
//! tells the same figures, so that one is enough: take the largest.

use std::{collections::HashMap, time::Duration};

use metrics::{Counter, Gauge};
use sqlx::PgExecutor;
use tokio_util::sync::CancellationToken;

use super::{counter, labelled_gauge};
use crate::db_timeout::WithDbTimeout;

const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Tables that deliveries wait or rest in.
const TABLES: [&str; 3] = ["queue", "retries", "dead_letters"];

struct Figures {
    rows: Vec<(Gauge, Gauge)>,
    events_stored: Counter,
    deliveries_queued: Counter,
    /// Rows ever inserted, when last looked at. Of a table that was not there yet, none.
    inserted: HashMap<String, i64>,
    looked: bool,
}

/// Runs until told to stop.
pub async fn watch<P>(pool: P, stop: CancellationToken)
where
    for<'p> &'p P: PgExecutor<'p>,
{
    // Told once there is something to tell.
    let mut figures = None;
    loop {
        match look(&pool).with_db_timeout().await {
            Ok(rows) => figures.get_or_insert_with(Figures::new).take(&rows),
            Err(error) => tracing::debug!(%error, "the statistics of tables can't be read now"),
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            () = stop.cancelled() => return,
        }
    }
}

/// Name, whether it is a day of events, rows inserted, rows, dead rows.
type TableRow = (String, bool, i64, i64, i64);

/// As many rows as there are days of events, and three.
async fn look(db: impl PgExecutor<'_>) -> Result<Vec<TableRow>, sqlx::Error> {
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

impl Figures {
    fn new() -> Self {
        let rows = |table| {
            let label = [("table", table)];
            let live = "Rows, as Postgres estimates them; the same for all processes";
            let dead = "Rows that autovacuum has not removed yet; the same for all processes";
            (
                labelled_gauge("postrider_table_rows", live, &label),
                labelled_gauge("postrider_table_dead_rows", dead, &label),
            )
        };
        Self {
            rows: TABLES.map(rows).into(),
            events_stored: counter(
                "postrider_events_stored_total",
                "Events emitted in any way, seen by Postgres since this process started; the same for all processes",
            ),
            deliveries_queued: counter(
                "postrider_deliveries_queued_total",
                "Deliveries put in line for them, and replays; the same for all processes",
            ),
            inserted: HashMap::new(),
            looked: false,
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
        self.looked = true;
        // Days that were dropped.
        if self.inserted.len() > tables.len() {
            self.inserted
                .retain(|name, _| tables.iter().any(|(found, ..)| found == name));
        }
    }

    /// Since the last look. What was there at the first one is not counted; statistics that were reset count from 0.
    fn more(&mut self, name: &str, inserted: i64) -> u64 {
        let before = match self.inserted.get_mut(name) {
            Some(before) => std::mem::replace(before, inserted),
            None => {
                self.inserted.insert(name.to_owned(), inserted);
                if self.looked { 0 } else { inserted }
            }
        };
        let since = if inserted < before {
            inserted
        } else {
            inserted - before
        };
        u64::try_from(since).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_came_since_the_first_look_is_counted() {
        let mut figures = Figures::new();
        assert_eq!(figures.more("a", 100), 0, "there before");
        figures.looked = true;
        assert_eq!(figures.more("a", 130), 30);
        assert_eq!(figures.more("b", 7), 7, "a new day");
        assert_eq!(figures.more("a", 4), 4, "the statistics were reset");
    }
}
