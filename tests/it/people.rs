//! People of the team: what each role may do, and how they sign in and out.

use reqwest::StatusCode;
use serde_json::json;

use crate::support::{Answer, Database, Form, Person, Postrider, Receiver, text_of};

/// Adds a person as the admin would, and answers their password.
async fn add(admin: &mut Person<'_>, login: &str, role: &str) -> String {
    let fields = [("login", login), ("role", role)];
    let (status, page) = admin.post("/people", &fields).await;
    assert_eq!(status, StatusCode::OK, "{page}");
    text_of(&page, "new-password")
}

#[tokio::test]
async fn an_operator_replays_and_read_only_changes_nothing() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(500));
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({ "retry_schedule": ["0s"] }))
        .await;
    api.emit(
        "acme",
        json!({ "id": "evt_1", "type": "invoice.paid", "data": {} }),
    )
    .await;
    let dead = api.wait_for_state("acme", "dead", 1).await;
    let page_of = format!("/deliveries/{}", dead[0]["id"].as_str().expect("an id"));
    let mut admin = Person::signed_in(&program).await;
    let looker = add(&mut admin, "looker@example.com", "read-only").await;
    let operator = add(&mut admin, "op", "operator").await;

    let mut person = Person::new(&program);
    assert!(
        person
            .sign_in_as("looker@example.com", &looker)
            .await
            .is_redirection()
    );
    let (status, page) = person.visit(&page_of).await;
    assert_eq!(status, StatusCode::OK);
    assert!(
        !page.contains("/replay\""),
        "no button for what may not be done: {page}"
    );
    let (status, page) = person.post(&format!("{page_of}/replay"), &[("seen", "1")]).await;
    assert_eq!(status, StatusCode::FORBIDDEN, "{page}");
    for closed in ["/people"] {
        assert_eq!(person.visit(closed).await.0, StatusCode::FORBIDDEN, "{closed}");
    }

    let mut person = Person::new(&program);
    assert!(person.sign_in_as("op", &operator).await.is_redirection());
    receiver.answer(Answer::Status(204));
    let (_, page) = person.visit(&page_of).await;
    assert!(
        person
            .submit(&Form::find(&page, "/replay"))
            .await
            .0
            .is_redirection()
    );
    api.wait_for_state("acme", "delivered", 1).await;
    let (status, _) = person
        .post("/people", &[("login", "friend"), ("role", "admin")])
        .await;
    assert_eq!(status, StatusCode::FORBIDDEN);

    // A role that is taken away is gone with the next click, and a person who is removed is out.
    let (_, page) = admin.visit("/people").await;
    let form = Form::find(&page, "/people/op/role").with("role", "read-only");
    assert!(admin.submit(&form).await.0.is_redirection());
    assert_eq!(
        person
            .post(&format!("{page_of}/replay"), &[("seen", "2")])
            .await
            .0,
        StatusCode::FORBIDDEN
    );
    assert!(
        admin
            .submit(&Form::find(&page, "/people/op/remove"))
            .await
            .0
            .is_redirection()
    );
    assert!(person.visit("/deliveries").await.0.is_redirection());
    assert_eq!(person.sign_in_as("op", &operator).await, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn e6_whoever_only_looks_sees_no_secret() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let more = json!({ "headers": { "X-Token": "a-token-of-the-endpoint" } });
    let endpoint = program.api().acme(&receiver.url("/hook"), more).await;
    let mut admin = Person::signed_in(&program).await;
    let page_of = format!("/endpoints/{}", endpoint.id);
    let reveal = format!("{page_of}/secrets/reveal");
    let (status, page) = admin.post(&reveal, &[]).await;
    assert_eq!(status, StatusCode::OK);
    assert!(page.contains(&endpoint.secret), "an admin may see it: {page}");
    for (login, role) in [("looker", "read-only"), ("op", "operator")] {
        let password = add(&mut admin, login, role).await;
        let mut person = Person::new(&program);
        assert!(person.sign_in_as(login, &password).await.is_redirection());
        for tail in ["", "/settings", "/secrets"] {
            let (status, page) = person.visit(&format!("{page_of}{tail}")).await;
            assert_eq!(status, StatusCode::OK, "{role} {tail}");
            for hidden in [endpoint.secret.as_str(), "a-token-of-the-endpoint"] {
                assert!(!page.contains(hidden), "{role} {tail}: {page}");
            }
        }
        for closed in [&reveal, &format!("{page_of}/secrets/rotate")] {
            let (status, page) = person.post(closed, &[]).await;
            assert_eq!(status, StatusCode::FORBIDDEN, "{role} {closed}: {page}");
        }
    }
}

#[tokio::test]
async fn a_person_changes_their_password_and_signs_out_everywhere() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let mut admin = Person::signed_in(&program).await;
    let first = add(&mut admin, "ada", "read-only").await;
    let mut here = Person::new(&program);
    let mut there = Person::new(&program);
    for person in [&mut here, &mut there] {
        assert!(person.sign_in_as("ada", &first).await.is_redirection());
    }

    let (_, page) = here.visit("/account").await;
    let form = |current: &str, new: &str| {
        Form::find(&page, "/account/password")
            .fill("current", current)
            .fill("new", new)
    };
    for (current, new) in [("wrong", "a good long password"), (first.as_str(), "short")] {
        let (status, page) = here.submit(&form(current, new)).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{page}");
    }
    let (status, _) = here.submit(&form(&first, "a good long password")).await;
    assert!(status.is_redirection());
    for person in [&mut here, &mut there] {
        assert!(person.visit("/account").await.0.is_redirection(), "signed out");
        assert_eq!(person.sign_in_as("ada", &first).await, StatusCode::UNAUTHORIZED);
        assert!(
            person
                .sign_in_as("ada", "a good long password")
                .await
                .is_redirection()
        );
    }

    let (_, page) = here.visit("/account").await;
    let form = Form::find(&page, "/sign-out-everywhere");
    assert!(here.submit(&form).await.0.is_redirection());
    assert!(
        there.visit("/account").await.0.is_redirection(),
        "signed out elsewhere"
    );
    assert_eq!(admin.visit("/account").await.0, StatusCode::OK, "others stay");
}

#[tokio::test]
async fn whoever_guesses_has_to_wait_whether_or_not_the_login_exists() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    for login in ["admin", "nobody"] {
        let mut person = Person::new(&program);
        let mut answers = Vec::new();
        for _ in 0..12 {
            answers.push(person.sign_in_as(login, "a guess").await.as_u16());
        }
        let (tried, waited) = answers.split_at(10);
        assert_eq!(tried, [401; 10], "{login}");
        assert_eq!(waited, [429; 2], "{login}");
    }
}
