//! A receiver as a customer would run it: a real HTTP server that records every request and answers as it is told.

use std::{
    collections::VecDeque,
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{HeaderMap, Request, Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use postrider_proto::signature::{PublicKey, Secret, VerifyError, verify, verify_ed25519, verify_standard};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};

use super::PATIENCE;

#[derive(Debug, Clone)]
pub(crate) enum Answer {
    Status(u16),
    /// With this in its body.
    Body(u16, String),
    /// With a header of this name and value.
    StatusAnd(u16, &'static str, String),
    /// Takes its time.
    After(Duration, u16),
    /// A redirect to this place.
    Redirect(String),
    /// Answers nothing until `release` is called.
    Hold,
    /// The same, with another answer than 204 then.
    HoldThen(u16),
    /// Closes the connection instead of answering.
    HangUp,
}

/// One request as it came in.
#[derive(Debug, Clone)]
pub(crate) struct Received {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) at: Instant,
    pub(crate) unix_seconds: i64,
    /// When it was answered, or its sender went away.
    pub(crate) ended: Option<Instant>,
}

impl Received {
    /// A field of the body.
    pub(crate) fn field(&self, name: &str) -> serde_json::Value {
        let body: serde_json::Value = serde_json::from_slice(&self.body).expect("a JSON body");
        body[name].clone()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        let value = self
            .headers
            .get(name)
            .unwrap_or_else(|| panic!("no header {name} in {:?}", self.headers));
        value.to_str().expect("a plain header")
    }

    pub(crate) fn event_id(&self) -> &str {
        self.header("webhook-id")
    }

    /// The `t` of its signature.
    pub(crate) fn signed_at(&self) -> i64 {
        let t = self
            .header("webhook-signature")
            .split(',')
            .find_map(|part| part.strip_prefix("t="));
        t.and_then(|t| t.parse().ok()).expect("a signature with a time")
    }

    /// Whether it verifies in this format with a secret, or with a public key.
    pub(crate) fn verifies(&self, format: &str, secret: &str) -> bool {
        let id = self.event_id();
        let (time, header) = (self.header("webhook-timestamp"), self.header("webhook-signature"));
        let secrets = [Secret::new(secret)];
        match format {
            "t-v1" => self.verify(secret).is_ok(),
            "standard" => verify_standard(id, time, header, &self.body, &secrets, self.unix_seconds).is_ok(),
            _ => {
                let key = [PublicKey::parse(secret).expect("a public key")];
                verify_ed25519(id, time, header, &self.body, &key, self.unix_seconds).is_ok()
            }
        }
    }

    pub(crate) fn verify(&self, secret: &str) -> Result<(), VerifyError> {
        verify(
            self.header("webhook-signature"),
            &self.body,
            &[Secret::new(secret)],
            self.unix_seconds,
        )
    }
}

type Decide = Box<dyn Fn(&Received) -> Answer + Send>;

#[derive(Default)]
struct Book {
    received: Vec<Received>,
    script: VecDeque<Answer>,
    decide: Option<Decide>,
    answer: Option<Answer>,
    in_flight: usize,
    in_flight_max: usize,
}

#[derive(Clone)]
struct Shared {
    book: Arc<Mutex<Book>>,
    /// Goes up with every change of the book.
    changed: watch::Sender<u64>,
    released: watch::Sender<bool>,
}

impl Shared {
    async fn wait_for_release(&self) {
        let mut released = self.released.subscribe();
        let _ = released.wait_for(|released| *released).await;
    }
}

pub(crate) struct Receiver {
    address: SocketAddr,
    shared: Shared,
    server: JoinHandle<()>,
}

impl Receiver {
    /// Answers 204 to everything until told otherwise.
    pub(crate) async fn start() -> Self {
        Self::start_at("127.0.0.1:0").await
    }

    pub(crate) async fn start_at(address: &str) -> Self {
        let listener = TcpListener::bind(address).await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let shared = Shared {
            book: Arc::default(),
            changed: watch::Sender::new(0),
            released: watch::Sender::new(false),
        };
        let server = tokio::spawn(accept(listener, shared.clone()));
        Self {
            address,
            shared,
            server,
        }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// The answer to everything that the script does not cover.
    pub(crate) fn answer(&self, answer: Answer) {
        self.book(|book| book.answer = Some(answer));
    }

    /// The answers to the next requests, one each.
    pub(crate) fn script(&self, answers: impl IntoIterator<Item = Answer>) {
        self.book(|book| book.script.extend(answers));
    }

    /// The answer to each request that the script does not cover.
    pub(crate) fn decide(&self, decide: impl Fn(&Received) -> Answer + Send + 'static) {
        self.book(|book| book.decide = Some(Box::new(decide)));
    }

    /// Lets go of everything that is held, with 204, and holds nothing any more.
    pub(crate) fn release(&self) {
        self.shared.released.send_replace(true);
    }

    pub(crate) fn received(&self) -> Vec<Received> {
        self.book(|book| book.received.clone())
    }

    pub(crate) fn count(&self) -> usize {
        self.book(|book| book.received.len())
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.book(|book| book.in_flight)
    }

    pub(crate) fn in_flight_max(&self) -> usize {
        self.book(|book| book.in_flight_max)
    }

    /// From here on, the most in flight is counted anew.
    pub(crate) fn forget_in_flight_max(&self) {
        self.book(|book| book.in_flight_max = book.in_flight);
    }

    /// Waits until this many requests have come in, and hands out all there are.
    pub(crate) async fn wait_for(&self, count: usize) -> Vec<Received> {
        self.wait_until(&format!("{count} requests"), |receiver| receiver.count() >= count)
            .await;
        self.received()
    }

    /// Waits until this many requests are being held.
    pub(crate) async fn wait_in_flight(&self, count: usize) {
        self.wait_until(&format!("{count} in flight"), |receiver| {
            receiver.in_flight() >= count
        })
        .await;
    }

    pub(crate) async fn wait_until(&self, what: &str, mut reached: impl FnMut(&Self) -> bool) {
        let mut changes = self.shared.changed.subscribe();
        let waited = async {
            while !reached(self) {
                changes.changed().await.expect("the receiver runs");
            }
        };
        if tokio::time::timeout(PATIENCE, waited).await.is_err() {
            panic!(
                "waited {PATIENCE:?} in vain for {what}: {} requests came",
                self.received().len()
            );
        }
    }

    fn book<T>(&self, look: impl FnOnce(&mut Book) -> T) -> T {
        look(&mut self.shared.book.lock().expect("not poisoned"))
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn accept(listener: TcpListener, shared: Shared) {
    // Connections end with the receiver.
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            continue;
        };
        let shared = shared.clone();
        connections.spawn(async move {
            let service = service_fn(|request| respond(request, shared.clone()));
            // An error is a connection that was hung up, by us or by them.
            let _ = http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
        while connections.try_join_next().is_some() {}
    }
}

/// Most requests that were in flight at one instant, among these.
pub(crate) fn most_at_once<'a>(requests: impl IntoIterator<Item = &'a Received>) -> usize {
    let mut changes: Vec<(Instant, isize)> = Vec::new();
    for request in requests {
        changes.push((request.at, 1));
        changes.extend(request.ended.map(|at| (at, -1)));
    }
    // At one instant what ends comes first.
    changes.sort_unstable();
    let (mut now, mut most) = (0_isize, 0);
    for (_, change) in changes {
        now += change;
        most = most.max(now);
    }
    most as usize
}

/// Counts a request as in flight until it is dropped, also when its sender goes away.
struct InFlight {
    shared: Shared,
    index: usize,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        {
            let mut book = self.shared.book.lock().expect("not poisoned");
            book.in_flight -= 1;
            book.received[self.index].ended = Some(Instant::now());
        }
        self.shared.changed.send_modify(|version| *version += 1);
    }
}

async fn respond(
    request: Request<Incoming>,
    shared: Shared,
) -> Result<Response<Full<Bytes>>, std::io::Error> {
    let at = Instant::now();
    let unix = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or(Duration::ZERO);
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
    let received = Received {
        method: head.method.to_string(),
        path: head.uri.path().to_owned(),
        headers: head.headers,
        body,
        at,
        unix_seconds: unix.as_secs() as i64,
        ended: None,
    };
    let (answer, index) = {
        let mut book = shared.book.lock().expect("not poisoned");
        let answer = book
            .script
            .pop_front()
            .or_else(|| book.decide.as_ref().map(|decide| decide(&received)))
            .or_else(|| book.answer.clone())
            .unwrap_or(Answer::Status(204));
        book.received.push(received);
        book.in_flight += 1;
        book.in_flight_max = book.in_flight_max.max(book.in_flight);
        (answer, book.received.len() - 1)
    };
    let _in_flight = InFlight {
        shared: shared.clone(),
        index,
    };
    shared.changed.send_modify(|version| *version += 1);
    let answered = Response::builder();
    let mut content = Full::default();
    let answered = match answer {
        Answer::Status(status) => answered.status(status),
        Answer::Body(status, text) => {
            content = Full::from(text);
            answered.status(status)
        }
        Answer::StatusAnd(status, name, value) => answered.status(status).header(name, value),
        Answer::After(time, status) => {
            tokio::time::sleep(time).await;
            answered.status(status)
        }
        Answer::Redirect(place) => answered.status(302).header("location", place),
        Answer::Hold => {
            shared.wait_for_release().await;
            answered.status(204)
        }
        Answer::HoldThen(status) => {
            shared.wait_for_release().await;
            answered.status(status)
        }
        Answer::HangUp => return Err(std::io::ErrorKind::ConnectionAborted.into()),
    };
    let answered: Result<_, Infallible> = Ok(answered.body(content).expect("a plain answer"));
    answered.map_err(|never| match never {})
}
