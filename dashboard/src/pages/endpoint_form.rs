//! Converts an endpoint's settings to form fields and back. `actions::endpoints` validates the values, so that a page
//! can't accept what the API rejects.

use std::collections::BTreeMap;

use postrider_dispatcher::Settings;
use postrider_proto::{
    api::{self, TlsSettings},
    json::find_duplicate,
};
use serde::Deserialize;
use serde_json::Value;

use super::type_picker;
use crate::{
    actions::endpoints::rules::write_wait, http::problem::Fault, tables::endpoints::EndpointSettings,
};

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
    pub(super) tls_ca: String,
    pub(super) tls_certificate: String,
    pub(super) tls_key: String,
    /// Checkboxes are sent only when they are checked.
    pub(super) ordered: Option<String>,
    pub(super) drop_headers: Option<String>,
    pub(super) drop_tls: Option<String>,
    /// Event types that do not exist are meant.
    pub(super) allow_unmatched: Option<String>,
    /// The button that tests the filter and saves nothing.
    pub(super) test_filter: Option<String>,
    /// The checkboxes of event types, among everything else that was sent.
    #[serde(flatten)]
    pub(super) rest: BTreeMap<String, String>,
}

impl From<&EndpointSettings> for Fields {
    fn from(settings: &EndpointSettings) -> Self {
        let number = |n: Option<i64>| n.map(|n| n.to_string()).unwrap_or_default();
        let versions = settings.versions.as_ref().map(|json| &json.0);
        Self {
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
            ordered: settings.ordered.then(|| "on".to_owned()),
            ..Self::default()
        }
    }
}

impl Fields {
    /// The chosen event types: those with a checkbox, then those entered as text.
    pub(super) fn patterns(&self) -> Vec<String> {
        let is_chosen = |(_, value): &(&String, &String)| *value == "on";
        let boxes = self.rest.iter().filter(is_chosen);
        let boxes = boxes.filter_map(|(name, _)| name.strip_prefix(type_picker::FIELD));
        let mut patterns: Vec<String> = Vec::new();
        for pattern in boxes.chain(words(&self.types)) {
            if !patterns.iter().any(|one| one == pattern) {
                patterns.push(pattern.to_owned());
            }
        }
        patterns
    }

    pub(super) fn is_filter_test(&self) -> bool {
        self.test_filter.is_some()
    }

    pub(super) fn allows_unmatched(&self) -> bool {
        is_checked(&self.allow_unmatched)
    }

    fn tls(&self) -> Option<Option<TlsSettings>> {
        let given = TlsSettings {
            ca_certificates: text_or_none(&self.tls_ca),
            client_certificate: text_or_none(&self.tls_certificate),
            client_key: text_or_none(&self.tls_key),
        };
        match given.is_empty() {
            false => Some(Some(given)),
            true => is_checked(&self.drop_tls).then_some(None),
        }
    }

    /// The settings without the fields that can't be converted to them, and what is wrong with those.
    pub(super) fn to_form(&self) -> (api::EndpointSettings, Vec<Fault>) {
        let mut faults = Vec::new();
        let mut fault = |field: &str, detail: &str| {
            faults.push(Fault {
                pointer: format!("/{field}"),
                detail: detail.to_owned(),
            });
        };
        let versions = pairs(&self.versions, ['=', ':']).unwrap_or_else(|line| {
            let detail = format!("must have one “type = version” per line, not {line:?}");
            fault("versions", &detail);
            BTreeMap::new()
        });
        let filter = read_filter(&self.filter).unwrap_or_else(|detail| {
            fault("filter", &detail);
            None
        });
        let mut number = |field: &str, text: &str| match text.trim() {
            "" => None,
            text => text
                .parse::<i64>()
                .map_err(|_| fault(field, &format!("must be a whole number, not {text:?}")))
                .ok(),
        };
        let concurrency = number("concurrency", &self.concurrency);
        let rate_per_second = number("rate_per_second", &self.rate_per_second);
        let timeout_ms = number("timeout_ms", &self.timeout_ms);
        let rotate_every_days = number("rotate_every_days", &self.rotate_every_days);
        let headers = match pairs(&self.headers, [':', ':']) {
            Ok(headers) if !headers.is_empty() => Some(Some(headers)),
            Ok(_) if is_checked(&self.drop_headers) => Some(None),
            Ok(_) => None,
            // The line may hold a secret, so it is not repeated.
            Err(_) => {
                fault("headers", "must have one “Name: value” per line");
                None
            }
        };
        let settings = api::EndpointSettings {
            url: Some(Some(self.url.trim().to_owned())),
            description: Some(text_or_none(&self.description)),
            types: Some(Some(self.patterns())),
            versions: Some(Some(versions)),
            filter: Some(filter),
            concurrency: Some(concurrency),
            rate_per_second: Some(rate_per_second),
            timeout_ms: Some(timeout_ms),
            rotate_every_days: Some(rotate_every_days),
            retry_schedule: Some(words_or_none(&self.retry_schedule)),
            ordered: Some(Some(is_checked(&self.ordered))),
            signature: Some(text_or_none(&self.signature)),
            headers,
            tls: self.tls(),
            ..api::EndpointSettings::default()
        };
        (settings, faults)
    }
}

