//! The event type catalogue as OpenAPI 3.1 `webhooks`, from which receivers generate types and stubs.

use std::collections::BTreeMap;

use axum::{Json, extract::State};
use postrider_proto::api::shapes;
use serde::{Serialize, de::IgnoredAny};
use serde_json::{Value, json, value::RawValue};

use super::ApiResult;
use crate::{
    Shared,
    auth::Rule::Catalogue,
    http::problem::Problem,
    openapi::{Operation, schema_of},
    tables::{event_types, schemas},
};

const TYPES_MAX: i64 = 1_000;
/// Total size of all schemas. A larger catalogue is rejected, not truncated: half of it could be mistaken for the
/// whole.
const SCHEMA_BYTES_MAX: i64 = 16 * 1024 * 1024;

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get(Catalogue, "/v1/catalogue/openapi.json", show)
            .named("getCatalogue", "Retrieve the catalogue as OpenAPI webhooks")
            .returns_json(
                200,
                schema_of(shapes::object()),
                "An OpenAPI 3.1 document with one webhook per event type.",
            )
            .fails_with(&[409]),
    ]
}

async fn show(State(app): State<Shared>) -> ApiResult<Document> {
    let types = event_types::list(&app.pool, "", TYPES_MAX + 1).await?;
    if types.len() as i64 > TYPES_MAX || schemas::bytes(&app.pool).await? > SCHEMA_BYTES_MAX {
        return Err(Problem::limit_reached(
            "The catalogue is too large for one document. Fetch the event types one by one instead.",
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
struct Document {
    openapi: &'static str,
    info: Value,
    #[serde(rename = "jsonSchemaDialect")]
    dialect: &'static str,
    webhooks: BTreeMap<String, Value>,
    components: Components,
}

#[derive(Serialize)]
struct Components {
    /// As raw text: parsing would shorten long numbers.
    schemas: BTreeMap<String, Box<RawValue>>,
}

/// The data of a thin event, regardless of the type's schema.
fn thin() -> Value {
    let word = json!({"type": ["string", "number"]});
    json!({
        "type": "object",
        "properties": {"object": word, "id": word, "type": word},
        "additionalProperties": false,
    })
}

/// Has an `$id` of its own, so that references resolve inside the schema and not in the whole document.
fn component(type_name: &str, version: &str, schema: String) -> Result<Box<RawValue>, Problem> {
    let members: Option<BTreeMap<String, IgnoredAny>> = serde_json::from_str(&schema).ok();
    let text = match (members, schema.trim_start().strip_prefix('{')) {
        (Some(members), Some(rest)) if !members.contains_key("$id") => {
            // Neither name needs escaping.
            let id = format!("{{\"$id\":\"urn:postrider:schema:{type_name}:{version}\"");
            let comma = if members.is_empty() { "" } else { "," };
            format!("{id}{comma}{rest}")
        }
        _ => schema,
    };
    RawValue::from_string(text).map_err(|error| {
        let message = format!("stored schema of {type_name} {version} is not valid JSON");
        Problem::internal(&message, error)
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
        "responses": {"2XX": {"description": "Accepted. Any other response is retried."}},
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
