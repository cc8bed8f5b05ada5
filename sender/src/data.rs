//! Whether text is data that every receiver can parse: a JSON object, not too deep, without anything that common
//! parsers reject. Invariant: the text is only inspected and never rewritten, and its depth uses no stack.

use std::borrow::Cow;

use postrider_proto::{json, limits::JSON_DEPTH_MAX};
use serde::Deserialize;
use serde_json::{Value, value::RawValue};

/// An integer longer than this is outside the range of a float.
const INTEGER_CHARS_MAX: usize = 300;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadData {
    #[error("data is not valid JSON: {0}")]
    NotJson(String),
    #[error("data must be a JSON object")]
    NotAnObject,
    #[error("data is nested too deeply: the limit is {JSON_DEPTH_MAX} levels")]
    TooDeep,
    #[error("data contains a lone surrogate escape (\\ud800 to \\udfff), which is not a character")]
    LoneSurrogate,
    #[error("data contains a number outside the range of a 64-bit float: send it as a string")]
    NumberOutOfRange,
}

/// Integers of any length are accepted, as are `\u0000` escapes, any spacing and any order of keys.
pub fn check_data(text: &str) -> Result<(), BadData> {
    // RawValue skips a value with a loop, so that 100,000 brackets are as harmless as one.
    let raw: &RawValue = serde_json::from_str(text).map_err(|e| BadData::NotJson(e.to_string()))?;
    if !raw.get().starts_with('{') {
        return Err(BadData::NotAnObject);
    }
    let mut depth = 0_usize;
    for token in json::tokens(raw.get()) {
        match token.as_bytes().first() {
            Some(b'{' | b'[') => {
                depth += 1;
                if depth > JSON_DEPTH_MAX {
                    return Err(BadData::TooDeep);
                }
            }
            Some(b'}' | b']') => depth -= 1,
            // The text is valid JSON: nothing else can fail here.
            Some(b'"') if token.contains("\\u") && serde_json::from_str::<String>(token).is_err() => {
                return Err(BadData::LoneSurrogate);
            }
            Some(b'-' | b'0'..=b'9') if !is_integer(token) && !is_finite(token) => {
                return Err(BadData::NumberOutOfRange);
            }
            _ => {}
        }
    }
    Ok(())
}

/// Parses data for inspection. It has passed `check_data`, so its depth is bounded.
pub(crate) fn readable(text: &str) -> Result<Value, serde_json::Error> {
    let text = with_short_integers(text);
    let mut deserializer = serde_json::Deserializer::from_str(&text);
    deserializer.disable_recursion_limit();
    Value::deserialize(&mut deserializer)
}

/// Parses stored data for inspection. None: it contains what a value can't represent, as SQL allows.
pub fn read_data(text: &str) -> Option<Value> {
    readable(text).ok()
}

/// The data of a composed body.
pub fn read_data_of_body(body: &[u8]) -> Option<Value> {
    #[derive(Deserialize)]
    struct Composed<'a> {
        #[serde(borrow)]
        data: &'a RawValue,
    }
    let composed: Composed<'_> = serde_json::from_slice(body).ok()?;
    read_data(composed.data.get())
}

/// Replaces an integer that no float can represent with a large one of the same sign.
fn with_short_integers(text: &str) -> Cow<'_, str> {
    if !has_long_run_of_digits(text) {
        return text.into();
    }
    let short = |token| match token {
        long if is_integer(long) && long.len() > INTEGER_CHARS_MAX => {
            if long.starts_with('-') {
                "-1e300"
            } else {
                "1e300"
            }
        }
        token => token,
    };
    json::tokens(text).map(short).collect::<String>().into()
}

fn has_long_run_of_digits(text: &str) -> bool {
    let mut run = 0;
    text.bytes().any(|byte| {
        run = if byte.is_ascii_digit() { run + 1 } else { 0 };
        run >= INTEGER_CHARS_MAX
    })
}

fn is_integer(token: &str) -> bool {
    token.bytes().all(|b| matches!(b, b'-' | b'0'..=b'9'))
}

fn is_finite(token: &str) -> bool {
    token.parse().is_ok_and(f64::is_finite)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn nested(levels: usize) -> String {
        format!("{{\"a\":{}{}}}", "[".repeat(levels - 1), "]".repeat(levels - 1))
    }

    #[test]
    fn unusual_but_valid_data_is_taken() {
        for good in [
            "{}",
            "  { \"b\" : 1.0 , \"a\" : 1 }\n",
            r#"{"a":"\u0000","a":"twice"}"#,
            r#"{"a":"\ud83d\ude00 \\ud800 \" [[[ {{{"}"#,
            r#"{"a":-0.0e-400,"b":1e308,"c":[true,false,null]}"#,
            &format!("{{\"a\":{}}}", "9".repeat(5_000)),
            &nested(JSON_DEPTH_MAX),
        ] {
            assert_eq!(check_data(good), Ok(()), "{good}");
        }
    }

    #[test]
    fn each_fault_has_its_own_name() {
        for (bad, fault) in [
            ("[]", BadData::NotAnObject),
            ("\"{}\"", BadData::NotAnObject),
            ("null", BadData::NotAnObject),
            (r#"{"a":"\ud800"}"#, BadData::LoneSurrogate),
            (r#"{"a":"\ud800\u0041"}"#, BadData::LoneSurrogate),
            (r#"{"\uDC00":1}"#, BadData::LoneSurrogate),
            (r#"{"a":1e400}"#, BadData::NumberOutOfRange),
            (r#"{"a":[-1.5E+999]}"#, BadData::NumberOutOfRange),
            (&nested(JSON_DEPTH_MAX + 1), BadData::TooDeep),
            (&nested(100_000), BadData::TooDeep),
        ] {
            assert_eq!(check_data(bad), Err(fault), "{:.60}", bad);
        }
    }

    #[test]
    fn broken_json_is_refused_whatever_its_depth() {
        for bad in [
            "",
            "{",
            "{}{}",
            "{'a':1}",
            "{\"a\":01}",
            "{\"a\":NaN}",
            "{\"a\":\"\u{0}\"}",
            "{\"a\":\"\n\"}",
            &"[".repeat(100_000),
            &"{\"a\":".repeat(100_000),
        ] {
            assert!(matches!(check_data(bad), Err(BadData::NotJson(_))), "{:.60}", bad);
        }
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(6, 64, 6, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                proptest::collection::hash_map(any::<String>(), inner, 0..6)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_serde_writes_is_taken_when_it_is_an_object(value in value()) {
            let expected = if value.is_object() { Ok(()) } else { Err(BadData::NotAnObject) };
            prop_assert_eq!(check_data(&value.to_string()), expected);
        }

        #[test]
        fn any_text_is_read_without_a_panic(text: String, json in r#"\{"a":[\[\]{}",:\\u0-9dDeE+. -]{0,40}\}"#) {
            for text in [text, json] {
                if check_data(&text).is_ok() {
                    prop_assert!(serde_json::from_str::<serde_json::Map<String, Value>>(&text).is_ok());
                }
            }
        }
    }
}
