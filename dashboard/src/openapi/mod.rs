//! The API's own description: OpenAPI 3.1, put together from the forms and answers that the handlers use (`shapes` has
//! what limits them) and from the list of calls in `calls`. A call that is not described there fails a test.
//! Invariant: what follows from a call's rule, method, path and body is said here, once, for all calls.

mod calls;
mod operation;
pub(crate) mod shapes;

use std::{collections::BTreeMap, sync::LazyLock};

use postrider_proto::limits;
use serde_json::{Map, Value, json};
use utoipa::{PartialSchema, ToSchema};

use crate::{
    auth::Rule,
    problem::{Fault, Kind},
};
use operation::Operation;

/// As it is served and as `docs/openapi.json` has it.
pub fn document() -> &'static str {
    static TEXT: LazyLock<String> =
        LazyLock::new(|| serde_json::to_string_pretty(value()).unwrap_or_default() + "\n");
    &TEXT
}

pub(crate) fn value() -> &'static Value {
    static VALUE: LazyLock<Value> = LazyLock::new(compose);
    &VALUE
}

/// The groups that calls are shown in, in this order.
pub(crate) const TAGS: [(&str, &str); 7] = [
    (
        "Events",
        "What happened, as producers say it and receivers get it.",
    ),
    (
        "Endpoints",
        "Where a tenant wants events, how they are signed, and whether the receiver is right.",
    ),
    (
        "Deliveries",
        "One event on its way to one endpoint, its attempts, and replays.",
    ),
    ("Event types", "The catalogue: names and versioned JSON Schemas."),
    ("Tenants", "The customers of the team that runs Postrider."),
    ("Administration", "Keys, and who did what."),
    ("Operation", "Health, figures, and this description."),
];

fn compose() -> Value {
    let mut schemas: BTreeMap<String, Value> = BTreeMap::new();
    let mut paths: BTreeMap<&str, Map<String, Value>> = BTreeMap::new();
    for operation in calls::all() {
        schemas.extend(operation.schemas.clone());
        paths
            .entry(operation.path)
            .or_default()
            .insert(operation.method.to_lowercase(), operation.value());
    }
    schemas.insert("Problem".to_owned(), problem());
    schemas.insert("Fault".to_owned(), shapes::value(Fault::schema()));
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
        "servers": [{"url": "/", "description": "Where this document came from"}],
        "tags": tags,
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": Kind::ALL.map(|kind| (kind.component(), refusal(kind))).into_iter().collect::<Map<_, _>>(),
            "securitySchemes": {"key": {
                "type": "http",
                "scheme": "bearer",
                "description": "An API key. Its role says what it may do: `admin` everything, `producer` emit only, \
                                `tenant` one tenant's own things.",
            }},
        },
    })
}

fn introduction() -> String {
    let kib = |bytes: usize| bytes / 1024;
    let limits = [
        format!(
            "an event's data: {} KiB, {} levels deep",
            kib(limits::EVENT_DATA_BYTES_MAX),
            limits::JSON_DEPTH_MAX
        ),
        format!(
            "a batch: {} events, {} KiB",
            limits::BATCH_EVENTS_MAX,
            kib(limits::BATCH_BYTES_MAX)
        ),
        format!("endpoints of a tenant: {}", limits::ENDPOINTS_PER_TENANT_MAX),
        format!("types of an endpoint: {}", limits::TYPES_PER_ENDPOINT_MAX),
        format!(
            "attempts of a delivery: {}; replays of a tenant that run at a time: {}",
            limits::ATTEMPTS_PER_DELIVERY_MAX,
            limits::REPLAYS_RUNNING_PER_TENANT_MAX
        ),
        format!(
            "custom headers: {} of {} bytes",
            limits::CUSTOM_HEADERS_MAX,
            limits::CUSTOM_HEADER_BYTES_MAX
        ),
        format!(
            "certificates and keys of an endpoint: {} bytes each",
            limits::TLS_PEM_BYTES_MAX
        ),
        format!(
            "a URL: {} bytes; a description: {} bytes",
            limits::URL_BYTES_MAX,
            limits::DESCRIPTION_BYTES_MAX
        ),
        format!("a page of a list: {}", limits::LIST_PAGE_MAX),
        format!(
            "an endpoint's answer: {} KiB read, {} KiB kept",
            kib(limits::ANSWER_READ_BYTES_MAX),
            kib(limits::ANSWER_KEPT_BYTES_MAX)
        ),
    ];
    format!(
        "JSON in and out, with `Authorization: Bearer KEY`. Refusals are RFC 9457 `application/problem+json`.\n\n\
         Lists are `{{\"data\":[…],\"next_cursor\":null|\"…\"}}`; ask on with `?cursor=`. A parameter or field that is \
         not described is refused.\n\n\
         Every POST takes an `Idempotency-Key`: a request that is sent again with the same key and body is done once, \
         and answered again with `Idempotent-Replayed: true` for 72 hours. Refusals are not kept.\n\n\
         A key may make 200 requests a second when it is a tenant's and 10,000 otherwise, unless the operator has set \
         other limits; more are refused with 429 and `Retry-After`.\n\n\
         Limits: {}.",
        limits.join("; ")
    )
}

