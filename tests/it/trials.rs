//! Test events and probes: requests that an endpoint's owner asks for to try it.

use std::{
    collections::HashSet,
    sync::Mutex,
    time::{Duration, Instant},
};

use postrider_proto::signature::{Secret, TOLERANCE_SECONDS};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{Answer, Database, Postrider, Received, Receiver};

/// What a receiver answers to a request, knowing its endpoint's secret.
type Decide = Box<dyn Fn(&Received, &str) -> Answer + Send>;

async fn try_it(program: &Postrider, endpoint: &str, how: &str, body: Option<Value>) -> (StatusCode, Value) {
    let path = format!("/tenants/acme/endpoints/{endpoint}/{how}");
    program.api().call(Method::POST, &path, body).await
}

fn verdict<'a>(report: &'a Value, check: &str) -> &'a str {
    let checks = report["checks"].as_array().expect("checks");
    let found = checks.iter().find(|one| one["check"] == check);
    found
        .and_then(|one| one["verdict"].as_str())
        .unwrap_or_else(|| panic!("no {check} in {report}"))
}

#[tokio::test]
async fn a_test_event_is_signed_marked_and_leaves_no_trace() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    program.api().tenant("acme").await;
    let schema = json!({"type": "object", "required": ["amount", "currency"], "properties": {
        "amount": {"type": "integer", "minimum": 100}, "currency": {"type": "string", "pattern": "^[A-Z]{3}$"}}});
    let put = program
        .api()
        .call(
            Method::PUT,
            "/event-types/invoice.paid",
            Some(json!({"schemas": {"v1": schema}})),
        )
        .await;
    assert_eq!(put.0, StatusCode::CREATED);
    let endpoint = program
        .api()
        .endpoint(
            "acme",
            "",
            json!({"url": receiver.url("/hook"), "types": ["invoice.*"], "headers": {"X-Token": "abc"}}),
        )
        .await;

    let (status, attempt) = try_it(&program, &endpoint.id, "test", None).await;
    assert_eq!(status, StatusCode::OK, "{attempt}");
    assert_eq!(attempt["status"], 204);
    assert_eq!(attempt["outcome"], "accepted");
    assert_eq!(attempt["request_headers"]["x-token"], "[hidden]");
    assert_eq!(attempt["response_body"], Value::Null);
    let got = receiver.wait_for(1).await.remove(0);
    assert_eq!(got.header("webhook-test"), "true");
    assert_eq!(got.header("x-token"), "abc");
    assert_eq!(got.event_id(), attempt["event"]);
    assert_eq!(got.field("type"), "invoice.paid");
    assert_eq!(got.field("api_version"), "v1");
    assert!(got.field("data")["amount"].as_i64() >= Some(100));
    got.verify(&endpoint.secret).expect("a good signature");

    // A refusal is an answer like any other, and neither pauses the endpoint nor is tried again.
    receiver.answer(Answer::Status(410));
    let (_, attempt) = try_it(
        &program,
        &endpoint.id,
        "test",
        Some(json!({"type": "invoice.paid"})),
    )
    .await;
    assert_eq!(attempt["outcome"], "refused");
    assert_eq!(
        program
            .api()
            .get(&format!("/tenants/acme/endpoints/{}", endpoint.id))
            .await["state"],
        "active"
    );
    assert_eq!(program.api().get("/tenants/acme/events").await["data"], json!([]));
    assert!(program.api().deliveries("acme", "").await.is_empty());
    assert_eq!(database.count("select count(*) from postrider.attempts").await, 0);

    let (status, problem) = try_it(&program, &endpoint.id, "test", Some(json!({"type": "no.such"}))).await;
    assert_eq!(
        (status, &problem["errors"][0]["pointer"]),
        (StatusCode::UNPROCESSABLE_ENTITY, &json!("/type"))
    );
    let (status, _) = try_it(&program, "ep_000000000000000000000000", "test", None).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert_eq!(receiver.count(), 2);
}

#[tokio::test]
async fn test_events_are_bounded_by_the_minute_and_obey_the_guard() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    program.api().tenant("acme").await;
    let endpoint = program
        .api()
        .endpoint("acme", "", json!({"url": receiver.url("/")}))
        .await;
    for n in 0..20 {
        let (status, answer) = try_it(&program, &endpoint.id, "test", None).await;
        assert_eq!(status, StatusCode::OK, "{n} {answer}");
    }
    let (status, problem) = try_it(&program, &endpoint.id, "test", None).await;
    assert_eq!(
        (status, &problem["status"]),
        (StatusCode::TOO_MANY_REQUESTS, &json!(429))
    );
    assert_eq!(receiver.count(), 20);
    // Without a type in the catalogue a plain one is sent.
    assert_eq!(receiver.received()[0].field("type"), "postrider.test");

    // The operator has become stricter since the endpoint was saved.
    let strict = Postrider::start_with(&database, &[("POSTRIDER_DENY_NETWORKS", "127.0.0.0/8")]).await;
    let other = program
        .api()
        .endpoint("acme", "", json!({"url": receiver.url("/other")}))
        .await;
    let (status, problem) = try_it(&strict, &other.id, "test", None).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
    assert_eq!(receiver.count(), 20);
}

