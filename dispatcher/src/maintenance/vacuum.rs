//! Vacuums the tables whose rows come and go with every delivery, as often as this dispatcher's load requires.
//!
//! Autovacuum would do, but only with an `autovacuum_naptime` of a few seconds: that is a setting of the whole server, which
//! an idle system pays for, too, and which managed servers may not offer. It remains the safety net. A role that does not
//! own the tables vacuums nothing here.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use sqlx::{Connection, PgConnection};
use tokio_util::sync::CancellationToken;

use crate::{
    Wake,
    connector::Connector,
    db_timeout::{WithDbTimeout, within},
    health::database::warn_unless_outage,
};

/// Between two rounds, so that a constant load does not vacuum without a pause.
const PAUSE: Duration = Duration::from_secs(5);
/// Dead rows worth removing: so many, or this share of the live ones if that is more.
const DEAD_ROWS_MIN: i64 = 1_000;
const DEAD_SHARE: f64 = 0.02;
/// For one table with millions of dead rows on a slow disk.
const VACUUM_MAX: Duration = Duration::from_secs(10 * 60);

/// Autovacuum, or another dispatcher, may be at the same table: then this one skips it. Truncating would lock out producers.
const STATEMENTS: [(&str, &str); 2] = [
    ("queue", "vacuum (skip_locked, truncate false) postrider.queue"),
    (
        "retries",
        "vacuum (skip_locked, truncate false) postrider.retries",
    ),
];

/// Results recorded since the last vacuum: each has left a dead row in the queue or in `retries`. The server's own count is
/// some seconds old.
#[derive(Debug, Clone, Default)]
pub(crate) struct DeadRows(Arc<(AtomicI64, Wake)>);

impl DeadRows {
    pub(crate) fn add(&self, results: usize) {
        let (count, wake) = &*self.0;
        let before = count.fetch_add(results as i64, Ordering::Relaxed);
        if before + results as i64 >= DEAD_ROWS_MIN {
            wake.now();
        }
    }
}

/// Runs until stopped.
pub(crate) async fn run(database: Connector, dead: DeadRows, stop: CancellationToken) {
    let work = async {
        let (count, wake) = &*dead.0;
        loop {
            wake.wait().await;
            let results = count.load(Ordering::Relaxed);
            match vacuum(&database, results).await {
                Ok(true) => {
                    count.fetch_sub(results, Ordering::Relaxed);
                }
                Ok(false) => {}
                Err(error) => {
                    warn_unless_outage!(error, "vacuuming the queue failed; autovacuum will do it");
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    let _: Option<()> = stop.run_until_cancelled(work).await;
}

/// Whether anything was vacuumed. On a connection of its own: it may take minutes, and nobody must wait for it.
async fn vacuum(database: &Connector, results: i64) -> Result<bool, sqlx::Error> {
    let mut connection = database.connect().with_db_timeout().await?;
    let tables = tables_to_vacuum(&mut connection, results)
        .with_db_timeout()
        .await?;
    for (table, statement) in STATEMENTS {
        if tables.iter().any(|found| found == table) {
            within(VACUUM_MAX, sqlx::raw_sql(statement).execute(&mut connection)).await?;
        }
    }
    connection.close().with_db_timeout().await?;
    Ok(!tables.is_empty())
}

/// Most results have left a row of the queue; for `retries` the server's count will do.
async fn tables_to_vacuum(connection: &mut PgConnection, results: i64) -> Result<Vec<String>, sqlx::Error> {
    let names: Vec<&str> = STATEMENTS.map(|(table, _)| table).to_vec();
    sqlx::query_scalar(
        "select relname::text from pg_class
         where relnamespace = 'postrider'::regnamespace and relname = any($1) and pg_has_role(relowner, 'usage')
           and greatest(pg_stat_get_dead_tuples(oid), case when relname = 'queue' then $2 end)
               >= greatest($3, $4 * pg_stat_get_live_tuples(oid))",
    )
    .bind(names)
    .bind(results)
    .bind(DEAD_ROWS_MIN)
    .bind(DEAD_SHARE)
    .fetch_all(connection)
    .await
}
