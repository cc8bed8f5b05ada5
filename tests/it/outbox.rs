//! Producers with a database of their own: an outbox there, and a relay that moves each event exactly once.

use std::{collections::BTreeMap, time::Duration};

use reqwest::Method;
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

/// Sessions of the main database that wait for a lock.
async fn waiting_sessions(database: &Database) -> i64 {
    database
        .count(
            "select count(*) from pg_stat_activity
             where wait_event_type = 'Lock' and datname = current_database()",
        )
        .await
}

#[tokio::test]
async fn a_key_or_an_id_that_is_locked_holds_up_its_own_events_and_nobody_else_s() {
    const BLOCKED: i64 = 300;
    let database = Database::fresh().await;
    let source = with_outbox().await;
    let program = Postrider::start_with(&database, &[("POSTRIDER_SOURCES", &source.url())]).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/acme"), json!({ "ordered": true })).await;
    api.tenant("other").await;
    api.endpoint("other", &receiver.url("/other"), json!({})).await;
    let mut open = database.connect().await;
    sqlx::raw_sql(
        "begin;
         select postrider.emit('acme', 'invoice.paid', '{}', 'first', ordering_key => 'k');
         select postrider.emit('acme', 'invoice.paid', '{}', 'taken')",
    )
    .execute(&mut open)
    .await
    .expect("emitted");
    // More than a batch of them stand before everybody else's.
    let blocked = format!(
        "select postrider.emit('acme', 'invoice.paid', '{{}}', 'k' || n, ordering_key => 'k')
         from generate_series(1, {BLOCKED}) n;
         select postrider.emit('acme', 'invoice.paid', '{{}}', 'taken')"
    );
    source.execute(&blocked).await;
    source
        .execute(
            "select postrider.emit('other', 'invoice.paid', '{}', 'o' || n) from generate_series(1, 50) n;
             select postrider.emit('acme', 'invoice.paid', '{}', 'l' || n, ordering_key => 'l')
             from generate_series(1, 5) n;
             select postrider.emit('acme', 'invoice.paid', '{}', 'free')",
        )
        .await;
    let began = std::time::Instant::now();
    receiver.wait_for(56).await;
    let took = began.elapsed();
    assert!(took < Duration::from_secs(10), "it took {took:?}");
    assert_eq!(
        count(&source, "outbox").await,
        BLOCKED + 1,
        "they wait in the outbox"
    );
    // Later events of the key do not overtake, and go on for others.
    source
        .execute(
            "select postrider.emit('acme', 'invoice.paid', '{}', 'k-last', ordering_key => 'k');
             select postrider.emit('other', 'invoice.paid', '{}', 'o-last')",
        )
        .await;
    receiver.wait_for(57).await;
    // No session waits for the lock for longer than a moment.
    until("nobody waits", || async {
        (waiting_sessions(&database).await == 0).then_some(())
    })
    .await;
    let statements = "select coalesce(max(extract(epoch from clock_timestamp() - query_start)), 0)::bigint
        from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()";
    assert!(database.count(statements).await < 2);
    sqlx::raw_sql("rollback")
        .execute(&mut open)
        .await
        .expect("let go");
    until("all went on", || async {
        (count(&source, "outbox").await == 0).then_some(())
    })
    .await;
    receiver.wait_for(57 + BLOCKED as usize + 2).await;
    let order: Vec<String> = receiver
        .received()
        .iter()
        .filter(|request| request.path == "/acme")
        .map(|request| request.event_id().to_owned())
        .filter(|id| id.starts_with('k'))
        .collect();
    let mut expected: Vec<String> = (1..=BLOCKED).map(|n| format!("k{n}")).collect();
    expected.push("k-last".to_owned());
    assert_eq!(order, expected, "in the order of the key");
}

