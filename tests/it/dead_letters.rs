//! Dead letters: grouped by what failed, replayed by group, discarded.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{Answer, Api, Browser, Database, Endpoint, Form, Person, Postrider, Receiver, until};

const ALL: &str = "select count(*) from postrider.dead_letters";
const COUNTED: &str = "select coalesce(sum(count), 0)::bigint from postrider.dead_letter_counts";

/// Three dead letters that got 401, and two that got 500.
async fn dead_letters(database: &Database, api: &Api, receiver: &Receiver) -> Endpoint {
    let endpoint = api
        .acme(&receiver.url("/hook"), json!({ "retry_schedule": ["0s"] }))
        .await;
    for (status, count) in [(401, 3), (500, 2)] {
        receiver.answer(Answer::Status(status));
        for number in 0..count {
            let id = format!("evt_{status}_{number}");
            api.emit("acme", json!({ "id": id, "type": "invoice.paid", "data": {} }))
                .await;
        }
        database.drained().await;
    }
    endpoint
}

async fn states(api: &Api, state: &str) -> usize {
    api.deliveries("acme", &format!("state={state}")).await.len()
}

#[tokio::test]
async fn dead_letters_are_grouped_and_replayed_by_what_failed() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = dead_letters(&database, &api, &receiver).await;
    let groups = api.get("/tenants/acme/dead-letters").await;
    let of = |group: &Value| {
        (
            group["failure"].as_str().map(str::to_owned),
            group["count"].as_i64(),
        )
    };
    let found: Vec<_> = groups["data"]
        .as_array()
        .expect("groups")
        .iter()
        .map(of)
        .collect();
    assert_eq!(
        found,
        [
            (Some("401".to_owned()), Some(3)),
            (Some("500".to_owned()), Some(2))
        ]
    );

    let mut person = Person::signed_in(&program).await;
    let (_, page) = person.visit("/dead-letters").await;
    for part in ["401 Unauthorized", "500 Internal Server Error"] {
        assert!(page.contains(part), "no {part} in {page}");
    }
    let group = format!("{}~invoice.paid~exhausted~500", endpoint.id);
    assert!(page.contains(&group), "{page}");
    let (_, page) = person
        .visit(&format!("/dead-letters/preview?group={group}"))
        .await;
    assert!(page.contains("2 deliveries will be replayed"), "{page}");
    receiver.answer(Answer::Status(204));
    let (_, page) = person.submit_and_follow(&Form::find(&page, "/replays")).await;
    assert!(page.contains("500 Internal Server Error"), "{page}");
    api.wait_for_state("acme", "delivered", 2).await;
    assert_eq!(database.count(ALL).await, 3);
    assert_eq!(database.count(COUNTED).await, 3);

    let wrong = json!({ "endpoint": endpoint.id, "state": "delivered", "failure": "500" });
    let (status, problem) = api.call(Method::POST, "/tenants/acme/replays", Some(wrong)).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
}

#[tokio::test]
async fn a_group_is_discarded_after_a_confirmation_and_what_became_of_it_stays_visible() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = dead_letters(&database, &api, &receiver).await;
    let mut person = Person::signed_in(&program).await;
    let (status, page) = person.visit("/dead-letters/discard").await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(page.contains("Select at least one group"), "{page}");
    let group = format!("{}~invoice.paid~exhausted~401", endpoint.id);
    let (status, confirm) = person
        .visit(&format!("/dead-letters/discard?group={group}"))
        .await;
    assert_eq!(status, StatusCode::OK, "{confirm}");
    assert!(confirm.contains("Discard 3 dead letters"), "{confirm}");
    assert_eq!(states(&api, "dead").await, 5, "asking changes nothing");
    // One more of the group dies while the page is open: it was not seen.
    receiver.answer(Answer::Status(401));
    api.emit(
        "acme",
        json!({ "id": "evt_later", "type": "invoice.paid", "data": {} }),
    )
    .await;
    database.drained().await;
    let form = Form::find(&confirm, "/dead-letters/discard");
    let (_, page) = person.submit_and_follow(&form).await;
    assert!(page.contains("Dead letters discarded."), "{page}");
    assert_eq!(
        (states(&api, "dead").await, states(&api, "discarded").await),
        (3, 3)
    );
    assert_eq!(database.count(ALL).await, 3);
    assert_eq!(database.count(COUNTED).await, 3);
    let dead = api.deliveries("acme", "state=dead").await;
    assert!(dead.iter().any(|one| one["event"] == "evt_later"), "{dead:?}");
    let audit = api.get("/audit?action=dead_letters.discarded").await;
    assert_eq!(audit["data"][0]["subject"], endpoint.id.as_str(), "{audit}");
    assert_eq!(audit["data"][0]["detail"]["count"], 3, "{audit}");

    // Each can still be replayed.
    let discarded = api.deliveries("acme", "state=discarded").await;
    let id = discarded[0]["id"].as_str().expect("an id");
    let (_, page) = person.visit(&format!("/deliveries/{id}")).await;
    assert!(page.contains("state discarded"), "{page}");
    receiver.answer(Answer::Status(204));
    assert!(
        person
            .submit(&Form::find(&page, "/replay"))
            .await
            .0
            .is_redirection()
    );
    api.wait_for_state("acme", "delivered", 1).await;
    assert_eq!(states(&api, "discarded").await, 2);
}

