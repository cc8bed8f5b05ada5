//! Removes queue rows and retries of deleted endpoints, including rows of producers that committed late.
//! A deletion is final, so this needs no fence: an error is retried until the rows are gone.

use std::time::Duration;

use postrider_proto::{EndpointId, EventId};
use sqlx::PgPool;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{
    backoff::Backoff, db_timeout::WithDbTimeout, health::database::warn_unless_outage, store::transitions,
    telemetry::metrics::METRICS,
};

const RETRY: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));

pub(crate) async fn run(
    pool: PgPool,
    mut deleted: mpsc::UnboundedReceiver<EndpointId>,
    stop: CancellationToken,
) {
    while let Some(endpoint) = deleted.recv().await {
        let mut backoff = RETRY;
        while let Err(error) = drop_rows(&pool, endpoint, &stop).await {
            warn_unless_outage!(error, %endpoint, "removing rows of a deleted endpoint failed; retrying");
            tokio::select! {
                () = tokio::time::sleep(backoff.delay()) => {}
                () = stop.cancelled() => return,
            }
        }
    }
}

/// One batch after the other, so that no statement takes long.
async fn drop_rows(pool: &PgPool, endpoint: EndpointId, stop: &CancellationToken) -> Result<(), sqlx::Error> {
    for table in transitions::PendingRows::ALL {
        let mut after = EventId::LOWEST;
        while !stop.is_cancelled() {
            let batch = transitions::drop_endpoint(pool, table, endpoint, after);
            let (dropped, last) = batch.with_db_timeout().await?;
            METRICS.dropped.increment(dropped.unsigned_abs());
            let Some(last) = last else { break };
            after = last;
        }
    }
    Ok(())
}
