//! Switches that operators use while the system runs.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

/// Whether anything is sent.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Sending {
    /// No requests are made to endpoints; events are queued.
    pub stopped: bool,
    /// Stopped because this database is a restored copy that nobody has confirmed.
    pub restored: bool,
    /// True with `restored` if it is unknown whether this is a copy: Postrider's database role may not execute
    /// `pg_control_system()` any more. Grant that right, or confirm.
    #[serde(default)]
    pub identity_hidden: bool,
    pub stopped_at: Option<DateTime<Utc>>,
    pub stopped_by: Option<String>,
    pub reason: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SendingSettings {
    pub stopped: bool,
    /// Shown to everyone who runs the installation; at most 1,024 bytes.
    #[serde(default)]
    pub reason: Option<String>,
    /// Required to resume sending in a restored copy. It then sends real requests to the endpoints of the installation it is a
    /// copy of.
    #[serde(default)]
    pub confirm_restored: bool,
}

/// Why a tenant is paused.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TenantPause {
    /// Shown to everyone who runs the installation; at most 1,024 bytes.
    #[serde(default)]
    pub reason: Option<String>,
}

/// A tenant's quotas, and how much of them is used. Only tenants with a quota are counted.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Quotas {
    /// Null: unlimited.
    pub emits_per_minute: Option<i32>,
    /// Bytes of the events that are kept. Null: unlimited.
    pub stored_bytes: Option<i64>,
    pub emits_this_minute: i64,
    pub stored_bytes_used: i64,
    /// Whether events from before the quota are included. They are measured within an hour.
    pub is_measured: bool,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct QuotaSettings {
    /// Null: unlimited.
    pub emits_per_minute: Option<i64>,
    /// Bytes of the events that are kept. Null: unlimited.
    pub stored_bytes: Option<i64>,
}

/// The log filter of all processes.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LogFilter {
    /// Like `info,postrider_dispatcher=debug`. Null: each process uses `POSTRIDER_LOG`.
    pub filter: Option<String>,
}
