//! Taking an endpoint out of service: it said it is gone, or it has failed for days. What waits for it becomes dead
//! letters, which its lane sees to as soon as it reads the new state.

use postrider_proto::{EndpointId, TenantId};
use sqlx::PgPool;

use crate::notices;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// It answered 410.
    Gone,
    /// Five days without one success.
    Failing,
}

impl Cause {
    fn as_str(self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::Failing => "failing",
        }
    }
}

/// State, audit line and the event to the tenant's other endpoints, all or none. Does nothing to an endpoint that is
/// not active.
pub(crate) async fn disable(pool: &PgPool, endpoint: EndpointId, cause: Cause) -> Result<(), sqlx::Error> {
    let mut tx = pool.begin().await?;
    let disabled: Option<(String, String, TenantId)> = sqlx::query_as(
        "update postrider.endpoints e
         set state = 'disabled', state_reason = $2, updated_at = clock_timestamp()
         from postrider.tenants t
         where e.id = $1 and e.state = 'active' and t.id = e.tenant_id
         returning e.public_id, e.url, t.id",
    )
    .bind(endpoint)
    .bind(cause.as_str())
    .fetch_optional(&mut *tx)
    .await?;
    let Some((public_id, url, tenant)) = disabled else {
        return Ok(());
    };
    sqlx::query(
        "insert into postrider.audit (actor, action, tenant_id, subject, detail)
         values ('postrider', 'endpoint.disabled', $1, $2, jsonb_build_object('reason', $3::text))",
    )
    .bind(tenant)
    .bind(&public_id)
    .bind(cause.as_str())
    .execute(&mut *tx)
    .await?;
    // So that its first success after this is told as a recovery.
    sqlx::query("update postrider.endpoint_health set disabled = true where endpoint_id = $1")
        .bind(endpoint)
        .execute(&mut *tx)
        .await?;
    let data = serde_json::json!({"endpoint": public_id, "url": url, "reason": cause.as_str()});
    notices::announce(&mut tx, tenant, "postrider.endpoint.disabled", &data).await?;
    tx.commit().await?;
    tracing::warn!(
        endpoint = public_id,
        reason = cause.as_str(),
        "disabled an endpoint"
    );
    Ok(())
}