/// A numeric setting that may be left empty.
pub(super) struct Number {
    pub(super) name: &'static str,
    pub(super) label: &'static str,
    pub(super) value: String,
    /// What applies if it is empty.
    pub(super) placeholder: String,
    pub(super) hint: &'static str,
}

impl Fields {
    /// The numbers that limit how requests are sent, in the order of the page.
    pub(super) fn numbers(&self, defaults: &Settings) -> [Number; 3] {
        [
            Number {
                name: "concurrency",
                label: "Max. concurrent requests",
                value: self.concurrency.clone(),
                placeholder: defaults.concurrency.to_string(),
                hint: "Leave empty for the default.",
            },
            Number {
                name: "rate_per_second",
                label: "Max. requests per second",
                value: self.rate_per_second.clone(),
                placeholder: "no limit".to_owned(),
                hint: "",
            },
            Number {
                name: "timeout_ms",
                label: "Timeout (ms)",
                value: self.timeout_ms.clone(),
                placeholder: defaults.timeout.as_millis().to_string(),
                hint: "",
            },
        ]
    }
}

fn read_filter(text: &str) -> Result<Option<Value>, String> {
    let text = text.trim();
    if text.is_empty() {
        return Ok(None);
    }
    match (serde_json::from_str::<Value>(text), find_duplicate(text)) {
        (Ok(_), Some(twice)) => Err(format!("contains {twice} more than once")),
        (Ok(filter), None) => Ok(Some(filter).filter(|filter| !filter.is_null())),
        (Err(error), _) => Err(format!("is not valid JSON: {error}")),
    }
}

/// Browsers send `on` for a checkbox without a value of its own.
fn is_checked(checkbox: &Option<String>) -> bool {
    checkbox.as_deref() == Some("on")
}

fn text_or_none(text: &str) -> Option<String> {
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

fn words_or_none(text: &str) -> Option<Vec<String>> {
    let words: Vec<String> = words(text).map(str::to_owned).collect();
    (!words.is_empty()).then_some(words)
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split([',', '\n', '\r', ' ', '\t'])
        .filter(|word| !word.is_empty())
}

/// Lines of a name and a value, or the first line without a separator.
fn pairs(text: &str, separators: [char; 2]) -> Result<BTreeMap<String, String>, &str> {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .map(|line| {
            let (name, value) = line.split_once(separators).ok_or(line)?;
            Ok((name.trim().to_owned(), value.trim().to_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use axum::extract::Query;

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
    fn fields_become_settings() {
        let (form, faults) = fields().to_form();
        assert!(faults.is_empty(), "{faults:?}");
        let owned = |words: &[&str]| {
            Some(Some(
                words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>(),
            ))
        };
        let pair =
            |name: &str, value: &str| Some(Some(BTreeMap::from([(name.to_owned(), value.to_owned())])));
        assert_eq!(form.url, Some(Some("https://example.com/hook".to_owned())));
        assert_eq!(form.types, owned(&["invoice.*", "customer.created"]));
        assert_eq!(form.versions, pair("invoice.paid", "2026-01-15"));
        assert_eq!(form.headers, pair("Authorization", "Bearer a:b"));
        assert_eq!(form.retry_schedule, owned(&["0s", "5m", "1h"]));
        assert_eq!((form.timeout_ms, form.concurrency), (Some(Some(500)), Some(None)));
        assert_eq!(form.ordered, Some(Some(false)));
        assert_eq!((form.secret, form.enabled), (None, None));
    }

    #[test]
    fn chosen_types_are_those_with_a_checked_box_and_those_entered() {
        let sent =
            "/?type:invoice.paid=on&type:order.*=on&type:order.sent=&types=order.*+a.b&csrf=x&ordered=on";
        let sent = sent.parse().expect("an address");
        let Query(fields) = Query::<Fields>::try_from_uri(&sent).expect("a form");
        assert_eq!(fields.patterns(), ["invoice.paid", "order.*", "a.b"]);
        assert!(fields.ordered.is_some() && !fields.is_filter_test());
    }

    #[test]
    fn certificates_are_kept_unless_replaced_or_removed() {
        let mut form = fields();
        assert_eq!(form.to_form().0.tls, None);
        form.drop_tls = Some("on".to_owned());
        assert_eq!(form.to_form().0.tls, Some(None));
        form.tls_ca = " PEM ".to_owned();
        let given = form.to_form().0.tls.flatten().expect("certificates");
        assert_eq!(
            (given.ca_certificates.as_deref(), given.client_key),
            (Some("PEM"), None)
        );
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
        let faults = bad.to_form().1;
        let found: Vec<&str> = faults.iter().map(|fault| fault.pointer.as_str()).collect();
        assert_eq!(found, ["/versions", "/filter", "/concurrency", "/headers"]);
        let twice = Fields {
            filter: r#"{"/a":{"eq":1},"/a":{"eq":2}}"#.to_owned(),
            ..fields()
        };
        assert_eq!(twice.to_form().1[0].pointer, "/filter");
    }

    #[test]
    fn headers_are_kept_unless_replaced_or_removed() {
        let mut form = Fields {
            headers: String::new(),
            ..fields()
        };
        assert_eq!(form.to_form().0.headers, None);
        form.drop_headers = Some("on".to_owned());
        assert_eq!(form.to_form().0.headers, Some(None));
    }
}
