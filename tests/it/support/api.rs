//! The HTTP API as a client sees it, with builders for what most tests need.

use std::time::Duration;

use reqwest::{Client, Method, StatusCode};
use serde_json::{Value, json};

use super::until;

pub(crate) const VERSION: &str = "2026-01-15";

#[derive(Clone)]
pub(crate) struct Api {
    client: Client,
    base: String,
    key: String,
}

/// An endpoint as the answer to its making tells it.
#[derive(Debug, Clone)]
pub(crate) struct Endpoint {
    pub(crate) id: String,
    pub(crate) secret: String,
}

impl Api {
    pub(crate) fn new(base: String, key: &str) -> Self {
        let client = crate::support::http_client()
            .timeout(Duration::from_secs(30))
            .build()
            .expect("a client");
        Self {
            client,
            base,
            key: key.to_owned(),
        }
    }

    pub(crate) async fn is_ready(&self) -> bool {
        let answer = self.client.get(format!("{}/readyz", self.base)).send().await;
        answer.is_ok_and(|answer| answer.status() == StatusCode::OK)
    }

    pub(crate) async fn call(&self, method: Method, path: &str, body: Option<Value>) -> (StatusCode, Value) {
        self.send(method, path, body.map(|body| body.to_string())).await
    }

    /// The body as it stands: for what is not JSON, or must not be written anew.
    pub(crate) async fn send(&self, method: Method, path: &str, body: Option<String>) -> (StatusCode, Value) {
        let mut request = self
            .client
            .request(method, format!("{}/v1{path}", self.base))
            .bearer_auth(&self.key);
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body);
        }
        let answer = request.send().await.expect("an answer");
        let status = answer.status();
        let text = answer.text().await.expect("a body");
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    /// For what is not even text.
    pub(crate) async fn send_bytes(&self, method: Method, path: &str, body: Vec<u8>) -> (StatusCode, String) {
        let request = self
            .client
            .request(method, format!("{}/v1{path}", self.base))
            .bearer_auth(&self.key)
            .body(body);
        let answer = request.send().await.expect("an answer");
        (answer.status(), answer.text().await.expect("a body"))
    }

    /// An answer to be read bit by bit, which may take long.
    pub(crate) async fn stream(&self, path: &str) -> reqwest::Response {
        let request = self
            .client
            .get(format!("{}/v1{path}", self.base))
            .bearer_auth(&self.key)
            .timeout(Duration::from_secs(600));
        request.send().await.expect("an answer")
    }

    /// With an `Idempotency-Key`: the status, whether it is the first answer again, and the answer.
    pub(crate) async fn post_with_key(
        &self,
        path: &str,
        key: &str,
        body: Value,
    ) -> (StatusCode, bool, Value) {
        self.try_post_with_key(path, key, body).await.expect("an answer")
    }

    /// None when the program went away meanwhile.
    pub(crate) async fn try_post_with_key(
        &self,
        path: &str,
        key: &str,
        body: Value,
    ) -> Option<(StatusCode, bool, Value)> {
        let request = self
            .client
            .post(format!("{}/v1{path}", self.base))
            .bearer_auth(&self.key)
            .header("idempotency-key", key.as_bytes())
            .header("content-type", "application/json")
            .body(body.to_string());
        let answer = request.send().await.ok()?;
        let replayed = answer.headers().get("idempotent-replayed").is_some();
        let status = answer.status();
        let text = answer.text().await.ok()?;
        Some((
            status,
            replayed,
            serde_json::from_str(&text).unwrap_or(Value::String(text)),
        ))
    }

    async fn made(&self, method: Method, path: &str, body: Value) -> Value {
        let (status, answer) = self.call(method.clone(), path, Some(body)).await;
        assert!(status.is_success(), "{method} {path}: {status} {answer}");
        answer
    }

    pub(crate) async fn get(&self, path: &str) -> Value {
        let (status, answer) = self.call(Method::GET, path, None).await;
        assert!(status.is_success(), "GET {path}: {status} {answer}");
        answer
    }

    pub(crate) async fn tenant(&self, tenant: &str) {
        self.made(Method::PUT, &format!("/tenants/{tenant}"), json!({}))
            .await;
    }

    /// A type that takes any object.
    pub(crate) async fn event_type(&self, name: &str) {
        let body = json!({ "schemas": { (VERSION): { "type": "object" } } });
        self.made(Method::PUT, &format!("/event-types/{name}"), body)
            .await;
    }

    /// `more` is merged into the endpoint's body.
    pub(crate) async fn endpoint(&self, tenant: &str, url: &str, more: Value) -> Endpoint {
        let mut body = json!({ "url": url });
        if let (Value::Object(body), Value::Object(more)) = (&mut body, more) {
            body.extend(more);
        }
        let made = self
            .made(Method::POST, &format!("/tenants/{tenant}/endpoints"), body)
            .await;
        let text = |name: &str| {
            made[name]
                .as_str()
                .unwrap_or_else(|| panic!("no {name} in {made}"))
                .to_owned()
        };
        Endpoint {
            id: text("id"),
            secret: text("secret"),
        }
    }

    /// The one tenant and type that many tests use, and an endpoint for everything.
    pub(crate) async fn acme(&self, url: &str, more: Value) -> Endpoint {
        self.tenant("acme").await;
        self.event_type("invoice.paid").await;
        self.endpoint("acme", url, more).await
    }

    pub(crate) async fn emit(&self, tenant: &str, event: Value) -> (StatusCode, Value) {
        self.call(Method::POST, &format!("/tenants/{tenant}/events"), Some(event))
            .await
    }

    pub(crate) async fn deliveries(&self, tenant: &str, query: &str) -> Vec<Value> {
        let list = self.get(&format!("/tenants/{tenant}/deliveries?{query}")).await;
        list["data"].as_array().expect("a list").clone()
    }

    /// Waits for a tenant's deliveries in this state.
    pub(crate) async fn wait_for_state(&self, tenant: &str, state: &str, count: usize) -> Vec<Value> {
        let what = format!("{count} deliveries of {tenant} are {state}");
        until(&what, || async {
            let found = self
                .deliveries(tenant, &format!("state={state}&limit=1000"))
                .await;
            (found.len() >= count).then_some(found)
        })
        .await
    }
}
