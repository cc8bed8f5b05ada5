//! Builder for one API operation, used by `calls`.

use std::collections::{BTreeMap, BTreeSet};

use postrider_proto::limits::{LIST_PAGE_DEFAULT, LIST_PAGE_MAX};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::{component_of, follows_from, named};
use crate::{auth::Rule, http::shapes};

pub(super) struct Operation {
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    pub(super) rule: Rule,
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
            pub(super) fn $name(rule: Rule, path: &'static str, id: &'static str, summary: &'static str) -> Self {
                Self::new(stringify!($word), rule, path, id, summary)
            }
        )+}
    };
}
methods!(get = GET, put = PUT, post = POST, patch = PATCH, delete = DELETE);

impl Operation {
    fn new(
        method: &'static str,
        rule: Rule,
        path: &'static str,
        id: &'static str,
        summary: &'static str,
    ) -> Self {
        Self {
            method,
            path,
            rule,
            tag: "",
            schemas: BTreeMap::new(),
            id,
            summary,
            detail: "",
            query: Vec::new(),
            body: None,
            responses: Vec::new(),
            errors: Vec::new(),
        }
    }

    /// One of `TAGS`.
    pub(super) fn in_group(mut self, tag: &'static str) -> Self {
        self.tag = tag;
        self
    }

    /// The description below the summary.
    pub(super) fn describe(mut self, detail: &'static str) -> Self {
        self.detail = detail;
        self
    }

    /// A JSON body.
    pub(super) fn accepts<T: ToSchema>(mut self) -> Self {
        let schema = named::<T>(&mut self.schemas);
        self.body = Some(body(schema, true));
        self
    }

    /// An optional JSON body.
    pub(super) fn may_accept<T: ToSchema>(mut self) -> Self {
        let schema = named::<T>(&mut self.schemas);
        self.body = Some(body(schema, false));
        self
    }

    /// A JSON body whose schema is derived from that of `T`.
    pub(super) fn accepts_part_of<T: ToSchema>(
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

    pub(super) fn query(mut self, name: &str, schema: impl Into<Value>, description: &str) -> Self {
        self.query.push(json!({
            "name": name, "in": "query", "description": description, "schema": schema.into(),
        }));
        self
    }

    /// `limit` and `cursor`, and a page of `T` as the response.
    pub(super) fn returns_page<T: ToSchema>(mut self, description: &str) -> Self {
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

    pub(super) fn returns<T: ToSchema>(mut self, status: u16, description: &str) -> Self {
        let schema = named::<T>(&mut self.schemas);
        self.returns_json(status, schema, description)
    }

    pub(super) fn returns_json(self, status: u16, schema: Value, description: &str) -> Self {
        self.returns_in(status, "application/json", schema, description)
    }

    pub(super) fn returns_in(mut self, status: u16, media: &str, schema: Value, description: &str) -> Self {
        let content = json!({media: {"schema": schema}});
        self.responses
            .push((status, json!({"description": description, "content": content})));
        self
    }

    /// The same response in another media type.
    pub(super) fn or_in(mut self, media: &str, schema: Value) -> Self {
        if let Some((_, response)) = self.responses.last_mut() {
            response["content"][media] = json!({"schema": schema});
        }
        self
    }

    pub(super) fn returns_nothing(mut self, description: &str) -> Self {
        self.responses.push((204, json!({"description": description})));
        self
    }

    /// Errors that do not follow from the rule, the method, the path or the body.
    pub(super) fn fails_with(mut self, statuses: &[u16]) -> Self {
        self.errors.extend(statuses);
        self
    }

    pub(super) fn has_query(&self) -> bool {
        !self.query.is_empty()
    }

    pub(super) fn has_body(&self) -> bool {
        self.body.is_some()
    }

    pub(super) fn takes_idempotency_key(&self) -> bool {
        self.method == "POST" && self.path.starts_with("/v1/")
    }

    pub(super) fn value(&self) -> Value {
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
                "schema": shapes::value(shapes::idempotency_key()),
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
                let (schema, description) = shapes::path_parameter(name);
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
