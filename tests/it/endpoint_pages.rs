//! An endpoint in a person's hands: added, changed, paused, tested, its secret rotated, all by forms.

use reqwest::StatusCode;
use serde_json::json;

use crate::support::{Answer, Database, Form, Person, Postrider, Receiver};

#[tokio::test]
async fn an_endpoint_is_added_changed_paused_and_deleted_by_forms() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/first"), json!({})).await;
    let mut person = Person::signed_in(&program).await;

    let (status, page) = person
        .post(
            "/endpoints",
            &[
                ("tenant", "acme"),
                ("url", "ftp://example.com/"),
                ("timeout_ms", "soon"),
            ],
        )
        .await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(
        page.contains("must be a whole number") && page.contains("ftp://example.com/"),
        "what was typed is still there: {page}"
    );
    let fields = [
        ("tenant", "acme"),
        ("url", &receiver.url("/added")),
        ("types", "invoice.*"),
        ("headers", "X-Token: secret-token"),
        ("description", "<b>bold</b>"),
    ];
    let (status, _) = person.post("/endpoints", &fields).await;
    assert!(status.is_redirection());
    let listed = api.get("/tenants/acme/endpoints").await;
    let added = &listed["data"][1];
    let id = added["id"].as_str().expect("an id").to_owned();
    assert_eq!(added["types"], json!(["invoice.*"]));
    assert_eq!(added["headers"], json!({ "X-Token": "[hidden]" }));

    let (_, page) = person.visit(&format!("/endpoints/{id}/settings")).await;
    assert!(
        page.contains("X-Token") && !page.contains("secret-token"),
        "{page}"
    );
    assert!(!page.contains("<b>bold</b>"), "a description is text");
    let form = Form::find(&page, "/settings")
        .fill("url", &receiver.url("/changed"))
        .with("types", "*")
        .with("signature", "t-v1")
        .fill("concurrency", "3");
    assert!(person.submit(&form).await.0.is_redirection());
    let changed = api.get(&format!("/tenants/acme/endpoints/{id}")).await;
    assert_eq!(changed["concurrency"], 3);
    assert_eq!(
        changed["headers"],
        json!({ "X-Token": "[hidden]" }),
        "the same host keeps them"
    );

    let (_, page) = person.visit(&format!("/endpoints/{id}")).await;
    assert!(
        person
            .submit(&Form::find(&page, "/pause"))
            .await
            .0
            .is_redirection()
    );
    let paused = api.get(&format!("/tenants/acme/endpoints/{id}")).await;
    assert_eq!(paused["state"], "paused");
    let (_, page) = person.visit(&format!("/endpoints/{id}")).await;
    assert!(
        person
            .submit(&Form::find(&page, "/resume"))
            .await
            .0
            .is_redirection()
    );
    let (_, page) = person.visit(&format!("/endpoints/{id}/settings")).await;
    assert!(
        person
            .submit(&Form::find(&page, "/delete"))
            .await
            .0
            .is_redirection()
    );
    assert_eq!(
        person.visit(&format!("/endpoints/{id}")).await.0,
        StatusCode::NOT_FOUND
    );
}

