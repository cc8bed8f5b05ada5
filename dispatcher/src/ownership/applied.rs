//! Publishes which settings this dispatcher has applied, for API callers that wait until a change has taken effect.

use std::time::Duration;

use sqlx::PgPool;
use tokio::sync::watch;
use uuid::Uuid;

use crate::{
    backoff::Backoff, bind::BindAll, db_timeout::WithDbTimeout, health::database::warn_unless_outage,
};

const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(1));

pub(crate) async fn publish(pool: PgPool, id: Uuid, mut applied: watch::Receiver<Option<String>>) {
    let mut retry = RETRY;
    while applied.changed().await.is_ok() {
        let Some(snapshot) = applied.borrow_and_update().clone() else {
            continue;
        };
        let written = sqlx::query("update postrider.dispatchers set applied = $2::pg_snapshot where id = $1")
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
        applied.mark_changed();
    }
}
