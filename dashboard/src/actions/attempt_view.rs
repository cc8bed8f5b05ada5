//! The request and response of an attempt, as stored. Request headers are not stored: they are built again by the code that
//! sends them, from the attempt and from today's custom headers and tracing settings.
//! Invariant: values of custom headers are never shown, because they often contain tokens.

use std::collections::BTreeMap;

use axum::http::{HeaderMap, StatusCode};
use postrider_dispatcher::{
    http::headers::{Marker, RequestHeaders},
    traces::Tracer,
    vault::{Vault, custom_headers::CustomHeaders},
};
use postrider_proto::{
    DeliveryId, OutcomeKind, Timing,
    api::{Attempt, AttemptTiming},
    limits::RESPONSE_KEPT_BYTES_MAX,
    trace::{TraceContext, TraceState},
};
use sqlx::PgConnection;

use crate::{
    App,
    http::problem::Problem,
    tables::{
        attempts::{self, AttemptRow},
        deliveries::Delivery,
        endpoints::{self, EndpointRow},
        events,
    },
};

pub(crate) use postrider_dispatcher::http::headers::MASKED as HIDDEN;

/// An attempt as stored, with the headers of its request.
fn attempt_view(row: AttemptRow, context: &Context) -> Attempt {
    let request_headers = context.request_headers(&row);
    Attempt {
        number: row.number,
        started_at: row.started_at,
        duration_ms: row.duration_ms,
        outcome: outcome_name(row.outcome).to_owned(),
        status: row.status,
        error: row.error,
        request_headers,
        response_head: row.response_head,
        response_body_cut: is_cut(row.response_body.as_deref()),
        response_body: row.response_body.as_deref().map(shown_body),
        replay: row.replay_id,
        timing: row
            .timing
            .and_then(|text| text.parse::<Timing>().ok())
            .map(AttemptTiming::from),
    }
}

/// Whether the attempt got as far as a request.
fn is_connected(outcome: i16) -> bool {
    use OutcomeKind::{ConnectionFailed, Forbidden, NameNotFound, NotSent, ProxyFailed, TlsFailed};
    !matches!(
        OutcomeKind::from_number(outcome),
        Some(NameNotFound | ConnectionFailed | TlsFailed | Forbidden | NotSent | ProxyFailed)
    )
}

fn is_cut(body: Option<&[u8]>) -> bool {
    body.is_some_and(|bytes| bytes.len() > RESPONSE_KEPT_BYTES_MAX)
}

fn shown_body(bytes: &[u8]) -> String {
    let kept = &bytes[..bytes.len().min(RESPONSE_KEPT_BYTES_MAX)];
    String::from_utf8_lossy(kept).into_owned()
}

/// What the request headers of a delivery depend on, besides its attempts.
struct Context {
    delivery: DeliveryId,
    event_id: String,
    custom: HeaderMap,
    tracer: Tracer,
    trace: Option<(TraceContext, Option<TraceState>)>,
}

