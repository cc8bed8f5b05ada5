//! The catalogue of event types as OpenAPI 3.1 `webhooks`: what receivers make their types and stubs from.

use axum::{Json, extract::State};
use serde_json::{Map, Value, json};

use super::Answer;
use crate::{
    Shared,
    problem::Problem,
    tables::{event_types, schemas},
};

const TYPES_MAX: i64 = 1_000;
/// Together. What does not fit is refused and not cut off: half a catalogue would be taken for the whole.
const SCHEMA_BYTES_MAX: i64 = 16 * 1024 * 1024;

pub(crate) async fn show(State(app): State<Shared>) -> Answer<Value> {
    let types = event_types::list(&app.pool, "", TYPES_MAX + 1).await?;
    if types.len() as i64 > TYPES_MAX || schemas::bytes(&app.pool).await? > SCHEMA_BYTES_MAX {
        return Err(Problem::conflict(
            "The catalogue is too large for one document: read the types one by one.",
        ));
    }
    let mut webhooks = Map::new();
    let mut components = Map::new();
    for row in types {
        let mut versions = Vec::new();
        for schema in schemas::of_type(&app.pool, row.id).await? {
            let name = format!("{}.{}", row.name, schema.version);
            let value = match row.thin {
                true => thin(),
                false => serde_json::from_str(schema.schema.get()).unwrap_or(Value::Bool(true)),
            };
            components.insert(name.clone(), component(&row.name, &schema.version, value));
            versions.push((schema.version, name));
        }
        webhooks.insert(
            row.name.clone(),
            webhook(row.description.as_deref(), &row.name, &versions),
        );
    }
    Ok(Json(json!({
        "openapi": "3.1.0",
        "info": {"title": "Webhooks", "version": "1"},
        "jsonSchemaDialect": "https://json-schema.org/draft/2020-12/schema",
        "webhooks": webhooks,
        "components": {"schemas": components},
    })))
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
fn component(type_name: &str, version: &str, mut schema: Value) -> Value {
    if let Value::Object(map) = &mut schema {
        let id = format!("urn:postrider:schema:{type_name}:{version}");
        map.entry("$id").or_insert(Value::String(id));
    }
    schema
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
