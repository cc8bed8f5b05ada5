//! JSON Schema (2020-12) of event types: compiled once, kept by the schema's number, asked for everything that is wrong.
//! Invariant: no schema reaches for the network or a file, and the memory for compiled ones is bounded.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use jsonschema::{Draft, PatternOptions, Validator};
use serde::Serialize;
use serde_json::Value;
use sqlx::PgConnection;

use crate::data::readable;

/// Told of one event or one schema; what is wrong beyond that is not looked for.
pub const VIOLATIONS_MAX: usize = 200;
const MESSAGE_CHARS_MAX: usize = 300;
/// Compiled schemas kept, and names of types and versions that are known to mean one.
const COMPILED_MAX: usize = 1_000;
const KNOWN_MAX: usize = 4_000;
/// A pattern that needs more steps than this on one value does not match it.
const BACKTRACK_MAX: usize = 100_000;
const META_2020_12: &str = "https://json-schema.org/draft/2020-12/schema";

/// One thing that is wrong, by its JSON pointer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Violation {
    pub pointer: String,
    pub message: String,
}

impl Violation {
    fn of(error: &jsonschema::ValidationError<'_>) -> Self {
        Self {
            pointer: error.instance_path().as_str().to_owned(),
            // The value itself may be large, and is the producer's own.
            message: shortened(error.masked().to_string()),
        }
    }

    fn whole(message: impl Into<String>) -> Self {
        Self {
            pointer: String::new(),
            message: shortened(message.into()),
        }
    }
}

