//! Waits for any commit, on a dedicated connection: the server polls for us, so that an idle system costs almost
//! nothing. The reader's connection stays free for when an API in this process wakes it.

use std::time::Duration;

use sqlx::{PgConnection, postgres::PgConnectOptions};
use tokio::sync::mpsc;

use crate::{db_timeout::WithDbTimeout, dedicated_connection::DedicatedConnection};

/// Poll interval on the server. The median latency of an event emitted by SQL is half of it.
const POLL_EVERY: Duration = Duration::from_millis(18);
/// Polls per statement: a long-running statement holds back vacuum.
const POLLS: i32 = 25;
const WAIT_AFTER_ERROR: Duration = Duration::from_secs(1);

/// The reader's side.
pub(crate) struct ChangeWatcher {
    requests: mpsc::Sender<String>,
    replies: mpsc::Receiver<bool>,
    pending: bool,
}

impl ChangeWatcher {
    /// The task ends when this is dropped.
    pub(crate) fn start(options: PgConnectOptions) -> Self {
        let (requests, pending) = mpsc::channel(1);
        let (reply, replies) = mpsc::channel(1);
        tokio::spawn(serve(DedicatedConnection::new(options), pending, reply));
        Self {
            requests,
            replies,
            pending: false,
        }
    }

    /// Whether anything has changed since the snapshot, or since an earlier one whose query is still running. Returns
    /// within half a second and is safe to cancel.
    pub(crate) async fn changed(&mut self, seen: &str) -> bool {
        if !self.pending {
            self.pending = self.requests.try_send(seen.to_owned()).is_ok();
        }
        let changed = self.replies.recv().await;
        self.pending = false;
        // If the watcher has ended, the reader checks for itself.
        changed.unwrap_or(true)
    }
}

async fn serve(
    mut connection: DedicatedConnection,
    mut requests: mpsc::Receiver<String>,
    replies: mpsc::Sender<bool>,
) {
    while let Some(seen) = requests.recv().await {
        let changed = match connection.open().await {
            Ok(connection) => wait_for_change(connection, &seen).with_db_timeout().await,
            Err(error) => Err(error),
        };
        if let Err(error) = &changed {
            tracing::warn!(%error, "watching the database for changes failed; polling every second");
            connection.close();
            tokio::time::sleep(WAIT_AFTER_ERROR).await;
        }
        if replies.send(changed.unwrap_or(true)).await.is_err() {
            return;
        }
    }
}

async fn wait_for_change(connection: &mut PgConnection, seen: &str) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("select postrider.wait_for_change($1, $2, $3)")
        .bind(seen)
        .bind(POLL_EVERY.as_secs_f64())
        .bind(POLLS)
        .fetch_one(connection)
        .await
}
