//! Event types, their schemas, and what a new version breaks.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EventTypeSettings {
    /// Omitted: unchanged. Null: removed.
    #[serde(
        default,
        deserialize_with = "super::given",
        skip_serializing_if = "Option::is_none"
    )]
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::name_or_null))]
    pub description: Option<Option<String>>,
    pub thin: Option<bool>,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::schemas))]
    pub schemas: BTreeMap<String, Box<RawValue>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EventType {
    pub r#type: String,
    pub description: Option<String>,
    pub thin: bool,
    /// In version order, regardless of when they were published. The last one is used by an emit without a version.
    pub versions: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::object))]
    pub schemas: Option<BTreeMap<String, Box<RawValue>>>,
    pub created_at: DateTime<Utc>,
    /// On a PUT that added versions: what each breaks for consumers of the previous one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub compatibility: Vec<Compatibility>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(as = CompatibilityChange))]
pub enum Change {
    RemovedProperty,
    NewlyRequired,
    NarrowedType,
    NarrowedEnum,
}

/// A breaking change at one location of the data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(as = CompatibilityBreak))]
pub struct Break {
    pub pointer: String,
    pub change: Change,
    pub detail: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(as = CompatibilityReport))]
pub struct Compatibility {
    pub version: String,
    /// The version it is compared with.
    pub previous_version: String,
    pub breaking_changes: Vec<Break>,
}
