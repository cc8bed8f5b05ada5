//! Schemas of single fields, with the limits from `postrider_proto::limits`.

use postrider_dispatcher::replays::RATE_MAX;
use postrider_proto::{
    DeadReason, EndpointState, OutcomeKind, ReplayKind, ReplayState,
    limits::{
        ALERT_DEAD_LETTERS_MAX, BATCH_EVENTS_MAX, CUSTOM_HEADER_BYTES_MAX, CUSTOM_HEADERS_MAX,
        DESCRIPTION_BYTES_MAX, ENDPOINT_CONCURRENCY_MAX, EVENT_ID_CHARS_MAX, EVENT_TYPE_BYTES_MAX,
        IDEMPOTENCY_KEY_CHARS_MAX, KEY_NAME_BYTES_MAX, ORDERING_KEY_BYTES_MAX, OVERLAP_SECONDS_MAX,
        RATE_PER_SECOND_MAX, ROTATE_DAYS_MAX, ROTATE_DAYS_MIN, SCHEDULE_STEPS_MAX, SECRET_BYTES_MAX,
        TIMEOUT_MS_MAX, TIMEOUT_MS_MIN, TLS_PEM_BYTES_MAX, TYPES_PER_ENDPOINT_MAX, URL_BYTES_MAX,
    },
    state::{KeyRole, SignatureFormat},
};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::openapi::{
    KnownFormat, Object, Ref, Schema, SchemaFormat,
    schema::{AdditionalProperties, Array, ArrayBuilder, ObjectBuilder, SchemaType, Type},
};

const TYPE: &str = "^[a-z0-9_]+(\\.[a-z0-9_]+)*$";
const PATTERN: &str = "^(\\*|[a-z0-9_]+(\\.[a-z0-9_]+)*(\\.\\*)?)$";
const LABEL: &str = "^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$";
const EVENT_ID: &str = "^[A-Za-z0-9_:-]+$";

pub(crate) fn value(schema: impl Serialize) -> Value {
    let mut value = serde_json::to_value(schema).unwrap_or_default();
    forget_defaults(&mut value);
    value
}

/// Removes the null defaults of `#[serde(default)]` forms, which mean nothing to clients.
fn forget_defaults(schema: &mut Value) {
    if let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) {
        for property in properties.values_mut().filter_map(Value::as_object_mut) {
            property.retain(|key, value| key != "default" || !value.is_null());
        }
    }
}

fn text() -> ObjectBuilder {
    ObjectBuilder::new().schema_type(Type::String)
}

fn text_or_null() -> ObjectBuilder {
    ObjectBuilder::new().schema_type(SchemaType::from_iter([Type::String, Type::Null]))
}

fn number_or_null(low: i64, high: i64) -> ObjectBuilder {
    ObjectBuilder::new()
        .schema_type(SchemaType::from_iter([Type::Integer, Type::Null]))
        .format(Some(SchemaFormat::KnownFormat(KnownFormat::Int32)))
        .minimum(Some(low))
        .maximum(Some(high))
}

fn one_of(all: impl IntoIterator<Item = &'static str>) -> Object {
    text().enum_values(Some(all)).build()
}

fn one_of_or_null(all: impl IntoIterator<Item = &'static str>) -> Object {
    let values: Vec<Value> = all.into_iter().map(Value::from).chain([Value::Null]).collect();
    text_or_null().enum_values(Some(values)).build()
}

fn free_object(kind: SchemaType) -> ObjectBuilder {
    ObjectBuilder::new()
        .schema_type(kind)
        .additional_properties(Some(AdditionalProperties::<Schema>::FreeForm(true)))
}

/// Schema and description of a path parameter.
pub(crate) fn path_parameter(name: &str) -> (Value, &'static str) {
    match name {
        "tenant" => (value(label()), "The tenant's id."),
        "type" => (value(type_name()), "The event type's name."),
        "event" => (value(event_id()), "The event's id."),
        "endpoint" => (json!({"type": "string"}), "The endpoint's id, `ep_…`."),
        "delivery" => (json!({"type": "string"}), "The delivery's id, `dlv_…`."),
        "listener" => (json!({"type": "string"}), "The listener's id, `lis_…`."),
        "key" => (json!({"type": "string"}), "The key's id, `key_…`."),
        "replay" => (json!({"type": "string"}), "The replay's id, `rpl_…`."),
        "erasure" => (json!({"type": "string"}), "The erasure's id, `era_…`."),
        _ => (json!({"type": "string"}), "The id."),
    }
}

/// A tenant's id, or a version.
pub(crate) fn label() -> Object {
    text().pattern(Some(LABEL)).build()
}

pub(crate) fn version_or_null() -> Object {
    text_or_null().pattern(Some(LABEL)).build()
}

pub(crate) fn type_name() -> Object {
    text()
        .pattern(Some(TYPE))
        .max_length(Some(EVENT_TYPE_BYTES_MAX))
        .build()
}

