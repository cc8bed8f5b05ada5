//! The filter of an endpoint: conditions on an event's data, by JSON pointer. Pure; documented in `docs/filters.md`.
//!
//! ```json
//! {"/amount": {"gte": 1000, "lt": 5000}, "or": [{"/currency": {"eq": "EUR"}}, {"/test": {"exists": false}}]}
//! ```
//! Invariant: a filter is bounded in size and depth when it is parsed, so that evaluating it is always cheap.

use std::{cmp::Ordering, fmt};

use serde_json::{Map, Number, Value};

use crate::json::pointer_part;

pub const FILTER_BYTES_MAX: usize = 8 * 1024;
pub const FILTER_DEPTH_MAX: usize = 8;
pub const FILTER_CONDITIONS_MAX: usize = 100;
pub const FILTER_LIST_MAX: usize = 100;
pub const FILTER_POINTER_BYTES_MAX: usize = 512;

/// Where the filter is invalid, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct FilterError {
    pub pointer: String,
    pub message: String,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Filter(Condition);

#[derive(Debug, Clone, PartialEq)]
enum Condition {
    All(Vec<Self>),
    Any(Vec<Self>),
    Not(Box<Self>),
    Test { pointer: String, test: Test },
}

#[derive(Debug, Clone, PartialEq)]
enum Test {
    Equal(Value),
    NotEqual(Value),
    Compare(Comparison, Value),
    In(Vec<Value>),
    Exists(bool),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Comparison {
    Greater,
    GreaterOrEqual,
    Less,
    LessOrEqual,
}

impl Filter {
    /// Parses a filter, or reports what is wrong with it and where.
    pub fn read(value: &Value) -> Result<Self, FilterError> {
        let mut reader = Reader { conditions: 0 };
        if value.to_string().len() > FILTER_BYTES_MAX {
            return Err(wrong("", format!("must be at most {FILTER_BYTES_MAX} bytes")));
        }
        reader.condition(value, "", 0).map(Self)
    }

    /// Whether an event with this data matches.
    pub fn admits(&self, data: &Value) -> bool {
        self.0.holds(data)
    }

    /// The first condition that the data does not meet, in words. None if the filter matches.
    pub fn mismatch(&self, data: &Value) -> Option<String> {
        self.0.mismatch(data)
    }
}

fn wrong(pointer: &str, message: impl Into<String>) -> FilterError {
    FilterError {
        pointer: pointer.to_owned(),
        message: message.into(),
    }
}

struct Reader {
    conditions: usize,
}

impl Reader {
    /// An object: all of its members must match.
    fn condition(&mut self, value: &Value, at: &str, depth: usize) -> Result<Condition, FilterError> {
        if depth >= FILTER_DEPTH_MAX {
            return Err(wrong(
                at,
                format!("must not be nested deeper than {FILTER_DEPTH_MAX} levels"),
            ));
        }
        let Value::Object(members) = value else {
            return Err(wrong(at, "must be an object of conditions"));
        };
        if members.is_empty() {
            return Err(wrong(at, "must have at least one condition"));
        }
        let mut all = Vec::new();
        for (name, value) in members {
            let here = format!("{at}/{}", pointer_part(name));
            match name.as_str() {
                "and" => all.push(Condition::All(self.list(value, &here, depth)?)),
                "or" => all.push(Condition::Any(self.list(value, &here, depth)?)),
                "not" => all.push(Condition::Not(Box::new(self.condition(
                    value,
                    &here,
                    depth + 1,
                )?))),
                pointer if pointer.starts_with('/') => self.tests(pointer, value, &here, &mut all)?,
                _ => {
                    return Err(wrong(
                        &here,
                        "must be `and`, `or`, `not`, or a JSON pointer starting with `/`",
                    ));
                }
            }
        }
        Ok(match all.len() {
            1 => all.swap_remove(0),
            _ => Condition::All(all),
        })
    }