impl Context {
    fn request_headers(&self, row: &AttemptRow) -> BTreeMap<String, String> {
        let stored = self.trace.as_ref();
        let context = self
            .tracer
            .attempt_context(self.delivery, stored.map(|trace| trace.0), row.started_at);
        let headers = RequestHeaders {
            event_id: &self.event_id,
            unix_seconds: row.started_at.timestamp(),
            signature: row.signature.as_deref(),
            custom: Some(&self.custom),
            marker: row.replay_id.as_deref().map(Marker::Replay),
            trace: context.map(|context| (context, stored.and_then(|trace| trace.1.as_ref()))),
        };
        // Without a signature, or without a connection, nothing was sent.
        let is_sent = row.signature.is_some() && is_connected(row.outcome);
        match is_sent {
            true => headers.shown(),
            false => BTreeMap::new(),
        }
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
pub(super) fn status_line(status: i16) -> String {
    let reason = u16::try_from(status)
        .ok()
        .and_then(|status| StatusCode::from_u16(status).ok())
        .and_then(|status| status.canonical_reason());
    match reason {
        Some(reason) => format!("{status} {reason}"),
        None => status.to_string(),
    }
}

/// The stored error, which is written for people, as a sentence.
pub(crate) fn error_summary(error: &str) -> String {
    let mut letters = error.chars();
    match letters.next() {
        Some(first) => first.to_uppercase().chain(letters).collect(),
        None => "Unknown error".to_owned(),
    }
}

pub(crate) fn outcome_name(number: i16) -> &'static str {
    OutcomeKind::from_number(number).map_or("unknown", OutcomeKind::as_str)
}

/// The names of an endpoint's current custom headers. Headers that can't be decrypted are treated as absent.
pub(crate) fn custom_header_names(vault: &Vault, endpoint: &EndpointRow) -> Vec<String> {
    CustomHeaders::open(vault, endpoint.owner(), endpoint.headers.as_deref())
        .unwrap_or_default()
        .into_names()
}

pub(crate) async fn attempts_of(
    app: &App,
    connection: &mut PgConnection,
    delivery: &Delivery,
) -> Result<Vec<Attempt>, Problem> {
    let id = delivery.id();
    let endpoint = endpoints::find_by_id(&mut *connection, id.endpoint).await?;
    let custom = endpoint.and_then(|endpoint| {
        let headers = CustomHeaders::open(&app.vault, endpoint.owner(), endpoint.headers.as_deref());
        headers.and_then(|headers| headers.to_map()).ok()
    });
    let (mut tracer, mut trace) = (Tracer::default(), None);
    if app.tracer.is_on() {
        let found = events::find_trace(&mut *connection, id.event).await?;
        // Rather no trace than a wrong one.
        if found.stored.is_some() || !found.may_be_deleted {
            (tracer, trace) = (app.tracer.clone(), found.stored);
        }
    }
    let context = Context {
        delivery: id,
        event_id: delivery.event(),
        custom: custom.unwrap_or_default(),
        tracer,
        trace,
    };
    Ok(attempts::of_delivery(connection, id)
        .await?
        .into_iter()
        .map(|row| attempt_view(row, &context))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;
    use postrider_proto::{EndpointId, EventId};

    fn row(signature: Option<&str>) -> AttemptRow {
        AttemptRow {
            number: 2,
            started_at: chrono::DateTime::from_timestamp_millis(1_700_000_000_999).expect("a time"),
            duration_ms: 12,
            outcome: 2,
            status: Some(500),
            error: None,
            signature: signature.map(str::to_owned),
            response_head: None,
            response_body: Some(b"a\xff\0b".to_vec()),
            replay_id: Some("dlv_1".to_owned()),
            timing: None,
        }
    }

    fn context(tracer: Tracer) -> Context {
        let mut token = HeaderValue::from_static("Bearer abc");
        token.set_sensitive(true);
        Context {
            delivery: DeliveryId {
                event: EventId::LOWEST,
                endpoint: EndpointId(1),
            },
            event_id: "evt_1".to_owned(),
            custom: HeaderMap::from_iter([(axum::http::header::AUTHORIZATION, token)]),
            tracer,
            trace: None,
        }
    }

    #[test]
    fn the_request_is_reconstructed_without_secrets() {
        let attempt = attempt_view(row(Some("t=1,v1=ab")), &context(Tracer::default()));
        let headers = attempt.request_headers;
        assert_eq!(headers["Webhook-Timestamp"], "1700000000");
        assert_eq!(headers["Webhook-Signature"], "t=1,v1=ab");
        assert_eq!(headers["Webhook-Replay"], "dlv_1");
        assert_eq!(headers["Accept"], "*/*");
        assert_eq!(headers["authorization"], HIDDEN);
        assert!(!headers.contains_key("traceparent"));
        assert_eq!(attempt.outcome, "refused");
        assert_eq!(attempt.response_body.as_deref(), Some("a\u{fffd}\0b"));
        let traced = attempt_view(row(Some("t=1,v1=ab")), &context(Tracer::new(1.0).0));
        assert!(traced.request_headers["traceparent"].ends_with("-01"));
    }

    #[test]
    fn an_error_is_shown_as_the_dispatcher_wrote_it() {
        for (stored, shown) in [
            ("connection refused", "Connection refused"),
            (
                "the TLS certificate expired on 2026-01-02",
                "The TLS certificate expired on 2026-01-02",
            ),
            ("", "Unknown error"),
        ] {
            assert_eq!(attempt_summary(None, Some(stored), "tls_failed"), shown);
        }
        assert_eq!(
            attempt_view(row(None), &context(Tracer::default())).summary(),
            "500 Internal Server Error"
        );
    }

    #[test]
    fn an_attempt_without_a_request_has_no_headers() {
        let attempt = attempt_view(row(None), &context(Tracer::default()));
        assert!(attempt.request_headers.is_empty());
    }
}
