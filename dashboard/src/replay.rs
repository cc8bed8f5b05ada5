//! Sending a stored event again: the delivery goes back to `queue`, due now, its attempt numbers go on.
//! Invariant: each move is one statement, and the row it takes away is the guard: of two clicks one moves it.

use postrider_proto::{DeliveryId, EndpointState, TenantId};
use sqlx::{PgConnection, PgExecutor};

use crate::{
    App,
    audit::{self, Action, Entry},
    auth::Actor,
    deliveries,
    problem::Problem,
    tables::{self, endpoints, queue},
};

/// A delivery that moves while we look for it is looked for again.
const LOOKS_MAX: usize = 3;

/// Puts the delivery back in line, whatever it is doing.
pub(crate) async fn replay(
    app: &App,
    actor: &Actor,
    tenant: Option<TenantId>,
    id: DeliveryId,
) -> Result<(), Problem> {
    let delivery = deliveries::find(&app.pool, tenant, id)
        .await?
        .ok_or_else(|| Problem::not_found("delivery"))?;
    let endpoint = endpoints::find_by_id(&app.pool, id.endpoint)
        .await?
        .ok_or_else(|| Problem::not_found("delivery"))?;
    match endpoint.settings.state {
        EndpointState::Active | EndpointState::Paused => {}
        EndpointState::Disabled => {
            let reason = endpoint.settings.state_reason.unwrap_or_default();
            return Err(Problem::conflict(format!(
                "The endpoint is disabled ({reason}): enable it first."
            )));
        }
        EndpointState::Deleted => return Err(Problem::conflict("The endpoint was deleted.")),
    }

    let mut transaction = tables::begin(&app.pool).await?;
    if !back_in_line(&mut transaction, id).await? {
        return Err(Problem::conflict(
            "The delivery could not be put back in line just now: its endpoint changed. Look again.",
        ));
    }
    audit::write(
        &mut transaction,
        Entry {
            actor,
            action: Action::DeliveryReplayed,
            tenant: Some(delivery.tenant_id),
            subject: &id.to_string(),
            detail: None,
        },
    )
    .await?;
    transaction.commit().await?;
    app.wake.now();
    Ok(())
}

async fn back_in_line(connection: &mut PgConnection, id: DeliveryId) -> Result<bool, sqlx::Error> {
    for _ in 0..LOOKS_MAX {
        let moved = revive_ended(&mut *connection, id).await?
            || hasten_retry(&mut *connection, id).await?
            || queue::holds(&mut *connection, id).await?;
        if moved {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Of an ended delivery: the attempt loses `final`, the dead letter goes and is no longer counted, and the queue row
/// comes. It has no ordering key: a replay is outside the order.
async fn revive_ended(db: impl PgExecutor<'_>, id: DeliveryId) -> Result<bool, sqlx::Error> {
    let done = sqlx::query(
        "with cleared as (
            update postrider.attempts a set final = null
            from postrider.endpoints e
            where a.event_id = $1 and a.endpoint_id = $2 and a.final is not null
              and e.id = a.endpoint_id and e.state in ('active', 'paused')
            returning a.event_id, a.endpoint_id, a.tenant_id, a.type_id, a.number, e.shard
         ), unburied as (
            delete from postrider.dead_letters d using cleared c
            where d.endpoint_id = c.endpoint_id and d.event_id = c.event_id
            returning d.endpoint_id, d.type_id, d.reason
         ), uncounted as (
            update postrider.dead_letter_counts n set count = n.count - 1 from unburied u
            where n.endpoint_id = u.endpoint_id and n.type_id = u.type_id and n.reason = u.reason
         )
         insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id, replay_id, attempt)
         select endpoint_id, event_id, shard, tenant_id, type_id, $3, number from cleared",
    )
    .bind(id.event)
    .bind(id.endpoint)
    .bind(id.to_string())
    .execute(db)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// Of a delivery that waits for its time: due now, in its old place of the order.
async fn hasten_retry(db: impl PgExecutor<'_>, id: DeliveryId) -> Result<bool, sqlx::Error> {
    let done = sqlx::query(
        "with waiting as (
            delete from postrider.retries r using postrider.endpoints e
            where r.endpoint_id = $2 and r.event_id = $1
              and e.id = r.endpoint_id and e.state in ('active', 'paused')
            returning r.endpoint_id, r.event_id, e.shard, r.tenant_id, r.type_id, r.key_id, r.sequence,
                r.replay_id, r.attempt
         )
         insert into postrider.queue
            (endpoint_id, event_id, shard, tenant_id, type_id, key_id, sequence, replay_id, attempt)
         select endpoint_id, event_id, shard, tenant_id, type_id, key_id, sequence, replay_id, attempt from waiting",
    )
    .bind(id.event)
    .bind(id.endpoint)
    .execute(db)
    .await?;
    Ok(done.rows_affected() > 0)
}
