//! The OpenAPI 3.1 document, composed of the operations in `api/` and the schemas in `postrider_proto::api`.
//! Invariant: what follows from an operation's rule, method, path and body is described here, once for all operations.

mod operation;

use std::collections::BTreeMap;

use postrider_proto::limits;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::{PartialSchema, ToSchema};

use crate::{
    auth::Rule,
    http::problem::{Fault, Kind},
};
pub(crate) use operation::Operation;

/// The groups that operations are shown in, in this order.
pub(crate) const TAGS: [(&str, &str); 7] = [
    (
        "Events",
        "Facts that producers emit and receivers get as webhooks.",
    ),
    (
        "Endpoints",
        "URLs that receive a tenant's events: settings, signing secrets, tests and probes.",
    ),
    (
        "Deliveries",
        "An event on its way to an endpoint, its attempts, dead letters and replays.",
    ),
    (
        "Event types",
        "The catalogue of event types and their versioned JSON Schemas.",
    ),
    ("Tenants", "The customers of the team that runs Postrider."),
    ("Administration", "API keys, erasures and the audit log."),
    ("System", "Health checks, metrics and this document."),
];

pub(crate) fn compose(operations: impl IntoIterator<Item = Operation>) -> Value {
    let mut schemas: BTreeMap<String, Value> = BTreeMap::new();
    let mut paths: BTreeMap<&str, Map<String, Value>> = BTreeMap::new();
    for mut operation in operations {
        schemas.append(&mut operation.schemas);
        paths
            .entry(operation.path)
            .or_default()
            .insert(operation.method.to_lowercase(), operation.value());
    }
    schemas.insert("Problem".to_owned(), problem());
    schemas.insert("FieldError".to_owned(), schema_of(Fault::schema()));
    let tags: Vec<Value> = TAGS
        .iter()
        .map(|(name, description)| json!({"name": name, "description": description}))
        .collect();
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Postrider",
            "version": env!("CARGO_PKG_VERSION"),
            "summary": "Outbound webhooks from your own Postgres",
            "description": introduction(),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/", "description": "The server of this document"}],
        "tags": tags,
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": Kind::ALL.map(|kind| (kind.component(), error_response(kind))).into_iter().collect::<Map<_, _>>(),
            "securitySchemes": {"key": {
                "type": "http",
                "scheme": "bearer",
                "description": "An API key with a role: `admin` may do everything, `producer` may only emit, \
                                `tenant` manages a single tenant.",
            }},
        },
    })
}

fn introduction() -> String {
    let kib = |bytes: usize| bytes / 1024;
    let limits = [
        format!(
            "event data: {} KiB and {} levels of nesting",
            kib(limits::EVENT_DATA_BYTES_MAX),
            limits::JSON_DEPTH_MAX
        ),
        format!(
            "batch: {} events and {} KiB",
            limits::BATCH_EVENTS_MAX,
            kib(limits::BATCH_BYTES_MAX)
        ),
        format!("endpoints per tenant: {}", limits::ENDPOINTS_PER_TENANT_MAX),
        format!("types per endpoint: {}", limits::TYPES_PER_ENDPOINT_MAX),
        format!(
            "attempts per delivery: {}; running replays per tenant: {}",
            limits::ATTEMPTS_PER_DELIVERY_MAX,
            limits::REPLAYS_RUNNING_PER_TENANT_MAX
        ),
        format!(
            "custom headers: {} with {} bytes each",
            limits::CUSTOM_HEADERS_MAX,
            limits::CUSTOM_HEADER_BYTES_MAX
        ),
        format!(
            "certificates and keys of an endpoint: {} bytes each",
            limits::TLS_PEM_BYTES_MAX
        ),
        format!(
            "URL: {} bytes; description: {} bytes",
            limits::URL_BYTES_MAX,
            limits::DESCRIPTION_BYTES_MAX
        ),
        format!("page size: {}", limits::LIST_PAGE_MAX),
        format!(
            "response of an endpoint: {} KiB read, {} KiB stored",
            kib(limits::RESPONSE_READ_BYTES_MAX),
            kib(limits::RESPONSE_KEPT_BYTES_MAX)
        ),
    ];
    format!(
        "Requests and responses are JSON. Authenticate with `Authorization: Bearer KEY`.\n\n\
         Errors are RFC 9457 `application/problem+json`. Each distinct cause has a stable `type`; `errors` lists invalid \
         fields by JSON pointer. Unknown fields and query parameters are rejected.\n\n\
         Lists are `{{\"data\":[…],\"next_cursor\":null|\"…\"}}`. Pass `next_cursor` as `?cursor=` to get the next page.\n\n\
         Every POST accepts an `Idempotency-Key`: a request that is repeated with the same key and body is executed once, \
         and its response is returned again with `Idempotent-Replayed: true` for 72 hours. Error responses are not \
         stored.\n\n\
         Rate limits: 200 requests per second for a tenant key and 10,000 for other keys, unless the operator has \
         configured other limits. Beyond that the response is 429 with `Retry-After`.\n\n\
         503 has `Retry-After` too: repeat the request after that time. The exception is `outcome-unknown`, the response to an \
         emit with neither an `id` nor an `Idempotency-Key` whose commit was not confirmed. Repeated blindly, such an emit \
         could store a second event. One with either of them can always be repeated.\n\n\
         Limits: {}.",
        limits.join("; ")
    )
}

