//! API keys and the audit log.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::state::KeyRole;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NewApiKey {
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::key_role))]
    pub role: KeyRole,
    pub tenant: Option<String>,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::key_name))]
    pub name: String,
    /// When the key stops working, at most ten years from now. Without it, when it is revoked.
    #[serde(default)]
    pub expires_at: Option<DateTime<Utc>>,
}

#[derive(Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ApiKey {
    pub id: String,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::key_role))]
    pub role: KeyRole,
    pub tenant: Option<String>,
    pub name: String,
    pub created_at: DateTime<Utc>,
    pub revoked_at: Option<DateTime<Utc>>,
    /// The start of the key, by which it can be recognised.
    pub prefix: String,
    pub expires_at: Option<DateTime<Utc>>,
    /// At most a minute older than the last use.
    pub last_used_at: Option<DateTime<Utc>>,
    /// Returned only on creation: the key itself is not stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AuditEntry {
    pub at: DateTime<Utc>,
    pub actor: String,
    pub action: String,
    pub tenant: Option<String>,
    pub subject: String,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::object_or_null))]
    pub detail: Option<Value>,
    /// Where the request came from.
    pub address: Option<String>,
    /// Changed settings by name, each with its values `before` and `after`.
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::object_or_null))]
    pub changes: Option<Value>,
}
