//! What becomes of a connection whose user went away in the middle.

use std::time::Duration;

use postrider_dispatcher::db_timeout::lively;
use sqlx::postgres::PgPoolOptions;

use crate::support::Database;

/// A request whose client hung up is dropped wherever it waits, also for the answer to `begin`.
#[tokio::test]
async fn a_begin_that_was_dropped_leaves_no_open_transaction_to_the_next_user() {
    let database = Database::fresh().await;
    database.execute("create table public.written (n int)").await;
    let pool = lively(PgPoolOptions::new().max_connections(1))
        .connect_with(database.options())
        .await
        .expect("connected");
    for micros in (0..2_000).step_by(20) {
        let begin = tokio::time::timeout(Duration::from_micros(micros), pool.begin()).await;
        drop(begin);
        sqlx::query("insert into public.written values ($1)")
            .bind(micros as i32)
            .execute(&pool)
            .await
            .expect("acknowledged");
        let seen = format!("select count(*) from public.written where n = {micros}");
        assert_eq!(
            database.count(&seen).await,
            1,
            "acknowledged and not committed: {micros} µs"
        );
    }
}
