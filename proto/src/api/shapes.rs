//! Schemas of single fields that several types have, with their limits.

use std::ops::RangeInclusive;

use serde_json::Value;
use utoipa::openapi::{
    KnownFormat, Object, Ref, Schema, SchemaFormat,
    schema::{AdditionalProperties, Array, ArrayBuilder, ObjectBuilder, SchemaType, Type},
};

use crate::{
    DeadReason, EndpointState, OutcomeKind, ReplayKind, ReplayState,
    limits::{
        ALERT_DEAD_LETTERS_MAX, BATCH_EVENTS_MAX, DESCRIPTION_BYTES_MAX, EVENT_ID_CHARS_MAX,
        EVENT_TYPE_BYTES_MAX, IDEMPOTENCY_KEY_CHARS_MAX, KEY_NAME_BYTES_MAX, ORDERING_KEY_BYTES_MAX,
        OVERLAP_SECONDS_MAX, REPLAY_RATE_MAX, ROTATE_DAYS_MAX, ROTATE_DAYS_MIN, SECRET_BYTES_MAX,
        TYPES_PER_ENDPOINT_MAX,
    },
    state::{KeyRole, SignatureFormat},
};

const TYPE: &str = "^[a-z0-9_]+(\\.[a-z0-9_]+)*$";
const PATTERN: &str = "^(\\*|[a-z0-9_]+(\\.[a-z0-9_]+)*(\\.\\*)?)$";
const LABEL: &str = "^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$";
const EVENT_ID: &str = "^[A-Za-z0-9_:-]+$";

pub(super) fn text() -> ObjectBuilder {
    ObjectBuilder::new().schema_type(Type::String)
}

pub(super) fn text_or_null() -> ObjectBuilder {
    ObjectBuilder::new().schema_type(SchemaType::from_iter([Type::String, Type::Null]))
}

