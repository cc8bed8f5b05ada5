//! Rotation without a gap: every request carries a signature of each secret that is in force as its attempt starts, and
//! of no other, whatever rotates meanwhile and whoever sends.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{
    ADMIN_API_KEY, Answer, Api, Case, Database, Endpoint, Postrider, Receiver, judge, until,
};

const EVENTS: usize = 500;

async fn rotate(api: &Api, endpoint: &Endpoint, body: Value) -> (StatusCode, Value) {
    let path = format!("/tenants/acme/endpoints/{}/secret/rotate", endpoint.id);
    api.call(Method::POST, &path, Some(body)).await
}

async fn secrets(api: &Api, endpoint: &Endpoint) -> Vec<Value> {
    let path = format!("/tenants/acme/endpoints/{}/secret", endpoint.id);
    let answer = api.get(&path).await;
    answer["data"].as_array().expect("a list").clone()
}

fn time(value: &Value) -> Option<DateTime<Utc>> {
    value.as_str().map(|text| text.parse().expect("a time"))
}

/// One secret in the life of an endpoint. All times are of the machine's one clock.
struct Span {
    secret: String,
    /// The rotation to it was asked for, and answered.
    asked: DateTime<Utc>,
    answered: DateTime<Utc>,
    /// It was to retire at this time, or was revoked by a rotation asked for and answered at these.
    retires: Option<(DateTime<Utc>, DateTime<Utc>)>,
}

impl Span {
    /// Whether an attempt that started then must have been signed with it; `None` while a call was under way.
    fn signs(&self, started: DateTime<Utc>) -> Option<bool> {
        if started < self.asked {
            return Some(false);
        }
        match self.retires {
            Some((_, to)) if started >= to => Some(false),
            Some((from, _)) if started >= from => None,
            _ => (started > self.answered).then_some(true),
        }
    }
}

struct Subject {
    endpoint: Endpoint,
    format: &'static str,
    spans: Vec<Span>,
}

impl Subject {
    async fn make(api: &Api, receiver: &Receiver, format: &'static str) -> Self {
        let asked = Utc::now();
        let endpoint = api
            .endpoint("acme", &receiver.url("/hook"), json!({ "signature": format }))
            .await;
        let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
        let url = receiver.url(&format!("/{}", endpoint.id));
        api.call(Method::PATCH, &path, Some(json!({ "url": url }))).await;
        let spans = vec![Span {
            secret: endpoint.secret.clone(),
            asked,
            answered: Utc::now(),
            retires: None,
        }];
        Self {
            endpoint,
            format,
            spans,
        }
    }

    /// Waits while three are in force.
    async fn rotate(&mut self, api: &Api, overlap_seconds: i64) {
        let (asked, answered, data) = until("a rotation is taken", || async {
            let asked = Utc::now();
            let (status, answer) =
                rotate(api, &self.endpoint, json!({ "overlap_seconds": overlap_seconds })).await;
            assert!(
                [StatusCode::OK, StatusCode::CONFLICT].contains(&status),
                "{answer}"
            );
            (status == StatusCode::OK).then(|| (asked, Utc::now(), answer["data"].clone()))
        })
        .await;
        if overlap_seconds == 0 {
            assert_eq!(data.as_array().map(Vec::len), Some(1), "only the new one is left");
            for span in &mut self.spans {
                let stays = span.retires.is_some_and(|(_, to)| to < asked);
                if !stays {
                    span.retires = Some((asked, answered));
                }
            }
        } else {
            let at = time(&data[1]["retires_at"]).expect("the one before retires");
            self.spans.last_mut().expect("a secret").retires = Some((at, at));
        }
        self.spans.push(Span {
            secret: data[0]["secret"].as_str().expect("a secret").to_owned(),
            asked,
            answered,
            retires: None,
        });
    }
}

