//! `queue`: deliveries that are due. Read here by endpoint, which is how its only index for that goes.

use postrider_proto::{DeliveryId, EndpointId};
use sqlx::PgExecutor;

use crate::deliveries::{Place, Span};

/// Up to `span.limit` of each endpoint's newest; all of them together, the newest first, are no more than that.
pub(crate) async fn list(
    db: impl PgExecutor<'_>,
    endpoints: &[EndpointId],
    span: Span<'_>,
) -> Result<Vec<Place>, sqlx::Error> {
    let endpoints: Vec<i32> = endpoints.iter().map(|id| id.0).collect();
    sqlx::query_as(
        "select q.event_id, q.endpoint_id, $6::int[] is null or q.type_id = any($6) as may_match
         from unnest($1::int[]) as e (id)
         cross join lateral (
            select q.event_id, q.endpoint_id, q.type_id from postrider.queue q
            where q.endpoint_id = e.id and q.event_id between $2 and $3 and (q.event_id < $3 or e.id < $4)
            order by q.event_id desc limit $5) q
         order by q.event_id desc, q.endpoint_id desc limit $5",
    )
    .bind(endpoints)
    .bind(span.lowest)
    .bind(span.before.event)
    .bind(span.before.endpoint)
    .bind(span.limit)
    .bind(span.types)
    .fetch_all(db)
    .await
}

pub(crate) async fn holds(db: impl PgExecutor<'_>, id: DeliveryId) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("select exists (select from postrider.queue where endpoint_id = $1 and event_id = $2)")
        .bind(id.endpoint)
        .bind(id.event)
        .fetch_one(db)
        .await
}
