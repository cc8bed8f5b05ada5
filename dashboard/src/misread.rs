//! A JSON body or a query string that a form can't be read from, told as a person would: the field by its pointer, or the
//! parameter by its name, and what it must be.
//! Invariant: the value itself is not repeated; it may be a secret. Pure.

use serde::{Deserialize, de::value};
use serde_path_to_error::Segment;

use crate::problem::Fault;

/// What is wrong with a text that is JSON and was not taken as a `T`.
pub(crate) fn misread<'a, T: Deserialize<'a>>(text: &'a str) -> Fault {
    let mut json = serde_json::Deserializer::from_str(text);
    match serde_path_to_error::deserialize::<_, T>(&mut json) {
        Ok(_) => fault(
            String::new(),
            "something stands behind the end of the body".to_owned(),
        ),
        Err(error) => {
            let mut pointer = String::new();
            for segment in error.path() {
                match segment {
                    Segment::Seq { index } => pointer.push_str(&format!("/{index}")),
                    Segment::Map { key } => add(&mut pointer, key),
                    Segment::Enum { .. } | Segment::Unknown => {}
                }
            }
            let told = error.inner().to_string();
            // Lines and columns are of no use beside a pointer.
            let told = told
                .rsplit_once(" at line ")
                .map_or(told.as_str(), |(told, _)| told);
            let (field, detail) = in_plain_words(told);
            if let Some(field) = field {
                add(&mut pointer, field);
            }
            fault(pointer, detail)
        }
    }
}

/// What is wrong with a query string that was not taken.
pub(crate) fn misread_query(error: &serde_path_to_error::Error<value::Error>) -> String {
    let told = error.inner().to_string();
    let at = error.path().iter().next_back().and_then(|segment| match segment {
        Segment::Map { key } => Some(key.as_str()),
        _ => None,
    });
    if told.starts_with("unknown field ") {
        let known = names_in(&told);
        let known = match known.as_slice() {
            [] => "this call has none".to_owned(),
            [one] => format!("known is {one}"),
            [first @ .., last] => format!("known are {} and {last}", first.join(", ")),
        };
        return format!("Unknown parameter `{}`; {known}.", at.unwrap_or_default());
    }
    let (name, detail) = match told.as_str() {
        "invalid digit found in string" | "cannot parse integer from empty string" => {
            (at, "must be a whole number".to_owned())
        }
        "number too large to fit in target type" | "number too small to fit in target type" => {
            (at, "must be a whole number within its bounds".to_owned())
        }
        "provided string was not `true` or `false`" => (at, "must be true or false".to_owned()),
        _ => {
            let (name, detail) = in_plain_words(&told);
            (name.or(at), detail)
        }
    };
    match name {
        Some(name) => format!("The parameter `{name}` {detail}."),
        None => format!("The query can't be read: {detail}."),
    }
}

fn fault(pointer: String, detail: String) -> Fault {
    Fault { pointer, detail }
}

fn add(pointer: &mut String, name: &str) {
    pointer.push('/');
    pointer.push_str(&name.replace('~', "~0").replace('/', "~1"));
}

/// A field below the place, when it is about one, and what is wrong. `serde` has no errors but in its own words, which are
/// for programmers; words that are not known here are passed on.
fn in_plain_words(told: &str) -> (Option<&str>, String) {
    let name_in =
        |prefix: &str| -> Option<&str> { told.strip_prefix(prefix)?.split_once('`').map(|(name, _)| name) };
    if let Some(name) = name_in("missing field `") {
        return (Some(name), "is missing".to_owned());
    }
    if let Some(name) = name_in("duplicate field `") {
        return (Some(name), "is there twice".to_owned());
    }
    if told.starts_with("unknown field ") {
        // Its name is the end of the path already.
        return (
            None,
            format!("is not known here{}", choices(told, "; there are ")),
        );
    }
    if told.starts_with("unknown variant ") {
        return (None, format!("must be{}", choices(told, " ")));
    }
    let parts = |prefix: &str| told.strip_prefix(prefix)?.rsplit_once(", expected ");
    if let Some((found, expected)) = parts("invalid type: ") {
        return (None, format!("must be {}, not {}", wanted(expected), kind(found)));
    }
    if let Some((_, expected)) = parts("invalid value: ") {
        return (None, format!("must be {} within its bounds", wanted(expected)));
    }
    (None, told.to_owned())
}

