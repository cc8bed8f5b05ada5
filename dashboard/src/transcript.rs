//! What went over the wire in an attempt, as far as it was kept; the request's headers are put together again.
//! Invariant: the values of custom headers are never shown: they often hold a token.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use postrider_dispatcher::vault::{Purpose, Vault};
use postrider_proto::{OutcomeKind, limits::ANSWER_KEPT_BYTES_MAX};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{
    openapi::shapes,
    tables::{attempts::AttemptRow, endpoints::EndpointRow},
};

/// Stands for the value of a custom header.
pub(crate) const HIDDEN: &str = "[hidden]";

pub(crate) const USER_AGENT: &str = concat!("Postrider/", env!("CARGO_PKG_VERSION"));

#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct Attempt {
    pub(crate) number: i16,
    pub(crate) started_at: DateTime<Utc>,
    pub(crate) duration_ms: i32,
    #[schema(schema_with = shapes::outcome)]
    pub(crate) outcome: &'static str,
    #[schema(schema_with = shapes::status_or_null)]
    pub(crate) status: Option<i16>,
    pub(crate) error: Option<String>,
    /// Empty when nothing was sent.
    pub(crate) request_headers: BTreeMap<String, String>,
    pub(crate) response_head: Option<String>,
    pub(crate) response_body: Option<String>,
    pub(crate) replay: Option<String>,
}

impl Attempt {
    pub(crate) fn of(row: AttemptRow, event_id: &str, custom_headers: &[String]) -> Self {
        let request_headers = match &row.signature {
            None => BTreeMap::new(),
            Some(signature) => request_headers(&row, event_id, signature, custom_headers),
        };
        Self {
            number: row.number,
            started_at: row.started_at,
            duration_ms: row.duration_ms,
            outcome: outcome_word(row.outcome),
            status: row.status,
            error: row.error,
            request_headers,
            response_head: row.response_head,
            response_body: row.response_body.map(|bytes| {
                let kept = &bytes[..bytes.len().min(ANSWER_KEPT_BYTES_MAX)];
                String::from_utf8_lossy(kept).into_owned()
            }),
            replay: row.replay_id,
        }
    }

    /// What happened, in a sentence for people.
    pub(crate) fn in_words(&self) -> String {
        attempt_words(self.status, self.error.as_deref(), self.outcome)
    }

    /// The colour it is shown in.
    pub(crate) fn tone(&self) -> &'static str {
        attempt_tone(self.status)
    }
}

pub(crate) fn attempt_words(status: Option<i16>, error: Option<&str>, outcome: &str) -> String {
    match (status, error) {
        (Some(status @ 200..300), _) => format!("Accepted with {}", status_words(status)),
        (Some(status @ 300..400), _) => {
            format!(
                "Answered with {}: redirects are not followed",
                status_words(status)
            )
        }
        (Some(status), _) => format!("Refused with {}", status_words(status)),
        (None, Some(error)) => error_words(error),
        (None, None) => outcome.replace('_', " "),
    }
}

pub(crate) fn attempt_tone(status: Option<i16>) -> &'static str {
    match status {
        Some(200..300) => "good",
        _ => "bad",
    }
}

/// `503 Service Unavailable`.
fn status_words(status: i16) -> String {
    let reason = u16::try_from(status)
        .ok()
        .and_then(|status| StatusCode::from_u16(status).ok())
        .and_then(|status| status.canonical_reason());
    match reason {
        Some(reason) => format!("{status} {reason}"),
        None => status.to_string(),
    }
}

/// What a library said of a failure, in the words of whoever has to mend it. Others are shown as they are.
pub(crate) fn error_words(error: &str) -> String {
    // The dispatcher words certificate errors itself, with the date: only raw errors of the TLS library are translated.
    let raw = !error.starts_with("the TLS certificate");
    let found = |part: &str| raw && error.contains(part);
    if found("certificate expired") || found("CertExpired") || found("certificate has expired") {
        match unix_time_after(error, "not valid after ") {
            Some(at) => format!(
                "The TLS certificate expired on {}",
                at.format("%-d %B %Y, %H:%M UTC")
            ),
            None => "The TLS certificate has expired".to_owned(),
        }
    } else if found("not valid yet") || found("NotValidYet") {
        match unix_time_after(error, "not valid before ") {
            Some(at) => format!(
                "The TLS certificate is valid only from {}",
                at.format("%-d %B %Y, %H:%M UTC")
            ),
            None => "The TLS certificate is not valid yet".to_owned(),
        }
    } else if found("UnknownIssuer") {
        "The TLS certificate was not issued by an authority that is trusted: is a certificate of the chain missing?".to_owned()
    } else if found("not valid for name") || found("NotValidForName") {
        "The TLS certificate is for another name than the URL's".to_owned()
    } else {
        let mut letters = error.chars();
        match letters.next() {
            Some(first) => first.to_uppercase().chain(letters).collect(),
            None => "It failed".to_owned(),
        }
    }
}

