//! Operational events: what Postrider itself tells of, to whom, and that it never tells of its own telling.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{Answer, Api, Database, Postrider, Received, Receiver, until};

fn body(request: &Received) -> Value {
    serde_json::from_slice(&request.body).expect("JSON")
}

fn of_type(receiver: &Receiver, name: &str) -> Vec<Value> {
    receiver
        .received()
        .iter()
        .map(body)
        .filter(|event| event["type"] == name)
        .collect()
}

async fn wait_for_type(receiver: &Receiver, name: &'static str, count: usize) -> Vec<Value> {
    receiver
        .wait_until(name, |receiver| of_type(receiver, name).len() >= count)
        .await;
    of_type(receiver, name)
}

/// Every notice was told, and everything told was sent.
async fn told(database: &Database) {
    until("everything was told", || async {
        let left = "select (select count(*) from postrider.notices) + (select count(*) from postrider.queue)";
        (database.count(left).await == 0).then_some(())
    })
    .await;
}

async fn emit(api: &Api, id: &str) {
    api.emit("acme", json!({ "id": id, "type": "invoice.paid", "data": {} }))
        .await;
}

#[tokio::test]
async fn a_dead_letter_is_told_of_and_one_about_an_operational_event_is_not() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let (broken, listener, team) = (
        Receiver::start().await,
        Receiver::start().await,
        Receiver::start().await,
    );
    broken.answer(Answer::Status(503));
    let api = program.api();
    let endpoint = api
        .acme(&broken.url("/hook"), json!({ "retry_schedule": ["0s"] }))
        .await;
    // Fails too: its own dead letters must not be told of.
    listener.answer(Answer::Status(500));
    let operational = json!({ "types": ["postrider.*"], "retry_schedule": ["0s"] });
    api.endpoint("acme", &listener.url("/ops"), operational.clone())
        .await;
    let all = json!({ "all_operational_events": true });
    let (status, answer) = api.call(Method::PUT, "/tenants/team", Some(all)).await;
    assert_eq!(status, StatusCode::CREATED, "{answer}");
    api.endpoint("team", &team.url("/ops"), operational).await;

    emit(&api, "e1").await;
    let event = wait_for_type(&listener, "postrider.delivery.dead", 1)
        .await
        .remove(0);
    let data = &event["data"];
    assert_eq!(data["tenant"], "acme", "{event}");
    assert_eq!(
        (&data["event"], &data["type"]),
        (&json!("e1"), &json!("invoice.paid")),
        "{event}"
    );
    assert_eq!(data["endpoint"], json!(endpoint.id), "{event}");
    assert_eq!(
        (&data["reason"], &data["last_status"]),
        (&json!("exhausted"), &json!(503)),
        "{event}"
    );
    let link = data["link"].as_str().expect("a link");
    assert!(
        link.starts_with("http") && link.ends_with(data["delivery"].as_str().expect("an id")),
        "{link}"
    );
    let heard = wait_for_type(&team, "postrider.delivery.dead", 1).await.remove(0);
    assert_eq!(
        heard["data"]["tenant"], "acme",
        "the team hears of it too: {heard}"
    );

    until("the listener's own delivery is dead", || async {
        (database
            .count("select count(*) from postrider.dead_letters")
            .await
            == 2)
            .then_some(())
    })
    .await;
    // Another one, so that whatever the first dead letter of the listener caused would have been told by now.
    emit(&api, "e2").await;
    wait_for_type(&team, "postrider.delivery.dead", 2).await;
    told(&database).await;
    assert_eq!(
        of_type(&team, "postrider.delivery.dead").len(),
        2,
        "one for each of the two events"
    );
    let types: Vec<Value> = broken
        .received()
        .iter()
        .map(|r| body(r)["type"].clone())
        .collect();
    assert!(
        types.iter().all(|name| name == "invoice.paid"),
        "`*` does not match them: {types:?}"
    );
}

