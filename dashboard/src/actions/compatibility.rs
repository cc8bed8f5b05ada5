//! Finds what a new schema version breaks for consumers of the previous one. It only reports and never rejects. Pure.
//! Understands `properties`, `required`, `type`, `enum`, `const` and `items`, also behind `$ref` or `allOf`, and the
//! types and values that `anyOf` and `oneOf` allow. Other keywords are ignored.

use std::collections::{BTreeMap, BTreeSet};

use postrider_proto::{
    api::{Break, Change},
    json::pointer_part,
};
use postrider_sender::resolve_reference;
use serde_json::Value;

const BREAKS_MAX: usize = 50;
const DEPTH_MAX: usize = 32;
/// Schemas visited on each side.
const SCHEMAS_MAX: usize = 10_000;
const TYPES: [&str; 7] = [
    "null", "boolean", "object", "array", "integer", "number", "string",
];

pub(crate) fn compare(before: &Value, after: &Value) -> Vec<Break> {
    let mut comparison = Comparison {
        before: Side::of(before),
        after: Side::of(after),
        above: Vec::new(),
        found: Vec::new(),
    };
    comparison.compare_schemas(&[before], &[after], "");
    comparison.found.truncate(BREAKS_MAX);
    comparison.found
}

/// The schemas that apply to one location of the data.
type Here<'a> = Vec<&'a Value>;

struct Comparison<'a> {
    before: Side<'a>,
    after: Side<'a>,
    /// The locations on the path to this one. A recursive schema leads back to one of them.
    above: Vec<(Here<'a>, Here<'a>)>,
    found: Vec<Break>,
}

impl<'a> Comparison<'a> {
    fn compare_schemas(&mut self, before: &[&'a Value], after: &[&'a Value], pointer: &str) {
        let been_here =
            |(old, new): &(Here<'a>, Here<'a>)| is_same_place(old, before) && is_same_place(new, after);
        if self.above.len() > DEPTH_MAX || self.found.len() >= BREAKS_MAX || self.above.iter().any(been_here)
        {
            return;
        }
        let (old, new) = (self.before.join(before, 0), self.after.join(after, 0));
        if self.before.left == 0 || self.after.left == 0 {
            // The traversal was cut short: nothing may be reported as removed.
            return;
        }
        let lost: Vec<&str> = old.taken().difference(&new.types).copied().collect();
        if !lost.is_empty() {
            let detail = format!("may no longer be {}", lost.join(", "));
            self.add(pointer.to_owned(), Change::NarrowedType, detail);
        }
        if let Some(values) = &new.values
            && !old
                .values
                .is_some_and(|old| old.iter().all(|value| values.contains(value)))
        {
            let detail = "allows fewer values".to_owned();
            self.add(pointer.to_owned(), Change::NarrowedEnum, detail);
        }
        for name in new.required.difference(&old.required) {
            let detail = "is now required".to_owned();
            self.add(below(pointer, name), Change::NewlyRequired, detail);
        }
        for name in old
            .properties
            .keys()
            .filter(|name| !new.properties.contains_key(*name))
        {
            let detail = "was removed from the schema".to_owned();
            self.add(below(pointer, name), Change::RemovedProperty, detail);
        }
        self.above.push((before.to_vec(), after.to_vec()));
        for (name, old) in &old.properties {
            if let Some(new) = new.properties.get(name) {
                self.compare_schemas(old, new, &below(pointer, name));
            }
        }
        if !new.items.is_empty() {
            self.compare_schemas(&old.items, &new.items, &below(pointer, "*"));
        }
        self.above.pop();
    }

    fn add(&mut self, pointer: String, change: Change, detail: String) {
        self.found.push(Break {
            pointer,
            change,
            detail,
        });
    }
}

/// By identity, not by content.
fn is_same_place(a: &[&Value], b: &[&Value]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| std::ptr::eq(*a, *b))
}

/// All schemas of one location combined.
struct Joined<'a> {
    types: BTreeSet<&'static str>,
    /// None means any value.
    values: Option<Vec<&'a Value>>,
    properties: BTreeMap<&'a str, Here<'a>>,
    required: BTreeSet<&'a str>,
    items: Here<'a>,
}

