//! JSON as text. A parsed value loses the length of a number, the order of members and duplicates; these functions
//! work on the text itself. Invariant: bounded in depth. Invalid JSON reads as nothing without members, so callers
//! that need valid JSON must check it first.

use std::{collections::BTreeSet, iter::Peekable};

use serde_json::value::RawValue;

use crate::limits::JSON_DEPTH_MAX;

const INDENT: &str = "  ";

enum Json<'a> {
    /// A number, `true`, `false` or `null`.
    Plain(&'a str),
    Text(String),
    List(Vec<Self>),
    Object(Vec<(String, Self)>),
}

/// The pointer of a duplicate member name. Parsers differ in which member they use.
pub fn find_duplicate(text: &str) -> Option<String> {
    let mut pointer = String::new();
    read(text)?.find_duplicate(&mut pointer).then_some(pointer)
}

/// Whether two texts are the same JSON value, regardless of spacing, the order of members and number notation, and
/// however long a number is.
pub fn is_same(a: &str, b: &str) -> bool {
    match (read(a), read(b)) {
        (Some(a), Some(b)) => a.is_same(&b),
        _ => false,
    }
}

/// Pretty-prints the text for people. Only whitespace between its parts is changed; invalid JSON is returned nearly
/// unchanged.
pub fn lay_out(text: &str) -> String {
    lay_out_within(text, usize::MAX).text
}

/// The result of `lay_out_within`.
pub struct LaidOut {
    pub text: String,
    /// Whether it was truncated.
    pub is_cut: bool,
}

/// The same, limited to about this many bytes: indentation can make a text a hundred times longer.
pub fn lay_out_within(text: &str, bytes_max: usize) -> LaidOut {
    let mut laid_out = String::with_capacity(text.len().saturating_mul(2).min(bytes_max));
    let mut level = 0_usize;
    let mut tokens = tokens(text).peekable();
    while laid_out.len() < bytes_max
        && let Some(token) = tokens.next()
    {
        match token {
            "{" | "[" if matches!(tokens.peek(), Some(&("}" | "]"))) => laid_out.push_str(token),
            "{" | "[" => {
                level += 1;
                laid_out.push_str(token);
                begin_line(&mut laid_out, level);
            }
            "}" | "]" => {
                if !laid_out.ends_with(['{', '[']) {
                    level = level.saturating_sub(1);
                    begin_line(&mut laid_out, level);
                }
                laid_out.push_str(token);
            }
            "," => {
                laid_out.push_str(token);
                begin_line(&mut laid_out, level);
            }
            ":" => laid_out.push_str(": "),
            _ => laid_out.push_str(token),
        }
    }
    LaidOut {
        text: laid_out,
        is_cut: tokens.peek().is_some(),
    }
}

/// The text without the whitespace between its parts.
pub fn compact(text: &str) -> String {
    tokens(text).collect()
}

/// Escapes a member name for use in a JSON Pointer.
pub fn pointer_part(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// The tokens of a JSON text: a bracket, a comma, a colon, a string with its quotes, or a number or literal. Invalid JSON
/// has tokens too.
pub fn tokens(text: &str) -> impl Iterator<Item = &str> {
    let ends_literal = |byte: u8| br#"{}[],:""#.contains(&byte) || byte.is_ascii_whitespace();
    let mut rest = text;
    std::iter::from_fn(move || {
        rest = rest.trim_ascii_start();
        let length = match rest.as_bytes().first()? {
            b'"' => string_length(rest),
            b'{' | b'}' | b'[' | b']' | b',' | b':' => 1,
            _ => rest.bytes().position(ends_literal).unwrap_or(rest.len()),
        };
        let (token, behind) = rest.split_at(length);
        rest = behind;
        Some(token)
    })
}

/// Including its quotes.
fn string_length(text: &str) -> usize {
    let mut escaped = false;
    let end = text.bytes().skip(1).position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    });
    end.map_or(text.len(), |end| end + 2)
}

