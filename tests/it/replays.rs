//! Bulk replays: counted before, carried out as a job that a kill does not harm, told of while they run, cancelled.

use std::collections::{HashMap, HashSet};

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{
    ADMIN_PASSWORD, Answer, Api, Database, Endpoint, Form, Person, Postrider, Receiver, until,
};

async fn emit(database: &Database, count: usize, prefix: &str) {
    let statement = format!(
        "select postrider.emit('acme', 'invoice.paid', '{{}}', '{prefix}' || n) from generate_series(1, {count}) n"
    );
    database.execute(&statement).await;
}

/// Dead letters of an endpoint that said it was gone, and has come back since.
async fn dead_letters(database: &Database, api: &Api, receiver: &Receiver, count: usize) -> Endpoint {
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    receiver.answer(Answer::Status(410));
    emit(database, count, "e").await;
    database.drained().await;
    receiver.answer(Answer::Status(204));
    enable(api, &endpoint).await;
    endpoint
}

async fn enable(api: &Api, endpoint: &Endpoint) {
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    let (status, answer) = api
        .call(Method::PATCH, &path, Some(json!({ "enabled": true })))
        .await;
    assert_eq!(status, StatusCode::OK, "{answer}");
}

async fn ask(api: &Api, body: Value) -> (StatusCode, Value) {
    api.call(Method::POST, "/tenants/acme/replays", Some(body)).await
}

async fn start(api: &Api, body: Value) -> String {
    let (status, replay) = ask(api, body).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{replay}");
    replay["id"].as_str().expect("an id").to_owned()
}

async fn ended(api: &Api, id: &str) -> Value {
    let path = format!("/tenants/acme/replays/{id}");
    until("the replay is over", || async {
        let replay = api.get(&path).await;
        (replay["state"] != "running").then_some(replay)
    })
    .await
}

#[tokio::test]
async fn a_replay_that_is_killed_twice_sends_everything_and_nothing_twice_because_of_it() {
    const COUNT: usize = 400;
    const CONCURRENCY: usize = 8;
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = dead_letters(&database, &api, &receiver, COUNT).await;
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    api.call(Method::PATCH, &path, Some(json!({ "concurrency": CONCURRENCY })))
        .await;
    let before = receiver.received();

    let request = json!({ "endpoint": endpoint.id, "state": "dead", "dry_run": true });
    let (status, preview) = ask(&api, request).await;
    assert_eq!(status, StatusCode::OK, "{preview}");
    assert_eq!(preview["total"], COUNT, "{preview}");
    assert_eq!(preview["sample"].as_array().map(Vec::len), Some(10), "{preview}");
    assert_eq!(receiver.count(), before.len(), "a dry run sends nothing");

    let id = start(&api, json!({ "endpoint": endpoint.id, "rate_per_second": 1000 })).await;
    for share in [COUNT / 4, COUNT / 2] {
        receiver.wait_for(before.len() + share).await;
        program.kill();
        program.restart().await;
    }
    let replay = ended(&program.api(), &id).await;
    assert_eq!(replay["state"], "done", "{replay}");
    assert_eq!(
        (&replay["total"], &replay["done"]),
        (&json!(COUNT), &json!(COUNT)),
        "{replay}"
    );
    assert_eq!(
        (&replay["dead"], &replay["retrying"]),
        (&json!(0), &json!(0)),
        "{replay}"
    );

    let mut times: HashMap<String, usize> = HashMap::new();
    for request in receiver.received().iter().skip(before.len()) {
        assert_eq!(request.header("webhook-replay"), id);
        assert_eq!(request.verify(&endpoint.secret), Ok(()));
        *times.entry(request.event_id().to_owned()).or_default() += 1;
    }
    assert_eq!(times.len(), COUNT, "every event arrived");
    let twice = times.values().filter(|count| **count > 1).count();
    assert!(
        twice <= 2 * CONCURRENCY / 4,
        "{twice} came twice: more than were on the wire"
    );
    assert_eq!(
        database
            .count("select count(*) from postrider.dead_letters")
            .await,
        0
    );
    assert_eq!(
        database
            .count("select coalesce(sum(count), 0)::bigint from postrider.dead_letter_counts")
            .await,
        0
    );
    let audit = program.api().get("/audit").await;
    let line = audit["data"].as_array().and_then(|lines| {
        lines
            .iter()
            .find(|line| line["action"] == "replay.started")
            .cloned()
    });
    let line = line.expect("an audit line");
    assert_eq!(
        (&line["actor"], &line["subject"]),
        (&json!("key:admin"), &json!(id)),
        "{line}"
    );
}

