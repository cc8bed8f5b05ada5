//! Messages for schema violations: what the schema requires, without the value, which may be large or confidential.

use jsonschema::{
    JsonType, ValidationError,
    error::{TypeKind, ValidationErrorKind as Kind},
};
use serde_json::Value;

pub(crate) fn message(error: &ValidationError<'_>) -> String {
    match error.kind() {
        Kind::Type { kind } => format!("must be {}", types(kind)),
        Kind::Required { property } => match property.as_str() {
            Some(name) => format!("property `{name}` is required"),
            None => format!("property {property} is required"),
        },
        Kind::AdditionalProperties { unexpected } | Kind::UnevaluatedProperties { unexpected } => {
            format!("unknown property: {}", unexpected.join(", "))
        }
        Kind::Enum { options } => match options.as_array() {
            Some(values) => format!("must be one of {}", join(values.iter().map(Value::to_string))),
            None => format!("must be one of {options}"),
        },
        Kind::Constant { expected_value } => format!("must be {expected_value}"),
        Kind::Minimum { limit } => format!("must be at least {limit}"),
        Kind::Maximum { limit } => format!("must be at most {limit}"),
        Kind::ExclusiveMinimum { limit } => format!("must be greater than {limit}"),
        Kind::ExclusiveMaximum { limit } => format!("must be less than {limit}"),
        Kind::MultipleOf { multiple_of } => format!("must be a multiple of {multiple_of}"),
        Kind::MinLength { limit } => {
            format!("must have at least {}", count(*limit, "character", "characters"))
        }
        Kind::MaxLength { limit } => {
            format!("must have at most {}", count(*limit, "character", "characters"))
        }
        Kind::MinItems { limit } => format!("must have at least {}", count(*limit, "item", "items")),
        Kind::MaxItems { limit } => format!("must have at most {}", count(*limit, "item", "items")),
        Kind::MinProperties { limit } => {
            format!("must have at least {}", count(*limit, "property", "properties"))
        }
        Kind::MaxProperties { limit } => {
            format!("must have at most {}", count(*limit, "property", "properties"))
        }
        Kind::UniqueItems => "must not contain duplicate items".to_owned(),
        Kind::Pattern { pattern } => format!("must match the pattern {pattern}"),
        Kind::Format { format } => format!("must be a valid {format}"),
        Kind::FalseSchema => "is not allowed".to_owned(),
        Kind::Not { .. } => "must not match the schema of `not`".to_owned(),
        Kind::AnyOf { .. } => "must match at least one schema of `anyOf`".to_owned(),
        Kind::OneOfNotValid { .. } => "must match exactly one schema of `oneOf`, but matches none".to_owned(),
        Kind::OneOfMultipleValid { .. } => {
            "must match exactly one schema of `oneOf`, but matches several".to_owned()
        }
        _ => error.masked().to_string(),
    }
}

fn types(kind: &TypeKind) -> String {
    match kind {
        TypeKind::Single(one) => name(*one).to_owned(),
        TypeKind::Multiple(set) => join(set.iter().map(|one| name(one).to_owned())),
    }
}

const fn name(json_type: JsonType) -> &'static str {
    match json_type {
        JsonType::Null => "null",
        JsonType::Boolean => "a boolean",
        JsonType::Integer => "an integer",
        JsonType::Number => "a number",
        JsonType::String => "a string",
        JsonType::Array => "an array",
        JsonType::Object => "an object",
    }
}

fn join(alternatives: impl Iterator<Item = String>) -> String {
    let all: Vec<String> = alternatives.collect();
    match all.as_slice() {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        _ => all.concat(),
    }
}

fn count(limit: u64, one: &str, many: &str) -> String {
    format!("{limit} {}", if limit == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::Schema;

    #[test]
    fn a_violation_says_what_is_required_and_not_the_value() {
        for (schema, value, expected) in [
            (json!({"type": "string"}), json!(1), "must be a string"),
            (
                json!({"type": ["string", "null"]}),
                json!(1),
                "must be null or a string",
            ),
            (json!({"required": ["b"]}), json!({}), "property `b` is required"),
            (
                json!({"additionalProperties": false}),
                json!({"b": 1}),
                "is not allowed",
            ),
            (
                json!({"enum": ["EUR", "USD"]}),
                json!("secret"),
                "must be one of \"EUR\" or \"USD\"",
            ),
            (json!({"minimum": 5}), json!(1), "must be at least 5"),
            (
                json!({"maxLength": 1}),
                json!("ab"),
                "must have at most 1 character",
            ),
            (json!({"minItems": 2}), json!([]), "must have at least 2 items"),
        ] {
            let schema = Schema::compile(&json!({"properties": {"a": schema}})).expect("a schema");
            let data: Value = json!({"a": value});
            let found = schema.violations(&data.to_string());
            let messages: Vec<&str> = found.iter().map(|one| one.message.as_str()).collect();
            assert_eq!(messages, [expected], "{data}");
        }
    }
}
