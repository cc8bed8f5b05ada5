//! Renders a JSON Schema for documentation: its fields as a table, and the differences between two versions.
//! Pure functions. Invariant: the output is bounded, however deeply the schema is nested or refers to itself.

use postrider_sender::resolve_reference;
use serde_json::Value;

use crate::pages::stats_format::counted;

const FIELDS_MAX: usize = 500;
const DEPTH_MAX: usize = 12;
/// How many values of an `enum` are listed.
const VALUES_SHOWN_MAX: usize = 12;

/// One row of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Field {
    /// `customer.address.city`, `lines[].amount`.
    pub(crate) path: String,
    pub(crate) kind: String,
    pub(crate) required: bool,
    pub(crate) description: String,
    /// Constraints on the value, a few words each.
    pub(crate) notes: Vec<String>,
}

impl Field {
    /// Type and constraints in one line. Two versions of a field differ if their summaries do.
    fn summary(&self) -> String {
        let mut summary = self.kind.clone();
        if self.required {
            summary.push_str(", required");
        }
        for note in &self.notes {
            summary.push_str(", ");
            summary.push_str(note);
        }
        summary
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Added,
    Removed,
    Changed,
}

impl Change {
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Added => "added",
            Self::Removed => "removed",
            Self::Changed => "changed",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Difference {
    pub(crate) change: Change,
    pub(crate) path: String,
    pub(crate) before: String,
    pub(crate) after: String,
}

/// All fields, ordered by name; the fields of a nested object follow the object.
pub(crate) fn fields(schema: &Value) -> Vec<Field> {
    let mut found = Vec::new();
    collect_fields(schema, schema, "", &mut Vec::new(), &mut found);
    found
}

pub(crate) fn differences(before: &[Field], after: &[Field]) -> Vec<Difference> {
    let find =
        |fields: &[Field], path: &str| fields.iter().find(|field| field.path == path).map(Field::summary);
    let removed_or_changed = before.iter().filter_map(|field| match find(after, &field.path) {
        None => Some(Difference {
            change: Change::Removed,
            path: field.path.clone(),
            before: field.summary(),
            after: String::new(),
        }),
        Some(now) if now != field.summary() => Some(Difference {
            change: Change::Changed,
            path: field.path.clone(),
            before: field.summary(),
            after: now,
        }),
        Some(_) => None,
    });
    let added = after.iter().filter(|field| find(before, &field.path).is_none());
    let added = added.map(|field| Difference {
        change: Change::Added,
        path: field.path.clone(),
        before: String::new(),
        after: field.summary(),
    });
    let mut all: Vec<Difference> = removed_or_changed.chain(added).collect();
    all.sort_by(|a, b| a.path.cmp(&b.path));
    all
}

/// `above` holds the references on the path to this schema. A reference that is already there is not followed again.
fn collect_fields<'a>(
    root: &'a Value,
    schema: &'a Value,
    path: &str,
    above: &mut Vec<&'a str>,
    found: &mut Vec<Field>,
) {
    if above.len() > DEPTH_MAX || found.len() >= FIELDS_MAX {
        return;
    }
    let name = reference(schema).unwrap_or_default();
    if !name.is_empty() && above.contains(&name) {
        return;
    }
    above.push(name);
    let schema = resolved(root, schema);
    for part in list(schema, "allOf") {
        collect_fields(root, part, path, above, found);
    }
    let forms = if list(schema, "oneOf").is_empty() {
        "anyOf"
    } else {
        "oneOf"
    };
    for (number, form) in list(schema, forms).iter().enumerate() {
        let path = format!("{path} (variant {})", number + 1);
        collect_fields(root, form, path.trim_start(), above, found);
    }
    if let Some(items) = schema.get("items") {
        collect_fields(root, items, &format!("{path}[]"), above, found);
    }
    let required: Vec<&str> = list(schema, "required")
        .iter()
        .filter_map(Value::as_str)
        .collect();
    for (name, property) in properties(schema) {
        if found.len() >= FIELDS_MAX {
            break;
        }
        let path = if path.is_empty() {
            name.clone()
        } else {
            format!("{path}.{name}")
        };
        let shown = resolved(root, property);
        let description = [property, shown]
            .iter()
            .find_map(|schema| schema.get("description")?.as_str())
            .unwrap_or_default();
        let mut notes = notes(shown);
        if reference(property).is_some_and(|name| above.contains(&name)) {
            notes.push("recursive".to_owned());
        }
        found.push(Field {
            path: path.clone(),
            kind: kind(root, shown, 0),
            required: required.contains(&name.as_str()),
            description: description.to_owned(),
            notes,
        });
        collect_fields(root, property, &path, above, found);
    }
    above.pop();
}

fn properties(schema: &Value) -> impl Iterator<Item = (&String, &Value)> {
    schema
        .get("properties")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
}

fn reference(schema: &Value) -> Option<&str> {
    schema.get("$ref").and_then(Value::as_str)
}

fn list<'a>(schema: &'a Value, keyword: &str) -> &'a [Value] {
    schema
        .get(keyword)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

/// Follows references within the schema. Published schemas have no external ones.
fn resolved<'a>(root: &'a Value, schema: &'a Value) -> &'a Value {
    let mut at = schema;
    for _ in 0..DEPTH_MAX {
        let target = at
            .get("$ref")
            .and_then(Value::as_str)
            .and_then(|text| resolve_reference(root, text));
        match target {
            Some(target) => at = target,
            None => break,
        }
    }
    at
}

