//! `queue`: due deliveries. Read here by endpoint, the only way its index allows.

use postrider_proto::{DeliveryId, EndpointId};
use sqlx::PgExecutor;

use crate::tables::deliveries::{DeliveryKey, Span};

/// Endpoints with queued deliveries: a loose index scan from one endpoint to the next.
pub(crate) async fn endpoints(db: impl PgExecutor<'_>, limit: i64) -> Result<Vec<EndpointId>, sqlx::Error> {
    sqlx::query_scalar(
        "with recursive w as (
            (select endpoint_id from postrider.queue order by endpoint_id limit 1)
            union all
            select (select q.endpoint_id from postrider.queue q where q.endpoint_id > w.endpoint_id
                    order by q.endpoint_id limit 1)
            from w where w.endpoint_id is not null
         )
         select p.id from (select endpoint_id from w where endpoint_id is not null limit $1) w
         join postrider.endpoints p on p.id = w.endpoint_id and p.state <> 'deleted'",
    )
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
) -> Result<Vec<DeliveryKey>, sqlx::Error> {
    let endpoints: Vec<i32> = endpoints.iter().map(|id| id.0).collect();
    sqlx::query_as(
        "select q.event_id, q.endpoint_id,
            ($6::int[] is null or q.type_id = any($6)) and ($7::smallint is null or q.attempt > 0) as may_match
         from (
            select e.id from unnest($1::int[]) as e (id)
            cross join lateral (
                select q.event_id from postrider.queue q
                where q.endpoint_id = e.id and q.event_id between $2 and $3 and (q.event_id < $3 or e.id < $4)
                order by q.event_id desc limit 1) h
            order by h.event_id desc, e.id desc limit $5) e
         cross join lateral (
            select q.event_id, q.endpoint_id, q.type_id, q.attempt from postrider.queue q
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
    .bind(span.status)
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
