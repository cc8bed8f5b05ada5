//! Rotation status from `endpoints`, `secrets`, `planned_rotations` and `attempts`. Writes nothing.

use chrono::{DateTime, Utc};
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
) -> Result<Vec<RotationRow>, sqlx::Error> {
    let (tenant, endpoint, busy) = match of {
        Of::Tenant(tenant) => (Some(tenant), None, false),
        Of::Endpoint(endpoint) => (None, Some(endpoint), false),
        Of::Busy(tenant) => (tenant, None, true),
    };
    sqlx::query_as(
        "select e.id as number, e.public_id as endpoint, e.url, t.slug as tenant, s.created_at as rotated_at, older.retires_at,
                nullif(coalesce(e.rotate_every_days, t.rotate_every_days), 0) as rotate_every_days,
                coalesce(p.rotates_at, s.created_at + make_interval(
                    days => nullif(coalesce(e.rotate_every_days, t.rotate_every_days), 0))) as next_rotation_at,
                p.announced_at, refused.count as refusals_since, refused.last_at as last_refusal_at
         from postrider.endpoints e
         join postrider.tenants t on t.id = e.tenant_id
         join postrider.secrets s on s.endpoint_id = e.id and s.retires_at is null
         left join postrider.planned_rotations p on p.secret_id = s.id
         left join lateral (
             select max(o.retires_at) as retires_at from postrider.secrets o
             where o.endpoint_id = e.id and o.retires_at > clock_timestamp()
         ) older on true
         left join lateral (
             select count(*) as count, max(a.started_at) as last_at from (
                 select started_at from postrider.attempts
                 where endpoint_id = e.id and status in (401, 403) and started_at >= s.created_at
                   and exists (select from postrider.secrets o where o.endpoint_id = e.id and o.id < s.id)
                 order by started_at desc limit $4
             ) a
         ) refused on true
         where ($1::int is null or e.tenant_id = $1) and ($5::int is null or e.id = $5)
           and (not $6 or older.retires_at is not null or refused.count > 0
                or coalesce(e.rotate_every_days, t.rotate_every_days, 0) > 0)
           and e.state <> 'deleted' and e.id > $2
           and not exists (select from postrider.listeners l where l.endpoint_id = e.id)
         order by e.id limit $3",
    )
    .bind(tenant)
    .bind(after)
    .bind(limit)
    .bind(REFUSALS_MAX)
    .bind(endpoint)
    .bind(busy)
    .fetch_all(db)
    .await
}
