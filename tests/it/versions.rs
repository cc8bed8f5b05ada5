//! Versions of event types: which one is the newest, that a published one stays what it is, and endpoints that pin one.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use sqlx::Connection;

use crate::support::{Api, Database, Person, Postrider, Receiver};

const LONG: &str = "123456789012345678901234567890";

async fn put(api: &Api, name: &str, body: &str) -> (StatusCode, Value) {
    api.send(
        Method::PUT,
        &format!("/event-types/{name}"),
        Some(body.to_owned()),
    )
    .await
}

async fn newest(api: &Api, name: &str) -> Value {
    let (_, emitted) = api.emit("acme", json!({"type": name, "data": {}})).await;
    emitted["version"].clone()
}

#[tokio::test]
async fn the_newest_version_is_told_by_its_name_however_they_were_published() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    let sorted = ["1.2", "1.10", "2026-01-15", "v", "v1", "v9", "v10", "v10.1"];
    // All in one request, and one after the other in the opposite order.
    let all: Vec<String> = sorted
        .iter()
        .map(|version| format!("\"{version}\":{{}}"))
        .collect();
    let (status, made) = put(
        &api,
        "a.together",
        &format!("{{\"schemas\":{{{}}}}}", all.join(",")),
    )
    .await;
    assert_eq!(status, StatusCode::CREATED, "{made}");
    let pairs: Vec<(&str, &str)> = made["compatibility"]
        .as_array()
        .expect("reports")
        .iter()
        .map(|one| {
            (
                one["previous_version"].as_str().unwrap_or(""),
                one["version"].as_str().unwrap_or(""),
            )
        })
        .collect();
    let expected: Vec<(&str, &str)> = sorted.windows(2).map(|two| (two[0], two[1])).collect();
    assert_eq!(pairs, expected, "each with the one before it");
    for version in sorted.iter().rev() {
        let (status, told) = put(
            &api,
            "a.apart",
            &format!("{{\"schemas\":{{\"{version}\":{{}}}}}}"),
        )
        .await;
        assert!(status.is_success(), "{told}");
    }
    let mut producer = database.connect().await;
    for name in ["a.together", "a.apart"] {
        let shown = api.get(&format!("/event-types/{name}")).await;
        assert_eq!(shown["versions"], json!(sorted), "{name}");
        assert_eq!(newest(&api, name).await, "v10.1");
        let (_, batch) = api
            .call(
                Method::POST,
                "/tenants/acme/events/batch",
                Some(json!({"events": [{"type": name, "data": {}}, {"type": name, "data": {}, "id": format!("{}-1", &name[2..])}]})),
            )
            .await;
        assert_eq!(batch["data"][0]["version"], "v10.1", "{batch}");
        assert_eq!(batch["data"][1]["version"], "v10.1", "{batch}");
        let id: String = sqlx::query_scalar("select postrider.emit('acme', $1, '{}')")
            .bind(name)
            .fetch_one(&mut producer)
            .await
            .expect("emitted");
        let event = api.get(&format!("/tenants/acme/events/{id}")).await;
        assert_eq!(event["version"], "v10.1", "from SQL");
    }
    // What the database sorts by is what the program sorts by.
    let ranks: Vec<(String, String)> =
        sqlx::query_as("select version, rank from postrider.schemas order by id")
            .fetch_all(&mut producer)
            .await
            .expect("ranks");
    for (version, rank) in ranks {
        assert_eq!(rank, postrider_proto::routing::version_rank(&version));
    }
    let mut person = Person::signed_in(&program).await;
    let (_, page) = person.visit("/event-types/a.apart").await;
    assert!(page.contains("v10.1 (latest)"), "{page}");
    assert!(page.contains("&#34;data&#34;: {}"), "any object is taken: {page}");
    // Each version has its own time of publishing.
    database
        .execute("update postrider.schemas set created_at = '2020-02-03' where version = 'v9'")
        .await;
    assert!(!page.contains("2020-02-03"));
    let (_, page) = person.visit("/event-types/a.apart?version=v9").await;
    assert!(page.contains("2020-02-03"), "{page}");
}

#[tokio::test]
async fn the_first_emit_of_a_version_holds_up_nobody() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    put(&api, "a.b", r#"{"schemas":{"v1":{}}}"#).await;
    let emit = "select postrider.emit('acme', 'a.b', '{}')";
    let (mut slow, mut quick) = (database.connect().await, database.connect().await);
    let mut third = database.connect().await;
    // Its snapshot is of a time when nobody had emitted.
    let mut exact = third
        .begin_with("begin isolation level repeatable read; select 1")
        .await
        .expect("begun");
    let mut open = slow.begin().await.expect("begun");
    sqlx::query(emit).execute(&mut *open).await.expect("emitted");
    sqlx::query("set lock_timeout = '1ms'")
        .execute(&mut quick)
        .await
        .expect("set");
    sqlx::query(emit)
        .execute(&mut quick)
        .await
        .expect("emitted without waiting");
    assert_eq!(newest(&api, "a.b").await, "v1", "over HTTP too");
    open.commit().await.expect("committed");
    let marked = "select count(*) from postrider.schemas s join postrider.event_types y on y.id = s.type_id
                  where y.name = 'a.b' and s.emitted";
    assert_eq!(database.count(marked).await, 1);
    for emit in [
        emit,
        "select postrider.emit_batch('acme', array['a.b'], array['{}'])",
    ] {
        sqlx::query(emit)
            .execute(&mut *exact)
            .await
            .expect("emitted although another was first");
    }
    exact.commit().await.expect("committed");
}

