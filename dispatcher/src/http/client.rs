//! One HTTP request, guarded. The only module that opens connections to user-supplied addresses.
//!
//! Invariants: HTTP/1.1, no redirects, no proxy from the environment, no decompression, no cookies, no silent resend;
//! an address is connected to only after the guard allowed that very address (`client/connect.rs`); one timeout
//! covers everything. A failing receiver is an [`Outcome`], never an `Err`.

mod body;
mod connect;
mod dns;
mod error_text;
mod pool;
mod response;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, Method, Uri, header,
    uri::{PathAndQuery, Scheme},
};
use postrider_proto::{Outcome, OutcomeKind, Timing};
use rustls::ClientConfig;
use url::Url;

use body::Body;
pub(crate) use connect::Reach;
use connect::{Connector, PeerCertificate};
use dns::Names;
use pool::{Connections, Receiver};
use response::Progress;
pub use response::retry_after;

use crate::{
    http::{
        guard::Guard,
        tls::{self, TlsFault, TlsSettings, Trust},
    },
    lock::lock,
    ownership::lease::SendPermission,
};

/// Cached TLS configurations of endpoints with their own certificates. The least recently used are evicted.
const OWN_TLS_MAX: usize = 256;

/// Connections are shared by all endpoints of a host, except those with their own TLS settings.
#[derive(Clone)]
pub struct HttpSender {
    connections: Connections,
    guard: Arc<Guard>,
    names: Names,
    trust: Trust,
    tls: Arc<ClientConfig>,
    own_tls: Arc<Mutex<HashMap<[u8; 32], OwnTls>>>,
}

struct OwnTls {
    config: Arc<ClientConfig>,
    used: Instant,
}

/// A local fault: nothing was sent, and it says nothing about the receiver.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct OwnFault(String);

#[derive(Debug, thiserror::Error)]
pub enum HttpSenderError {
    #[error("reading the system's DNS configuration failed: {0}")]
    Names(String),
    #[error("TLS setup failed: {0}")]
    Tls(#[from] TlsFault),
}

/// A request to send. The body is sent unchanged.
pub struct Request<'a> {
    pub url: &'a Url,
    /// Built by [`RequestHeaders`](crate::http::headers::RequestHeaders); `Host` and `Content-Length` are added.
    pub headers: HeaderMap,
    pub body: Bytes,
    pub timeout: Duration,
    /// The endpoint's own certificates.
    pub tls: Option<&'a TlsSettings>,
    /// Nothing is sent once this has ended. `None`: no restriction.
    pub permission: Option<SendPermission>,
}

impl HttpSender {
    /// For this many concurrent requests.
    pub fn new(guard: Guard, requests: usize) -> Result<Self, HttpSenderError> {
        let trust = Trust::of_machine();
        let names = Names::new().map_err(|error| HttpSenderError::Names(error.to_string()))?;
        Ok(Self {
            connections: Connections::new(requests),
            guard: Arc::new(guard),
            names,
            tls: trust.config(&TlsSettings::default())?,
            trust,
            own_tls: Arc::default(),
        })
    }

    pub async fn send(&self, request: Request<'_>) -> Result<Outcome, OwnFault> {
        self.send_timed(request).await.map(|(outcome, _)| outcome)
    }

    /// The outcome, and where the time went.
    pub async fn send_timed(&self, request: Request<'_>) -> Result<(Outcome, Timing), OwnFault> {
        let mut timing = Timing::default();
        let outcome = self.exchange(request, &mut None, &mut timing).await?;
        Ok((outcome, timing))
    }

    /// Whether a receiver can be reached, by the same way as a request. Nothing is sent to it; without `connects` it is only
    /// looked up.
    pub(crate) async fn reach(&self, url: &Url, connects: bool, limit: Duration) -> Reach {
        let (Some(host), Some(port)) = (url.host_str(), url.port_or_known_default()) else {
            return Reach::NotAllowed;
        };
        if self.guard.check_target(url).is_err() {
            return Reach::NotAllowed;
        }
        let Ok(connector) = self.connector(None) else {
            return Reach::Failed;
        };
        match tokio::time::timeout(limit, connector.reach(host, port, connects)).await {
            Ok(reached) => reached,
            Err(_) => Reach::Failed,
        }
    }