impl Kind {
    const ALL: [Self; 18] = [
        Self::BadRequest,
        Self::Unauthorized,
        Self::Forbidden,
        Self::NotFound,
        Self::MethodNotAllowed,
        Self::RequestTimeout,
        Self::Conflict,
        Self::KeyReused,
        Self::KeyInProgress,
        Self::EventIdConflict,
        Self::TooLarge,
        Self::UnsupportedEncoding,
        Self::UnsupportedMediaType,
        Self::Invalid,
        Self::TooMany,
        Self::Internal,
        Self::Busy,
        Self::OutcomeUnknown,
    ];

    fn component(self) -> String {
        let (name, ..) = self.words();
        name.split('-')
            .map(|word| word[..1].to_uppercase() + &word[1..])
            .collect()
    }
}

fn problem() -> Value {
    let types: Vec<String> = Kind::ALL.iter().map(|kind| kind.urn()).collect();
    json!({
        "type": "object",
        "description": "Why a request was refused (RFC 9457).",
        "required": ["type", "title", "status", "detail"],
        "properties": {
            "type": {"type": "string", "enum": types},
            "title": {"type": "string", "description": "The same for every problem of this type."},
            "status": {"type": "integer", "format": "int32", "minimum": 400, "maximum": 599},
            "detail": {"type": "string", "description": "What was wrong this time, in a sentence."},
            "errors": {
                "type": "array",
                "description": "Each wrong part of the request, by its JSON pointer.",
                "items": {"$ref": "#/components/schemas/Fault"},
            },
            "event_id": {
                "type": "string",
                "description": "Of an outcome that is unknown: the event that may have been stored.",
            },
        },
    })
}

fn refusal(kind: Kind) -> Value {
    let (_, _, title) = kind.words();
    let mut response = json!({
        "description": format!("{title}."),
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    });
    let header = match kind {
        Kind::Unauthorized => Some(("WWW-Authenticate", json!({"type": "string"}))),
        Kind::Busy | Kind::TooMany | Kind::KeyInProgress => Some((
            "Retry-After",
            json!({"type": "integer", "minimum": 1, "description": "Seconds."}),
        )),
        _ => None,
    };
    if let Some((name, schema)) = header {
        response["headers"] = json!({name: {"schema": schema}});
    }
    response
}

/// Whether the call has parameters.
pub(crate) fn takes_query(method: &str, path: &str) -> bool {
    static WITH_QUERY: LazyLock<Vec<(&str, &str)>> = LazyLock::new(|| {
        let calls = calls::all().filter(Operation::has_query);
        calls.map(|call| (call.method, call.path)).collect()
    });
    WITH_QUERY.contains(&(method, path))
}

/// Status, type and title of everything that can be refused.
pub(crate) fn refusals() -> impl Iterator<Item = (u16, String, &'static str)> {
    Kind::ALL.into_iter().map(|kind| {
        let (_, status, title) = kind.words();
        (status.as_u16(), kind.urn(), title)
    })
}

/// The component for refusals of this status.
fn component_of(status: u16) -> String {
    Kind::ALL
        .into_iter()
        .find(|kind| kind.words().1.as_u16() == status)
        .unwrap_or(Kind::Internal)
        .component()
}

/// Everything a call can be refused with because of what it is, and the roles that may make it.
fn follows_from(rule: Rule, operation: &Operation) -> Vec<u16> {
    let mut statuses = vec![500, 503];
    if rule != Rule::Open {
        // 400: a parameter that the call does not have, or two keys.
        statuses.extend([400, 401, 403, 429]);
    }
    if operation.path.contains('{') {
        // A path that is not UTF-8 is not found; `.` and `..` in it make clients ask for another one.
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

/// A component by the name that generated clients give its type.
fn named<T: ToSchema>(schemas: &mut BTreeMap<String, Value>) -> Value {
    let name = T::name().into_owned();
    let mut parts = Vec::new();
    T::schemas(&mut parts);
    schemas.extend(
        parts
            .into_iter()
            .map(|(name, schema)| (name, shapes::value(schema))),
    );
    schemas.insert(name.clone(), shapes::value(T::schema()));
    json!({"$ref": format!("#/components/schemas/{name}")})
}

#[cfg(test)]
mod tests;
