//! The API reference as a page, rendered once from the OpenAPI document. It needs no key, no script and no external
//! resources.

use std::sync::LazyLock;

use askama::Template;
use axum::{
    http::header,
    response::{Html, IntoResponse, Response},
};
use serde_json::Value;

use super::Markup;
use crate::{api::description, openapi};

#[derive(Template)]
#[template(path = "docs.html")]
struct Docs {
    version: String,
    introduction: Vec<String>,
    groups: Vec<Group>,
    schemas: Vec<Shape>,
    errors: Vec<ErrorType>,
}

struct Group {
    name: String,
    anchor: String,
    description: String,
    calls: Vec<Call>,
}

struct Call {
    id: String,
    method: String,
    path: String,
    summary: String,
    description: String,
    parameters: Vec<Field>,
    body: Option<Kind>,
    responses: Vec<CallResponse>,
    error_statuses: Vec<String>,
}

struct CallResponse {
    status: String,
    description: String,
    kind: Option<Kind>,
}

/// A type: either a schema with its own section on the page, or a plain JSON type.
struct Kind {
    name: String,
    link: Option<String>,
}

struct Field {
    name: String,
    place: String,
    required: bool,
    kind: Kind,
    limits: String,
    description: String,
}

struct Shape {
    name: String,
    description: String,
    fields: Vec<Field>,
}

struct ErrorType {
    status: String,
    urn: String,
    title: String,
}

pub(crate) async fn show() -> Response {
    static PAGE: LazyLock<String> = LazyLock::new(|| {
        page(description::value()).render().unwrap_or_else(|error| {
            tracing::error!(%error, "failed to render the API reference");
            String::new()
        })
    });
    let headers = [(header::CACHE_CONTROL, "public, max-age=300")];
    (headers, Html(PAGE.as_str())).into_response()
}

/// Text in which `backticks` mark code.
#[derive(Template)]
#[template(
    ext = "html",
    source = "{% for part in parts %}{% if loop.index0 % 2 == 1 %}<code>{{ part }}</code>{% else %}{{ part }}{% endif %}{% endfor %}"
)]
struct Prose<'a> {
    parts: Vec<&'a str>,
}

/// For the template.
fn prose(text: &str) -> Markup {
    let parts: Vec<&str> = text.split('`').collect();
    // An odd number of backticks marks nothing.
    let parts = if parts.len() % 2 == 1 { parts } else { vec![text] };
    Markup::of_part(&Prose { parts })
}

fn page(document: &Value) -> Docs {
    let groups = openapi::TAGS
        .iter()
        .map(|(name, description)| Group {
            name: (*name).to_owned(),
            anchor: name.to_lowercase().replace(' ', "-"),
            description: (*description).to_owned(),
            calls: calls(document, name),
        })
        .collect();
    let components = &document["components"];
    let schemas = entries(&components["schemas"])
        .map(|(name, schema)| Shape {
            name: name.clone(),
            description: text(&schema["description"]),
            fields: fields(schema),
        })
        .collect();
    Docs {
        version: text(&document["info"]["version"]),
        introduction: text(&document["info"]["description"])
            .split("\n\n")
            .map(str::to_owned)
            .collect(),
        groups,
        schemas,
        errors: openapi::refusals()
            .map(|(status, urn, title)| ErrorType {
                status: status.to_string(),
                urn,
                title: title.to_owned(),
            })
            .collect(),
    }
}

fn calls(document: &Value, tag: &str) -> Vec<Call> {
    entries(&document["paths"])
        .flat_map(|(path, methods)| entries(methods).map(move |(method, call)| (path, method, call)))
        .filter(|(_, _, call)| call["tags"][0] == tag)
        .map(|(path, method, call)| {
            let (errors, successes): (Vec<_>, Vec<_>) =
                entries(&call["responses"]).partition(|(_, response)| response.get("$ref").is_some());
            Call {
                id: text(&call["operationId"]),
                method: method.to_uppercase(),
                path: path.clone(),
                summary: text(&call["summary"]),
                description: text(&call["description"]),
                parameters: list(&call["parameters"]).map(parameter).collect(),
                body: call["requestBody"]["content"]
                    .get("application/json")
                    .map(|content| kind(&content["schema"])),
                responses: successes
                    .into_iter()
                    .map(|(status, response)| CallResponse {
                        status: status.clone(),
                        description: text(&response["description"]),
                        kind: entries(&response["content"])
                            .next()
                            .map(|(_, content)| kind(&content["schema"])),
                    })
                    .collect(),
                error_statuses: errors.into_iter().map(|(status, _)| status.clone()).collect(),
            }
        })
        .collect()
}