impl Joined<'_> {
    /// The types a value can have here, derived from the listed values as well.
    fn taken(&self) -> BTreeSet<&'static str> {
        match &self.values {
            None => self.types.clone(),
            Some(values) => {
                let listed = values.iter().map(|value| type_of(value));
                listed.filter(|name| self.types.contains(name)).collect()
            }
        }
    }
}

/// One of the two schemas; references are resolved in it.
struct Side<'a> {
    root: &'a Value,
    /// Remaining visits: a schema with many recursive references would otherwise never end.
    left: usize,
}

impl<'a> Side<'a> {
    fn of(root: &'a Value) -> Self {
        Self {
            root,
            left: SCHEMAS_MAX,
        }
    }

    fn join(&mut self, schemas: &[&'a Value], depth: usize) -> Joined<'a> {
        let mut joined = Joined {
            types: TYPES.into(),
            values: None,
            properties: BTreeMap::new(),
            required: BTreeSet::new(),
            items: Vec::new(),
        };
        let mut open: Here<'a> = schemas.to_vec();
        let mut seen: Here<'a> = Vec::new();
        while let Some(schema) = open.pop() {
            if self.left == 0 || seen.iter().any(|one| std::ptr::eq(*one, schema)) {
                continue;
            }
            self.left -= 1;
            seen.push(schema);
            if schema == &Value::Bool(false) {
                joined.types.clear();
            }
            joined.add(schema);
            let references = ["$ref", "$dynamicRef"].into_iter();
            let references = references.filter_map(|keyword| schema.get(keyword)?.as_str());
            open.extend(references.filter_map(|text| resolve_reference(self.root, text)));
            open.extend(list(schema, "allOf"));
            for keyword in ["anyOf", "oneOf"] {
                let forms = list(schema, keyword);
                if !forms.is_empty() && depth < DEPTH_MAX {
                    let forms = forms.iter().map(|form| self.join(&[form], depth + 1)).collect();
                    joined.add_forms(forms);
                }
            }
        }
        joined
    }
}

impl<'a> Joined<'a> {
    /// Adds what this schema itself declares.
    fn add(&mut self, schema: &'a Value) {
        if let Some(types) = types(schema) {
            self.types.retain(|name| types.contains(name));
        }
        if let Some(values) = schema.get("enum").and_then(Value::as_array) {
            self.keep_values(values.iter().collect());
        }
        if let Some(value) = schema.get("const") {
            self.keep_values(vec![value]);
        }
        let properties = schema.get("properties").and_then(Value::as_object);
        for (name, property) in properties.into_iter().flatten() {
            self.properties.entry(name).or_default().push(property);
        }
        self.required
            .extend(list(schema, "required").iter().filter_map(Value::as_str));
        self.items.extend(schema.get("items"));
    }

    /// Any of these may apply: only their types and values are combined, not their properties.
    fn add_forms(&mut self, forms: Vec<Self>) {
        let taken: BTreeSet<&str> = forms.iter().flat_map(Self::taken).collect();
        self.types.retain(|name| taken.contains(name));
        let values: Option<Vec<Vec<&Value>>> = forms.into_iter().map(|form| form.values).collect();
        if let Some(values) = values {
            self.keep_values(values.concat());
        }
    }

    fn keep_values(&mut self, mut values: Vec<&'a Value>) {
        if let Some(before) = &self.values {
            values.retain(|value| before.contains(value));
        }
        self.values = Some(values);
    }
}

fn below(pointer: &str, name: &str) -> String {
    format!("{pointer}/{}", pointer_part(name))
}

fn list<'a>(schema: &'a Value, keyword: &str) -> &'a [Value] {
    schema
        .get(keyword)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

/// The declared types, if any. An integer is a narrower number.
fn types(schema: &Value) -> Option<BTreeSet<&str>> {
    let mut types: BTreeSet<&str> = match schema.get("type")? {
        Value::String(one) => BTreeSet::from([one.as_str()]),
        Value::Array(many) => many.iter().filter_map(Value::as_str).collect(),
        _ => return None,
    };
    if types.contains("number") {
        types.insert("integer");
    }
    Some(types)
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Object(_) => "object",
        Value::Array(_) => "array",
        Value::String(_) => "string",
        Value::Number(number) if number.as_f64().is_some_and(|n| n.fract() == 0.0) => "integer",
        Value::Number(_) => "number",
    }
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

