//! What becomes of a connection whose user went away in the middle.

use std::time::Duration;

use postrider_dispatcher::db_timeout::lively;
use reqwest::Method;
use rustix::process::Signal;
use serde_json::json;
use sqlx::postgres::PgPoolOptions;

use crate::support::{Database, Postrider, until};

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

#[tokio::test]
async fn locks_of_a_process_that_stands_still_are_released() {
    let database = Database::fresh().await;
    let dashboard = Postrider::on_database("dashboard", &database).start().await;
    locks_are_released(&database, &dashboard).await;
}

/// The process stops in the middle of a transaction that holds an ordering key. Nobody else waits for it for long.
pub(crate) async fn locks_are_released(database: &Database, dashboard: &Postrider) {
    let api = dashboard.api();
    api.call(Method::PUT, "/tenants/acme", Some(json!({}))).await;
    api.event_type("invoice.paid").await;
    let emit = "select postrider.emit('acme', 'invoice.paid', '{}', ordering_key => 'k')";
    database.execute(emit).await;
    let mut holder = database.connect().await;
    sqlx::raw_sql("begin; select from postrider.ordering_keys for update")
        .execute(&mut holder)
        .await
        .expect("locked");
    // With a key of its own it has a transaction of its own.
    let body = json!({ "type": "invoice.paid", "data": {}, "ordering_key": "k" });
    let emitting = tokio::spawn({
        let api = api.clone();
        async move { api.post_with_key("/tenants/acme/events", "one", body).await }
    });
    until("it waits for the key", || async {
        let waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()";
        (database.count(waiting).await > 0).then_some(())
    })
    .await;
    dashboard.signal(Signal::STOP);
    sqlx::raw_sql("rollback")
        .execute(&mut holder)
        .await
        .expect("ended");
    until("it has the key, and stands still", || async {
        let idle = "select count(*) from pg_stat_activity where state = 'idle in transaction'
                    and datname = current_database()";
        (database.count(idle).await > 0).then_some(())
    })
    .await;
    database.execute(emit).await;
    dashboard.signal(Signal::CONT);
    emitting.await.expect("an answer");
}
