//! People of the team: what each role may do, and how they sign in and out.

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::support::{ADMIN_PASSWORD, Answer, Database, Form, Person, Postrider, Receiver, text_of, until};

/// Adds a person as the admin would, and answers their password.
async fn add(admin: &mut Person<'_>, login: &str, role: &str) -> String {
    let fields = [("login", login), ("role", role)];
    let (status, page) = admin.post_and_follow("/people", &fields).await;
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
    let form = Form::find(&page, "/people/op/role")
        .with("role", "read-only")
        .fill("confirmed", "yes");
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
    let (status, page) = admin.post_and_follow(&reveal, &[]).await;
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

const BEHIND_PROXY: [(&str, &str); 1] = [("POSTRIDER_TRUSTED_PROXIES", "10.0.0.0/8, 127.0.0.0/8")];

#[tokio::test]
async fn strangers_who_guess_do_not_keep_the_right_person_out() {
    let database = Database::fresh().await;
    let program = Postrider::start_with(&database, &BEHIND_PROXY).await;
    for stranger in 1..=6 {
        let mut person = Person::behind_proxy(&program, &format!("203.0.113.{stranger}, 10.0.0.9"));
        let mut answers = Vec::new();
        for _ in 0..11 {
            answers.push(person.sign_in_as("admin", "a guess").await.as_u16());
        }
        assert_eq!(answers[..10], [401; 10], "each address has its own count");
        assert_eq!(answers[10], 429, "who guesses has to wait");
    }
    for turn in 0..7 {
        let mut person = Person::behind_proxy(&program, "198.51.100.7");
        let status = person.sign_in(ADMIN_PASSWORD).await;
        assert!(status.is_redirection(), "turn {turn}: {status}");
    }
}

/// Only failures count: nobody is kept waiting for having signed in often.
#[tokio::test]
async fn signing_in_is_not_counted_against_anybody() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    for turn in 0..15 {
        let status = Person::new(&program).sign_in(ADMIN_PASSWORD).await;
        assert!(status.is_redirection(), "turn {turn}: {status}");
    }
}

#[tokio::test]
async fn an_address_that_no_trusted_proxy_vouches_for_does_not_count() {
    let database = Database::fresh().await;
    let settings = [("POSTRIDER_TRUSTED_PROXIES", "10.0.0.0/8")];
    let program = Postrider::start_with(&database, &settings).await;
    let mut answers = Vec::new();
    for n in 0..12 {
        let mut person = Person::behind_proxy(&program, &format!("203.0.113.{n}"));
        answers.push(person.sign_in_as("admin", "a guess").await.as_u16());
    }
    assert_eq!(answers[10..], [429; 2], "{answers:?}");
}

/// The entries of the audit log with this action, the newest first.
async fn audited(program: &Postrider, action: &str) -> Vec<Value> {
    let log = program.api().get("/audit?limit=1000").await;
    let entries = log["data"].as_array().expect("a list");
    let found = entries.iter().filter(|entry| entry["action"] == action);
    found.cloned().collect()
}

#[tokio::test]
async fn failed_sign_ins_and_sign_outs_are_in_the_audit_log_and_do_not_flood_it() {
    let database = Database::fresh().await;
    let program = Postrider::start_with(&database, &BEHIND_PROXY).await;
    let mut person = Person::behind_proxy(&program, "203.0.113.1");
    person.sign_in_as("admin", "a guess").await;
    let first = until("the first failure is told at once", || async {
        audited(&program, "person.sign_in_failed").await.pop()
    })
    .await;
    assert_eq!(first["subject"], "admin", "{first}");
    assert_eq!(first["detail"]["address"], "203.0.113.1", "{first}");

    // A password that is typed into the wrong field is not kept, whatever it is.
    person.sign_in_as("my secret password", "x").await;
    for stranger in 2..=60 {
        let mut person = Person::behind_proxy(&program, &format!("203.0.113.{stranger}"));
        for _ in 0..2 {
            person.sign_in_as("admin", "a guess").await;
        }
    }
    let failures = audited(&program, "person.sign_in_failed").await;
    assert!((2..60).contains(&failures.len()), "{} rows", failures.len());
    let whole = serde_json::to_string(&failures).expect("JSON");
    assert!(!whole.contains("my secret password"), "{whole}");

    let mut person = Person::behind_proxy(&program, "198.51.100.7");
    assert!(person.sign_in(ADMIN_PASSWORD).await.is_redirection());
    let (_, page) = person.visit("/account").await;
    let form = Form::find(&page, "/sign-out");
    assert!(person.submit(&form).await.0.is_redirection());
    let out = audited(&program, "person.signed_out").await;
    assert_eq!(out.len(), 1, "{out:?}");
    assert_eq!(out[0]["actor"], "person:admin");
    let signed_in = audited(&program, "person.signed_in").await;
    assert_eq!(signed_in[0]["detail"]["address"], "198.51.100.7");
}
