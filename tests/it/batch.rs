//! Many events at once: all or none, and a refusal that names each bad one.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use sqlx::Connection;

use crate::support::{Database, Postrider, Receiver};

const BATCH: &str = "/tenants/acme/events/batch";

fn event(id: &str, n: usize) -> Value {
    json!({"type": "invoice.paid", "id": id, "data": {"n": n}})
}

async fn count_events(database: &Database) -> i64 {
    let mut connection = database.connect().await;
    sqlx::query_scalar("select count(*) from postrider.events")
        .fetch_one(&mut connection)
        .await
        .expect("counted")
}

#[tokio::test]
async fn a_thousand_events_go_in_together_and_arrive() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({"concurrency": 64})).await;
    let events: Vec<Value> = (0..1_000).map(|n| event(&format!("e{n}"), n)).collect();
    let (status, answer) = api
        .call(Method::POST, BATCH, Some(json!({ "events": events })))
        .await;
    assert_eq!(status, StatusCode::ACCEPTED, "{answer}");
    let emitted = answer["data"].as_array().expect("a list");
    assert_eq!(emitted.len(), 1_000);
    assert!(
        emitted
            .iter()
            .enumerate()
            .all(|(n, one)| one["id"] == format!("e{n}"))
    );
    receiver.wait_for(1_000).await;
    let (status, again) = api
        .call(Method::POST, BATCH, Some(json!({ "events": events })))
        .await;
    assert_eq!(status, StatusCode::ACCEPTED);
    assert!(
        again["data"]
            .as_array()
            .expect("a list")
            .iter()
            .all(|one| one["duplicate"] == true)
    );
    assert_eq!(count_events(&database).await, 1_000);
}

#[tokio::test]
async fn one_bad_event_refuses_all_and_each_bad_one_is_named() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    let schema = json!({"schemas": {"v1": {"properties": {"n": {"type": "integer"}}}}});
    api.call(Method::PUT, "/event-types/invoice.paid", Some(schema))
        .await;
    let events = json!([
        event("good", 1),
        {"type": "invoice.lost", "data": {}},
        {"type": "invoice.paid", "data": {"n": "x"}},
        {"type": "invoice.paid", "data": {}, "id": "with.dot"},
        event("good_too", 2),
    ]);
    let (status, problem) = api
        .call(Method::POST, BATCH, Some(json!({ "events": events })))
        .await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
    let pointers: Vec<&str> = problem["errors"]
        .as_array()
        .expect("errors")
        .iter()
        .filter_map(|e| e["pointer"].as_str())
        .collect();
    assert_eq!(
        pointers,
        ["/events/1/type", "/events/2/data/n", "/events/3/id"],
        "{problem}"
    );
    assert_eq!(count_events(&database).await, 0);
}

#[tokio::test]
async fn an_id_that_stands_twice_is_refused_beside_whatever_else_is_wrong() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    let unknown = json!({"type": "no.such", "data": {}});
    let events = json!([
        event("a", 1),
        event("b", 1),
        event("a", 1),
        unknown,
        5,
        ["invoice.paid", {}]
    ]);
    let (status, problem) = api
        .call(Method::POST, BATCH, Some(json!({ "events": events })))
        .await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
    let mut pointers: Vec<&str> = problem["errors"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|error| error["pointer"].as_str())
        .collect();
    pointers.sort_unstable();
    assert_eq!(
        pointers,
        ["/events/2/id", "/events/3/type", "/events/4", "/events/5"],
        "{problem}"
    );
    assert_eq!(count_events(&database).await, 0);
}

