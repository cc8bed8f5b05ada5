//! Turns serde errors about a JSON body or a query string into messages for people: the field by its JSON pointer, or
//! the parameter by its name, and what is allowed.
//! Invariant: the value is not repeated, because it may be a secret. Pure.

use postrider_proto::json::pointer_part;
use serde::{Deserialize, de::value};
use serde_path_to_error::Segment;

use crate::http::problem::Fault;

/// What is wrong with JSON text that could not be parsed as a `T`.
pub(crate) fn body_error<'a, T: Deserialize<'a>>(text: &'a str) -> Fault {
    let mut json = serde_json::Deserializer::from_str(text);
    match serde_path_to_error::deserialize::<_, T>(&mut json) {
        Ok(_) => fault(
            String::new(),
            "unexpected data after the JSON document".to_owned(),
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
            let message = error.inner().to_string();
            // The line and column add nothing to the pointer.
            let message = message
                .rsplit_once(" at line ")
                .map_or(message.as_str(), |(message, _)| message);
            let (field, detail) = in_plain_words(message);
            if let Some(field) = field {
                add(&mut pointer, field);
            }
            fault(pointer, detail)
        }
    }
}

/// What is wrong with a query string that was rejected.
pub(crate) fn query_error(error: &serde_path_to_error::Error<value::Error>) -> String {
    let message = error.inner().to_string();
    let at = error.path().iter().next_back().and_then(|segment| match segment {
        Segment::Map { key } => Some(key.as_str()),
        _ => None,
    });
    if message.starts_with("unknown field ") {
        let known = match names_in(&message).as_slice() {
            [] => "This operation has none".to_owned(),
            names => format!("Allowed: {}", names.join(", ")),
        };
        return format!("Unknown query parameter `{}`. {known}.", at.unwrap_or_default());
    }
    let (name, detail) = match message.as_str() {
        "invalid digit found in string" | "cannot parse integer from empty string" => {
            (at, "must be a whole number".to_owned())
        }
        "number too large to fit in target type" | "number too small to fit in target type" => {
            (at, "is out of range".to_owned())
        }
        "provided string was not `true` or `false`" => (at, "must be true or false".to_owned()),
        _ => {
            let (name, detail) = in_plain_words(&message);
            (name.or(at), detail)
        }
    };
    match name {
        Some(name) => format!("Query parameter `{name}` {detail}."),
        None => format!("Malformed query string: {detail}."),
    }
}

fn fault(pointer: String, detail: String) -> Fault {
    Fault { pointer, detail }
}

fn add(pointer: &mut String, name: &str) {
    pointer.push('/');
    pointer.push_str(&pointer_part(name));
}

/// Returns the name of a nested field, if the error is about one, and a message. `serde` reports errors only as text
/// for programmers; unknown texts are passed through.
fn in_plain_words(message: &str) -> (Option<&str>, String) {
    let name_in = |prefix: &str| -> Option<&str> {
        message
            .strip_prefix(prefix)?
            .split_once('`')
            .map(|(name, _)| name)
    };
    if let Some(name) = name_in("missing field `") {
        return (Some(name), "is required".to_owned());
    }
    if let Some(name) = name_in("duplicate field `") {
        return (Some(name), "is given twice".to_owned());
    }
    if message.starts_with("unknown field ") {
        // Its name is already the end of the path.
        return (None, format!("unknown field{}", allowed(message)));
    }
    if message.starts_with("unknown variant ") {
        return (None, format!("must be{}", choices(message)));
    }
    let parts = |prefix: &str| message.strip_prefix(prefix)?.rsplit_once(", expected ");
    if let Some((found, expected)) = parts("invalid type: ") {
        return (None, format!("must be {}, not {}", wanted(expected), kind(found)));
    }
    if let Some((_, expected)) = parts("invalid value: ") {
        return (None, out_of_range(expected));
    }
    (None, message.to_owned())
}

/// The names listed after `expected`, if any, as alternatives.
fn choices(message: &str) -> String {
    match names_in(message).as_slice() {
        [] => String::new(),
        [one] => format!(" {one}"),
        [first @ .., last] => format!(" {} or {last}", first.join(", ")),
    }
}

fn allowed(message: &str) -> String {
    match names_in(message).as_slice() {
        [] => String::new(),
        names => format!("; allowed: {}", names.join(", ")),
    }
}

fn names_in(message: &str) -> Vec<&str> {
    match message.rsplit_once(", expected ") {
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

fn out_of_range(expected: &str) -> String {
    let bounds = match expected {
        "i8" => Some((i64::from(i8::MIN), i64::from(i8::MAX))),
        "i16" => Some((i64::from(i16::MIN), i64::from(i16::MAX))),
        "i32" => Some((i64::from(i32::MIN), i64::from(i32::MAX))),
        "u8" => Some((0, i64::from(u8::MAX))),
        "u16" => Some((0, i64::from(u16::MAX))),
        "u32" => Some((0, i64::from(u32::MAX))),
        _ => None,
    };
    match bounds {
        Some((low, high)) => format!("is out of range: must be a whole number from {low} to {high}"),
        None => format!("is out of range for {}", wanted(expected)),
    }
}

fn kind(found: &str) -> &str {
    let first = found.split([' ', '`']).next().unwrap_or_default();
    match first {
        "null" | "unit" => "null",
        "boolean" => "a boolean",
        "integer" => "a number",
        "floating" => "a fraction",
        "string" | "character" => "a string",
        "map" => "an object",
        "sequence" => "an array",
        _ => "this value",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use postrider_proto::api::given;

    use super::*;

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
            (r#"{}"#, "/name", "is required"),
            (r#"{"name":1}"#, "/name", "must be a string, not a number"),
            (r#"{"name":null}"#, "/name", "must be a string, not null"),
            (r#"{"name":"a","name":"b"}"#, "/name", "is given twice"),
            (
                r#"{"nam/e":"a"}"#,
                "/nam~1e",
                "unknown field; allowed: name, small, inner, map, kind",
            ),
            (
                r#"{"name":"a","small":"1"}"#,
                "/small",
                "must be a whole number, not a string",
            ),
            (
                r#"{"name":"a","small":1.5}"#,
                "/small",
                "must be a whole number, not a fraction",
            ),
            (
                r#"{"name":"a","small":300}"#,
                "/small",
                "is out of range: must be a whole number from -128 to 127",
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
                "unknown field; allowed: yes",
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
            let message = body_error::<Form>(text);
            assert_eq!(
                (message.pointer.as_str(), message.detail.as_str()),
                (pointer, detail),
                "{text}"
            );
        }
        let _ = (Kind::One, Kind::Two);
    }
}
