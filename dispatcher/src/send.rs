//! One HTTP request, guarded. The only place that opens connections to addresses strangers typed in.
//!
//! Invariants: HTTP/1.1, no redirects, no proxy from the environment, no decompression, no cookies; an address is
//! connected to only after the guard allowed that very address; one time limit over everything; at most 64 KiB of the
//! answer is read and 4 KiB kept. A failing receiver is an [`Outcome`], never an `Err`.

use std::{error::Error, io, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use postrider_proto::{
    Answer, Outcome, OutcomeKind,
    limits::{ANSWER_KEPT_BYTES_MAX, ANSWER_READ_BYTES_MAX, RETRY_AFTER_SECONDS_MAX},
};
use reqwest::{
    Client, Response, Url,
    dns::{Addrs, Name, Resolve, Resolving},
    redirect::Policy,
    tls::TlsInfo,
};
use url::Host;

use crate::guard::{Guard, Refusal};

const USER_AGENT: &str = concat!("Postrider/", env!("CARGO_PKG_VERSION"));
const ANSWER_HEADERS_MAX: usize = 100;
const ADDRESSES_MAX: usize = 32;
const IDLE_CONNECTION_LIFE: Duration = Duration::from_secs(30);

/// One client for all endpoints: a client of its own would cost each 100 KB and 5 ms.
#[derive(Clone)]
pub struct Sender {
    client: Client,
    guard: Arc<Guard>,
}

/// What goes out. Its body is sent as it is.
pub struct Request<'a> {
    pub url: &'a Url,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub timeout: Duration,
}

impl Sender {
    pub fn new(guard: Guard) -> Result<Self, reqwest::Error> {
        Self::build(guard, false)
    }

    /// For `send_and_see`. It costs each answer a copy of the certificate.
    pub fn that_sees_certificates(guard: Guard) -> Result<Self, reqwest::Error> {
        Self::build(guard, true)
    }

    fn build(guard: Guard, tls_info: bool) -> Result<Self, reqwest::Error> {
        let guard = Arc::new(guard);
        let client = Client::builder()
            .user_agent(USER_AGENT)
            .redirect(Policy::none())
            .no_proxy()
            .http1_only()
            .http1_max_headers(ANSWER_HEADERS_MAX)
            .retry(reqwest::retry::never())
            .referer(false)
            .pool_idle_timeout(IDLE_CONNECTION_LIFE)
            .tls_info(tls_info)
            .dns_resolver(Arc::new(GuardedResolver(guard.clone())))
            .build()?;
        Ok(Self { client, guard })
    }

    pub async fn send(&self, request: Request<'_>) -> Outcome {
        self.send_and_see(request).await.0
    }

    /// The outcome, and the certificate of a server that answered over TLS.
    pub async fn send_and_see(&self, request: Request<'_>) -> (Outcome, Option<Vec<u8>>) {
        let limit = request.timeout;
        // The resolver is not asked about addresses written as numbers: this is their gate.
        if let Err(refusal) = self.check_literal(request.url) {
            let error = refusal.to_string();
            return (Outcome::Forbidden { error }, None);
        }
        let mut progress = Progress::default();
        let exchange = self.exchange(request, &mut progress);
        let ended = tokio::time::timeout(limit, exchange).await;
        let certificate = progress.certificate.take();
        let outcome = match ended {
            Ok(Ok(())) => progress.outcome(),
            Ok(Err(failure)) => failure,
            Err(_) => progress.cut_off(limit),
        };
        (outcome, certificate)
    }

    fn check_literal(&self, url: &Url) -> Result<(), Refusal> {
        let port = url.port_or_known_default().unwrap_or(0);
        match url.host() {
            Some(Host::Ipv4(ip)) => self.guard.check(ip.into(), port),
            Some(Host::Ipv6(ip)) => self.guard.check(ip.into(), port),
            Some(Host::Domain(_)) | None => Ok(()),
        }
    }

    async fn exchange(&self, request: Request<'_>, progress: &mut Progress) -> Result<(), Outcome> {
        let sent = self
            .client
            .post(request.url.clone())
            .headers(request.headers)
            .header(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))
            .body(request.body)
            .send()
            .await;
        let response = sent.map_err(|error| unreachable_because(&error))?;
        progress.head = Some(Head::of(&response));
        progress.certificate = response
            .extensions()
            .get::<TlsInfo>()
            .and_then(|info| info.peer_certificate())
            .map(<[u8]>::to_vec);
        progress.read_body(response).await;
        Ok(())
    }
}

/// How far an exchange has come, kept outside of it so that a time limit does not lose it.
#[derive(Default)]
struct Progress {
    head: Option<Head>,
    body: Vec<u8>,
    certificate: Option<Vec<u8>>,
}

struct Head {
    status: u16,
    retry_after: Option<Duration>,
    text: String,
}

impl Head {
    fn of(response: &Response) -> Self {
        let mut text = format!("{:?} {}\n", response.version(), response.status());
        for (name, value) in response.headers() {
            if text.len() >= ANSWER_KEPT_BYTES_MAX {
                break;
            }
            text.push_str(name.as_str());
            text.push_str(": ");
            text.push_str(&String::from_utf8_lossy(value.as_bytes()));
            text.push('\n');
        }
        Self {
            status: response.status().as_u16(),
            retry_after: response.headers().get(header::RETRY_AFTER).and_then(retry_after),
            text: kept_text(text),
        }
    }
}

