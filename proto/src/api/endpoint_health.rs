//! Whether endpoints work: what dispatchers have seen of them, beside their settings.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::{
    EndpointState,
    state::{CircuitState, HealthStatus},
};

/// What dispatchers have seen of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EndpointHealth {
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::health_status))]
    pub status: HealthStatus,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::circuit_state))]
    pub circuit: CircuitState,
    /// The first failure after the last success.
    pub failing_since: Option<DateTime<Utc>>,
    /// The first failure after this time disables the endpoint, unless a delivery succeeds before.
    pub disabled_after: Option<DateTime<Utc>>,
    /// Requests in flight.
    pub in_flight: i32,
    /// When the oldest event that waits for its first attempt was emitted. Null while the endpoint or its tenant is paused.
    pub oldest_waiting_at: Option<DateTime<Utc>>,
}

/// An endpoint of any tenant, with its health.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EndpointStatus {
    pub tenant: String,
    pub id: String,
    pub url: String,
    pub description: Option<String>,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::endpoint_state))]
    pub state: EndpointState,
    pub health: EndpointHealth,
    pub last_hour: AttemptCounts,
}

/// Attempts of the last 60 minutes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AttemptCounts {
    pub delivered: i64,
    pub failed: i64,
    /// Failed attempts by kind: `dns`, `connection`, `tls`, `timeout`, `invalid_response`, `3xx`, `4xx`, `5xx`,
    /// `address` or `not_sent`.
    pub failures: BTreeMap<String, i64>,
}
