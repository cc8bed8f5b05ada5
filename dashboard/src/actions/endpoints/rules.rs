//! Validation of single endpoint fields, each with its error message. Pure.

use std::collections::BTreeMap;

use axum::http::HeaderName;
use postrider_dispatcher::retry::parse_wait;
use postrider_proto::{
    filter::Filter,
    json::pointer_part,
    limits::{
        CUSTOM_HEADER_BYTES_MAX, CUSTOM_HEADERS_MAX, SCHEDULE_STEPS_MAX, SECRET_BYTES_MAX,
        TYPES_PER_ENDPOINT_MAX,
    },
    routing::{is_pattern, is_type_name, is_version},
    signature::Secret,
    state::SignatureFormat,
};
use serde_json::Value;

use crate::{
    actions::attempt_view::HIDDEN,
    http::problem::{Faults, excerpt},
};

pub(crate) fn check_types(types: &[String], faults: &mut Faults) {
    if types.is_empty() || types.len() > TYPES_PER_ENDPOINT_MAX {
        faults.add(
            "types",
            format!(
                "must have 1 to {TYPES_PER_ENDPOINT_MAX} entries, not {}",
                types.len()
            ),
        );
        return;
    }
    for (index, pattern) in types.iter().enumerate() {
        if !is_pattern(pattern) {
            faults.add(
                &format!("types/{index}"),
                format!(
                    "`{}` is not an event type, a prefix followed by `.*`, or `*`",
                    excerpt(pattern)
                ),
            );
        }
    }
}

pub(crate) fn check_versions(versions: Option<&BTreeMap<String, String>>, faults: &mut Faults) {
    let Some(versions) = versions else { return };
    if versions.len() > TYPES_PER_ENDPOINT_MAX {
        faults.add(
            "versions",
            format!(
                "must have at most {TYPES_PER_ENDPOINT_MAX} entries, not {}",
                versions.len()
            ),
        );
        return;
    }
    for (name, version) in versions {
        let field = format!("versions/{}", pointer_part(name));
        if !is_type_name(name) {
            faults.add(&field, format!("`{}` is not an event type name", excerpt(name)));
        } else if !is_version(version) {
            faults.add(&field, format!("`{}` is not a valid version", excerpt(version)));
        }
    }
}

pub(crate) fn check_filter(filter: Option<&Value>, faults: &mut Faults) {
    let Some(filter) = filter else { return };
    match Filter::read(filter) {
        // Postgres text can't contain NUL.
        Ok(_) if filter.to_string().contains("\\u0000") => {
            faults.add("filter", "must not contain a NUL character")
        }
        Ok(_) => {}
        Err(error) => faults.add(&format!("filter{}", error.pointer), error.message),
    }
}

pub(crate) fn read_schedule(waits: &[String], faults: &mut Faults) -> Vec<i32> {
    if waits.is_empty() || waits.len() > SCHEDULE_STEPS_MAX {
        faults.add(
            "retry_schedule",
            format!("must have 1 to {SCHEDULE_STEPS_MAX} delays, not {}", waits.len()),
        );
        return Vec::new();
    }
    let mut stored = Vec::new();
    for (index, text) in waits.iter().enumerate() {
        let field = format!("retry_schedule/{index}");
        match parse_wait(text).map(|wait| i32::try_from(wait.as_millis())) {
            Ok(Ok(ms)) => stored.push(ms),
            // Delays are stored as 32-bit milliseconds.
            Ok(Err(_)) => faults.add(
                &field,
                format!(
                    "`{}` is too long: the maximum for an endpoint is 24d",
                    excerpt(text)
                ),
            ),
            Err(error) => faults.add(&field, error.to_string()),
        }
    }
    stored
}

/// Formats a delay in the largest unit that is exact.
pub(crate) fn write_wait(ms: i32) -> String {
    let ms = ms.max(0);
    let units = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1_000, "s")];
    match units.into_iter().find(|(unit, _)| ms > 0 && ms % unit == 0) {
        Some((unit, word)) => format!("{}{word}", ms / unit),
        None if ms == 0 => "0s".to_owned(),
        None => format!("{ms}ms"),
    }
}

