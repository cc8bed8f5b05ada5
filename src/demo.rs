//! The demo of the first start: a tenant, a receiver in this process, one event that is delivered and one that fails.
//! Invariant: everything is created through the API, as a user would. It is created once; what a user has deleted does not
//! come back.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, bail};
use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode},
    routing::post,
};
use chrono::Utc;
use postrider_proto::signature::{Secret, verify};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::{net::TcpListener, time};
use tokio_util::sync::CancellationToken;

use crate::{connect, data_dir::DataDir};

pub(crate) const TENANT: &str = "demo";
pub(crate) const PAID: &str = "demo.invoice.paid";
const OVERDUE: &str = "demo.invoice.overdue";
const VERSION: &str = "2026-01-15";
const GOOD: &str = "Demo: verifies the signature and responds with 204";
const BROKEN: &str = "Demo: responds with 500 to everything";
/// Marks in the data directory that the demo has been created.
const MADE: &str = "demo-made";

const READY_TIMEOUT: Duration = Duration::from_secs(60);
const READY_POLL: Duration = Duration::from_millis(20);
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns when the API is ready.
pub(crate) async fn wait_for_api(api_url: &str, stop: &CancellationToken) -> anyhow::Result<()> {
    let client = client()?;
    let ready = async {
        loop {
            let response = client.get(format!("{api_url}/readyz")).send().await;
            if response.is_ok_and(|response| response.status().is_success()) {
                return;
            }
            time::sleep(READY_POLL).await;
        }
    };
    tokio::select! {
        () = ready => Ok(()),
        () = stop.cancelled() => Ok(()),
        () = time::sleep(READY_TIMEOUT) => bail!("the API was not ready within {} s", READY_TIMEOUT.as_secs()),
    }
}

/// The demo's receiver, bound but not serving yet.
pub(crate) struct Receiver {
    listener: TcpListener,
    secret: Secret,
}

#[expect(clippy::disallowed_methods, reason = "a note in a file")]
pub(crate) async fn start(
    data_dir: &DataDir,
    api_url: &str,
    api_key: &str,
    stop: &CancellationToken,
) -> anyhow::Result<Receiver> {
    let secret = data_dir.keep("demo-secret", || {
        Secret::from_random(&rand::random::<[u8; 32]>())
            .reveal()
            .to_owned()
    })?;
    let listener = TcpListener::bind("127.0.0.1:0")
        .await
        .context("the demo receiver cannot listen on loopback")?;
    let receiver = Receiver {
        secret: Secret::new(&secret.value),
        listener,
    };
    let api = Api {
        client: client()?,
        url: format!("{api_url}/v1"),
        key: api_key.to_owned(),
    };
    let prepare = async {
        if data_dir.read(MADE)?.is_none() {
            api.make(&receiver).await?;
            data_dir.write(MADE, &Utc::now().to_rfc3339())?;
        } else {
            api.point_to(&receiver).await?;
        }
        anyhow::Ok(())
    };
    tokio::select! {
        made = prepare => {
            // A user may have changed the demo in unexpected ways. That must not stop the program.
            if let Err(error) = made {
                tracing::warn!("cannot prepare the demo: {error:#}");
            }
        }
        () = stop.cancelled() => {}
    }
    Ok(receiver)
}

impl Receiver {
    fn url(&self, path: &str) -> anyhow::Result<String> {
        Ok(format!(
            "{}{path}",
            connect::local_url(self.listener.local_addr()?)
        ))
    }

    pub(crate) async fn serve(self, stop: CancellationToken) -> anyhow::Result<()> {
        let routes = Router::new()
            .route("/ok", post(receive))
            .route("/broken", post(|| async { StatusCode::INTERNAL_SERVER_ERROR }))
            .with_state(Arc::new(self.secret));
        let served = axum::serve(self.listener, routes).with_graceful_shutdown(stop.cancelled_owned());
        served.await.context("the demo receiver failed")
    }
}

/// What every receiver should do: verify the signature over the raw bytes before using the payload.
#[expect(
    clippy::disallowed_methods,
    reason = "the demo receiver is another machine to the dispatcher"
)]
async fn receive(State(secret): State<Arc<Secret>>, headers: HeaderMap, body: Bytes) -> StatusCode {
    let text = |name: &str| {
        headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
    };
    let secrets = std::slice::from_ref(secret.as_ref());
    match verify(text("webhook-signature"), &body, secrets, Utc::now().timestamp()) {
        Ok(()) => {
            tracing::info!(event = text("webhook-id"), "the demo receiver accepted an event");
            StatusCode::NO_CONTENT
        }
        Err(error) => {
            tracing::warn!(
                event = text("webhook-id"),
                "the demo receiver rejected an event: {error}"
            );
            StatusCode::UNAUTHORIZED
        }
    }
}