#[tokio::test]
async fn an_alert_goes_off_once_and_again_only_after_the_dead_letters_were_fewer() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let (broken, listener) = (Receiver::start().await, Receiver::start().await);
    broken.answer(Answer::Status(500));
    let api = program.api();
    let endpoint = api
        .acme(&broken.url("/hook"), json!({ "retry_schedule": ["0s"] }))
        .await;
    let types = json!({ "types": ["postrider.alert.dead_letters"] });
    api.endpoint("acme", &listener.url("/ops"), types).await;
    let path = format!("/tenants/acme/endpoints/{}/alert", endpoint.id);
    let put = |count: i64| api.call(Method::PUT, &path, Some(json!({ "dead_letters": count })));
    assert_eq!(put(0).await.0, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(api.call(Method::GET, &path, None).await.0, StatusCode::NOT_FOUND);
    let (status, alert) = put(3).await;
    assert_eq!(
        (status, &alert["triggered_at"]),
        (StatusCode::OK, &Value::Null),
        "{alert}"
    );

    for n in 0..5 {
        emit(&api, &format!("first{n}")).await;
        database.drained().await;
    }
    let event = wait_for_type(&listener, "postrider.alert.dead_letters", 1)
        .await
        .remove(0);
    let data = &event["data"];
    assert!(data["dead_letters"].as_i64() >= Some(3), "{event}");
    assert_eq!(
        (&data["threshold"], &data["type"]),
        (&json!(3), &json!("invoice.paid")),
        "{event}"
    );
    assert_eq!(
        (&data["endpoint"], &data["last_status"]),
        (&json!(endpoint.id), &json!(500)),
        "{event}"
    );
    assert!(
        data["link"]
            .as_str()
            .is_some_and(|link| link.contains(&endpoint.id)),
        "{event}"
    );
    assert!(api.get(&path).await["triggered_at"].is_string());

    broken.answer(Answer::Status(204));
    let replay = json!({ "endpoint": endpoint.id });
    api.call(Method::POST, "/tenants/acme/replays", Some(replay))
        .await;
    until("it is armed again", || async {
        api.get(&path).await["triggered_at"].is_null().then_some(())
    })
    .await;
    assert_eq!(
        of_type(&listener, "postrider.alert.dead_letters").len(),
        1,
        "one, not one each"
    );
    broken.answer(Answer::Status(500));
    for n in 0..3 {
        emit(&api, &format!("second{n}")).await;
        database.drained().await;
    }
    wait_for_type(&listener, "postrider.alert.dead_letters", 2).await;
    assert_eq!(
        api.call(Method::DELETE, &path, None).await.0,
        StatusCode::NO_CONTENT
    );
    assert_eq!(
        api.call(Method::DELETE, &path, None).await.0,
        StatusCode::NOT_FOUND
    );
}

#[tokio::test]
async fn a_disabled_endpoint_and_its_recovery_are_told_of_and_a_hiccup_is_not() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let (broken, listener) = (Receiver::start().await, Receiver::start().await);
    let api = program.api();
    let endpoint = api
        .acme(&broken.url("/hook"), json!({ "retry_schedule": ["0s", "50ms"] }))
        .await;
    api.endpoint(
        "acme",
        &listener.url("/ops"),
        json!({ "types": ["postrider.endpoint.*"] }),
    )
    .await;
    broken.script([Answer::Status(500)]);
    emit(&api, "hiccup").await;
    broken.wait_for(2).await;
    database.drained().await;

    broken.script([Answer::Status(410)]);
    emit(&api, "gone").await;
    let told_of = wait_for_type(&listener, "postrider.endpoint.disabled", 1)
        .await
        .remove(0);
    assert_eq!(
        (&told_of["data"]["tenant"], &told_of["data"]["reason"]),
        (&json!("acme"), &json!("gone"))
    );
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    api.call(Method::PATCH, &path, Some(json!({ "enabled": true })))
        .await;
    emit(&api, "back").await;
    let event = wait_for_type(&listener, "postrider.endpoint.recovered", 1)
        .await
        .remove(0);
    assert_eq!(event["data"]["endpoint"], json!(endpoint.id), "{event}");
    assert_eq!(
        event["data"]["dead_letters"], 1,
        "what can be replayed now: {event}"
    );
    told(&database).await;
    assert_eq!(of_type(&listener, "postrider.endpoint.recovered").len(), 1);
}