#[tokio::test]
async fn delivered_ones_are_sent_again_by_type_and_time_and_with_the_same_bytes() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    api.event_type("invoice.sent").await;
    emit(&database, 5, "paid").await;
    api.emit(
        "acme",
        json!({ "id": "sent1", "type": "invoice.sent", "data": {} }),
    )
    .await;
    let first: HashMap<String, _> = receiver
        .wait_for(6)
        .await
        .into_iter()
        .map(|request| (request.event_id().to_owned(), request.body))
        .collect();
    api.wait_for_state("acme", "delivered", 6).await;

    let (_, none) = ask(&api, json!({ "dry_run": true })).await;
    assert_eq!(
        none["total"], 0,
        "what was delivered is asked for by name: {none}"
    );
    let future = json!({ "state": "delivered", "since": "2999-01-01T00:00:00Z", "dry_run": true });
    assert_eq!(ask(&api, future).await.1["total"], 0);
    let body = json!({ "state": "delivered", "type": "invoice.paid", "since": "2026-01-01T00:00:00Z" });
    let replay = ended(&api, &start(&api, body).await).await;
    assert_eq!(
        (&replay["total"], &replay["done"]),
        (&json!(5), &json!(5)),
        "{replay}"
    );
    let again = receiver.wait_for(11).await.split_off(6);
    assert_eq!(again.len(), 5);
    for request in &again {
        assert_eq!(first.get(request.event_id()), Some(&request.body));
        assert_eq!(request.verify(&endpoint.secret), Ok(()));
    }
    api.wait_for_state("acme", "delivered", 6).await;
}

#[tokio::test]
async fn what_waits_for_its_next_attempt_is_part_of_what_an_endpoint_failed_to_get() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(500));
    let api = program.api();
    let endpoint = api
        .acme(&receiver.url("/hook"), json!({ "retry_schedule": ["0s", "2h"] }))
        .await;
    api.emit(
        "acme",
        json!({ "id": "waits", "type": "invoice.paid", "data": {} }),
    )
    .await;
    receiver.wait_for(1).await;
    until("it waits", || async {
        (database.count("select count(*) from postrider.retries").await == 1).then_some(())
    })
    .await;
    receiver.answer(Answer::Status(204));
    let body = json!({ "endpoint": endpoint.id, "since": "2026-01-01T00:00:00Z" });
    let replay = ended(&api, &start(&api, body).await).await;
    assert_eq!(
        (&replay["total"], &replay["done"]),
        (&json!(1), &json!(1)),
        "{replay}"
    );
    api.wait_for_state("acme", "delivered", 1).await;
}

#[tokio::test]
async fn an_endpoint_is_sent_what_it_never_got_and_nothing_that_it_did() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let other = Receiver::start().await;
    api.acme(&other.url("/hook"), json!({})).await;
    api.event_type("invoice.sent").await;
    emit(&database, 3, "before").await;
    api.emit(
        "acme",
        json!({ "id": "other_type", "type": "invoice.sent", "data": {} }),
    )
    .await;
    let more = json!({ "types": ["invoice.paid"], "filter": { "/skip": { "ne": true } } });
    let endpoint = api.endpoint("acme", &receiver.url("/hook"), more).await;
    api.emit("acme", json!({ "id": "got", "type": "invoice.paid", "data": {} }))
        .await;
    receiver.wait_for(1).await;
    receiver.answer(Answer::Status(410));
    api.emit(
        "acme",
        json!({ "id": "died", "type": "invoice.paid", "data": {} }),
    )
    .await;
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    until("it is disabled", || async {
        (api.get(&path).await["state"] == "disabled").then_some(())
    })
    .await;
    emit(&database, 2, "while_disabled").await;
    api.emit(
        "acme",
        json!({ "id": "unwanted", "type": "invoice.paid", "data": { "skip": true } }),
    )
    .await;
    receiver.answer(Answer::Status(204));

    let missing = json!({ "kind": "missing", "endpoint": endpoint.id });
    assert_eq!(
        ask(&api, missing.clone()).await.0,
        StatusCode::CONFLICT,
        "it is disabled"
    );
    enable(&api, &endpoint).await;
    let replay = ended(&api, &start(&api, missing.clone()).await).await;
    assert_eq!(
        (&replay["total"], &replay["done"]),
        (&json!(6), &json!(6)),
        "{replay}"
    );
    let got: HashSet<String> = receiver
        .received()
        .iter()
        .skip(2)
        .map(|request| request.event_id().to_owned())
        .collect();
    let expected = [
        "before1",
        "before2",
        "before3",
        "while_disabled1",
        "while_disabled2",
    ];
    assert_eq!(got, expected.map(str::to_owned).into());
    assert_eq!(receiver.count(), 2 + 5, "once each");
    assert_eq!(
        ask(
            &api,
            json!({ "kind": "missing", "endpoint": endpoint.id, "dry_run": true })
        )
        .await
        .1["total"],
        1,
        "only what its filter does not want"
    );
}

