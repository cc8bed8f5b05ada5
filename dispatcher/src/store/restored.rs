//! Transaction numbers that another cluster gave out. A dump keeps them, and where it is restored they may lie in the future:
//! when the counter of the new cluster gets there, what carries them would be taken for new and be read a second time.
//! Invariant: before a dispatcher reads, no row carries a number that this cluster has not given out.

use sqlx::PgPool;

/// Everything that is found by its transaction number. `shard >= 0` is the condition of the queue's index. Each is one
/// statement and so one snapshot: a row that it sees and whose number lies beyond it was not written here.
const STATEMENTS: [(&str, &str); 4] = [
    (
        "queue",
        "update postrider.queue set xid = pg_current_xact_id()
         where shard >= 0 and xid >= (select pg_snapshot_xmax(pg_current_snapshot()))",
    ),
    (
        "endpoints",
        "update postrider.endpoints set xid = pg_current_xact_id()
         where xid >= (select pg_snapshot_xmax(pg_current_snapshot()))",
    ),
    (
        "secrets",
        "update postrider.secrets set xid = pg_current_xact_id()
         where xid >= (select pg_snapshot_xmax(pg_current_snapshot()))",
    ),
    (
        "sending",
        "update postrider.sending set xid = pg_current_xact_id()
         where xid >= (select pg_snapshot_xmax(pg_current_snapshot()))",
    ),
];

/// Gives such rows a number of this cluster. Finds none, and costs four looks at the end of an index, but after a restore.
/// Dispatchers that start at the same time wait for each other: the second finds nothing left to do.
pub(crate) async fn renumber(pool: &PgPool) -> Result<(), sqlx::Error> {
    let mut tx = pool.begin().await?;
    sqlx::raw_sql("set local enable_seqscan = off; set local enable_bitmapscan = off")
        .execute(&mut *tx)
        .await?;
    sqlx::query("select pg_advisory_xact_lock(hashtext('postrider.restored'))")
        .execute(&mut *tx)
        .await?;
    for (table, statement) in STATEMENTS {
        let rows = sqlx::query(statement).execute(&mut *tx).await?.rows_affected();
        if rows > 0 {
            tracing::info!(
                table,
                rows,
                "this database was restored from another cluster: rows were given new transaction numbers"
            );
        }
    }
    tx.commit().await
}
