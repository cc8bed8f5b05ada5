//! One API operation: what is served, who may call it, and its documentation. `api/<noun>.rs` has the operations.

use std::collections::{BTreeMap, BTreeSet};

use axum::{
    handler::Handler,
    routing::{MethodFilter, MethodRouter, on},
};
use postrider_proto::{
    api::shapes,
    limits::{LIST_PAGE_DEFAULT, LIST_PAGE_MAX},
};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::{component_of, follows_from, named, schema_of};
use crate::{Shared, auth::Rule};

pub(crate) struct Operation {
    pub(crate) method: &'static str,
    pub(crate) path: &'static str,
    pub(crate) rule: Rule,
    pub(crate) handler: MethodRouter<Shared>,
    /// The response may be slightly stale: it needs nothing that only the primary has, and writes nothing.
    pub(crate) may_be_stale: bool,
    pub(super) schemas: BTreeMap<String, Value>,
    tag: &'static str,
    id: &'static str,
    summary: &'static str,
    detail: &'static str,
    query: Vec<Value>,
    body: Option<Value>,
    responses: Vec<(u16, Value)>,
    errors: Vec<u16>,
}

macro_rules! methods {
    ($($name:ident = $word:ident),+) => {
        impl Operation {$(
            pub(crate) fn $name<H: Handler<T, Shared>, T: 'static>(rule: Rule, path: &'static str, handler: H) -> Self {
                Self::new(stringify!($word), rule, path, on(MethodFilter::$word, handler))
            }
        )+}
    };
}
methods!(get = GET, put = PUT, post = POST, patch = PATCH, delete = DELETE);

impl Operation {
    fn new(method: &'static str, rule: Rule, path: &'static str, handler: MethodRouter<Shared>) -> Self {
        Self {
            method,
            path,
            rule,
            handler,
            may_be_stale: false,
            schemas: BTreeMap::new(),
            tag: "",
            id: "",
            summary: "",
            detail: "",
            query: Vec::new(),
            body: None,
            responses: Vec::new(),
            errors: Vec::new(),
        }
    }