#[tokio::test]
async fn one_dead_letter_is_discarded_and_nothing_else_can_be() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = dead_letters(&database, &api, &receiver).await;
    let dead = api.deliveries("acme", "state=dead").await;
    let id = dead[0]["id"].as_str().expect("an id");
    let mut person = Person::signed_in(&program).await;
    let (_, page) = person.visit(&format!("/deliveries/{id}")).await;
    let form = Form::find(&page, "/discard");
    let (_, page) = person.submit_and_follow(&form).await;
    assert!(
        page.contains("Dead letter discarded.") && page.contains("state discarded"),
        "{page}"
    );
    let (_, page) = person.submit_and_follow(&form).await;
    assert!(page.contains("Nothing was discarded"), "{page}");
    let path = format!("/tenants/acme/deliveries/{id}/discard");
    let (status, problem) = api.call(Method::POST, &path, None).await;
    assert_eq!(status, StatusCode::CONFLICT, "{problem}");
    let event = dead[0]["event"].as_str().expect("an event");
    let (_, page) = person.visit(&format!("/events?tenant=acme&event={event}")).await;
    assert!(page.contains("discarded"), "{page}");
    let (_, page) = person.visit("/events?tenant=acme&deliveries=none").await;
    assert!(!page.contains(event), "it had a delivery: {page}");
    let other = dead[1]["id"].as_str().expect("an id");
    let path = format!("/tenants/acme/deliveries/{other}/discard");
    let (status, delivery) = api.call(Method::POST, &path, None).await;
    assert_eq!(
        (status, &delivery["state"]),
        (StatusCode::OK, &json!("discarded")),
        "{delivery}"
    );

    // Of another tenant.
    api.tenant("globex").await;
    let foreign = dead[2]["id"].as_str().expect("an id");
    let path = format!("/tenants/globex/deliveries/{foreign}/discard");
    assert_eq!(api.call(Method::POST, &path, None).await.0, StatusCode::NOT_FOUND);
    let discard = |tenant: &str, body: Value| {
        let path = format!("/tenants/{tenant}/dead-letters/discard");
        let api = &api;
        async move { api.call(Method::POST, &path, Some(body)).await }
    };
    for (tenant, body) in [
        ("globex", json!({ "endpoint": endpoint.id })),
        ("acme", json!({})),
        ("acme", json!({ "endpoint": endpoint.id, "failure": "late" })),
    ] {
        let (status, problem) = discard(tenant, body).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
    }
    assert_eq!(states(&api, "dead").await, 3);
    let (status, done) = discard("acme", json!({ "endpoint": endpoint.id, "failure": "401" })).await;
    assert_eq!(status, StatusCode::OK, "{done}");
    assert_eq!(done, json!({ "discarded": 3, "is_complete": true }));
    assert_eq!(database.count(ALL).await, 0);
    assert_eq!(database.count(COUNTED).await, 0);
}

async fn assert_accessible(browser: &Browser) {
    for (scheme, rules) in [("dark", "color-contrast"), ("light", "all")] {
        browser.scheme(scheme).await;
        let found = browser.violations(rules).await;
        assert_eq!(
            found,
            Vec::<String>::new(),
            "{} {scheme}",
            browser.address().await
        );
    }
}

#[tokio::test]
async fn a_person_watches_an_endpoint_fail_and_discards_what_it_will_not_get() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = dead_letters(&database, &api, &receiver).await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    let page = program.url(&format!("/endpoints/{}", endpoint.id));
    browser.open(&page).await;
    browser.read("5 events not delivered").await;
    assert_accessible(&browser).await;
    receiver.answer(Answer::Status(401));
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    // By itself.
    browser.read("6 events not delivered").await;
    browser.press("Check the signature").await;
    browser.see("#signed").await;
    browser.open(&page).await;
    browser.press("View the latest failure").await;
    browser
        .read("3 other deliveries of this endpoint failed the same way")
        .await;
    browser.press("Discard…").await;
    assert_accessible(&browser).await;
    browser.press("Cancel").await;

    browser.open(&program.url("/dead-letters")).await;
    browser.click("input[data-all=group]").await;
    browser.press("Discard…").await;
    browser.read("Discard 6 dead letters?").await;
    assert_accessible(&browser).await;
    browser.press("Discard 6 dead letters").await;
    browser.read("Dead letters discarded.").await;
    browser.read("No dead letters").await;
    browser.open(&program.url("/deliveries?state=discarded")).await;
    browser.see(".state.discarded").await;
    assert_accessible(&browser).await;
    browser.close().await;
}