#[tokio::test]
async fn every_request_verifies_with_the_secrets_of_its_time_while_five_rotations_happen() {
    let database = Database::fresh().await;
    let dashboard = Postrider::on_database("dashboard", &database).start().await;
    let mut first = Postrider::on_database("dispatcher", &database).start().await;
    let second = Postrider::on_database("dispatcher", &database).start().await;
    let api = dashboard.api();
    let receiver = Receiver::start().await;
    api.tenant("acme").await;
    api.event_type("invoice.paid").await;
    let mut subjects = Vec::new();
    for format in ["t-v1", "standard", "t-v1", "standard"] {
        subjects.push(Subject::make(&api, &receiver, format).await);
    }

    // Events come in without a pause until the last rotation is over.
    let (over, told) = tokio::sync::watch::channel(false);
    let emitter = {
        let api = api.clone();
        tokio::spawn(async move {
            let mut emitted = 0;
            while emitted < EVENTS || !*told.borrow() {
                let event = json!({ "type": "invoice.paid", "id": format!("inv-{emitted}"), "data": { "n": emitted } });
                assert_eq!(api.emit("acme", event).await.0, StatusCode::ACCEPTED);
                emitted += 1;
            }
            emitted
        })
    };
    receiver.wait_for(100).await;
    for (round, overlap) in [1, 1, 0, 1, 0].into_iter().enumerate() {
        for subject in &mut subjects {
            subject.rotate(&api, overlap).await;
        }
        if round == 2 {
            // The other one takes over while it goes on.
            assert!(first.stop().await.success());
        }
        let seen = receiver.received().len();
        receiver.wait_for(seen + 100).await;
    }
    over.send_replace(true);
    let deliveries = emitter.await.expect("emitted") * subjects.len();
    let received = receiver.wait_for(deliveries).await;
    let started = until("all attempts are recorded", || async {
        let started = started_at(&database).await;
        (started.len() >= deliveries).then_some(started)
    })
    .await;

    let mut cases = Vec::new();
    let mut gaps = 0;
    for request in &received {
        let of = |subject: &&Subject| request.path.ends_with(&subject.endpoint.id);
        let subject = subjects.iter().find(of).expect("one of ours");
        let key = (subject.endpoint.id.clone(), request.event_id().to_owned());
        let started = started[&key];
        let mut known = 0;
        for span in &subject.spans {
            if let Some(valid) = span.signs(started) {
                known += usize::from(valid);
                cases.push(Case {
                    request,
                    format: subject.format,
                    secret: &span.secret,
                    valid,
                });
            }
        }
        // While a rotation was being asked for, one of the two signs; at no time does none.
        let any = subject
            .spans
            .iter()
            .any(|span| request.verifies(subject.format, &span.secret));
        gaps += usize::from(!any);
        assert!(known <= 3, "{key:?}");
    }
    assert_eq!(gaps, 0);
    assert!(deliveries >= 2_000);
    let answers = judge(&cases);
    let refused = cases.iter().filter(|case| !case.valid).count();
    println!(
        "{deliveries} deliveries, {} cases ({refused} must be refused), {answers} answers, 0 gaps",
        cases.len()
    );
    drop(second);
}

/// When each attempt started, by endpoint and event.
async fn started_at(database: &Database) -> HashMap<(String, String), DateTime<Utc>> {
    let rows: Vec<(String, String, DateTime<Utc>)> = sqlx::query_as(
        "select e.public_id, v.chosen_id, a.started_at
         from postrider.attempts a
         join postrider.events v on v.id = a.event_id
         join postrider.endpoints e on e.id = a.endpoint_id",
    )
    .fetch_all(&mut database.connect().await)
    .await
    .expect("read");
    rows.into_iter()
        .map(|(endpoint, event, at)| ((endpoint, event), at))
        .collect()
}

#[tokio::test]
async fn both_sign_until_the_old_one_retires_the_newest_first() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    let (status, answer) = rotate(&api, &endpoint, json!({ "overlap_seconds": 1 })).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let new = answer["data"][0]["secret"].as_str().expect("a secret");
    assert_eq!(answer["data"][1]["secret"], json!(endpoint.secret));
    assert_eq!(
        [&answer["data"][0]["state"], &answer["data"][1]["state"]],
        ["current", "retiring"]
    );
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let both = receiver.wait_for(1).await.remove(0);
    assert_eq!(both.verify(&endpoint.secret), Ok(()));
    let newest_only = both.header("webhook-signature").rsplit_once(',').expect("two").0;
    let mut request = both.clone();
    request
        .headers
        .insert("webhook-signature", newest_only.parse().expect("a header"));
    assert_eq!(request.verify(new), Ok(()), "the newest stands first");
    until("the old one retires", || async {
        (secrets(&api, &endpoint).await.len() == 1).then_some(())
    })
    .await;
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let request = receiver.wait_for(2).await.remove(1);
    assert_eq!(request.verify(new), Ok(()));
    assert!(request.verify(&endpoint.secret).is_err());
}

#[tokio::test]
async fn an_overlap_of_nothing_revokes_at_once_also_for_what_waits_in_line() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api
        .acme(&receiver.url("/hook"), json!({ "concurrency": 1 }))
        .await;
    receiver.answer(Answer::Hold);
    for _ in 0..5 {
        api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
            .await;
    }
    receiver.wait_in_flight(1).await;
    let (status, answer) = rotate(&api, &endpoint, json!({ "overlap_seconds": 0 })).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(answer["data"].as_array().map(Vec::len), Some(1));
    let new = answer["data"][0]["secret"].as_str().expect("a secret");
    receiver.release();
    for request in &receiver.wait_for(5).await[1..] {
        assert_eq!(request.verify(new), Ok(()));
        assert!(request.verify(&endpoint.secret).is_err());
    }
}