struct Api {
    client: reqwest::Client,
    url: String,
    key: String,
}

impl Api {
    /// A start that was killed may have done some of the steps: all of them are idempotent.
    async fn make(&self, receiver: &Receiver) -> anyhow::Result<()> {
        let tenant = format!("/tenants/{TENANT}");
        let name = json!({ "name": "Demo" });
        self.call(Method::PUT, &tenant, Some(name)).await?;
        let schema = json!({
            "type": "object",
            "required": ["object", "id", "amount"],
            "properties": {
                "object": { "const": "invoice" },
                "id": { "type": "string" },
                "amount": { "type": "integer", "description": "in cents" },
            },
        });
        for (name, description) in [
            (PAID, "An invoice was paid."),
            (OVERDUE, "An invoice is overdue."),
        ] {
            let body = json!({ "description": description, "schemas": { (VERSION): schema } });
            let path = format!("/event-types/{name}");
            self.call(Method::PUT, &path, Some(body)).await?;
        }
        self.point_to(receiver).await?;
        let present = self.endpoints().await?;
        for (description, event_type, path) in [(GOOD, PAID, "/ok"), (BROKEN, OVERDUE, "/broken")] {
            if present.iter().any(|one| one["description"] == description) {
                continue;
            }
            let body = json!({
                "url": receiver.url(path)?,
                "description": description,
                "types": [event_type],
                // Short, so that the dead letter appears within seconds.
                "retry_schedule": ["0s", "1s"],
                "secret": receiver.secret.reveal(),
            });
            let path = format!("{tenant}/endpoints");
            self.call(Method::POST, &path, Some(body)).await?;
        }
        for (id, event_type) in [("demo_paid_1", PAID), ("demo_overdue_1", OVERDUE)] {
            let data = json!({ "object": "invoice", "id": "inv_1", "amount": 4200 });
            let body = json!({ "id": id, "type": event_type, "data": data });
            let path = format!("{tenant}/events");
            self.call(Method::POST, &path, Some(body)).await?;
        }
        Ok(())
    }

    /// The receiver has a different port at each start.
    async fn point_to(&self, receiver: &Receiver) -> anyhow::Result<()> {
        for endpoint in self.endpoints().await? {
            let path = match endpoint["description"].as_str() {
                Some(GOOD) => "/ok",
                Some(BROKEN) => "/broken",
                _ => continue,
            };
            let id = endpoint["id"].as_str().context("an endpoint without an id")?;
            let body = json!({ "url": receiver.url(path)? });
            let path = format!("/tenants/{TENANT}/endpoints/{id}");
            self.call(Method::PATCH, &path, Some(body)).await?;
        }
        Ok(())
    }

    async fn endpoints(&self) -> anyhow::Result<Vec<Value>> {
        let path = format!("/tenants/{TENANT}/endpoints");
        let list = self.call(Method::GET, &path, None).await?;
        Ok(list["data"].as_array().cloned().unwrap_or_default())
    }

    #[expect(clippy::disallowed_methods, reason = "a response of our own")]
    async fn call(&self, method: Method, path: &str, body: Option<Value>) -> anyhow::Result<Value> {
        let url = format!("{}{path}", self.url);
        let mut request = self.client.request(method.clone(), url).bearer_auth(&self.key);
        if let Some(body) = &body {
            request = request.json(body);
        }
        let what = || format!("{method} {path}");
        let response = request.send().await.with_context(what)?;
        let status = response.status();
        let text = response.text().await.with_context(what)?;
        if !status.is_success() {
            bail!("{method} {path} returned {status}: {text}");
        }
        Ok(serde_json::from_str(&text).unwrap_or(Value::Null))
    }
}

/// Never through a proxy: the API is in this process.
fn client() -> anyhow::Result<reqwest::Client> {
    let client = reqwest::Client::builder()
        .no_proxy()
        .timeout(CALL_TIMEOUT)
        .build();
    client.context("cannot create the HTTP client")
}
