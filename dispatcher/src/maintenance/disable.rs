//! Disables endpoints that responded 410 Gone or have failed for days. Their pending deliveries become dead letters
//! as soon as the lane reads the new state.
//!
//! The recorder writes which endpoints to disable together with the results that cause it (`recorder.rs`), so that
//! none is lost; this task carries it out so that the recorder never waits for it.

use std::time::Duration;

use postrider_proto::{EndpointId, TenantId};
use serde_json::json;
use sqlx::{FromRow, PgConnection, PgPool};
use tokio_util::sync::CancellationToken;

use crate::{
    Wake, bind::BindAll, db_timeout::WithDbTimeout, health::database::warn_unless_outage,
    maintenance::notices,
};

/// The recorder of this process wakes this task; the interval is for endpoints left behind by others.
const LOOK_EVERY: Duration = Duration::from_secs(10);
const LOOK_AGAIN_AFTER_ERROR: Duration = Duration::from_secs(1);
/// Endpoints per query.
const LISTED_MAX: i64 = 100;

const BEGIN: &str = "begin; set local lock_timeout = '1s'; set local statement_timeout = '5s'";

#[derive(Debug, FromRow)]
struct ToDisable {
    endpoint_id: EndpointId,
    cause: String,
}

#[derive(FromRow)]
struct Disabled {
    public_id: String,
    url: String,
    tenant_id: TenantId,
}

/// Runs until stopped. Several processes may run it at once.
pub(crate) async fn run(pool: PgPool, wake: Wake, stop: CancellationToken) {
    loop {
        let failed = disable_all(&pool, &stop).await.unwrap_or_else(|error| {
            warn_unless_outage!(error, "listing endpoints to disable failed; retrying");
            1
        });
        let wait = if failed == 0 {
            LOOK_EVERY
        } else {
            LOOK_AGAIN_AFTER_ERROR
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = wake.wait() => {}
            () = stop.cancelled() => return,
        }
    }
}

/// Returns how many are left: a failure for one does not affect the others.
async fn disable_all(pool: &PgPool, stop: &CancellationToken) -> Result<usize, sqlx::Error> {
    let mut failed = 0;
    let mut after = EndpointId(0);
    loop {
        let listed = list(pool, after).with_db_timeout().await?;
        let Some(last) = listed.last() else {
            return Ok(failed);
        };
        after = last.endpoint_id;
        for one in &listed {
            if stop.is_cancelled() {
                return Ok(failed);
            }
            if let Err(error) = disable(pool, one).with_db_timeout().await {
                warn_unless_outage!(error, endpoint = %one.endpoint_id, "disabling an endpoint failed; retrying");
                failed += 1;
            }
        }
    }
}

async fn list(pool: &PgPool, after: EndpointId) -> Result<Vec<ToDisable>, sqlx::Error> {
    sqlx::query_as(
        "select d.endpoint_id, d.cause from postrider.endpoints_to_disable d
         join postrider.endpoints e on e.id = d.endpoint_id join postrider.tenants t on t.id = e.tenant_id and t.is_here
         where d.endpoint_id > $1 order by d.endpoint_id limit $2",
    )
    .bind_all((after, LISTED_MAX))
    .fetch_all(pool)
    .await
}

/// State, audit entry and the event to the tenant's other endpoints, atomically. Does nothing to an endpoint that is
/// not active.
async fn disable(pool: &PgPool, one: &ToDisable) -> Result<(), sqlx::Error> {
    let mut tx = pool.begin_with(BEGIN).await?;
    let tenant_is_here = sqlx::query(
        "select from postrider.endpoints e join postrider.tenants t on t.id = e.tenant_id and t.is_here
         where e.id = $1 for share of t",
    )
    .bind(one.endpoint_id)
    .fetch_optional(&mut *tx)
    .await?;
    if tenant_is_here.is_none() {
        return Ok(());
    }
    // This may wait for locks, so it comes before anything that the recorder could wait for is locked.
    let disabled: Option<Disabled> = sqlx::query_as(
        "update postrider.endpoints e
         set state = 'disabled', state_reason = $2, updated_at = clock_timestamp()
         from postrider.endpoints_to_disable d
         where e.id = $1 and e.state = 'active' and d.endpoint_id = e.id
         returning e.public_id, e.url, e.tenant_id",
    )
    .bind_all((one.endpoint_id, &one.cause))
    .fetch_optional(&mut *tx)
    .await?;
    if let Some(disabled) = &disabled {
        report(&mut tx, disabled, &one.cause).await?;
    }
    sqlx::query(
        "with done as (delete from postrider.endpoints_to_disable where endpoint_id = $1)
         update postrider.endpoint_health set disabled = true where endpoint_id = $1 and $2",
    )
    .bind(one.endpoint_id)
    // So that its first success after this is reported as a recovery.
    .bind(disabled.is_some())
    .execute(&mut *tx)
    .await?;
    tx.commit().await?;
    if let Some(disabled) = disabled {
        let (endpoint, reason) = (disabled.public_id, one.cause.as_str());
        tracing::warn!(endpoint, reason, "endpoint disabled");
    }
    Ok(())
}

async fn report(connection: &mut PgConnection, disabled: &Disabled, cause: &str) -> Result<(), sqlx::Error> {
    let (tenant, endpoint) = (disabled.tenant_id, disabled.public_id.as_str());
    let detail = json!({ "reason": cause });
    notices::write_audit(&mut *connection, "endpoint.disabled", tenant, endpoint, detail).await?;
    let data = json!({"endpoint": endpoint, "url": disabled.url, "reason": cause});
    notices::announce(connection, tenant, "postrider.endpoint.disabled", &data).await?;
    Ok(())
}
