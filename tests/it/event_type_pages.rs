//! Event types on the pages: created and given versions, and nothing published that was not reviewed.

use reqwest::{Method, StatusCode};
use serde_json::json;

use crate::support::{Browser, Database, Form, Person, Postrider};

const FIRST: &str =
    r#"{"type":"object","required":["id"],"properties":{"id":{"type":"string"},"note":{"type":"string"}}}"#;
const OPEN: &str = r#"{"type":"object","properties":{"note":{"type":"string"}}}"#;
const SECOND: &str =
    r#"{"type":"object","required":["id"],"properties":{"id":{"type":"string"},"total":{"type":"integer"}}}"#;

#[tokio::test]
async fn a_new_version_is_reviewed_with_what_it_breaks_before_it_is_published() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.press("Event types").await;
    browser.press("New event type").await;
    browser.fill("#name", "Invoice Paid").await;
    browser.fill("#schema", r#"{"type":"strng"}"#).await;
    browser.press("Review").await;
    browser.see("#name[aria-invalid]").await;
    browser.see("#schema[aria-invalid]").await;
    browser.read("is not an event type name").await;
    for (scheme, rules) in [("light", "all"), ("dark", "color-contrast")] {
        browser.scheme(scheme).await;
        assert_eq!(browser.violations(rules).await, Vec::<String>::new(), "{scheme}");
    }
    browser.fill("#name", "invoice.paid").await;
    browser.fill("#description", "An invoice was paid").await;
    browser.fill("#version", "2026-01-15").await;
    browser.fill("#schema", FIRST).await;
    browser.press("Review").await;
    browser.press("Publish version").await;
    browser.read("Version published.").await;

    browser.press("New version").await;
    browser.fill("#version", "2026-02-01").await;
    browser.fill("#schema", SECOND).await;
    browser.press("Review").await;
    browser.read("Breaking changes for consumers of 2026-01-15").await;
    browser.read("/note was removed from the schema").await;
    for (scheme, rules) in [("light", "all"), ("dark", "color-contrast")] {
        browser.scheme(scheme).await;
        assert_eq!(browser.violations(rules).await, Vec::<String>::new(), "{scheme}");
    }
    let before = api.get("/event-types/invoice.paid").await;
    assert_eq!(before["versions"], json!(["2026-01-15"]), "only reviewed");
    browser.press("Publish despite breaking changes").await;
    browser.read("Version published.").await;
    let stored = api.get("/event-types/invoice.paid").await;
    assert_eq!(stored["versions"], json!(["2026-01-15", "2026-02-01"]));
    assert_eq!(stored["description"], "An invoice was paid");
    browser.close().await;
}

#[tokio::test]
async fn nothing_is_published_that_was_not_reviewed_as_it_is() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.event_type("invoice.paid").await;
    let mut person = Person::signed_in(&program).await;
    let (status, page) = person.visit("/event-types/invoice.paid/new-version").await;
    assert_eq!(status, StatusCode::OK);
    let blank = |page: &str| Form::find(page, "/event-types#review").fill("version", "v9");
    let reviewed = blank(&page).with("schema", OPEN).with("step", "review");
    let (status, page) = person.submit(&reviewed).await;
    assert_eq!(status, StatusCode::OK);
    assert!(page.contains("Compatible: no breaking changes"), "{page}");

    let thin = blank(&page)
        .with("schema", OPEN)
        .fill("thin", "on")
        .with("step", "publish");
    let (status, page) = person.submit(&thin).await;
    assert_eq!(status, StatusCode::OK, "it was not reviewed as thin: {page}");

    // Changed after the review: the page shows the report of what would be published instead.
    let changed = blank(&page).with("schema", SECOND).with("step", "publish");
    let (status, page) = person.submit(&changed).await;
    assert_eq!(status, StatusCode::OK);
    assert!(page.contains("Publish despite breaking changes"), "{page}");
    let versions = api.get("/event-types/invoice.paid").await["versions"].clone();
    assert_eq!(versions.as_array().map(Vec::len), Some(1), "{versions}");

    // Another one is published in between: the report was about an older one.
    let between = json!({ "schemas": { "v8": { "type": "object" } } });
    api.call(Method::PUT, "/event-types/invoice.paid", Some(between))
        .await;
    let late = blank(&page).with("schema", SECOND).with("step", "publish");
    let (status, page) = person.submit(&late).await;
    assert_eq!(status, StatusCode::OK);
    assert!(page.contains("Changes from <code>v8</code>"), "{page}");
    let now = blank(&page).with("schema", SECOND).with("step", "publish");
    let (status, page) = person.submit(&now).await;
    assert!(status.is_redirection(), "{page}");

    let (_, page) = person.visit("/event-types/new-type").await;
    let unnamed = blank(&page).fill("name", "a\0").with("schema", OPEN);
    let (status, page) = person.submit(&unnamed.with("step", "review")).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{page}");

    // A version is published once, and a type is created once.
    let (_, page) = person.visit("/event-types/invoice.paid/new-version").await;
    let again = blank(&page).with("schema", SECOND).with("step", "review");
    let (status, page) = person.submit(&again).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(page.contains("Version is already published"), "{page}");
    let other = blank(&page).with("schema", FIRST).with("step", "review");
    let (status, page) = person.submit(&other).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(
        page.contains("already published with a different schema"),
        "{page}"
    );
    let (_, page) = person.visit("/event-types/new-type").await;
    let taken = blank(&page)
        .fill("name", "invoice.paid")
        .with("schema", FIRST)
        .with("step", "review");
    let (status, page) = person.submit(&taken).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(page.contains("already exists: add a version to it"), "{page}");
    let (status, _) = person.visit("/event-types/no.such/new-version").await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    let (_, page) = person.visit("/event-types/postrider.delivery.dead").await;
    assert!(!page.contains("/new-version"), "Postrider's own: {page}");
}

#[tokio::test]
async fn a_type_is_deleted_after_a_confirmation_and_is_back_with_its_versions_when_created_again() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    api.event_type("invoice.paid").await;
    let event = json!({ "type": "invoice.paid", "data": {} });
    assert!(api.emit("acme", event.clone()).await.0.is_success());
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    let page = program.url("/event-types/invoice.paid");
    browser.open(&page).await;
    browser.press("Delete…").await;
    browser.see("dialog#delete:modal").await;
    browser.press("Cancel").await;
    assert!(api.emit("acme", event.clone()).await.0.is_success(), "only asked");
    browser.press("Delete…").await;
    browser.press("Delete event type").await;
    browser
        .read("Event type deleted. New events of this type are rejected.")
        .await;
    assert!(!browser.words().await.contains("invoice.paid"));
    assert_eq!(
        api.emit("acme", event.clone()).await.0,
        StatusCode::UNPROCESSABLE_ENTITY
    );
    let audit = api.get("/audit?action=event_type.deleted").await;
    assert_eq!(audit["data"][0]["subject"], "invoice.paid", "{audit}");
    browser.close().await;

    api.event_type("invoice.paid").await;
    assert!(api.emit("acme", event).await.0.is_success());
    // Postrider's own types are not for deleting, and only admins delete others.
    let own = "/event-types/postrider.endpoint.disabled";
    let (status, problem) = api.call(Method::DELETE, own, None).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
    let mut admin = Person::signed_in(&program).await;
    let (_, page) = admin.visit(own).await;
    assert!(!page.contains("Delete…"), "{page}");
    let (status, _) = admin.post("/event-types/no.such/delete", &[]).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}
