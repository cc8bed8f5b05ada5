//! Deliveries, their attempts, and dead letters by group.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::{DeadReason, DeliveryState, EndpointState};

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Delivery {
    pub id: String,
    pub event: String,
    pub r#type: String,
    pub endpoint: String,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::delivery_state))]
    pub state: DeliveryState,
    /// Why the delivery is dead.
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::dead_reason_or_null))]
    pub reason: Option<DeadReason>,
    pub attempt_count: i16,
    /// HTTP status of the last response.
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::status_or_null))]
    pub status_code: Option<i16>,
    pub error: Option<String>,
    pub created_at: Option<DateTime<Utc>>,
    pub last_attempt_at: Option<DateTime<Utc>>,
    /// Null while pending means as soon as the endpoint has capacity.
    pub next_attempt_at: Option<DateTime<Utc>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DeliveryWithAttempts {
    #[serde(flatten)]
    pub delivery: Delivery,
    pub url: String,
    /// Newest first.
    pub attempts: Vec<Attempt>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Attempt {
    pub number: i16,
    pub started_at: DateTime<Utc>,
    pub duration_ms: i32,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::outcome))]
    pub outcome: String,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::status_or_null))]
    pub status: Option<i16>,
    pub error: Option<String>,
    /// Empty when nothing was sent.
    pub request_headers: BTreeMap<String, String>,
    pub response_head: Option<String>,
    pub response_body: Option<String>,
    /// The response had a longer body than the part that is kept.
    pub response_body_cut: bool,
    /// Where the time went. Only of failed attempts.
    pub timing: Option<AttemptTiming>,
    pub replay: Option<String>,
}

/// A phase that was not reached, or not needed because a connection was reused, is null.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AttemptTiming {
    /// The address and port that the request was sent to, or that was tried first.
    pub address: Option<String>,
    pub dns_ms: Option<i64>,
    pub connect_ms: Option<i64>,
    pub tls_ms: Option<i64>,
    /// From the request to the head of the response.
    pub first_byte_ms: Option<i64>,
}

impl From<crate::Timing> for AttemptTiming {
    fn from(timing: crate::Timing) -> Self {
        let ms = |time: Option<std::time::Duration>| {
            time.map(|time| i64::try_from(time.as_millis()).unwrap_or(i64::MAX))
        };
        Self {
            address: timing.address.map(|address| address.to_string()),
            dns_ms: ms(timing.dns),
            connect_ms: ms(timing.connect),
            tls_ms: ms(timing.tls),
            first_byte_ms: ms(timing.first_byte),
        }
    }
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NewDiscard {
    /// Whose dead letters are discarded. Required.
    pub endpoint: Option<String>,
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
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Discarded {
    pub discarded: i64,
    /// False if the limit of one request was reached. Repeat it for the rest.
    pub is_complete: bool,
}

/// Dead letters with the same endpoint, type, reason and failure.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DeadLetterGroup {
    pub endpoint: String,
    pub url: String,
    pub r#type: String,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::dead_reason))]
    pub reason: DeadReason,
    /// What the last attempt failed with: the status code of the response, or an outcome such as `timed_out`. `499` stands
    /// for unusual status codes that begin with 4, and so on.
    pub failure: String,
    pub count: i64,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::endpoint_state))]
    pub endpoint_state: EndpointState,
}
