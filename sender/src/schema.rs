//! JSON Schema (2020-12) of event types: compiled once, cached by the schema's id, used to report everything that is
//! wrong.
//! Invariants: no schema accesses the network or a file, the memory for compiled ones is bounded, and the steps of a
//! validation are bounded by the size of its data, whatever the schema.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use jsonschema::{Draft, PatternOptions, Validator};
use serde::Serialize;
use serde_json::Value;
use sqlx::PgConnection;

use crate::{
    data::readable,
    message::message,
    metered::{Budget, Metered, Part, is_spent},
};

/// Violations reported for one event or schema; the rest are not searched for.
pub const VIOLATIONS_MAX: usize = 200;
const MESSAGE_CHARS_MAX: usize = 300;
/// Cached schemas, and cached names of types and versions.
const COMPILED_MAX: usize = 1_000;
const KNOWN_MAX: usize = 4_000;
/// A pattern that needs more steps than this on one value does not match it.
const BACKTRACK_MAX: usize = 100_000;
/// Visits to parts of the data: enough for most events, and fast.
const QUICK_STEPS_MAX: u64 = 20_000;
/// The maximum cost of a validation: a constant plus an amount per byte of data.
const STEPS_MAX: u64 = 100_000;
const STEPS_PER_BYTE_MAX: u64 = 20;
/// Errors of all branches of the schema, which are more than the reported ones.
const ERRORS_MAX: u64 = 10_000;
/// A pattern may take `BACKTRACK_MAX` steps on each string: with patterns only short data is quick.
const QUICK_BYTES_MAX_WITH_PATTERNS: usize = 2 * 1024;
const META_2020_12: &str = "https://json-schema.org/draft/2020-12/schema";

/// One violation, by its JSON pointer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Violation {
    pub pointer: String,
    pub message: String,
}

impl Violation {
    fn of(error: &jsonschema::ValidationError<'_>) -> Self {
        Self {
            pointer: error.instance_path().as_str().to_owned(),
            message: shortened(message(error)),
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

/// How much work a validation may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// So little that it may run anywhere.
    Quick,
    /// All that the data's size allows: up to a second for the largest.
    Full,
}

/// The result of a validation.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    Fits,
    /// Everything that is wrong, as far as it could be listed.
    Broken(Vec<Violation>),
    /// More than `Effort::Quick` is needed.
    Undecided,
}

/// A compiled schema.
#[derive(Debug)]
pub struct Schema {
    validator: Validator<Metered>,
    has_patterns: bool,
}

impl Schema {
    /// Reports everything that makes the schema unusable: invalid keywords, external and circular references.
    pub fn compile(schema: &Value) -> Result<Self, Vec<Violation>> {
        match schema.get("$schema") {
            None => {}
            Some(Value::String(uri)) if uri.trim_end_matches('#') == META_2020_12 => {}
            Some(_) => {
                return Err(vec![Violation {
                    pointer: "/$schema".to_owned(),
                    message: format!("only JSON Schema 2020-12 is supported: {META_2020_12}"),
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
                message:
                    "this reference is circular: it leads back to itself at the same location of the data"
                        .to_owned(),
            }]);
        }
        jsonschema::options_for::<Metered>()
            .with_draft(Draft::Draft202012)
            .with_pattern_options(PatternOptions::fancy_regex().backtrack_limit(BACKTRACK_MAX))
            .build(schema)
            .map(|validator| Self {
                validator,
                has_patterns: has_patterns(schema),
            })
            .map_err(|error| match circles::leading_out(schema) {
                Some(pointer) => vec![Violation {
                    pointer,
                    message: "external references are not supported: use a local one like #/$defs/name"
                        .to_owned(),
                }],
                None => vec![Violation::whole(error.to_string())],
            })
    }

    /// Everything that is wrong with the data, which has passed `check_data`.
    pub fn violations(&self, data: &str) -> Vec<Violation> {
        match self.check(data, Effort::Full) {
            Verdict::Fits => Vec::new(),
            Verdict::Broken(violations) => violations,
            Verdict::Undecided => vec![too_complex()],
        }
    }

    /// The data has passed `check_data`.
    pub fn check(&self, data: &str, effort: Effort) -> Verdict {
        let steps = match effort {
            Effort::Quick if self.has_patterns && data.len() > QUICK_BYTES_MAX_WITH_PATTERNS => {
                return Verdict::Undecided;
            }
            Effort::Quick => QUICK_STEPS_MAX,
            Effort::Full => STEPS_MAX + STEPS_PER_BYTE_MAX * data.len() as u64,
        };
        let value = match readable(data) {
            Ok(value) => value,
            Err(error) => return Verdict::Broken(vec![Violation::whole(error.to_string())]),
        };
        let budget = Budget::new(steps, ERRORS_MAX);
        let fits = self.validator.is_valid(Part::new(&value, &budget));
        match (budget.is_spent(), effort) {
            (true, Effort::Quick) => Verdict::Undecided,
            (true, Effort::Full) => Verdict::Broken(vec![too_complex()]),
            (false, _) if fits => Verdict::Fits,
            (false, _) => self.list(&value, steps, effort),
        }
    }

    fn list(&self, value: &Value, steps: u64, effort: Effort) -> Verdict {
        let budget = Budget::new(steps, ERRORS_MAX);
        let mut errors = self
            .validator
            .iter_errors(Part::new(value, &budget))
            .filter(|error| !is_spent(error));
        if budget.is_spent() && effort == Effort::Quick {
            return Verdict::Undecided;
        }
        let mut found: Vec<Violation> = errors
            .by_ref()
            .take(VIOLATIONS_MAX)
            .map(|error| Violation::of(&error))
            .collect();
        if errors.next().is_some() {
            found.push(Violation::whole(format!(
                "more than {VIOLATIONS_MAX} errors; only these are listed"
            )));
        } else if budget.is_spent() {
            found.push(Violation::whole(
                "does not match the schema; too complex to list every error",
            ));
        }
        Verdict::Broken(found)
    }
}

fn too_complex() -> Violation {
    Violation::whole("is too complex: validating it against the schema takes too many steps")
}

fn has_patterns(schema: &Value) -> bool {
    match schema {
        Value::Object(map) => map.iter().any(|(key, value)| {
            matches!(key.as_str(), "pattern" | "patternProperties") || has_patterns(value)
        }),
        Value::Array(items) => items.iter().any(has_patterns),
        _ => false,
    }
}

/// A published schema of an event type.
#[derive(Debug)]
pub struct Published {
    id: i32,
    /// None: it was stored before schemas were checked and can't be used. It accepts everything.
    schema: Option<Schema>,
}

impl Published {
    pub fn id(&self) -> i32 {
        self.id
    }

