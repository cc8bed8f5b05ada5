//! Bulk replays: deliveries that are sent again, or events that an endpoint never got, as a durable job.
//!
//! Requested here, in the caller's transaction; carried out by `run.rs` in small steps, scheduled by `turns.rs`;
//! `chosen.rs` selects what a step takes, and `withdraw.rs` reverts a cancelled replay. Progress is derived from
//! pending rows, so that recording an ordinary delivery costs nothing extra.
//!
//! Invariant: a step is one transaction that takes deliveries from their source, queues them and moves the part's
//! cursor past them. However a process dies, no delivery is queued twice.

mod chosen;
pub(crate) mod run;
mod turns;
pub(crate) mod withdraw;

use chrono::{DateTime, Utc};
use postrider_proto::{
    DeadReason, DeliveryState, EndpointId, EventId, Failure, ReplayId, ReplayKind, ReplaySource, ReplayState,
    Shard, TenantId, TypeId,
};
use sqlx::{FromRow, PgConnection, PgExecutor};

use crate::bind::BindAll;

pub use chosen::{Sampled, count, sample};

/// Queued replay deliveries per endpoint, all its replays together.
pub const QUEUED_MAX: i64 = 500;
/// Per endpoint, unless another rate is requested.
pub const RATE_DEFAULT: i32 = 1_000;

/// Lists of a few hundred ids against tables of any size: one index lookup each. It has a transaction id before it reads anything: a
/// tenant's move waits for it, or it sees that the tenant is moving.
const BEGIN_STEP: &str = "begin; set local lock_timeout = '2s'; set local statement_timeout = '5s'; \
    set local enable_seqscan = off; set local enable_hashjoin = off; set local enable_mergejoin = off; \
    select pg_current_xact_id()";

/// A replay request. Times are those of the events.
#[derive(Debug, Clone)]
pub struct Ask {
    pub tenant: TenantId,
    pub kind: ReplayKind,
    pub endpoint: Option<EndpointId>,
    /// `None`: everything undelivered, dead or waiting for its next attempt.
    pub state: Option<DeliveryState>,
    pub type_id: Option<TypeId>,
    pub reason: Option<DeadReason>,
    pub failure: Option<Failure>,
    pub since: Option<DateTime<Utc>>,
    pub until: Option<DateTime<Utc>>,
}

impl Ask {
    fn sources(&self) -> &'static [ReplaySource] {
        match (self.kind, self.state) {
            (ReplayKind::Missing, _) => &[ReplaySource::Missing],
            (ReplayKind::Deliveries, None) if self.reason.is_none() && self.failure.is_none() => {
                &[ReplaySource::Dead, ReplaySource::Retrying]
            }
            (ReplayKind::Deliveries, None | Some(DeliveryState::Dead)) => &[ReplaySource::Dead],
            (ReplayKind::Deliveries, Some(DeliveryState::Delivered)) => &[ReplaySource::Delivered],
            (ReplayKind::Deliveries, Some(DeliveryState::Pending)) => &[ReplaySource::Retrying],
            // Someone decided that these need not be delivered. Each can be replayed on its own.
            (ReplayKind::Deliveries, Some(DeliveryState::Discarded)) => &[],
        }
    }
}

/// What one endpoint would get from one source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    pub endpoint: EndpointId,
    pub source: ReplaySource,
    pub total: i64,
}

/// A replay with its current progress.
#[derive(Debug, Clone, FromRow)]
pub struct Replay {
    pub id: ReplayId,
    pub public_id: String,
    pub tenant: String,
    pub kind: ReplayKind,
    pub endpoint: Option<String>,
    pub url: Option<String>,
    pub delivery_state: Option<String>,
    pub event_type: Option<String>,
    pub reason: Option<DeadReason>,
    pub failure: Option<Failure>,
    pub since: Option<DateTime<Utc>>,
    pub until: Option<DateTime<Utc>>,
    pub rate_per_second: i32,
    pub state: ReplayState,
    pub asked_by: String,
    pub created_at: DateTime<Utc>,
    pub ended_at: Option<DateTime<Utc>>,
    measured_per_second: Option<f32>,
    pub total: i64,
    moved: i64,
    /// No longer there when their turn came.
    pub skipped: i64,
    queued: i64,
    /// Failed again and waiting for their next attempt.
    pub retrying: i64,
    /// Became dead letters again.
    pub dead: i64,
}