impl Progress {
    /// The status has decided already; the body is only for people to look at. It ends at the cap, at the time limit,
    /// or where the connection breaks.
    async fn read_body(&mut self, mut response: Response) {
        let mut read = 0;
        while let Ok(Some(chunk)) = response.chunk().await {
            let room = ANSWER_KEPT_BYTES_MAX - self.body.len();
            self.body.extend_from_slice(&chunk[..chunk.len().min(room)]);
            read += chunk.len();
            if read >= ANSWER_READ_BYTES_MAX {
                break;
            }
        }
    }

    fn outcome(self) -> Outcome {
        let Some(head) = self.head else {
            return Outcome::Unreachable {
                kind: OutcomeKind::BrokenAnswer,
                error: "no answer".to_owned(),
            };
        };
        let answer = Answer {
            head: head.text,
            body: self.body,
        };
        match head.status {
            200..=299 => Outcome::Accepted {
                status: head.status,
                answer,
            },
            status => Outcome::Refused {
                status,
                retry_after: head.retry_after,
                answer,
            },
        }
    }

    fn cut_off(self, limit: Duration) -> Outcome {
        match self.head {
            Some(_) => self.outcome(),
            None => Outcome::Unreachable {
                kind: OutcomeKind::TimedOut,
                error: format!("no answer in {}", words_for(limit)),
            },
        }
    }
}

fn words_for(limit: Duration) -> String {
    match limit.as_millis() {
        ms if ms % 1000 == 0 => format!("{} s", ms / 1000),
        ms => format!("{ms} ms"),
    }
}

/// Seconds, or an HTTP date. Both are only ever used to postpone, and never past the limit.
fn retry_after(value: &HeaderValue) -> Option<Duration> {
    let text = value.to_str().ok()?.trim();
    let most = Duration::from_secs(RETRY_AFTER_SECONDS_MAX);
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
        // More digits than a number can hold is still "very late".
        return Some(text.parse().map_or(most, Duration::from_secs).min(most));
    }
    let at = httpdate::parse_http_date(text).ok()?;
    Some(
        at.duration_since(std::time::SystemTime::now())
            .unwrap_or_default()
            .min(most),
    )
}

/// Postgres takes no NUL in a text.
fn kept_text(text: String) -> String {
    let end = text.floor_char_boundary(ANSWER_KEPT_BYTES_MAX);
    text[..end].replace('\0', "\u{fffd}")
}

/// What went wrong, in words for the person who runs the receiver.
fn unreachable_because(error: &reqwest::Error) -> Outcome {
    let mut kind = if error.is_connect() {
        OutcomeKind::ConnectionFailed
    } else {
        OutcomeKind::BrokenAnswer
    };
    let mut words = String::new();
    let mut cause: Option<&(dyn Error + 'static)> = error.source();
    while let Some(inner) = cause {
        if let Some(refusal) = inner.downcast_ref::<Refusal>() {
            return Outcome::Forbidden {
                error: refusal.to_string(),
            };
        }
        if inner.is::<NameNotFound>() {
            kind = OutcomeKind::NameNotFound;
        }
        if let Some(io) = inner.downcast_ref::<io::Error>() {
            match io.kind() {
                io::ErrorKind::ConnectionRefused => words = "connection refused".to_owned(),
                io::ErrorKind::ConnectionReset => words = "the connection was reset".to_owned(),
                io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => {
                    words = "the address can't be reached".to_owned();
                }
                _ => words = inner.to_string(),
            }
        } else {
            words = inner.to_string();
        }
        if words.contains("certificate") || words.contains("TLS") || words.contains("tls") {
            kind = OutcomeKind::TlsFailed;
        }
        cause = inner.source();
    }
    if words.is_empty() {
        words = error.to_string();
    }
    if words.contains("message completed") || words.contains("connection closed") {
        words = "the connection was closed before an answer came".to_owned();
    }
    Outcome::Unreachable {
        kind,
        error: kept_text(words),
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the name {0} can't be found")]
struct NameNotFound(String);

/// Resolves a name, refuses the whole answer if any address in it is not allowed, and hands out just what it checked.
struct GuardedResolver(Arc<Guard>);

impl Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let guard = self.0.clone();
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await;
            let found: Vec<SocketAddr> = match found {
                Ok(addresses) => addresses.take(ADDRESSES_MAX).collect(),
                Err(_) => return Err(NameNotFound(name.as_str().to_owned()).into()),
            };
            if found.is_empty() {
                return Err(NameNotFound(name.as_str().to_owned()).into());
            }
            if let Some(refused) = found.iter().find(|address| !guard.allows(address.ip())) {
                return Err(Refusal::Address(refused.ip()).into());
            }
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(value: &str) -> Option<u64> {
        retry_after(&HeaderValue::from_str(value).expect("a header value")).map(|d| d.as_secs())
    }

    #[test]
    fn retry_after_is_read_as_seconds_or_a_date_and_clamped() {
        assert_eq!(asked("120"), Some(120));
        assert_eq!(asked("99999999999999999999999"), Some(RETRY_AFTER_SECONDS_MAX));
        assert_eq!(
            asked("Fri, 31 Dec 9999 23:59:59 GMT"),
            Some(RETRY_AFTER_SECONDS_MAX)
        );
        assert_eq!(asked("Thu, 01 Jan 1970 00:00:00 GMT"), Some(0));
        for bad in ["", "-5", "soon", "1.5", "12 34"] {
            assert_eq!(asked(bad), None, "{bad}");
        }
    }

    #[test]
    fn kept_text_is_cut_at_a_character_and_holds_no_nul() {
        let text = kept_text(format!("a\0{}", "é".repeat(5_000)));
        assert!(text.len() <= ANSWER_KEPT_BYTES_MAX + 2 && !text.contains('\0'));
    }
}
