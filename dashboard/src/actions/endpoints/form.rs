//! The settings of an endpoint: defaults, validation, and how they are shown. Create and patch share one form: a null
//! field is reset to its default, a missing one is left unchanged.

use postrider_dispatcher::{
    guard::{Guard, Refusal},
    vault::Vault,
};
use postrider_proto::{
    EndpointState,
    api::{self, CONCURRENCY, RATE_PER_SECOND, TIMEOUT_MS},
    limits::{DESCRIPTION_BYTES_MAX, ROTATE_DAYS_MAX, ROTATE_DAYS_MIN, URL_BYTES_MAX},
    state::SignatureFormat,
};
use sqlx::types::Json;

use super::{
    certificates::{check_tls, shown},
    rules::{
        check_filter, check_headers, check_secret, check_types, check_versions, read_schedule, write_wait,
    },
};
use crate::{
    actions::attempt_view::{HIDDEN, custom_header_names},
    http::{
        input::is_plain_text,
        problem::{Faults, Problem},
    },
    tables::endpoints::{EndpointRow, EndpointSettings},
};

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

/// The settings of a new endpoint.
pub(super) fn create(form: &api::EndpointSettings, guard: &Guard) -> Result<EndpointSettings, Problem> {
    let mut settings = blank();
    let mut faults = Faults::default();
    if form.enabled.is_some() {
        faults.add(
            "enabled",
            "can't be set on creation: a new endpoint is enabled. Pause it with PATCH",
        );
    }
    if form.url.is_none() {
        faults.add("url", "is required");
    }
    apply(form, &mut settings, guard, &mut faults);
    if let Some(Some(secret)) = &form.secret
        && let Err(why) = check_secret(secret, settings.signature)
    {
        faults.add("secret", why);
    }
    faults.done()?;
    Ok(settings)
}

