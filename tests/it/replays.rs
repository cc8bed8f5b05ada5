//! Bulk replays: counted before, carried out as a job that a kill does not harm, told of while they run, cancelled.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{
    ADMIN_PASSWORD, Answer, Api, Browser, Database, Endpoint, Form, Person, Postrider, Received, Receiver,
    until,
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
    // It is disabled after the results are recorded: enabled before that, it would be disabled again.
    until_disabled(api, &endpoint).await;
    enable(api, &endpoint).await;
    endpoint
}

async fn until_disabled(api: &Api, endpoint: &Endpoint) {
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    until("it is disabled", || async {
        (api.get(&path).await["state"] == "disabled").then_some(())
    })
    .await;
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
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = dead_letters(&database, &api, &receiver, COUNT).await;
    let before = receiver.received();

    let request = json!({ "endpoint": endpoint.id, "state": "dead", "dry_run": true });
    let (status, preview) = ask(&api, request).await;
    assert_eq!(status, StatusCode::OK, "{preview}");
    assert_eq!(preview["total"], COUNT, "{preview}");
    assert_eq!(preview["sample"].as_array().map(Vec::len), Some(10), "{preview}");
    assert_eq!(receiver.count(), before.len(), "a dry run sends nothing");

    let id = start(&api, json!({ "endpoint": endpoint.id, "rate_per_second": 1000 })).await;
    let mut kills = Vec::new();
    for share in [COUNT / 4, COUNT / 2] {
        receiver.wait_for(before.len() + share).await;
        program.kill();
        let recorded = format!(
            "select coalesce(string_agg(e.chosen_id, ','), '') from postrider.attempts a
             join postrider.events e on e.id = a.event_id where a.replay_id = '{id}'"
        );
        kills.push((receiver.count(), database.text(&recorded).await));
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

    let received = receiver.received();
    let mut arrived = HashSet::new();
    for request in received.iter().skip(before.len()) {
        assert_eq!(request.header("webhook-replay"), id);
        assert_eq!(request.verify(&endpoint.secret), Ok(()));
        arrived.insert(request.event_id());
    }
    assert_eq!(arrived.len(), COUNT, "every event arrived");
    for (count, recorded) in &kills {
        let recorded: HashSet<&str> = recorded.split(',').collect();
        let twice = |request: &&Received| recorded.contains(request.event_id());
        let twice: Vec<&str> = received[*count..]
            .iter()
            .filter(twice)
            .map(Received::event_id)
            .collect();
        assert!(twice.is_empty(), "{twice:?} came again after they were recorded");
    }
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
    until_disabled(&api, &endpoint).await;
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
async fn a_cancelled_replay_takes_back_what_is_in_line_and_not_on_the_wire() {
    const COUNT: usize = 300;
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let (receiver, told) = (Receiver::start().await, Receiver::start().await);
    let api = program.api();
    api.tenant("acme").await;
    let dead = json!({ "types": ["postrider.delivery.dead"] });
    api.endpoint("acme", &told.url("/told"), dead).await;
    let endpoint = dead_letters(&database, &api, &receiver, COUNT).await;
    told.wait_for(COUNT).await;
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    api.call(Method::PATCH, &path, Some(json!({ "concurrency": 1 })))
        .await;
    let before = receiver.count();
    receiver.answer(Answer::Hold);
    let id = start(&api, json!({ "endpoint": endpoint.id, "state": "dead" })).await;
    receiver.wait_for(before + 1).await;
    in_line(&database, COUNT).await;

    let path = format!("/tenants/acme/replays/{id}");
    let (status, replay) = api.call(Method::DELETE, &path, None).await;
    assert_eq!(
        (status, &replay["state"]),
        (StatusCode::OK, &json!("cancelled")),
        "{replay}"
    );
    let replay = until("all but the one on the wire is taken back", || async {
        let replay = api.get(&path).await;
        (replay["cancelled"] == COUNT - 1).then_some(replay)
    })
    .await;
    assert_eq!(
        (&replay["total"], &replay["done"]),
        (&json!(COUNT), &json!(0)),
        "{replay}"
    );
    in_line(&database, 1).await;
    receiver.answer(Answer::Status(204));
    receiver.release();
    database.drained().await;
    let replay = api.get(&path).await;
    assert_eq!(
        (&replay["done"], &replay["cancelled"]),
        (&json!(1), &json!(COUNT - 1)),
        "{replay}"
    );
    api.emit(
        "acme",
        json!({ "id": "live", "type": "invoice.paid", "data": {} }),
    )
    .await;
    assert_eq!(
        receiver.wait_for(before + 2).await[before + 1].event_id(),
        "live",
        "nothing of the replay goes out after it"
    );
    let left = format!("select count(*) = {} from", COUNT - 1);
    for (what, query) in [
        (
            "dead letters as they were",
            "postrider.dead_letters d, postrider.replays r where d.reason = 'gone' and d.died_at < r.created_at and d.replay_id is null",
        ),
        ("dead attempts", "postrider.attempts where final = 'dead'"),
        (
            "no other attempt of them",
            "(select event_id from postrider.attempts where replay_id is null group by event_id having count(*) = 1 and max(final) = 'dead') a",
        ),
    ] {
        assert_eq!(
            database.text(&format!("select ({left} {query})::text")).await,
            "true",
            "{what}"
        );
    }
    let counted = "select sum(count)::bigint from postrider.dead_letter_counts";
    assert_eq!(database.count(counted).await as usize, COUNT - 1);
    let untold = "select count(*) from postrider.notices where event_id is not null";
    assert_eq!(database.count(untold).await, 0);
    assert_eq!(told.count(), COUNT, "their deaths were told of before");
    assert_eq!(
        api.call(Method::DELETE, &path, None).await.1["state"],
        "cancelled"
    );
}

#[tokio::test]
async fn what_is_taken_back_is_what_it_was_also_of_a_paused_endpoint_and_after_a_kill() {
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let schedule = json!({ "retry_schedule": ["0s", "2h"] });
    let endpoint = api.acme(&receiver.url("/hook"), schedule).await;
    emit(&database, 5, "delivered").await;
    api.wait_for_state("acme", "delivered", 5).await;
    receiver.answer(Answer::Status(500));
    api.emit(
        "acme",
        json!({ "id": "waits", "type": "invoice.paid", "data": {} }),
    )
    .await;
    let waiting = "select count(*) from postrider.retries";
    until("it waits", || async {
        (database.count(waiting).await == 1).then_some(())
    })
    .await;
    let retry = "select (r.attempt, r.step, r.due_at, r.replay_id)::text from postrider.retries r";
    let retry_before = database.text(retry).await;
    let late = api.endpoint("acme", &receiver.url("/late"), json!({})).await;
    for endpoint in [&endpoint, &late] {
        let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
        api.call(Method::PATCH, &path, Some(json!({ "enabled": false })))
            .await;
    }
    let sent = receiver.count();

    for (body, count) in [
        (json!({ "endpoint": endpoint.id, "state": "delivered" }), 5),
        (json!({ "endpoint": endpoint.id, "state": "pending" }), 1),
        (json!({ "endpoint": late.id, "kind": "missing" }), 6),
    ] {
        let id = start(&api, body).await;
        in_line(&database, count).await;
        let path = format!("/tenants/acme/replays/{id}");
        let replay = api.call(Method::DELETE, &path, None).await.1;
        assert_eq!(replay["state"], "cancelled", "{replay}");
        in_line(&database, 0).await;
        let replay = api.get(&path).await;
        assert_eq!(
            (&replay["done"], &replay["cancelled"]),
            (&json!(0), &json!(count)),
            "{replay}"
        );
    }
    assert_eq!(database.text(retry).await, retry_before);
    assert_eq!(api.deliveries("acme", "state=delivered").await.len(), 5);
    let of_late = format!("endpoint={}", late.id);
    assert!(api.deliveries("acme", &of_late).await.is_empty());

    // Cancelled while no dispatcher runs: the next one takes it back before it sends anything.
    start(&api, json!({ "endpoint": endpoint.id, "state": "delivered" })).await;
    in_line(&database, 5).await;
    program.kill();
    database
        .execute(
            "update postrider.replays set state = 'cancelled', ended_at = clock_timestamp() where state = 'running';
             update postrider.endpoints set state = 'active' where url like '%/hook'",
        )
        .await;
    program.restart().await;
    in_line(&database, 0).await;
    let api = program.api();
    assert_eq!(api.wait_for_state("acme", "delivered", 5).await.len(), 5);
    assert_eq!(receiver.count(), sent, "nothing was sent");
}

/// Waits until replays have so many deliveries in line.
async fn in_line(database: &Database, count: usize) {
    until("so many are in line", || async {
        let query = "select count(*) from postrider.queue where replay_id is not null";
        (database.count(query).await as usize == count).then_some(())
    })
    .await;
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
    let group = format!("{}~invoice.paid~gone~410", endpoint.id);
    assert!(page.contains(&group) && page.contains("30"), "{page}");

    let (status, _) = person.visit("/dead-letters/preview").await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "nothing was chosen");
    let (status, page) = person
        .visit(&format!("/dead-letters/preview?group={group}"))
        .await;
    assert_eq!(status, StatusCode::OK, "{page}");
    assert!(page.contains("30 deliveries will be replayed"), "{page}");
    assert!(page.contains("127.0.0.1"), "the endpoint by its URL: {page}");
    let before = receiver.count();
    let form = Form::find(&page, "/replays").fill("rate_per_second", "10");
    let forged = Form::find(&page, "/replays").fill("csrf", "wrong");
    assert!(person.submit(&forged).await.0.is_client_error());
    assert!(person.submit(&form).await.0.is_redirection());

    let list = api.get("/tenants/acme/replays").await;
    let id = list["data"][0]["id"].as_str().expect("a replay").to_owned();
    receiver.wait_for(before + 2).await;
    let (_, page) = person.visit(&format!("/replays/{id}")).await;
    assert!(page.contains("<progress") && page.contains("Time left"), "{page}");
    assert!(
        page.contains(&format!("data-live=\"/live/replays/{id}\"")),
        "{page}"
    );
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

#[tokio::test]
async fn a_cancelled_replay_is_resumed_with_what_was_not_sent_and_its_rate_is_changed() {
    const COUNT: usize = 60;
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = dead_letters(&database, &api, &receiver, COUNT).await;
    let before = receiver.count();
    let id = start(&api, json!({ "endpoint": endpoint.id, "rate_per_second": 20 })).await;
    let path = format!("/tenants/acme/replays/{id}");
    receiver.wait_for(before + 10).await;
    let resume = format!("{path}/resume");
    let (status, problem) = api.call(Method::POST, &resume, None).await;
    assert_eq!(status, StatusCode::CONFLICT, "it runs: {problem}");
    let (status, cancelled) = api.call(Method::DELETE, &path, None).await;
    assert_eq!(status, StatusCode::OK, "{cancelled}");
    let cancelled = until("nothing is in flight", || async {
        let replay = api.get(&path).await;
        let sum = |name: &str| replay[name].as_i64().unwrap_or_default();
        (sum("done") + sum("cancelled") == COUNT as i64).then_some(replay)
    })
    .await;
    assert!(cancelled["cancelled"].as_i64() > Some(0), "{cancelled}");
    let rate = json!({ "rate_per_second": 5 });
    let (status, problem) = api.call(Method::PATCH, &path, Some(rate.clone())).await;
    assert_eq!(status, StatusCode::CONFLICT, "it does not run: {problem}");
    database
        .execute("update postrider.endpoints set state = 'disabled', state_reason = 'failing'")
        .await;
    let (_, problem) = api.call(Method::POST, &resume, None).await;
    assert_eq!(
        problem["type"], "urn:postrider:problem:endpoint-disabled",
        "it would skip everything: {problem}"
    );
    let enabled = json!({ "enabled": true });
    let at = format!("/tenants/acme/endpoints/{}", endpoint.id);
    assert!(api.call(Method::PATCH, &at, Some(enabled)).await.0.is_success());

    let mut person = Person::signed_in(&program).await;
    let (_, page) = person.visit(&format!("/replays/{id}")).await;
    let (_, page) = person.submit_and_follow(&Form::find(&page, "/resume")).await;
    assert!(
        page.contains("Replay resumed.") && page.contains("/rate\""),
        "{page}"
    );
    for wrong in [json!({}), json!({ "rate_per_second": 0 })] {
        let (status, problem) = api.call(Method::PATCH, &path, Some(wrong)).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
    }
    let form = Form::find(&page, "/rate").fill("rate_per_second", "many");
    let (status, wrong) = person.submit(&form).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(wrong.contains("must be a whole number"), "{wrong}");
    let form = Form::find(&page, "/rate").fill("rate_per_second", "1000");
    assert!(person.submit(&form).await.0.is_redirection());
    let replay = ended(&api, &id).await;
    assert_eq!(
        (&replay["state"], &replay["done"], &replay["skipped"]),
        (&json!("done"), &json!(COUNT), &json!(0)),
        "{replay}"
    );
    assert_eq!(replay["rate_per_second"], 1000);
    let mut times: HashMap<String, usize> = HashMap::new();
    for request in receiver.received().iter().skip(before) {
        *times.entry(request.event_id().to_owned()).or_default() += 1;
    }
    assert_eq!(times.len(), COUNT, "every event arrived");
    assert!(times.values().all(|count| *count == 1), "none twice: {times:?}");
    let audit = api.get("/audit?limit=10").await.to_string();
    for action in ["replay.resumed", "replay.changed", "replay.cancelled"] {
        assert!(audit.contains(action), "{audit}");
    }

    // Its deliveries, by the page and by the API.
    let listed = api.deliveries("acme", &format!("replay={id}&limit=100")).await;
    assert_eq!(listed.len(), COUNT);
    let (_, page) = person.visit(&format!("/deliveries?replay={id}")).await;
    assert!(page.contains("state delivered"), "{page}");
    let (_, page) = person.visit(&format!("/deliveries?replay={id}&state=dead")).await;
    assert!(!page.contains("href=\"/deliveries/dlv_"), "{page}");
    api.tenant("globex").await;
    let foreign = api.deliveries("globex", &format!("replay={id}")).await;
    assert!(foreign.is_empty(), "{foreign:?}");
}

/// A tenant whose endpoint is paused with more deliveries than may be queued for it, and as many replays as it may have.
async fn stuck_replays(database: &Database, api: &Api, receiver: &Receiver, tenant: &str, replays: usize) {
    const DELIVERED: usize = 600;
    api.tenant(tenant).await;
    let endpoint = api.endpoint(tenant, &receiver.url("/bad"), json!({})).await;
    let emitted = format!(
        "select postrider.emit('{tenant}', 'invoice.paid', '{{}}') from generate_series(1, {DELIVERED})"
    );
    database.execute(&emitted).await;
    api.wait_for_state(tenant, "delivered", DELIVERED).await;
    let path = format!("/tenants/{tenant}/endpoints/{}", endpoint.id);
    let paused = json!({ "enabled": false });
    let (status, answer) = api.call(Method::PATCH, &path, Some(paused)).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let path = format!("/tenants/{tenant}/replays");
    for _ in 0..replays {
        let body = json!({ "endpoint": endpoint.id, "state": "delivered" });
        let (status, answer) = api.call(Method::POST, &path, Some(body)).await;
        match status {
            StatusCode::ACCEPTED => {}
            StatusCode::CONFLICT => {
                let detail = answer["detail"].as_str().expect("words");
                assert!(detail.contains("100 replays"), "{answer}");
            }
            other => panic!("{other}: {answer}"),
        }
    }
}

/// From the request to the delivery, of replays of one delivery that follow each other. The slowest.
async fn slowest_replay(api: &Api, receiver: &Receiver, count: usize) -> Duration {
    let mut slowest = Duration::ZERO;
    for _ in 0..count {
        let (before, began) = (receiver.count(), Instant::now());
        let id = start(api, json!({ "state": "delivered" })).await;
        receiver.wait_for(before + 1).await;
        slowest = slowest.max(began.elapsed());
        ended(api, &id).await;
    }
    slowest
}

/// Transactions a second of the whole database.
async fn transactions_per_second(database: &Database) -> i64 {
    const WINDOW: Duration = Duration::from_secs(5);
    let committed =
        "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()";
    let before = database.count(committed).await;
    tokio::time::sleep(WINDOW).await;
    (database.count(committed).await - before) / WINDOW.as_secs() as i64
}

#[tokio::test]
async fn tenants_with_hundreds_of_replays_that_cannot_move_delay_no_other_tenant() {
    const REPLAYS: usize = 200;
    const SAMPLES: usize = 12;
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let (receiver, bad) = (Receiver::start().await, Receiver::start().await);
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    emit(&database, 1, "healthy").await;
    api.wait_for_state("acme", "delivered", 1).await;
    let alone = slowest_replay(&api, &receiver, SAMPLES).await;
    let idle = transactions_per_second(&database).await;

    for tenant in ["bad-1", "bad-2", "bad-3"] {
        stuck_replays(&database, &api, &bad, tenant, REPLAYS).await;
    }
    // Of those that were accepted a few may have ended: two steps at once can queue everything there is.
    let running = "select count(*) from postrider.replays where state = 'running'";
    let running = database.count(running).await;
    // Replays that can't move look less and less often.
    tokio::time::sleep(Duration::from_secs(20)).await;
    let stuck = transactions_per_second(&database).await;
    let beside = slowest_replay(&api, &receiver, SAMPLES).await;
    println!("alone {alone:?}, beside {running} {beside:?}; {idle} transactions a second, then {stuck}");
    assert!(running <= 300, "{running} replays of three tenants run");
    // Due replays are looked for every half second, so that the slowest of a few varies by that much.
    assert!(
        beside <= alone.mul_f64(1.5) + Duration::from_millis(500),
        "{beside:?} beside the bad tenant, {alone:?} alone"
    );
    assert!(
        stuck - idle < 300,
        "{stuck} transactions a second, {idle} when idle"
    );
}

#[tokio::test]
async fn a_replay_goes_on_when_its_endpoint_is_resumed_and_beside_others_of_its_tenant() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let (receiver, bad) = (Receiver::start().await, Receiver::start().await);
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    stuck_replays(&database, &api, &bad, "bad", 30).await;
    let other = api.endpoint("bad", &receiver.url("/other"), json!({})).await;
    api.emit("bad", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    receiver.wait_for(1).await;
    api.wait_for_state("bad", "delivered", 1).await;
    let body = json!({ "endpoint": other.id, "state": "delivered" });
    let (status, replay) = api.call(Method::POST, "/tenants/bad/replays", Some(body)).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{replay}");
    receiver.wait_for(2).await;
    let paused = database
        .text("select public_id from postrider.endpoints where state = 'paused'")
        .await;
    let path = format!("/tenants/bad/endpoints/{paused}");
    api.call(Method::PATCH, &path, Some(json!({ "enabled": true })))
        .await;
    until("every replay is over", || async {
        let running = "select count(*) from postrider.replays where state = 'running'";
        (database.count(running).await == 0).then_some(())
    })
    .await;
}

/// One dead letter of acme with so many attempts, by its delivery's id.
async fn attempted(database: &Database, api: &Api, receiver: &Receiver, attempts: usize) -> String {
    receiver.answer(Answer::Status(500));
    let schedule = json!({ "retry_schedule": ["0s"] });
    api.acme(&receiver.url("/hook"), schedule).await;
    emit(database, 1, "e").await;
    let dead = api.wait_for_state("acme", "dead", 1).await;
    database
        .execute(&format!(
            "update postrider.attempts set number = {attempts}; update postrider.dead_letters set attempt = {attempts}"
        ))
        .await;
    receiver.answer(Answer::Status(204));
    dead[0]["id"].as_str().expect("an id").to_owned()
}

#[tokio::test]
async fn a_delivery_with_as_many_attempts_as_are_allowed_is_not_replayed() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let id = attempted(&database, &api, &receiver, 1_000).await;
    let path = format!("/tenants/acme/deliveries/{id}/replay");
    let (status, problem) = api.call(Method::POST, &path, None).await;
    assert_eq!(status, StatusCode::CONFLICT, "{problem}");
    assert!(
        problem["detail"]
            .as_str()
            .is_some_and(|words| words.contains("1000 attempts")),
        "{problem}"
    );
    let mut person = Person::signed_in(&program).await;
    let (_, page) = person.visit(&format!("/deliveries/{id}")).await;
    let (status, page) = person.submit(&Form::find(&page, "/replay")).await;
    assert_eq!(status, StatusCode::CONFLICT, "{page}");

    let replay = ended(&api, &start(&api, json!({ "state": "dead" })).await).await;
    assert_eq!(
        (
            &replay["total"],
            &replay["done"],
            &replay["skipped"],
            &replay["state"]
        ),
        (&json!(1), &json!(1), &json!(1), &json!("done")),
        "{replay}"
    );
    assert_eq!(receiver.count(), 1, "nothing was sent again");

    // One less is not too many, and it is the last.
    database
        .execute(
            "update postrider.attempts set number = 999; update postrider.dead_letters set attempt = 999",
        )
        .await;
    let (status, problem) = api.call(Method::POST, &path, None).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{problem}");
    let delivered = api.wait_for_state("acme", "delivered", 1).await;
    assert_eq!(delivered[0]["attempt_count"], 1_000);
    let replay = ended(&api, &start(&api, json!({ "state": "delivered" })).await).await;
    assert_eq!((&replay["skipped"], receiver.count()), (&json!(1), 2), "{replay}");
}

#[tokio::test]
async fn a_delivery_past_the_last_number_that_can_be_stored_is_sent_once_and_ends() {
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(500));
    let api = program.api();
    let schedule = json!({ "retry_schedule": ["0s", "2h"] });
    api.acme(&receiver.url("/hook"), schedule).await;
    emit(&database, 1, "e").await;
    until("it waits", || async {
        (database.count("select count(*) from postrider.retries").await == 1).then_some(())
    })
    .await;
    program.kill();
    database
        .execute(
            "update postrider.attempts set number = 32767;
             update postrider.retries set attempt = 32767, due_at = clock_timestamp()",
        )
        .await;
    program.restart().await;
    let api = program.api();
    api.wait_for_state("acme", "dead", 1).await;
    database.drained().await;
    assert_eq!(receiver.count(), 2, "it was sent once more");
}