    /// The outcome, and the certificate of a server that responded over TLS.
    pub async fn send_and_see(&self, request: Request<'_>) -> (Outcome, Option<Vec<u8>>) {
        let mut certificate = None;
        let outcome = match self
            .exchange(request, &mut certificate, &mut Timing::default())
            .await
        {
            Ok(outcome) => outcome,
            Err(OwnFault(error)) => Outcome::NotSent { error },
        };
        (outcome, certificate.map(|bytes| bytes.to_vec()))
    }

    async fn exchange(
        &self,
        request: Request<'_>,
        certificate: &mut Option<PeerCertificate>,
        timing: &mut Timing,
    ) -> Result<Outcome, OwnFault> {
        let limit = request.timeout;
        // Settings may have changed since the URL was saved.
        if let Err(refusal) = self.guard.check_target(request.url) {
            return Ok(forbidden(refusal));
        }
        let own_tls = request.tls.filter(|own| !own.is_empty());
        let connector = match self.connector(own_tls) {
            Ok(connector) => connector,
            Err(fault) => {
                return Ok(Outcome::Unreachable {
                    kind: OutcomeKind::TlsFailed,
                    error: format!("the endpoint's certificates can't be used: {fault}"),
                });
            }
        };
        let (outgoing, receiver) = match outgoing(request, own_tls.map(tls::digest)) {
            Ok(outgoing) => outgoing,
            Err(error) => return Ok(forbidden(error)),
        };
        let mut progress = Progress::default();
        let mut connected = false;
        let exchange = async {
            let mut connection = match self.connections.take(&receiver) {
                Some(kept) => kept,
                None => connector
                    .connect(&receiver, timing)
                    .await
                    .map_err(error_text::not_connected)?,
            };
            connected = true;
            timing.address = Some(connection.address);
            let began = Instant::now();
            let response = connection.send(outgoing).await;
            timing.first_byte = response.is_ok().then(|| began.elapsed());
            let response = response.map_err(|error| Ok(error_text::broken(&error)))?;
            certificate.clone_from(&connection.certificate);
            if progress.read(response).await {
                self.connections.keep(receiver, connection).await;
            }
            Ok(())
        };
        match tokio::time::timeout(limit, exchange).await {
            Ok(Ok(())) => Ok(progress.outcome()),
            Ok(Err(failure)) => failure,
            Err(_) => Ok(progress.cut_off(limit, connected)),
        }
    }

    fn connector(&self, own_tls: Option<&TlsSettings>) -> Result<Connector<'_>, TlsFault> {
        Ok(Connector {
            guard: &self.guard,
            names: &self.names,
            connections: &self.connections,
            tls: match own_tls {
                None => self.tls.clone(),
                Some(own) => self.own_tls(own)?,
            },
        })
    }

    fn own_tls(&self, own: &TlsSettings) -> Result<Arc<ClientConfig>, TlsFault> {
        let digest = tls::digest(own);
        let mut known = lock(&self.own_tls);
        let used = Instant::now();
        if let Some(known) = known.get_mut(&digest) {
            known.used = used;
            return Ok(known.config.clone());
        }
        let config = self.trust.config(own)?;
        if known.len() >= OWN_TLS_MAX {
            let oldest = known.iter().min_by_key(|(_, one)| one.used);
            let oldest = oldest.map(|(digest, _)| *digest);
            oldest.and_then(|digest| known.remove(&digest));
        }
        known.insert(
            digest,
            OwnTls {
                config: config.clone(),
                used,
            },
        );
        Ok(config)
    }
}

fn forbidden(reason: impl std::fmt::Display) -> Outcome {
    Outcome::Forbidden {
        error: reason.to_string(),
    }
}

fn outgoing(
    request: Request<'_>,
    tls: Option<[u8; 32]>,
) -> Result<(http::Request<Body>, Receiver), http::Error> {
    let target = Uri::try_from(request.url.as_str())?;
    let https = target.scheme() == Some(&Scheme::HTTPS);
    let host = target.host().unwrap_or_default().to_owned();
    let default_port = if https { 443 } else { 80 };
    let port = target.port_u16().unwrap_or(default_port);
    let path = target.path_and_query().map_or("/", PathAndQuery::as_str);
    let mut outgoing = http::Request::builder()
        .method(Method::POST)
        .uri(path)
        .body(Body::new(request.body, request.permission))?;
    let headers = outgoing.headers_mut();
    *headers = request.headers;
    let named = if port == default_port {
        HeaderValue::from_str(&host)?
    } else {
        HeaderValue::from_str(&format!("{host}:{port}"))?
    };
    headers.insert(header::HOST, named);
    let receiver = Receiver {
        https,
        host,
        port,
        tls,
    };
    Ok((outgoing, receiver))
}