#[tokio::test]
async fn what_was_published_is_the_same_after_its_type_was_deleted() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    let first =
        format!(r#"{{"schemas":{{"v1":{{ "type":"object", "properties":{{"n":{{"maximum":{LONG}}}}} }}}}}}"#);
    assert_eq!(put(&api, "a.b", &first).await.0, StatusCode::CREATED);
    for _ in 0..2 {
        api.call(Method::DELETE, "/event-types/a.b", None).await;
        assert_eq!(
            newest(&api, "a.b").await,
            Value::Null,
            "a deleted type takes nothing"
        );
        // Another schema, and one that differs in the last of thirty digits.
        for other in [
            "{}".to_owned(),
            format!(r#"{{"type":"object","properties":{{"n":{{"maximum":{LONG}1}}}}}}"#),
        ] {
            let (status, problem) = put(&api, "a.b", &format!(r#"{{"schemas":{{"v1":{other}}}}}"#)).await;
            assert_eq!(status, StatusCode::CONFLICT, "{problem}");
        }
        let (status, _) = api.call(Method::GET, "/event-types/a.b", None).await;
        assert_eq!(status, StatusCode::NOT_FOUND, "a refused one is not there");
        assert_eq!(
            put(&api, "a.b", r#"{"schemas":{"v2":{}}}"#).await.0,
            StatusCode::CREATED
        );
        assert_eq!(api.get("/event-types/a.b").await["versions"], json!(["v1", "v2"]));
    }
    // The same value, written in another way.
    let again =
        format!(r#"{{"schemas":{{"v1":{{"properties":{{"n":{{"maximum":{LONG}.0}}}},"type":"object"}}}}}}"#);
    assert_eq!(put(&api, "a.b", &again).await.0, StatusCode::OK);

    // What is shown is the text that came first.
    let shown = api
        .send_bytes(Method::GET, "/event-types/a.b", Vec::new())
        .await
        .1;
    let written = format!(r#""v1":{{ "type":"object", "properties":{{"n":{{"maximum":{LONG}}}}} }}"#);
    assert!(shown.contains(&written), "{shown}");
    let catalogue = api
        .send_bytes(Method::GET, "/catalogue/openapi.json", Vec::new())
        .await
        .1;
    assert!(
        catalogue.contains(&format!(r#""maximum":{LONG}}}"#)),
        "{catalogue}"
    );
    let mut person = Person::signed_in(&program).await;
    let (_, page) = person.visit("/event-types/a.b?version=v1").await;
    assert!(page.contains(LONG), "{page}");
}

#[tokio::test]
async fn a_pin_to_what_is_not_published_is_refused_by_its_place() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    put(&api, "a.b", r#"{"schemas":{"v1":{}}}"#).await;
    let endpoints = "/tenants/acme/endpoints";
    let pinned = |versions: Value| json!({"url": "http://127.0.0.1:9/", "types": ["not.there", "later.*"], "versions": versions});
    let (status, problem) = api
        .call(
            Method::POST,
            endpoints,
            Some(pinned(json!({"a.b": "v2", "c.d": "v1", "E": "v1"}))),
        )
        .await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(problem["errors"][0]["pointer"], "/versions/E", "{problem}");
    let wrong = json!({"a.b": "v2", "c.d": "v1"});
    let (status, problem) = api
        .call(Method::POST, endpoints, Some(pinned(wrong.clone())))
        .await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    let pointers: Vec<&Value> = problem["errors"]
        .as_array()
        .expect("errors")
        .iter()
        .map(|one| &one["pointer"])
        .collect();
    assert_eq!(pointers, ["/versions/a.b", "/versions/c.d"], "{problem}");

    let (status, made) = api
        .call(Method::POST, endpoints, Some(pinned(json!({"a.b": "v1"}))))
        .await;
    assert_eq!(status, StatusCode::CREATED, "{made}");
    let path = format!("{endpoints}/{}", made["id"].as_str().expect("an id"));
    let (status, problem) = api
        .call(Method::PATCH, &path, Some(json!({"versions": wrong})))
        .await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
    // A pin that was there may outlive its type.
    api.call(Method::DELETE, "/event-types/a.b", None).await;
    let change = json!({"versions": {"a.b": "v1"}, "description": "changed"});
    let (status, told) = api.call(Method::PATCH, &path, Some(change)).await;
    assert_eq!(status, StatusCode::OK, "{told}");
}

#[tokio::test]
async fn pages_warn_when_producers_move_past_a_pinned_version() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let pinned = json!({ "versions": { "invoice.paid": "2026-01-15" } });
    let endpoint = api.acme(&receiver.url("/hook"), pinned).await;
    let mut person = Person::signed_in(&program).await;
    let path = format!("/endpoints/{}", endpoint.id);
    let old = "/tenants/acme/events";
    assert!(!person.visit(&path).await.1.contains("is pinned to version"));

    let schemas = r#"{"schemas":{"2026-06-01":{"type":"object"},"2025-12-31":{}}}"#;
    let (status, told) = put(&api, "invoice.paid", schemas).await;
    assert!(status.is_success(), "{told}");
    // An older version that is emitted is no reason to warn.
    for version in ["2026-01-15", "2025-12-31"] {
        let event = json!({"type": "invoice.paid", "version": version, "data": {}});
        let (status, told) = api.call(Method::POST, old, Some(event)).await;
        assert_eq!(status, StatusCode::ACCEPTED, "{told}");
    }
    let (_, page) = person.visit(&path).await;
    assert!(
        page.contains("2026-06-01") && page.contains("is available"),
        "{page}"
    );
    assert!(!person.visit("/endpoints").await.1.contains("outdated version"));
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let (_, page) = person.visit(&path).await;
    assert!(page.contains("Events are now published with version"), "{page}");
    let (_, page) = person.visit("/endpoints").await;
    assert!(
        page.contains("outdated version") && page.contains("published with version 2026-06-01"),
        "{page}"
    );
}

#[tokio::test]
async fn what_is_wrong_with_a_body_is_told_by_its_pointer_and_in_plain_words() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    api.event_type("invoice.paid").await;
    let endpoints = "/tenants/acme/endpoints";
    let events = "/tenants/acme/events";
    let batch = "/tenants/acme/events/batch";
    for (method, path, body, pointer, detail) in [
        (
            Method::POST,
            endpoints,
            r#"{"url":1}"#,
            "/url",
            "must be a string, not a number",
        ),
        (
            Method::POST,
            endpoints,
            r#"{"url":"http://127.0.0.1/","types":["a",1]}"#,
            "/types/1",
            "must be a string, not a number",
        ),
        (
            Method::POST,
            endpoints,
            r#"{"url":"http://127.0.0.1/","concurrency":"4"}"#,
            "/concurrency",
            "must be a whole number, not a string",
        ),
        (
            Method::POST,
            endpoints,
            r#"{"url":"http://127.0.0.1/","filter":{"/a":{"eq":1},"/a":{"eq":2}}}"#,
            "/filter/~1a",
            "is given twice",
        ),
        (
            Method::POST,
            endpoints,
            r#"{"url":"http://127.0.0.1/","filter":{"or":[{"/a":{"eq":1,"eq":2}}]}}"#,
            "/filter/or/0/~1a/eq",
            "is given twice",
        ),
        (
            Method::PUT,
            "/event-types/a.b",
            r#"{"schemas":{"v1":{"properties":{"a":{},"a":{"type":"string"}}}}}"#,
            "/schemas/v1/properties/a",
            "is given twice",
        ),
        (
            Method::PUT,
            "/event-types/a.b",
            r#"{"schemas":{"v1":{},"v1":{"type":"string"}}}"#,
            "/schemas/v1",
            "is given twice",
        ),
        (
            Method::PUT,
            "/event-types/a.b",
            r#"{"schemas":[]}"#,
            "/schemas",
            "must be an object, not an array",
        ),
        (
            Method::PUT,
            "/event-types/a.b",
            r#"{}"#,
            "/schemas",
            "is required",
        ),
        (
            Method::POST,
            events,
            r#"{"type":"invoice.paid"}"#,
            "/data",
            "is required",
        ),
        (
            Method::POST,
            events,
            r#"{"type":5,"data":{}}"#,
            "/type",
            "must be a string, not a number",
        ),
        (
            Method::POST,
            batch,
            r#"{"events":[{"type":"invoice.paid","data":{}},{"type":"invoice.paid","data":{},"id":[]}]}"#,
            "/events/1/id",
            "must be a string, not an array",
        ),
        (
            Method::POST,
            batch,
            r#"{"events":{}}"#,
            "/events",
            "must be an array, not an object",
        ),
    ] {
        let (status, problem) = api.send(method, path, Some(body.to_owned())).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{body} {problem}");
        let told = &problem["errors"][0];
        assert_eq!(
            (&told["pointer"], &told["detail"]),
            (&json!(pointer), &json!(detail)),
            "{body}"
        );
    }
    // The data of an event is the producer's own.
    let twice = r#"{"type":"invoice.paid","data":{"a":1,"a":2}}"#;
    let (status, _) = api.send(Method::POST, events, Some(twice.to_owned())).await;
    assert_eq!(status, StatusCode::ACCEPTED);
}