#[tokio::test]
async fn an_endpoint_that_fails_says_since_when_with_what_and_what_to_do() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let settings = json!({
        "types": ["invoice.*"], "retry_schedule": ["0s"], "rate_per_second": 70,
        "filter": { "/amount": { "gte": 0 } },
    });
    let endpoint = api.acme(&receiver.url("/hook"), settings).await;
    let mut person = Person::signed_in(&program).await;
    let path = format!("/endpoints/{}", endpoint.id);
    let (_, page) = person.visit(&path).await;
    for part in [
        "invoice.*",
        "&#34;gte&#34;: 0",
        "70 requests per second",
        "16 requests at a time",
        &endpoint.id,
    ] {
        assert!(page.contains(part), "no {part} in {page}");
    }
    assert!(!page.contains("Failing since"), "{page}");

    receiver.answer(Answer::Status(401));
    for _ in 0..3 {
        api.emit("acme", json!({ "type": "invoice.paid", "data": { "amount": 1 } }))
            .await;
    }
    let dead = api.wait_for_state("acme", "dead", 3).await;
    let (_, page) = person.visit(&path).await;
    for part in [
        "Failing since",
        "every request gets 401 Unauthorized",
        "3 events not delivered",
        "will be disabled after",
        "Check the signature",
        "Replay 3",
    ] {
        assert!(page.contains(part), "no {part} in {page}");
    }
    let debugger = page.split("href=\"/signatures?delivery=").nth(1).expect("a link");
    let failed = debugger.split('"').next().unwrap_or_default();
    assert!(dead.iter().any(|one| one["id"] == failed), "{failed} {dead:?}");
    receiver.answer(Answer::Status(500));
    api.emit("acme", json!({ "type": "invoice.paid", "data": { "amount": 1 } }))
        .await;
    api.wait_for_state("acme", "dead", 4).await;
    let (_, page) = person.visit(&path).await;
    assert!(
        page.contains("requests fail in several ways, the latest one gets 500"),
        "{page}"
    );

    receiver.answer(Answer::Status(204));
    let preview = format!("/dead-letters/preview?endpoint={}&kind=failed", endpoint.id);
    assert!(page.contains(&preview.replace('&', "&amp;")), "{page}");
    let (_, preview) = person.visit(&preview).await;
    assert!(preview.contains("4 deliveries will be replayed"), "{preview}");
    assert!(
        person
            .submit(&Form::find(&preview, "/replays"))
            .await
            .0
            .is_redirection()
    );
    api.wait_for_state("acme", "delivered", 4).await;
    let (_, page) = person.visit(&path).await;
    assert!(
        !page.contains("Failing since") && !page.contains("not delivered."),
        "{page}"
    );
}

#[tokio::test]
async fn a_test_event_and_a_probe_are_told_on_the_page() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(418));
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    let mut person = Person::signed_in(&program).await;
    let (_, page) = person.visit(&format!("/endpoints/{}", endpoint.id)).await;
    let (status, tested) = person.submit_and_follow(&Form::find(&page, "/test")).await;
    assert_eq!(status, StatusCode::OK);
    assert!(tested.contains(">failed<") && tested.contains("418"), "{tested}");
    assert_eq!(receiver.wait_for(1).await[0].header("webhook-test"), "true");
    let (status, probed) = person.submit_and_follow(&Form::find(&page, "/probe")).await;
    assert_eq!(status, StatusCode::OK, "{probed}");
    assert!(probed.contains("of 100") && probed.contains(">Fail<"), "{probed}");
}

#[tokio::test]
async fn a_secret_is_hidden_until_revealed_and_both_are_in_force_after_a_rotation() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api
        .acme(&receiver.url("/hook"), json!({ "rotate_every_days": 30 }))
        .await;
    let mut person = Person::signed_in(&program).await;
    let path = format!("/endpoints/{}/secrets", endpoint.id);
    let (_, page) = person.visit(&path).await;
    assert!(
        !page.contains(&endpoint.secret) && page.contains("Every 30 days"),
        "{page}"
    );
    let (status, revealed) = person.submit_and_follow(&Form::find(&page, "/reveal")).await;
    assert_eq!(status, StatusCode::OK);
    assert!(revealed.contains(&endpoint.secret));
    let form = Form::find(&page, "/rotate").with("overlap_seconds", "3600");
    assert!(person.submit(&form).await.0.is_redirection());
    let (_, page) = person.visit(&path).await;
    assert!(
        page.contains("state current") && page.contains("state retiring"),
        "{page}"
    );
    assert!(
        page.contains("data-countdown"),
        "the old one's end is counted down"
    );
    let (_, page) = person.visit("/endpoints/rotations").await;
    assert!(page.contains("two active secrets"), "{page}");
    let audit = api.get("/audit").await;
    assert!(audit.to_string().contains("secret.revealed"), "{audit}");
}
