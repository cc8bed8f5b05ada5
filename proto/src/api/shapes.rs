//! JSON Schemas of single fields with their limits, for the API document. Those of endpoint settings are in `endpoints`.

use serde_json::Value;

use crate::{
    DeadReason, EndpointState, OutcomeKind, ReplayKind, ReplayState,
    limits::*,
    state::{CircuitState, HealthStatus, KeyRole, SignatureFormat},
};

const TYPE: &str = "^[a-z0-9_]+(\\.[a-z0-9_]+)*$";
const PATTERN: &str = "^(\\*|[a-z0-9_]+(\\.[a-z0-9_]+)*(\\.\\*)?)$";
const LABEL: &str = "^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$";
const EVENT_ID: &str = "^[A-Za-z0-9_:-]+$";

pub(super) fn words<T: Copy>(all: &[T], word: fn(T) -> &'static str) -> Vec<Value> {
    all.iter().map(|one| word(*one).into()).collect()
}

fn words_or_null<T: Copy>(all: &[T], word: fn(T) -> &'static str) -> Vec<Value> {
    let mut all = words(all, word);
    all.push(Value::Null);
    all
}

macro_rules! shapes {
    ([$visible:vis] $($(#[$doc:meta])* $name:ident = $json:tt)+) => {$(
        $(#[$doc])*
        $visible fn $name() -> utoipa::openapi::Schema {
            // Not a schema: empty, and a test misses it in the document.
            serde_json::from_value(serde_json::json!($json)).unwrap_or_default()
        }
    )+};
}
pub(super) use shapes;

shapes! {
    [pub]
    /// A tenant's id, or a version.
    label = {"type": "string", "pattern": LABEL}
    version_or_null = {"type": ["string", "null"], "pattern": LABEL}
    type_name = {"type": "string", "pattern": TYPE, "maxLength": EVENT_TYPE_BYTES_MAX}
    type_or_null = {"type": ["string", "null"], "pattern": TYPE, "maxLength": EVENT_TYPE_BYTES_MAX}
    type_to_test_or_null = {
        "type": ["string", "null"], "pattern": TYPE, "maxLength": EVENT_TYPE_BYTES_MAX,
        "description": "Defaults to the first type in the catalogue that the endpoint subscribes to.",
    }
    event_id = {"type": "string", "pattern": EVENT_ID, "maxLength": EVENT_ID_CHARS_MAX}
    event_id_or_null = {
        "type": ["string", "null"], "pattern": EVENT_ID, "maxLength": EVENT_ID_CHARS_MAX,
        "description": "Your own stable id, for deduplication: an event with the same id is sent once. Generated if omitted.",
    }
    ordering_key_or_null = {
        "type": ["string", "null"], "minLength": 1, "maxLength": ORDERING_KEY_BYTES_MAX,
        "description": "Events with the same key are numbered (`sequence`), and ordered endpoints receive them in that order.",
    }
    idempotency_key = {
        "type": "string", "minLength": 1, "maxLength": IDEMPOTENCY_KEY_CHARS_MAX, "pattern": "^[!-~]([ -~]*[!-~])?$",
    }
    object = {"type": "object", "additionalProperties": true}
    object_or_null = {"type": ["object", "null"], "additionalProperties": true}
    schemas = {
        "type": "object", "additionalProperties": true,
        "description": "JSON Schemas (2020-12) by version. A published schema can't be changed; the last version is the newest.",
    }
    /// The events of a batch, each in the form of a single emit.
    batch = {
        "type": "array", "items": {"$ref": "#/components/schemas/NewEvent"}, "minItems": 1, "maxItems": BATCH_EVENTS_MAX,
    }
    name_or_null = {"type": ["string", "null"], "maxLength": DESCRIPTION_BYTES_MAX}
    key_name = {"type": "string", "minLength": 1, "maxLength": KEY_NAME_BYTES_MAX}
    key_role = {"type": "string", "enum": words(KeyRole::ALL, KeyRole::as_str)}
    secret_or_null = {
        "type": ["string", "null"], "maxLength": SECRET_BYTES_MAX,
        "description": "Your own signing secret. Generated if omitted.",
    }
    secret_state = {"type": "string", "enum": ["current", "retiring"]}
    overlap_or_null = {
        "type": ["integer", "null"], "format": "int32", "minimum": 0, "maximum": OVERLAP_SECONDS_MAX,
        "description": "How long older secrets stay valid: a day by default; 0 revokes them immediately.",
    }
    tenant_rotation_or_null = {
        "type": ["integer", "null"], "format": "int32", "minimum": ROTATE_DAYS_MIN, "maximum": ROTATE_DAYS_MAX,
        "description": "Rotate secrets automatically after this many days; null: never.",
    }
    delivery_state = {"type": "string", "enum": ["pending", "delivered", "dead", "discarded"]}
    delivery_state_or_null = {"type": ["string", "null"], "enum": ["dead", "delivered", "pending", null]}
    dead_reason = {"type": "string", "enum": words(DeadReason::ALL, DeadReason::as_str)}
    dead_reason_or_null = {"type": ["string", "null"], "enum": words_or_null(DeadReason::ALL, DeadReason::as_str)}
    outcome = {"type": "string", "enum": outcomes()}
    status_or_null = {"type": ["integer", "null"], "format": "int32", "minimum": 100, "maximum": 999}
    replay_kind = {"type": "string", "enum": words(ReplayKind::ALL, ReplayKind::as_str)}
    replay_kind_or_null = {"type": ["string", "null"], "enum": words_or_null(ReplayKind::ALL, ReplayKind::as_str)}
    replay_state = {"type": "string", "enum": words(ReplayState::ALL, ReplayState::as_str)}
    replay_rate_or_null = {
        "type": ["integer", "null"], "format": "int32", "minimum": 1, "maximum": REPLAY_RATE_MAX,
        "description": "Maximum rate per endpoint, per second; 1,000 by default.",
    }
    signature = {"type": "string", "enum": words(SignatureFormat::ALL, SignatureFormat::as_str)}
    signature_or_null = {
        "type": ["string", "null"], "enum": words_or_null(SignatureFormat::ALL, SignatureFormat::as_str),
    }
    patterns_or_null = {
        "type": ["array", "null"], "minItems": 1, "maxItems": TYPES_PER_ENDPOINT_MAX,
        "items": {"type": "string", "pattern": PATTERN, "maxLength": EVENT_TYPE_BYTES_MAX + 2},
        "description": "Event types to receive. `invoice.*` matches every type starting with `invoice.`; `*`, the default, matches all.",
    }
    health_status = {
        "type": "string", "enum": words(HealthStatus::ALL, HealthStatus::as_str),
        "description": "`failing`: attempts have failed since the last success. Paused and disabled endpoints are neither healthy nor failing.",
    }
    circuit_state = {
        "type": "string", "enum": words(CircuitState::ALL, CircuitState::as_str),
        "description": "`open` after ten consecutive failures: one attempt at a time is let through until one succeeds.",
    }
    endpoint_state = {"type": "string", "enum": words(EndpointState::ALL, EndpointState::as_str)}
    erasure_state = {"type": "string", "enum": ["running", "done"]}
    cell_state = {"type": "string", "enum": ["open", "draining"]}
    move_state = {"type": "string", "enum": ["stopping", "copying", "switching", "erasing", "cancelling", "done", "cancelled"]}
    threshold = {"type": "integer", "minimum": 1, "maximum": ALERT_DEAD_LETTERS_MAX}
}

fn outcomes() -> Vec<Value> {
    let mut all = words(&OutcomeKind::ALL, OutcomeKind::as_str);
    all.push("unknown".into());
    all
}