    /// A GET that may be served from a replica.
    pub(crate) fn read<H: Handler<T, Shared>, T: 'static>(
        rule: Rule,
        path: &'static str,
        handler: H,
    ) -> Self {
        Self {
            may_be_stale: true,
            ..Self::get(rule, path, handler)
        }
    }

    /// The name in generated clients, and the title.
    pub(crate) fn named(mut self, id: &'static str, summary: &'static str) -> Self {
        (self.id, self.summary) = (id, summary);
        self
    }

    /// One of `TAGS`.
    pub(crate) fn in_group(mut self, tag: &'static str) -> Self {
        self.tag = tag;
        self
    }

    /// The description below the summary.
    pub(crate) fn describe(mut self, detail: &'static str) -> Self {
        self.detail = detail;
        self
    }

    /// A JSON body.
    pub(crate) fn accepts<T: ToSchema>(mut self) -> Self {
        let schema = named::<T>(&mut self.schemas);
        self.body = Some(body(schema, true));
        self
    }

    /// An optional JSON body.
    pub(crate) fn may_accept<T: ToSchema>(mut self) -> Self {
        let schema = named::<T>(&mut self.schemas);
        self.body = Some(body(schema, false));
        self
    }

    /// A JSON body whose schema is derived from that of `T`.
    pub(crate) fn accepts_part_of<T: ToSchema>(
        mut self,
        name: &str,
        change: impl FnOnce(&mut Value),
    ) -> Self {
        let from = T::name().into_owned();
        named::<T>(&mut self.schemas);
        let mut schema = self.schemas.remove(&from).unwrap_or_default();
        change(&mut schema);
        self.schemas.insert(name.to_owned(), schema);
        self.body = Some(body(
            json!({"$ref": format!("#/components/schemas/{name}")}),
            true,
        ));
        self
    }

    pub(crate) fn query(mut self, name: &str, schema: impl Into<Value>, description: &str) -> Self {
        self.query.push(json!({
            "name": name, "in": "query", "description": description, "schema": schema.into(),
        }));
        self
    }

    /// The filters `since` and `until`, by the time of the event.
    pub(crate) fn query_times(self) -> Self {
        let time = || json!({"type": "string", "format": "date-time"});
        self.query("since", time(), "Only events created at or after this time.")
            .query("until", time(), "Only events created before this time.")
    }

    /// A page, or with `format` all that match as a stream.
    pub(crate) fn returns_page_or_export<T: ToSchema>(self, description: &str, format: &str) -> Self {
        let formats = json!({"type": "string", "enum": ["json", "ndjson", "csv"]});
        let mut operation = self
            .query("format", formats, format)
            .returns_page::<T>(description);
        if let Some((_, response)) = operation.responses.last_mut() {
            for media in ["application/x-ndjson", "text/csv"] {
                response["content"][media] = json!({"schema": {"type": "string"}});
            }
        }
        operation
    }

    /// `limit` and `cursor`, and a page of `T` as the response.
    pub(crate) fn returns_page<T: ToSchema>(mut self, description: &str) -> Self {
        let limit =
            json!({"type": "integer", "minimum": 1, "maximum": LIST_PAGE_MAX, "default": LIST_PAGE_DEFAULT});
        let cursor = json!({"type": "string"});
        let item = named::<T>(&mut self.schemas);
        let name = format!("{}Page", T::name());
        self.schemas.insert(
            name.clone(),
            json!({
                "type": "object",
                "required": ["data", "next_cursor"],
                "properties": {
                    "data": {"type": "array", "items": item, "maxItems": LIST_PAGE_MAX},
                    "next_cursor": {
                        "type": ["string", "null"],
                        "description": "Pass it as `?cursor=` to get the next page; null on the last page.",
                    },
                },
            }),
        );
        self.query("limit", limit, "Maximum number of entries on the page.")
            .query("cursor", cursor, "The `next_cursor` of the previous page.")
            .returns_json(
                200,
                json!({"$ref": format!("#/components/schemas/{name}")}),
                description,
            )
    }

    pub(crate) fn returns<T: ToSchema>(mut self, status: u16, description: &str) -> Self {
        let schema = named::<T>(&mut self.schemas);
        self.returns_json(status, schema, description)
    }

    pub(crate) fn returns_json(self, status: u16, schema: Value, description: &str) -> Self {
        self.returns_in(status, "application/json", schema, description)
    }

    pub(crate) fn returns_in(mut self, status: u16, media: &str, schema: Value, description: &str) -> Self {
        let content = json!({media: {"schema": schema}});
        self.responses
            .push((status, json!({"description": description, "content": content})));
        self
    }

    pub(crate) fn returns_nothing(mut self, description: &str) -> Self {
        self.responses.push((204, json!({"description": description})));
        self
    }

    /// Errors that do not follow from the rule, the method, the path or the body.
    pub(crate) fn fails_with(mut self, statuses: &[u16]) -> Self {
        self.errors.extend(statuses);
        self
    }

    pub(crate) fn has_query(&self) -> bool {
        !self.query.is_empty()
    }

    pub(crate) fn has_body(&self) -> bool {
        self.body.is_some()
    }

    pub(crate) fn takes_idempotency_key(&self) -> bool {
        self.method == "POST" && self.path.starts_with("/v1/")
    }

    pub(crate) fn value(&self) -> Value {
        let mut parameters: Vec<Value> = self.path_parameters();
        parameters.extend(self.query.iter().cloned());
        let mut responses: BTreeMap<String, Value> = BTreeMap::new();
        let errors: BTreeSet<u16> = follows_from(self.rule, self)
            .into_iter()
            .chain(self.errors.iter().copied())
            .collect();
        for status in errors {
            let component = format!("#/components/responses/{}", component_of(status));
            responses.insert(status.to_string(), json!({"$ref": component}));
        }
        for (status, response) in &self.responses {
            let mut response = response.clone();
            if self.takes_idempotency_key() {
                response["headers"] = json!({"Idempotent-Replayed": {
                    "description": "`true` on a stored response to an earlier request with the same `Idempotency-Key`.",
                    "schema": {"type": "string", "const": "true"},
                }});
            }
            responses.insert(status.to_string(), response);
        }
        if self.takes_idempotency_key() {
            parameters.push(json!({
                "name": "Idempotency-Key", "in": "header",
                "description": "Makes the request idempotent: repeated with the same key and body, it is executed once.",
                "schema": schema_of(shapes::idempotency_key()),
            }));
        }
        let mut value = json!({
            "operationId": self.id,
            "tags": [self.tag],
            "summary": self.summary,
            "description": self.description(),
            "responses": responses,
            "security": match self.rule {
                Rule::Open => json!([]),
                _ => json!([{"key": []}]),
            },
        });
        if !parameters.is_empty() {
            value["parameters"] = parameters.into();
        }
        if let Some(body) = &self.body {
            value["requestBody"] = body.clone();
        }
        value
    }

    fn description(&self) -> String {
        let keys = match self.rule {
            Rule::Open => "No key required.",
            Rule::Emit => "Allowed for admin and producer keys.",
            Rule::Catalogue => "Allowed for admin and tenant keys.",
            Rule::Own => "Allowed for admin keys, and for tenant keys within their own tenant.",
            _ => "Allowed for admin keys.",
        };
        format!("{} {keys}", self.detail).trim().to_owned()
    }

    fn path_parameters(&self) -> Vec<Value> {
        self.path
            .split('/')
            .filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
            .map(|name| {
                let (schema, description) = path_parameter(name);
                json!({
                    "name": name, "in": "path", "required": true, "description": description, "schema": schema,
                })
            })
            .collect()
    }
}

fn body(schema: Value, required: bool) -> Value {
    json!({"required": required, "content": {"application/json": {"schema": schema}}})
}

/// Schema and description of a path parameter.
fn path_parameter(name: &str) -> (Value, &'static str) {
    match name {
        "tenant" => (schema_of(shapes::label()), "The tenant's id."),
        "type" => (schema_of(shapes::type_name()), "The event type's name."),
        "event" => (schema_of(shapes::event_id()), "The event's id."),
        "endpoint" => (json!({"type": "string"}), "The endpoint's id, `ep_…`."),
        "delivery" => (json!({"type": "string"}), "The delivery's id, `dlv_…`."),
        "listener" => (json!({"type": "string"}), "The listener's id, `lis_…`."),
        "key" => (json!({"type": "string"}), "The key's id, `key_…`."),
        "replay" => (json!({"type": "string"}), "The replay's id, `rpl_…`."),
        "erasure" => (json!({"type": "string"}), "The erasure's id, `era_…`."),
        _ => (json!({"type": "string"}), "The id."),
    }
}
