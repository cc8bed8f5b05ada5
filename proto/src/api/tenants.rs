//! Tenants, links into their pages, and what erases them.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Tenant {
    pub id: String,
    pub name: Option<String>,
    pub rotate_every_days: Option<i16>,
    pub retention_days: Option<i16>,
    pub all_operational_events: bool,
    /// Null: its endpoints are sent to. Otherwise nothing is sent to them, and events are queued.
    pub paused_at: Option<DateTime<Utc>>,
    pub pause_reason: Option<String>,
    /// The cell that the tenant lives in. Only in an installation with several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cell: Option<String>,
    pub created_at: DateTime<Utc>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TenantSettings {
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::name_or_null))]
    pub name: Option<String>,
    /// Null: never. An endpoint can override it.
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::tenant_rotation_or_null))]
    pub rotate_every_days: Option<i64>,
    /// Null: the platform's retention, which is also the maximum.
    pub retention_days: Option<i64>,
    /// Its endpoints may subscribe to the operational events of every tenant.
    pub all_operational_events: Option<bool>,
    /// The cell of a new tenant. By default the one with the fewest tenants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cell: Option<String>,
}

/// No options yet; unknown fields are rejected.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewPortalLink {}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PortalLink {
    pub url: String,
    pub expires_at: DateTime<Utc>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Erasure {
    pub id: String,
    pub tenant: String,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::erasure_state))]
    pub state: String,
    /// Number of events; related rows are deleted with them.
    pub total: i64,
    pub done: i64,
    pub created_by: String,
    pub created_at: DateTime<Utc>,
    pub ended_at: Option<DateTime<Utc>>,
}
