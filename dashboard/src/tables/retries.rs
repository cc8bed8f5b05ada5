//! `retries`: deliveries waiting for their next attempt. Read here; a replay moves one to `queue`.

use postrider_dispatcher::bind::BindAll;
use postrider_proto::EndpointId;
use sqlx::PgExecutor;

use crate::tables::deliveries::{DeliveryKey, Span};

/// Like `queue::endpoints`.
pub(crate) async fn endpoints(db: impl PgExecutor<'_>, limit: i64) -> sqlx::Result<Vec<EndpointId>> {
    sqlx::query_scalar(include_str!("sql/retries_endpoints.sql"))
        .bind(limit)
        .fetch_all(db)
        .await
}

/// Like `queue::list`.
pub(crate) async fn list(
    db: impl PgExecutor<'_>,
    endpoints: &[EndpointId],
    span: Span<'_>,
) -> sqlx::Result<Vec<DeliveryKey>> {
    let endpoints: Vec<i32> = endpoints.iter().map(|id| id.0).collect();
    sqlx::query_as(include_str!("sql/retries_list.sql"))
        .bind(endpoints)
        .bind_all(span.values())
        .bind(span.attempts_min)
        .fetch_all(db)
        .await
}