    fn list(&mut self, value: &Value, at: &str, depth: usize) -> Result<Vec<Condition>, FilterError> {
        match value {
            Value::Array(items) if !items.is_empty() && items.len() <= FILTER_LIST_MAX => items
                .iter()
                .enumerate()
                .map(|(index, item)| self.condition(item, &format!("{at}/{index}"), depth + 1))
                .collect(),
            _ => Err(wrong(
                at,
                format!("must be a list of 1 to {FILTER_LIST_MAX} filters"),
            )),
        }
    }

    fn tests(
        &mut self,
        pointer: &str,
        value: &Value,
        at: &str,
        all: &mut Vec<Condition>,
    ) -> Result<(), FilterError> {
        check_pointer(pointer).map_err(|why| wrong(at, why))?;
        let Some(tests) = value.as_object().filter(|tests| !tests.is_empty()) else {
            return Err(wrong(at, "must be an object, like {\"eq\": 1}"));
        };
        for (name, operand) in tests {
            self.conditions += 1;
            if self.conditions > FILTER_CONDITIONS_MAX {
                let message = format!("must have at most {FILTER_CONDITIONS_MAX} comparisons");
                return Err(wrong(at, message));
            }
            let test = read_test(name, operand).map_err(|why| wrong(&format!("{at}/{name}"), why))?;
            all.push(Condition::Test {
                pointer: pointer.to_owned(),
                test,
            });
        }
        Ok(())
    }
}

fn check_pointer(pointer: &str) -> Result<(), &'static str> {
    if pointer.len() > FILTER_POINTER_BYTES_MAX {
        return Err("JSON pointer is too long");
    }
    let bad_escape = pointer
        .split('~')
        .skip(1)
        .any(|rest| !rest.starts_with('0') && !rest.starts_with('1'));
    if bad_escape {
        return Err("is not a valid JSON pointer: `~` must be followed by 0 or 1");
    }
    Ok(())
}

fn read_test(name: &str, operand: &Value) -> Result<Test, String> {
    let comparable = |comparison| match operand {
        Value::Number(_) | Value::String(_) => Ok(Test::Compare(comparison, operand.clone())),
        _ => Err("must be a number or a string".to_owned()),
    };
    match name {
        "eq" => Ok(Test::Equal(operand.clone())),
        "ne" => Ok(Test::NotEqual(operand.clone())),
        "gt" => comparable(Comparison::Greater),
        "gte" => comparable(Comparison::GreaterOrEqual),
        "lt" => comparable(Comparison::Less),
        "lte" => comparable(Comparison::LessOrEqual),
        "in" => match operand {
            Value::Array(values) if !values.is_empty() && values.len() <= FILTER_LIST_MAX => {
                Ok(Test::In(values.clone()))
            }
            _ => Err(format!("must be a list of 1 to {FILTER_LIST_MAX} values")),
        },
        "exists" => match operand {
            Value::Bool(wanted) => Ok(Test::Exists(*wanted)),
            _ => Err("must be true or false".to_owned()),
        },
        _ => Err("must be eq, ne, gt, gte, lt, lte, in or exists".to_owned()),
    }
}

impl Condition {
    fn holds(&self, data: &Value) -> bool {
        match self {
            Self::All(all) => all.iter().all(|one| one.holds(data)),
            Self::Any(any) => any.iter().any(|one| one.holds(data)),
            Self::Not(one) => !one.holds(data),
            Self::Test { pointer, test } => test.holds(data.pointer(pointer)),
        }
    }

