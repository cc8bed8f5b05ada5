//! Test events and probes that an endpoint's owner requests. They are sent from this process with the dispatcher's
//! own sender, guard included, and are marked with `Webhook-Test: true`.
//! Invariant: they go only to a registered endpoint, are limited in number, and leave no trace in deliveries, health
//! or statistics. No transaction is open while they are sent.

pub(crate) mod certificate;
pub(crate) mod checks;
pub(crate) mod event;
pub(crate) mod probe;
mod run;

pub(crate) use run::{Asked, Recorded, probe, record, test};

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{body::Bytes, http::HeaderMap};
use chrono::{DateTime, TimeDelta, Utc};
use postrider_dispatcher::{
    guard::Guard,
    http::{
        client::{HttpSender, Request},
        headers::{Marker, RequestHeaders},
    },
    vault::custom_headers::CustomHeaders,
};
use postrider_proto::{
    Outcome,
    api::{Attempt, TlsSettings},
    signature::{Secret, SignatureFormat, sign},
};
use sqlx::PgConnection;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use url::Url;

use crate::{
    App, Shared,
    actions::{endpoints::certificates::open_tls, secrets::open_in_force, sending::require_sending},
    http::problem::{Kind, Problem},
    tables::{
        endpoints::EndpointRow,
        trials::{self as table, Allowance},
    },
};

pub(crate) const TESTS: Allowance = Allowance {
    kind: "test",
    most: 20,
    within: Duration::from_secs(60),
};
pub(crate) const PROBES: Allowance = Allowance {
    kind: "probe",
    most: 10,
    within: Duration::from_secs(600),
};
/// Concurrent tests and probes of one process. Each holds few connections and little memory.
const AT_ONCE_MAX: usize = 16;
/// Connections of all of them. A probe sends twenty concurrent requests; beyond this they wait for each other.
const SOCKETS_MAX: usize = 100;

/// Sends the tests and probes of this process.
#[derive(Clone)]
pub struct Trials {
    pub(crate) sender: HttpSender,
    permits: Arc<Semaphore>,
}

impl Trials {
    /// The same guard as the dispatchers'.
    pub fn new(guard: Guard) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        Ok(Self {
            sender: HttpSender::new(guard, SOCKETS_MAX)?,
            permits: Arc::new(Semaphore::new(AT_ONCE_MAX)),
        })
    }

    fn permit(&self) -> Result<OwnedSemaphorePermit, Problem> {
        self.permits.clone().try_acquire_owned().map_err(|_| {
            Problem::too_many(
                format!("At most {AT_ONCE_MAX} test events and probes can run concurrently."),
                Duration::from_secs(1),
            )
        })
    }
}

/// Permission for one test or probe of an endpoint.
pub(crate) async fn admit(
    app: &Shared,
    endpoint: &EndpointRow,
    allowance: Allowance,
) -> Result<OwnedSemaphorePermit, Problem> {
    require_sending(app, endpoint.tenant_id).await?;
    let permit = app.trials.permit()?;
    match table::take(&app.pool, endpoint.id, allowance).await? {
        Ok(()) => Ok(permit),
        Err(wait) => Err(Problem::too_many(
            format!(
                "This endpoint can be tested at most {} times in {} seconds.",
                allowance.most,
                allowance.within.as_secs()
            ),
            wait,
        )),
    }
}

/// An endpoint with everything needed to send to it, loaded before the requests.
pub(crate) struct Target {
    pub(crate) url: Url,
    pub(crate) format: SignatureFormat,
    /// Active secrets, newest first.
    pub(crate) secrets: Vec<Secret>,
    pub(crate) timeout: Duration,
    custom: HeaderMap,
    /// The endpoint's TLS settings.
    tls: Option<TlsSettings>,
    /// The database's clock when it was loaded: signatures use that clock.
    read: (Instant, DateTime<Utc>),
}

