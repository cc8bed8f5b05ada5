//! Moves of tenants between cells.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NewMove {
    pub tenant: String,
    /// The name of the cell it goes to.
    pub to: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Move {
    pub id: String,
    pub tenant: String,
    pub from: String,
    pub to: String,
    /// `stopping`, `copying`, `switching` (it comes home, and what waited is emitted), `erasing` (it lives in the new cell), or
    /// `cancelling`; at the end `done` or `cancelled`.
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::move_state))]
    pub state: String,
    /// What it waits for, or why its last step failed. Null: it makes progress.
    pub waits_for: Option<String>,
    /// Rows copied so far.
    pub copied: i64,
    pub created_by: String,
    pub created_at: DateTime<Utc>,
    pub cancelled_by: Option<String>,
    /// When the new cell took over.
    pub switched_at: Option<DateTime<Utc>>,
    pub ended_at: Option<DateTime<Utc>>,
}
