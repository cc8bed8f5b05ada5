//! Emit: the event exists if and only if the producer's transaction does, and arrives as the bytes that were stored.

use std::{collections::BTreeSet, time::Instant};

use reqwest::{Method, StatusCode};
use serde_json::json;
use sqlx::{Connection, PgConnection};

use crate::support::{Database, Postrider, Receiver};

const EMIT: &str = "select postrider.emit(tenant => $1, type => $2, data => $3, id => $4)";

async fn emit(
    connection: &mut PgConnection,
    tenant: &str,
    event_type: &str,
    data: &str,
    id: Option<&str>,
) -> Result<String, String> {
    let emitted = sqlx::query_scalar(EMIT)
        .bind(tenant)
        .bind(event_type)
        .bind(data)
        .bind(id);
    emitted.fetch_one(connection).await.map_err(|error| match error {
        sqlx::Error::Database(error) => error.code().map(Into::into).unwrap_or_default(),
        other => panic!("{other}"),
    })
}

async fn stored_body(connection: &mut PgConnection, id: &str) -> Vec<u8> {
    sqlx::query_scalar(
        "select body from postrider.events
         where coalesce(chosen_id, 'evt_' || replace(id::text, '-', '')) = $1",
    )
    .bind(id)
    .fetch_one(connection)
    .await
    .expect("stored")
}

async fn count_events(connection: &mut PgConnection) -> i64 {
    sqlx::query_scalar("select count(*) from postrider.events")
        .fetch_one(connection)
        .await
        .expect("counted")
}

#[tokio::test]
async fn a_rolled_back_event_is_never_sent_and_a_committed_one_arrives_as_stored() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    let mut producer = database.connect().await;

    let mut tx = producer.begin().await.expect("begun");
    emit(&mut tx, "acme", "invoice.paid", "{}", Some("never"))
        .await
        .expect("emitted");
    tx.rollback().await.expect("rolled back");
    let mut tx = producer.begin().await.expect("begun");
    let id = emit(&mut tx, "acme", "invoice.paid", r#"{"id":"inv_1"}"#, None)
        .await
        .expect("emitted");
    tx.commit().await.expect("committed");

    let received = receiver.wait_for(1).await;
    program.api().wait_for_state("acme", "delivered", 1).await;
    assert_eq!(receiver.received().len(), 1, "only what was committed");
    assert_eq!(received[0].event_id(), id);
    assert_eq!(received[0].method, "POST");
    assert_eq!(received[0].header("content-type"), "application/json");
    assert!(received[0].header("user-agent").starts_with("Postrider/"));
    assert_eq!(received[0].body, stored_body(&mut producer, &id).await);
    assert_eq!(count_events(&mut producer).await, 1);
}

#[tokio::test]
async fn an_idle_system_delivers_a_sql_emit_within_a_tenth_of_a_second() {
    const EVENTS: usize = 21;
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    let mut producer = database.connect().await;
    // The first request opens the connection and finds the shards taken.
    emit(&mut producer, "acme", "invoice.paid", "{}", None)
        .await
        .expect("emitted");
    receiver.wait_for(1).await;

    let mut waits = Vec::new();
    for number in 0..EVENTS {
        emit(&mut producer, "acme", "invoice.paid", "{}", None)
            .await
            .expect("emitted");
        let committed = Instant::now();
        let received = receiver.wait_for(number + 2).await;
        waits.push(received[number + 1].at.saturating_duration_since(committed));
    }
    waits.sort();
    assert!(waits[EVENTS / 2].as_millis() < 100, "the median of {waits:?}");
}

#[tokio::test]
async fn the_same_id_is_sent_once_and_other_content_under_it_is_refused() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    let mut producer = database.connect().await;
    for _ in 0..3 {
        let id = emit(
            &mut producer,
            "acme",
            "invoice.paid",
            r#"{"n":1}"#,
            Some("evt_own"),
        )
        .await;
        assert_eq!(id.as_deref(), Ok("evt_own"));
    }
    let refused = emit(
        &mut producer,
        "acme",
        "invoice.paid",
        r#"{"n":2}"#,
        Some("evt_own"),
    )
    .await;
    assert_eq!(refused, Err("PR409".to_owned()));

    let event = |n: u32| json!({ "id": "over_http", "type": "invoice.paid", "data": { "n": n } });
    assert_eq!(api.emit("acme", event(1)).await.0, StatusCode::ACCEPTED);
    assert_eq!(api.emit("acme", event(1)).await.0, StatusCode::OK);
    assert_eq!(api.emit("acme", event(2)).await.0, StatusCode::CONFLICT);

    api.wait_for_state("acme", "delivered", 2).await;
    let ids: Vec<String> = receiver
        .received()
        .iter()
        .map(|r| r.event_id().to_owned())
        .collect();
    assert_eq!(ids.len(), 2, "{ids:?}");
    assert_eq!(
        ids.iter().map(String::as_str).collect::<BTreeSet<_>>(),
        BTreeSet::from(["evt_own", "over_http"])
    );
}

