use std::collections::BTreeSet;

use postrider_proto::limits;
use serde_json::json;

use super::*;
use crate::http::problem::Kind;

const RENEW: &str = "cargo run -- openapi > docs/openapi.json";

#[test]
fn the_document_in_docs_is_the_one_that_is_served() {
    let kept: Value = serde_json::from_str(include_str!("../../../../docs/openapi.json")).unwrap_or_default();
    assert!(
        kept == *value(),
        "docs/openapi.json is out of date. Regenerate it with:\n\n    {RENEW}\n"
    );
}

#[test]
fn every_reference_leads_somewhere_and_every_operation_has_its_own_id() {
    let mut references = Vec::new();
    let mut ids = Vec::new();
    walk(value(), &mut |key, found| {
        if let (Some(text), true) = (found.as_str(), key == "$ref") {
            references.push(text.to_owned());
        }
        if let (Some(text), true) = (found.as_str(), key == "operationId") {
            ids.push(text.to_owned());
        }
    });
    for reference in &references {
        let pointer = reference.trim_start_matches('#');
        assert!(value().pointer(pointer).is_some(), "{reference} does not resolve");
    }
    let count = ids.len();
    ids.sort();
    ids.dedup();
    assert!(count > 30 && ids.len() == count && !ids[0].is_empty(), "{ids:?}");
}

/// An unused component becomes an unused type in generated clients.
#[test]
fn every_schema_is_used() {
    let text = value().to_string();
    for name in value()["components"]["schemas"]
        .as_object()
        .expect("schemas")
        .keys()
    {
        let reference = format!("\"#/components/schemas/{name}\"");
        assert!(text.contains(&reference), "{name} is not used");
    }
}

#[test]
fn limits_stand_in_the_document() {
    let event = &value()["components"]["schemas"]["NewEvent"];
    assert_eq!(event["properties"]["id"]["maxLength"], limits::EVENT_ID_CHARS_MAX);
    assert_eq!(event["additionalProperties"], false);
    assert_eq!(event["required"], json!(["type", "data"]));
    let batch = &value()["components"]["schemas"]["NewEvents"];
    assert_eq!(
        batch["properties"]["events"]["maxItems"],
        limits::BATCH_EVENTS_MAX
    );
    assert_eq!(
        value()["components"]["schemas"]["NewEndpoint"]["required"],
        json!(["url"])
    );
}

fn walk(value: &Value, see: &mut impl FnMut(&str, &Value)) {
    match value {
        Value::Object(map) => {
            for (key, inner) in map {
                see(key, inner);
                walk(inner, see);
            }
        }
        Value::Array(list) => list.iter().for_each(|inner| walk(inner, see)),
        _ => {}
    }
}

#[test]
fn every_problem_type_is_unique_and_documented() {
    let guide = include_str!("../../../../docs/api.md");
    let mut seen = BTreeSet::new();
    for kind in Kind::ALL {
        let (name, status, _) = kind.definition();
        assert!(seen.insert(name), "{name} is used twice");
        let row = format!("| `{name}` | {} |", status.as_u16());
        assert!(guide.contains(&row), "docs/api.md has no row for {name}");
    }
}
