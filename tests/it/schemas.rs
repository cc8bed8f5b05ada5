//! Event types and their schemas: what does not fit is refused with everything that is wrong, and nothing is stored.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{Api, Database, Postrider, Receiver};

fn invoice() -> Value {
    json!({
        "type": "object", "required": ["id", "amount"],
        "properties": {
            "id": {"type": "string"},
            "amount": {"type": "integer", "minimum": 0},
            "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
        },
        "$defs": {"line": {"type": "object", "required": ["sku"]}},
    })
}

async fn put(api: &Api, name: &str, body: Value) -> (StatusCode, Value) {
    api.call(Method::PUT, &format!("/event-types/{name}"), Some(body))
        .await
}

fn pointers(problem: &Value) -> Vec<&str> {
    let errors = problem["errors"].as_array().expect("a list of errors");
    let mut pointers: Vec<&str> = errors.iter().filter_map(|e| e["pointer"].as_str()).collect();
    pointers.sort_unstable();
    pointers
}

#[tokio::test]
async fn data_that_breaks_its_schema_is_refused_with_every_error_and_leaves_nothing() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    let (status, _) = put(&api, "invoice.sent", json!({"schemas": {"v1": invoice()}})).await;
    assert_eq!(status, StatusCode::CREATED);

    let bad = json!({"amount": -1, "lines": [{"sku": 1}, {}, 3]});
    let (status, problem) = api
        .emit("acme", json!({"type": "invoice.sent", "data": bad}))
        .await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
    assert_eq!(
        pointers(&problem),
        ["/data", "/data/amount", "/data/lines/1", "/data/lines/2"],
        "{problem}"
    );
    let good = json!({"id": "a", "amount": 1, "lines": [{"sku": 1}]});
    let (status, _) = api
        .emit("acme", json!({"type": "invoice.sent", "data": good}))
        .await;
    assert_eq!(status, StatusCode::ACCEPTED);
    let list = api.get("/tenants/acme/events").await;
    assert_eq!(list["data"].as_array().map(Vec::len), Some(1), "{list}");
}

#[tokio::test]
async fn a_new_version_is_what_the_next_emit_is_checked_against_and_what_it_breaks_is_told() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    let emit = |version: Option<&str>| {
        let mut event = json!({"type": "invoice.sent", "data": {"id": "a", "amount": 1}});
        if let Some(version) = version {
            event["version"] = json!(version);
        }
        let api = api.clone();
        async move { api.emit("acme", event).await }
    };
    put(&api, "invoice.sent", json!({"schemas": {"v1": invoice()}})).await;
    assert_eq!(emit(None).await.1["version"], "v1");

    let mut stricter = invoice();
    stricter["required"] = json!(["id", "amount", "currency"]);
    stricter["properties"]["id"]["type"] = json!("integer");
    stricter["properties"]
        .as_object_mut()
        .expect("an object")
        .remove("lines");
    let body = json!({"schemas": {"v1": invoice(), "v2": stricter}});
    let (status, made) = put(&api, "invoice.sent", body.clone()).await;
    assert_eq!(status, StatusCode::OK, "{made}");
    let report = &made["compatibility"][0];
    assert_eq!(
        (&report["version"], &report["previous_version"]),
        (&json!("v2"), &json!("v1"))
    );
    let mut breaks: Vec<(String, String)> = report["breaking_changes"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|one| (one["pointer"].to_string(), one["change"].to_string()))
        .collect();
    breaks.sort();
    let expected = [
        ("\"/currency\"", "\"newly_required\""),
        ("\"/id\"", "\"narrowed_type\""),
        ("\"/lines\"", "\"removed_property\""),
    ];
    assert_eq!(breaks, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
    // A cache that knew only v1 is not asked any more, and the old version is still there by its name.
    assert_eq!(emit(None).await.0, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(emit(Some("v1")).await.0, StatusCode::ACCEPTED);
    assert_eq!(emit(Some("v3")).await.0, StatusCode::UNPROCESSABLE_ENTITY);
    let (_, again) = put(&api, "invoice.sent", body).await;
    assert_eq!(again["compatibility"], Value::Null, "nothing was added: {again}");

    let other = json!({"schemas": {"v1": {"type": "object"}}});
    assert_eq!(put(&api, "invoice.sent", other).await.0, StatusCode::CONFLICT);
}

#[tokio::test]
async fn a_schema_that_can_t_be_used_is_never_published() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    for bad in [
        json!({"type": "strng"}),
        json!({"required": "id"}),
        json!({"properties": {"a": {"pattern": "("}}}),
        json!({"$ref": "https://example.com/schema.json"}),
        json!({"$ref": "file:///etc/passwd"}),
        json!({"$ref": "#"}),
        json!([]),
        json!("object"),
    ] {
        let (status, problem) = put(&api, "a.b", json!({"schemas": {"v1": bad}})).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{bad}: {problem}");
        let pointer = problem["errors"][0]["pointer"].as_str().unwrap_or_default();
        assert!(pointer.starts_with("/schemas/v1"), "{problem}");
    }
    let deep = format!(
        r#"{{"schemas":{{"v1":{}{}}}}}"#,
        r#"{"not":"#.repeat(10_000),
        "}".repeat(10_000)
    );
    let (status, _) = api.send(Method::PUT, "/event-types/a.b", Some(deep)).await;
    assert!(status.is_client_error(), "{status}");
    let (status, _) = api.call(Method::GET, "/event-types/a.b", None).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_version_added_without_a_description_keeps_the_description() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    let description = async |body| {
        let (status, told) = put(&api, "a.b", body).await;
        assert!(status.is_success(), "{told}");
        told["description"].clone()
    };
    let first = json!({"description": "An invoice was paid", "schemas": {"v1": {}}});
    assert_eq!(description(first).await, "An invoice was paid");
    let second = json!({"schemas": {"v2": {}}});
    assert_eq!(description(second).await, "An invoice was paid");
    let removed = json!({"description": null, "schemas": {"v2": {}}});
    assert_eq!(description(removed).await, json!(null));
    // A type that was deleted and is created again starts anew.
    description(json!({"description": "Old", "schemas": {"v2": {}}})).await;
    api.call(Method::DELETE, "/event-types/a.b", None).await;
    assert_eq!(description(json!({"schemas": {"v2": {}}})).await, json!(null));
}