/// One tenant with hundreds of locked keys costs the others no more than one with a single one.
#[tokio::test]
async fn a_tenant_with_hundreds_of_locked_keys_does_not_hold_up_the_others() {
    const KEYS: i64 = 600;
    let database = Database::fresh().await;
    let source = with_outbox().await;
    let program = Postrider::start_with(&database, &[("POSTRIDER_SOURCES", &source.url())]).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/acme"), json!({})).await;
    api.tenant("other").await;
    api.endpoint("other", &receiver.url("/other"), json!({})).await;
    let mut open = database.connect().await;
    let lock = format!(
        "begin; select postrider.emit('acme', 'invoice.paid', '{{}}', ordering_key => 'k' || n)
         from generate_series(1, {KEYS}) n"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(lock))
        .execute(&mut open)
        .await
        .expect("locked");
    let emits = format!(
        "select postrider.emit('acme', 'invoice.paid', '{{}}', ordering_key => 'k' || n)
         from generate_series(1, {KEYS}) n;
         select postrider.emit('other', 'invoice.paid', '{{}}', 'o' || n) from generate_series(1, 20) n"
    );
    source.execute(&emits).await;
    let began = std::time::Instant::now();
    receiver.wait_for(20).await;
    let took = began.elapsed();
    assert!(took < Duration::from_secs(10), "it took {took:?}");
    sqlx::raw_sql("rollback")
        .execute(&mut open)
        .await
        .expect("let go");
    until("all went on", || async {
        (count(&source, "outbox").await == 0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_outbox_row_that_is_no_utf8_is_refused_and_holds_nothing_up() {
    let database = Database::fresh().await;
    let source = Database::empty_in_ascii().await;
    let output = Postrider::on_database("migrate --outbox-only", &source).output();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let program = Postrider::start_with(&database, &[("POSTRIDER_SOURCES", &source.url())]).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    source
        .execute(
            r#"select postrider.emit('acme', 'invoice.paid', E'{"name":"\xe9\xe8"}', 'latin');
               select postrider.emit('acme', 'invoice.paid', '{"name":"é"}', 'fine')"#,
        )
        .await;
    assert_eq!(receiver.wait_for(1).await[0].event_id(), "fine");
    until("it is refused", || async {
        (count(&source, "outbox_refused").await == 1).then_some(())
    })
    .await;
    let refused = source
        .text("select id || ' ' || refusal || ' ' || message from postrider.outbox_refused")
        .await;
    assert!(
        refused.starts_with("latin PR422 ") && refused.contains("UTF-8"),
        "{refused}"
    );
}

#[tokio::test]
async fn events_beyond_a_quota_stay_in_the_outbox_and_other_tenants_continue() {
    let database = Database::fresh().await;
    let source = with_outbox().await;
    let program = Postrider::start_with(&database, &[("POSTRIDER_SOURCES", &source.url())]).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/acme"), json!({ "ordered": true })).await;
    api.tenant("globex").await;
    api.endpoint("globex", &receiver.url("/globex"), json!({})).await;
    let quota = Some(json!({ "stored_bytes": 300 }));
    let (status, _) = api.call(Method::PUT, "/tenants/acme/quotas", quota).await;
    assert!(status.is_success());
    let mut producer = source.connect().await;
    for (tenant, id) in [("acme", "1"), ("acme", "2"), ("acme", "3"), ("globex", "4")] {
        sqlx::query("select postrider.emit($1, 'invoice.paid', '{}', $2, ordering_key => 'k')")
            .bind(tenant)
            .bind(id)
            .execute(&mut producer)
            .await
            .expect("emitted");
    }
    receiver.wait_for(3).await;
    assert_eq!(count(&source, "outbox").await, 1, "the third of acme waits");
    assert_eq!(count(&source, "outbox_refused").await, 0);
    let quota = Some(json!({ "stored_bytes": null }));
    api.call(Method::PUT, "/tenants/acme/quotas", quota).await;
    receiver.wait_for(4).await;
    let order: Vec<String> = receiver
        .received()
        .iter()
        .filter(|request| request.path == "/acme")
        .map(|request| request.field("sequence").to_string())
        .collect();
    assert_eq!(order, ["1", "2", "3"]);
}

#[tokio::test]
async fn a_restored_copy_takes_nothing_from_an_outbox_until_it_is_confirmed() {
    let database = Database::fresh().await;
    let source = with_outbox().await;
    database
        .execute("update postrider.sending set identity = 'another cluster/1'")
        .await;
    // The outbox of the original. It must not be emptied into a copy, which nobody reads.
    let mut producer = source.connect().await;
    let program = Postrider::start_with(&database, &[("POSTRIDER_SOURCES", &source.url())]).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    sqlx::query("select postrider.emit('acme', 'invoice.paid', '{}', 'one')")
        .execute(&mut producer)
        .await
        .expect("emitted");
    // Emitted later and queued, so that the dispatcher was at work meanwhile.
    let event = json!({ "id": "two", "type": "invoice.paid", "data": {} });
    program.api().emit("acme", event).await;
    until("the copy has its own event", || async {
        (count(&database, "queue").await == 1).then_some(())
    })
    .await;
    assert_eq!(count(&source, "outbox").await, 1);
    let confirm = Some(json!({ "stopped": false, "confirm_restored": true }));
    let (status, _) = program.api().call(Method::PUT, "/sending", confirm).await;
    assert!(status.is_success());
    receiver.wait_for(2).await;
    // An event is removed there after it was emitted here.
    until("the outbox is empty", || async {
        (count(&source, "outbox").await == 0).then_some(())
    })
    .await;
}
