//! `retries`: deliveries that wait for a time. Read here; a replay moves one to `queue`.

use postrider_proto::EndpointId;
use sqlx::PgExecutor;

use crate::deliveries::{Place, Span};

/// As `queue::list`.
pub(crate) async fn list(
    db: impl PgExecutor<'_>,
    endpoints: &[EndpointId],
    span: Span<'_>,
) -> Result<Vec<Place>, sqlx::Error> {
    let endpoints: Vec<i32> = endpoints.iter().map(|id| id.0).collect();
    sqlx::query_as(
        "select r.event_id, r.endpoint_id, $6::int[] is null or r.type_id = any($6) as may_match
         from unnest($1::int[]) as e (id)
         cross join lateral (
            select r.event_id, r.endpoint_id, r.type_id from postrider.retries r
            where r.endpoint_id = e.id and r.event_id between $2 and $3 and (r.event_id < $3 or e.id < $4)
            order by r.event_id desc limit $5) r
         order by r.event_id desc, r.endpoint_id desc limit $5",
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
