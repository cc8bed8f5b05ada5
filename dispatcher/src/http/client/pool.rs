//! Connections to receivers: their limit, and the idle ones kept for reuse.
//!
//! Invariants: every socket has a permit from before it is opened until it is closed; a connection belongs to one
//! attempt or is idle, and is closed at once when its attempt is cancelled. Nothing connects in the background. When
//! no permit is left, the connection idle for longest is closed, so that idle connections of one receiver never keep
//! another from connecting.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    future::poll_fn,
    net::SocketAddr,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    task::Poll,
    time::{Duration, Instant},
};

use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::task::AbortOnDropHandle;

use super::{
    body::Body,
    connect::{PeerCertificate, Wire},
};
use crate::lock::lock;

const RESPONSE_HEADERS_MAX: usize = 100;
/// All headers of a response together.
const RESPONSE_HEAD_BYTES_MAX: usize = 64 * 1024;
const KEPT_LIFE: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Idle connections per receiver.
const KEPT_PER_RECEIVER_MAX: usize = 256;
/// For a connection to finish its exchange after the response was read.
const FINISH_MAX: Duration = Duration::from_secs(1);

/// Connections to one receiver with the same TLS settings are interchangeable.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Receiver {
    pub(super) https: bool,
    pub(super) host: String,
    pub(super) port: u16,
    /// The digest of an endpoint's own certificates.
    pub(super) tls: Option<[u8; 32]>,
}

/// A connection that serves one request at a time.
pub(super) struct Connection {
    sender: SendRequest<Body>,
    /// Of the receiver.
    pub(super) address: SocketAddr,
    pub(super) certificate: Option<PeerCertificate>,
    /// Drives the socket and is aborted with the connection: a receiver that responds early and then stops reading would
    /// otherwise hold the socket, and the rest of the body, for as long as it likes.
    task: AbortOnDropHandle<()>,
}

/// Owns a connection's socket. Fields are dropped in order: the permit is released once the socket is closed.
struct Driver<D> {
    driver: D,
    #[expect(dead_code, reason = "released on drop")]
    permit: OwnedSemaphorePermit,
}

impl<D: Future + Unpin> Driver<D> {
    /// An error is reported to the request that encounters it.
    async fn run(mut self) {
        let _ = (&mut self.driver).await;
    }
}

impl Connection {
    pub(super) async fn over(wire: Wire) -> Result<Self, hyper::Error> {
        let Wire {
            stream,
            address,
            certificate,
            permit,
        } = wire;
        let (sender, driver) = http1::Builder::new()
            .max_headers(RESPONSE_HEADERS_MAX)
            .max_buf_size(RESPONSE_HEAD_BYTES_MAX)
            .handshake(TokioIo::new(stream))
            .await?;
        let task = tokio::spawn(Driver { driver, permit }.run());
        Ok(Self {
            sender,
            address,
            certificate,
            task: AbortOnDropHandle::new(task),
        })
    }

    pub(super) async fn send(
        &mut self,
        request: http::Request<Body>,
    ) -> Result<http::Response<hyper::body::Incoming>, hyper::Error> {
        self.sender.send_request(request).await
    }

    /// Closes an idle connection gracefully, and aborts it when the receiver does not cooperate.
    fn close(self) {
        tokio::spawn(tokio::time::timeout(FINISH_MAX, self.task));
    }

    async fn is_ready_now(&mut self) -> bool {
        poll_fn(|cx| Poll::Ready(matches!(self.sender.poll_ready(cx), Poll::Ready(Ok(()))))).await
    }
}

struct IdleConnection {
    connection: Connection,
    since: Instant,
    number: u64,
}

#[derive(Default)]
struct IdleConnections {
    /// The most recent at the back: it is the most likely to be alive.
    by_receiver: HashMap<Receiver, VecDeque<IdleConnection>>,
    /// All of them, in the order they became idle.
    by_age: BTreeMap<u64, Receiver>,
    numbers: u64,
}

impl IdleConnections {
    fn put(&mut self, receiver: &Receiver, connection: Connection) {
        let of_receiver = self.by_receiver.entry(receiver.clone()).or_default();
        if of_receiver.len() >= KEPT_PER_RECEIVER_MAX {
            return connection.close();
        }
        self.numbers += 1;
        of_receiver.push_back(IdleConnection {
            connection,
            since: Instant::now(),
            number: self.numbers,
        });
        self.by_age.insert(self.numbers, receiver.clone());
    }

