//! Quotas of tenants: how much they may emit and store, and how a rejection looks by HTTP and SQL.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use sqlx::PgConnection;

use crate::support::{ADMIN_API_KEY, Api, Database, Person, Postrider, Receiver, http_client, tool, until};

fn event(id: &str) -> Value {
    json!({ "id": id, "type": "invoice.paid", "data": {} })
}

async fn set(api: &Api, quotas: Value) -> Value {
    let (status, told) = api.call(Method::PUT, "/tenants/acme/quotas", Some(quotas)).await;
    assert_eq!(status, StatusCode::OK, "{told}");
    told
}

async fn emit_by_sql(connection: &mut PgConnection, id: &str) -> Result<String, String> {
    let emitted: Result<String, sqlx::Error> =
        sqlx::query_scalar("select postrider.emit('acme', 'invoice.paid', '{}', $1)")
            .bind(id)
            .fetch_one(connection)
            .await;
    emitted.map_err(|error| {
        let code = error.as_database_error().and_then(|error| error.code());
        code.unwrap_or_default().into_owned()
    })
}

async fn run_the_duty(database: &Database) {
    let pool = sqlx::PgPool::connect_with(database.options())
        .await
        .expect("connected");
    let month = std::time::Duration::from_secs(30 * 86_400);
    postrider_dispatcher::usage::run(&pool, month)
        .await
        .expect("done");
}

/// The quota is counted by the minute: a test that meets the end of one begins again in the next.
async fn early_in_a_minute(database: &Database) {
    until("there is time left in this minute", || async {
        let seconds = "select date_part('second', clock_timestamp())::bigint";
        (database.count(seconds).await < 40).then_some(())
    })
    .await;
}

#[tokio::test]
async fn emits_beyond_the_quota_are_rejected_by_http_and_sql_and_repeated_ones_are_not() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    api.emit("acme", event("before")).await;
    early_in_a_minute(&database).await;
    set(&api, json!({ "emits_per_minute": 4 })).await;
    let mut producer = database.producer().await;
    assert_eq!(api.emit("acme", event("a")).await.0, StatusCode::ACCEPTED);
    assert_eq!(emit_by_sql(&mut producer, "b").await.as_deref(), Ok("b"));
    let batch = json!({ "events": [event("c"), event("d")] });
    let (status, told) = api
        .call(Method::POST, "/tenants/acme/events/batch", Some(batch))
        .await;
    assert_eq!(status, StatusCode::ACCEPTED, "{told}");

    let rejected = http_client()
        .build()
        .expect("a client")
        .post(program.url("/v1/tenants/acme/events"))
        .bearer_auth(ADMIN_API_KEY)
        .header("content-type", "application/json")
        .body(event("e").to_string())
        .send()
        .await
        .expect("an answer");
    assert_eq!(rejected.status(), StatusCode::TOO_MANY_REQUESTS);
    let wait = rejected.headers()["retry-after"]
        .to_str()
        .expect("text")
        .parse::<u64>();
    assert!((1..=60).contains(&wait.expect("seconds")));
    let problem: Value = serde_json::from_str(&rejected.text().await.expect("a body")).expect("JSON");
    assert_eq!(problem["type"], "urn:postrider:problem:emit-quota-exceeded");
    assert_eq!(emit_by_sql(&mut producer, "e").await, Err("PR429".to_owned()));
    let batch = json!({ "events": [event("a"), event("e")] });
    let (status, told) = api
        .call(Method::POST, "/tenants/acme/events/batch", Some(batch))
        .await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "{told}");
    // What was emitted before is not new.
    assert_eq!(api.emit("acme", event("a")).await.0, StatusCode::OK);
    assert_eq!(emit_by_sql(&mut producer, "b").await.as_deref(), Ok("b"));
    assert_eq!(api.get("/tenants/acme/quotas").await["emits_this_minute"], 4);

    // Another tenant is not concerned, and neither is this one without a quota.
    api.tenant("globex").await;
    assert_eq!(api.emit("globex", event("e")).await.0, StatusCode::ACCEPTED);
    let lifted = tool(
        &program,
        &["tenants", "quotas", "acme", "--emits-per-minute", "unlimited"],
    )
    .await;
    assert!(lifted.out.contains("emits this minute: unlimited"), "{lifted:?}");
    assert_eq!(api.emit("acme", event("e")).await.0, StatusCode::ACCEPTED);
    assert_eq!(api.get("/tenants/acme/quotas").await["emits_this_minute"], 0);
    run_the_duty(&database).await;
    let usage = "select count(*) from postrider.tenant_usage";
    assert_eq!(database.count(usage).await, 0);
    receiver.wait_for(6).await;
}

#[tokio::test]
async fn a_group_of_events_is_admitted_up_to_the_quota() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    api.tenant("globex").await;
    api.event_type("invoice.paid").await;
    early_in_a_minute(&database).await;
    set(&api, json!({ "emits_per_minute": 3 })).await;
    let refusals = database
        .text(
            "select string_agg(coalesce(refusal, 'ok'), ' ' order by position) from postrider.emit_all(
                 array['acme', 'globex', 'acme', 'acme', 'acme', 'globex'], array_fill('invoice.paid'::text, array[6]),
                 array_fill('{}'::text, array[6]), array[null, null, 'x', null, null, null],
                 array_fill(null::text, array[6]), array_fill(null::text, array[6]))",
        )
        .await;
    assert_eq!(refusals, "ok ok ok ok PR429 ok");
    let usage = "select sum(emits)::bigint from postrider.tenant_usage";
    assert_eq!(database.count(usage).await, 3);
}

