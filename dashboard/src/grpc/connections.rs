//! gRPC connections: how many there may be, how much each may buffer, and how long it may be idle.
//! Invariants: one address holds a bounded share of them; a connection without an HTTP/2 preface, or without a call
//! for a while, is closed; data sent faster than it is read waits at the client.

use std::{
    convert::Infallible,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    http::{Request, Response},
    serve::Listener,
};
use http_body_util::BodyExt;
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::watch,
    time::{Instant, interval},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower_service::Service;

use crate::{
    auth::{TrustedProxies, address::network},
    http::slots::{Slot, Slots},
};

const CONNECTIONS_MAX: usize = 1_024;
/// Each carries many calls. A trusted proxy may hold more.
const CONNECTIONS_PER_ADDRESS_MAX: usize = 256;
const CALLS_PER_CONNECTION_MAX: u32 = 128;
/// Streaming calls of one connection. The windows below are sized for this many.
pub(super) const STREAMS_PER_CONNECTION_MAX: usize = 8;
/// Buffered bytes per call. With the smallest events (17 bytes and a frame each) these are 7,710 frames.
const CALL_WINDOW: u32 = 128 * 1024;
/// h2 limits buffered small frames to half of this: a frame below 256 bytes counts for the difference.
/// `STREAMS_PER_CONNECTION_MAX` full windows of the smallest events come to 14 MiB, so a client is always stopped by
/// the window and never by a GOAWAY. The number of buffered bytes is bounded by the calls and their windows, not by
/// this.
const CONNECTION_WINDOW: u32 = 32 * 1024 * 1024;
/// From accepting the connection to the first bytes of HTTP/2.
const PREFACE_TIME_MAX: Duration = Duration::from_secs(10);
const PREFACE_BYTES: usize = 24;
/// Without a call. Clients reconnect automatically.
const IDLE_MAX: Duration = Duration::from_secs(5 * 60);
/// For a client to close a connection without calls after it was asked to.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A peer that does not respond is gone.
const PING_EVERY: Duration = Duration::from_secs(60);
const PING_TIME_MAX: Duration = Duration::from_secs(20);

/// Serves until `stop`, then until every call has ended.
pub(super) async fn serve(
    mut listener: TcpListener,
    routes: Router,
    proxies: TrustedProxies,
    stop: CancellationToken,
) {
    let slots = Slots::new(CONNECTIONS_MAX, CONNECTIONS_PER_ADDRESS_MAX);
    let running = TaskTracker::new();
    loop {
        let (stream, peer) = tokio::select! {
            accepted = Listener::accept(&mut listener) => accepted,
            () = stop.cancelled() => break,
        };
        let holder = (!proxies.contains(peer.ip())).then(|| network(peer.ip()));
        // HTTP/2 has not started, so no error can be sent.
        let Some(slot) = slots.take(holder) else {
            tracing::debug!(%peer, "gRPC connection rejected: too many connections");
            continue;
        };
        let _ = stream.set_nodelay(true);
        let connection = Arc::new(Connection::new(peer, slot));
        running.spawn(connection.run(stream, routes.clone(), stop.clone()));
    }
    drop(listener);
    running.close();
    running.wait().await;
}

/// In the extensions of each of its requests.
pub(super) struct Connection {
    peer: SocketAddr,
    /// Open calls, and when their number last changed.
    calls: watch::Sender<(usize, Instant)>,
    streams: Arc<Slots<()>>,
    bytes_read: AtomicUsize,
    _slot: Slot<Ipv6Addr>,
}

/// A call, until its response has been sent.
struct Call(Arc<Connection>);

impl Call {
    fn begin(connection: Arc<Connection>) -> Self {
        connection.count(|calls| calls + 1);
        Self(connection)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.0.count(|calls| calls.saturating_sub(1));
    }
}

