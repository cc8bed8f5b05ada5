//! Bulk replays.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::{DeadReason, ReplayKind, ReplayState};

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NewReplay {
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::replay_kind_or_null))]
    pub kind: Option<String>,
    /// Null: all endpoints of the tenant. Required for `kind: missing`.
    pub endpoint: Option<String>,
    /// Null: everything not delivered, that is dead letters and deliveries waiting for a retry.
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::delivery_state_or_null))]
    pub state: Option<String>,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::type_or_null))]
    pub r#type: Option<String>,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::dead_reason_or_null))]
    pub reason: Option<String>,
    /// Only dead letters whose last attempt failed this way: a status code or an outcome, as in the groups of dead letters.
    pub failure: Option<String>,
    /// Only events created at or after this time.
    pub since: Option<String>,
    /// Only events created before this time.
    pub until: Option<String>,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::replay_rate_or_null))]
    pub rate_per_second: Option<i64>,
    /// Only counts the deliveries and returns a sample.
    pub dry_run: bool,
}

#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReplaySettings {
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::replay_rate_or_null))]
    pub rate_per_second: Option<i64>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Replay {
    pub id: String,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::replay_kind))]
    pub kind: ReplayKind,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::replay_state))]
    pub state: ReplayState,
    /// The filter as requested.
    pub endpoint: Option<String>,
    pub delivery_state: Option<String>,
    pub r#type: Option<String>,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::dead_reason_or_null))]
    pub reason: Option<DeadReason>,
    pub failure: Option<String>,
    pub since: Option<DateTime<Utc>>,
    pub until: Option<DateTime<Utc>>,
    pub total: i64,
    /// Attempted, or skipped because they no longer existed.
    pub done: i64,
    /// Not sent because the replay was cancelled; restored to their previous state. A few may still be in flight.
    pub cancelled: i64,
    pub skipped: i64,
    /// Of the attempted ones.
    pub retrying: i64,
    pub dead: i64,
    /// The requested limit; `done_per_second` is the measured rate.
    pub rate_per_second: i32,
    pub done_per_second: Option<f32>,
    pub seconds_left: Option<i64>,
    pub created_by: String,
    pub created_at: DateTime<Utc>,
    pub ended_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReplaySample {
    /// The delivery that would be sent. For a missed event, the one that would be created.
    pub delivery: String,
    pub event: String,
    pub r#type: String,
    pub endpoint: String,
    pub created_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReplayPreview {
    pub dry_run: bool,
    pub total: i64,
    pub sample: Vec<ReplaySample>,
}