#[tokio::test]
async fn a_cancelled_replay_puts_nothing_more_in_line() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = dead_letters(&database, &api, &receiver, 200).await;
    let before = receiver.count();
    let id = start(&api, json!({ "endpoint": endpoint.id, "rate_per_second": 20 })).await;
    receiver.wait_for(before + 5).await;
    let path = format!("/tenants/acme/replays/{id}");
    let (status, replay) = api.call(Method::DELETE, &path, None).await;
    assert_eq!(
        (status, &replay["state"]),
        (StatusCode::OK, &json!("cancelled")),
        "{replay}"
    );
    database.drained().await;
    let sent = receiver.count() - before;
    assert!(sent < 100, "{sent}");
    let left = database
        .count("select count(*) from postrider.dead_letters")
        .await;
    assert_eq!(left as usize + sent, 200, "the others are dead letters still");
    assert_eq!(
        api.call(Method::DELETE, &path, None).await.1["state"],
        "cancelled"
    );
    let list = api.get("/tenants/acme/replays").await;
    assert_eq!(list["data"][0]["id"], json!(id), "{list}");
}

#[tokio::test]
async fn replays_that_make_no_sense_are_refused_and_those_of_others_are_not_there() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    let receiver = Receiver::start().await;
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    for (body, pointer) in [
        (json!({ "kind": "all" }), "/kind"),
        (json!({ "kind": "missing" }), "/endpoint"),
        (
            json!({ "kind": "missing", "endpoint": endpoint.id, "state": "dead" }),
            "/kind",
        ),
        (json!({ "state": "lost" }), "/state"),
        (json!({ "type": "no.such" }), "/type"),
        (json!({ "type": "*" }), "/type"),
        (json!({ "endpoint": "ep_000000000000000000000000" }), "/endpoint"),
        (json!({ "since": "yesterday" }), "/since"),
        (
            json!({ "since": "2026-01-02T00:00:00Z", "until": "2026-01-01T00:00:00Z" }),
            "/until",
        ),
        (json!({ "rate_per_second": 0 }), "/rate_per_second"),
        (json!({ "reason": "gone", "state": "delivered" }), "/reason"),
    ] {
        let (status, problem) = ask(&api, body.clone()).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{body}: {problem}");
        assert_eq!(problem["errors"][0]["pointer"], pointer, "{body}: {problem}");
    }
    let id = start(&api, json!({})).await;
    assert_eq!(ended(&api, &id).await["total"], 0);
    api.tenant("other").await;
    for method in [Method::GET, Method::DELETE] {
        let path = format!("/tenants/other/replays/{id}");
        assert_eq!(api.call(method, &path, None).await.0, StatusCode::NOT_FOUND);
    }
}

#[tokio::test]
async fn a_person_chooses_a_group_previews_it_replays_it_and_sees_how_far_it_is() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = dead_letters(&database, &api, &receiver, 30).await;
    let mut person = Person::new(&program);
    assert!(person.sign_in(ADMIN_PASSWORD).await.is_redirection());
    let (_, page) = person.visit("/dead-letters").await;
    let group = format!("{}~invoice.paid~gone", endpoint.id);
    assert!(page.contains(&group) && page.contains("30"), "{page}");

    let (status, _) = person.visit("/dead-letters/preview").await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "nothing was chosen");
    let (status, page) = person
        .visit(&format!("/dead-letters/preview?group={group}"))
        .await;
    assert_eq!(status, StatusCode::OK, "{page}");
    assert!(page.contains("30 would be sent"), "{page}");
    let before = receiver.count();
    let form = Form::find(&page, "/replays").fill("rate_per_second", "10");
    let mut forged = Form::find(&page, "/replays");
    forged.fields.retain(|(name, _)| name != "csrf");
    assert!(person.submit(&forged).await.0.is_client_error());
    assert!(person.submit(&form).await.0.is_redirection());

    let list = api.get("/tenants/acme/replays").await;
    let id = list["data"][0]["id"].as_str().expect("a replay").to_owned();
    receiver.wait_for(before + 2).await;
    let (_, page) = person.visit(&format!("/replays/{id}")).await;
    assert!(page.contains("<progress") && page.contains("Time left"), "{page}");
    let cancel = Form::find(&page, "/cancel");
    assert!(person.submit(&cancel).await.0.is_redirection());
    let (_, page) = person.visit("/replays").await;
    assert!(
        page.contains("cancelled") && page.contains("person:admin"),
        "{page}"
    );
    assert_eq!(
        api.get(&format!("/tenants/acme/replays/{id}")).await["state"],
        "cancelled"
    );
}
