//! The settings of an endpoint and their validation. Pure. Create and patch share one form: a null field is reset to
//! its default, a missing one is left unchanged.

use std::collections::BTreeMap;

use postrider_dispatcher::{
    guard::{Guard, Refusal},
    tls::TlsSettings,
};
use postrider_proto::{
    EndpointState,
    limits::{
        DESCRIPTION_BYTES_MAX, ENDPOINT_CONCURRENCY_MAX, RATE_PER_SECOND_MAX, ROTATE_DAYS_MAX,
        ROTATE_DAYS_MIN, TIMEOUT_MS_MAX, TIMEOUT_MS_MIN, URL_BYTES_MAX,
    },
    state::SignatureFormat,
};
use serde::Deserialize;
use serde_json::Value;
use sqlx::types::Json;
use utoipa::ToSchema;

use super::{
    certificates::check_tls,
    rules::{check_filter, check_headers, check_secret, check_types, check_versions, read_schedule},
};
use crate::{
    http::{
        input::{given, given_object, is_plain_text},
        problem::{Faults, Problem},
        shapes,
    },
    tables::endpoints::EndpointSettings,
};

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(as = EndpointSettings)]
pub(crate) struct EndpointForm {
    #[serde(deserialize_with = "given")]
    #[schema(schema_with = shapes::url)]
    pub(crate) url: Option<Option<String>>,
    #[serde(deserialize_with = "given")]
    #[schema(schema_with = shapes::name_or_null)]
    pub(crate) description: Option<Option<String>>,
    #[serde(deserialize_with = "given")]
    #[schema(schema_with = shapes::patterns_or_null)]
    pub(crate) types: Option<Option<Vec<String>>>,
    #[serde(deserialize_with = "given")]
    #[schema(schema_with = shapes::versions_or_null)]
    pub(crate) versions: Option<Option<BTreeMap<String, String>>>,
    #[serde(deserialize_with = "given")]
    #[schema(schema_with = shapes::object_or_null)]
    pub(crate) filter: Option<Option<Value>>,
    #[serde(deserialize_with = "given")]
    #[schema(schema_with = shapes::concurrency_or_null)]
    pub(crate) concurrency: Option<Option<i64>>,
    #[serde(deserialize_with = "given")]
    #[schema(schema_with = shapes::rate_or_null)]
    pub(crate) rate_per_second: Option<Option<i64>>,
    #[serde(deserialize_with = "given")]
    #[schema(value_type = Option<bool>)]
    pub(crate) ordered: Option<Option<bool>>,
    #[serde(deserialize_with = "given")]
    #[schema(schema_with = shapes::schedule_or_null)]
    pub(crate) retry_schedule: Option<Option<Vec<String>>>,
    #[serde(deserialize_with = "given")]
    #[schema(schema_with = shapes::timeout_or_null)]
    pub(crate) timeout_ms: Option<Option<i64>>,
    #[serde(deserialize_with = "given")]
    #[schema(schema_with = shapes::signature_or_null)]
    pub(crate) signature: Option<Option<String>>,
    #[serde(deserialize_with = "given")]
    #[schema(schema_with = shapes::rotation_or_null)]
    pub(crate) rotate_every_days: Option<Option<i64>>,
    #[serde(deserialize_with = "given")]
    #[schema(schema_with = shapes::headers_or_null)]
    pub(crate) headers: Option<Option<BTreeMap<String, String>>>,
    #[serde(deserialize_with = "given_object")]
    #[schema(schema_with = shapes::tls_or_null)]
    pub(crate) tls: Option<Option<TlsSettings>>,
    /// Only on creation; afterwards it is rotated.
    #[serde(deserialize_with = "given")]
    #[schema(schema_with = shapes::secret_or_null)]
    pub(crate) secret: Option<Option<String>>,
    /// Only on update: a new endpoint is enabled.
    #[serde(deserialize_with = "given")]
    #[schema(value_type = bool)]
    pub(crate) enabled: Option<Option<bool>>,
}

/// The settings of an endpoint when none are given.
pub(crate) fn blank() -> EndpointSettings {
    EndpointSettings {
        url: String::new(),
        description: None,
        types: vec!["*".to_owned()],
        versions: None,
        filter: None,
        concurrency: None,
        rate_per_second: None,
        ordered: false,
        retry_schedule: None,
        timeout_ms: None,
        signature: SignatureFormat::TV1,
        rotate_every_days: None,
        state: EndpointState::Active,
        state_reason: None,
    }
}

impl EndpointForm {
    /// The settings of a new endpoint.
    pub(super) fn create(&self, guard: &Guard) -> Result<EndpointSettings, Problem> {
        let mut settings = blank();
        let mut faults = Faults::default();
        if self.enabled.is_some() {
            faults.add(
                "enabled",
                "can't be set on creation: a new endpoint is enabled. Pause it with PATCH",
            );
        }
        if self.url.is_none() {
            faults.add("url", "is required");
        }
        self.apply(&mut settings, guard, &mut faults);
        if let Some(Some(secret)) = &self.secret
            && let Err(why) = check_secret(secret, settings.signature)
        {
            faults.add("secret", why);
        }
        faults.done()?;
        Ok(settings)
    }