/// The settings after the change.
pub(super) fn patch(
    form: &api::EndpointSettings,
    mut settings: EndpointSettings,
    guard: &Guard,
) -> Result<EndpointSettings, Problem> {
    let mut faults = Faults::default();
    if form.secret.is_some() {
        faults.add("secret", "can't be changed by PATCH: use POST …/secret/rotate");
    }
    match form.enabled {
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
    apply(form, &mut settings, guard, &mut faults);
    faults.done()?;
    Ok(settings)
}

fn apply(form: &api::EndpointSettings, settings: &mut EndpointSettings, guard: &Guard, faults: &mut Faults) {
    match &form.url {
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
    if let Some(description) = &form.description {
        let fits = |text: &String| is_plain_text(text, DESCRIPTION_BYTES_MAX);
        if !description.as_ref().is_none_or(fits) {
            faults.add(
                "description",
                format!("must be at most {DESCRIPTION_BYTES_MAX} bytes of text without control characters"),
            );
        }
        settings.description.clone_from(description);
    }
    if let Some(types) = &form.types {
        settings.types = types.clone().unwrap_or_else(|| blank().types);
        check_types(&settings.types, faults);
    }
    if let Some(versions) = &form.versions {
        check_versions(versions.as_ref(), faults);
        settings.versions = versions.clone().filter(|map| !map.is_empty()).map(Json);
    }
    if let Some(filter) = &form.filter {
        check_filter(filter.as_ref(), faults);
        settings.filter = filter.clone().map(Json);
    }
    if let Some(n) = form.concurrency {
        settings.concurrency = faults.number("concurrency", n, CONCURRENCY);
    }
    if let Some(n) = form.rate_per_second {
        settings.rate_per_second = faults.number("rate_per_second", n, RATE_PER_SECOND);
    }
    if let Some(n) = form.timeout_ms {
        settings.timeout_ms = faults.number("timeout_ms", n, TIMEOUT_MS);
    }
    if let Some(ordered) = form.ordered {
        settings.ordered = ordered.unwrap_or(false);
    }
    if let Some(schedule) = &form.retry_schedule {
        settings.retry_schedule = schedule.as_ref().map(|waits| read_schedule(waits, faults));
    }
    if let Some(signature) = &form.signature {
        let word = signature.as_deref().unwrap_or(SignatureFormat::TV1.as_str());
        match SignatureFormat::ALL.iter().find(|format| format.as_str() == word) {
            Some(format) => settings.signature = *format,
            None => faults.add("signature", "must be t-v1, standard or standard-ed25519"),
        }
    }
    if let Some(days) = form.rotate_every_days {
        settings.rotate_every_days = match days {
            Some(0) => Some(0),
            days => faults.number("rotate_every_days", days, ROTATE_DAYS_MIN..=ROTATE_DAYS_MAX),
        };
    }
    if let Some(Some(headers)) = &form.headers {
        check_headers(headers, faults);
    }
    if let Some(Some(tls)) = &form.tls {
        check_tls(tls, faults);
    }
}

/// An endpoint as it is shown. Secrets are not part of it.
pub(crate) fn view(vault: &Vault, row: EndpointRow) -> api::Endpoint {
    let headers = custom_header_names(vault, &row);
    let tls = shown(vault, &row);
    let settings = row.settings;
    api::Endpoint {
        id: row.public_id,
        url: settings.url,
        description: settings.description,
        types: settings.types,
        versions: settings.versions.map(|json| json.0).unwrap_or_default(),
        filter: settings.filter.map(|json| json.0),
        concurrency: settings.concurrency,
        rate_per_second: settings.rate_per_second,
        ordered: settings.ordered,
        retry_schedule: settings
            .retry_schedule
            .map(|waits| waits.into_iter().map(write_wait).collect()),
        timeout_ms: settings.timeout_ms,
        signature: settings.signature,
        rotate_every_days: settings.rotate_every_days,
        headers: headers
            .into_iter()
            .map(|name| (name, HIDDEN.to_owned()))
            .collect(),
        tls,
        enabled: settings.state == EndpointState::Active,
        state: settings.state,
        state_reason: settings.state_reason,
        health: None,
        created_at: row.created_at,
        updated_at: row.updated_at,
        public_key: row.public_key,
        secret: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn form(value: Value) -> api::EndpointSettings {
        serde_json::from_value(value).expect("a form")
    }

    fn pointers(result: Result<EndpointSettings, Problem>) -> Vec<String> {
        match result {
            Ok(_) => Vec::new(),
            Err(problem) => problem.errors.into_iter().map(|fault| fault.pointer).collect(),
        }
    }

    fn patched(value: Value, before: &EndpointSettings) -> Result<EndpointSettings, Problem> {
        patch(&form(value), before.clone(), &Guard::default())
    }

    fn create(value: Value) -> Vec<String> {
        pointers(super::create(&form(value), &Guard::default()))
    }

    #[test]
    fn a_full_form_is_taken() {
        let given = form(json!({
            "url": "https://example.com/hook", "description": "d", "types": ["invoice.*", "*"],
            "versions": {"invoice.paid": "2026-01-15"}, "concurrency": 1024, "rate_per_second": 10,
            "ordered": true, "retry_schedule": ["0s", "5s", "1m", "24d", "1500ms"], "timeout_ms": 100,
            "signature": "standard", "headers": {"X-Token": "abc"}, "filter": {"/amount": {"gte": 1}},
            "secret": "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
        }));
        let settings = super::create(&given, &Guard::default()).expect("good settings");
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
        let after = patched(json!({"timeout_ms": null, "enabled": false}), &before).expect("a change");
        assert_eq!((after.timeout_ms, after.concurrency), (None, Some(3)));
        assert_eq!(after.state, EndpointState::Paused);

        before.state = EndpointState::Disabled;
        before.state_reason = Some("gone".to_owned());
        let paused = patched(json!({"enabled": false}), &before);
        assert_eq!(paused.expect("a change").state, EndpointState::Disabled);
        let resumed = patched(json!({"enabled": true}), &before);
        let resumed = resumed.expect("a change");
        assert_eq!(
            (resumed.state, resumed.state_reason),
            (EndpointState::Active, None)
        );

        let to_private = patched(json!({"url": "https://10.0.0.1/"}), &before);
        assert_eq!(pointers(to_private), ["/url"]);
        for (name, value) in [
            ("Host", "x"),
            ("X", "a\r\nHost: x"),
            ("Webhook-Signature", "x"),
            ("X", "\u{0}"),
        ] {
            let changed = patched(json!({"headers": {name: value}}), &before);
            assert_eq!(pointers(changed), [format!("/headers/{name}")], "{value}");
        }
    }

    #[test]
    fn an_unknown_field_is_refused_by_name() {
        let error = serde_json::from_value::<api::EndpointSettings>(json!({"urls": 1})).expect_err("unknown");
        assert!(error.to_string().contains("urls"));
    }
}