#[tokio::test]
async fn a_right_receiver_passes_the_probe() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    program.api().tenant("acme").await;
    for format in ["t-v1", "standard"] {
        let body = json!({"url": receiver.url("/"), "signature": format});
        let endpoint = program.api().endpoint("acme", "", body).await;
        let secret = endpoint.secret.clone();
        receiver.decide(move |request| match is_right(request, format, &secret) {
            true => Answer::Status(204),
            false => Answer::Status(401),
        });
        let before = receiver.count();
        let (status, report) = try_it(&program, &endpoint.id, "probe", None).await;
        assert_eq!(status, StatusCode::OK, "{report}");
        // Plain http, which the tests' receiver is, is worth a warning.
        assert_eq!(verdict(&report, "certificate"), "warning");
        assert_eq!(
            (&report["passed"], &report["score"]),
            (&json!(true), &json!(97)),
            "{report:#}"
        );
        assert_eq!(report["requests"], 35);
        let got = receiver.received().split_off(before);
        assert_eq!(got.len(), 35);
        assert!(got.iter().all(|request| request.header("webhook-test") == "true"));
        assert!(
            got.iter()
                .any(|request| request.headers.get("webhook-signature").is_none())
        );
    }
}

fn is_right(request: &Received, format: &str, secret: &str) -> bool {
    request.headers.contains_key("webhook-signature") && request.verifies(format, secret)
}

#[tokio::test]
async fn each_fault_of_a_receiver_is_found_by_its_name() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    program.api().tenant("acme").await;
    let probe = async |decide: Decide| {
        let receiver = Receiver::start().await;
        let endpoint = program
            .api()
            .endpoint("acme", "", json!({"url": receiver.url("/")}))
            .await;
        let secret = endpoint.secret.clone();
        receiver.decide(move |request| decide(request, &secret));
        let (status, report) = try_it(&program, &endpoint.id, "probe", None).await;
        assert_eq!(status, StatusCode::OK, "{report}");
        report
    };
    let failed = |report: &Value| -> Vec<String> {
        let checks = report["checks"].as_array().expect("checks");
        let bad = checks.iter().filter(|one| one["verdict"] == "fail");
        bad.map(|one| one["check"].as_str().expect("a name").to_owned())
            .collect()
    };

    let trusting = probe(Box::new(|_, _| Answer::Status(200))).await;
    assert_eq!(
        failed(&trusting),
        [
            "changed_body",
            "stale_timestamp",
            "wrong_signature",
            "missing_signature"
        ]
    );
    assert_eq!(trusting["passed"], false);

    // Looks at the first signature only, and has no eye for the clock.
    let hasty = probe(Box::new(|request, secret| {
        let t = request
            .headers
            .get("webhook-signature")
            .map(|_| request.signed_at());
        let first = request.headers.get("webhook-signature").and_then(|value| {
            let mut parts = value.to_str().ok()?.split(',');
            Some(format!("{},{}", parts.next()?, parts.next()?))
        });
        let good = t.zip(first).is_some_and(|(t, first)| {
            postrider_proto::signature::verify(&first, &request.body, &[Secret::new(secret)], t).is_ok()
        });
        Answer::Status(if good { 200 } else { 403 })
    }))
    .await;
    assert_eq!(
        failed(&hasty),
        ["stale_timestamp", "rotation"],
        "{TOLERANCE_SECONDS}"
    );

    // Calls a duplicate an error.
    let seen = Mutex::new(HashSet::new());
    let forgetful = probe(Box::new(move |request, secret| {
        if !is_right(request, "t-v1", secret) {
            return Answer::Status(401);
        }
        let new = seen
            .lock()
            .expect("not poisoned")
            .insert(request.event_id().to_owned());
        Answer::Status(if new { 200 } else { 409 })
    }))
    .await;
    assert_eq!(failed(&forgetful), ["duplicate", "concurrent_duplicates"]);

    let moved = probe(Box::new(|_, _| {
        Answer::Redirect("http://127.0.0.1:1/".to_owned())
    }))
    .await;
    assert_eq!(failed(&moved), ["valid_event", "no_redirect"]);
    assert_eq!(
        (verdict(&moved, "wrong_signature"), &moved["requests"]),
        ("skipped", &json!(1))
    );
}

#[tokio::test]
async fn a_probe_of_a_receiver_that_hangs_ends_in_time() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    program.api().tenant("acme").await;
    let endpoint = program
        .api()
        .endpoint("acme", "", json!({"url": receiver.url("/"), "timeout_ms": 300}))
        .await;
    receiver.answer(Answer::Hold);
    let began = Instant::now();
    let (status, report) = try_it(&program, &endpoint.id, "probe", None).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(
        (verdict(&report, "valid_event"), &report["score"]),
        ("fail", &json!(2)),
        "{report}"
    );
    assert!(began.elapsed() < Duration::from_secs(10));
}