fn shortened(text: String) -> String {
    match text.char_indices().nth(MESSAGE_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// A schema that can be asked.
#[derive(Debug)]
pub struct Schema {
    validator: Validator,
}

impl Schema {
    /// Everything that makes it unusable: broken keywords, references that lead out of it or round in circles.
    pub fn compile(schema: &Value) -> Result<Self, Vec<Violation>> {
        match schema.get("$schema") {
            None => {}
            Some(Value::String(uri)) if uri.trim_end_matches('#') == META_2020_12 => {}
            Some(_) => {
                return Err(vec![Violation {
                    pointer: "/$schema".to_owned(),
                    message: format!("only JSON Schema 2020-12 is taken: {META_2020_12}"),
                }]);
            }
        }
        let broken: Vec<Violation> = jsonschema::draft202012::meta::validator()
            .iter_errors(schema)
            .take(VIOLATIONS_MAX)
            .map(|error| Violation::of(&error))
            .collect();
        if !broken.is_empty() {
            return Err(broken);
        }
        if let Some(pointer) = circles::find(schema) {
            return Err(vec![Violation {
                pointer,
                message: "this reference leads back to itself without going deeper into the data".to_owned(),
            }]);
        }
        jsonschema::options()
            .with_draft(Draft::Draft202012)
            .with_pattern_options(PatternOptions::fancy_regex().backtrack_limit(BACKTRACK_MAX))
            .build(schema)
            .map(|validator| Self { validator })
            .map_err(|error| match circles::leading_out(schema) {
                Some(pointer) => vec![Violation {
                    pointer,
                    message: "this reference leads out of the schema: one like #/$defs/name does not"
                        .to_owned(),
                }],
                None => vec![Violation::whole(error.to_string())],
            })
    }

    /// Everything that is wrong with the data, which has passed `check_data`.
    pub fn violations(&self, data: &str) -> Vec<Violation> {
        let value = match readable(data) {
            Ok(value) => value,
            Err(error) => return vec![Violation::whole(error.to_string())],
        };
        if self.validator.is_valid(&value) {
            return Vec::new();
        }
        let mut errors = self.validator.iter_errors(&value);
        let mut found: Vec<Violation> = errors
            .by_ref()
            .take(VIOLATIONS_MAX)
            .map(|error| Violation::of(&error))
            .collect();
        if errors.next().is_some() {
            found.push(Violation::whole(format!(
                "there are more errors than these {VIOLATIONS_MAX}"
            )));
        }
        found
    }
}

/// A schema of a type, as it was published.
#[derive(Debug)]
pub(crate) struct Published {
    pub(crate) id: i32,
    /// None: it was stored before schemas were checked, and can't be used. It refuses nothing.
    schema: Option<Schema>,
}

impl Published {
    pub(crate) fn violations(&self, data: &str) -> Vec<Violation> {
        self.schema
            .as_ref()
            .map_or_else(Vec::new, |schema| schema.violations(data))
    }
}

/// A type's name, and the version that was asked for.
type Name = (String, Option<String>);

#[derive(Debug, Default)]
struct Cache {
    /// What a name meant when it was last looked up. The database says at the emit whether that still holds.
    known: HashMap<Name, i32>,
    compiled: HashMap<i32, Arc<Published>>,
}

#[derive(Debug, Default)]
pub(crate) struct Schemas(Mutex<Cache>);

impl Schemas {
    /// From memory, or else from the database. None: there is no such type or version.
    pub(crate) async fn find(
        &self,
        connection: &mut PgConnection,
        type_name: &str,
        version: Option<&str>,
        afresh: bool,
    ) -> Result<Option<Arc<Published>>, sqlx::Error> {
        let name = (type_name.to_owned(), version.map(str::to_owned));
        if !afresh && let Some(found) = self.recall(&name) {
            return Ok(Some(found));
        }
        let row: Option<(i32, String)> =
            sqlx::query_as("select id, schema from postrider.find_schema($1, $2)")
                .bind(type_name)
                .bind(version)
                .fetch_optional(connection)
                .await?;
        Ok(row.map(|(id, text)| self.learn(name, id, &text)))
    }

    fn recall(&self, name: &Name) -> Option<Arc<Published>> {
        let cache = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        cache.compiled.get(cache.known.get(name)?).cloned()
    }

    fn learn(&self, name: Name, id: i32, text: &str) -> Arc<Published> {
        let known = {
            let cache = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            cache.compiled.get(&id).cloned()
        };
        let published = known.unwrap_or_else(|| {
            let schema = serde_json::from_str(text)
                .ok()
                .and_then(|value: Value| Schema::compile(&value).ok());
            Arc::new(Published { id, schema })
        });
        let mut cache = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Rarely reached, and then everything is looked up once more.
        if cache.known.len() >= KNOWN_MAX {
            cache.known.clear();
        }
        if cache.compiled.len() >= COMPILED_MAX {
            cache.compiled.clear();
        }
        cache.known.insert(name, id);
        cache.compiled.insert(id, published.clone());
        published
    }
}

/// References that apply to the same place of the data they stand at, in a circle, would be followed for ever.
mod circles {
    use super::Value;
    use crate::reference::resolve;

    const STEPS_MAX: usize = 10_000;
    /// Keywords whose schemas look at the same value as the schema they stand in.
    const IN_PLACE_ONE: [&str; 5] = ["not", "if", "then", "else", "contentSchema"];
    const IN_PLACE_MANY: [&str; 3] = ["allOf", "anyOf", "oneOf"];

    /// The pointer of a reference that begins a circle, or that is too long a way to tell.
    pub(super) fn find(root: &Value) -> Option<String> {
        let mut references = Vec::new();
        collect(root, "", &mut references);
        let mut steps = 0;
        references
            .into_iter()
            .find(|(_, reference)| !ends(root, reference, &mut Vec::new(), &mut steps))
            .map(|(pointer, _)| pointer)
    }

    /// The pointer of the first reference that is not to a place of this very schema.
    pub(super) fn leading_out(root: &Value) -> Option<String> {
        let mut references = Vec::new();
        collect(root, "", &mut references);
        references
            .into_iter()
            .find(|(_, reference)| !reference.starts_with('#'))
            .map(|(pointer, _)| pointer)
    }

    /// Each with the pointer that it stands at.
    fn collect<'a>(schema: &'a Value, at: &str, found: &mut Vec<(String, &'a str)>) {
        match schema {
            Value::Object(map) => {
                for (key, value) in map {
                    let at = format!("{at}/{}", key.replace('~', "~0").replace('/', "~1"));
                    match (key.as_str(), value) {
                        ("$ref" | "$dynamicRef", Value::String(text)) => found.push((at, text)),
                        ("const" | "enum" | "default" | "examples", _) => {}
                        _ => collect(value, &at, found),
                    }
                }
            }
            Value::Array(items) => {
                for (index, item) in items.iter().enumerate() {
                    collect(item, &format!("{at}/{index}"), found);
                }
            }
            _ => {}
        }
    }

    fn ends<'a>(root: &'a Value, reference: &'a str, path: &mut Vec<&'a str>, steps: &mut usize) -> bool {
        *steps += 1;
        if path.contains(&reference) || *steps > STEPS_MAX {
            return false;
        }
        let Some(target) = resolve(root, reference) else {
            // Whether it can be resolved at all is the compiler's question.
            return true;
        };
        path.push(reference);
        let ended = in_place(target, &mut |next| ends(root, next, path, steps));
        path.pop();
        ended
    }

    /// Whether every reference that applies in place satisfies `check`.
    fn in_place<'a>(schema: &'a Value, check: &mut impl FnMut(&'a str) -> bool) -> bool {
        let Value::Object(map) = schema else { return true };
        for key in ["$ref", "$dynamicRef"] {
            if let Some(Value::String(text)) = map.get(key)
                && !check(text)
            {
                return false;
            }
        }
        let one = IN_PLACE_ONE.iter().filter_map(|key| map.get(*key));
        let many = IN_PLACE_MANY
            .iter()
            .filter_map(|key| map.get(*key)?.as_array())
            .flatten();
        let dependent = map
            .get("dependentSchemas")
            .and_then(Value::as_object)
            .into_iter()
            .flat_map(|map| map.values());
        let nested: Vec<&Value> = one.chain(many).chain(dependent).collect();
        nested.into_iter().all(|schema| in_place(schema, check))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pointers(schema: Value, data: &str) -> Vec<String> {
        let schema = Schema::compile(&schema).expect("a schema");
        schema.violations(data).into_iter().map(|v| v.pointer).collect()
    }

    #[test]
    fn every_violation_is_named_by_its_place() {
        let schema = json!({
            "type": "object", "required": ["id"], "additionalProperties": false,
            "properties": {"id": {"type": "string"}, "lines": {"items": {"type": "integer", "minimum": 1}}},
        });
        assert!(pointers(schema.clone(), r#"{"id":"a","lines":[1,2]}"#).is_empty());
        let mut found = pointers(schema, r#"{"lines":[0,"x",3],"other":1}"#);
        found.sort();
        assert_eq!(found, ["", "", "/lines/0", "/lines/1"]);
    }

    #[test]
    fn the_list_is_bounded_and_a_message_too() {
        let schema = json!({"properties": {"a": {"items": {"const": "x".repeat(5_000)}}}});
        let data = json!({"a": vec![0; 500]}).to_string();
        let found = Schema::compile(&schema).expect("a schema").violations(&data);
        assert_eq!(found.len(), VIOLATIONS_MAX + 1);
        assert!(
            found
                .iter()
                .all(|v| v.message.chars().count() <= MESSAGE_CHARS_MAX + 1)
        );
    }

    #[test]
    fn long_integers_and_deep_data_can_be_checked() {
        let schema = json!({"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}});
        let long = format!(r#"{{"n":-{},"s":"1{}"}}"#, "9".repeat(5_000), "0".repeat(900));
        assert!(pointers(schema.clone(), &long).is_empty());
        let deep = format!(r#"{{"a":{}{}}}"#, "[".repeat(127), "]".repeat(127));
        assert!(pointers(schema, &deep).is_empty());
    }

    #[test]
    fn a_schema_that_can_t_be_used_is_refused() {
        for bad in [
            json!({"type": "strng"}),
            json!({"minimum": "1"}),
            json!({"properties": []}),
            json!({"pattern": "("}),
            json!({"$ref": "https://example.com/other.json"}),
            json!({"$ref": "file:///etc/passwd"}),
            json!({"$ref": "#/$defs/none"}),
            json!({"$schema": "http://json-schema.org/draft-07/schema#"}),
            json!({"$ref": "#"}),
            json!({"allOf": [{"$ref": "#"}]}),
            json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}),
            json!({"$defs": {"a": {"$anchor": "x", "not": {"$ref": "#x"}}}, "$ref": "#x"}),
            json!({"$dynamicAnchor": "n", "$dynamicRef": "#n"}),
        ] {
            assert!(Schema::compile(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_bad_reference_is_named_by_its_place() {
        for (bad, place) in [
            (
                json!({"properties": {"a/b": {"$ref": "https://example.com/x"}}}),
                "/properties/a~1b/$ref",
            ),
            (json!({"allOf": [{}, {"$ref": "#"}]}), "/allOf/1/$ref"),
        ] {
            let violations = Schema::compile(&bad).expect_err("a bad one");
            let pointers: Vec<&str> = violations.iter().map(|one| one.pointer.as_str()).collect();
            assert_eq!(pointers, [place], "{bad}");
        }
    }

    #[test]
    fn a_schema_of_a_tree_is_no_circle() {
        let tree = json!({
            "$schema": META_2020_12, "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}},
            "type": "object", "properties": {"root": {"$ref": "#/$defs/node"}, "self": {"$ref": "#"}},
        });
        assert!(pointers(tree.clone(), r#"{"self":{"root":{"next":{"next":{}}}}}"#).is_empty());
        assert_eq!(pointers(tree, r#"{"self":{"self":1}}"#), ["/self/self"]);
    }

    #[test]
    fn a_pattern_that_explodes_is_given_up() {
        let schema = json!({"properties": {"a": {"pattern": "^(a+)+(?!b)$"}}});
        let data = json!({"a": format!("{}!", "a".repeat(5_000))}).to_string();
        assert_eq!(pointers(schema, &data), ["/a"]);
    }
}
