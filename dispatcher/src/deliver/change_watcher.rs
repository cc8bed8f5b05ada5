//! Waits for any commit, on a dedicated connection: the server polls for us, so that an idle system costs almost
//! nothing. The reader's connection stays free for when an API in this process wakes it.

use std::time::Duration;

use sqlx::{PgConnection, postgres::PgConnectOptions};
use tokio::sync::mpsc;

use crate::{db_timeout::WithDbTimeout, dedicated_connection::DedicatedConnection};

/// Poll interval on the server. The median latency of an event emitted by SQL is half of it.
const LOOK_EVERY: Duration = Duration::from_millis(18);
/// Polls per statement: a long-running statement holds back vacuum.
const LOOKS: i32 = 25;
const WAIT_AFTER_ERROR: Duration = Duration::from_secs(1);

/// The reader's side.
pub(crate) struct ChangeWatcher {
    questions: mpsc::Sender<String>,
    answers: mpsc::Receiver<bool>,
    asked: bool,
}

impl ChangeWatcher {
    /// The task ends when this is dropped.
    pub(crate) fn start(options: PgConnectOptions) -> Self {
        let (questions, asked) = mpsc::channel(1);
        let (answered, answers) = mpsc::channel(1);
        tokio::spawn(answer(DedicatedConnection::new(options), asked, answered));
        Self {
            questions,
            answers,
            asked: false,
        }
    }

    /// Whether anything has changed since the snapshot, or since an earlier one whose query is still running. Returns
    /// within half a second and is safe to cancel.
    pub(crate) async fn changed(&mut self, seen: &str) -> bool {
        if !self.asked {
            self.asked = self.questions.try_send(seen.to_owned()).is_ok();
        }
        let changed = self.answers.recv().await;
        self.asked = false;
        // If the watcher has ended, the reader checks for itself.
        changed.unwrap_or(true)
    }
}

async fn answer(
    mut line: DedicatedConnection,
    mut questions: mpsc::Receiver<String>,
    answers: mpsc::Sender<bool>,
) {
    while let Some(seen) = questions.recv().await {
        let changed = match line.open().await {
            Ok(connection) => wait_for_change(connection, &seen).with_db_timeout().await,
            Err(error) => Err(error),
        };
        if let Err(error) = &changed {
            tracing::warn!(%error, "the database can't be watched for changes; looking every second");
            line.close();
            tokio::time::sleep(WAIT_AFTER_ERROR).await;
        }
        if answers.send(changed.unwrap_or(true)).await.is_err() {
            return;
        }
    }
}

async fn wait_for_change(connection: &mut PgConnection, seen: &str) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("select postrider.wait_for_change($1, $2, $3)")
        .bind(seen)
        .bind(LOOK_EVERY.as_secs_f64())
        .bind(LOOKS)
        .fetch_one(connection)
        .await
}