    fn mismatch(&self, data: &Value) -> Option<String> {
        if self.holds(data) {
            return None;
        }
        Some(match self {
            Self::All(all) => all.iter().find_map(|one| one.mismatch(data)).unwrap_or_default(),
            Self::Any(any) => {
                let each: Vec<String> = any.iter().filter_map(|one| one.mismatch(data)).collect();
                let more = each.len().saturating_sub(ALTERNATIVES_WRITTEN_MAX);
                let rest = if more > 0 {
                    format!("; and {more} more")
                } else {
                    String::new()
                };
                let first = &each[..each.len() - more];
                format!("no alternative of `or` matches: {}{rest}", first.join("; "))
            }
            Self::Not(_) => "the condition under `not` matches".to_owned(),
            Self::Test { pointer, test } => {
                let found = data.pointer(pointer).map_or("missing".to_owned(), written);
                format!("`{pointer}` must {test}, but is {found}")
            }
        })
    }
}

/// Alternatives of an `or`, and characters of a value, in the description of a mismatch.
const ALTERNATIVES_WRITTEN_MAX: usize = 3;
const VALUE_CHARS_WRITTEN_MAX: usize = 80;

fn written(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(VALUE_CHARS_WRITTEN_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Equal(value) => write!(f, "be {}", written(value)),
            Self::NotEqual(value) => write!(f, "not be {}", written(value)),
            Self::In(values) => write!(f, "be one of {}", written(&Value::Array(values.clone()))),
            Self::Exists(true) => f.write_str("exist"),
            Self::Exists(false) => f.write_str("not exist"),
            Self::Compare(comparison, value) => {
                let words = match comparison {
                    Comparison::Greater => "greater than",
                    Comparison::GreaterOrEqual => "at least",
                    Comparison::Less => "less than",
                    Comparison::LessOrEqual => "at most",
                };
                write!(f, "be {words} {}", written(value))
            }
        }
    }
}

impl Test {
    /// A missing value equals nothing and has no order.
    fn holds(&self, found: Option<&Value>) -> bool {
        match self {
            Self::Equal(value) => found.is_some_and(|found| same(found, value)),
            Self::NotEqual(value) => !found.is_some_and(|found| same(found, value)),
            Self::In(values) => found.is_some_and(|found| values.iter().any(|value| same(found, value))),
            Self::Exists(wanted) => found.is_some() == *wanted,
            Self::Compare(comparison, value) => {
                found
                    .and_then(|found| order(found, value))
                    .is_some_and(|order| match comparison {
                        Comparison::Greater => order.is_gt(),
                        Comparison::GreaterOrEqual => order.is_ge(),
                        Comparison::Less => order.is_lt(),
                        Comparison::LessOrEqual => order.is_le(),
                    })
            }
        }
    }
}

/// Numbers by value, so that 1 equals 1.0; everything else as JSON values.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => order_numbers(a, b) == Some(Ordering::Equal),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Object(a), Value::Object(b)) => same_members(a, b),
        _ => a == b,
    }
}

fn same_members(a: &Map<String, Value>, b: &Map<String, Value>) -> bool {
    a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| same(a, b)))
}

/// Numbers with numbers and strings with strings; anything else has no order.
fn order(a: &Value, b: &Value) -> Option<Ordering> {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => order_numbers(a, b),
        (Value::String(a), Value::String(b)) => Some(a.cmp(b)),
        _ => None,
    }
}