#[tokio::test]
async fn a_fourth_secret_in_force_is_refused_with_the_reason_and_changes_nothing() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    let endpoint = api.acme("http://127.0.0.1:9/hook", json!({})).await;
    for _ in 0..2 {
        assert_eq!(rotate(&api, &endpoint, json!({})).await.0, StatusCode::OK);
    }
    let before = secrets(&api, &endpoint).await;
    assert_eq!(before.len(), 3);
    let created: Vec<_> = before.iter().map(|secret| time(&secret["created_at"])).collect();
    assert!(created.is_sorted_by(|a, b| a > b), "the newest first");
    let (status, problem) = rotate(&api, &endpoint, json!({})).await;
    assert_eq!(status, StatusCode::CONFLICT);
    let told = problem["detail"].as_str().expect("a reason");
    assert!(
        told.starts_with("At most 3 secrets can be active at a time"),
        "{told}"
    );
    assert_eq!(secrets(&api, &endpoint).await, before);
    // The way out after a leak is always open.
    let (status, answer) = rotate(&api, &endpoint, json!({ "overlap_seconds": 0 })).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(answer["data"].as_array().map(Vec::len), Some(1));
}

#[tokio::test]
async fn an_own_secret_is_taken_when_it_is_strong_enough_and_of_the_right_form() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let own = "of-another-sender-24-byt";
    let endpoint = api.acme(&receiver.url("/hook"), json!({ "secret": own })).await;
    assert_eq!(endpoint.secret, own);
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    assert_eq!(receiver.wait_for(1).await[0].verify(own), Ok(()));
    let standard = api
        .endpoint("acme", &receiver.url("/s"), json!({ "signature": "standard" }))
        .await;
    for (endpoint, body) in [
        (&endpoint, json!({ "secret": "of-another-sender-23-by" })),
        (&endpoint, json!({ "secret": own })),
        (&endpoint, json!({ "overlap_seconds": -1 })),
        (&endpoint, json!({ "overlap_seconds": 7 * 86_400 + 1 })),
        (&standard, json!({ "secret": "of-another-sender-with-no-prefix" })),
        (&standard, json!({ "secret": "whsec_c2hvcnQ=" })),
    ] {
        let (status, problem) = rotate(&api, endpoint, body.clone()).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{body} {problem}");
    }
    let next = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let week = json!({ "secret": next, "overlap_seconds": 7 * 86_400 });
    assert_eq!(rotate(&api, &standard, week).await.0, StatusCode::OK);
    assert_eq!(secrets(&api, &standard).await[0]["secret"], next);
}

#[tokio::test]
async fn a_key_pair_signs_and_only_its_public_half_is_ever_shown() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.tenant("acme").await;
    api.event_type("invoice.paid").await;
    let body = json!({ "url": receiver.url("/hook"), "signature": "standard-ed25519" });
    let (status, made) = api
        .call(Method::POST, "/tenants/acme/endpoints", Some(body))
        .await;
    assert_eq!(status, StatusCode::CREATED, "{made}");
    assert_eq!(made["secret"], Value::Null);
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let endpoint = Endpoint {
        id: text(&made["id"]),
        secret: text(&made["public_key"]),
    };
    assert!(endpoint.secret.starts_with("whpk_"));
    let (status, rotated) = rotate(&api, &endpoint, json!({})).await;
    assert_eq!(status, StatusCode::OK, "{rotated}");
    assert!(!rotated.to_string().contains("whsk_"), "{rotated}");
    let new = text(&rotated["data"][0]["public_key"]);
    let seen = api.get(&format!("/tenants/acme/endpoints/{}", endpoint.id)).await;
    assert_eq!(seen["public_key"], json!(new));
    api.emit(
        "acme",
        json!({ "type": "invoice.paid", "data": { "name": "żółć" } }),
    )
    .await;
    let request = receiver.wait_for(1).await.remove(0);
    assert!(request.header("webhook-signature").starts_with("v1a,"));
    let mut changed = request.clone();
    changed.body = [request.body.as_ref(), b" "].concat().into();
    let case = |request, secret, valid| Case {
        request,
        format: "standard-ed25519",
        secret,
        valid,
    };
    let stranger = "whpk_6kpsY+KcUgq+9VB7Ey7F+ZVHdq6+vnuSQh7qaRRG0iw=";
    judge(&[
        case(&request, &new, true),
        case(&request, &endpoint.secret, true),
        case(&request, stranger, false),
        case(&changed, &new, false),
    ]);
    assert!(request.verifies("standard-ed25519", &new));
    // An HMAC secret can't take its place, nor the pair that of an HMAC secret.
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    let (status, _) = api
        .call(Method::PATCH, &path, Some(json!({ "signature": "t-v1" })))
        .await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
}