fn begin_line(text: &mut String, level: usize) {
    text.push('\n');
    for _ in 0..level {
        text.push_str(INDENT);
    }
}

impl Json<'_> {
    fn find_duplicate(&self, pointer: &mut String) -> bool {
        let length = pointer.len();
        let mut below = |name: &str, value: Option<&Self>| {
            pointer.truncate(length);
            pointer.push('/');
            pointer.push_str(&pointer_part(name));
            // Without a value, the name itself is the target.
            value.is_none_or(|value| value.find_duplicate(pointer))
        };
        let found = match self {
            Self::Plain(_) | Self::Text(_) => false,
            Self::List(items) => items
                .iter()
                .enumerate()
                .any(|(index, item)| below(&index.to_string(), Some(item))),
            Self::Object(members) => {
                let mut seen = BTreeSet::new();
                members
                    .iter()
                    .any(|(name, value)| below(name, seen.insert(name).then_some(value)))
            }
        };
        if !found {
            pointer.truncate(length);
        }
        found
    }

    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Plain(a), Self::Plain(b)) => a == b || number(a).is_some_and(|a| Some(a) == number(b)),
            (Self::Text(a), Self::Text(b)) => a == b,
            (Self::List(a), Self::List(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.is_same(b))
            }
            (Self::Object(a), Self::Object(b)) => {
                let (a, b) = (by_name(a), by_name(b));
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.0 == b.0 && a.1.is_same(&b.1))
            }
            _ => false,
        }
    }
}

fn by_name<'a, 'b>(members: &'b [(String, Json<'a>)]) -> Vec<&'b (String, Json<'a>)> {
    let mut members: Vec<_> = members.iter().collect();
    members.sort_by(|a, b| a.0.cmp(&b.0));
    members
}

/// The sign, the digits without leading and trailing zeros, and the exponent.
fn number(text: &str) -> Option<(bool, String, i64)> {
    let (negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    if !text.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    let (digits, power) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let digits = [whole, fraction].concat();
    let digits = digits.trim_start_matches('0');
    let shortened = digits.trim_end_matches('0');
    if shortened.is_empty() {
        return Some((false, String::new(), 0));
    }
    let power = power.parse::<i64>().ok()?.checked_sub(fraction.len() as i64)?;
    let power = power.checked_add((digits.len() - shortened.len()) as i64)?;
    Some((negative, shortened.to_owned(), power))
}

fn read(text: &str) -> Option<Json<'_>> {
    // The code below relies on valid JSON.
    let raw: &RawValue = serde_json::from_str(text).ok()?;
    value(&mut tokens(raw.get()).peekable(), 0)
}

