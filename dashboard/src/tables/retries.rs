//! `retries`: deliveries waiting for their next attempt. Read here; a replay moves one to `queue`.

use postrider_proto::EndpointId;
use sqlx::PgExecutor;

use crate::tables::deliveries::{DeliveryKey, Span};

/// Like `queue::endpoints`.
pub(crate) async fn endpoints(db: impl PgExecutor<'_>, limit: i64) -> Result<Vec<EndpointId>, sqlx::Error> {
    sqlx::query_scalar(
        "with recursive w as (
            (select endpoint_id from postrider.retries order by endpoint_id limit 1)
            union all
            select (select r.endpoint_id from postrider.retries r where r.endpoint_id > w.endpoint_id
                    order by r.endpoint_id limit 1)
            from w where w.endpoint_id is not null
         )
         select p.id from (select endpoint_id from w where endpoint_id is not null limit $1) w
         join postrider.endpoints p on p.id = w.endpoint_id and p.state <> 'deleted'",
    )
    .bind(limit)
    .fetch_all(db)
    .await
}

/// Like `queue::list`.
pub(crate) async fn list(
    db: impl PgExecutor<'_>,
    endpoints: &[EndpointId],
    span: Span<'_>,
) -> Result<Vec<DeliveryKey>, sqlx::Error> {
    let endpoints: Vec<i32> = endpoints.iter().map(|id| id.0).collect();
    sqlx::query_as(
        "select r.event_id, r.endpoint_id, $6::int[] is null or r.type_id = any($6) as may_match
         from (
            select e.id from unnest($1::int[]) as e (id)
            cross join lateral (
                select r.event_id from postrider.retries r
                where r.endpoint_id = e.id and r.event_id between $2 and $3 and (r.event_id < $3 or e.id < $4)
                order by r.event_id desc limit 1) h
            order by h.event_id desc, e.id desc limit $5) e
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
