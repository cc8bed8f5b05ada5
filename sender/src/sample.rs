//! Generates sample data from a JSON Schema, for test events and for trying out an emit. Pure.
//! Invariant: bounded in depth and size, deterministic. `sample` returns only data that is valid against the schema.

use regex_syntax::hir::{Class, Hir, HirKind};
use serde_json::{Map, Number, Value};

use crate::{
    reference::resolve,
    schema::{Schema, Violation},
};

const DEPTH_MAX: usize = 12;
const VALUES_MAX: usize = 2_000;
const ITEMS_MAX: u64 = 50;
const TEXT_CHARS_MAX: u64 = 4_096;

/// The text of a JSON object that matches the schema, or why the generated one does not.
pub fn sample(schema: &Value) -> Result<String, Vec<Violation>> {
    let compiled = Schema::compile(schema)?;
    let text = approximate_sample(schema);
    match compiled.violations(&text) {
        wrong if wrong.is_empty() => Ok(text),
        wrong => Err(wrong),
    }
}

/// The same without validation, for display: it may violate the schema.
pub fn approximate_sample(schema: &Value) -> String {
    let mut maker = Maker {
        root: schema,
        left: VALUES_MAX,
    };
    match maker.value(schema, "", 0) {
        made @ Value::Object(_) => made.to_string(),
        _ => "{}".to_owned(),
    }
}

struct Maker<'a> {
    root: &'a Value,
    /// Values that may still be generated.
    left: usize,
}

impl Maker<'_> {
    fn value(&mut self, schema: &Value, name: &str, depth: usize) -> Value {
        if depth > DEPTH_MAX || self.left == 0 {
            return Value::Null;
        }
        self.left -= 1;
        let schema = self.joined(schema, 0);
        let given = [
            schema.get("const"),
            schema.get("example"),
            schema.get("examples").and_then(|examples| examples.get(0)),
            schema.get("default"),
            schema.get("enum").and_then(|values| values.get(0)),
        ];
        if let Some(given) = given.into_iter().flatten().next() {
            return given.clone();
        }
        match kind(&schema, depth) {
            "object" => self.object(&schema, depth),
            "array" => self.array(&schema, name, depth),
            "string" => Value::String(text(&schema, name)),
            "integer" => number(&schema, true),
            "number" => number(&schema, false),
            "boolean" => Value::Bool(true),
            _ => Value::Null,
        }
    }

    /// Merges the schema with its references, all of `allOf`, and the first of `anyOf` and `oneOf`.
    fn joined(&self, schema: &Value, depth: usize) -> Map<String, Value> {
        let mut all = schema.as_object().cloned().unwrap_or_default();
        if depth > DEPTH_MAX {
            return all;
        }
        let mut parts = Vec::new();
        if let Some(Value::String(reference)) = all.remove("$ref") {
            parts.extend(resolve(self.root, &reference).cloned());
        }
        if let Some(Value::Array(every)) = all.remove("allOf") {
            parts.extend(every);
        }
        for one_of in ["anyOf", "oneOf"] {
            if let Some(Value::Array(some)) = all.remove(one_of) {
                parts.extend(some.into_iter().next());
            }
        }
        for part in parts {
            for (key, value) in self.joined(&part, depth + 1) {
                match (all.get_mut(&key), value) {
                    (Some(Value::Object(mine)), Value::Object(more)) if key == "properties" => {
                        mine.extend(more)
                    }
                    (Some(Value::Array(mine)), Value::Array(more)) if key == "required" => mine.extend(more),
                    (Some(_), _) => {}
                    (None, value) => {
                        all.insert(key, value);
                    }
                }
            }
        }
        all
    }

    fn object(&mut self, schema: &Map<String, Value>, depth: usize) -> Value {
        let mut made = Map::new();
        let required: Vec<&str> = list(schema, "required").filter_map(Value::as_str).collect();
        let properties = schema.get("properties").and_then(Value::as_object);
        for (name, property) in properties.into_iter().flatten() {
            // Deeply nested, or near the size limit, only required properties are generated.
            if property == &Value::Bool(false)
                || (depth >= DEPTH_MAX / 2 && !required.contains(&name.as_str()))
            {
                continue;
            }
            made.insert(name.clone(), self.value(property, name, depth + 1));
        }
        let other = schema
            .get("additionalProperties")
            .cloned()
            .unwrap_or(Value::Bool(true));
        for name in required {
            if !made.contains_key(name) {
                made.insert(name.to_owned(), self.value(&other, name, depth + 1));
            }
        }
        let least = whole(schema, "minProperties").unwrap_or(0).min(ITEMS_MAX);
        for index in 1..=least {
            if made.len() as u64 >= least {
                break;
            }
            let name = format!("extra_{index}");
            let value = self.value(&other, &name, depth + 1);
            made.insert(name, value);
        }
        Value::Object(made)
    }

    fn array(&mut self, schema: &Map<String, Value>, name: &str, depth: usize) -> Value {
        let first: Vec<&Value> = list(schema, "prefixItems").collect();
        let least = whole(schema, "minItems")
            .unwrap_or(1)
            .max(first.len() as u64)
            .min(ITEMS_MAX);
        let count = least.min(whole(schema, "maxItems").unwrap_or(u64::MAX)) as usize;
        let rest = schema.get("items").cloned().unwrap_or(Value::Bool(true));
        let unique = schema.get("uniqueItems") == Some(&Value::Bool(true));
        let mut made = Vec::new();
        for index in 0..count {
            let item = self.value(first.get(index).copied().unwrap_or(&rest), name, depth + 1);
            made.push(match item {
                Value::String(text) if unique && index > 0 => Value::String(format!("{text}{index}")),
                Value::Number(n) if unique && index > 0 => match n.as_i64() {
                    Some(n) => Value::from(n + index as i64),
                    None => Value::Number(n),
                },
                item => item,
            });
        }
        Value::Array(made)
    }
}

