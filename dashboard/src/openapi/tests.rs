use std::collections::BTreeSet;

use super::*;
use crate::routes::{self, Route};

const RENEW: &str = "cargo run -- openapi > docs/openapi.json";

/// Pages are for people; everything else is the API.
fn is_api(route: &Route) -> bool {
    route.path.starts_with("/v1/")
        || ["/healthz", "/readyz", "/metrics", "/openapi.json"].contains(&route.path)
}

#[tokio::test]
async fn each_route_of_the_api_is_described_with_its_rule_and_nothing_else_is() {
    let routes = routes::build(
        crate::auth::tests::app().await,
        None,
        crate::pages::live::Live::default(),
    )
    .1;
    let served: BTreeSet<_> = routes
        .iter()
        .filter(|route| is_api(route))
        .map(|route| (route.path, route.method, format!("{:?}", route.rule)))
        .collect();
    let described: BTreeSet<_> = calls::all()
        .map(|one| (one.path, one.method, format!("{:?}", one.rule)))
        .collect();
    let missing: Vec<_> = served.difference(&described).collect();
    let extra: Vec<_> = described.difference(&served).collect();
    assert!(
        missing.is_empty() && extra.is_empty(),
        "dashboard/src/openapi/calls.rs and routes.rs differ.\nNot described: {missing:#?}\nNot served: {extra:#?}"
    );
}

#[test]
fn the_document_in_docs_is_the_one_that_is_served() {
    let kept: Value = serde_json::from_str(include_str!("../../../docs/openapi.json")).unwrap_or_default();
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
    assert!(count > 30 && ids.len() == count, "{ids:?}");
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
    let guide = include_str!("../../../docs/api.md");
    let mut seen = BTreeSet::new();
    for kind in Kind::ALL {
        let (name, status, _) = kind.definition();
        assert!(seen.insert(name), "{name} is used twice");
        let row = format!("| `{name}` | {} |", status.as_u16());
        assert!(guide.contains(&row), "docs/api.md has no row for {name}");
    }
}