fn kind(root: &Value, schema: &Value, depth: usize) -> String {
    if depth > DEPTH_MAX {
        return "…".to_owned();
    }
    let schema = resolved(root, schema);
    let plain = match schema.get("type") {
        Some(Value::String(word)) => word.clone(),
        Some(Value::Array(words)) => {
            let words: Vec<&str> = words.iter().filter_map(Value::as_str).collect();
            words.join(" or ")
        }
        _ if schema.get("properties").is_some() => "object".to_owned(),
        _ if !list(schema, "oneOf").is_empty() => format!("one of {}", variants(schema, "oneOf")),
        _ if !list(schema, "anyOf").is_empty() => format!("any of {}", variants(schema, "anyOf")),
        _ if schema.get("const").is_some() => "constant".to_owned(),
        _ if schema.get("enum").is_some() => "enum".to_owned(),
        _ => "any".to_owned(),
    };
    match schema.get("items") {
        Some(items) if plain == "array" => format!("array of {}", kind(root, items, depth + 1)),
        _ => plain,
    }
}

fn variants(schema: &Value, keyword: &str) -> String {
    counted(list(schema, keyword).len(), "variant", "variants")
}

fn notes(schema: &Value) -> Vec<String> {
    let mut notes = Vec::new();
    if let Some(value) = schema.get("const") {
        notes.push(format!("always {value}"));
    }
    let values = list(schema, "enum");
    if !values.is_empty() {
        let shown: Vec<String> = values
            .iter()
            .take(VALUES_SHOWN_MAX)
            .map(Value::to_string)
            .collect();
        let more = if values.len() > VALUES_SHOWN_MAX {
            " …"
        } else {
            ""
        };
        notes.push(format!("one of {}{more}", shown.join(" ")));
    }
    for (keyword, label) in [
        ("format", "format"),
        ("pattern", "matches"),
        ("minimum", "at least"),
        ("exclusiveMinimum", "more than"),
        ("maximum", "at most"),
        ("exclusiveMaximum", "less than"),
        ("multipleOf", "multiple of"),
        ("minLength", "min length"),
        ("maxLength", "max length"),
        ("minItems", "min items"),
        ("maxItems", "max items"),
        ("default", "default"),
    ] {
        match schema.get(keyword) {
            None => {}
            Some(Value::String(text)) => notes.push(format!("{label} {text}")),
            Some(value) => notes.push(format!("{label} {value}")),
        }
    }
    if schema.get("deprecated") == Some(&Value::Bool(true)) {
        notes.push("deprecated".to_owned());
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Map, json};

    fn invoice() -> Value {
        json!({
            "type": "object",
            "required": ["id", "amount", "lines"],
            "properties": {
                "id": {"type": "string", "pattern": "^inv_", "examples": ["inv_1"]},
                "amount": {"type": "integer", "minimum": 50},
                "currency": {"enum": ["EUR", "USD"]},
                "paid_at": {"type": ["string", "null"], "format": "date-time"},
                "customer": {"$ref": "#/$defs/customer"},
                "lines": {"type": "array", "minItems": 2, "items": {"type": "object", "properties": {"sku": {"type": "string", "minLength": 6}}}},
            },
            "$defs": {"customer": {"type": "object", "description": "Who pays", "properties": {
                "email": {"type": "string", "format": "email"},
                "parent": {"$ref": "#/$defs/customer"},
            }}},
        })
    }

    #[test]
    fn a_schema_becomes_rows_and_recursion_ends() {
        let fields = fields(&invoice());
        let line = |path: &str| {
            fields
                .iter()
                .find(|field| field.path == path)
                .cloned()
                .expect(path)
        };
        assert_eq!(line("amount").notes, ["at least 50"]);
        assert!(line("amount").required && !line("currency").required);
        assert_eq!(line("currency").notes, [r#"one of "EUR" "USD""#]);
        assert_eq!(line("paid_at").kind, "string or null");
        assert_eq!(line("lines").kind, "array of object");
        assert_eq!(line("lines[].sku").kind, "string");
        assert_eq!(line("customer").description, "Who pays");
        assert_eq!(line("customer.email").notes, ["format email"]);
        assert_eq!(line("customer.parent").notes, ["recursive"]);
        assert_eq!(fields.len(), 9);
    }

    #[test]
    fn differences_are_reported_by_field() {
        let before = invoice();
        let mut after = invoice();
        after["properties"]["amount"] = json!({"type": "string"});
        after["properties"]["note"] = json!({"type": "string"});
        after["properties"]
            .as_object_mut()
            .expect("an object")
            .remove("currency");
        let found: Vec<(Change, String)> = differences(&fields(&before), &fields(&after))
            .into_iter()
            .map(|difference| (difference.change, difference.path))
            .collect();
        assert_eq!(
            found,
            [
                (Change::Changed, "amount".to_owned()),
                (Change::Removed, "currency".to_owned()),
                (Change::Added, "note".to_owned()),
            ]
        );
        assert!(differences(&fields(&before), &fields(&before)).is_empty());
    }

    #[test]
    fn the_table_of_a_large_schema_is_bounded() {
        let mut schema = json!({"type": "string"});
        for _ in 0..40 {
            schema = json!({"type": "object", "properties": {"a": schema.clone(), "b": {"type": "string"}}});
        }
        assert!(fields(&schema).len() <= FIELDS_MAX);
        let wide: Map<String, Value> = (0..2_000)
            .map(|n| (format!("f{n}"), json!({"type": "string"})))
            .collect();
        let wide = json!({"type": "object", "properties": wide});
        assert_eq!(fields(&wide).len(), FIELDS_MAX);
    }
}
