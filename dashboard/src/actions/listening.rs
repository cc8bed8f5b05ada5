//! The stream that `postrider listen` reads its requests from: one JSON object per line while a client is connected.
//! Invariants: a request is signed over the stored bytes when it is sent, and removed from the queue only after the client
//! has received it, so that none is lost with the connection or the process. Memory per stream is bounded. A listener
//! without a client is removed within a minute.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::body::{Body, Bytes};
use data_encoding::BASE64;
use postrider_dispatcher::http::headers::RequestHeaders;
use postrider_proto::{
    EventId, TenantId,
    signature::{Secret, sign},
};
use serde_json::json;
use tokio::{
    sync::mpsc,
    time::{Instant, interval, timeout},
};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    Pool,
    http::slots::Slot,
    tables::listeners::{self, ListenerRow, TakenRow},
};

/// How long a listener survives without a client: enough to reconnect.
pub(crate) const LIFE: Duration = Duration::from_secs(30);
/// Streams per process.
pub(crate) const STREAMS_MAX: usize = 64;
/// A tenant's listeners, plus connections that are being replaced by newer ones.
pub(crate) const STREAMS_PER_TENANT_MAX: usize = 16;
const RENEW_EVERY: Duration = Duration::from_secs(5);
const POLL_EVERY: Duration = Duration::from_millis(200);
const BATCH_MAX: i64 = 16;
const LINES_BUFFERED_MAX: usize = 4;
/// A client that reads nothing for this long is considered disconnected.
const STALL_MAX: Duration = Duration::from_secs(20);
const STREAM_TIME_MAX: Duration = Duration::from_secs(12 * 60 * 60);
const SWEEP_EVERY: Duration = Duration::from_secs(10);

/// One open stream.
pub(crate) struct Session {
    pub(crate) pool: Pool,
    pub(crate) listener: ListenerRow,
    pub(crate) secrets: Vec<Secret>,
    pub(crate) holder: Uuid,
    pub(crate) stop: CancellationToken,
    pub(crate) place: Slot<TenantId>,
}

/// Why a stream ends.
enum End {
    /// The client disconnected, another client took over the listener, or it was deleted.
    Over,
    Database(sqlx::Error),
}

impl From<sqlx::Error> for End {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(error)
    }
}

impl Session {
    pub(crate) fn body(self) -> Body {
        let (lines, receiver) = mpsc::channel::<Bytes>(LINES_BUFFERED_MAX);
        tokio::spawn(async move {
            let stop = self.stop.clone();
            tokio::select! {
                ended = timeout(STREAM_TIME_MAX, self.run(&lines)) => {
                    if let Ok(Err(End::Database(error))) = ended {
                        tracing::warn!(%error, "listener stream ended by a database error");
                    }
                }
                () = stop.cancelled() => {}
                () = lines.closed() => {}
            }
            drop(self.place);
        });
        Body::from_stream(ReceiverStream::new(receiver).map(Ok::<_, Infallible>))
    }

    async fn run(&self, lines: &mpsc::Sender<Bytes>) -> Result<(), End> {
        let mut renewed = Instant::now();
        // Tells the client at once that it is connected.
        write(lines, Bytes::from_static(b"{}\n")).await?;
        let mut poll = interval(POLL_EVERY);
        loop {
            poll.tick().await;
            if renewed.elapsed() >= RENEW_EVERY {
                if !listeners::renew(&self.pool, self.listener.id, self.holder, LIFE).await? {
                    return Err(End::Over);
                }
                renewed = Instant::now();
                write(lines, Bytes::from_static(b"{}\n")).await?;
            }
            let waiting = listeners::waiting(&self.pool, self.listener.id, self.holder, BATCH_MAX).await?;
            for row in &waiting {
                write(lines, self.line(row)).await?;
            }
            if !waiting.is_empty() {
                flushed(lines).await?;
                let events: Vec<EventId> = waiting.iter().map(|row| row.id).collect();
                listeners::remove(&self.pool, self.listener.id, self.holder, &events).await?;
            }
        }
    }

    /// The request as a dispatcher would send it.
    fn line(&self, row: &TakenRow) -> Bytes {
        let (id, t) = (row.public_id(), row.now.timestamp());
        let signature = sign(self.listener.signature, &id, t, &row.body, &self.secrets);
        let headers = RequestHeaders {
            event_id: &id,
            unix_seconds: t,
            signature: Some(&signature),
            ..RequestHeaders::default()
        };
        let headers = headers.build();
        let headers: Vec<(&str, &str)> = headers
            .iter()
            .filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?)))
            .collect();
        let line =
            json!({"event": id, "type": row.type_name, "headers": headers, "body": BASE64.encode(&row.body)});
        Bytes::from(format!("{line}\n"))
    }
}

async fn write(lines: &mpsc::Sender<Bytes>, line: Bytes) -> Result<(), End> {
    match timeout(STALL_MAX, lines.send(line)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) | Err(_) => Err(End::Over),
    }
}

/// Waits until the connection has consumed every buffered line.
async fn flushed(lines: &mpsc::Sender<Bytes>) -> Result<(), End> {
    match timeout(STALL_MAX, lines.reserve_many(LINES_BUFFERED_MAX)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(_)) | Err(_) => Err(End::Over),
    }
}

/// Removes listeners without a client. Every API process does this independently.
pub(crate) async fn sweep(app: Arc<crate::App>, stop: CancellationToken) {
    let mut every = interval(SWEEP_EVERY);
    loop {
        tokio::select! {
            _ = every.tick() => {}
            () = stop.cancelled() => return,
        }
        match listeners::sweep(&app.pool).await {
            Ok(0) => {}
            Ok(_) => app.wake.now(),
            Err(error) => tracing::debug!(%error, "failed to remove expired listeners"),
        }
    }
}
