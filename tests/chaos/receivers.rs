//! The customers' side: an HTTP server that records every request and answers as each endpoint's mood has it. Its records
//! are evidence, so it writes down what it saw and nothing that it was told.

use std::{
    collections::HashSet,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpListener, task::JoinHandle};

use crate::history::{Request, Timeline};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mood {
    /// Takes a few milliseconds, and refuses one in forty.
    Usual,
    Hangs,
    Fails,
    /// Closes the connection instead of answering.
    Resets,
    /// Answers with success after this, always.
    Takes(Duration),
}

#[derive(Default)]
struct Book {
    moods: Vec<Mood>,
    /// Each body once, however often and wherever it came: large ones would fill the memory.
    bodies: HashSet<Bytes>,
    requests: Vec<Request>,
    count: u64,
}

#[derive(Clone)]
pub(crate) struct Receivers {
    address: SocketAddr,
    time: Timeline,
    book: Arc<Mutex<Book>>,
    serving: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl Receivers {
    pub(crate) async fn start(time: Timeline) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let receivers = Self {
            address: listener.local_addr().expect("bound"),
            time,
            book: Arc::default(),
            serving: Arc::default(),
        };
        receivers.serve(listener);
        receivers
    }

    fn serve(&self, listener: TcpListener) {
        let serving = tokio::spawn(accept(listener, self.clone()));
        *self.serving.lock().expect("not poisoned") = Some(serving);
    }

    /// A place for one more endpoint, and its URL.
    pub(crate) fn open(&self) -> (usize, String) {
        let mut book = self.book();
        book.moods.push(Mood::Usual);
        let place = book.moods.len() - 1;
        (place, format!("http://{}/{place}", self.address))
    }

    pub(crate) fn set(&self, place: usize, mood: Mood) {
        self.book().moods[place] = mood;
    }

    /// Nobody listens any more, and every connection is gone.
    pub(crate) fn go_away(&self) {
        if let Some(serving) = self.serving.lock().expect("not poisoned").take() {
            serving.abort();
        }
    }

    pub(crate) async fn come_back(&self) {
        if self.serving.lock().expect("not poisoned").is_some() {
            return;
        }
        loop {
            // Sockets of the time before may hold the port for a moment.
            if let Ok(listener) = TcpListener::bind(self.address).await {
                return self.serve(listener);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.book().requests.len()
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.book().requests.clone()
    }

    fn book(&self) -> std::sync::MutexGuard<'_, Book> {
        self.book.lock().expect("not poisoned")
    }
}

async fn accept(listener: TcpListener, receivers: Receivers) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            continue;
        };
        let receivers = receivers.clone();
        connections.spawn(async move {
            let service = service_fn(|request| respond(request, receivers.clone()));
            let _ = http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
        while connections.try_join_next().is_some() {}
    }
}

/// Writes down when the request ended, also when its sender went away.
struct Seen {
    receivers: Receivers,
    index: usize,
    status: Option<u16>,
}

impl Drop for Seen {
    fn drop(&mut self) {
        let ended = self.receivers.time.now();
        let mut book = self.receivers.book();
        book.requests[self.index].ended = ended;
        book.requests[self.index].status = self.status;
    }
}

async fn respond(
    request: hyper::Request<Incoming>,
    receivers: Receivers,
) -> Result<Response<Full<Bytes>>, std::io::Error> {
    let at = receivers.time.now();
    let unix = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs() as i64;
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
    let header = |name: &str| {
        let value = head.headers.get(name).and_then(|value| value.to_str().ok());
        value.unwrap_or_default().to_owned()
    };
    let event: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let place: usize = head.uri.path()[1..].parse().map_err(std::io::Error::other)?;
    let key = text(&event["data"]["key"]);
    let mut seen = Request {
        endpoint: place,
        mark: text(&event["data"]["mark"]),
        event_id: header("webhook-id"),
        sequence: event["sequence"].as_i64().map(|sequence| (key, sequence)),
        body,
        signature: header("webhook-signature"),
        timestamp: header("webhook-timestamp"),
        replay: head.headers.contains_key("webhook-replay"),
        at,
        unix,
        ended: at,
        status: None,
    };
    let (mood, count, index) = {
        let mut book = receivers.book();
        match book.bodies.get(&seen.body) {
            Some(known) => seen.body = known.clone(),
            None => drop(book.bodies.insert(seen.body.clone())),
        }
        book.requests.push(seen);
        book.count += 1;
        (book.moods[place], book.count, book.requests.len() - 1)
    };
    let mut seen = Seen {
        receivers: receivers.clone(),
        index,
        status: None,
    };
    let status = match mood {
        Mood::Usual => {
            tokio::time::sleep(Duration::from_millis(count % 12)).await;
            if count % 40 == 7 { 500 } else { 204 }
        }
        Mood::Takes(time) => {
            tokio::time::sleep(time).await;
            204
        }
        Mood::Fails => 500,
        Mood::Resets => return Err(std::io::ErrorKind::ConnectionAborted.into()),
        Mood::Hangs => std::future::pending().await,
    };
    seen.status = Some(status);
    drop(seen);
    let answer = Response::builder().status(status).body(Full::default());
    Ok(answer.expect("a plain answer"))
}