fn parameter(value: &Value) -> Field {
    Field {
        name: text(&value["name"]),
        place: text(&value["in"]),
        required: value["required"] == true,
        kind: kind(&value["schema"]),
        limits: limits(&value["schema"]),
        description: text(&value["description"]),
    }
}

/// The fields of an object, including those of the objects it combines with `allOf`.
fn fields(schema: &Value) -> Vec<Field> {
    let required: Vec<&str> = list(&schema["required"]).filter_map(Value::as_str).collect();
    let own = entries(&schema["properties"]).map(|(name, property)| Field {
        name: name.clone(),
        place: String::new(),
        required: required.contains(&name.as_str()),
        kind: kind(property),
        limits: limits(property),
        description: text(&property["description"]),
    });
    let parts = list(&schema["allOf"]).flat_map(|part| match part.get("$ref") {
        Some(_) => vec![Field {
            name: "…".to_owned(),
            place: String::new(),
            required: true,
            kind: kind(part),
            limits: String::new(),
            description: "plus all fields of this object".to_owned(),
        }],
        None => fields(part),
    });
    own.chain(parts).collect()
}

fn kind(schema: &Value) -> Kind {
    if let Some(name) = schema["$ref"].as_str().and_then(|path| path.rsplit('/').next()) {
        return Kind {
            name: name.to_owned(),
            link: Some(format!("schema-{name}")),
        };
    }
    if let Some(one) = list(&schema["oneOf"]).find(|one| one.get("$ref").is_some()) {
        let mut found = kind(one);
        found.name.push_str(" or null");
        return found;
    }
    if let Some(items) = schema.get("items") {
        let mut found = kind(items);
        found.name = format!("array of {}", found.name);
        return found;
    }
    let name = match &schema["type"] {
        Value::String(one) => one.clone(),
        Value::Array(many) => many
            .iter()
            .filter_map(Value::as_str)
            .collect::<Vec<_>>()
            .join(" or "),
        _ => "any JSON value".to_owned(),
    };
    Kind { name, link: None }
}

fn limits(schema: &Value) -> String {
    let mut found = Vec::new();
    if let Some(values) = schema["enum"].as_array() {
        let values: Vec<String> = values
            .iter()
            .map(|value| value.to_string().replace('"', ""))
            .collect();
        found.push(values.join(", "));
    }
    for (key, label) in [
        ("minimum", "min"),
        ("maximum", "max"),
        ("minLength", "min length"),
        ("maxLength", "max length"),
        ("maxItems", "max items"),
        ("maxProperties", "max properties"),
        ("default", "default"),
    ] {
        if let Some(value) = schema.get(key).filter(|value| value.is_number()) {
            found.push(format!("{label} {value}"));
        }
    }
    found.extend(schema["pattern"].as_str().map(str::to_owned));
    found.join(" · ")
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn entries(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backticks_mark_code_and_text_stays_text() {
        assert_eq!(prose("a `b` <c>").0, "a <code>b</code> &#60;c&#62;");
        assert_eq!(prose("a `b").0, "a `b");
        let html = page(description::value()).render().expect("a page");
        assert!(!html.contains('`'), "every mark is a pair");
    }

    #[test]
    fn the_page_lists_every_call_and_has_no_broken_links() {
        let html = page(description::value()).render().expect("a page");
        for (path, _) in entries(&description::value()["paths"]) {
            assert!(html.contains(&path.replace('"', "&#34;")), "{path}");
        }
        for link in html
            .split("href=\"#")
            .skip(1)
            .filter_map(|rest| rest.split('"').next())
        {
            assert!(html.contains(&format!("id=\"{link}\"")), "#{link} is broken");
        }
        assert!(!html.contains("<script") && !html.contains("style=\""));
    }
}
