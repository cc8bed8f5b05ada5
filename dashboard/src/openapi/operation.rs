//! One call of the API, as `calls` tells of it.

use std::collections::{BTreeMap, BTreeSet};

use postrider_proto::limits::{LIST_PAGE_DEFAULT, LIST_PAGE_MAX};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::{component_of, follows_from, named, shapes};
use crate::auth::Rule;

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
    answers: Vec<(u16, Value)>,
    refusals: Vec<u16>,
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
            answers: Vec::new(),
            refusals: Vec::new(),
        }
    }

    /// One of `TAGS`.
    pub(super) fn in_group(mut self, tag: &'static str) -> Self {
        self.tag = tag;
        self
    }

    /// More than the summary says.
    pub(super) fn tells(mut self, detail: &'static str) -> Self {
        self.detail = detail;
        self
    }

    /// A JSON body.
    pub(super) fn takes<T: ToSchema>(mut self) -> Self {
        let schema = named::<T>(&mut self.schemas);
        self.body = Some(body(schema, true));
        self
    }

    /// A JSON body that may be left out.
    pub(super) fn may_take<T: ToSchema>(mut self) -> Self {
        let schema = named::<T>(&mut self.schemas);
        self.body = Some(body(schema, false));
        self
    }

    /// A JSON body whose schema is made from that of `T`.
    pub(super) fn takes_some_of<T: ToSchema>(mut self, name: &str, change: impl FnOnce(&mut Value)) -> Self {
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

    /// `limit` and `cursor`, and a page of `T` as the answer.
    pub(super) fn answers_page<T: ToSchema>(mut self, words: &str) -> Self {
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
                        "description": "Ask on with `?cursor=` and this; null on the last page.",
                    },
                },
            }),
        );
        self.query("limit", limit, "Entries of one page.")
            .query("cursor", cursor, "The `next_cursor` of the page before.")
            .answers_json(
                200,
                json!({"$ref": format!("#/components/schemas/{name}")}),
                words,
            )
    }

    pub(super) fn answers<T: ToSchema>(mut self, status: u16, words: &str) -> Self {
        let schema = named::<T>(&mut self.schemas);
        self.answers_json(status, schema, words)
    }

    pub(super) fn answers_json(self, status: u16, schema: Value, words: &str) -> Self {
        self.answers_in(status, "application/json", schema, words)
    }

    pub(super) fn answers_in(mut self, status: u16, media: &str, schema: Value, words: &str) -> Self {
        let content = json!({media: {"schema": schema}});
        self.answers
            .push((status, json!({"description": words, "content": content})));
        self
    }

    /// The same status in another form, for those who ask for it.
    pub(super) fn or_in(mut self, media: &str, schema: Value) -> Self {
        if let Some((_, answer)) = self.answers.last_mut() {
            answer["content"][media] = json!({"schema": schema});
        }
        self
    }

    pub(super) fn answers_nothing(mut self, words: &str) -> Self {
        self.answers.push((204, json!({"description": words})));
        self
    }

    /// Refusals that do not follow from the rule, the method, the path or the body.
    pub(super) fn refuses(mut self, statuses: &[u16]) -> Self {
        self.refusals.extend(statuses);
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
        let refused: BTreeSet<u16> = follows_from(self.rule, self)
            .into_iter()
            .chain(self.refusals.iter().copied())
            .collect();
        for status in refused {
            let component = format!("#/components/responses/{}", component_of(status));
            responses.insert(status.to_string(), json!({"$ref": component}));
        }
        for (status, answer) in &self.answers {
            let mut answer = answer.clone();
            if self.takes_idempotency_key() {
                answer["headers"] = json!({"Idempotent-Replayed": {
                    "description": "`true` on an answer that was given before to the same `Idempotency-Key`.",
                    "schema": {"type": "string", "const": "true"},
                }});
            }
            responses.insert(status.to_string(), answer);
        }
        if self.takes_idempotency_key() {
            parameters.push(json!({
                "name": "Idempotency-Key", "in": "header",
                "description": "A request that is sent again with the same key and body is done once.",
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
            Rule::Open => "Needs no key.",
            Rule::Emit => "Keys: admin, producer.",
            Rule::Catalogue => "Keys: admin, tenant.",
            Rule::Own => "Keys: admin; tenant for its own.",
            _ => "Keys: admin.",
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
