//! Connection timeouts. A client that connects and sends nothing, or a byte now and then, would hold a connection
//! forever: the request timeout starts only once its headers are complete.
//! Invariants: a connection is closed if we have written nothing to it for `IDLE_TIMEOUT`, or if a started request was
//! without a response for `REQUEST_TIMEOUT`. Once its headers are complete each request gets one sooner, and streams
//! write more often.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::serve::Listener;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    time::{Instant, Sleep},
};

/// Longer than pools and proxies usually keep an idle connection: they should be the ones to close it.
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);
/// From the first byte of a request: an incomplete request head is not waited for longer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// A listener whose connections time out.
pub(crate) struct TimedListener(pub(crate) TcpListener);

impl Listener for TimedListener {
    type Io = Waiting<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        let (stream, peer) = Listener::accept(&mut self.0).await;
        (Waiting::new(stream, IDLE_TIMEOUT, REQUEST_TIMEOUT), peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

pub(crate) struct Waiting<S> {
    stream: S,
    idle_timeout: Duration,
    request_timeout: Duration,
    written: Instant,
    /// When the first byte since then was read.
    asked: Option<Instant>,
    /// Fires at the earliest possible timeout; reset if something was written meanwhile.
    alarm: Pin<Box<Sleep>>,
}

impl<S> Waiting<S> {
    fn new(stream: S, idle_timeout: Duration, request_timeout: Duration) -> Self {
        Self {
            stream,
            idle_timeout,
            request_timeout,
            written: Instant::now(),
            asked: None,
            alarm: Box::pin(tokio::time::sleep(idle_timeout)),
        }
    }

    fn note<T>(&mut self, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if matches!(written, Poll::Ready(Ok(_))) {
            self.written = Instant::now();
            self.asked = None;
        }
        written
    }

    fn end(&self) -> Instant {
        let idle = self.written + self.idle_timeout;
        self.asked
            .map_or(idle, |asked| idle.min(asked + self.request_timeout))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Waiting<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        // Checked before reading: a byte now and then would postpone it forever.
        while this.alarm.as_mut().poll(context).is_ready() {
            let end = this.end();
            if end <= Instant::now() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            this.alarm.as_mut().reset(end);
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(context, buffer);
        if buffer.filled().len() > before && this.asked.is_none() {
            this.asked = Some(Instant::now());
            let end = this.end();
            this.alarm.as_mut().reset(end);
            // The timer must wake this task at its new time.
            let _ = this.alarm.as_mut().poll(context);
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Waiting<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.note(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.note(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    const SHORT: Duration = Duration::from_millis(300);

    #[tokio::test]
    async fn who_sends_a_byte_now_and_then_is_given_up() {
        let (mut client, server) = duplex(64);
        let mut server = Waiting::new(server, SHORT, SHORT * 10);
        let dripping = tokio::spawn(async move {
            while client.write_all(b"x").await.is_ok() {
                tokio::time::sleep(SHORT / 20).await;
            }
        });
        let began = Instant::now();
        let mut read = 0;
        let error = loop {
            match server.read_u8().await {
                Ok(_) => read += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(read > 0 && began.elapsed() >= SHORT, "{read}");
        drop(server);
        dripping.await.expect("the client notices");
    }

    #[tokio::test]
    async fn as_long_as_we_write_it_stays() {
        let (mut client, server) = duplex(64);
        let mut server = Waiting::new(server, SHORT, SHORT * 10);
        let began = Instant::now();
        while began.elapsed() < SHORT * 3 {
            server.write_all(b"x").await.expect("taken");
            assert_eq!(client.read_u8().await.expect("read"), b'x');
            client.write_all(b"y").await.expect("taken");
            assert_eq!(server.read_u8().await.expect("it stays"), b'y');
        }
    }

    #[tokio::test]
    async fn half_a_request_is_not_waited_for_as_long_as_a_connection_may_be_idle() {
        let (mut client, server) = duplex(64);
        let mut server = Waiting::new(server, SHORT * 20, SHORT);
        tokio::time::sleep(SHORT * 2).await;
        client
            .write_all(b"GET / HT")
            .await
            .expect("an idle connection stays");
        for _ in 0..8 {
            server.read_u8().await.expect("what has come is read");
        }
        let began = Instant::now();
        let error = server.read_u8().await.expect_err("the rest does not come");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() < SHORT * 5, "{:?}", began.elapsed());
    }
}
