//! Events. Their data is the producer's text and is never serialized again.

use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::RawValue;

use super::Delivery;

// Borrows its data from the request's text: it can be large, and is stored byte for byte.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(as = NewEvent))]
pub struct EventForm<'a> {
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::type_name))]
    pub r#type: String,
    #[serde(borrow)]
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::object))]
    pub data: &'a RawValue,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::event_id_or_null))]
    pub id: Option<String>,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::version_or_null))]
    pub version: Option<String>,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::ordering_key_or_null))]
    pub ordering_key: Option<String>,
}

// Each event is read as an `EventForm` on its own, so that an error names the event.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(as = NewEvents))]
pub struct BatchForm<'a> {
    #[serde(borrow)]
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::batch))]
    pub events: Vec<&'a RawValue>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Event {
    pub id: String,
    pub r#type: String,
    pub version: String,
    #[serde(serialize_with = "milliseconds")]
    pub created_at: DateTime<Utc>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ordering_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequence: Option<i64>,
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::object_or_null))]
    pub data: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deliveries: Option<Vec<Delivery>>,
}

/// Without `data`, which the caller already has.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EmittedEvent {
    pub id: String,
    pub r#type: String,
    pub version: String,
    #[serde(serialize_with = "milliseconds")]
    pub created_at: DateTime<Utc>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequence: Option<i64>,
    /// The event already existed with the same content; nothing is sent again.
    pub duplicate: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EmittedEvents {
    pub data: Vec<EmittedEvent>,
}

/// As in the body that receivers get, also on a full second.
fn milliseconds<S: Serializer>(time: &DateTime<Utc>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&time.to_rfc3339_opts(SecondsFormat::Millis, true))
}
