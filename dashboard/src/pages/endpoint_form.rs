//! Converts an endpoint's settings to form fields and back to an API request. The API validates the values, so that a page
//! can't accept what the API rejects.

use std::collections::BTreeMap;

use postrider_proto::json::find_duplicate;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{api::endpoint_rules::write_wait, http::problem::Fault, tables::endpoints::EndpointSettings};

/// The form as submitted by the browser. An empty field means the default.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Fields {
    pub(super) tenant: String,
    pub(super) url: String,
    pub(super) description: String,
    pub(super) types: String,
    pub(super) versions: String,
    pub(super) filter: String,
    pub(super) concurrency: String,
    pub(super) rate_per_second: String,
    pub(super) timeout_ms: String,
    pub(super) retry_schedule: String,
    pub(super) signature: String,
    pub(super) rotate_every_days: String,
    pub(super) headers: String,
    /// Checkboxes are sent only when they are checked.
    pub(super) ordered: Option<String>,
    pub(super) drop_headers: Option<String>,
}

impl From<&EndpointSettings> for Fields {
    fn from(settings: &EndpointSettings) -> Self {
        let number = |n: Option<i64>| n.map(|n| n.to_string()).unwrap_or_default();
        let versions = settings.versions.as_ref().map(|json| &json.0);
        Self {
            tenant: String::new(),
            url: settings.url.clone(),
            description: settings.description.clone().unwrap_or_default(),
            types: settings.types.join("\n"),
            versions: versions
                .into_iter()
                .flatten()
                .map(|(name, version)| format!("{name} = {version}"))
                .collect::<Vec<_>>()
                .join("\n"),
            filter: settings
                .filter
                .as_ref()
                .and_then(|json| serde_json::to_string_pretty(&json.0).ok())
                .unwrap_or_default(),
            concurrency: number(settings.concurrency.map(i64::from)),
            rate_per_second: number(settings.rate_per_second.map(i64::from)),
            timeout_ms: number(settings.timeout_ms.map(i64::from)),
            retry_schedule: settings
                .retry_schedule
                .iter()
                .flatten()
                .map(|ms| write_wait(*ms))
                .collect::<Vec<_>>()
                .join(", "),
            signature: settings.signature.as_str().to_owned(),
            rotate_every_days: number(settings.rotate_every_days.map(i64::from)),
            headers: String::new(),
            ordered: settings.ordered.then(|| "on".to_owned()),
            drop_headers: None,
        }
    }
}

impl Fields {
    /// The API request, or the fields that can't be converted to one.
    pub(super) fn to_json(&self) -> Result<Value, Vec<Fault>> {
        let mut faults = Vec::new();
        let mut fault = |field: &str, detail: &str| {
            faults.push(Fault {
                pointer: format!("/{field}"),
                detail: detail.to_owned(),
            });
        };
        let mut form = Map::new();
        form.insert("url".to_owned(), json!(self.url.trim()));
        form.insert("description".to_owned(), text_or_null(&self.description));
        let types: Vec<&str> = words(&self.types).collect();
        form.insert(
            "types".to_owned(),
            if types.is_empty() {
                Value::Null
            } else {
                json!(types)
            },
        );
        match pairs(&self.versions, ['=', ':']) {
            Some(versions) => form.insert("versions".to_owned(), json!(versions)),
            None => {
                fault("versions", "must have one “type = version” per line");
                None
            }
        };
        match self.filter.trim() {
            "" => {
                form.insert("filter".to_owned(), Value::Null);
            }
            text => match (serde_json::from_str::<Value>(text), find_duplicate(text)) {
                (Ok(_), Some(twice)) => fault("filter", &format!("contains {twice} more than once")),
                (Ok(filter), None) => {
                    form.insert("filter".to_owned(), filter);
                }
                (Err(error), _) => fault("filter", &format!("is not valid JSON: {error}")),
            },
        }
        for (name, text) in [
            ("concurrency", &self.concurrency),
            ("rate_per_second", &self.rate_per_second),
            ("timeout_ms", &self.timeout_ms),
            ("rotate_every_days", &self.rotate_every_days),
        ] {
            match text.trim() {
                "" => {
                    form.insert(name.to_owned(), Value::Null);
                }
                text => match text.parse::<i64>() {
                    Ok(number) => {
                        form.insert(name.to_owned(), json!(number));
                    }
                    Err(_) => fault(name, &format!("must be a whole number, not {text:?}")),
                },
            }
        }
        let waits: Vec<&str> = words(&self.retry_schedule).collect();
        form.insert(
            "retry_schedule".to_owned(),
            if waits.is_empty() {
                Value::Null
            } else {
                json!(waits)
            },
        );
        form.insert("ordered".to_owned(), json!(is_checked(&self.ordered)));
        form.insert("signature".to_owned(), text_or_null(&self.signature));
        match pairs(&self.headers, [':', ':']) {
            Some(headers) if !headers.is_empty() => {
                form.insert("headers".to_owned(), json!(headers));
            }
            Some(_) if is_checked(&self.drop_headers) => {
                form.insert("headers".to_owned(), Value::Null);
            }
            Some(_) => {}
            None => fault("headers", "must have one “Name: value” per line"),
        }
        if faults.is_empty() {
            Ok(Value::Object(form))
        } else {
            Err(faults)
        }
    }
}

