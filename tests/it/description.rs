//! The API's description as the running program serves it, and the figures.

use reqwest::{Response, StatusCode};
use serde_json::Value;

use crate::support::{ADMIN_API_KEY, Database, Postrider};

async fn get(program: &Postrider, path: &str, key: Option<&str>) -> Response {
    let mut request = crate::support::http_client()
        .build()
        .expect("a client")
        .get(program.url(path));
    if let Some(key) = key {
        request = request.bearer_auth(key);
    }
    request.send().await.expect("an answer")
}

#[tokio::test]
async fn anybody_can_read_the_description_and_only_admins_the_figures() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;

    let served: Value = serde_json::from_str(
        &get(&program, "/openapi.json", None)
            .await
            .text()
            .await
            .expect("a body"),
    )
    .expect("JSON");
    assert_eq!(served["openapi"], "3.1.0");
    let kept: Value = serde_json::from_str(include_str!("../../docs/openapi.json")).expect("JSON");
    assert!(served == kept, "docs/openapi.json is not what is served");

    let page = get(&program, "/docs", None).await;
    assert_eq!(page.status(), StatusCode::OK);
    let policy = page.headers()["content-security-policy"]
        .to_str()
        .expect("a policy");
    assert!(policy.contains("default-src 'none'"), "{policy}");
    let html = page.text().await.expect("a page");
    assert!(html.contains("/v1/tenants/{tenant}/events/batch") && !html.contains("<script"));
    for outside in ["http://", "https://", "//"] {
        for place in ["href=", "src="] {
            assert!(!html.contains(&format!("{place}\"{outside}")), "{place}{outside}");
        }
    }

    assert_eq!(
        get(&program, "/metrics", None).await.status(),
        StatusCode::UNAUTHORIZED
    );
    program.api().tenant("acme").await;
    let (_, producer) = program
        .api()
        .call(
            reqwest::Method::POST,
            "/api-keys",
            Some(serde_json::json!({"role": "producer", "name": "p"})),
        )
        .await;
    let key = producer["key"].as_str().expect("a key");
    assert_eq!(
        get(&program, "/metrics", Some(key)).await.status(),
        StatusCode::FORBIDDEN
    );
    let figures = get(&program, "/metrics", Some(ADMIN_API_KEY)).await;
    assert_eq!(figures.status(), StatusCode::OK);
    assert!(figures.text().await.expect("a body").contains("postrider_"));
}