    fn take(&mut self, receiver: &Receiver) -> Option<Connection> {
        let of_receiver = self.by_receiver.get_mut(receiver)?;
        let mut found = None;
        while let Some(kept) = of_receiver.pop_back() {
            self.by_age.remove(&kept.number);
            if kept.connection.sender.is_ready() {
                found = Some(kept.connection);
                break;
            }
        }
        if of_receiver.is_empty() {
            self.by_receiver.remove(receiver);
        }
        found
    }

    /// The one idle for longest, if it has been idle since before that.
    fn take_oldest(&mut self, before: Option<Instant>) -> Option<Connection> {
        let receiver = self.by_age.first_key_value()?.1.clone();
        let of_receiver = self.by_receiver.get_mut(&receiver)?;
        let oldest = of_receiver.front()?;
        if before.is_some_and(|before| oldest.since >= before) {
            return None;
        }
        self.by_age.remove(&oldest.number);
        let oldest = of_receiver.pop_front()?;
        if of_receiver.is_empty() {
            self.by_receiver.remove(&receiver);
        }
        Some(oldest.connection)
    }
}

/// All connections of one sender.
#[derive(Clone)]
pub(super) struct Connections {
    idle: Arc<Mutex<IdleConnections>>,
    /// Attempts waiting for a permit: no connection is kept idle meanwhile.
    waiting: Arc<AtomicUsize>,
    permits: Arc<Semaphore>,
    /// For further addresses of a name that are tried in parallel with the first.
    extra: Arc<Semaphore>,
}

impl Connections {
    /// For this many concurrent attempts. Up to a quarter more sockets exist: idle ones, and addresses tried in
    /// parallel.
    pub(super) fn new(attempts: usize) -> Self {
        let eighth = (attempts / 8).max(1);
        let idle = Arc::default();
        tokio::spawn(close_old(Arc::downgrade(&idle)));
        Self {
            idle,
            waiting: Arc::default(),
            permits: Arc::new(Semaphore::new(attempts.max(1) + eighth)),
            extra: Arc::new(Semaphore::new(eighth)),
        }
    }

    /// An idle connection to this receiver.
    pub(super) fn take(&self, receiver: &Receiver) -> Option<Connection> {
        lock(&self.idle).take(receiver)
    }

    /// Keeps a connection whose response was read completely, once it has finished its exchange.
    pub(super) async fn keep(&self, receiver: Receiver, mut connection: Connection) {
        if !connection.is_ready_now().await {
            tokio::task::yield_now().await;
        }
        if connection.is_ready_now().await {
            return self.put(&receiver, connection);
        }
        let connections = self.clone();
        tokio::spawn(async move {
            let finished = tokio::time::timeout(FINISH_MAX, connection.sender.ready()).await;
            if let Ok(Ok(())) = finished {
                connections.put(&receiver, connection);
            }
        });
    }

    fn put(&self, receiver: &Receiver, connection: Connection) {
        let mut idle = lock(&self.idle);
        match self.waiting.load(Ordering::SeqCst) {
            0 => idle.put(receiver, connection),
            _ => connection.close(),
        }
    }

    /// A permit for an attempt's socket. There are more than attempts, so it waits only for a connection being
    /// closed.
    pub(super) async fn permit(&self) -> Option<OwnedSemaphorePermit> {
        if let Ok(permit) = self.permits.clone().try_acquire_owned() {
            return Some(permit);
        }
        // Registered before the idle connections are checked: none becomes idle after that.
        let _waits = Waits::begin(&self.waiting);
        let oldest = lock(&self.idle).take_oldest(None);
        if let Some(oldest) = oldest {
            oldest.close();
        }
        self.permits.clone().acquire_owned().await.ok()
    }

    pub(super) fn extra_permit(&self) -> Option<OwnedSemaphorePermit> {
        self.extra.clone().try_acquire_owned().ok()
    }

    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize) {
        (lock(&self.idle).by_age.len(), self.permits.available_permits())
    }
}

/// An attempt waiting for a permit.
struct Waits<'w>(&'w AtomicUsize);

impl<'w> Waits<'w> {
    fn begin(waiting: &'w AtomicUsize) -> Self {
        waiting.fetch_add(1, Ordering::SeqCst);
        Self(waiting)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Ends with the sender.
async fn close_old(idle: Weak<Mutex<IdleConnections>>) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let Some(idle) = idle.upgrade() else { return };
        let before = Instant::now().checked_sub(KEPT_LIFE);
        let Some(before) = before else { continue };
        loop {
            let old = lock(&idle).take_oldest(Some(before));
            match old {
                Some(old) => old.close(),
                None => break,
            }
        }
    }
}
