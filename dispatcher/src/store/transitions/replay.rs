//! Queueing deliveries again, and undoing that.

use chrono::{DateTime, Utc};
use postrider_proto::{
    DeadReason, DeliveryId, EndpointId, Epoch, EventId, Failure, ReplaySource, Shard, TypeId,
    limits::ATTEMPTS_PER_DELIVERY_MAX,
};
use sqlx::{FromRow, PgExecutor};
use uuid::Uuid;

use crate::bind::{BindAll, Parameters};

/// Events that one statement reads to find those that an endpoint never received.
const EVENTS_READ_MAX: i64 = 20_000;

/// Which deliveries of an endpoint a bulk replay takes.
#[derive(Debug, Clone)]
pub(crate) struct ReplayBounds {
    pub(crate) after: EventId,
    pub(crate) lowest: EventId,
    pub(crate) below: EventId,
    pub(crate) requested_at: DateTime<Utc>,
    pub(crate) type_id: Option<TypeId>,
    pub(crate) reason: Option<DeadReason>,
    pub(crate) failure: Option<Failure>,
}

impl ReplayBounds {
    /// $2 to $8 of a statement.
    pub(crate) fn parameters(&self) -> impl for<'q> Parameters<'q> + use<> {
        let Self {
            after, lowest, below, ..
        } = *self;
        let Self {
            requested_at,
            type_id,
            reason,
            failure,
            ..
        } = *self;
        (after, lowest, below, requested_at, type_id, reason, failure)
    }
}

/// The progress that one [`replay_batch`] made.
#[derive(Debug, FromRow)]
pub(crate) struct Moved {
    pub(crate) moved: i64,
    /// The last event read.
    pub(crate) last: Option<EventId>,
    /// There is nothing after it.
    pub(crate) exhausted: bool,
}

/// A shard with its owner and epoch: a statement that carries it does nothing after another dispatcher took the shard over.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fence {
    pub(crate) shard: Shard,
    pub(crate) owner: Uuid,
    pub(crate) epoch: Epoch,
}

/// delivered | dead | discarded → queue: one delivery whose last attempt has this number. Returns false when it has another, or when
/// its endpoint receives nothing.
pub async fn replay_one(
    db: impl PgExecutor<'_>,
    delivery: DeliveryId,
    last_attempt: i16,
) -> Result<bool, sqlx::Error> {
    let done = sqlx::query(include_str!("../sql/replay_one.sql"))
        .bind_all((delivery.event, delivery.endpoint, delivery.to_string()))
        .bind(last_attempt)
        .execute(db)
        .await?;
    Ok(done.rows_affected() > 0)
}

/// retries → queue: one delivery whose last attempt has this number. Returns false when it has another, or when its
/// endpoint receives nothing.
pub async fn hasten_retry(
    db: impl PgExecutor<'_>,
    delivery: DeliveryId,
    last_attempt: i16,
) -> Result<bool, sqlx::Error> {
    let done = sqlx::query(include_str!("../sql/hasten_retry.sql"))
        .bind_all((delivery.event, delivery.endpoint, last_attempt))
        .execute(db)
        .await?;
    Ok(done.rows_affected() > 0)
}

/// dead | delivered | retries | gone → queue: up to `limit` deliveries of one endpoint. A delivery that has had as many
/// attempts as allowed is skipped.
pub(crate) async fn replay_batch(
    db: impl PgExecutor<'_>,
    source: ReplaySource,
    endpoint: EndpointId,
    bounds: &ReplayBounds,
    limit: i64,
    replay: &str,
) -> Result<Moved, sqlx::Error> {
    let attempts_max = i64::from(ATTEMPTS_PER_DELIVERY_MAX);
    let (statement, most) = match source {
        ReplaySource::Dead => (include_str!("../sql/replay_dead.sql"), attempts_max),
        ReplaySource::Delivered => (include_str!("../sql/replay_delivered.sql"), attempts_max),
        ReplaySource::Retrying => (include_str!("../sql/replay_retrying.sql"), attempts_max),
        ReplaySource::Missing => (include_str!("../sql/replay_missing.sql"), EVENTS_READ_MAX),
    };
    sqlx::query_as(statement)
        .bind(endpoint)
        .bind_all(bounds.parameters())
        .bind_all((limit, replay, most))
        .fetch_one(db)
        .await
}

/// queue → dead | delivered | retries | gone: deliveries of cancelled replays that were not attempted since, back to
/// where they came from. `attempted` are the attempts in flight or being recorded, with their numbers.
pub(crate) async fn withdraw(
    db: impl PgExecutor<'_>,
    fence: Fence,
    endpoint: EndpointId,
    replays: &[String],
    attempted: &[(EventId, u16)],
) -> Result<(), sqlx::Error> {
    let attempted = attempted
        .iter()
        .map(|(event, number)| (event.0, i32::from(*number)));
    let (events, numbers): (Vec<_>, Vec<_>) = attempted.unzip();
    sqlx::query(include_str!("../sql/withdraw.sql"))
        .bind_all((fence.shard, fence.owner, fence.epoch, endpoint, replays))
        .bind_all((events, numbers))
        .execute(db)
        .await?;
    Ok(())
}