pub(crate) fn type_or_null() -> Object {
    text_or_null()
        .pattern(Some(TYPE))
        .max_length(Some(EVENT_TYPE_BYTES_MAX))
        .description(Some(
            "Defaults to the first type in the catalogue that the endpoint subscribes to.",
        ))
        .build()
}

pub(crate) fn event_id() -> Object {
    text()
        .pattern(Some(EVENT_ID))
        .max_length(Some(EVENT_ID_CHARS_MAX))
        .build()
}

pub(crate) fn event_id_or_null() -> Object {
    text_or_null()
        .pattern(Some(EVENT_ID))
        .max_length(Some(EVENT_ID_CHARS_MAX))
        .description(Some(
            "Your own stable id, for deduplication: an event with the same id is sent once. Generated if omitted.",
        ))
        .build()
}

pub(crate) fn ordering_key_or_null() -> Object {
    text_or_null()
        .min_length(Some(1))
        .max_length(Some(ORDERING_KEY_BYTES_MAX))
        .description(Some(
            "Events with the same key are numbered (`sequence`), and ordered endpoints receive them in that order.",
        ))
        .build()
}

pub(crate) fn idempotency_key() -> Object {
    text()
        .min_length(Some(1))
        .max_length(Some(IDEMPOTENCY_KEY_CHARS_MAX))
        .pattern(Some("^[!-~]([ -~]*[!-~])?$"))
        .build()
}

pub(crate) fn object() -> Object {
    free_object(Type::Object.into()).build()
}

pub(crate) fn object_or_null() -> Object {
    free_object(SchemaType::from_iter([Type::Object, Type::Null])).build()
}

/// JSON Schemas by version.
pub(crate) fn schemas() -> Object {
    free_object(Type::Object.into())
        .description(Some(
            "JSON Schemas (2020-12) by version. A published schema can't be changed; the last version is the newest.",
        ))
        .build()
}

pub(crate) fn name_or_null() -> Object {
    text_or_null().max_length(Some(DESCRIPTION_BYTES_MAX)).build()
}

pub(crate) fn key_name() -> Object {
    text()
        .min_length(Some(1))
        .max_length(Some(KEY_NAME_BYTES_MAX))
        .build()
}

pub(crate) fn url() -> Object {
    text()
        .format(Some(SchemaFormat::Custom("uri".to_owned())))
        .max_length(Some(URL_BYTES_MAX))
        .description(Some(
            "An https URL on the public internet, without user name, password or fragment.",
        ))
        .build()
}

pub(crate) fn patterns_or_null() -> Array {
    ArrayBuilder::new()
        .schema_type(SchemaType::from_iter([Type::Array, Type::Null]))
        .items(
            text()
                .pattern(Some(PATTERN))
                .max_length(Some(EVENT_TYPE_BYTES_MAX + 2)),
        )
        .min_items(Some(1))
        .max_items(Some(TYPES_PER_ENDPOINT_MAX))
        .description(Some("Event types to receive. `invoice.*` matches every type starting with `invoice.`; `*`, the default, matches all."))
        .build()
}

pub(crate) fn versions_or_null() -> Object {
    ObjectBuilder::new()
        .schema_type(SchemaType::from_iter([Type::Object, Type::Null]))
        .additional_properties(Some(Schema::Object(label())))
        .max_properties(Some(TYPES_PER_ENDPOINT_MAX))
        .description(Some(
            "Pinned versions by event type: only events of that version are sent. Other types are sent in any version.",
        ))
        .build()
}

pub(crate) fn headers_or_null() -> Object {
    let one = text().max_length(Some(CUSTOM_HEADER_BYTES_MAX)).build();
    ObjectBuilder::new()
        .schema_type(SchemaType::from_iter([Type::Object, Type::Null]))
        .additional_properties(Some(Schema::Object(one)))
        .max_properties(Some(CUSTOM_HEADERS_MAX))
        .description(Some(
            "Custom headers sent with each request. Their values are never returned.",
        ))
        .build()
}

pub(crate) fn tls_or_null() -> Object {
    let pem = |description| {
        text_or_null()
            .max_length(Some(TLS_PEM_BYTES_MAX))
            .description(Some(description))
    };
    ObjectBuilder::new()
        .schema_type(SchemaType::from_iter([Type::Object, Type::Null]))
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
        .description(Some(
            "TLS settings of the endpoint. They are replaced as a whole.",
        ))
        .build()
}

pub(crate) fn tls_fingerprints_or_null() -> Object {
    ObjectBuilder::new()
        .schema_type(SchemaType::from_iter([Type::Object, Type::Null]))
        .property("ca_certificates", ArrayBuilder::new().items(text()).build())
        .property("client_certificate", text_or_null())
        .required("ca_certificates")
        .required("client_certificate")
        .description(Some("SHA-256 fingerprints of the endpoint's certificates."))
        .build()
}

