//! Endpoints: their settings with the limits of each, and how they are shown.

use std::{collections::BTreeMap, fmt, ops::RangeInclusive};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{EndpointHealth, given, given_object};
use crate::{EndpointState, state::SignatureFormat};

pub const CONCURRENCY: RangeInclusive<i64> = 1..=1024;
pub const RATE_PER_SECOND: RangeInclusive<i64> = 1..=100_000;
pub const TIMEOUT_MS: RangeInclusive<i64> = 100..=60_000;

// For creation and update. An omitted field gets its default or is left unchanged; null (`Some(None)`) resets it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EndpointSettings {
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = fields::url))]
    pub url: Option<Option<String>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::name_or_null))]
    pub description: Option<Option<String>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::patterns_or_null))]
    pub types: Option<Option<Vec<String>>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = fields::versions))]
    pub versions: Option<Option<BTreeMap<String, String>>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::object_or_null))]
    pub filter: Option<Option<Value>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = fields::concurrency))]
    pub concurrency: Option<Option<i64>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = fields::rate_per_second))]
    pub rate_per_second: Option<Option<i64>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<bool>))]
    pub ordered: Option<Option<bool>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = fields::retry_schedule))]
    pub retry_schedule: Option<Option<Vec<String>>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = fields::timeout_ms))]
    pub timeout_ms: Option<Option<i64>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::signature_or_null))]
    pub signature: Option<Option<String>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = fields::rotate_every_days))]
    pub rotate_every_days: Option<Option<i64>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = fields::headers))]
    pub headers: Option<Option<BTreeMap<String, String>>>,
    #[serde(deserialize_with = "given_object", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = fields::tls))]
    pub tls: Option<Option<TlsSettings>>,
    /// Only on creation; afterwards it is rotated.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::secret_or_null))]
    pub secret: Option<Option<String>>,
    /// Only on update: a new endpoint is enabled.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = bool))]
    pub enabled: Option<Option<bool>>,
}

/// Null where the platform default applies.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Endpoint {
    pub id: String,
    pub url: String,
    pub description: Option<String>,
    pub types: Vec<String>,
    pub versions: BTreeMap<String, String>,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::object_or_null))]
    pub filter: Option<Value>,
    pub concurrency: Option<i16>,
    pub rate_per_second: Option<i32>,
    pub ordered: bool,
    pub retry_schedule: Option<Vec<String>>,
    pub timeout_ms: Option<i32>,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::signature))]
    pub signature: SignatureFormat,
    /// Null: the tenant's policy. 0: never.
    pub rotate_every_days: Option<i16>,
    /// Header names; the values are masked.
    pub headers: BTreeMap<String, String>,
    #[cfg_attr(feature = "openapi", schema(schema_with = fields::tls_fingerprints))]
    pub tls: Option<TlsFingerprints>,
    pub enabled: bool,
    #[cfg_attr(feature = "openapi", schema(schema_with = fields::state))]
    pub state: EndpointState,
    pub state_reason: Option<String>,
    /// When the endpoint is retrieved or listed, not when it is changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<EndpointHealth>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
    /// The public key that the receiver verifies with, for key pair signatures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub public_key: Option<String>,
    /// Returned only on creation, and never a private key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
}

/// An endpoint's own certificates, each as PEM text.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsSettings {
    /// The server's certificate must be signed by one of these and no other.
    pub ca_certificates: Option<String>,
    /// The client certificate we present, followed by its intermediates.
    pub client_certificate: Option<String>,
    pub client_key: Option<String>,
}

impl TlsSettings {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Without the key.
impl fmt::Debug for TlsSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsSettings")
            .field("ca_certificates", &self.ca_certificates.is_some())
            .field("client_certificate", &self.client_certificate.is_some())
            .finish_non_exhaustive()
    }
}

/// Certificates as shown to users: by their SHA-256 fingerprints.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TlsFingerprints {
    pub ca_certificates: Vec<String>,
    pub client_certificate: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AlertSettings {
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::threshold))]
    pub dead_letters: i64,
}

/// The schemas of settings. All but the URL can be null.
#[cfg(feature = "openapi")]
mod fields {
    use super::{super::shapes, CONCURRENCY, RATE_PER_SECOND, TIMEOUT_MS};
    use crate::{EndpointState, limits::*};

    shapes::shapes! {
        [pub(super)]
        url = {
            "type": "string", "format": "uri", "maxLength": URL_BYTES_MAX,
            "description": "An https URL on the public internet, without user name, password or fragment.",
        }
        versions = {
            "type": ["object", "null"], "maxProperties": TYPES_PER_ENDPOINT_MAX,
            "additionalProperties": shapes::label(),
            "description": "Pinned versions by event type: only events of that version are sent. Other types are sent in any version.",
        }
        concurrency = {
            "type": ["integer", "null"], "format": "int32", "minimum": CONCURRENCY.start(), "maximum": CONCURRENCY.end(),
            "description": "Maximum number of concurrent requests.",
        }
        rate_per_second = {
            "type": ["integer", "null"], "format": "int32",
            "minimum": RATE_PER_SECOND.start(), "maximum": RATE_PER_SECOND.end(),
        }
        retry_schedule = {
            "type": ["array", "null"], "minItems": 1, "maxItems": SCHEDULE_STEPS_MAX,
            "items": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h|d)$"},
            "description": "The delay before each attempt, counted from the previous one: `[\"0s\", \"1m\"]`.",
        }
        timeout_ms = {
            "type": ["integer", "null"], "format": "int32", "minimum": TIMEOUT_MS.start(), "maximum": TIMEOUT_MS.end(),
        }
        rotate_every_days = {
            "type": ["integer", "null"], "format": "int32", "minimum": 0, "maximum": ROTATE_DAYS_MAX,
            "description": "Rotate the secret automatically after this many days, at least 7. Null: the tenant's policy; 0: never.",
        }
        headers = {
            "type": ["object", "null"], "maxProperties": CUSTOM_HEADERS_MAX,
            "additionalProperties": {"type": "string", "maxLength": CUSTOM_HEADER_BYTES_MAX},
            "description": "Custom headers sent with each request. Their values are never returned.",
        }
        tls = {
            "type": ["object", "null"], "additionalProperties": false,
            "description": "TLS settings of the endpoint. They are replaced as a whole.",
            "properties": {
                "ca_certificates": {
                    "type": ["string", "null"], "maxLength": TLS_PEM_BYTES_MAX,
                    "description": "PEM. Only these CAs are trusted for the endpoint's certificate.",
                },
                "client_certificate": {
                    "type": ["string", "null"], "maxLength": TLS_PEM_BYTES_MAX,
                    "description": "PEM. The client certificate for mutual TLS, followed by its intermediate certificates.",
                },
                "client_key": {
                    "type": ["string", "null"], "maxLength": TLS_PEM_BYTES_MAX,
                    "description": "PEM. The private key of the client certificate; never returned.",
                },
            },
        }
        tls_fingerprints = {
            "type": ["object", "null"], "required": ["ca_certificates", "client_certificate"],
            "description": "SHA-256 fingerprints of the endpoint's certificates.",
            "properties": {
                "ca_certificates": {"type": "array", "items": {"type": "string"}},
                "client_certificate": {"type": ["string", "null"]},
            },
        }
        state = {
            "type": "string",
            "enum": shapes::words(&[EndpointState::Active, EndpointState::Paused, EndpointState::Disabled], EndpointState::as_str),
        }
    }
}