/// A request that was sent, and its outcome.
pub(crate) struct Sent {
    pub(crate) started_at: DateTime<Utc>,
    pub(crate) duration: Duration,
    pub(crate) outcome: Outcome,
    /// The server's certificate, if sent over TLS.
    pub(crate) certificate: Option<Vec<u8>>,
    /// Empty when nothing was sent.
    request_headers: BTreeMap<String, String>,
}

impl Target {
    pub(crate) async fn open(
        app: &App,
        connection: &mut PgConnection,
        endpoint: &EndpointRow,
    ) -> Result<Self, Problem> {
        let began = Instant::now();
        let now: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()")
            .fetch_one(&mut *connection)
            .await?;
        let opened = open_in_force(&app.vault, connection, endpoint.owner()).await?;
        let settings = &endpoint.settings;
        Ok(Self {
            // It was checked when it was saved; the operator may have tightened the rules since.
            url: app.guard.check_url(&settings.url).map_err(|refusal| {
                Problem::invalid("", format!("the endpoint's URL is not allowed: {refusal}"))
            })?,
            format: settings.signature,
            secrets: opened.into_iter().map(|one| one.secret).collect(),
            timeout: settings.timeout(app.defaults.timeout),
            custom: CustomHeaders::open(&app.vault, endpoint.owner(), endpoint.headers.as_deref())
                .and_then(|headers| headers.to_map())
                .map_err(|_| {
                    Problem::new(
                        Kind::Internal,
                        "The endpoint's custom headers can't be decrypted.",
                    )
                })?,
            tls: open_tls(&app.vault, endpoint),
            read: (began, now),
        })
    }

    pub(crate) fn now(&self) -> DateTime<Utc> {
        self.read.1 + TimeDelta::from_std(self.read.0.elapsed()).unwrap_or_default()
    }

    /// The signature header for a body, a time and these secrets.
    pub(crate) fn sign(&self, event: &str, unix_seconds: i64, body: &[u8], secrets: &[Secret]) -> String {
        sign(self.format, event, unix_seconds, body, secrets)
    }

    pub(crate) async fn send(
        &self,
        sender: &HttpSender,
        event: &str,
        unix_seconds: i64,
        signature: Option<String>,
        body: Bytes,
        timeout: Duration,
    ) -> Sent {
        let headers = RequestHeaders {
            event_id: event,
            unix_seconds,
            signature: signature.as_deref(),
            custom: Some(&self.custom),
            marker: Some(Marker::Test),
            trace: None,
        };
        let started_at = self.now();
        let began = Instant::now();
        let request = Request {
            url: &self.url,
            headers: headers.build(),
            body,
            timeout,
            tls: self.tls.as_ref(),
            permission: None,
        };
        let (outcome, certificate) = sender.send_and_see(request).await;
        Sent {
            started_at,
            duration: began.elapsed(),
            certificate,
            request_headers: match outcome {
                Outcome::Forbidden { .. } | Outcome::NotSent { .. } => BTreeMap::new(),
                Outcome::Accepted { .. } | Outcome::Refused { .. } | Outcome::Unreachable { .. } => {
                    headers.shown()
                }
            },
            outcome,
        }
    }
}

impl Sent {
    /// As an attempt. The response body is omitted: a test must not become a way to read pages through us.
    pub(crate) fn attempt(&self) -> Attempt {
        Attempt {
            number: 1,
            started_at: self.started_at,
            duration_ms: i32::try_from(self.duration.as_millis()).unwrap_or(i32::MAX),
            outcome: self.outcome.kind().as_str().to_owned(),
            status: self
                .outcome
                .status()
                .and_then(|status| i16::try_from(status).ok()),
            error: self.outcome.error().map(str::to_owned),
            request_headers: self.request_headers.clone(),
            response_head: self.outcome.response().map(|response| response.head.clone()),
            response_body: None,
            response_body_cut: false,
            timing: None,
            replay: None,
        }
    }
}
