//! The connection that a listener's requests go out on: one JSON object a line, for as long as somebody reads.
//! Invariants: a request is signed at that instant over the stored bytes, and leaves the queue only after it was handed
//! over, so that none is lost with the connection or the process; the memory of a stream is bounded by what its reader
//! takes; a listener that nobody holds ends within a minute.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::body::{Body, Bytes};
use data_encoding::BASE64;
use postrider_dispatcher::send::webhook_headers;
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
    slots::Slot,
    tables::listeners::{self, ListenerRow, TakenRow},
    transcript::USER_AGENT,
};

/// Of a listener that nobody holds: enough to connect again.
pub(crate) const LIFE: Duration = Duration::from_secs(30);
/// Streams of one process.
pub(crate) const STREAMS_MAX: usize = 64;
/// Its listeners, and connections that are about to be replaced by later ones.
pub(crate) const STREAMS_PER_TENANT_MAX: usize = 16;
const RENEW_EVERY: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(200);
const TAKEN_AT_ONCE_MAX: i64 = 16;
const LINES_WAITING_MAX: usize = 4;
/// A reader that takes nothing for so long is gone.
const STALL_MAX: Duration = Duration::from_secs(20);
const STREAM_TIME_MAX: Duration = Duration::from_secs(12 * 60 * 60);
const SWEEP_EVERY: Duration = Duration::from_secs(10);

/// One stream, from its beginning to its end.
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
    /// The reader has gone, or somebody else holds the listener, or it was deleted.
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
        let (lines, waiting) = mpsc::channel::<Bytes>(LINES_WAITING_MAX);
        tokio::spawn(async move {
            let stop = self.stop.clone();
            tokio::select! {
                ended = timeout(STREAM_TIME_MAX, self.run(&lines)) => {
                    if let Ok(Err(End::Database(error))) = ended {
                        tracing::warn!(%error, "a listener's stream ended");
                    }
                }
                () = stop.cancelled() => {}
                () = lines.closed() => {}
            }
            drop(self.place);
        });
        Body::from_stream(ReceiverStream::new(waiting).map(Ok::<_, Infallible>))
    }

    async fn run(&self, lines: &mpsc::Sender<Bytes>) -> Result<(), End> {
        let mut renewed = Instant::now();
        // The reader learns at once that it is connected.
        write(lines, Bytes::from_static(b"{}\n")).await?;
        let mut look = interval(LOOK_EVERY);
        loop {
            look.tick().await;
            if renewed.elapsed() >= RENEW_EVERY {
                if !listeners::renew(&self.pool, self.listener.id, self.holder, LIFE).await? {
                    return Err(End::Over);
                }
                renewed = Instant::now();
                write(lines, Bytes::from_static(b"{}\n")).await?;
            }
            let waiting =
                listeners::waiting(&self.pool, self.listener.id, self.holder, TAKEN_AT_ONCE_MAX).await?;
            for row in &waiting {
                write(lines, self.line(row)).await?;
            }
            if !waiting.is_empty() {
                handed_over(lines).await?;
                let events: Vec<EventId> = waiting.iter().map(|row| row.id).collect();
                listeners::remove(&self.pool, self.listener.id, self.holder, &events).await?;
            }
        }
    }

    /// The request as a dispatcher would have sent it.
    fn line(&self, row: &TakenRow) -> Bytes {
        let (id, t) = (row.public_id(), row.now.timestamp());
        let signature = sign(self.listener.signature, &id, t, &row.body, &self.secrets);
        let ours = webhook_headers(&id, t, &signature);
        let mut headers = vec![("content-type", "application/json"), ("user-agent", USER_AGENT)];
        headers.extend(
            ours.iter()
                .filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?))),
        );
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

/// When the connection has taken every line.
async fn handed_over(lines: &mpsc::Sender<Bytes>) -> Result<(), End> {
    match timeout(STALL_MAX, lines.reserve_many(LINES_WAITING_MAX)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(_)) | Err(_) => Err(End::Over),
    }
}

/// Ends listeners whose process or person has gone. Every API process does this; none needs another.
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
            Err(error) => tracing::debug!(%error, "listeners could not be swept"),
        }
    }
}
