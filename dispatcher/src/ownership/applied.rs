//! Publishes which settings this dispatcher has applied, for API callers that wait until a change has taken effect, and which
//! are quiet, for a tenant's move: no attempt of an endpoint that they pause is in flight or unrecorded.

use std::time::Duration;

use sqlx::PgPool;
use tokio::sync::watch;
use uuid::Uuid;

use crate::{
    backoff::Backoff, bind::BindAll, db_timeout::WithDbTimeout, health::database::warn_unless_outage,
};

const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(1));

pub(crate) const APPLIED: &str = "update postrider.dispatchers set applied = $2::pg_snapshot where id = $1";
pub(crate) const QUIET: &str = "update postrider.dispatchers set quiet = $2::pg_snapshot where id = $1";

pub(crate) async fn publish(
    pool: PgPool,
    id: Uuid,
    statement: &'static str,
    mut snapshots: watch::Receiver<Option<String>>,
) {
    let mut retry = RETRY;
    while snapshots.changed().await.is_ok() {
        let Some(snapshot) = snapshots.borrow_and_update().clone() else {
            continue;
        };
        let written = sqlx::query(statement)
            .bind_all((id, snapshot))
            .execute(&pool)
            .with_db_timeout()
            .await;
        let Err(error) = written else {
            retry.reset();
            continue;
        };
        warn_unless_outage!(error, "publishing applied settings failed; retrying");
        tokio::time::sleep(retry.delay()).await;
        snapshots.mark_changed();
    }
}
