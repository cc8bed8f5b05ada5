//! Rotation status from `endpoints`, `secrets`, `planned_rotations` and `attempts`. Writes nothing.

use chrono::{DateTime, Utc};
use postrider_dispatcher::bind::BindAll;
use postrider_proto::{EndpointId, TenantId};
use serde::Serialize;
use sqlx::{FromRow, PgExecutor};
use utoipa::ToSchema;

/// Rejections counted per endpoint.
const REFUSALS_MAX: i64 = 1_000;

// A response as well: what the statement computes is shown as it is.
#[derive(Debug, FromRow, Serialize, ToSchema)]
#[schema(as = SecretRotation)]
pub(crate) struct RotationRow {
    #[serde(skip)]
    pub(crate) number: EndpointId,
    pub(crate) endpoint: String,
    pub(crate) url: String,
    #[serde(skip)]
    pub(crate) tenant: String,
    /// When the current secret was created.
    pub(crate) rotated_at: DateTime<Utc>,
    /// When the last of the older secrets retires; null if only the current one signs.
    pub(crate) retires_at: Option<DateTime<Utc>>,
    /// The endpoint's own policy or the tenant's; null means never.
    pub(crate) rotate_every_days: Option<i16>,
    /// Null without a policy.
    pub(crate) next_rotation_at: Option<DateTime<Utc>>,
    pub(crate) announced_at: Option<DateTime<Utc>>,
    /// Responses of 401 and 403 since the rotation, at most 1,000; 0 if it was never rotated.
    #[serde(rename = "rejections_since_rotation")]
    pub(crate) refusals_since: i64,
    #[serde(rename = "last_rejection_at")]
    pub(crate) last_refusal_at: Option<DateTime<Utc>>,
}

/// Which endpoints to report.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Of {
    Tenant(TenantId),
    Endpoint(EndpointId),
    /// Endpoints with a policy, an overlap, or rejections since a rotation. Of one tenant or of all.
    Busy(Option<TenantId>),
}

pub(crate) async fn list(
    db: impl PgExecutor<'_>,
    of: Of,
    after: i32,
    limit: i64,
) -> sqlx::Result<Vec<RotationRow>> {
    let (tenant, endpoint, busy) = match of {
        Of::Tenant(tenant) => (Some(tenant), None, false),
        Of::Endpoint(endpoint) => (None, Some(endpoint), false),
        Of::Busy(tenant) => (tenant, None, true),
    };
    sqlx::query_as(include_str!("sql/rotations_list.sql"))
        .bind_all((tenant, after, limit, REFUSALS_MAX, endpoint, busy))
        .fetch_all(db)
        .await
}