#[tokio::test]
async fn a_producer_with_an_open_transaction_keeps_nobody_waiting() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    api.event_type("invoice.paid").await;
    set(&api, json!({ "emits_per_minute": 1_000 })).await;
    let mut slow = database.producer().await;
    let mut serializable = database.connect().await;
    sqlx::raw_sql("begin").execute(&mut slow).await.expect("begun");
    emit_by_sql(&mut slow, "slow").await.expect("emitted");
    sqlx::raw_sql("begin isolation level serializable")
        .execute(&mut serializable)
        .await
        .expect("begun");
    emit_by_sql(&mut serializable, "serializable")
        .await
        .expect("emitted");
    assert_eq!(api.emit("acme", event("fast")).await.0, StatusCode::ACCEPTED);
    for producer in [&mut slow, &mut serializable] {
        sqlx::raw_sql("commit")
            .execute(producer)
            .await
            .expect("committed");
    }
    let usage = "select sum(emits)::bigint from postrider.tenant_usage";
    assert_eq!(database.count(usage).await, 3);
}

#[tokio::test]
async fn quotas_are_removed_and_set_again_while_a_producer_has_an_open_transaction() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    api.event_type("invoice.paid").await;
    set(&api, json!({ "stored_bytes": 1_000_000 })).await;
    api.emit("acme", event("first")).await;
    let mut slow = database.producer().await;
    sqlx::raw_sql("begin").execute(&mut slow).await.expect("begun");
    emit_by_sql(&mut slow, "slow").await.expect("emitted");

    let told = set(&api, json!({})).await;
    assert_eq!(
        (&told["stored_bytes"], &told["stored_bytes_used"]),
        (&Value::Null, &json!(0))
    );
    // Neither the duty nor a new quota waits for the producer.
    run_the_duty(&database).await;
    api.emit("acme", event("unlimited")).await;
    let stored = "select sum(octet_length(body))::bigint from postrider.events";
    let told = set(&api, json!({ "stored_bytes": 2_000_000 })).await;
    assert_eq!(
        (&told["stored_bytes_used"], &told["is_measured"]),
        (&json!(database.count(stored).await), &json!(true)),
        "nothing is counted twice"
    );
    sqlx::raw_sql("rollback")
        .execute(&mut slow)
        .await
        .expect("rolled back");
    assert_eq!(api.get("/tenants/acme/quotas").await, told);
    set(&api, json!({})).await;
    run_the_duty(&database).await;
    let usage = "select count(*) from postrider.tenant_usage";
    assert_eq!(database.count(usage).await, 0);
}

#[tokio::test]
async fn events_beyond_the_quota_of_stored_bytes_are_rejected_until_old_ones_are_gone() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    api.event_type("invoice.paid").await;
    for n in 0..5 {
        api.emit("acme", event(&format!("before-{n}"))).await;
    }
    let stored = database
        .count("select sum(octet_length(body))::bigint from postrider.events")
        .await;
    let told = set(&api, json!({ "stored_bytes": stored + 200 })).await;
    assert_eq!(
        (&told["stored_bytes_used"], &told["is_measured"]),
        (&json!(stored), &json!(true))
    );
    assert_eq!(api.emit("acme", event("fits")).await.0, StatusCode::ACCEPTED);
    let (status, problem) = api.emit("acme", event("too-much")).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(problem["type"], "urn:postrider:problem:storage-quota-exceeded");
    let mut producer = database.producer().await;
    assert_eq!(
        emit_by_sql(&mut producer, "too-much").await,
        Err("PR507".to_owned())
    );
    // A day that is past its retention no longer counts, and rows of past days become one.
    database
        .execute("update postrider.tenant_usage set day = day - 40")
        .await;
    run_the_duty(&database).await;
    assert_eq!(
        database
            .count("select count(*) from postrider.tenant_usage")
            .await,
        0
    );
    assert_eq!(api.emit("acme", event("too-much")).await.0, StatusCode::ACCEPTED);
}

#[tokio::test]
async fn an_invalid_quota_is_rejected_and_a_valid_one_is_shown_on_the_page() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    for bad in [
        json!({ "emits_per_minute": 0 }),
        json!({ "stored_bytes": -1 }),
        json!({ "emits": 1 }),
    ] {
        let (status, _) = api
            .call(Method::PUT, "/tenants/acme/quotas", Some(bad.clone()))
            .await;
        assert!(status.is_client_error(), "{bad}");
    }
    let mut admin = Person::signed_in(&program).await;
    let (_, page) = admin.visit("/tenants/acme").await;
    let form = |emits: &str, bytes: &str| {
        let form = crate::support::Form::find(&page, "/tenants/acme/quotas");
        form.fill("emits_per_minute", emits).fill("stored_bytes", bytes)
    };
    for (emits, bytes, field) in [
        ("many", "7000", "emits_per_minute"),
        ("0", "7000", "emits_per_minute"),
        ("1200", "-1", "stored_bytes"),
    ] {
        let (status, page) = admin.submit(&form(emits, bytes)).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{emits} {bytes}");
        assert!(page.contains(&format!("id=\"{field}-error\"")), "{emits} {bytes}");
        assert!(page.contains("The quotas were not saved."), "{emits} {bytes}");
        for kept in [emits, bytes] {
            assert!(page.contains(&format!("value=\"{kept}\"")), "{kept} is kept");
        }
    }
    let form = form("1200", "");
    let (_, page) = admin.submit_and_follow(&form).await;
    assert!(page.contains("0 of 1,200"), "{page}");
    assert_eq!(
        database
            .text("select action from postrider.audit order by id desc limit 1")
            .await,
        "quotas.put"
    );
}