/// The names that stand behind `expected`, if any do.
fn choices(told: &str, before: &str) -> String {
    match names_in(told).as_slice() {
        [] => String::new(),
        [one] => format!("{before}{one}"),
        [first @ .., last] => format!("{before}{} or {last}", first.join(", ")),
    }
}

fn names_in(told: &str) -> Vec<&str> {
    match told.rsplit_once(", expected ") {
        Some((_, names)) => names.split('`').skip(1).step_by(2).collect(),
        None => Vec::new(),
    }
}

fn wanted(expected: &str) -> &str {
    let is_whole = matches!(
        expected,
        "i8" | "i16" | "i32" | "i64" | "u8" | "u16" | "u32" | "u64" | "usize" | "isize"
    );
    match expected {
        _ if is_whole => "a whole number",
        "f32" | "f64" => "a number",
        "a map" => "an object",
        "a sequence" => "an array",
        "unit" => "null",
        _ if expected.starts_with("struct ") => "an object",
        _ => expected,
    }
}

fn kind(found: &str) -> &str {
    let first = found.split([' ', '`']).next().unwrap_or_default();
    match first {
        "null" | "unit" => "null",
        "boolean" => "a boolean",
        "integer" => "a number",
        "floating" => "a number with a fraction",
        "string" | "character" => "a string",
        "map" => "an object",
        "sequence" => "an array",
        _ => "this",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::given;
    use std::collections::BTreeMap;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only read")]
    struct Form {
        name: String,
        #[serde(default, deserialize_with = "given")]
        small: Option<Option<i8>>,
        #[serde(default)]
        inner: Vec<Inner>,
        #[serde(default)]
        map: BTreeMap<String, String>,
        kind: Option<Kind>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only read")]
    struct Inner {
        yes: bool,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Kind {
        One,
        Two,
    }

    #[test]
    fn what_is_wrong_is_told_by_its_place_and_in_plain_words() {
        for (text, pointer, detail) in [
            (r#"{}"#, "/name", "is missing"),
            (r#"{"name":1}"#, "/name", "must be a string, not a number"),
            (r#"{"name":null}"#, "/name", "must be a string, not null"),
            (r#"{"name":"a","name":"b"}"#, "/name", "is there twice"),
            (
                r#"{"nam/e":"a"}"#,
                "/nam~1e",
                "is not known here; there are name, small, inner, map or kind",
            ),
            (
                r#"{"name":"a","small":"1"}"#,
                "/small",
                "must be a whole number, not a string",
            ),
            (
                r#"{"name":"a","small":1.5}"#,
                "/small",
                "must be a whole number, not a number with a fraction",
            ),
            (
                r#"{"name":"a","small":300}"#,
                "/small",
                "must be a whole number within its bounds",
            ),
            (
                r#"{"name":"a","inner":{}}"#,
                "/inner",
                "must be an array, not an object",
            ),
            (
                r#"{"name":"a","inner":[{"yes":true},{"yes":"secret"}]}"#,
                "/inner/1/yes",
                "must be a boolean, not a string",
            ),
            (
                r#"{"name":"a","inner":[{"no":1}]}"#,
                "/inner/0/no",
                "is not known here; there are yes",
            ),
            (
                r#"{"name":"a","inner":[3]}"#,
                "/inner/0",
                "must be an object, not a number",
            ),
            (
                r#"{"name":"a","map":{"a/b":[]}}"#,
                "/map/a~1b",
                "must be a string, not an array",
            ),
            (r#"{"name":"a","kind":"three"}"#, "/kind", "must be one or two"),
            (r#"3"#, "", "must be an object, not a number"),
        ] {
            let told = misread::<Form>(text);
            assert_eq!(
                (told.pointer.as_str(), told.detail.as_str()),
                (pointer, detail),
                "{text}"
            );
        }
        let _ = (Kind::One, Kind::Two);
    }
}