/// Exact for 64-bit integers; as floats otherwise.
fn order_numbers(a: &Number, b: &Number) -> Option<Ordering> {
    let whole = |n: &Number| n.as_i64().map(i128::from).or(n.as_u64().map(i128::from));
    match (whole(a), whole(b)) {
        (Some(a), Some(b)) => Some(a.cmp(&b)),
        _ => a.as_f64()?.partial_cmp(&b.as_f64()?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn a_mismatch_names_the_condition_and_the_value() {
        let data = json!({"amount": 5, "currency": "USD"});
        let why = |filter: Value| Filter::read(&filter).expect("a filter").mismatch(&data);
        assert_eq!(why(json!({"/amount": {"eq": 5}})), None);
        for (filter, expected) in [
            (
                json!({"/amount": {"gte": 100}}),
                "`/amount` must be at least 100, but is 5",
            ),
            (
                json!({"and": [{"/amount": {"lt": 9}}, {"/currency": {"in": ["EUR"]}}]}),
                "`/currency` must be one of [\"EUR\"], but is \"USD\"",
            ),
            (
                json!({"/test": {"exists": true}}),
                "`/test` must exist, but is missing",
            ),
            (
                json!({"not": {"/amount": {"eq": 5}}}),
                "the condition under `not` matches",
            ),
            (
                json!({"or": [{"/amount": {"eq": 1}}, {"/amount": {"eq": 2}}]}),
                "no alternative of `or` matches: `/amount` must be 1, but is 5; `/amount` must be 2, but is 5",
            ),
        ] {
            assert_eq!(why(filter).as_deref(), Some(expected));
        }
    }

    fn admits(filter: Value, data: &Value) -> bool {
        Filter::read(&filter).expect("a filter").admits(data)
    }

    #[test]
    fn each_comparison_does_what_its_name_says() {
        let data = json!({"amount": 10, "currency": "EUR", "tags": ["a", "b"], "none": null,
                          "a/b": {"c~d": true}, "line": [{"sku": 1.0}]});
        for (filter, expected) in [
            (json!({"/amount": {"eq": 10}}), true),
            (json!({"/amount": {"eq": 10.0}}), true),
            (json!({"/amount": {"eq": "10"}}), false),
            (json!({"/amount": {"ne": 11}}), true),
            (json!({"/missing": {"ne": 11}}), true),
            (json!({"/missing": {"eq": null}}), false),
            (json!({"/none": {"eq": null}}), true),
            (json!({"/amount": {"gt": 9.5, "lte": 10}}), true),
            (json!({"/amount": {"lt": 10}}), false),
            (json!({"/currency": {"gt": "EUA"}}), true),
            (json!({"/currency": {"gt": 1}}), false),
            (json!({"/currency": {"in": ["USD", "EUR"]}}), true),
            (json!({"/missing": {"in": ["USD", "EUR"]}}), false),
            (json!({"/tags": {"eq": ["a", "b"]}}), true),
            (json!({"/tags/1": {"eq": "b"}}), true),
            (json!({"/line/0": {"eq": {"sku": 1}}}), true),
            (json!({"/a~1b/c~0d": {"eq": true}}), true),
            (json!({"/none": {"exists": true}}), true),
            (json!({"/missing": {"exists": false}}), true),
            (json!({"not": {"/amount": {"eq": 10}}}), false),
            (
                json!({"or": [{"/amount": {"eq": 1}}, {"/currency": {"eq": "EUR"}}]}),
                true,
            ),
            (
                json!({"and": [{"/amount": {"eq": 10}}, {"/currency": {"eq": "USD"}}]}),
                false,
            ),
            (json!({"/amount": {"eq": 10}, "/currency": {"eq": "USD"}}), false),
            (json!({"/big": {"eq": 1}}), false),
        ] {
            assert_eq!(admits(filter.clone(), &data), expected, "{filter}");
        }
        let big = json!({"n": 9_007_199_254_740_993_u64});
        assert!(
            !admits(json!({"/n": {"eq": 9_007_199_254_740_992_u64}}), &big),
            "exact"
        );
    }

    #[test]
    fn nonsense_is_refused_where_it_stands() {
        let deep = (0..FILTER_DEPTH_MAX).fold(json!({"/a": {"eq": 1}}), |inner, _| json!({"not": inner}));
        let many: Map<String, Value> = (0..=FILTER_CONDITIONS_MAX)
            .map(|n| (format!("/{n}"), json!({"eq": 1})))
            .collect();
        for (bad, pointer) in [
            (json!([]), ""),
            (json!({}), ""),
            (json!({"amount": {"eq": 1}}), "/amount"),
            (json!({"/amount": 1}), "/~1amount"),
            (json!({"/amount": {}}), "/~1amount"),
            (json!({"/amount": {"equals": 1}}), "/~1amount/equals"),
            (json!({"/amount": {"gt": true}}), "/~1amount/gt"),
            (json!({"/amount": {"in": []}}), "/~1amount/in"),
            (json!({"/amount": {"exists": 1}}), "/~1amount/exists"),
            (json!({"/a~2": {"eq": 1}}), "/~1a~02"),
            (json!({"and": []}), "/and"),
            (json!({"or": {"/a": {"eq": 1}}}), "/or"),
            (json!({"or": [{"/a": {"eq": 1}}, 3]}), "/or/1"),
            (json!({"/a": {"eq": "x".repeat(FILTER_BYTES_MAX)}}), ""),
            (json!({"/a": {"in": vec![1; FILTER_LIST_MAX + 1]}}), "/~1a/in"),
        ] {
            let error = Filter::read(&bad).expect_err("nonsense");
            assert_eq!(error.pointer, pointer, "{bad} {error}");
        }
        assert!(Filter::read(&deep).is_err());
        assert!(Filter::read(&Value::Object(many)).is_err());
    }

    fn scalar() -> impl Strategy<Value = Value> {
        prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            (-3_i64..4).prop_map(Value::from),
            (-3.0_f64..4.0).prop_map(Value::from),
            "[ab]{0,2}".prop_map(Value::from),
        ]
    }

    fn data() -> impl Strategy<Value = Value> {
        proptest::collection::hash_map("[abc]", scalar(), 0..4)
            .prop_map(|map| Value::Object(map.into_iter().collect()))
    }

    fn filter() -> impl Strategy<Value = Value> {
        let leaf = ("/[abc]", "eq|ne|in|exists|gt|lte", scalar()).prop_map(|(pointer, name, value)| {
            let operand = match name.as_str() {
                "in" => json!([value]),
                "exists" => json!(value == Value::Null),
                "gt" | "lte" => json!(value.as_i64().unwrap_or(1)),
                _ => value,
            };
            json!({ (pointer): { (name): operand } })
        });
        leaf.prop_recursive(3, 12, 3, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 1..3).prop_map(|list| json!({ "and": list })),
                proptest::collection::vec(inner.clone(), 1..3).prop_map(|list| json!({ "or": list })),
                inner.prop_map(|one| json!({ "not": one })),
            ]
        })
    }

    proptest! {
        #[test]
        fn not_turns_round_and_turns_back(filter in filter(), data in data()) {
            let plain = admits(filter.clone(), &data);
            prop_assert_eq!(admits(json!({"not": filter}), &data), !plain);
            prop_assert_eq!(admits(json!({"not": {"not": filter}}), &data), plain);
        }

        #[test]
        fn and_or_and_not_go_together_as_they_should(a in filter(), b in filter(), data in data()) {
            let (x, y) = (admits(a.clone(), &data), admits(b.clone(), &data));
            prop_assert_eq!(admits(json!({"and": [a, b]}), &data), x && y);
            prop_assert_eq!(admits(json!({"or": [a, b]}), &data), x || y);
            prop_assert_eq!(
                admits(json!({"not": {"and": [a, b]}}), &data),
                admits(json!({"or": [{"not": a}, {"not": b}]}), &data)
            );
        }

        #[test]
        fn ne_is_not_eq_and_in_is_any_eq(value in scalar(), other in scalar(), data in data()) {
            prop_assert_ne!(
                admits(json!({"/a": {"eq": value}}), &data),
                admits(json!({"/a": {"ne": value}}), &data)
            );
            prop_assert_eq!(
                admits(json!({"/a": {"in": [value, other]}}), &data),
                admits(json!({"or": [{"/a": {"eq": value}}, {"/a": {"eq": other}}]}), &data)
            );
        }

        #[test]
        fn any_value_is_read_without_a_panic(data in data(), name in "and|or|not|/a|x", inner in scalar()) {
            let _ = Filter::read(&data);
            let _ = Filter::read(&json!({ (name): inner }));
        }
    }
}
