//! References inside a JSON Schema. Invariant: nothing outside the schema is ever resolved.

use serde_json::Value;

/// Resolves a `$ref` inside the schema: a pointer, or a name declared with `$anchor`. None: it points outside of the
/// schema or nowhere.
pub fn resolve<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    let pointer = reference.strip_prefix('#')?;
    if pointer.is_empty() || pointer.starts_with('/') {
        return root.pointer(&percent_decoded(pointer));
    }
    anchored(root, pointer)
}

fn anchored<'a>(schema: &'a Value, anchor: &str) -> Option<&'a Value> {
    match schema {
        Value::Object(map) => {
            let names = ["$anchor", "$dynamicAnchor"];
            if names
                .iter()
                .any(|name| map.get(*name).and_then(Value::as_str) == Some(anchor))
            {
                return Some(schema);
            }
            map.values().find_map(|value| anchored(value, anchor))
        }
        Value::Array(items) => items.iter().find_map(|item| anchored(item, anchor)),
        _ => None,
    }
}

fn percent_decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let hex = bytes
            .get(at + 1..at + 3)
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        match hex.filter(|_| bytes[at] == b'%') {
            Some(byte) => {
                decoded.push(byte);
                at += 3;
            }
            None => {
                decoded.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_reference_leads_to_its_place_in_the_schema_or_nowhere() {
        let root = json!({"$defs": {"a b": {"x": 1}, "n/m": {"x": 2}, "named": {"$anchor": "here", "x": 3}}});
        for (reference, found) in [
            ("#/$defs/a%20b", Some(1)),
            ("#/$defs/n~1m", Some(2)),
            ("#here", Some(3)),
            ("#there", None),
            ("#/$defs/none", None),
            ("https://example.com/#here", None),
        ] {
            let target = resolve(&root, reference).and_then(|schema| schema["x"].as_i64());
            assert_eq!(target, found, "{reference}");
        }
        assert_eq!(resolve(&root, "#"), Some(&root));
    }
}