#[tokio::test]
async fn sql_refusals_have_their_codes_and_leave_nothing() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    let mut producer = database.connect().await;
    let large = format!(r#"{{"x":"{}"}}"#, "y".repeat(256 * 1024));
    let deep = format!(r#"{{"x":{}{}}}"#, "[".repeat(200), "]".repeat(200));
    for (tenant, event_type, data, id, code) in [
        ("nobody", "invoice.paid", "{}", None, "PR404"),
        ("acme", "invoice.lost", "{}", None, "PR422"),
        ("acme", "invoice.paid", "[1]", None, "PR422"),
        ("acme", "invoice.paid", "{", None, "PR422"),
        ("acme", "invoice.paid", "null", None, "PR422"),
        ("acme", "invoice.paid", large.as_str(), None, "PR422"),
        ("acme", "invoice.paid", deep.as_str(), None, "PR422"),
        ("acme", "invoice.paid", "{}", Some("with.dot"), "PR422"),
        ("acme", "invoice.paid", "{}", Some(""), "PR422"),
    ] {
        let refused = emit(&mut producer, tenant, event_type, data, id).await;
        assert_eq!(refused, Err(code.to_owned()), "{tenant} {event_type} {id:?}");
    }
    assert_eq!(count_events(&mut producer).await, 0);
}

#[tokio::test]
async fn http_refusals_are_clear_and_leave_nothing() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    let large = format!(
        r#"{{"type":"invoice.paid","data":{{"x":"{}"}}}}"#,
        "y".repeat(256 * 1024)
    );
    for (tenant, body, statuses) in [
        ("nobody", r#"{"type":"invoice.paid","data":{}}"#, &[404][..]),
        ("acme", r#"{"type":"invoice.lost","data":{}}"#, &[422]),
        ("acme", r#"{"type":"invoice.paid","data":[]}"#, &[400, 422]),
        ("acme", r#"{"type":"invoice.paid"}"#, &[400, 422]),
        ("acme", r#"{"type":"invoice.paid","data":{}"#, &[400]),
        (
            "acme",
            r#"{"type":"invoice.paid","data":{},"id":"with.dot"}"#,
            &[422],
        ),
        ("acme", large.as_str(), &[413, 422]),
    ] {
        let path = format!("/tenants/{tenant}/events");
        let (status, problem) = api.send(Method::POST, &path, Some(body.to_owned())).await;
        let body = &body[..body.len().min(80)];
        assert!(statuses.contains(&status.as_u16()), "{body}: {status} {problem}");
        assert!(
            problem["title"].is_string() && problem["status"] == status.as_u16(),
            "{body}: {problem}"
        );
    }
    assert_eq!(count_events(&mut database.connect().await).await, 0);
}

#[tokio::test]
async fn a_role_that_may_only_call_emit_can_emit_and_read_nothing() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    let mut producer = database.producer().await;
    let id = emit(&mut producer, "acme", "invoice.paid", "{}", None)
        .await
        .expect("emitted");
    assert_eq!(receiver.wait_for(1).await[0].event_id(), id);
    for table in ["events", "queue", "endpoints", "secrets", "api_keys"] {
        let read = sqlx::query(sqlx::AssertSqlSafe(format!("select from postrider.{table}")))
            .fetch_all(&mut producer)
            .await;
        assert!(read.is_err(), "{table} can't be read");
    }
}

#[tokio::test]
async fn unusual_json_arrives_byte_for_byte() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    let mut producer = database.connect().await;
    let unusual = [
        r#"{"b":1,"a":2,"b":3}"#,
        r#"{ "spaced" :	[ 1 , 2 ]
}"#,
        r#"{"n":1.0,"m":1,"e":1E+2,"z":-0,"long":123456789012345678901234567890}"#,
        r#"{"u":"żółć 🚚 \u017c \ud83d\ude9a \u0000 \/ \" \\"}"#,
        r#"{"":{"":[]},"line":"\n","sep":" "}"#,
    ];
    for (number, data) in unusual.iter().enumerate() {
        let id = format!("sql_{number}");
        emit(&mut producer, "acme", "invoice.paid", data, Some(&id))
            .await
            .expect("emitted");
        let event = format!(r#"{{"type":"invoice.paid","id":"http_{number}","data":{data}}}"#);
        let (status, answer) = program
            .api()
            .send(Method::POST, "/tenants/acme/events", Some(event))
            .await;
        assert_eq!(status, StatusCode::ACCEPTED, "{answer}");
    }
    // What `jsonb` does not hold, and HTTP refuses: a producer's transaction must not break by it.
    let beyond = [r#"{"a":1e131072}"#, r#"{"a":"\ud800"}"#];
    let unusual = [unusual.as_slice(), &beyond].concat();
    for (number, data) in unusual.iter().enumerate().skip(unusual.len() - beyond.len()) {
        emit(
            &mut producer,
            "acme",
            "invoice.paid",
            data,
            Some(&format!("sql_{number}")),
        )
        .await
        .expect("emitted");
    }
    let received = receiver.wait_for(2 * unusual.len() - beyond.len()).await;
    for request in &received {
        let number: usize = request
            .event_id()
            .rsplit('_')
            .next()
            .and_then(|n| n.parse().ok())
            .expect("numbered");
        let tail = format!(r#","data":{}}}"#, unusual[number]);
        assert!(request.body.ends_with(tail.as_bytes()), "{:?}", request.body);
        assert_eq!(request.body, stored_body(&mut producer, request.event_id()).await);
    }
}