fn value<'a>(tokens: &mut Peekable<impl Iterator<Item = &'a str>>, depth: usize) -> Option<Json<'a>> {
    if depth > JSON_DEPTH_MAX {
        return None;
    }
    match tokens.next()? {
        "[" => {
            let mut items = Vec::new();
            while tokens.next_if_eq(&"]").is_none() {
                items.push(value(tokens, depth + 1)?);
                tokens.next_if_eq(&",");
            }
            Some(Json::List(items))
        }
        "{" => {
            let mut members = Vec::new();
            while tokens.next_if_eq(&"}").is_none() {
                let name = serde_json::from_str(tokens.next()?).ok()?;
                tokens.next_if_eq(&":");
                members.push((name, value(tokens, depth + 1)?));
                tokens.next_if_eq(&",");
            }
            Some(Json::Object(members))
        }
        text if text.starts_with('"') => serde_json::from_str(text).ok().map(Json::Text),
        plain => Some(Json::Plain(plain)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    #[test]
    fn a_name_that_comes_twice_is_found_where_it_stands() {
        for (text, found) in [
            (r#"{"a":1,"b":{"a":2},"c":[{"a":1},{"a":1}]}"#, None),
            (r#"{"a":1,"b":2,"a":1}"#, Some("/a")),
            (
                r#" { "x" : [ 1 , { "a/b" : { } , "\u0061/b" : [ ] } ] } "#,
                Some("/x/1/a~1b"),
            ),
            (r#"{"a":"{\"b\":1,\"b\":2}","c":"\\"}"#, None),
            (r#"{"":{"~":1,"~":2}}"#, Some("//~0")),
            ("[]", None),
            ("{", None),
        ] {
            assert_eq!(find_duplicate(text).as_deref(), found, "{text}");
        }
        let deep = |levels| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        assert_eq!(find_duplicate(&deep(100_000)), None);
    }

    #[test]
    fn values_are_the_same_by_what_they_mean_to_the_last_digit() {
        let long = "9".repeat(400);
        let longer = format!("{long}8");
        for (a, b, same) in [
            ("1", "1.0", true),
            ("100", "1e2", true),
            ("-0.0250", "-25E-3", true),
            ("0", "-0.0e9", true),
            ("1", "-1", false),
            ("12345678901234567890123", "12345678901234567890124", false),
            (&long, &longer, false),
            (&longer, &longer, true),
            ("1e99999999999999999999", "1e99999999999999999998", false),
            ("true", "1", false),
            ("null", "null", true),
            (r#""1""#, "1", false),
            (
                r#"{"a":1,"b":[1,{}]}"#,
                r#" {"b" : [1.0, { }], "\u0061":1}"#,
                true,
            ),
            (r#"{"a":1}"#, r#"{"a":1,"b":1}"#, false),
            ("[1,2]", "[2,1]", false),
            ("{", "{", false),
        ] {
            assert_eq!(is_same(a, b), same, "{a} {b}");
        }
    }

    #[test]
    fn a_text_is_laid_out_with_its_parts_as_they_are() {
        let text = r#"{"b":{},"a":[ ] , "n":[1.0,12345678901234567890123,{"x":"\u0041 {,\""}]}"#;
        let laid_out = "{\n  \"b\": {},\n  \"a\": [],\n  \"n\": [\n    1.0,\n    12345678901234567890123,\n    {\n      \
                        \"x\": \"\\u0041 {,\\\"\"\n    }\n  ]\n}";
        assert_eq!(lay_out(text), laid_out);
        assert_eq!(lay_out(laid_out), laid_out);
        assert_eq!(lay_out(" true "), "true");
        assert_eq!(compact(laid_out), compact(text));
        assert_eq!(
            compact(" {\"a b\" : [ 1 , \"\\\" \" ] } "),
            r#"{"a b":[1,"\" "]}"#
        );
    }

    #[test]
    fn of_what_would_be_too_long_only_the_beginning_is_laid_out() {
        let deep = format!("{}{}1{}", "[".repeat(120), "1,".repeat(127_000), "]".repeat(120));
        let cut = lay_out_within(&deep, 10_000);
        assert!(cut.is_cut && cut.text.len() < 10_500, "{}", cut.text.len());
        assert!(lay_out(&deep).starts_with(&cut.text));
        let whole = lay_out_within("[1,2]", 10_000);
        assert!(!whole.is_cut && whole.text == lay_out("[1,2]"));
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::hash_map(any::<String>(), inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_laid_out_is_the_same_and_reads_as_serde_lays_it_out(value in any_json()) {
            let text = value.to_string();
            let laid_out = lay_out(&text);
            prop_assert!(is_same(&text, &laid_out));
            prop_assert_eq!(&laid_out, &serde_json::to_string_pretty(&value).unwrap_or_default());
            prop_assert!(!is_same(&text, &json!([value]).to_string()));
            prop_assert_eq!(find_duplicate(&text), None);
        }

        #[test]
        fn any_text_is_read_without_a_panic(text: String, json in r#"[\[\]{}",:\\ua1. -]{0,40}"#) {
            for text in [text, json] {
                let _ = (find_duplicate(&text), is_same(&text, &text), lay_out(&text));
            }
        }
    }
}