pub(crate) fn check_secret(secret: &str, format: SignatureFormat) -> Result<(), &'static str> {
    if secret.len() > SECRET_BYTES_MAX || !secret.bytes().all(|b| b.is_ascii_graphic()) {
        return Err("must be at most 256 visible ASCII characters without spaces");
    }
    if Secret::new(secret).fits(format) {
        return Ok(());
    }
    Err(match format {
        SignatureFormat::TV1 => "must be at least 24 characters, not counting `whsec_`",
        SignatureFormat::Standard => "must be `whsec_` followed by the base64 encoding of 24 to 64 bytes",
        SignatureFormat::StandardEd25519 => {
            "must be `whsk_` followed by the base64 encoding of an Ed25519 private key"
        }
    })
}

pub(crate) fn check_headers(headers: &BTreeMap<String, String>, faults: &mut Faults) {
    if headers.len() > CUSTOM_HEADERS_MAX {
        faults.add(
            "headers",
            format!(
                "must have at most {CUSTOM_HEADERS_MAX} headers, not {}",
                headers.len()
            ),
        );
        return;
    }
    let mut seen = Vec::new();
    for (name, value) in headers {
        let field = format!("headers/{}", pointer_part(name));
        let Ok(parsed) = HeaderName::from_bytes(name.as_bytes()) else {
            faults.add(&field, "is not a valid HTTP header name");
            continue;
        };
        if is_ours(parsed.as_str()) {
            faults.add(&field, "is reserved: Postrider sets this header itself");
        }
        // Receivers interpret other bytes differently.
        let is_plain = value.bytes().all(|b| b == b' ' || b.is_ascii_graphic());
        if value.trim() != value || !is_plain {
            faults.add(
                &field,
                "value must be visible ASCII without line breaks, leading or trailing spaces",
            );
        }
        if value.contains(HIDDEN) {
            faults.add(
                &field,
                format!("{HIDDEN} is a placeholder for a masked value: send the actual value"),
            );
        }
        if name.len() + value.len() > CUSTOM_HEADER_BYTES_MAX {
            faults.add(
                &field,
                format!("must be at most {CUSTOM_HEADER_BYTES_MAX} bytes, name and value together"),
            );
        }
        if seen.contains(&parsed) {
            faults.add(&field, "is given twice: header names are case-insensitive");
        }
        seen.push(parsed);
    }
}

/// Headers that frame the request, control the connection or carry the signature. `name` is lower case.
fn is_ours(name: &str) -> bool {
    const FIXED: [&str; 11] = [
        "connection",
        "expect",
        "forwarded",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "trailers",
        "transfer-encoding",
        "upgrade",
        "user-agent",
    ];
    const PREFIXES: [&str; 3] = ["content-", "proxy-", "webhook-"];
    FIXED.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_written_as_it_is_read() {
        for text in ["0s", "1ms", "1500ms", "5s", "1m", "90m", "24h", "24d"] {
            let mut faults = Faults::default();
            let ms = read_schedule(&[text.to_owned()], &mut faults);
            assert!(faults.done().is_ok(), "{text}");
            let again = read_schedule(&[write_wait(ms[0])], &mut Faults::default());
            assert_eq!(again, ms, "{text}");
        }
    }

    #[test]
    fn a_secret_must_fit_its_format() {
        let long = "a".repeat(257);
        for (secret, fits) in [
            ("whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", [true, true, false]),
            ("whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAA", [true, false, false]),
            ("an-own-secret-of-some-length", [true, false, false]),
            ("twenty-three-characters", [false; 3]),
            ("whsec_18-characters-more", [false; 3]),
            ("whsec_twenty-three-characters", [false; 3]),
            ("whsec_twenty-four-characters-x", [true, false, false]),
            (
                "whsk_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=",
                [false, false, true],
            ),
            ("whsk_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", [false; 3]),
            ("short", [false; 3]),
            ("spaces are not allowed here", [false; 3]),
            (long.as_str(), [false; 3]),
            ("", [false; 3]),
        ] {
            for (format, fits) in SignatureFormat::ALL.iter().zip(fits) {
                assert_eq!(check_secret(secret, *format).is_ok(), fits, "{secret} {format}");
            }
        }
    }
}