    #[test]
    fn what_stands_behind_references_and_in_all_of_is_looked_at() {
        let before = json!({
            "$defs": {
                "base": {"properties": {"id": {"type": "string"}}, "required": ["id"]},
                "money": {"$anchor": "money", "properties": {"amount": {"type": "number"}, "currency": {}}},
            },
            "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"total": {"$ref": "#money"}}}],
            "properties": {"tax": {"$ref": "#/$defs/money"}, "lines": {"items": {"$ref": "#/$defs/money"}}},
        });
        // The same schema without references.
        let money = json!({"properties": {"amount": {"type": "number"}, "currency": {}}});
        let plain = json!({"required": ["id"], "properties": {
            "id": {"type": "string"}, "total": money, "tax": money, "lines": {"items": money},
        }});
        assert_eq!(found(before.clone(), plain.clone()), []);
        assert_eq!(found(plain, before.clone()), []);

        let mut after = before.clone();
        after["$defs"]["money"] = json!({"$anchor": "money", "required": ["amount"],
            "properties": {"amount": {"type": "integer"}}});
        after["$defs"]["base"] = json!({"properties": {"id": {"type": "string"}}});
        let mut told = found(before, after);
        told.sort_by_key(|(pointer, change)| (pointer.clone(), format!("{change:?}")));
        let each = |place: &str| {
            [
                (format!("{place}/amount"), Change::NarrowedType),
                (format!("{place}/amount"), Change::NewlyRequired),
                (format!("{place}/currency"), Change::RemovedProperty),
            ]
        };
        assert_eq!(told, [each("/lines/*"), each("/tax"), each("/total")].concat());
    }

    #[test]
    fn a_schema_that_refers_to_itself_is_walked_once() {
        let tree = |kind: &str| {
            json!({"$defs": {"node": {"properties": {"value": {"type": kind}, "left": {"$ref": "#/$defs/node"},
                "right": {"$ref": "#/$defs/node"}, "all": {"items": {"$ref": "#/$defs/node"}}}}}, "$ref": "#/$defs/node"})
        };
        let told = found(tree("number"), tree("integer"));
        assert!(
            told.contains(&("/value".to_owned(), Change::NarrowedType)),
            "{told:?}"
        );
        assert!(told.len() <= BREAKS_MAX);
        // Each schema refers to the next one twice: 2^40 paths.
        let many: serde_json::Map<String, Value> = (0..40)
            .map(|n| {
                let next = json!({"$ref": format!("#/$defs/d{}", n + 1)});
                (format!("d{n}"), json!({"properties": {"a": next, "b": next}}))
            })
            .collect();
        let wide = json!({"$defs": many, "$ref": "#/$defs/d0"});
        assert_eq!(found(wide.clone(), wide), []);
        let circle = json!({"allOf": [{"$ref": "#"}], "anyOf": [{"$ref": "#"}]});
        assert_eq!(found(circle.clone(), circle), []);
    }

    #[test]
    fn forms_and_listed_values_say_which_types_there_are() {
        let nullable = json!({"anyOf": [{"type": "string"}, {"type": "null"}]});
        assert_eq!(found(nullable.clone(), json!({"type": ["null", "string"]})), []);
        assert_eq!(
            found(nullable, json!({"type": "string"})),
            [(String::new(), Change::NarrowedType)]
        );
        let listed = json!({"enum": ["a", "b"]});
        assert_eq!(found(listed.clone(), json!({"type": "string"})), []);
        assert_eq!(
            found(listed.clone(), json!({"oneOf": [{"const": "b"}, {"const": "a"}]})),
            []
        );
        assert_eq!(
            found(listed, json!({"const": "a"})),
            [(String::new(), Change::NarrowedEnum)]
        );
    }
}
