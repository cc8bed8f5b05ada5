//! What a customer sees who came by a portal link: their own tenant, and nothing else.

use reqwest::{Method, StatusCode};
use serde_json::json;

use crate::support::{Database, Person, Postrider, Receiver};

async fn link(program: &Postrider, tenant: &str) -> String {
    let (status, made) = program
        .api()
        .call(Method::POST, &format!("/tenants/{tenant}/portal-links"), None)
        .await;
    assert_eq!(status, StatusCode::CREATED, "{made}");
    assert!(made["expires_at"].is_string(), "{made}");
    made["url"].as_str().expect("a url").to_owned()
}

fn path_of(url: &str) -> String {
    let url = url::Url::parse(url).expect("a url");
    format!("{}?{}", url.path(), url.query().expect("a token"))
}

#[tokio::test]
async fn a_portal_link_works_once_and_shows_only_the_own_tenant() {
    let database = Database::fresh().await;
    let program = Postrider::start_with(&database, &[("POSTRIDER_LOG", "debug")]).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/acme"), json!({})).await;
    api.tenant("globex").await;
    api.endpoint("globex", &receiver.url("/globex"), json!({})).await;
    for (tenant, id) in [("acme", "evt_acme"), ("globex", "evt_globex")] {
        api.emit(tenant, json!({ "id": id, "type": "invoice.paid", "data": {} }))
            .await;
    }
    let own = api.wait_for_state("acme", "delivered", 1).await;
    let foreign = api.wait_for_state("globex", "delivered", 1).await;
    let page_of =
        |delivery: &serde_json::Value| format!("/deliveries/{}", delivery["id"].as_str().expect("an id"));

    let path = path_of(&link(&program, "acme").await);
    let mut customer = Person::new(&program);
    let (status, _) = customer.look_ahead(&path).await;
    assert_eq!(status, StatusCode::NO_CONTENT, "looking ahead does not use it up");
    let entered = customer.visit_whole(&path).await;
    assert!(entered.status.is_redirection());
    assert!(!entered.location.contains("token"), "{}", entered.location);
    assert_eq!(entered.referrer_policy, "no-referrer");

    let (status, page) = customer.visit("/deliveries").await;
    assert_eq!(status, StatusCode::OK);
    assert!(
        page.contains("evt_acme") && !page.contains("evt_globex"),
        "{page}"
    );
    assert!(
        !customer
            .visit("/deliveries?tenant=globex")
            .await
            .1
            .contains("evt_globex"),
        "a filter does not widen what is seen"
    );
    assert_eq!(customer.visit(&page_of(&own[0])).await.0, StatusCode::OK);
    assert_eq!(
        customer.visit(&page_of(&foreign[0])).await.0,
        StatusCode::NOT_FOUND
    );
    let replay = format!("{}/replay", page_of(&foreign[0]));
    assert_eq!(customer.post(&replay, &[]).await.0, StatusCode::NOT_FOUND);
    for team in ["/people", "/account"] {
        assert_eq!(customer.visit(team).await.0, StatusCode::NOT_FOUND, "{team}");
    }

    let mut second = Person::new(&program);
    assert_eq!(second.visit(&path).await.0, StatusCode::GONE, "it works once");
    let token = path.split('=').nth(1).expect("a token");
    for line in program.log_lines() {
        assert!(!line.contains(token), "the token is in the log: {line}");
    }

    api.call(Method::DELETE, "/tenants/acme", None).await;
    assert!(
        customer.visit("/deliveries").await.0.is_redirection(),
        "the session ends with the tenant"
    );
}

#[tokio::test]
async fn an_old_link_and_a_forged_one_open_nothing() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    program.api().tenant("acme").await;
    let path = path_of(&link(&program, "acme").await);
    database
        .execute("update postrider.portal_links set expires_at = clock_timestamp() - interval '1 s'")
        .await;
    let mut customer = Person::new(&program);
    assert_eq!(customer.visit(&path).await.0, StatusCode::GONE);
    let forged = format!("/portal?token={}", "A".repeat(43));
    assert_eq!(customer.visit(&forged).await.0, StatusCode::GONE);
    assert_eq!(customer.visit("/portal?token=x").await.0, StatusCode::GONE);
    assert!(customer.visit("/deliveries").await.0.is_redirection());
    let kept = database
        .count("select count(*) from postrider.portal_links where octet_length(token_hash) <> 32")
        .await;
    assert_eq!(kept, 0);
    let (status, _) = program
        .api()
        .call(Method::POST, "/tenants/nobody/portal-links", None)
        .await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    let (status, _) = program
        .api()
        .call(
            Method::POST,
            "/tenants/acme/portal-links",
            Some(json!({"forever": true})),
        )
        .await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
}

#[tokio::test]
async fn e3_links_and_sessions_that_were_withdrawn_open_nothing() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    program.api().tenant("acme").await;
    let (used, unused) = (
        path_of(&link(&program, "acme").await),
        path_of(&link(&program, "acme").await),
    );
    let mut inside = Person::new(&program);
    assert!(inside.visit(&used).await.0.is_redirection());
    assert_eq!(inside.visit("/deliveries").await.0, StatusCode::OK);

    let mut admin = Person::signed_in(&program).await;
    let (status, page) = admin.post("/tenants/acme/end-sessions", &[]).await;
    assert!(
        status.is_redirection() || status == StatusCode::OK,
        "{status} {page}"
    );
    assert!(inside.visit("/deliveries").await.0.is_redirection(), "signed out");
    let mut late = Person::new(&program);
    assert_eq!(late.visit(&unused).await.0, StatusCode::GONE);
    assert_eq!(admin.visit("/deliveries").await.0, StatusCode::OK, "others stay");
}