    /// The settings after the change.
    pub(super) fn patch(
        &self,
        mut settings: EndpointSettings,
        guard: &Guard,
    ) -> Result<EndpointSettings, Problem> {
        let mut faults = Faults::default();
        if self.secret.is_some() {
            faults.add("secret", "can't be changed by PATCH: use POST …/secret/rotate");
        }
        match self.enabled {
            None => {}
            Some(Some(true)) => {
                settings.state = EndpointState::Active;
                settings.state_reason = None;
            }
            Some(Some(false)) if settings.state == EndpointState::Active => {
                settings.state = EndpointState::Paused;
            }
            Some(Some(false)) => {}
            Some(None) => faults.add("enabled", "must be true or false"),
        }
        self.apply(&mut settings, guard, &mut faults);
        faults.done()?;
        Ok(settings)
    }

    fn apply(&self, settings: &mut EndpointSettings, guard: &Guard, faults: &mut Faults) {
        match &self.url {
            None => {}
            Some(None) => faults.add("url", "is required"),
            Some(Some(url)) => match guard.check_url(url) {
                // The ASCII form can be longer than the given URL.
                Ok(url) if url.as_str().len() > URL_BYTES_MAX => {
                    faults.add("url", Refusal::TooLong.to_string());
                }
                // Store the parsed form: it is what the validation applied to.
                Ok(url) => settings.url = url.into(),
                Err(refusal) => faults.add("url", refusal.to_string()),
            },
        }
        if let Some(description) = &self.description {
            let fits = |text: &String| is_plain_text(text, DESCRIPTION_BYTES_MAX);
            if !description.as_ref().is_none_or(fits) {
                faults.add(
                    "description",
                    format!(
                        "must be at most {DESCRIPTION_BYTES_MAX} bytes of text without control characters"
                    ),
                );
            }
            settings.description.clone_from(description);
        }
        if let Some(types) = &self.types {
            settings.types = types.clone().unwrap_or_else(|| blank().types);
            check_types(&settings.types, faults);
        }
        if let Some(versions) = &self.versions {
            check_versions(versions.as_ref(), faults);
            settings.versions = versions.clone().filter(|map| !map.is_empty()).map(Json);
        }
        if let Some(filter) = &self.filter {
            check_filter(filter.as_ref(), faults);
            settings.filter = filter.clone().map(Json);
        }
        if let Some(n) = self.concurrency {
            settings.concurrency = faults.number("concurrency", n, 1, ENDPOINT_CONCURRENCY_MAX);
        }
        if let Some(n) = self.rate_per_second {
            settings.rate_per_second = faults.number("rate_per_second", n, 1, RATE_PER_SECOND_MAX);
        }
        if let Some(n) = self.timeout_ms {
            settings.timeout_ms = faults.number("timeout_ms", n, TIMEOUT_MS_MIN, TIMEOUT_MS_MAX);
        }
        if let Some(ordered) = self.ordered {
            settings.ordered = ordered.unwrap_or(false);
        }
        if let Some(schedule) = &self.retry_schedule {
            settings.retry_schedule = schedule.as_ref().map(|waits| read_schedule(waits, faults));
        }
        if let Some(signature) = &self.signature {
            let word = signature.as_deref().unwrap_or(SignatureFormat::TV1.as_str());
            match SignatureFormat::ALL.iter().find(|format| format.as_str() == word) {
                Some(format) => settings.signature = *format,
                None => faults.add("signature", "must be t-v1, standard or standard-ed25519"),
            }
        }
        if let Some(days) = self.rotate_every_days {
            settings.rotate_every_days = match days {
                Some(0) => Some(0),
                days => faults.number("rotate_every_days", days, ROTATE_DAYS_MIN, ROTATE_DAYS_MAX),
            };
        }
        if let Some(Some(headers)) = &self.headers {
            check_headers(headers, faults);
        }
        if let Some(Some(tls)) = &self.tls {
            check_tls(tls, faults);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actions::endpoints::rules::write_wait;
    use serde_json::json;

    fn form(value: Value) -> EndpointForm {
        serde_json::from_value(value).expect("a form")
    }

    fn pointers(result: Result<EndpointSettings, Problem>) -> Vec<String> {
        match result {
            Ok(_) => Vec::new(),
            Err(problem) => problem.errors.into_iter().map(|fault| fault.pointer).collect(),
        }
    }

    fn create(value: Value) -> Vec<String> {
        pointers(form(value).create(&Guard::default()))
    }

    #[test]
    fn a_full_form_is_taken() {
        let settings = form(json!({
            "url": "https://example.com/hook", "description": "d", "types": ["invoice.*", "*"],
            "versions": {"invoice.paid": "2026-01-15"}, "concurrency": 1024, "rate_per_second": 10,
            "ordered": true, "retry_schedule": ["0s", "5s", "1m", "24d", "1500ms"], "timeout_ms": 100,
            "signature": "standard", "headers": {"X-Token": "abc"}, "filter": {"/amount": {"gte": 1}},
            "secret": "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
        }))
        .create(&Guard::default())
        .expect("good settings");
        assert_eq!(settings.signature, SignatureFormat::Standard);
        let waits: Vec<String> = settings
            .retry_schedule
            .expect("a schedule")
            .into_iter()
            .map(write_wait)
            .collect();
        assert_eq!(waits, ["0s", "5s", "1m", "24d", "1500ms"]);
    }

    #[test]
    fn each_wrong_field_is_named() {
        for (field, bad) in [
            ("url", json!("http://127.0.0.1/")),
            ("url", json!(format!("https://example.com/{}", "ä".repeat(1_000)))),
            ("description", json!("a\u{0}")),
            ("types", json!([])),
            ("types/0", json!(["a.*.b"])),
            ("versions/A", json!({"A": "1"})),
            ("versions/a.b", json!({"a.b": "-"})),
            ("filter/a", json!({"a": 1})),
            ("filter/~1a/like", json!({"/a": {"like": "x"}})),
            ("filter", json!({})),
            ("filter", json!([])),
            ("filter", json!({"/a": {"eq": "\u{0}"}})),
            ("concurrency", json!(0)),
            ("concurrency", json!(1025)),
            ("rate_per_second", json!(-1)),
            ("timeout_ms", json!(60_001)),
            ("retry_schedule", json!([])),
            ("retry_schedule/1", json!(["1s", "5"])),
            ("retry_schedule/0", json!(["30d"])),
            ("signature", json!("v2")),
            ("rotate_every_days", json!(6)),
            ("rotate_every_days", json!(731)),
            ("headers/Host", json!({"Host": "x"})),
            ("headers/Content-Length", json!({"Content-Length": "1"})),
            ("headers/Transfer-Encoding", json!({"Transfer-Encoding": "x"})),
            ("headers/webhook-signature", json!({"webhook-signature": "x"})),
            ("headers/X", json!({"X": "a\r\nB: c"})),
            ("headers/x", json!({"X": "a", "x": "b"})),
            ("headers/a b", json!({"a b": "x"})),
            ("headers/X", json!({"X": "a".repeat(1024)})),
            ("headers/Connection", json!({"Connection": "x"})),
            ("headers/Proxy-Authorization", json!({"Proxy-Authorization": "x"})),
            ("headers/Content-Encoding", json!({"Content-Encoding": "gzip"})),
            ("headers/X", json!({"X": "\u{0}"})),
            ("headers/X", json!({"X": "ä"})),
            ("headers/", json!({"": "x"})),
            ("tls/ca_certificates", json!({"ca_certificates": "no PEM"})),
            ("tls/client_key", json!({"client_certificate": "x"})),
            ("tls/client_certificate", json!({"client_key": "x"})),
            ("secret", json!("short")),
            ("enabled", json!(true)),
        ] {
            let mut value = json!({"url": "https://example.com/"});
            value[field.split('/').next().expect("a field")] = bad.clone();
            assert_eq!(create(value), [format!("/{field}")], "{bad}");
        }
        assert_eq!(create(json!({})), ["/url"]);
        assert_eq!(
            create(json!({"url": null, "timeout_ms": 1})),
            ["/url", "/timeout_ms"]
        );
    }

    #[test]
    fn null_clears_absence_keeps_and_enabled_pauses() {
        let mut before = blank();
        before.url = "https://example.com/".to_owned();
        before.timeout_ms = Some(500);
        before.concurrency = Some(3);
        let after = form(json!({"timeout_ms": null, "enabled": false}))
            .patch(before.clone(), &Guard::default())
            .expect("a change");
        assert_eq!((after.timeout_ms, after.concurrency), (None, Some(3)));
        assert_eq!(after.state, EndpointState::Paused);

        before.state = EndpointState::Disabled;
        before.state_reason = Some("gone".to_owned());
        let paused = form(json!({"enabled": false})).patch(before.clone(), &Guard::default());
        assert_eq!(paused.expect("a change").state, EndpointState::Disabled);
        let resumed = form(json!({"enabled": true})).patch(before.clone(), &Guard::default());
        let resumed = resumed.expect("a change");
        assert_eq!(
            (resumed.state, resumed.state_reason),
            (EndpointState::Active, None)
        );

        let to_private = form(json!({"url": "https://10.0.0.1/"})).patch(before.clone(), &Guard::default());
        assert_eq!(pointers(to_private), ["/url"]);
        for (name, value) in [
            ("Host", "x"),
            ("X", "a\r\nHost: x"),
            ("Webhook-Signature", "x"),
            ("X", "\u{0}"),
        ] {
            let changed = form(json!({"headers": {name: value}})).patch(before.clone(), &Guard::default());
            assert_eq!(pointers(changed), [format!("/headers/{name}")], "{value}");
        }
    }

    #[test]
    fn an_unknown_field_is_refused_by_name() {
        let error = serde_json::from_value::<EndpointForm>(json!({"urls": 1})).expect_err("unknown");
        assert!(error.to_string().contains("urls"));
    }
}
