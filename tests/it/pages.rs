//! The dashboard as a person without a browser sees it: sign in by the form, find the dead letter, replay it.

use reqwest::StatusCode;
use serde_json::json;

use crate::support::{ADMIN_PASSWORD, Answer, Database, Form, Person, Postrider, Receiver};

#[tokio::test]
async fn a_person_signs_in_sees_the_dead_letter_and_replays_it() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(500));
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({ "retry_schedule": ["0s"] }))
        .await;
    api.emit(
        "acme",
        json!({ "id": "evt_page", "type": "invoice.paid", "data": {} }),
    )
    .await;
    api.wait_for_state("acme", "dead", 1).await;

    let mut person = Person::new(&program);
    assert!(
        person.visit("/dead-letters").await.0.is_redirection(),
        "nothing is shown to a stranger"
    );
    assert!(person.sign_in(ADMIN_PASSWORD).await.is_redirection());
    let (status, page) = person.visit("/dead-letters").await;
    assert_eq!(status, StatusCode::OK);
    assert!(
        page.contains("evt_page") && page.contains("All attempts failed"),
        "{page}"
    );

    for (tenant, finds) in [("acme", true), ("nobody", false)] {
        let (_, page) = person.visit(&format!("/dead-letters?tenant={tenant}")).await;
        assert_eq!(page.contains("evt_page"), finds, "{tenant}: {page}");
    }

    receiver.answer(Answer::Status(204));
    let form = Form::find(&page, "/replay");
    assert!(person.submit(&form).await.0.is_redirection());
    assert_eq!(receiver.wait_for(2).await[1].event_id(), "evt_page");
    let delivered = api.wait_for_state("acme", "delivered", 1).await;
    let id = delivered[0]["id"].as_str().expect("an id");
    let (status, page) = person.visit(&format!("/deliveries/{id}")).await;
    assert_eq!(status, StatusCode::OK);
    assert!(
        page.contains("500") && page.contains("204"),
        "both attempts are shown: {page}"
    );
    assert!(!person.visit("/dead-letters").await.1.contains("evt_page"));
}

#[tokio::test]
async fn a_wrong_password_and_a_form_without_its_token_are_refused() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(500));
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({ "retry_schedule": ["0s"] }))
        .await;
    api.emit(
        "acme",
        json!({ "id": "evt_page", "type": "invoice.paid", "data": {} }),
    )
    .await;
    api.wait_for_state("acme", "dead", 1).await;
    let mut person = Person::new(&program);
    assert!(!person.sign_in("wrong password").await.is_redirection());
    assert!(person.visit("/deliveries").await.0.is_redirection());
    assert!(person.sign_in(ADMIN_PASSWORD).await.is_redirection());
    let (_, page) = person.visit("/dead-letters").await;
    let mut form = Form::find(&page, "/replay");
    form.forget();
    assert!(person.submit(&form).await.0.is_client_error());
    assert_eq!(receiver.received().len(), 1);
}
