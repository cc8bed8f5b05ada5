//! `queue`: due deliveries. Read here by endpoint, the only way its index allows.

use postrider_dispatcher::bind::BindAll;
use postrider_proto::{DeliveryId, EndpointId};
use sqlx::PgExecutor;

use crate::tables::deliveries::{DeliveryKey, Span};

/// Endpoints with queued deliveries: a loose index scan from one endpoint to the next.
pub(crate) async fn endpoints(db: impl PgExecutor<'_>, limit: i64) -> sqlx::Result<Vec<EndpointId>> {
    sqlx::query_scalar(include_str!("sql/queue_endpoints.sql"))
        .bind(limit)
        .fetch_all(db)
        .await
}

/// The newest deliveries of these endpoints, at most `span.limit`. They belong to the `span.limit` endpoints with the
/// newest deliveries, so the others are not read.
pub(crate) async fn list(
    db: impl PgExecutor<'_>,
    endpoints: &[EndpointId],
    span: Span<'_>,
) -> sqlx::Result<Vec<DeliveryKey>> {
    let endpoints: Vec<i32> = endpoints.iter().map(|id| id.0).collect();
    sqlx::query_as(include_str!("sql/queue_list.sql"))
        .bind(endpoints)
        .bind_all(span.values())
        .bind(span.is_attempted())
        .fetch_all(db)
        .await
}

pub(crate) async fn holds(db: impl PgExecutor<'_>, id: DeliveryId) -> sqlx::Result<bool> {
    sqlx::query_scalar("select exists (select from postrider.queue where endpoint_id = $1 and event_id = $2)")
        .bind_all((id.endpoint, id.event))
        .fetch_one(db)
        .await
}