const WAITING: &str = "select count(*) from pg_stat_activity
    where wait_event_type = 'Lock' and datname = current_database()";

async fn wait_for_waiting(database: &Database, count: i64) {
    until("a statement waits for a lock", || async {
        (database.count(WAITING).await >= count).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_discard_beside_another_is_complete_only_if_nothing_is_left() {
    // As many as one request discards, and one more.
    const COUNT: i64 = 5_001;
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    let endpoint = api.acme("http://127.0.0.1:9/hook", json!({})).await;
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    api.call(Method::PATCH, &path, Some(json!({ "enabled": false })))
        .await;
    let dead = format!(
        "select count(postrider.emit('acme', 'invoice.paid', '{{}}')) from generate_series(1, {COUNT});
         insert into postrider.dead_letters (endpoint_id, event_id, tenant_id, type_id, reason, failure, attempt)
         select endpoint_id, event_id, tenant_id, type_id, 'exhausted', 500, 1 from postrider.queue;
         insert into postrider.dead_letter_counts (endpoint_id, type_id, reason, failure, tenant_id, count)
         select endpoint_id, type_id, reason, failure, tenant_id, count(*) from postrider.dead_letters group by 1, 2, 3, 4, 5;
         delete from postrider.queue"
    );
    database.execute(&dead).await;
    let path = "/tenants/acme/dead-letters/discard";
    let body = json!({ "endpoint": endpoint.id });
    // The other one takes the oldest, which the request has picked as well.
    let mut other = database.connect().await;
    let take = "begin;
        with taken as (delete from postrider.dead_letters
                       where event_id = (select event_id from postrider.dead_letters order by event_id limit 1) returning endpoint_id)
        select from taken";
    sqlx::raw_sql(take).execute(&mut other).await.expect("taken");
    let request = api.call(Method::POST, path, Some(body.clone()));
    let commit = async {
        wait_for_waiting(&database, 1).await;
        sqlx::raw_sql("update postrider.dead_letter_counts set count = count - 1; commit")
            .execute(&mut other)
            .await
            .expect("committed");
    };
    let ((status, done), ()) = tokio::join!(request, commit);
    assert_eq!(status, StatusCode::OK, "{done}");
    assert_eq!(done, json!({ "discarded": COUNT - 2, "is_complete": false }));
    let (_, done) = api.call(Method::POST, path, Some(body)).await;
    assert_eq!(done, json!({ "discarded": 1, "is_complete": true }));
    assert_eq!(database.count(ALL).await, 0);
    assert_eq!(database.count(COUNTED).await, 0);
}

#[tokio::test]
async fn two_discards_of_the_same_groups_wait_for_each_other_and_do_not_deadlock() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = dead_letters(&database, &api, &receiver).await;
    let group = |failure: u16| format!("group={}~invoice.paid~exhausted~{failure}", endpoint.id);
    let (mut first, mut second) = (
        Person::signed_in(&program).await,
        Person::signed_in(&program).await,
    );
    let (_, page) = first
        .visit(&format!("/dead-letters/discard?{}&{}", group(401), group(500)))
        .await;
    let form = Form::find(&page, "/dead-letters/discard");
    let (_, page) = second
        .visit(&format!("/dead-letters/discard?{}&{}", group(500), group(401)))
        .await;
    let reversed = Form::find(&page, "/dead-letters/discard");
    // Both have to wait for a row of the group that the first one begins with.
    let mut other = database.connect().await;
    let lock = "begin; select from postrider.dead_letters where failure = 401 for update";
    sqlx::raw_sql(lock).execute(&mut other).await.expect("locked");
    let one = first.submit_and_follow(&form);
    let two = async {
        wait_for_waiting(&database, 1).await;
        second.submit_and_follow(&reversed).await
    };
    let release = async {
        wait_for_waiting(&database, 2).await;
        sqlx::raw_sql("commit")
            .execute(&mut other)
            .await
            .expect("released");
    };
    let ((_, one), (_, two), ()) = tokio::join!(one, two, release);
    assert!(one.contains("Dead letters discarded."), "{one}");
    assert!(!two.contains("Internal"), "{two}");
    assert_eq!(states(&api, "discarded").await, 5);
    assert_eq!(database.count(ALL).await, 0);
    assert_eq!(database.count(COUNTED).await, 0);
    let deadlocks = "select deadlocks from pg_stat_database where datname = current_database()";
    assert_eq!(database.count(deadlocks).await, 0);
}
