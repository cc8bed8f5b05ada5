//! One HTTP request, guarded. The only place that opens connections to addresses strangers typed in.
//!
//! Invariants: HTTP/1.1, no redirects, no proxy from the environment, no decompression, no cookies, no silent resend; an
//! address is connected to only after the guard allowed that very address (`send/connect.rs`); one time limit over
//! everything. A failing receiver is an [`Outcome`], never an `Err`.

mod answer;
mod body;
mod connect;
mod names;
#[cfg(test)]
mod tests;
mod words;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use hyper_util::{
    client::legacy::{Client, connect::capture_connection},
    rt::{TokioExecutor, TokioTimer},
};
use postrider_proto::{Outcome, OutcomeKind};
use url::Url;

use answer::Progress;
pub use answer::retry_after;
use body::Body;
use connect::{Connector, PeerCertificate};
use names::Names;

use crate::{
    guard::Guard,
    lease::Right,
    tls::{TlsFault, TlsSettings, Trust},
};

const USER_AGENT: &str = concat!("Postrider/", env!("CARGO_PKG_VERSION"));
const ANSWER_HEADERS_MAX: usize = 100;
/// All headers of an answer together.
const ANSWER_HEAD_BYTES_MAX: usize = 64 * 1024;
const IDLE_CONNECTION_LIFE: Duration = Duration::from_secs(30);
/// Clients for endpoints with TLS settings of their own. The one that was not used for longest goes.
const OWN_CLIENTS_MAX: usize = 256;

type HttpClient = Client<Connector, Body>;

/// One client for all endpoints but those with TLS settings of their own; those share one for each distinct settings.
#[derive(Clone)]
pub struct Sender {
    client: HttpClient,
    guard: Arc<Guard>,
    names: Names,
    trust: Trust,
    own_clients: Arc<Mutex<HashMap<[u8; 32], OwnClient>>>,
}

struct OwnClient {
    client: HttpClient,
    used: Instant,
}

#[derive(Debug, thiserror::Error)]
pub enum SenderError {
    #[error("the machine's name servers can't be read: {0}")]
    Names(String),
    #[error("TLS can't be used: {0}")]
    Tls(#[from] TlsFault),
}

/// What goes out. Its body is sent as it is.
pub struct Request<'a> {
    pub url: &'a Url,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub timeout: Duration,
    /// The endpoint's own certificates.
    pub tls: Option<&'a TlsSettings>,
    /// Nothing goes out once this is over. None: whenever.
    pub right: Option<Right>,
}

impl Sender {
    pub fn new(guard: Guard) -> Result<Self, SenderError> {
        let trust = Trust::of_machine();
        let guard = Arc::new(guard);
        let names = Names::new().map_err(|error| SenderError::Names(error.to_string()))?;
        let connector = Connector {
            guard: guard.clone(),
            names: names.clone(),
            tls: trust.config(&TlsSettings::default())?,
        };
        Ok(Self {
            client: client(connector),
            guard,
            names,
            trust,
            own_clients: Arc::default(),
        })
    }

    pub async fn send(&self, request: Request<'_>) -> Outcome {
        self.send_and_see(request).await.0
    }

    /// The outcome, and the certificate of a server that answered over TLS.
    pub async fn send_and_see(&self, request: Request<'_>) -> (Outcome, Option<Vec<u8>>) {
        let mut certificate = None;
        let outcome = self.exchange(request, &mut certificate).await;
        (outcome, certificate.map(|PeerCertificate(bytes)| bytes.to_vec()))
    }

    async fn exchange(&self, request: Request<'_>, certificate: &mut Option<PeerCertificate>) -> Outcome {
        let limit = request.timeout;
        // Settings may have changed since the URL was saved.
        if let Err(refusal) = self.guard.check_target(request.url) {
            return Outcome::Forbidden {
                error: refusal.to_string(),
            };
        }
        let client = match self.client_for(request.tls) {
            Ok(client) => client,
            Err(fault) => {
                return Outcome::Unreachable {
                    kind: OutcomeKind::TlsFailed,
                    error: format!("the endpoint's own certificates can't be used: {fault}"),
                };
            }
        };
        let mut outgoing = match outgoing(request) {
            Ok(outgoing) => outgoing,
            Err(error) => {
                return Outcome::Forbidden {
                    error: error.to_string(),
                };
            }
        };
        let connection = capture_connection(&mut outgoing);
        let mut progress = Progress::default();
        let exchange = async {
            let response = client.request(outgoing).await;
            let response = response.map_err(|error| words::unreachable(&error))?;
            *certificate = response.extensions().get::<PeerCertificate>().cloned();
            progress.read(response).await;
            Ok(())
        };
        match tokio::time::timeout(limit, exchange).await {
            Ok(Ok(())) => progress.outcome(),
            Ok(Err(failure)) => failure,
            Err(_) => {
                let connected = connection.connection_metadata().is_some();
                progress.cut_off(limit, connected)
            }
        }
    }

    fn client_for(&self, own: Option<&TlsSettings>) -> Result<HttpClient, TlsFault> {
        let Some(own) = own.filter(|own| !own.is_empty()) else {
            return Ok(self.client.clone());
        };
        let digest = own.digest();
        let mut clients = self.own_clients.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if let Some(known) = clients.get_mut(&digest) {
            known.used = now;
            return Ok(known.client.clone());
        }
        let client = client(Connector {
            guard: self.guard.clone(),
            names: self.names.clone(),
            tls: self.trust.config(own)?,
        });
        if clients.len() >= OWN_CLIENTS_MAX {
            let oldest = clients
                .iter()
                .min_by_key(|(_, one)| one.used)
                .map(|(digest, _)| *digest);
            oldest.and_then(|digest| clients.remove(&digest));
        }
        let made = OwnClient {
            client: client.clone(),
            used: now,
        };
        clients.insert(digest, made);
        Ok(client)
    }
}

fn client(connector: Connector) -> HttpClient {
    Client::builder(TokioExecutor::new())
        .pool_idle_timeout(IDLE_CONNECTION_LIFE)
        .pool_timer(TokioTimer::new())
        .retry_canceled_requests(false)
        .http1_max_headers(ANSWER_HEADERS_MAX)
        .http1_max_buf_size(ANSWER_HEAD_BYTES_MAX)
        .build(connector)
}

fn outgoing(request: Request<'_>) -> Result<http::Request<Body>, http::Error> {
    let mut outgoing = http::Request::builder()
        .method(Method::POST)
        .uri(request.url.as_str())
        .body(Body::new(request.body, request.right))?;
    let headers = outgoing.headers_mut();
    *headers = request.headers;
    for (name, value) in [
        (header::CONTENT_TYPE, "application/json"),
        (header::USER_AGENT, USER_AGENT),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers
        .entry(header::ACCEPT)
        .or_insert(HeaderValue::from_static("*/*"));
    Ok(outgoing)
}

/// The headers of an attempt that every receiver can rely on.
pub fn webhook_headers(event_id: &str, unix_seconds: i64, signature: &str) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(8);
    for (name, value) in [
        ("webhook-id", event_id),
        ("webhook-timestamp", &unix_seconds.to_string()),
        ("webhook-signature", signature),
    ] {
        if let Ok(value) = HeaderValue::from_str(value) {
            headers.insert(HeaderName::from_static(name), value);
        }
    }
    headers
}