pub(crate) fn concurrency_or_null() -> Object {
    number_or_null(1, ENDPOINT_CONCURRENCY_MAX)
        .description(Some("Maximum number of concurrent requests."))
        .build()
}

pub(crate) fn rate_or_null() -> Object {
    number_or_null(1, RATE_PER_SECOND_MAX).build()
}

pub(crate) fn timeout_or_null() -> Object {
    number_or_null(TIMEOUT_MS_MIN, TIMEOUT_MS_MAX).build()
}

pub(crate) fn overlap_or_null() -> Object {
    number_or_null(0, OVERLAP_SECONDS_MAX.into())
        .description(Some(
            "How long older secrets stay valid: a day by default; 0 revokes them immediately.",
        ))
        .build()
}

pub(crate) fn tenant_rotation_or_null() -> Object {
    number_or_null(ROTATE_DAYS_MIN, ROTATE_DAYS_MAX)
        .description(Some(
            "Rotate secrets automatically after this many days; null: never.",
        ))
        .build()
}

pub(crate) fn rotation_or_null() -> Object {
    number_or_null(0, ROTATE_DAYS_MAX)
        .description(Some(
            "Rotate the secret automatically after this many days, at least 7. Null: the tenant's policy; 0: never.",
        ))
        .build()
}

pub(crate) fn schedule_or_null() -> Array {
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

pub(crate) fn secret_or_null() -> Object {
    text_or_null()
        .max_length(Some(SECRET_BYTES_MAX))
        .description(Some("Your own signing secret. Generated if omitted."))
        .build()
}

pub(crate) fn signature() -> Object {
    one_of(SignatureFormat::ALL.iter().map(|format| format.as_str()))
}

pub(crate) fn signature_or_null() -> Object {
    one_of_or_null(SignatureFormat::ALL.iter().map(|format| format.as_str()))
}

pub(crate) fn endpoint_state() -> Object {
    let seen = EndpointState::ALL
        .iter()
        .filter(|state| **state != EndpointState::Deleted);
    one_of(seen.map(|state| state.as_str()))
}

pub(crate) fn key_role() -> Object {
    one_of(KeyRole::ALL.iter().map(|role| role.as_str()))
}

pub(crate) fn delivery_state() -> Object {
    one_of(["pending", "delivered", "dead"])
}

pub(crate) fn secret_state() -> Object {
    one_of(["current", "retiring"])
}

pub(crate) fn dead_reason_or_null() -> Object {
    one_of_or_null(DeadReason::ALL.iter().map(|reason| reason.as_str()))
}

pub(crate) fn dead_reason() -> Object {
    one_of(DeadReason::ALL.iter().map(|reason| reason.as_str()))
}

/// For resources that outlive their endpoint.
pub(crate) fn any_endpoint_state() -> Object {
    one_of(EndpointState::ALL.iter().map(|state| state.as_str()))
}

pub(crate) fn delivery_state_or_null() -> Object {
    one_of_or_null(["dead", "delivered", "pending"])
}

pub(crate) fn replay_kind() -> Object {
    one_of(ReplayKind::ALL.iter().map(|kind| kind.as_str()))
}

pub(crate) fn replay_kind_or_null() -> Object {
    one_of_or_null(ReplayKind::ALL.iter().map(|kind| kind.as_str()))
}

pub(crate) fn replay_state() -> Object {
    one_of(ReplayState::ALL.iter().map(|state| state.as_str()))
}

pub(crate) fn replay_rate_or_null() -> Object {
    number_or_null(1, RATE_MAX.into())
        .description(Some("Maximum rate per endpoint, per second; 1,000 by default."))
        .build()
}

pub(crate) fn erasure_state() -> Object {
    one_of(["running", "done"])
}

pub(crate) fn threshold() -> Object {
    ObjectBuilder::new()
        .schema_type(Type::Integer)
        .minimum(Some(1))
        .maximum(Some(ALERT_DEAD_LETTERS_MAX))
        .build()
}

pub(crate) fn outcome() -> Object {
    one_of(
        OutcomeKind::ALL
            .iter()
            .map(|kind| kind.as_str())
            .chain(["unknown"]),
    )
}

pub(crate) fn status_or_null() -> Object {
    number_or_null(100, 999).build()
}

/// The events of a batch, each in the form of a single emit.
pub(crate) fn batch() -> Array {
    ArrayBuilder::new()
        .items(Ref::from_schema_name("NewEvent"))
        .min_items(Some(1))
        .max_items(Some(BATCH_EVENTS_MAX))
        .build()
}

pub(crate) fn type_or_null_plain() -> Object {
    text_or_null()
        .pattern(Some(TYPE))
        .max_length(Some(EVENT_TYPE_BYTES_MAX))
        .build()
}