impl Kind {
    fn component(self) -> String {
        let (name, ..) = self.definition();
        name.split('-')
            .map(|word| word[..1].to_uppercase() + &word[1..])
            .collect()
    }
}

fn problem() -> Value {
    let types: Vec<String> = Kind::ALL.iter().map(|kind| kind.urn()).collect();
    json!({
        "type": "object",
        "description": "An error (RFC 9457).",
        "required": ["type", "title", "status", "detail"],
        "properties": {
            "type": {"type": "string", "enum": types, "description": "The cause. Stable: programs should compare this."},
            "title": {"type": "string", "description": "A short description of the type."},
            "status": {"type": "integer", "format": "int32", "minimum": 400, "maximum": 599},
            "detail": {"type": "string", "description": "What is wrong with this request, for people."},
            "errors": {
                "type": "array",
                "description": "The invalid parts of the request, by JSON pointer.",
                "items": {"$ref": "#/components/schemas/FieldError"},
            },
            "event_id": {
                "type": "string",
                "description": "For `outcome-unknown`: the event that may have been stored. Look it up; if it stays not found, emit it again with this `id`.",
            },
        },
    })
}

fn error_response(kind: Kind) -> Value {
    let (_, _, title) = kind.definition();
    let mut response = json!({
        "description": format!("{title}."),
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    });
    let header = match kind {
        Kind::Unauthorized => Some(("WWW-Authenticate", json!({"type": "string"}))),
        kind if kind.is_temporary() => Some((
            "Retry-After",
            json!({"type": "integer", "minimum": 1, "description": "Seconds to wait before retrying."}),
        )),
        _ => None,
    };
    if let Some((name, schema)) = header {
        response["headers"] = json!({name: {"schema": schema}});
    }
    response
}

/// Status, type and title of every problem.
pub(crate) fn refusals() -> impl Iterator<Item = (u16, String, &'static str)> {
    Kind::ALL.into_iter().map(|kind| {
        let (_, status, title) = kind.definition();
        (status.as_u16(), kind.urn(), title)
    })
}

/// The response component for errors with this status.
fn component_of(status: u16) -> String {
    Kind::ALL
        .into_iter()
        .find(|kind| kind.definition().1.as_u16() == status)
        .unwrap_or(Kind::Internal)
        .component()
}

/// The error statuses that follow from an operation's rule, path, query and body.
fn follows_from(rule: Rule, operation: &Operation) -> Vec<u16> {
    let mut statuses = vec![500, 503];
    if rule != Rule::Open {
        // 400: an unknown query parameter, or two Authorization headers.
        statuses.extend([400, 401, 403, 429]);
    }
    if operation.path.contains('{') {
        // A path that is not UTF-8 is not found; clients resolve `.` and `..` to another path.
        statuses.extend([404, 405]);
    }
    if operation.has_query() {
        statuses.push(400);
    }
    if operation.has_body() {
        statuses.extend([400, 408, 413, 415, 422]);
    }
    if operation.takes_idempotency_key() {
        statuses.extend([400, 408, 409, 413]);
    }
    statuses
}

/// A schema component under the name that generated clients use for the type.
fn named<T: ToSchema>(schemas: &mut BTreeMap<String, Value>) -> Value {
    let name = T::name().into_owned();
    let mut parts = Vec::new();
    T::schemas(&mut parts);
    schemas.extend(parts.into_iter().map(|(name, schema)| (name, schema_of(schema))));
    schemas.insert(name.clone(), schema_of(T::schema()));
    json!({"$ref": format!("#/components/schemas/{name}")})
}

pub(crate) fn schema_of(schema: impl Serialize) -> Value {
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
