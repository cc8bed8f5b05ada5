//! Every statement that moves a delivery, one function for each transition.

use postrider_proto::{EndpointId, EventId};
use sqlx::PgExecutor;

/// Rows that [`drop_endpoint`] removes at once.
const DROP_BATCH: i64 = 2_000;

/// Where a delivery waits for its next attempt.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Waiting {
    Queue,
    Retries,
}

impl Waiting {
    pub(crate) const ALL: [Self; 2] = [Self::Queue, Self::Retries];
}

/// queue | retries → gone, for a batch of a deleted endpoint's rows above `after`. Returns how many were removed, and the
/// last one looked at; none when there are no more.
pub(crate) async fn drop_endpoint(
    db: impl PgExecutor<'_>,
    table: Waiting,
    endpoint: EndpointId,
    after: EventId,
) -> Result<(i64, Option<EventId>), sqlx::Error> {
    let statement = match table {
        Waiting::Queue => include_str!("sql/drop_endpoint_queue.sql"),
        Waiting::Retries => include_str!("sql/drop_endpoint_retries.sql"),
    };
    sqlx::query_as(statement)
        .bind(endpoint)
        .bind(after)
        .bind(DROP_BATCH)
        .fetch_one(db)
        .await
}
