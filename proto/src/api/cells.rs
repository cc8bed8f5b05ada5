//! Cells: the databases of an installation that has several.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Cell {
    /// `home` is the one with the directory.
    pub name: String,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::cell_state))]
    pub state: String,
    /// How many tenants live there.
    pub tenants: i64,
    /// Whether its database responds to the API node that was asked.
    pub reachable: bool,
    /// Whether all sending is stopped there. Null if it does not respond.
    pub sending_stopped: Option<bool>,
    /// Dispatchers that run there. Null if it does not respond.
    pub dispatchers: Option<i64>,
    pub created_at: DateTime<Utc>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CellSettings {
    /// `draining`: it takes no new tenants, and its tenants move to the other cells, two at a time.
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::cell_state))]
    pub state: String,
}

/// All cells, home first.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Cells {
    pub data: Vec<Cell>,
}