/// Field errors, shown beside their fields.
#[derive(Debug, Clone, Default)]
pub(super) struct FieldErrors(pub(super) Vec<Fault>);

impl FieldErrors {
    pub(super) fn of(&self, field: &str) -> Option<String> {
        let below = format!("/{field}");
        let details: Vec<&str> = self
            .0
            .iter()
            .filter(|fault| fault.pointer == below || fault.pointer.starts_with(&format!("{below}/")))
            .map(|fault| fault.detail.as_str())
            .collect();
        (!details.is_empty()).then(|| details.join("; "))
    }
}

/// Browsers send `on` for a checkbox without a value of its own.
fn is_checked(checkbox: &Option<String>) -> bool {
    checkbox.as_deref() == Some("on")
}

fn text_or_null(text: &str) -> Value {
    match text.trim() {
        "" => Value::Null,
        text => json!(text),
    }
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split([',', '\n', '\r', ' ', '\t'])
        .filter(|word| !word.is_empty())
}

/// Lines of a name and a value. `None` if a line has no separator.
fn pairs(text: &str, separators: [char; 2]) -> Option<BTreeMap<String, String>> {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .map(|line| {
            let (name, value) = line.split_once(separators)?;
            Some((name.trim().to_owned(), value.trim().to_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields() -> Fields {
        Fields {
            url: " https://example.com/hook ".to_owned(),
            types: "invoice.*\r\ncustomer.created, ".to_owned(),
            versions: "invoice.paid = 2026-01-15".to_owned(),
            headers: "Authorization: Bearer a:b".to_owned(),
            retry_schedule: "0s, 5m 1h".to_owned(),
            timeout_ms: "500".to_owned(),
            ..Fields::default()
        }
    }

    #[test]
    fn fields_become_an_api_request() {
        let json = fields().to_json().expect("a form");
        assert_eq!(json["url"], "https://example.com/hook");
        assert_eq!(json["types"], json!(["invoice.*", "customer.created"]));
        assert_eq!(json["versions"], json!({"invoice.paid": "2026-01-15"}));
        assert_eq!(json["headers"], json!({"Authorization": "Bearer a:b"}));
        assert_eq!(json["retry_schedule"], json!(["0s", "5m", "1h"]));
        assert_eq!(
            (&json["timeout_ms"], &json["concurrency"]),
            (&json!(500), &Value::Null)
        );
        assert_eq!(json["ordered"], json!(false));
    }

    #[test]
    fn unreadable_values_are_reported_by_field() {
        let bad = Fields {
            versions: "invoice.paid".to_owned(),
            filter: "{".to_owned(),
            concurrency: "many".to_owned(),
            headers: "x".to_owned(),
            ..fields()
        };
        let errors = FieldErrors(bad.to_json().expect_err("faults"));
        for field in ["versions", "filter", "concurrency", "headers"] {
            assert!(errors.of(field).is_some(), "{field}");
        }
        assert_eq!(errors.of("url"), None);
        let twice = Fields {
            filter: r#"{"/a":{"eq":1},"/a":{"eq":2}}"#.to_owned(),
            ..fields()
        };
        let errors = FieldErrors(twice.to_json().expect_err("faults"));
        assert!(errors.of("filter").is_some());
    }

    #[test]
    fn headers_are_kept_unless_replaced_or_removed() {
        let mut form = Fields {
            headers: String::new(),
            ..fields()
        };
        assert!(form.to_json().expect("a form").get("headers").is_none());
        form.drop_headers = Some("on".to_owned());
        assert_eq!(form.to_json().expect("a form")["headers"], Value::Null);
    }
}
