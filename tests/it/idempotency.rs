//! `Idempotency-Key`: the work is done once, and its answer is given as often as it is asked for.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{Answer, Database, Postrider, Receiver, until};

fn event() -> Value {
    json!({"type": "invoice.paid", "data": {"id": "inv_1"}})
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
async fn fifty_at_once_do_the_work_once() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..50 {
        let api = api.clone();
        tasks.spawn(async move { api.post_with_key("/tenants/acme/events", "once", event()).await });
    }
    let mut ids = std::collections::BTreeSet::new();
    while let Some(answer) = tasks.join_next().await {
        let (status, replayed, body) = answer.expect("no panic");
        match status {
            StatusCode::ACCEPTED => {
                ids.insert(body["id"].as_str().expect("an id").to_owned());
            }
            StatusCode::CONFLICT => assert!(!replayed, "{body}"),
            other => panic!("{other}: {body}"),
        }
    }
    assert_eq!(ids.len(), 1);
    assert_eq!(count(&database, "events").await, 1);
    let (status, replayed, body) = api.post_with_key("/tenants/acme/events", "once", event()).await;
    assert_eq!((status, replayed), (StatusCode::ACCEPTED, true));
    assert_eq!(body["data"], event()["data"]);
    assert!(ids.contains(body["id"].as_str().expect("an id")));
    api.wait_for_state("acme", "delivered", 1).await;
    assert_eq!(receiver.received().len(), 1);
}

#[tokio::test]
async fn a_key_belongs_to_its_route_its_caller_and_its_body() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    api.tenant("other").await;
    let post = async |path: &str, body: Value| api.post_with_key(path, "k", body).await;
    assert_eq!(
        post("/tenants/acme/events", event()).await.0,
        StatusCode::ACCEPTED
    );
    let (status, _, problem) = post(
        "/tenants/acme/events",
        json!({"type": "invoice.paid", "data": {"id": 2}}),
    )
    .await;
    assert_eq!(status, StatusCode::CONFLICT, "{problem}");
    let (status, replayed, _) = post("/tenants/other/events", event()).await;
    assert_eq!((status, replayed), (StatusCode::ACCEPTED, false));
    let (_, made) = api
        .call(
            Method::POST,
            "/api-keys",
            Some(json!({"role": "producer", "name": "p"})),
        )
        .await;
    let producer = program.api_with_key(made["key"].as_str().expect("a key"));
    let (status, replayed, _) = producer.post_with_key("/tenants/acme/events", "k", event()).await;
    assert_eq!((status, replayed), (StatusCode::ACCEPTED, false));
    assert_eq!(count(&database, "events").await, 3);

    // A refusal did nothing: it is not kept, and the key is free for the body that is mended.
    let (status, _, _) = api
        .post_with_key(
            "/tenants/acme/events",
            "mended",
            json!({"type": "none", "data": {}}),
        )
        .await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    let (status, replayed, _) = api.post_with_key("/tenants/acme/events", "mended", event()).await;
    assert_eq!((status, replayed), (StatusCode::ACCEPTED, false));
}

#[tokio::test]
async fn a_secret_in_an_answer_is_given_again_and_lies_nowhere_in_clear() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.tenant("acme").await;
    let body = json!({"url": receiver.url("/hook")});
    let key = json!({"role": "producer", "name": "p"});
    let (status, _, first) = api
        .post_with_key("/tenants/acme/endpoints", "e", body.clone())
        .await;
    assert_eq!(status, StatusCode::CREATED, "{first}");
    let (_, replayed, again) = api.post_with_key("/tenants/acme/endpoints", "e", body).await;
    assert!(replayed);
    assert_eq!(first, again);
    let (_, _, made) = api.post_with_key("/api-keys", "k", key.clone()).await;
    let (_, replayed, again) = api.post_with_key("/api-keys", "k", key).await;
    assert!(replayed);
    assert_eq!(made, again);
    assert_eq!(count(&database, "endpoints").await, 1);
    let mut connection = database.connect().await;
    let stored: Vec<Vec<u8>> = sqlx::query_scalar("select response from postrider.idempotency")
        .fetch_all(&mut connection)
        .await
        .expect("read");
    assert_eq!(stored.len(), 2);
    for answer in stored {
        let text = String::from_utf8_lossy(&answer).into_owned();
        assert!(!text.contains("whsec_") && !text.contains("prk_"), "{text}");
    }
}

