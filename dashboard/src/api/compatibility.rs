//! What a new version of a schema takes away from those who read the one before. Only told, never forbidden. Pure.
//! It knows the plain parts of a schema, `properties`, `required`, `type`, `enum` and `items`; it says nothing of others.

use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

const BREAKS_MAX: usize = 50;
const DEPTH_MAX: usize = 32;
const TYPES: [&str; 6] = ["null", "boolean", "object", "array", "number", "string"];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = CompatibilityChange)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Change {
    RemovedProperty,
    NewlyRequired,
    NarrowedType,
    NarrowedEnum,
}

/// One thing that was so before, at this place of the data.
#[derive(Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = CompatibilityBreak)]
pub(crate) struct Break {
    pub(crate) pointer: String,
    pub(super) change: Change,
    pub(crate) detail: String,
}

#[derive(Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = CompatibilityReport)]
pub(crate) struct Report {
    pub(super) version: String,
    /// The version it is compared with.
    pub(super) before: String,
    pub(super) breaks: Vec<Break>,
}

pub(crate) fn compare(before: &Value, after: &Value) -> Vec<Break> {
    let mut found = Vec::new();
    walk(before, after, "", 0, &mut found);
    found.truncate(BREAKS_MAX);
    found
}

fn walk(before: &Value, after: &Value, pointer: &str, depth: usize, found: &mut Vec<Break>) {
    if depth > DEPTH_MAX || found.len() >= BREAKS_MAX {
        return;
    }
    let mut add = |pointer: String, change, detail: String| {
        found.push(Break {
            pointer,
            change,
            detail,
        });
    };
    let (old_types, new_types) = (types(before), types(after));
    let lost: Vec<&str> = old_types.difference(&new_types).copied().collect();
    if !lost.is_empty() {
        add(
            pointer.to_owned(),
            Change::NarrowedType,
            format!("may no longer be {}", lost.join(", ")),
        );
    }
    if let Some(new) = after.get("enum").and_then(Value::as_array) {
        let old = before.get("enum").and_then(Value::as_array);
        if old.is_none_or(|old| old.iter().any(|value| !new.contains(value))) {
            let detail = "has fewer values to be one of".to_owned();
            add(pointer.to_owned(), Change::NarrowedEnum, detail);
        }
    }
    let properties = |schema: &Value| schema.get("properties").and_then(Value::as_object).cloned();
    let (old, new) = (
        properties(before).unwrap_or_default(),
        properties(after).unwrap_or_default(),
    );
    let required = |schema: &Value| -> BTreeSet<String> {
        let names = schema.get("required").and_then(Value::as_array);
        let names = names.into_iter().flatten().filter_map(Value::as_str);
        names.map(str::to_owned).collect()
    };
    for name in required(after).difference(&required(before)) {
        add(
            below(pointer, name),
            Change::NewlyRequired,
            "is required now".to_owned(),
        );
    }
    for name in old.keys().filter(|name| !new.contains_key(*name)) {
        let detail = "is no longer described".to_owned();
        add(below(pointer, name), Change::RemovedProperty, detail);
    }
    for (name, old) in &old {
        if let Some(new) = new.get(name) {
            walk(old, new, &below(pointer, name), depth + 1, found);
        }
    }
    if let (Some(old), Some(new)) = (before.get("items"), after.get("items")) {
        walk(old, new, &below(pointer, "*"), depth + 1, found);
    }
}

fn below(pointer: &str, name: &str) -> String {
    format!("{pointer}/{}", name.replace('~', "~0").replace('/', "~1"))
}

/// The types it may have. An integer is a number that is narrower; nothing said is everything.
fn types(schema: &Value) -> BTreeSet<&str> {
    let all = || TYPES.into_iter().chain(["integer"]).collect();
    let mut types: BTreeSet<&str> = match schema {
        Value::Bool(true) => return all(),
        Value::Bool(false) => return BTreeSet::new(),
        _ => match schema.get("type") {
            Some(Value::String(one)) => BTreeSet::from([one.as_str()]),
            Some(Value::Array(many)) => many.iter().filter_map(Value::as_str).collect(),
            _ => return all(),
        },
    };
    if types.contains("number") {
        types.insert("integer");
    }
    types
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn found(before: Value, after: Value) -> Vec<(String, Change)> {
        compare(&before, &after)
            .into_iter()
            .map(|one| (one.pointer, one.change))
            .collect()
    }

    #[test]
    fn what_breaks_is_named_by_its_place() {
        let before = json!({"type": "object", "properties": {
            "id": {"type": ["string", "null"]}, "gone": {}, "amount": {"type": "number"},
            "kind": {"enum": ["a", "b"]},
            "lines": {"items": {"properties": {"sku": {"type": "string"}}}},
        }});
        let after = json!({"type": "object", "required": ["id"], "properties": {
            "id": {"type": "string"}, "amount": {"type": "integer"}, "kind": {"enum": ["a"]},
            "lines": {"items": {"properties": {}}}, "new": {"type": "string"},
        }});
        let mut told = found(before.clone(), after);
        told.sort_by(|a, b| a.0.cmp(&b.0));
        let expected = [
            ("/amount", Change::NarrowedType),
            ("/gone", Change::RemovedProperty),
            ("/id", Change::NewlyRequired),
            ("/id", Change::NarrowedType),
            ("/kind", Change::NarrowedEnum),
            ("/lines/*/sku", Change::RemovedProperty),
        ];
        assert_eq!(
            told,
            expected.map(|(pointer, change)| (pointer.to_owned(), change))
        );
        assert!(found(before.clone(), before).is_empty());
    }

    #[test]
    fn what_is_added_or_widened_breaks_nothing() {
        let before = json!({"properties": {"a": {"type": "integer"}, "b": {"enum": [1]}}, "required": ["a"]});
        let after = json!({"properties": {"a": {"type": "number"}, "b": {"enum": [1, 2]}, "c": true}});
        assert!(found(before, after).is_empty());
        assert!(found(json!(true), json!({})).is_empty());
        assert_eq!(
            found(json!({}), json!(false)),
            [(String::new(), Change::NarrowedType)]
        );
    }
}