#[tokio::test]
async fn a_rotation_that_is_asked_for_twice_with_one_key_happens_once() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    let endpoint = api.acme("http://127.0.0.1:9/hook", json!({})).await;
    let url = program.url(&format!(
        "/v1/tenants/acme/endpoints/{}/secret/rotate",
        endpoint.id
    ));
    let client = crate::support::http_client().build().expect("a client");
    let mut answers = Vec::new();
    for _ in 0..2 {
        let request = client.post(&url).bearer_auth(ADMIN_API_KEY);
        let answer = request.header("idempotency-key", "once").send().await;
        answers.push(answer.expect("an answer").text().await.expect("a body"));
    }
    assert_eq!(answers[0], answers[1]);
    assert_eq!(secrets(&api, &endpoint).await.len(), 2);
}

/// Keeps the dispatcher from reading changed settings, while it goes on sending and renewing its lease.
async fn settings_held_up(database: &Database) -> sqlx::PgConnection {
    let mut holder = database.connect().await;
    sqlx::raw_sql("begin; lock table postrider.endpoint_health in access exclusive mode")
        .execute(&mut holder)
        .await
        .expect("locked");
    holder
}

/// A dashboard and a dispatcher that has sent to the endpoint and so holds its settings.
async fn dispatcher_that_knows(database: &Database, receiver: &Receiver) -> (Postrider, Postrider, Endpoint) {
    let dashboard = Postrider::on_database("dashboard", database).start().await;
    let dispatcher = Postrider::on_database("dispatcher", database).start().await;
    let api = dashboard.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    api.emit(
        "acme",
        json!({ "type": "invoice.paid", "id": "first", "data": {} }),
    )
    .await;
    receiver.wait_for(1).await;
    database.drained().await;
    (dashboard, dispatcher, endpoint)
}

#[tokio::test]
async fn a_rotation_is_in_effect_only_when_its_sender_applied_it_whatever_the_table_says_of_the_lease() {
    let (database, receiver) = (Database::fresh().await, Receiver::start().await);
    let (dashboard, _dispatcher, endpoint) = dispatcher_that_knows(&database, &receiver).await;
    let api = dashboard.api();
    let holder = settings_held_up(&database).await;
    let rotating = tokio::spawn({
        let (api, endpoint) = (api.clone(), endpoint.clone());
        async move { rotate(&api, &endpoint, json!({ "overlap_seconds": 0 })).await }
    });
    // A server whose clock steps, as after a failover, sees every lease at its end. Its owner sends all the same.
    for _ in 0..20 {
        database
            .execute("update postrider.dispatchers set expires_at = clock_timestamp() - interval '1 minute'")
            .await;
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        assert!(
            !rotating.is_finished(),
            "the owner is alive and signs with the secret that was revoked"
        );
    }
    drop(holder);
    let (status, answer) = rotating.await.expect("answered");
    assert_eq!(status, StatusCode::OK, "{answer}");
    api.emit(
        "acme",
        json!({ "type": "invoice.paid", "id": "second", "data": {} }),
    )
    .await;
    let secret = answer["data"][0]["secret"].as_str().expect("a secret");
    let second = &receiver.wait_for(2).await[1];
    assert_eq!(second.verify(secret), Ok(()));
    assert!(second.verify(&endpoint.secret).is_err());
}

#[tokio::test]
async fn a_repeated_rotation_gives_the_same_secret_and_is_answered_only_when_it_is_in_effect() {
    let (database, receiver) = (Database::fresh().await, Receiver::start().await);
    let (dashboard, _dispatcher, endpoint) = dispatcher_that_knows(&database, &receiver).await;
    let api = dashboard.api();
    let path = format!("/tenants/acme/endpoints/{}/secret/rotate", endpoint.id);
    let body = json!({ "overlap_seconds": 0 });
    let holder = settings_held_up(&database).await;
    let (status, _, answer) = api.post_with_key(&path, "rotation-1", body.clone()).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{answer}");
    let repeat = tokio::spawn({
        let (api, path, body) = (api.clone(), path.clone(), body.clone());
        async move { api.post_with_key(&path, "rotation-1", body).await }
    });
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    assert!(!repeat.is_finished(), "it is not in effect yet");
    drop(holder);
    let (status, replayed, answer) = until("the rotation is in effect", || async {
        let (status, replayed, answer) = api.post_with_key(&path, "rotation-1", body.clone()).await;
        (status == StatusCode::OK).then_some((status, replayed, answer))
    })
    .await;
    assert!(replayed && status == StatusCode::OK);
    let in_force = secrets(&api, &endpoint).await;
    assert_eq!(in_force.len(), 1, "one rotation, and the old secret is revoked");
    assert_eq!(answer["data"][0]["secret"], in_force[0]["secret"]);
    assert_ne!(in_force[0]["secret"], endpoint.secret);
}