impl Replay {
    /// Attempted or skipped.
    pub fn done(&self) -> i64 {
        (self.moved + self.skipped - self.queued).max(0)
    }

    /// Queued or in flight.
    pub fn queued(&self) -> i64 {
        self.queued
    }

    /// Not sent because the replay was cancelled.
    pub fn cancelled(&self) -> i64 {
        match self.state {
            ReplayState::Cancelled => (self.total - self.done() - self.queued).max(0),
            ReplayState::Running | ReplayState::Done => 0,
        }
    }

    /// Recent rate per second.
    pub fn rate(&self) -> Option<f32> {
        self.measured_per_second
            .filter(|_| self.state == ReplayState::Running)
    }

    pub fn seconds_left(&self) -> Option<i64> {
        let rate = self.rate().filter(|rate| *rate > 0.01)?;
        Some(((self.total - self.done()).max(0) as f32 / rate).ceil() as i64)
    }
}

macro_rules! replays {
    ($filter:literal) => {
        concat!(include_str!("../sql/replays.sql"), $filter)
    };
}

/// Running replays of a tenant.
pub async fn count_running(db: impl PgExecutor<'_>, tenant: TenantId) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar("select count(*) from postrider.replays where tenant_id = $1 and state = 'running'")
        .bind(tenant)
        .fetch_one(db)
        .await
}

/// Stores the request in the caller's transaction. The dispatchers find it there.
pub async fn begin(
    connection: &mut PgConnection,
    public_id: &str,
    ask: &Ask,
    parts: &[Part],
    rate_per_second: i32,
    asked_by: &str,
) -> Result<ReplayId, sqlx::Error> {
    let id: ReplayId = sqlx::query_scalar(
        "insert into postrider.replays (public_id, tenant_id, kind, endpoint_id, delivery_state, type_id, reason, failure,
            since, until, rate_per_second, asked_by)
         values ($1, $2, $3::postrider.replay_kind, $4, $5, $6, $7::postrider.dead_reason, $8, $9, $10, $11, $12)
         returning id",
    )
    .bind_all((public_id, ask.tenant, ask.kind, ask.endpoint))
    .bind_all((ask.state.map(DeliveryState::as_str), ask.type_id, ask.reason, ask.failure))
    .bind_all((ask.since, ask.until, rate_per_second, asked_by))
    .fetch_one(&mut *connection)
    .await?;
    sqlx::query(
        "insert into postrider.replay_parts (replay_id, endpoint_id, source, total)
         select $1, * from unnest($2::int[], $3::postrider.replay_source[], $4::bigint[])",
    )
    .bind_all((id, parts.iter().map(|part| part.endpoint.0).collect::<Vec<_>>()))
    .bind(parts.iter().map(|part| part.source).collect::<Vec<_>>())
    .bind(parts.iter().map(|part| part.total).collect::<Vec<_>>())
    .execute(connection)
    .await?;
    Ok(id)
}

/// Stops queueing, and withdraws queued deliveries that are not in flight: the dispatchers that own the endpoints
/// notice it like changed settings. Returns the shards of these endpoints, or `None` when the replay was over
/// already.
pub async fn cancel(connection: &mut PgConnection, id: ReplayId) -> Result<Option<Vec<Shard>>, sqlx::Error> {
    let cancelled: Option<String> = sqlx::query_scalar(
        "update postrider.replays set state = 'cancelled', ended_at = clock_timestamp()
         where id = $1 and state = 'running' returning public_id",
    )
    .bind(id)
    .fetch_optional(&mut *connection)
    .await?;
    let Some(public_id) = cancelled else {
        return Ok(None);
    };
    let shards = sqlx::query_scalar(
        "with concerned as materialized (
            select e.id from postrider.endpoints e
            where e.id in (select p.endpoint_id from postrider.replay_parts p where p.replay_id = $1)
              and exists (select from postrider.queue q where q.endpoint_id = e.id and q.replay_id = $2)
            order by e.id for no key update
         )
         update postrider.endpoints e set state = e.state from concerned c where e.id = c.id returning e.shard",
    )
    .bind_all((id, public_id))
    .fetch_all(connection)
    .await?;
    Ok(Some(shards))
}

