//! Producers with a database of their own: an outbox there, and a relay that moves each event exactly once.

use std::collections::BTreeMap;

use serde_json::json;

use crate::support::{Database, Postrider, Receiver, until};

async fn with_outbox() -> Database {
    let source = Database::empty().await;
    for _ in 0..2 {
        let output = Postrider::on_database("migrate --outbox-only", &source).output();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{told}");
    }
    source
}

async fn count(database: &Database, table: &str) -> i64 {
    let mut connection = database.connect().await;
    let count = format!("select count(*) from postrider.{table}");
    sqlx::query_scalar(sqlx::AssertSqlSafe(count))
        .fetch_one(&mut connection)
        .await
        .expect("counted")
}

#[tokio::test]
async fn what_was_committed_in_two_sources_arrives_once_through_kills() {
    const EVENTS: i64 = 600;
    let database = Database::fresh().await;
    let (first, second) = (with_outbox().await, with_outbox().await);
    let sources = format!("{},{}", first.url(), second.url());
    let mut program = Postrider::start_with(&database, &[("POSTRIDER_SOURCES", &sources)]).await;
    let receiver = Receiver::start().await;
    program
        .api()
        .acme(&receiver.url("/hook"), json!({"concurrency": 64}))
        .await;
    for (name, source) in [("a", &first), ("b", &second)] {
        let mut producer = source.connect().await;
        let (prefix, many) = (name.to_owned(), EVENTS / 2);
        tokio::spawn(async move {
            for n in 0..many {
                sqlx::query("select postrider.emit('acme', 'invoice.paid', '{}', $1)")
                    .bind(format!("{prefix}{n}"))
                    .execute(&mut producer)
                    .await
                    .expect("emitted");
            }
        });
    }
    for round in 1..4 {
        until("some were relayed", || async {
            (count(&database, "events").await >= round * 100).then_some(())
        })
        .await;
        program.kill();
        program.restart().await;
    }
    until("all were relayed", || async {
        let left = count(&first, "outbox").await + count(&second, "outbox").await;
        (left == 0 && count(&database, "events").await == EVENTS).then_some(())
    })
    .await;
    program
        .api()
        .wait_for_state("acme", "delivered", EVENTS as usize)
        .await;
    let mut times: BTreeMap<String, usize> = BTreeMap::new();
    for request in receiver.received() {
        *times.entry(request.event_id().to_owned()).or_default() += 1;
    }
    assert_eq!(times.len() as i64, EVENTS, "each arrived");
    assert_eq!(count(&database, "events").await, EVENTS, "and is there once");
}

#[tokio::test]
async fn what_the_main_database_refuses_is_kept_with_the_reason_and_holds_nothing_up() {
    let database = Database::fresh().await;
    let source = with_outbox().await;
    let program = Postrider::start_with(&database, &[("POSTRIDER_SOURCES", &source.url())]).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    let mut producer = source.connect().await;
    for (tenant, event_type, id) in [
        ("nobody", "invoice.paid", "one"),
        ("acme", "invoice.lost", "two"),
        ("acme", "invoice.paid", "three"),
    ] {
        sqlx::query("select postrider.emit($1, $2, '{}', $3)")
            .bind(tenant)
            .bind(event_type)
            .bind(id)
            .execute(&mut producer)
            .await
            .expect("emitted");
    }
    assert_eq!(receiver.wait_for(1).await[0].event_id(), "three");
    let refused: Vec<(String, String)> = until("both are refused", || async {
        let mut connection = source.connect().await;
        let rows: Vec<(String, String)> =
            sqlx::query_as("select id, refusal from postrider.outbox_refused order by n")
                .fetch_all(&mut connection)
                .await
                .expect("read");
        (rows.len() == 2).then_some(rows)
    })
    .await;
    assert_eq!(
        refused,
        [("one", "PR404"), ("two", "PR422")].map(|(a, b)| (a.to_owned(), b.to_owned()))
    );
    for bad in ["[]", "{", "null"] {
        let error = sqlx::query("select postrider.emit('acme', 'invoice.paid', $1)")
            .bind(bad)
            .execute(&mut producer)
            .await
            .expect_err("refused");
        let code = error.as_database_error().and_then(|e| e.code()).map(String::from);
        assert_eq!(code.as_deref(), Some("PR422"));
    }
}

#[tokio::test]
async fn an_outbox_does_not_go_into_the_main_database() {
    let database = Database::fresh().await;
    let output = Postrider::on_database("migrate --outbox-only", &database).output();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("main schema"));
}