/// The seconds since 1970 that stand behind these words.
fn unix_time_after(text: &str, words: &str) -> Option<DateTime<Utc>> {
    let (_, rest) = text.split_once(words)?;
    let digits = rest
        .find(|c: char| !c.is_ascii_digit())
        .map_or(rest, |end| &rest[..end]);
    DateTime::from_timestamp(digits.parse().ok()?, 0)
}

pub(crate) fn outcome_word(number: i16) -> &'static str {
    OutcomeKind::from_number(number).map_or("unknown", OutcomeKind::as_str)
}

fn request_headers(
    row: &AttemptRow,
    event_id: &str,
    signature: &str,
    custom_headers: &[String],
) -> BTreeMap<String, String> {
    let mut headers: BTreeMap<String, String> = custom_headers
        .iter()
        .map(|name| (name.clone(), HIDDEN.to_owned()))
        .collect();
    let ours = [
        ("Content-Type", "application/json".to_owned()),
        ("User-Agent", USER_AGENT.to_owned()),
        ("Webhook-Id", event_id.to_owned()),
        ("Webhook-Timestamp", row.started_at.timestamp().to_string()),
        ("Webhook-Signature", signature.to_owned()),
    ];
    for (name, value) in ours {
        headers.insert(name.to_owned(), value);
    }
    if let Some(replay) = &row.replay_id {
        headers.insert("Webhook-Replay".to_owned(), replay.clone());
    }
    headers
}

/// The custom headers an endpoint has now. A value that does not open is as good as none here.
pub(crate) fn custom_header_names(vault: &Vault, endpoint: &EndpointRow) -> Vec<String> {
    let Some(sealed) = &endpoint.headers else {
        return Vec::new();
    };
    vault
        .open(endpoint.owner(), Purpose::Headers, sealed)
        .ok()
        .and_then(|clear| serde_json::from_slice::<BTreeMap<String, String>>(&clear).ok())
        .map(|headers| headers.into_keys().collect())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(signature: Option<&str>) -> AttemptRow {
        AttemptRow {
            number: 2,
            started_at: DateTime::from_timestamp_millis(1_700_000_000_999).expect("a time"),
            duration_ms: 12,
            outcome: 2,
            status: Some(500),
            error: None,
            signature: signature.map(str::to_owned),
            response_head: None,
            response_body: Some(b"a\xff\0b".to_vec()),
            replay_id: Some("dlv_1".to_owned()),
        }
    }

    #[test]
    fn the_request_is_put_together_without_secrets() {
        let attempt = Attempt::of(row(Some("t=1,v1=ab")), "evt_1", &["authorization".to_owned()]);
        let headers = attempt.request_headers;
        assert_eq!(headers["Webhook-Timestamp"], "1700000000");
        assert_eq!(headers["Webhook-Signature"], "t=1,v1=ab");
        assert_eq!(headers["Webhook-Replay"], "dlv_1");
        assert_eq!(headers["authorization"], HIDDEN);
        assert_eq!(attempt.outcome, "refused");
        assert_eq!(attempt.response_body.as_deref(), Some("a\u{fffd}\0b"));
    }

    #[test]
    fn failures_are_told_in_words() {
        let expired = "invalid peer certificate: certificate expired: verification time 1763295187 (UNIX), \
                       but certificate is not valid after 1763208000 (87187 seconds ago)";
        assert_eq!(
            error_words(expired),
            "The TLS certificate expired on 15 November 2025, 12:00 UTC"
        );
        assert_eq!(error_words("connection refused"), "Connection refused");
        assert_eq!(error_words("no response in 10 s"), "No response in 10 s");
        // The dispatcher already names the day: it must reach the page.
        assert_eq!(
            error_words("the TLS certificate expired on 2026-01-02"),
            "The TLS certificate expired on 2026-01-02"
        );
        assert!(error_words("invalid peer certificate: UnknownIssuer").contains("trusted"));
        assert_eq!(
            error_words("not valid after x certificate expired"),
            "The TLS certificate has expired"
        );
        assert_eq!(
            Attempt::of(row(None), "evt_1", &[]).in_words(),
            "Refused with 500 Internal Server Error"
        );
    }

    #[test]
    fn nothing_was_sent_shows_no_headers() {
        assert!(Attempt::of(row(None), "evt_1", &[]).request_headers.is_empty());
    }
}