#[tokio::test]
async fn a_rotation_by_hand_is_told_of_once_and_a_refused_one_is_not() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let (receiver, listener) = (Receiver::start().await, Receiver::start().await);
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    let operational = json!({ "types": ["postrider.secret.rotating"] });
    api.endpoint("acme", &listener.url("/ops"), operational).await;
    let path = format!("/tenants/acme/endpoints/{}/secret/rotate", endpoint.id);
    let rotate = |overlap: i64| {
        let (api, path) = (api.clone(), path.clone());
        async move {
            let body = json!({ "overlap_seconds": overlap });
            api.call(Method::POST, &path, Some(body)).await
        }
    };
    assert_eq!(rotate(-1).await.0, StatusCode::UNPROCESSABLE_ENTITY);
    let (status, secrets) = rotate(3600).await;
    assert_eq!(status, StatusCode::OK, "{secrets}");
    let event = wait_for_type(&listener, "postrider.secret.rotating", 1)
        .await
        .remove(0);
    let data = &event["data"];
    assert_eq!(
        (&data["tenant"], &data["endpoint"], &data["overlap_seconds"]),
        (&json!("acme"), &json!(endpoint.id), &json!(3600)),
        "{event}"
    );
    assert_eq!(data["url"], json!(receiver.url("/hook")), "{event}");
    let rotated = secrets["data"][0]["created_at"].as_str().expect("a time");
    let told = data["rotates_at"].as_str().expect("a time");
    assert_eq!(told[..19], rotated[..19], "{event}");
    assert!(!event.to_string().contains("whsec_"), "{event}");
    told_of_nothing_else(&database, &listener, 1).await;
}

async fn told_of_nothing_else(database: &Database, listener: &Receiver, count: usize) {
    told(database).await;
    assert_eq!(listener.count(), count);
}

/// A fault that one endpoint's events meet, whatever it is.
#[tokio::test]
async fn a_notice_that_can_not_be_told_of_does_not_hold_up_the_others() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let (broken, listener) = (Receiver::start().await, Receiver::start().await);
    broken.answer(Answer::Status(503));
    let api = program.api();
    let dead_at_once = json!({ "retry_schedule": ["0s"] });
    let operational = json!({ "types": ["postrider.*"], "retry_schedule": ["0s"] });
    api.acme(&broken.url("/first"), dead_at_once.clone()).await;
    api.endpoint("acme", &listener.url("/acme"), operational.clone())
        .await;
    api.tenant("other").await;
    api.endpoint("other", &broken.url("/second"), dead_at_once).await;
    api.endpoint("other", &listener.url("/other"), operational).await;
    database
        .execute(
            "create function postrider.planted() returns trigger language plpgsql as $$ begin
                if new.tenant_id = (select id from postrider.tenants where slug = 'acme')
                   and new.type_id = (select id from postrider.event_types where name = 'postrider.delivery.dead') then
                    raise exception 'planted';
                end if;
                return new;
             end $$;
             create trigger planted before insert on postrider.queue for each row execute function postrider.planted()",
        )
        .await;
    emit(&api, "e1").await;
    api.wait_for_state("acme", "dead", 1).await;
    api.emit("other", json!({ "id": "e2", "type": "invoice.paid", "data": {} }))
        .await;
    listener
        .wait_until("the other's is told", |receiver| {
            receiver.received().iter().any(|request| request.path == "/other")
        })
        .await;
    database.execute("drop trigger planted on postrider.queue").await;
    listener
        .wait_until("the first one's is told later", |receiver| {
            receiver.received().iter().any(|request| request.path == "/acme")
        })
        .await;
    told(&database).await;
}