#[tokio::test]
async fn a_key_of_the_wrong_form_is_refused() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    for bad in [
        String::new(),
        " ".to_owned(),
        "a".repeat(256),
        "a".repeat(7_000),
        "schlüssel".to_owned(),
    ] {
        let (status, _, problem) = api.post_with_key("/tenants/acme/events", &bad, event()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{bad:.20}: {problem}");
    }
}

/// Killed again and again while requests with keys are on their way, each of which is repeated until it is answered.
#[tokio::test]
async fn through_kills_each_key_makes_one_event_and_one_answer() {
    const KEYS: usize = 60;
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    program.api().tenant("acme").await;
    program.api().event_type("invoice.paid").await;
    let mut answered = std::collections::BTreeMap::new();
    for round in 0..4 {
        let api = program.api();
        let mut tasks = tokio::task::JoinSet::new();
        for number in (0..KEYS).filter(|number| !answered.contains_key(number)) {
            let api = api.clone();
            tasks.spawn(async move {
                let key = format!("key-{number}");
                let answer = api.try_post_with_key("/tenants/acme/events", &key, event()).await;
                (number, answer)
            });
        }
        if round < 3 {
            // In the middle of it: some are done, some are on the way.
            until("some are stored", || async {
                (count(&database, "idempotency").await > round * 10).then_some(())
            })
            .await;
            program.kill();
        }
        while let Some(task) = tasks.join_next().await {
            if let (number, Some((StatusCode::ACCEPTED, _, body))) = task.expect("no panic") {
                answered.insert(number, body["id"].as_str().expect("an id").to_owned());
            }
        }
        if round < 3 {
            program.restart().await;
        }
    }
    assert_eq!(answered.len(), KEYS);
    assert_eq!(count(&database, "events").await, KEYS as i64);
    for (number, id) in answered {
        let key = format!("key-{number}");
        let (_, replayed, body) = program
            .api()
            .post_with_key("/tenants/acme/events", &key, event())
            .await;
        assert!(replayed);
        assert_eq!(body["id"], id, "the first answer again");
    }
}

#[tokio::test]
async fn a_test_event_and_a_probe_that_still_run_are_not_sent_a_second_time() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Hold);
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    let path = |what: &str| format!("/tenants/acme/endpoints/{}/{what}", endpoint.id);
    for (held, what) in ["test", "probe"].into_iter().enumerate() {
        let first = tokio::spawn({
            let (api, path) = (api.clone(), path(what));
            async move { api.post_with_key(&path, "once", json!({})).await }
        });
        receiver.wait_for(held + 1).await;
        let (status, _, problem) = api.post_with_key(&path(what), "once", json!({})).await;
        assert_eq!(status, StatusCode::CONFLICT, "{problem}");
        let detail = problem["detail"].as_str().expect("a sentence");
        assert!(detail.contains("still in progress"), "{problem}");
        if what == "test" {
            assert_eq!(receiver.count(), 1);
            // It ends by itself: the receiver does not answer.
            let (status, replayed, attempt) = first.await.expect("no panic");
            assert_eq!((status, replayed), (StatusCode::OK, false), "{attempt}");
            let (status, replayed, again) = api.post_with_key(&path(what), "once", json!({})).await;
            assert_eq!((status, replayed), (StatusCode::OK, true), "{again}");
            assert_eq!(again, attempt);
            assert_eq!(receiver.count(), 1, "sent once");
        } else {
            receiver.release();
            assert_eq!(first.await.expect("no panic").0, StatusCode::OK);
        }
    }
    // A refusal is not kept, and leaves nothing behind that would hold up the next.
    for _ in 0..2 {
        let body = json!({ "type": "no.such" });
        let (status, _, problem) = api.post_with_key(&path("test"), "refused", body).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
    }
    assert_eq!(count(&database, "idempotency_claims").await, 0);
}

