//! The request and response of an attempt, as stored. Request headers are not stored; they are reconstructed here.
//! Invariant: values of custom headers are never shown, because they often contain tokens.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use postrider_dispatcher::vault::{Purpose, Vault};
use postrider_proto::{OutcomeKind, api::Attempt, limits::ANSWER_KEPT_BYTES_MAX};
use sqlx::PgConnection;

use crate::{
    App,
    http::problem::Problem,
    tables::{
        attempts::{self, AttemptRow},
        deliveries::Delivery,
        endpoints::{self, EndpointRow},
    },
};

/// Placeholder for the value of a custom header.
pub(crate) const HIDDEN: &str = "[hidden]";

pub(crate) const USER_AGENT: &str = concat!("Postrider/", env!("CARGO_PKG_VERSION"));

/// An attempt as stored, with the headers of its request.
pub(crate) fn attempt_view(row: AttemptRow, event_id: &str, custom_headers: &[String]) -> Attempt {
    let request_headers = match &row.signature {
        None => BTreeMap::new(),
        Some(signature) => request_headers(&row, event_id, signature, custom_headers),
    };
    Attempt {
        number: row.number,
        started_at: row.started_at,
        duration_ms: row.duration_ms,
        outcome: outcome_name(row.outcome).to_owned(),
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

/// How pages show an attempt.
pub(crate) trait Shown {
    /// The result in one line: the status of the response, or the error.
    fn summary(&self) -> String;
    fn has_failed(&self) -> bool;
    /// The CSS class of its colour.
    fn tone(&self) -> &'static str;
}

impl Shown for Attempt {
    fn summary(&self) -> String {
        attempt_summary(self.status, self.error.as_deref(), &self.outcome)
    }

    fn has_failed(&self) -> bool {
        !matches!(self.status, Some(200..300))
    }

    fn tone(&self) -> &'static str {
        attempt_tone(self.status)
    }
}

pub(crate) fn attempt_summary(status: Option<i16>, error: Option<&str>, outcome: &str) -> String {
    match (status, error) {
        (Some(status @ 300..400), _) => format!("{} (redirects are not followed)", status_line(status)),
        (Some(status), _) => status_line(status),
        (None, Some(error)) => error_summary(error),
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
fn status_line(status: i16) -> String {
    let reason = u16::try_from(status)
        .ok()
        .and_then(|status| StatusCode::from_u16(status).ok())
        .and_then(|status| status.canonical_reason());
    match reason {
        Some(reason) => format!("{status} {reason}"),
        None => status.to_string(),
    }
}

/// Rewrites the error messages of TLS libraries for the people who run the receiver. Other messages are shown as stored.
pub(crate) fn error_summary(error: &str) -> String {
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
                "The TLS certificate is not valid before {}",
                at.format("%-d %B %Y, %H:%M UTC")
            ),
            None => "The TLS certificate is not valid yet".to_owned(),
        }
    } else if found("UnknownIssuer") {
        "The TLS certificate was not issued by a trusted authority. Is an intermediate certificate missing?"
            .to_owned()
    } else if found("not valid for name") || found("NotValidForName") {
        "The TLS certificate is not valid for the host name of the URL".to_owned()
    } else {
        let mut letters = error.chars();
        match letters.next() {
            Some(first) => first.to_uppercase().chain(letters).collect(),
            None => "Unknown error".to_owned(),
        }
    }
}

/// The Unix timestamp that follows `phrase`.
fn unix_time_after(text: &str, phrase: &str) -> Option<DateTime<Utc>> {
    let (_, rest) = text.split_once(phrase)?;
    let digits = rest
        .find(|c: char| !c.is_ascii_digit())
        .map_or(rest, |end| &rest[..end]);
    DateTime::from_timestamp(digits.parse().ok()?, 0)
}

pub(crate) fn outcome_name(number: i16) -> &'static str {
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

/// The names of an endpoint's current custom headers. Headers that can't be decrypted are treated as absent.
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

pub(crate) async fn attempts_of(
    app: &App,
    connection: &mut PgConnection,
    delivery: &Delivery,
) -> Result<Vec<Attempt>, Problem> {
    let id = delivery.id();
    let headers = endpoints::find_by_id(&mut *connection, id.endpoint)
        .await?
        .map(|endpoint| custom_header_names(&app.vault, &endpoint))
        .unwrap_or_default();
    let event = delivery.event();
    Ok(attempts::of_delivery(connection, id)
        .await?
        .into_iter()
        .map(|row| attempt_view(row, &event, &headers))
        .collect())
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
    fn the_request_is_reconstructed_without_secrets() {
        let attempt = attempt_view(row(Some("t=1,v1=ab")), "evt_1", &["authorization".to_owned()]);
        let headers = attempt.request_headers;
        assert_eq!(headers["Webhook-Timestamp"], "1700000000");
        assert_eq!(headers["Webhook-Signature"], "t=1,v1=ab");
        assert_eq!(headers["Webhook-Replay"], "dlv_1");
        assert_eq!(headers["authorization"], HIDDEN);
        assert_eq!(attempt.outcome, "refused");
        assert_eq!(attempt.response_body.as_deref(), Some("a\u{fffd}\0b"));
    }

    #[test]
    fn errors_are_readable() {
        let expired = "invalid peer certificate: certificate expired: verification time 1763295187 (UNIX), \
                       but certificate is not valid after 1763208000 (87187 seconds ago)";
        assert_eq!(
            error_summary(expired),
            "The TLS certificate expired on 15 November 2025, 12:00 UTC"
        );
        assert_eq!(error_summary("connection refused"), "Connection refused");
        // The dispatcher already names the day: it must reach the page.
        assert_eq!(
            error_summary("the TLS certificate expired on 2026-01-02"),
            "The TLS certificate expired on 2026-01-02"
        );
        assert_eq!(
            error_summary("no response within 10 s"),
            "No response within 10 s"
        );
        assert!(error_summary("invalid peer certificate: UnknownIssuer").contains("trusted"));
        assert_eq!(
            error_summary("not valid after x certificate expired"),
            "The TLS certificate has expired"
        );
        assert_eq!(
            attempt_view(row(None), "evt_1", &[]).summary(),
            "500 Internal Server Error"
        );
    }

    #[test]
    fn an_attempt_without_a_request_has_no_headers() {
        assert!(attempt_view(row(None), "evt_1", &[]).request_headers.is_empty());
    }
}