/// Runs a cancelled replay again, from the first delivery that the cancellation withdrew. Returns false when it is not
/// cancelled, or when the withdrawal is not complete.
pub async fn resume(connection: &mut PgConnection, id: ReplayId) -> Result<bool, sqlx::Error> {
    let resumed = sqlx::query(
        "update postrider.replays r
         set state = 'running', ended_at = null, step_at = clock_timestamp(), idle_ms = 0,
             measured_per_second = null, measured_at = null, measured_done = null
         where r.id = $1 and r.state = 'cancelled'
           and not exists (select from postrider.replay_parts p
                           join postrider.queue q on q.endpoint_id = p.endpoint_id and q.replay_id = r.public_id
                           where p.replay_id = r.id)",
    )
    .bind(id)
    .execute(&mut *connection)
    .await?;
    if resumed.rows_affected() == 0 {
        return Ok(false);
    }
    let withdrawn: Vec<(EndpointId, ReplaySource, EventId)> = sqlx::query_as(
        "select endpoint_id, source, withdrawn_from from postrider.replay_parts
         where replay_id = $1 and withdrawn_from is not null",
    )
    .bind(id)
    .fetch_all(&mut *connection)
    .await?;
    sqlx::query(
        "update postrider.replay_parts p
         set after_event = w.after_event, withdrawn_from = null, ended = false, skipped = 0, stepped_at = null
         from unnest($2::int[], $3::postrider.replay_source[], $4::uuid[]) w (endpoint_id, source, after_event)
         where p.replay_id = $1 and p.endpoint_id = w.endpoint_id and p.source = w.source",
    )
    .bind(id)
    .bind(withdrawn.iter().map(|one| one.0.0).collect::<Vec<_>>())
    .bind(withdrawn.iter().map(|one| one.1).collect::<Vec<_>>())
    .bind(withdrawn.iter().map(|one| one.2.pred().0).collect::<Vec<_>>())
    .execute(connection)
    .await?;
    Ok(true)
}

/// Returns false when the replay is not running.
pub async fn set_rate(
    db: impl PgExecutor<'_>,
    id: ReplayId,
    rate_per_second: i32,
) -> Result<bool, sqlx::Error> {
    let changed =
        sqlx::query("update postrider.replays set rate_per_second = $2 where id = $1 and state = 'running'")
            .bind_all((id, rate_per_second))
            .execute(db)
            .await?;
    Ok(changed.rows_affected() > 0)
}

/// Of one tenant, or of any.
pub async fn find(
    db: impl PgExecutor<'_>,
    tenant: Option<TenantId>,
    public_id: &str,
) -> Result<Option<Replay>, sqlx::Error> {
    sqlx::query_as(replays!(
        "where r.public_id = $1 and ($2::int is null or r.tenant_id = $2)"
    ))
    .bind_all((public_id, tenant))
    .fetch_optional(db)
    .await
}

/// Newest first.
pub async fn list(
    db: impl PgExecutor<'_>,
    tenant: Option<TenantId>,
    before: i64,
    limit: i64,
) -> Result<Vec<Replay>, sqlx::Error> {
    sqlx::query_as(replays!(
        "where r.id < $1 and ($2::int is null or r.tenant_id = $2) order by r.id desc limit $3"
    ))
    .bind_all((before, tenant, limit))
    .fetch_all(db)
    .await
}