#[tokio::test]
async fn a_request_after_a_refusal_with_its_key_is_not_taken_for_running() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    let rotate = format!("/tenants/acme/endpoints/{}/secret/rotate", endpoint.id);
    let bad_event = json!({ "type": "no.such", "data": {} });
    let bad_batch = json!({ "events": [bad_event.clone()] });
    let refused = [
        ("/tenants/acme/events".to_owned(), bad_event, event()),
        (
            "/tenants/acme/events/batch".to_owned(),
            bad_batch,
            json!({ "events": [event()] }),
        ),
        (
            rotate,
            json!({ "secret": "short" }),
            json!({ "overlap_seconds": 0 }),
        ),
        (
            "/api-keys".to_owned(),
            json!({ "role": "tenant", "tenant": "nobody", "name": "n" }),
            json!({ "role": "producer", "name": "n" }),
        ),
    ];
    // Side by side, so that what a refused request left behind has to wait for its turn.
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..12 {
        let (api, refused) = (program.api(), refused.clone());
        clients.spawn(async move {
            for n in 0..160 {
                let (path, bad, good) = &refused[(client + n) % refused.len()];
                let key = format!("again {client} {n}");
                let (status, _, problem) = api.post_with_key(path, &key, bad.clone()).await;
                assert!(status.is_client_error(), "{path}: {problem}");
                let (status, replayed, told) = api.post_with_key(path, &key, good.clone()).await;
                assert!(status.is_success() && !replayed, "{n} {path}: {status} {told}");
            }
        });
    }
    while let Some(ended) = clients.join_next().await {
        ended.expect("each is done once it is right");
    }
}

#[tokio::test]
async fn a_client_can_tell_the_three_conflicts_apart() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Hold);
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    let of = |name: &str| format!("urn:postrider:problem:{name}");

    api.post_with_key("/tenants/acme/events", "one", event()).await;
    let other = json!({ "type": "invoice.paid", "data": { "other": 1 } });
    let (status, _, problem) = api
        .post_with_key("/tenants/acme/events", "one", other.clone())
        .await;
    assert_eq!(status, StatusCode::CONFLICT);
    assert_eq!(problem["type"], of("idempotency-key-reused"), "{problem}");

    let with_id = |body: &Value| {
        let mut body = body.clone();
        body["id"] = json!("mine");
        body
    };
    api.emit("acme", with_id(&event())).await;
    let (status, problem) = api.emit("acme", with_id(&other)).await;
    assert_eq!(status, StatusCode::CONFLICT);
    assert_eq!(problem["type"], of("event-id-conflict"), "{problem}");
    let batch = json!({ "events": [with_id(&other)] });
    let (_, problem) = api
        .call(reqwest::Method::POST, "/tenants/acme/events/batch", Some(batch))
        .await;
    assert_eq!(problem["type"], of("event-id-conflict"), "{problem}");

    let path = format!("/tenants/acme/endpoints/{}/test", endpoint.id);
    let before = receiver.count();
    let first = tokio::spawn({
        let (api, path) = (api.clone(), path.clone());
        async move { api.post_with_key(&path, "two", json!({})).await }
    });
    receiver.wait_for(before + 1).await;
    let answer = crate::support::http_client()
        .build()
        .expect("a client")
        .post(program.url(&format!("/v1{path}")))
        .bearer_auth(crate::support::ADMIN_API_KEY)
        .header("idempotency-key", "two")
        .body("{}")
        .send()
        .await
        .expect("an answer");
    assert_eq!(answer.status(), StatusCode::CONFLICT);
    assert_eq!(answer.headers()["retry-after"], "1");
    let problem: Value = serde_json::from_str(&answer.text().await.expect("a body")).expect("JSON");
    assert_eq!(problem["type"], of("idempotency-key-in-progress"), "{problem}");
    receiver.release();
    first.await.expect("no panic");
}
