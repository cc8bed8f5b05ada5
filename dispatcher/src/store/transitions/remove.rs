//! Removing deliveries and what was recorded of them.

use chrono::{DateTime, Utc};
use postrider_proto::{DeadReason, DeliveryId, EndpointId, EventId, Failure, TenantId, TypeId};
use sqlx::PgExecutor;
use uuid::Uuid;

use crate::bind::BindAll;

/// Rows that one statement deletes, so that its locks are short.
const BATCH: i64 = 2_000;

/// Where a delivery waits for its next attempt.
#[derive(Debug, Clone, Copy)]
pub(crate) enum PendingRows {
    Queue,
    Retries,
}

impl PendingRows {
    pub(crate) const ALL: [Self; 2] = [Self::Queue, Self::Retries];
}

/// Where rows of a tenant are.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TenantRows {
    Queue,
    Retries,
    DeadLetters,
    DeadLetterCounts,
    /// While their archived events exist.
    ArchivedAttempts,
}

impl TenantRows {
    pub(crate) const BY_ENDPOINT: [Self; 4] = [
        Self::Queue,
        Self::Retries,
        Self::DeadLetters,
        Self::DeadLetterCounts,
    ];
}

/// queue | retries → gone: a batch of a deleted endpoint's rows above `after`. Returns how many were deleted, and the
/// last one read; none when there are no more.
pub(crate) async fn drop_endpoint(
    db: impl PgExecutor<'_>,
    table: PendingRows,
    endpoint: EndpointId,
    after: EventId,
) -> Result<(i64, Option<EventId>), sqlx::Error> {
    let statement = match table {
        PendingRows::Queue => include_str!("../sql/drop_endpoint_queue.sql"),
        PendingRows::Retries => include_str!("../sql/drop_endpoint_retries.sql"),
    };
    sqlx::query_as(statement)
        .bind_all((endpoint, after, BATCH))
        .fetch_one(db)
        .await
}

/// queue → gone: events that a listener has forwarded, if `holder` still holds it. Another holder forwards them itself.
pub async fn remove_forwarded(
    db: impl PgExecutor<'_>,
    listener: EndpointId,
    holder: Uuid,
    events: &[EventId],
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "delete from postrider.queue q
         where q.endpoint_id = $1 and q.event_id = any($3)
           and exists (select from postrider.listeners where endpoint_id = $1 and holder = $2)",
    )
    .bind_all((listener, holder))
    .bind(events.iter().map(|event| event.0).collect::<Vec<_>>())
    .execute(db)
    .await?;
    Ok(())
}

/// dead → gone: a batch of dead letters that died before the given time, or of deleted endpoints; of one tenant or of all,
/// with events in [from, below). Returns how many.
pub(crate) async fn expire_dead_letters(
    db: impl PgExecutor<'_>,
    tenant: Option<TenantId>,
    from: EventId,
    below: EventId,
    died_before: DateTime<Utc>,
) -> Result<u64, sqlx::Error> {
    let expired: i64 = sqlx::query_scalar(include_str!("../sql/expire_dead_letters.sql"))
        .bind_all((from, below, died_before, BATCH, tenant))
        .fetch_one(db)
        .await?;
    Ok(expired.unsigned_abs())
}

/// Which dead letters of an endpoint are discarded.
#[derive(Debug, Clone)]
pub struct DiscardBounds {
    pub from: EventId,
    /// Inclusive.
    pub upto: EventId,
    /// Those that died later are left alone.
    pub died_by: Option<DateTime<Utc>>,
    pub type_id: Option<TypeId>,
    pub reason: Option<DeadReason>,
    pub failure: Option<Failure>,
}

/// dead → discarded: up to `limit` dead letters of one endpoint, oldest first. Returns how many, and whether none
/// were left.
pub async fn discard_batch(
    db: impl PgExecutor<'_>,
    endpoint: EndpointId,
    bounds: &DiscardBounds,
    limit: i64,
) -> Result<(i64, bool), sqlx::Error> {
    sqlx::query_as(include_str!("../sql/discard.sql"))
        .bind_all((endpoint, bounds.from, bounds.upto, bounds.died_by))
        .bind_all((bounds.type_id, bounds.reason, bounds.failure, limit))
        .bind(None::<i16>)
        .fetch_one(db)
        .await
}

/// dead → discarded: one dead letter whose last attempt has this number. Returns false when there is none.
pub async fn discard_one(
    db: impl PgExecutor<'_>,
    delivery: DeliveryId,
    last_attempt: i16,
) -> Result<bool, sqlx::Error> {
    let DeliveryId { event, endpoint } = delivery;
    let count: i64 = sqlx::query_scalar(include_str!("../sql/discard.sql"))
        .bind_all((endpoint, event, event, None::<DateTime<Utc>>))
        .bind_all((None::<TypeId>, None::<DeadReason>, None::<Failure>, 1_i64))
        .bind(last_attempt)
        .fetch_one(db)
        .await?;
    Ok(count > 0)
}

/// delivered | discarded → gone: the attempts of events that are deleted.
pub(crate) async fn delete_attempts(db: impl PgExecutor<'_>, events: &[EventId]) -> Result<(), sqlx::Error> {
    sqlx::query("delete from postrider.attempts a using unnest($1::uuid[]) u (id) where a.event_id = u.id")
        .bind(events)
        .execute(db)
        .await?;
    Ok(())
}

/// delivered | discarded → gone: the attempts of archived events that are deleted.
pub(crate) async fn delete_archived_attempts(
    db: impl PgExecutor<'_>,
    events: &[EventId],
) -> Result<(), sqlx::Error> {
    sqlx::query("delete from postrider.archived_attempts where event_id = any($1)")
        .bind(events)
        .execute(db)
        .await?;
    Ok(())
}

/// queue | retries | dead | delivered → gone: a batch of the rows of a deleted tenant. Returns how many were deleted.
pub(crate) async fn erase_tenant(
    db: impl PgExecutor<'_>,
    rows: TenantRows,
    tenant: TenantId,
) -> Result<u64, sqlx::Error> {
    let statement = match rows {
        TenantRows::Queue => {
            "delete from postrider.queue where ctid = any (array(
                select q.ctid from postrider.endpoints e join postrider.queue q on q.endpoint_id = e.id
                where e.tenant_id = $1 limit $2))"
        }
        TenantRows::Retries => {
            "delete from postrider.retries where ctid = any (array(
                select q.ctid from postrider.endpoints e join postrider.retries q on q.endpoint_id = e.id
                where e.tenant_id = $1 limit $2))"
        }
        TenantRows::DeadLetters => {
            "delete from postrider.dead_letters where ctid = any (array(
                select ctid from postrider.dead_letters where tenant_id = $1 limit $2))"
        }
        TenantRows::DeadLetterCounts => {
            "delete from postrider.dead_letter_counts where ctid = any (array(
                select ctid from postrider.dead_letter_counts where tenant_id = $1 limit $2))"
        }
        TenantRows::ArchivedAttempts => {
            "delete from postrider.archived_attempts where ctid = any (array(
                select a.ctid from postrider.archived_events h join postrider.archived_attempts a on a.event_id = h.id
                where h.tenant_id = $1 limit $2))"
        }
    };
    let done = sqlx::query(statement)
        .bind_all((tenant, BATCH))
        .execute(db)
        .await?;
    Ok(done.rows_affected())
}
