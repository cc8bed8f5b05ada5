//! Endpoints: their settings with the limits of each, and how they are shown.

use std::{collections::BTreeMap, fmt, ops::RangeInclusive};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
#[cfg(feature = "openapi")]
use utoipa::ToSchema;

#[cfg(feature = "openapi")]
use super::shapes;
use super::{given, given_object};
use crate::{EndpointState, state::SignatureFormat};

pub const CONCURRENCY: RangeInclusive<i64> = 1..=1024;
pub const RATE_PER_SECOND: RangeInclusive<i64> = 1..=100_000;
pub const TIMEOUT_MS: RangeInclusive<i64> = 100..=60_000;

// For creation and update. An omitted field gets its default or is left unchanged; null (`Some(None)`) resets it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct EndpointSettings {
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = fields::url))]
    pub url: Option<Option<String>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = shapes::name_or_null))]
    pub description: Option<Option<String>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = shapes::patterns_or_null))]
    pub types: Option<Option<Vec<String>>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = fields::versions))]
    pub versions: Option<Option<BTreeMap<String, String>>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = shapes::object_or_null))]
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
    #[cfg_attr(feature = "openapi", schema(schema_with = shapes::signature_or_null))]
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
    #[cfg_attr(feature = "openapi", schema(schema_with = shapes::secret_or_null))]
    pub secret: Option<Option<String>>,
    /// Only on update: a new endpoint is enabled.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = bool))]
    pub enabled: Option<Option<bool>>,
}

/// Null where the platform default applies.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct Endpoint {
    pub id: String,
    pub url: String,
    pub description: Option<String>,
    pub types: Vec<String>,
    pub versions: BTreeMap<String, String>,
    #[cfg_attr(feature = "openapi", schema(schema_with = shapes::object_or_null))]
    pub filter: Option<Value>,
    pub concurrency: Option<i16>,
    pub rate_per_second: Option<i32>,
    pub ordered: bool,
    pub retry_schedule: Option<Vec<String>>,
    pub timeout_ms: Option<i32>,
    #[cfg_attr(feature = "openapi", schema(schema_with = shapes::signature))]
    pub signature: SignatureFormat,
    /// Null: the tenant's policy. 0: never.
    pub rotate_every_days: Option<i16>,
    /// Header names; the values are masked.
    pub headers: BTreeMap<String, String>,
    #[cfg_attr(feature = "openapi", schema(schema_with = fields::tls_fingerprints))]
    pub tls: Option<TlsFingerprints>,
    pub enabled: bool,
    #[cfg_attr(feature = "openapi", schema(schema_with = shapes::endpoint_state))]
    pub state: EndpointState,
    pub state_reason: Option<String>,
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
#[cfg_attr(feature = "openapi", derive(ToSchema))]
pub struct AlertSettings {
    #[cfg_attr(feature = "openapi", schema(schema_with = shapes::threshold))]
    pub dead_letters: i64,
}

/// The schema of each setting. All but the URL can be null.
#[cfg(feature = "openapi")]
mod fields {
    use utoipa::openapi::{
        Object, Schema, SchemaFormat,
        schema::{AdditionalProperties, Array, ArrayBuilder, ObjectBuilder, SchemaType, Type},
    };

    use super::{
        super::shapes::{label, number_or_null, text, text_or_null},
        CONCURRENCY, RATE_PER_SECOND, TIMEOUT_MS,
    };
    use crate::limits::{
        CUSTOM_HEADER_BYTES_MAX, CUSTOM_HEADERS_MAX, ROTATE_DAYS_MAX, SCHEDULE_STEPS_MAX, TLS_PEM_BYTES_MAX,
        TYPES_PER_ENDPOINT_MAX, URL_BYTES_MAX,
    };

    fn object_or_null(description: &str) -> ObjectBuilder {
        ObjectBuilder::new()
            .schema_type(SchemaType::from_iter([Type::Object, Type::Null]))
            .description(Some(description))
    }

    pub(super) fn url() -> Object {
        text()
            .format(Some(SchemaFormat::Custom("uri".to_owned())))
            .max_length(Some(URL_BYTES_MAX))
            .description(Some(
                "An https URL on the public internet, without user name, password or fragment.",
            ))
            .build()
    }

    pub(super) fn versions() -> Object {
        object_or_null(
            "Pinned versions by event type: only events of that version are sent. Other types are sent in any version.",
        )
        .additional_properties(Some(Schema::Object(label())))
        .max_properties(Some(TYPES_PER_ENDPOINT_MAX))
        .build()
    }

    pub(super) fn concurrency() -> Object {
        number_or_null(CONCURRENCY)
            .description(Some("Maximum number of concurrent requests."))
            .build()
    }

    pub(super) fn rate_per_second() -> Object {
        number_or_null(RATE_PER_SECOND).build()
    }

    pub(super) fn timeout_ms() -> Object {
        number_or_null(TIMEOUT_MS).build()
    }

    pub(super) fn rotate_every_days() -> Object {
        number_or_null(0..=ROTATE_DAYS_MAX)
            .description(Some(
                "Rotate the secret automatically after this many days, at least 7. Null: the tenant's policy; 0: never.",
            ))
            .build()
    }

    pub(super) fn retry_schedule() -> Array {
        ArrayBuilder::new()
            .schema_type(SchemaType::from_iter([Type::Array, Type::Null]))
            .items(text().pattern(Some("^[0-9]+(ms|s|m|h|d)$")))
            .min_items(Some(1))
            .max_items(Some(SCHEDULE_STEPS_MAX))
            .description(Some(
                "The delay before each attempt, counted from the previous one: `[\"0s\", \"1m\"]`.",
            ))
            .build()
    }

    pub(super) fn headers() -> Object {
        let one = text().max_length(Some(CUSTOM_HEADER_BYTES_MAX)).build();
        object_or_null("Custom headers sent with each request. Their values are never returned.")
            .additional_properties(Some(Schema::Object(one)))
            .max_properties(Some(CUSTOM_HEADERS_MAX))
            .build()
    }

    pub(super) fn tls() -> Object {
        let pem = |description| {
            text_or_null()
                .max_length(Some(TLS_PEM_BYTES_MAX))
                .description(Some(description))
        };
        object_or_null("TLS settings of the endpoint. They are replaced as a whole.")
            .property(
                "ca_certificates",
                pem("PEM. Only these CAs are trusted for the endpoint's certificate."),
            )
            .property(
                "client_certificate",
                pem("PEM. The client certificate for mutual TLS, followed by its intermediate certificates."),
            )
            .property(
                "client_key",
                pem("PEM. The private key of the client certificate; never returned."),
            )
            .additional_properties(Some(AdditionalProperties::<Schema>::FreeForm(false)))
            .build()
    }

    pub(super) fn tls_fingerprints() -> Object {
        object_or_null("SHA-256 fingerprints of the endpoint's certificates.")
            .property("ca_certificates", ArrayBuilder::new().items(text()).build())
            .property("client_certificate", text_or_null())
            .required("ca_certificates")
            .required("client_certificate")
            .build()
    }
}
