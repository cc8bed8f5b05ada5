//! The catalogue of event types as OpenAPI 3.1 `webhooks`: what receivers make their types and stubs from.

use std::collections::BTreeMap;

use axum::{Json, extract::State};
use serde::{Serialize, de::IgnoredAny};
use serde_json::{Value, json, value::RawValue};

use super::Answer;
use crate::{
    Shared,
    problem::{Kind, Problem},
    tables::{event_types, schemas},
};

const TYPES_MAX: i64 = 1_000;
/// Together. What does not fit is refused and not cut off: half a catalogue would be taken for the whole.
const SCHEMA_BYTES_MAX: i64 = 16 * 1024 * 1024;

pub(crate) async fn show(State(app): State<Shared>) -> Answer<Document> {
    let types = event_types::list(&app.pool, "", TYPES_MAX + 1).await?;
    if types.len() as i64 > TYPES_MAX || schemas::bytes(&app.pool).await? > SCHEMA_BYTES_MAX {
        return Err(Problem::conflict(
            "The catalogue is too large for one document: read the types one by one.",
        ));
    }
    let mut webhooks = BTreeMap::new();
    let mut components = BTreeMap::new();
    for row in types {
        let mut versions = Vec::new();
        for schema in schemas::of_type(&app.pool, row.id).await? {
            let name = format!("{}.{}", row.name, schema.version);
            let text = match row.thin {
                true => thin().to_string(),
                false => schema.schema.0.get().to_owned(),
            };
            components.insert(name.clone(), component(&row.name, &schema.version, text)?);
            versions.push((schema.version, name));
        }
        webhooks.insert(
            row.name.clone(),
            webhook(row.description.as_deref(), &row.name, &versions),
        );
    }
    Ok(Json(Document {
        openapi: "3.1.0",
        info: json!({"title": "Webhooks", "version": "1"}),
        dialect: "https://json-schema.org/draft/2020-12/schema",
        webhooks,
        components: Components { schemas: components },
    }))
}

#[derive(Serialize)]
pub(crate) struct Document {
    openapi: &'static str,
    info: Value,
    #[serde(rename = "jsonSchemaDialect")]
    dialect: &'static str,
    webhooks: BTreeMap<String, Value>,
    components: Components,
}

#[derive(Serialize)]
struct Components {
    /// As they were written: a value would shorten long numbers.
    schemas: BTreeMap<String, Box<RawValue>>,
}

/// What the body of a thin type carries, whatever its data is.
fn thin() -> Value {
    let word = json!({"type": ["string", "number"]});
    json!({
        "type": "object",
        "properties": {"object": word, "id": word, "type": word},
        "additionalProperties": false,
    })
}

/// With an id of its own, so that its references are looked for inside it and not in the whole document.
fn component(type_name: &str, version: &str, schema: String) -> Result<Box<RawValue>, Problem> {
    let members: Option<BTreeMap<String, IgnoredAny>> = serde_json::from_str(&schema).ok();
    let text = match (members, schema.trim_start().strip_prefix('{')) {
        (Some(members), Some(rest)) if !members.contains_key("$id") => {
            // Neither name needs to be escaped.
            let id = format!("{{\"$id\":\"urn:postrider:schema:{type_name}:{version}\"");
            let comma = if members.is_empty() { "" } else { "," };
            format!("{id}{comma}{rest}")
        }
        _ => schema,
    };
    RawValue::from_string(text).map_err(|error| {
        tracing::error!(%error, type_name, version, "a stored schema can't be read");
        Problem::new(Kind::Internal, "It has been logged.")
    })
}

fn webhook(description: Option<&str>, type_name: &str, versions: &[(String, String)]) -> Value {
    let body: Vec<Value> = versions
        .iter()
        .map(|(version, component)| {
            json!({
                "type": "object",
                "required": ["id", "type", "created_at", "api_version", "data"],
                "properties": {
                    "id": {"type": "string"},
                    "type": {"const": type_name},
                    "created_at": {"type": "string", "format": "date-time"},
                    "api_version": {"const": version},
                    "sequence": {"type": "integer", "minimum": 1},
                    "data": {"$ref": format!("#/components/schemas/{component}")},
                },
            })
        })
        .collect();
    json!({"post": {
        "summary": description.unwrap_or(type_name),
        "requestBody": {"required": true, "content": {"application/json": {"schema": {"oneOf": body}}}},
        "responses": {"2XX": {"description": "Taken. Everything else is tried again."}},
    }})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_component_gets_an_id_and_keeps_its_text() {
        let made = |schema: &str| {
            let made = component("a.b", "v1", schema.to_owned()).expect("a component");
            made.get().to_owned()
        };
        assert_eq!(
            made(" { } "),
            r#"{"$id":"urn:postrider:schema:a.b:v1" } "#.trim_end()
        );
        assert_eq!(
            made(r#"{"maximum":12345678901234567890123.0}"#),
            r#"{"$id":"urn:postrider:schema:a.b:v1","maximum":12345678901234567890123.0}"#
        );
        assert_eq!(made(r#"{"$id":"urn:own"}"#), r#"{"$id":"urn:own"}"#);
        assert_eq!(made("true"), "true");
    }
}