pub(super) fn number_or_null(range: RangeInclusive<i64>) -> ObjectBuilder {
    ObjectBuilder::new()
        .schema_type(SchemaType::from_iter([Type::Integer, Type::Null]))
        .format(Some(SchemaFormat::KnownFormat(KnownFormat::Int32)))
        .minimum(Some(*range.start()))
        .maximum(Some(*range.end()))
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

/// A tenant's id, or a version.
pub fn label() -> Object {
    text().pattern(Some(LABEL)).build()
}

pub(super) fn version_or_null() -> Object {
    text_or_null().pattern(Some(LABEL)).build()
}

pub fn type_name() -> Object {
    text()
        .pattern(Some(TYPE))
        .max_length(Some(EVENT_TYPE_BYTES_MAX))
        .build()
}

pub(super) fn type_or_null() -> Object {
    text_or_null()
        .pattern(Some(TYPE))
        .max_length(Some(EVENT_TYPE_BYTES_MAX))
        .description(Some(
            "Defaults to the first type in the catalogue that the endpoint subscribes to.",
        ))
        .build()
}

pub fn event_id() -> Object {
    text()
        .pattern(Some(EVENT_ID))
        .max_length(Some(EVENT_ID_CHARS_MAX))
        .build()
}

pub(super) fn event_id_or_null() -> Object {
    text_or_null()
        .pattern(Some(EVENT_ID))
        .max_length(Some(EVENT_ID_CHARS_MAX))
        .description(Some(
            "Your own stable id, for deduplication: an event with the same id is sent once. Generated if omitted.",
        ))
        .build()
}

pub(super) fn ordering_key_or_null() -> Object {
    text_or_null()
        .min_length(Some(1))
        .max_length(Some(ORDERING_KEY_BYTES_MAX))
        .description(Some(
            "Events with the same key are numbered (`sequence`), and ordered endpoints receive them in that order.",
        ))
        .build()
}

pub fn idempotency_key() -> Object {
    text()
        .min_length(Some(1))
        .max_length(Some(IDEMPOTENCY_KEY_CHARS_MAX))
        .pattern(Some("^[!-~]([ -~]*[!-~])?$"))
        .build()
}

pub fn object() -> Object {
    free_object(Type::Object.into()).build()
}

pub(super) fn object_or_null() -> Object {
    free_object(SchemaType::from_iter([Type::Object, Type::Null])).build()
}

/// JSON Schemas by version.
pub(super) fn schemas() -> Object {
    free_object(Type::Object.into())
        .description(Some(
            "JSON Schemas (2020-12) by version. A published schema can't be changed; the last version is the newest.",
        ))
        .build()
}

pub(super) fn name_or_null() -> Object {
    text_or_null().max_length(Some(DESCRIPTION_BYTES_MAX)).build()
}

pub(super) fn key_name() -> Object {
    text()
        .min_length(Some(1))
        .max_length(Some(KEY_NAME_BYTES_MAX))
        .build()
}

pub(super) fn patterns_or_null() -> Array {
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

pub(super) fn overlap_or_null() -> Object {
    number_or_null(0..=OVERLAP_SECONDS_MAX.into())
        .description(Some(
            "How long older secrets stay valid: a day by default; 0 revokes them immediately.",
        ))
        .build()
}

pub(super) fn tenant_rotation_or_null() -> Object {
    number_or_null(ROTATE_DAYS_MIN..=ROTATE_DAYS_MAX)
        .description(Some(
            "Rotate secrets automatically after this many days; null: never.",
        ))
        .build()
}

pub(super) fn secret_or_null() -> Object {
    text_or_null()
        .max_length(Some(SECRET_BYTES_MAX))
        .description(Some("Your own signing secret. Generated if omitted."))
        .build()
}

pub(super) fn signature() -> Object {
    one_of(SignatureFormat::ALL.iter().map(|format| format.as_str()))
}

pub(super) fn signature_or_null() -> Object {
    one_of_or_null(SignatureFormat::ALL.iter().map(|format| format.as_str()))
}

pub(super) fn endpoint_state() -> Object {
    let seen = EndpointState::ALL
        .iter()
        .filter(|state| **state != EndpointState::Deleted);
    one_of(seen.map(|state| state.as_str()))
}

pub(super) fn key_role() -> Object {
    one_of(KeyRole::ALL.iter().map(|role| role.as_str()))
}

pub fn delivery_state() -> Object {
    one_of(["pending", "delivered", "dead"])
}

pub(super) fn secret_state() -> Object {
    one_of(["current", "retiring"])
}

pub(super) fn dead_reason_or_null() -> Object {
    one_of_or_null(DeadReason::ALL.iter().map(|reason| reason.as_str()))
}

pub fn dead_reason() -> Object {
    one_of(DeadReason::ALL.iter().map(|reason| reason.as_str()))
}

/// For resources that outlive their endpoint.
pub(super) fn any_endpoint_state() -> Object {
    one_of(EndpointState::ALL.iter().map(|state| state.as_str()))
}

pub(super) fn delivery_state_or_null() -> Object {
    one_of_or_null(["dead", "delivered", "pending"])
}

pub(super) fn replay_kind() -> Object {
    one_of(ReplayKind::ALL.iter().map(|kind| kind.as_str()))
}

pub(super) fn replay_kind_or_null() -> Object {
    one_of_or_null(ReplayKind::ALL.iter().map(|kind| kind.as_str()))
}

pub(super) fn replay_state() -> Object {
    one_of(ReplayState::ALL.iter().map(|state| state.as_str()))
}

pub(super) fn replay_rate_or_null() -> Object {
    number_or_null(1..=REPLAY_RATE_MAX.into())
        .description(Some("Maximum rate per endpoint, per second; 1,000 by default."))
        .build()
}

pub(super) fn erasure_state() -> Object {
    one_of(["running", "done"])
}

pub(super) fn threshold() -> Object {
    ObjectBuilder::new()
        .schema_type(Type::Integer)
        .minimum(Some(1))
        .maximum(Some(ALERT_DEAD_LETTERS_MAX))
        .build()
}

pub(super) fn outcome() -> Object {
    one_of(
        OutcomeKind::ALL
            .iter()
            .map(|kind| kind.as_str())
            .chain(["unknown"]),
    )
}

pub(super) fn status_or_null() -> Object {
    number_or_null(100..=999).build()
}

/// The events of a batch, each in the form of a single emit.
pub(super) fn batch() -> Array {
    ArrayBuilder::new()
        .items(Ref::from_schema_name("NewEvent"))
        .min_items(Some(1))
        .max_items(Some(BATCH_EVENTS_MAX))
        .build()
}

pub(super) fn type_or_null_plain() -> Object {
    text_or_null()
        .pattern(Some(TYPE))
        .max_length(Some(EVENT_TYPE_BYTES_MAX))
        .build()
}