#[tokio::test]
async fn a_replay_of_a_whole_tenant_leaves_listeners_out() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    let (status, listener) = api
        .call(Method::POST, "/tenants/acme/listeners", Some(json!({})))
        .await;
    assert!(status.is_success(), "{listener}");
    emit(&database, 1, "e").await;
    api.wait_for_state("acme", "delivered", 1).await;
    // As if the listener had failed to take it.
    database
        .execute(
            "insert into postrider.retries (endpoint_id, event_id, tenant_id, type_id, attempt, step, due_at)
             select endpoint_id, event_id, tenant_id, type_id, 1, 1, 'infinity' from postrider.queue",
        )
        .await;
    let (status, preview) = ask(&api, json!({ "dry_run": true })).await;
    assert_eq!(
        (status, &preview["total"]),
        (StatusCode::OK, &json!(0)),
        "{preview}"
    );
}

#[tokio::test]
async fn what_a_replay_delivered_does_not_grow_when_its_dead_letters_are_discarded() {
    const COUNT: usize = 4;
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = dead_letters(&database, &api, &receiver, COUNT).await;
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    let once = json!({ "retry_schedule": ["0s"] });
    assert!(api.call(Method::PATCH, &path, Some(once)).await.0.is_success());
    // One arrives, three fail again.
    receiver.decide(|request| match request.event_id() {
        "e1" => Answer::Status(204),
        _ => Answer::Status(500),
    });
    let id = start(&api, json!({ "endpoint": endpoint.id })).await;
    ended(&api, &id).await;
    api.wait_for_state("acme", "dead", COUNT - 1).await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    let figures = || async {
        browser.open(&program.url(&format!("/replays/{id}"))).await;
        let figures = "return Object.fromEntries([...document.querySelectorAll('.figure')].map((one) =>
            [one.querySelector('.label').textContent, one.querySelector('strong').textContent]))";
        let told = browser.script(figures).await;
        let of = |name: &str| told[name].as_str().unwrap_or("–").to_owned();
        [of("Delivered"), of("Failed again"), of("Resolved since")]
    };
    assert_eq!(figures().await, ["1", "3", "–"]);
    let discard = json!({ "endpoint": endpoint.id });
    let (status, done) = api
        .call(Method::POST, "/tenants/acme/dead-letters/discard", Some(discard))
        .await;
    assert_eq!(
        (status, &done["discarded"]),
        (StatusCode::OK, &json!(3)),
        "{done}"
    );
    assert_eq!(figures().await, ["1", "0", "3"]);
    // The figure leads to what it counts.
    browser.click("a.figure[href$='state=delivered']").await;
    browser.read("e1").await;
    let rows = "return document.querySelectorAll('main tbody tr').length";
    assert_eq!(browser.script(rows).await, json!(1));
    browser.close().await;
}