/// The first type that is not null, or the type implied by the other keywords.
fn kind(schema: &Map<String, Value>, depth: usize) -> &'static str {
    const KINDS: [&str; 7] = [
        "object", "array", "string", "integer", "number", "boolean", "null",
    ];
    let types: Vec<&str> = match schema.get("type") {
        Some(Value::String(one)) => vec![one],
        Some(Value::Array(many)) => many.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let named = types.iter().find(|name| **name != "null").or(types.first());
    if let Some(kind) = named.and_then(|name| KINDS.into_iter().find(|kind| kind == name)) {
        return kind;
    }
    let has = |keys: &[&str]| keys.iter().any(|key| schema.contains_key(*key));
    if depth == 0 || has(&["properties", "required", "minProperties"]) {
        "object"
    } else if has(&["items", "prefixItems", "minItems"]) {
        "array"
    } else if has(&[
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    ]) {
        "number"
    } else {
        "string"
    }
}

fn text(schema: &Map<String, Value>, name: &str) -> String {
    let by_format = match schema.get("format").and_then(Value::as_str) {
        Some("date-time") => Some("2026-01-15T12:00:00Z"),
        Some("date") => Some("2026-01-15"),
        Some("time") => Some("12:00:00Z"),
        Some("duration") => Some("P1D"),
        Some("email" | "idn-email") => Some("someone@example.com"),
        Some("hostname" | "idn-hostname") => Some("example.com"),
        Some("ipv4") => Some("192.0.2.1"),
        Some("ipv6") => Some("2001:db8::1"),
        Some("uri" | "uri-reference" | "iri" | "iri-reference") => Some("https://example.com/sample"),
        Some("uuid") => Some("018cc251-f400-7000-8000-000000000001"),
        _ => None,
    };
    let by_pattern = schema.get("pattern").and_then(Value::as_str).and_then(matching);
    let mut made = match (by_format, by_pattern) {
        (Some(text), _) => text.to_owned(),
        (None, Some(text)) => text,
        (None, None) if name == "id" || name.ends_with("_id") => {
            format!("{}_sample_1", name.trim_end_matches("_id"))
        }
        (None, None) => "sample".to_owned(),
    };
    let least = whole(schema, "minLength").unwrap_or(0).min(TEXT_CHARS_MAX) as usize;
    let count = made.chars().count();
    if count < least {
        let last = made.chars().last().unwrap_or('x');
        made.extend(std::iter::repeat_n(last, least - count));
    }
    if let Some(most) = whole(schema, "maxLength") {
        made = made
            .chars()
            .take(usize::try_from(most).unwrap_or(usize::MAX))
            .collect();
    }
    made
}

/// A short text that matches a pattern.
fn matching(pattern: &str) -> Option<String> {
    let mut made = String::new();
    write(&regex_syntax::parse(pattern).ok()?, &mut made)?;
    Some(made)
}

fn write(pattern: &Hir, made: &mut String) -> Option<()> {
    if made.len() as u64 > TEXT_CHARS_MAX {
        return None;
    }
    match pattern.kind() {
        HirKind::Empty | HirKind::Look(_) => {}
        HirKind::Literal(literal) => made.push_str(std::str::from_utf8(&literal.0).ok()?),
        HirKind::Class(Class::Unicode(class)) => {
            let holds = |wanted: &char| {
                class
                    .iter()
                    .any(|range| (range.start()..=range.end()).contains(wanted))
            };
            let first = || class.iter().next().map(|range| range.start());
            made.push(['a', 'A', '1', '0', '_'].into_iter().find(holds).or_else(first)?);
        }
        HirKind::Class(Class::Bytes(_)) => return None,
        HirKind::Repetition(repeated) => {
            for _ in 0..repeated.min {
                write(&repeated.sub, made)?;
            }
        }
        HirKind::Capture(capture) => write(&capture.sub, made)?,
        HirKind::Concat(parts) => {
            for part in parts {
                write(part, made)?;
            }
        }
        HirKind::Alternation(some) => write(some.first()?, made)?,
    }
    Some(())
}

