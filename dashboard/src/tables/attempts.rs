//! `attempts`: read here; the recorder writes them and a replay clears `final`.
//! A finished delivery is its attempt with `final` set.

use chrono::{DateTime, Utc};
use postrider_dispatcher::bind::BindAll;
use postrider_proto::{DeliveryId, EndpointId, EventId, OutcomeKind, TenantId};
use sqlx::{FromRow, PgExecutor};

use crate::tables::deliveries::{Attempted, DeliveryKey, Filter, Span};

#[derive(Debug, FromRow)]
pub(crate) struct AttemptRow {
    pub(crate) number: i16,
    pub(crate) started_at: DateTime<Utc>,
    pub(crate) duration_ms: i32,
    pub(crate) outcome: i16,
    pub(crate) status: Option<i16>,
    pub(crate) error: Option<String>,
    pub(crate) signature: Option<String>,
    pub(crate) response_head: Option<String>,
    pub(crate) response_body: Option<Vec<u8>>,
    pub(crate) replay_id: Option<String>,
    pub(crate) timing: Option<String>,
}

/// Attempts shown of one delivery; the newest are kept.
const ATTEMPTS_SHOWN_MAX: i64 = 500;

/// Attempts of a bulk replay that are counted one by one.
const REPLAYED_COUNTED_MAX: i64 = 10_000;

/// Newest first.
pub(crate) async fn of_delivery(db: impl PgExecutor<'_>, id: DeliveryId) -> sqlx::Result<Vec<AttemptRow>> {
    sqlx::query_as(include_str!("sql/attempts_of_delivery.sql"))
        .bind_all((id.event, id.endpoint, ATTEMPTS_SHOWN_MAX))
        .fetch_all(db)
        .await
}

pub(crate) async fn list_ended_of_endpoint(
    db: impl PgExecutor<'_>,
    endpoint: EndpointId,
    span: Span<'_>,
) -> sqlx::Result<Vec<DeliveryKey>> {
    sqlx::query_as(include_str!("sql/attempts_list_ended_of_endpoint.sql"))
        .bind(endpoint)
        .bind_all(span.values())
        .bind_all(span.ended_values())
        .fetch_all(db)
        .await
}

/// Includes an entry that can't match for each event without an ended delivery, so that a page examines a bounded number of
/// events.
pub(crate) async fn list_ended_of_tenant(
    db: impl PgExecutor<'_>,
    tenant: TenantId,
    span: Span<'_>,
) -> sqlx::Result<Vec<DeliveryKey>> {
    sqlx::query_as(include_str!("sql/attempts_list_ended_of_tenant.sql"))
        .bind(tenant)
        .bind_all(span.values())
        .bind_all(span.ended_values())
        .fetch_all(db)
        .await
}

/// Deliveries of a bulk replay.
pub(crate) async fn list_of_replay(
    db: impl PgExecutor<'_>,
    replay: &str,
    filter: &Filter,
    span: Span<'_>,
) -> sqlx::Result<Vec<DeliveryKey>> {
    sqlx::query_as(include_str!("sql/attempts_list_of_replay.sql"))
        .bind(replay)
        .bind_all(span.values())
        .bind(filter.endpoint)
        .fetch_all(db)
        .await
}

/// Across all tenants: scans the primary key, where nearly every row is a final one.
pub(crate) async fn list_ended(db: impl PgExecutor<'_>, span: Span<'_>) -> sqlx::Result<Vec<DeliveryKey>> {
    sqlx::query_as(include_str!("sql/attempts_list_ended.sql"))
        .bind_all(span.values())
        .bind_all(span.ended_values())
        .fetch_all(db)
        .await
}

/// Deliveries whose latest attempt got this unsuccessful status code. The condition on the range of codes lets
/// Postgres use the index of unsuccessful attempts.
pub(crate) async fn list_refused(
    db: impl PgExecutor<'_>,
    code: i16,
    filter: &Filter,
    span: Span<'_>,
) -> sqlx::Result<Vec<DeliveryKey>> {
    sqlx::query_as(include_str!("sql/attempts_list_refused.sql"))
        .bind(code)
        .bind_all(span.values())
        .bind_all((filter.tenant, filter.endpoint))
        .bind(filter.state.map(|state| state.as_str()))
        .fetch_all(db)
        .await
}

/// What became of an attempt.
#[derive(Debug, FromRow)]
pub(crate) struct MadeAttempt {
    event_id: EventId,
    endpoint_id: EndpointId,
    pub(crate) outcome: i16,
    pub(crate) status: Option<i16>,
}

impl MadeAttempt {
    pub(crate) fn delivery(&self) -> DeliveryId {
        DeliveryId {
            event: self.event_id,
            endpoint: self.endpoint_id,
        }
    }
}

/// The results of the latest attempts of these deliveries. Cheaper than loading the deliveries.
pub(crate) async fn latest_of(
    db: impl PgExecutor<'_>,
    deliveries: &[DeliveryKey],
) -> sqlx::Result<Vec<MadeAttempt>> {
    let events: Vec<_> = deliveries.iter().map(|key| key.event_id.0).collect();
    let endpoints: Vec<i32> = deliveries.iter().map(|key| key.endpoint_id.0).collect();
    sqlx::query_as(include_str!("sql/attempts_latest.sql"))
        .bind_all((events, endpoints))
        .fetch_all(db)
        .await
}

/// The different results that attempts of these deliveries had in this time.
pub(crate) async fn made_within(
    db: impl PgExecutor<'_>,
    deliveries: &[DeliveryId],
    within: Attempted,
) -> sqlx::Result<Vec<MadeAttempt>> {
    let events: Vec<_> = deliveries.iter().map(|id| id.event.0).collect();
    let endpoints: Vec<i32> = deliveries.iter().map(|id| id.endpoint.0).collect();
    sqlx::query_as(include_str!("sql/attempts_made_within.sql"))
        .bind_all((events, endpoints, within.since, within.until))
        .fetch_all(db)
        .await
}

/// How many deliveries a bulk replay has delivered. None if it has made so many attempts that they are not counted.
pub(crate) async fn delivered_by_replay(db: impl PgExecutor<'_>, replay: &str) -> sqlx::Result<Option<i64>> {
    let (attempts, delivered): (i64, i64) =
        sqlx::query_as(include_str!("sql/attempts_delivered_by_replay.sql"))
            .bind_all((replay, OutcomeKind::Accepted as i16, REPLAYED_COUNTED_MAX))
            .fetch_one(db)
            .await?;
    Ok(Some(delivered).filter(|_| attempts < REPLAYED_COUNTED_MAX))
}