#[tokio::test]
async fn what_is_too_much_or_broken_is_refused() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    api.event_type("invoice.paid").await;
    let many: Vec<Value> = (0..1_001).map(|n| event(&format!("e{n}"), n)).collect();
    let ten_megabytes = "y".repeat(10 * 1024 * 1024);
    let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    let with = |data: &str| format!(r#"{{"events":[{{"type":"invoice.paid","data":{data}}}]}}"#);
    for (body, expected) in [
        (json!({"events": many}).to_string(), 422),
        (json!({"events": []}).to_string(), 422),
        (json!({}).to_string(), 422),
        (with(&format!(r#"{{"x":"{ten_megabytes}"}}"#)), 413),
        (with(&format!(r#"{{"x":"{}"}}"#, "y".repeat(300_000))), 413),
        (with(&format!(r#"{{"x":{deep}}}"#)), 400),
        (with(r#"{"x":"\ud800"}"#), 400),
        (with(r#"{"x":1e400}"#), 400),
        (with("{\"x\":\"\0\"}"), 400),
        (with("{"), 400),
    ] {
        let shown: String = body.chars().take(60).collect();
        let (status, problem) = api.send(Method::POST, BATCH, Some(body.clone())).await;
        assert_eq!(status.as_u16(), expected, "{shown}: {problem}");
        let single = body
            .strip_prefix(r#"{"events":["#)
            .and_then(|rest| rest.strip_suffix("]}"));
        if let Some(single) = single.filter(|_| body.starts_with(r#"{"events":[{"type""#)) {
            let (status, problem) = api
                .send(Method::POST, "/tenants/acme/events", Some(single.to_owned()))
                .await;
            assert_eq!(status.as_u16(), expected, "{shown}: {problem}");
        }
    }
    let (status, _) = api
        .send_bytes(
            Method::POST,
            BATCH,
            b"{\"events\":[{\"type\":\"invoice.paid\",\"data\":{\"a\":\"\xff\"}}]}".to_vec(),
        )
        .await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    let (status, _) = api
        .call(
            Method::POST,
            "/tenants/nobody/events/batch",
            Some(json!({"events": [event("a", 1)]})),
        )
        .await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert_eq!(count_events(&database).await, 0);
}

#[tokio::test]
async fn one_request_makes_a_hundred_thousand_deliveries_at_most() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    api.event_type("invoice.paid").await;
    let mut connection = database.connect().await;
    sqlx::query(
        "insert into postrider.endpoints (public_id, tenant_id, shard, url, state)
         select 'ep_' || lpad(n::text, 24, '0'), t.id, n % 64, 'http://127.0.0.1:9/', 'paused'
         from postrider.tenants t, generate_series(1, 500) n",
    )
    .execute(&mut connection)
    .await
    .expect("made");
    let batch = |count: usize| {
        let events: Vec<Value> = (0..count)
            .map(|_| json!({"type": "invoice.paid", "data": {}}))
            .collect();
        json!({ "events": events })
    };
    let (status, problem) = api.call(Method::POST, BATCH, Some(batch(201))).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
    assert_eq!(count_events(&database).await, 0);
    let (status, _) = api.call(Method::POST, BATCH, Some(batch(200))).await;
    assert_eq!(status, StatusCode::ACCEPTED);
}

#[tokio::test]
async fn a_batch_from_sql_is_all_or_none_and_batches_in_opposite_order_do_not_deadlock() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    api.event_type("invoice.paid").await;
    let mut connection = database.connect().await;
    let refused = sqlx::query(
        "select postrider.emit_batch('acme', array['invoice.paid', 'invoice.lost'], array['{}', '{}'])",
    )
    .execute(&mut connection)
    .await
    .expect_err("refused");
    let code = refused
        .as_database_error()
        .and_then(|e| e.code())
        .map(String::from);
    assert_eq!(code.as_deref(), Some("PR422"));
    assert!(refused.to_string().contains("event 1"), "{refused}");
    assert_eq!(count_events(&database).await, 0);
    for (batch, position) in [
        (
            "array['invoice.paid', 'invoice.paid'], array['{}', null]",
            "event 1",
        ),
        ("array['invoice.paid'], array[null]", "event 0"),
        ("array['invoice.paid', null], array['{}', '{}']", "event 1"),
    ] {
        let statement = format!("select postrider.emit_batch('acme', {batch})");
        let refused = sqlx::query(sqlx::AssertSqlSafe(statement))
            .execute(&mut connection)
            .await
            .expect_err("refused");
        let code = refused.as_database_error().and_then(|e| e.code());
        assert_eq!(code.as_deref(), Some("PR422"), "{batch}: {refused}");
        assert!(refused.to_string().contains(position), "{batch}: {refused}");
    }
    assert_eq!(count_events(&database).await, 0);

    let mut tasks = tokio::task::JoinSet::new();
    for worker in 0..8 {
        let mut connection = database.connect().await;
        tasks.spawn(async move {
            for round in 0..20 {
                let mut ids: Vec<String> = (0..20).map(|n| format!("r{round}_{n}")).collect();
                let mut keys: Vec<Option<String>> = (0..20).map(|n| Some(format!("k{n}"))).collect();
                if worker % 2 == 1 {
                    ids.reverse();
                    keys.reverse();
                }
                if worker % 4 > 1 {
                    keys = vec![None; 20];
                    ids = ids.into_iter().map(|id| format!("{id}_plain")).collect();
                }
                let mut transaction = connection.begin().await.expect("begun");
                let emitted: Vec<String> =
                    sqlx::query_scalar("select postrider.emit_batch('acme', $1, $2, $3, null, $4)")
                        .bind(vec!["invoice.paid"; 20])
                        .bind(vec!["{}"; 20])
                        .bind(&ids)
                        .bind(&keys)
                        .fetch_all(&mut *transaction)
                        .await
                        .expect("no deadlock");
                assert_eq!(emitted, ids, "in the order given");
                transaction.commit().await.expect("committed");
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.expect("no deadlock");
    }
    assert_eq!(count_events(&database).await, 800);
}

#[tokio::test]
async fn an_id_that_a_batch_repeats_is_one_event_and_waits_for_its_open_twin() {
    const BATCH: &str = "select postrider.emit_batch('acme', $1, $2, $3, null, $4)";
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    api.event_type("invoice.paid").await;
    let mut connection = database.connect().await;
    let batch = |data: Vec<&'static str>, ids: Vec<&'static str>, key: Option<&'static str>| {
        let keys = vec![key; ids.len()];
        sqlx::query_scalar::<_, String>(BATCH)
            .bind(vec!["invoice.paid"; ids.len()])
            .bind(data)
            .bind(ids)
            .bind(keys)
    };
    for _ in 0..2 {
        let ids = batch(vec!["{}"; 3], vec!["b", "a", "b"], Some("k"))
            .fetch_all(&mut connection)
            .await
            .expect("emitted");
        assert_eq!(ids, ["b", "a", "b"]);
    }
    let sequences = "select string_agg(chosen_id || sequence, ' ' order by sequence) from postrider.events";
    assert_eq!(database.text(sequences).await, "b1 a2");
    for (data, ids, position) in [
        (vec!["{}", r#"{"n":2}"#], vec!["c", "a"], "event 1"),
        (vec!["{}", r#"{"n":2}"#], vec!["c", "c"], "event 1"),
    ] {
        let refused = batch(data, ids, Some("k"))
            .fetch_all(&mut connection)
            .await
            .expect_err("refused");
        let code = refused.as_database_error().and_then(|error| error.code());
        assert_eq!(code.as_deref(), Some("PR409"), "{refused}");
        assert!(refused.to_string().contains(position), "{refused}");
    }

    let mut holder = database.connect().await;
    let mut open = holder.begin().await.expect("begun");
    sqlx::query("select postrider.emit('acme', 'invoice.paid', '{}', 'twin')")
        .execute(&mut *open)
        .await
        .expect("emitted");
    let waiting = batch(vec!["{}"; 2], vec!["twin", "alone"], None);
    let waiting = tokio::spawn(async move { waiting.fetch_all(&mut connection).await });
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    assert!(!waiting.is_finished(), "it waits for its twin");
    open.commit().await.expect("committed");
    let ids = waiting.await.expect("answered").expect("emitted");
    assert_eq!(ids, ["twin", "alone"]);
    assert_eq!(count_events(&database).await, 4);
}

#[tokio::test]
async fn requests_that_arrive_together_are_answered_each_for_itself() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({"concurrency": 64})).await;
    // A producer of SQL holds an id: who asks for it waits, the others do not.
    let mut holder = database.connect().await;
    let mut transaction = holder.begin().await.expect("begun");
    sqlx::query("select postrider.emit('acme', 'invoice.paid', '{\"n\":1}', 'held')")
        .execute(&mut *transaction)
        .await
        .expect("emitted");
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..200 {
        let api = api.clone();
        tasks.spawn(async move {
            let (body, expected) = match n % 10 {
                0 => (json!({"type": "invoice.lost", "data": {}}), 422),
                1 => (json!({"type": "invoice.paid", "data": [], "id": "x"}), 422),
                _ => (event(&format!("e{n}"), n), 202),
            };
            let (status, answer) = api.emit("acme", body).await;
            assert_eq!(status.as_u16(), expected, "{answer}");
        });
    }
    let waiting = {
        let api = api.clone();
        tokio::spawn(async move { api.emit("acme", event("held", 1)).await.0 })
    };
    while let Some(done) = tasks.join_next().await {
        done.expect("answered as it should be");
    }
    assert!(!waiting.is_finished(), "it waits for the holder");
    transaction.commit().await.expect("committed");
    assert_eq!(waiting.await.expect("answered"), StatusCode::OK);
    receiver.wait_for(161).await;
    assert_eq!(count_events(&database).await, 161);
}