    pub(crate) fn violations(&self, data: &str) -> Vec<Violation> {
        self.schema
            .as_ref()
            .map_or_else(Vec::new, |schema| schema.violations(data))
    }

    /// The data has passed `check_data`.
    pub fn check(&self, data: &str, effort: Effort) -> Verdict {
        self.schema
            .as_ref()
            .map_or(Verdict::Fits, |schema| schema.check(data, effort))
    }
}

/// A type's name, and the requested version.
type Name = (String, Option<String>);

#[derive(Debug, Default)]
struct Cache {
    /// What a name resolved to at its last lookup. The database checks at the emit whether that is still true.
    known: HashMap<Name, i32>,
    compiled: HashMap<i32, Arc<Published>>,
}

#[derive(Debug, Default)]
pub(crate) struct Schemas(Mutex<Cache>);

impl Schemas {
    /// From the cache, or else from the database. None: there is no such type or version.
    pub(crate) async fn find(
        &self,
        connection: &mut PgConnection,
        type_name: &str,
        version: Option<&str>,
        refresh: bool,
    ) -> Result<Option<Arc<Published>>, sqlx::Error> {
        let name = (type_name.to_owned(), version.map(str::to_owned));
        if !refresh && let Some(found) = self.recall(&name) {
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

    pub(crate) fn known(&self, type_name: &str, version: Option<&str>) -> Option<Arc<Published>> {
        self.recall(&(type_name.to_owned(), version.map(str::to_owned)))
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
        // Rarely reached; then everything is looked up again.
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

/// Circular references that apply to the same location of the data would be followed forever.
mod circles {
    use super::Value;
    use crate::reference::resolve;

    const STEPS_MAX: usize = 10_000;
    /// Keywords whose subschemas apply to the same value as the schema that contains them.
    const IN_PLACE_ONE: [&str; 5] = ["not", "if", "then", "else", "contentSchema"];
    const IN_PLACE_MANY: [&str; 3] = ["allOf", "anyOf", "oneOf"];

    /// The pointer of a reference that starts a cycle, or whose chain is too long to tell.
    pub(super) fn find(root: &Value) -> Option<String> {
        let mut references = Vec::new();
        collect(root, "", &mut references);
        let mut steps = 0;
        references
            .into_iter()
            .find(|(_, reference)| !ends(root, reference, &mut Vec::new(), &mut steps))
            .map(|(pointer, _)| pointer)
    }

    /// The pointer of the first reference that points outside of this schema.
    pub(super) fn leading_out(root: &Value) -> Option<String> {
        let mut references = Vec::new();
        collect(root, "", &mut references);
        references
            .into_iter()
            .find(|(_, reference)| !reference.starts_with('#'))
            .map(|(pointer, _)| pointer)
    }

    /// Each reference with its own pointer.
    fn collect<'a>(schema: &'a Value, at: &str, found: &mut Vec<(String, &'a str)>) {
        match schema {
            Value::Object(map) => {
                for (key, value) in map {
                    let at = format!("{at}/{}", postrider_proto::json::pointer_part(key));
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
            // Whether it resolves at all is for the compiler to report.
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

    /// Each node is one of two kinds, and each kind has a child that is a node.
    fn tree() -> Value {
        let kind =
            |name: &str| json!({"required": [name], "properties": {"child": {"$ref": "#/$defs/node"}}});
        json!({"properties": {"root": {"$ref": "#/$defs/node"}}, "$defs": {"node": {"oneOf": [kind("a"), kind("b")]}}})
    }

    fn nested(depth: usize, level: fn(Value) -> Value) -> String {
        let root = (0..depth).fold(json!({}), |child, _| level(child));
        json!({"root": root}).to_string()
    }

    #[test]
    fn data_that_does_not_fit_a_tree_costs_a_bounded_number_of_steps() {
        let schema = Schema::compile(&tree()).expect("a schema");
        let began = std::time::Instant::now();
        for depth in [10, 60, 125] {
            for level in [
                |child| json!({"a": 1, "child": child}),
                |child| json!({"a": 1, "b": 1, "child": child}),
            ] {
                let found = schema.violations(&nested(depth, level));
                assert!(!found.is_empty(), "{depth}");
            }
        }
        assert!(began.elapsed().as_secs() < 10, "{:?}", began.elapsed());
        let fits = (0..100).fold(json!({"b": 1}), |child, _| json!({"a": 1, "child": child}));
        assert_eq!(schema.violations(&json!({"root": fits}).to_string()), []);
    }

    /// Without a cycle, the same with a chain: each definition is visited twice by the one before it.
    #[test]
    fn a_chain_that_doubles_costs_a_bounded_number_of_steps() {
        let mut definitions = serde_json::Map::new();
        for n in 0..60 {
            let next = json!({"properties": {"child": {"$ref": format!("#/$defs/n{}", n + 1)}}});
            let both = json!({"anyOf": [{"allOf": [next, {"required": ["x"]}]}, {"allOf": [next, {"required": ["y"]}]}]});
            definitions.insert(format!("n{n}"), both);
        }
        definitions.insert("n60".to_owned(), json!({"required": ["z"]}));
        let schema =
            Schema::compile(&json!({"properties": {"root": {"$ref": "#/$defs/n0"}}, "$defs": definitions}));
        let schema = schema.expect("a schema");
        let data = nested(60, |child| json!({"x": 1, "child": child}));
        let found = schema.violations(&data);
        assert!(!found.is_empty());
        assert_eq!(schema.check(&data, Effort::Quick), Verdict::Undecided);
    }

    #[test]
    fn most_data_is_checked_quickly_and_what_is_long_in_full() {
        let schema = json!({"properties": {"a": {"items": {"type": "integer"}}}});
        let schema = Schema::compile(&schema).expect("a schema");
        let data = |count: usize| json!({"a": vec![1; count]}).to_string();
        assert_eq!(schema.check(&data(1_000), Effort::Quick), Verdict::Fits);
        assert_eq!(schema.check(&data(100_000), Effort::Quick), Verdict::Undecided);
        assert_eq!(schema.check(&data(100_000), Effort::Full), Verdict::Fits);
        let wrong = json!({"a": vec!["x"; 50_000]}).to_string();
        let Verdict::Broken(found) = schema.check(&wrong, Effort::Full) else {
            panic!("it does not fit");
        };
        assert_eq!(found[0].pointer, "/a/0");
        assert_eq!(found.len(), VIOLATIONS_MAX + 1);
        let patterns = Schema::compile(&json!({"properties": {"a": {"pattern": "^a"}}})).expect("a schema");
        let long = json!({"a": "a".repeat(5_000)}).to_string();
        assert_eq!(patterns.check(&long, Effort::Quick), Verdict::Undecided);
    }
}
