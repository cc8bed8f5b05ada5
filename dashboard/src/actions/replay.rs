//! Replays a delivery: it goes back to `queue`, due now, and its attempt numbers continue.
//! Invariant: each move is one statement, and the row it deletes is the guard: of two concurrent requests one moves
//! it. A request that gets its turn only after the other's attempt was made is satisfied by that attempt.

use std::time::Instant;

use postrider_dispatcher::{bind::BindAll, store::transitions};
use postrider_proto::{DeliveryId, EndpointState, TenantId, limits::ATTEMPTS_PER_DELIVERY_MAX};
use sqlx::{PgConnection, PgExecutor};

use crate::{
    actions::tenants::lock_here,
    auth::{Actor, Arrived},
    http::problem::Problem,
    tables::{
        audit::{self, Action, Entry},
        deliveries, endpoints, holds, queue,
    },
};

/// A delivery that moves during the lookup is looked up again.
const LOOKS_MAX: usize = 3;

/// What the caller had seen, and when.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    pub(crate) arrived: Arrived,
    /// The number of the latest attempt on the page; none if there was no page.
    pub(crate) seen: Option<i16>,
}

/// What became of a request to replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Replayed {
    Queued,
    /// Queued, and sending to its endpoint is paused or stopped.
    OnHold,
    /// Nothing changed: it was in `queue`.
    AlreadyQueued,
    /// Nothing changed: it was attempted after what the caller had seen.
    Attempted,
}

/// Queues the delivery again, whatever its state, in the caller's transaction.
pub(crate) async fn replay(
    connection: &mut PgConnection,
    actor: &Actor,
    tenant: Option<TenantId>,
    id: DeliveryId,
    asked: Asked,
) -> Result<Replayed, Problem> {
    let delivery = deliveries::find(&mut *connection, tenant, id)
        .await?
        .ok_or_else(|| Problem::not_found("delivery"))?;
    lock_here(connection, delivery.tenant_id).await?;
    let endpoint = endpoints::find_by_id(&mut *connection, id.endpoint)
        .await?
        .ok_or_else(|| Problem::not_found("delivery"))?;
    let tenant = holds::of_tenant(&mut *connection, delivery.tenant_id).await?;
    let is_held = tenant.is_some_and(|row| row.tenant_paused || row.sending_stopped);
    let queued = match endpoint.settings.state {
        EndpointState::Active if is_held => Replayed::OnHold,
        EndpointState::Active => Replayed::Queued,
        EndpointState::Paused => Replayed::OnHold,
        EndpointState::Disabled => {
            let reason = endpoint.settings.state_reason.unwrap_or_default();
            return Err(Problem::endpoint_disabled(format!(
                "The endpoint is disabled ({reason}). Enable it first."
            )));
        }
        EndpointState::Deleted => return Err(Problem::conflict("The endpoint was deleted.")),
    };

    if i32::from(delivery.attempt_count) >= i32::from(ATTEMPTS_PER_DELIVERY_MAX) {
        return Err(Problem::limit_reached(format!(
            "The delivery has reached the maximum of {ATTEMPTS_PER_DELIVERY_MAX} attempts. Emit a new event instead."
        )));
    }
    let seen = asked.seen.unwrap_or(delivery.attempt_count);
    match queue_again(connection, id, seen, asked.arrived.0).await? {
        Some(Moved::Now) => {}
        Some(Moved::IsQueued) => return Ok(Replayed::AlreadyQueued),
        Some(Moved::WasAttempted) => return Ok(Replayed::Attempted),
        None => {
            return Err(Problem::conflict(
                "The delivery could not be queued because its endpoint just changed. Reload and try again.",
            ));
        }
    }
    let id = id.to_string();
    let entry = Entry::new(actor, Action::DeliveryReplayed, Some(delivery.tenant_id), &id);
    audit::write(connection, entry).await?;
    Ok(queued)
}

enum Moved {
    Now,
    IsQueued,
    /// Since the request, or since what the caller had seen.
    WasAttempted,
}

async fn queue_again(
    connection: &mut PgConnection,
    id: DeliveryId,
    seen: i16,
    arrived: Instant,
) -> sqlx::Result<Option<Moved>> {
    for _ in 0..LOOKS_MAX {
        if has_moved_on(&mut *connection, id, seen, arrived).await? {
            return Ok(Some(Moved::WasAttempted));
        }
        if queue::holds(&mut *connection, id).await? {
            return Ok(Some(Moved::IsQueued));
        }
        if transitions::replay_one(&mut *connection, id, seen).await?
            || transitions::hasten_retry(&mut *connection, id, seen).await?
        {
            return Ok(Some(Moved::Now));
        }
    }
    Ok(None)
}

/// Whether an attempt was made after the latest one seen, or after the request arrived. The elapsed time is measured
/// here and subtracted from the database's clock, which the attempt times use.
async fn has_moved_on(
    db: impl PgExecutor<'_>,
    id: DeliveryId,
    seen: i16,
    arrived: Instant,
) -> sqlx::Result<bool> {
    sqlx::query_scalar(
        "select exists (
            select from postrider.attempts
            where event_id = $1 and endpoint_id = $2
              and (number > $3 or started_at >= clock_timestamp() - make_interval(secs => $4)))",
    )
    .bind_all((id.event, id.endpoint, seen, arrived.elapsed().as_secs_f64()))
    .fetch_one(db)
    .await
}