impl Connection {
    fn new(peer: SocketAddr, slot: Slot<Ipv6Addr>) -> Self {
        Self {
            peer,
            calls: watch::Sender::new((0, Instant::now())),
            streams: Slots::new(STREAMS_PER_CONNECTION_MAX, STREAMS_PER_CONNECTION_MAX),
            bytes_read: AtomicUsize::new(0),
            _slot: slot,
        }
    }

    pub(super) fn peer(&self) -> IpAddr {
        self.peer.ip()
    }

    /// None if the limit is reached.
    pub(super) fn take_stream(&self) -> Option<Slot<()>> {
        self.streams.take(None)
    }

    fn count(&self, change: impl FnOnce(usize) -> usize) {
        self.calls
            .send_modify(|(calls, changed)| (*calls, *changed) = (change(*calls), Instant::now()));
    }

    /// Since when there has been no call.
    fn idle_since(&self) -> Option<Instant> {
        let (calls, changed) = *self.calls.borrow();
        (calls == 0).then_some(changed)
    }

    fn has_begun(&self) -> bool {
        self.bytes_read.load(Ordering::Relaxed) >= PREFACE_BYTES
    }

    async fn run(self: Arc<Self>, stream: TcpStream, routes: Router, stop: CancellationToken) {
        let began = Instant::now();
        let io = TokioIo::new(Counted {
            stream,
            connection: self.clone(),
        });
        let connection = self.clone();
        let service = service_fn(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(connection.clone());
            respond(
                routes.clone(),
                Call::begin(connection.clone()),
                request.map(Body::new),
            )
        });
        let mut serving = pin!(builder().serve_connection(io, service));
        let mut look = interval(LOOK_EVERY);
        let mut closing: Option<Instant> = None;
        loop {
            let mut close = false;
            tokio::select! {
                ended = &mut serving => {
                    if let Err(error) = ended {
                        tracing::debug!(%error, peer = %self.peer, "gRPC connection failed");
                    }
                    return;
                }
                () = stop.cancelled(), if closing.is_none() => close = true,
                _ = look.tick() => {}
            }
            let idle_since = self.idle_since();
            if !self.has_begun() && (close || began.elapsed() >= PREFACE_TIME_MAX) {
                return;
            }
            if let (Some(asked), Some(idle)) = (closing, idle_since)
                && asked.max(idle).elapsed() >= CLOSE_TIME_MAX
            {
                return;
            }
            close |= idle_since.is_some_and(|since| since.elapsed() >= IDLE_MAX);
            if close && closing.is_none() {
                serving.as_mut().graceful_shutdown();
                closing = Some(Instant::now());
            }
        }
    }
}

fn builder() -> http2::Builder<TokioExecutor> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(CALLS_PER_CONNECTION_MAX)
        .initial_stream_window_size(CALL_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_TIME_MAX);
    builder
}

async fn respond(
    mut routes: Router,
    call: Call,
    request: Request<Body>,
) -> Result<Response<Body>, Infallible> {
    let response = routes.call(request).await?;
    // The call lasts until its response has been sent.
    Ok(response.map(|body| {
        Body::new(body.map_frame(move |frame| {
            let _call = &call;
            frame
        }))
    }))
}

/// Counts the bytes read.
struct Counted {
    stream: TcpStream,
    connection: Arc<Connection>,
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        let bytes = buffer.filled().len() - before;
        self.connection.bytes_read.fetch_add(bytes, Ordering::Relaxed);
        read
    }
}

impl AsyncWrite for Counted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// h2 counts extra for frames smaller than 256 bytes.
    #[test]
    fn the_window_stops_small_events_before_h2_does() {
        const FRAME_BYTES_LIKED: u32 = 256;
        const SMALLEST_EVENT: u32 = 17;
        let frames = CALL_WINDOW / SMALLEST_EVENT + 1;
        let counted = frames * (FRAME_BYTES_LIKED - SMALLEST_EVENT) * STREAMS_PER_CONNECTION_MAX as u32;
        assert!(counted < CONNECTION_WINDOW / 2, "{counted}");
    }
}