fn number(schema: &Map<String, Value>, whole_only: bool) -> Value {
    let get = |key: &str| schema.get(key).and_then(Value::as_f64);
    let step = get("multipleOf").filter(|step| *step > 0.0).unwrap_or(1.0);
    let mut n = step;
    if let Some(least) = get("minimum") {
        n = n.max((least / step).ceil() * step);
    }
    if let Some(above) = get("exclusiveMinimum") {
        n = n.max(((above / step).floor() + 1.0) * step);
    }
    if let Some(most) = get("maximum") {
        n = n.min((most / step).floor() * step);
    }
    if let Some(below) = get("exclusiveMaximum") {
        n = n.min(((below / step).ceil() - 1.0) * step);
    }
    // Between two bounds that no multiple fits into.
    if !whole_only
        && let (Some(least), Some(most)) = (get("minimum"), get("maximum"))
        && n < least
    {
        n = (least + most) / 2.0;
    }
    if n.fract() == 0.0 && n.abs() < 9e15 {
        return Value::from(n as i64);
    }
    Number::from_f64(n).map_or(Value::Null, Value::Number)
}

fn whole(schema: &Map<String, Value>, key: &str) -> Option<u64> {
    schema.get(key).and_then(Value::as_u64)
}

fn list<'a>(schema: &'a Map<String, Value>, key: &str) -> impl Iterator<Item = &'a Value> {
    schema.get(key).and_then(Value::as_array).into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn samples_pass_the_schemas_they_are_made_from() {
        for schema in [
            json!(true),
            json!({}),
            json!({"type": "object"}),
            json!({"required": ["id", "amount"], "properties": {"amount": {"type": "integer", "minimum": 100, "multipleOf": 7}}}),
            json!({"type": "object", "properties": {
                "email": {"type": "string", "format": "email"},
                "code": {"type": "string", "pattern": "^[A-Z]{3}-\\d{4}(x|y)+$"},
                "short": {"type": "string", "maxLength": 2},
                "long": {"type": "string", "minLength": 40},
                "state": {"enum": ["paid", "open"]},
                "kind": {"const": 7},
                "rate": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1, "multipleOf": 0.25},
                "half": {"type": "number", "minimum": 0.2, "maximum": 0.7},
                "below": {"type": "integer", "maximum": -3},
                "nullable": {"type": ["null", "string"]},
                "never": false,
            }, "required": ["email", "code"], "additionalProperties": false}),
            json!({"$defs": {"line": {"type": "object", "required": ["sku"], "properties": {"sku": {"type": "string"}}}},
                   "properties": {"lines": {"type": "array", "minItems": 3, "items": {"$ref": "#/$defs/line"}}},
                   "required": ["lines"]}),
            json!({"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                             {"properties": {"b": {"type": "boolean"}}, "required": ["b"]}]}),
            json!({"oneOf": [{"required": ["card"], "properties": {"card": {"type": "string"}}}, {"required": ["iban"]}]}),
            json!({"properties": {"tags": {"type": "array", "minItems": 3, "uniqueItems": true, "items": {"type": "string"}},
                                  "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": false}}}),
            json!({"minProperties": 2, "additionalProperties": {"type": "integer"}}),
            json!({"examples": [{"id": "inv_1"}], "required": ["id"]}),
            json!({"$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}}, "$ref": "#/$defs/node"}),
            json!({"type": "object", "properties": {"n": {"type": "integer", "exclusiveMinimum": 3, "multipleOf": 5}}}),
            json!({"oneOf": [{"type": "object", "properties": {"a": {"type": "number", "maximum": 0.5}}}]}),
            json!({"required": ["id", "lines"], "properties": {
                "id": {"type": "string", "pattern": "^inv_", "examples": ["inv_1"]},
                "paid_at": {"type": ["string", "null"], "format": "date-time"},
                "customer": {"$ref": "#/$defs/customer"},
                "lines": {"type": "array", "minItems": 2, "items": {"properties": {"sku": {"type": "string", "minLength": 6}}}},
            }, "$defs": {"customer": {"type": "object", "properties": {"parent": {"$ref": "#/$defs/customer"}}}}}),
        ] {
            let made = sample(&schema);
            assert!(made.is_ok(), "{schema} {made:?}");
        }
    }

    #[test]
    fn what_can_not_be_met_is_said_and_not_handed_out() {
        for schema in [
            json!(false),
            json!({"required": ["a"], "properties": {"a": {"allOf": [{"type": "string"}, {"type": "integer"}]}}}),
            json!({"required": ["a"], "properties": {"a": {"not": {}}}}),
        ] {
            assert!(sample(&schema).is_err(), "{schema}");
        }
    }

    #[test]
    fn a_schema_that_wants_very_much_is_given_up() {
        let deep = json!({"$defs": {"n": {"type": "object", "required": ["l", "r"],
            "properties": {"l": {"$ref": "#/$defs/n"}, "r": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"});
        assert!(sample(&deep).is_err());
        let long =
            json!({"required": ["a"], "properties": {"a": {"type": "string", "pattern": "^a{1000}{1000}$"}}});
        assert!(sample(&long).is_err());
    }
}
