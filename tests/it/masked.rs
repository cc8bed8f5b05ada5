//! An endpoint's custom headers are shown masked. What is masked is never stored, and none is sent to another place than it
//! was meant for.

use reqwest::{Method, StatusCode};
use serde_json::json;

use crate::support::{Database, Person, Postrider, Receiver};

const MASK: &str = "[hidden]";

#[tokio::test]
async fn a_masked_value_is_not_taken_for_a_header() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let url = receiver.url("/hook");
    let more = json!({ "headers": { "X-A": "real", "X-B": "other" } });
    let endpoint = api.acme(&url, more).await;
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    let shown = api.get(&path).await["headers"].clone();
    assert_eq!(shown["X-A"], MASK);

    let (status, problem) = api
        .call(Method::PATCH, &path, Some(json!({ "headers": shown })))
        .await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
    assert_eq!(problem["errors"][0]["pointer"], "/headers/X-A", "{problem}");
    assert_eq!(problem["errors"][1]["pointer"], "/headers/X-B", "{problem}");
    let body = json!({ "url": url, "headers": { "X-A": "Bearer [hidden]" } });
    let (status, problem) = api
        .call(Method::POST, "/tenants/acme/endpoints", Some(body))
        .await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
    assert_eq!(problem["errors"][0]["pointer"], "/headers/X-A", "{problem}");

    let mut person = Person::signed_in(&program).await;
    let settings = format!("/endpoints/{}/settings", endpoint.id);
    let (status, _) = person
        .post(&settings, &[("url", &url), ("headers", "X-A: [hidden]")])
        .await;
    assert!(!status.is_redirection(), "{status}: the form comes back");

    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let sent = receiver.wait_for(1).await;
    assert_eq!(sent[0].header("x-a"), "real");
}

#[tokio::test]
async fn headers_do_not_follow_an_endpoint_to_plain_http() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    let more = json!({ "headers": { "Authorization": "Bearer token" } });
    let endpoint = api.acme("https://127.0.0.1:8443/hook", more).await;
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    let move_to = async |url: &str| {
        let (status, told) = api.call(Method::PATCH, &path, Some(json!({ "url": url }))).await;
        assert_eq!(status, StatusCode::OK, "{told}");
        told["headers"].clone()
    };
    let kept = move_to("https://127.0.0.1:8443/other").await;
    assert_eq!(kept["Authorization"], MASK);
    let dropped = move_to("http://127.0.0.1:8443/other").await;
    assert!(
        dropped.as_object().is_none_or(serde_json::Map::is_empty),
        "{dropped}"
    );
}