#[tokio::test]
async fn the_catalogue_is_an_openapi_document_of_webhooks() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    put(
        &api,
        "invoice.sent",
        json!({"description": "Sent", "schemas": {"v1": invoice()}}),
    )
    .await;
    let document = api.get("/catalogue/openapi.json").await;
    assert_eq!(document["openapi"], "3.1.0");
    let body = &document["webhooks"]["invoice.sent"]["post"]["requestBody"]["content"]["application/json"];
    let data = &body["schema"]["oneOf"][0]["properties"]["data"]["$ref"];
    assert_eq!(data, "#/components/schemas/invoice.sent.v1");
    let schema = &document["components"]["schemas"]["invoice.sent.v1"];
    assert_eq!(schema["required"], invoice()["required"]);
}

#[tokio::test]
async fn a_thin_event_carries_its_object_only_and_the_rest_is_fetched_with_a_tenant_s_key() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.tenant("acme").await;
    let thin = json!({"thin": true, "schemas": {"v1": {"required": ["secret_note"]}}});
    put(&api, "note.written", thin).await;
    api.endpoint("acme", &receiver.url("/hook"), json!({})).await;
    let data = r#"{"id":"note_1","object":"note","secret_note":"for your eyes","n":1.0}"#;
    let event = format!(r#"{{"type":"note.written","data":{data}}}"#);
    let (status, emitted) = api.send(Method::POST, "/tenants/acme/events", Some(event)).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{emitted}");

    let received = receiver.wait_for(1).await.remove(0);
    let body = String::from_utf8_lossy(&received.body).into_owned();
    assert!(
        body.ends_with(r#""data":{"object":"note","id":"note_1"}}"#),
        "{body}"
    );
    let (_, key) = api
        .call(
            Method::POST,
            "/api-keys",
            Some(json!({"role": "tenant", "tenant": "acme", "name": "theirs"})),
        )
        .await;
    let theirs = program.api_with_key(key["key"].as_str().expect("a key"));
    let path = format!("/tenants/acme/events/{}", received.event_id());
    assert_eq!(theirs.get(&path).await["data"]["secret_note"], "for your eyes");
}

/// Each node is one of two kinds, and each kind has a child that is a node.
fn tree() -> Value {
    let kind = |name: &str| {
        json!({
            "type": "object", "required": ["kind"],
            "properties": {"kind": {"const": name}, "child": {"$ref": "#/$defs/node"}},
        })
    };
    let any = json!({"type": "object", "properties": {"child": {"$ref": "#/$defs/node"}}, "required": ["a"]});
    let other =
        json!({"type": "object", "properties": {"child": {"$ref": "#/$defs/node"}}, "required": ["b"]});
    json!({
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/node"}, "told_apart": {"$ref": "#/$defs/kinds"}},
        "$defs": {
            "node": {"oneOf": [any, other]},
            "kinds": {"oneOf": [kind("x"), kind("y")]},
        },
    })
}

fn nested(depth: usize, leaf: Value) -> Value {
    (0..depth).fold(leaf, |child, _| json!({"a": 1, "b": 1, "child": child}))
}

#[tokio::test]
async fn data_that_is_too_complex_for_its_schema_is_refused_and_delays_nobody() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    api.tenant("other").await;
    let (status, problem) = put(&api, "tree.grown", json!({"schemas": {"v1": tree()}})).await;
    assert_eq!(status, StatusCode::CREATED, "{problem}");

    let mut bad = tokio::task::JoinSet::new();
    for n in 0..8 {
        let api = api.clone();
        let data = json!({"root": nested(60, json!({"n": n}))});
        bad.spawn(async move {
            api.emit("acme", json!({"type": "tree.grown", "data": data}))
                .await
        });
    }
    for _ in 0..10 {
        let emitted = api.emit("other", json!({"type": "invoice.paid", "data": {}}));
        let answered = tokio::time::timeout(std::time::Duration::from_secs(2), emitted).await;
        let (status, told) = answered.expect("another tenant is answered");
        assert_eq!(status, StatusCode::ACCEPTED, "{told}");
    }
    let all = async {
        while let Some(answered) = bad.join_next().await {
            let (status, problem) = answered.expect("no panic");
            assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
            let pointers = pointers(&problem);
            assert!(pointers.iter().all(|one| one.starts_with("/data")), "{problem}");
        }
    };
    let answered = tokio::time::timeout(std::time::Duration::from_secs(20), all).await;
    answered.expect("each of them is answered");

    let data = json!({"root": nested(60, json!({"a": 1}))});
    let (status, _) = api
        .emit("acme", json!({"type": "tree.grown", "data": data}))
        .await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    let fits = (0..60).fold(json!({"a": 1}), |child, _| json!({"a": 1, "child": child}));
    let (status, told) = api
        .emit("acme", json!({"type": "tree.grown", "data": {"root": fits}}))
        .await;
    assert_eq!(status, StatusCode::ACCEPTED, "{told}");
}
