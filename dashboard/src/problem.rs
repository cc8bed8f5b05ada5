//! Errors as the outside sees them: RFC 9457 `application/problem+json`.
//! Invariant: `type`, `title` and `status` of a kind never change; what went wrong inside is logged here and not told.

use std::time::Duration;

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use sqlx::postgres::{PgDatabaseError, PgSeverity};
use utoipa::ToSchema;

/// The others are in `errors` only.
const FAULTS_IN_WORDS_MAX: usize = 10;

/// A part of the request that was refused, by its JSON pointer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct Fault {
    pub(crate) pointer: String,
    pub(crate) detail: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    BadRequest,
    Unauthorized,
    Forbidden,
    NotFound,
    MethodNotAllowed,
    /// The client did not send its request in time.
    RequestTimeout,
    Conflict,
    /// An `Idempotency-Key` with another body.
    KeyReused,
    /// The first request with this `Idempotency-Key` still runs.
    KeyInProgress,
    /// An event id with other content.
    EventIdConflict,
    /// The same request was answered just now: the answer is there to be given again.
    Answered,
    TooLarge,
    UnsupportedEncoding,
    UnsupportedMediaType,
    Invalid,
    /// More than the limit of this call allows for now.
    TooMany,
    Internal,
    Busy,
    /// The database did not say whether it stored what was sent.
    OutcomeUnknown,
}

impl Kind {
    /// The last part of `type`, the status and the title.
    pub(crate) const fn words(self) -> (&'static str, StatusCode, &'static str) {
        match self {
            Self::BadRequest => (
                "bad-request",
                StatusCode::BAD_REQUEST,
                "The request can't be read",
            ),
            Self::Unauthorized => ("unauthorized", StatusCode::UNAUTHORIZED, "A valid key is needed"),
            Self::Forbidden => ("forbidden", StatusCode::FORBIDDEN, "This key may not do that"),
            Self::NotFound => ("not-found", StatusCode::NOT_FOUND, "There is no such thing"),
            Self::MethodNotAllowed => (
                "method-not-allowed",
                StatusCode::METHOD_NOT_ALLOWED,
                "This method is not for this path",
            ),
            Self::RequestTimeout => ("request-timeout", StatusCode::REQUEST_TIMEOUT, "Request timeout"),
            Self::Conflict | Self::Answered => (
                "conflict",
                StatusCode::CONFLICT,
                "It does not go with what is there",
            ),
            Self::KeyReused => (
                "idempotency-key-reused",
                StatusCode::CONFLICT,
                "Idempotency-Key used with another body",
            ),
            Self::KeyInProgress => (
                "idempotency-key-in-progress",
                StatusCode::CONFLICT,
                "Request with this Idempotency-Key in progress",
            ),
            Self::EventIdConflict => (
                "event-id-conflict",
                StatusCode::CONFLICT,
                "Event id used with other content",
            ),
            Self::TooLarge => (
                "too-large",
                StatusCode::PAYLOAD_TOO_LARGE,
                "The body is too large",
            ),
            Self::UnsupportedEncoding => (
                "unsupported-encoding",
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "A compressed body is not taken",
            ),
            Self::UnsupportedMediaType => (
                "unsupported-media-type",
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "Unsupported media type",
            ),
            Self::Invalid => (
                "invalid",
                StatusCode::UNPROCESSABLE_ENTITY,
                "The request holds something invalid",
            ),
            Self::TooMany => ("too-many", StatusCode::TOO_MANY_REQUESTS, "That is too often"),
            Self::Internal => (
                "internal",
                StatusCode::INTERNAL_SERVER_ERROR,
                "Something went wrong here",
            ),
            Self::Busy => ("busy", StatusCode::SERVICE_UNAVAILABLE, "Not now: try again soon"),
            Self::OutcomeUnknown => (
                "outcome-unknown",
                StatusCode::SERVICE_UNAVAILABLE,
                "Outcome unknown",
            ),
        }
    }

    pub(crate) fn urn(self) -> String {
        format!("urn:postrider:problem:{}", self.words().0)
    }
}

/// On a response: `idempotency` looks for the stored answer and gives that instead.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AnsweredBefore;

#[derive(Debug, Clone)]
pub(crate) struct Problem {
    pub(crate) kind: Kind,
    pub(crate) detail: String,
    pub(crate) errors: Vec<Fault>,
    /// The event that may have been stored.
    event_id: Option<String>,
    /// Of the kinds that pass by themselves.
    retry_after_seconds: u64,
}

impl Problem {
    pub(crate) fn new(kind: Kind, detail: impl Into<String>) -> Self {
        Self {
            kind,
            detail: detail.into(),
            errors: Vec::new(),
            event_id: None,
            retry_after_seconds: 1,
        }
    }

    /// It passes by itself: `wait` says when.
    pub(crate) fn too_many(detail: impl Into<String>, wait: Duration) -> Self {
        Self {
            // Rounded up: whoever waits as long as told is let in.
            retry_after_seconds: wait.as_secs()
                + u64::from(wait.subsec_nanos() > 0).max(u64::from(wait.is_zero())),
            ..Self::new(Kind::TooMany, detail)
        }
    }

    pub(crate) fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(Kind::BadRequest, detail)
    }

    /// Also for another tenant's things: whether they exist is not told.
    pub(crate) fn not_found(what: &str) -> Self {
        Self::new(Kind::NotFound, format!("There is no such {what}."))
    }

    pub(crate) fn conflict(detail: impl Into<String>) -> Self {
        Self::new(Kind::Conflict, detail)
    }

    pub(crate) fn invalid(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::faults(vec![Fault {
            pointer: pointer.into(),
            detail: detail.into(),
        }])
    }

    pub(crate) fn faults(errors: Vec<Fault>) -> Self {
        let mut told: Vec<String> = errors
            .iter()
            .take(FAULTS_IN_WORDS_MAX)
            .map(|fault| match fault.pointer.as_str() {
                "" => fault.detail.clone(),
                pointer => format!("{pointer}: {}", fault.detail),
            })
            .collect();
        if errors.len() > FAULTS_IN_WORDS_MAX {
            told.push(format!("and {} more", errors.len() - FAULTS_IN_WORDS_MAX));
        }
        Self {
            errors,
            ..Self::new(Kind::Invalid, told.join("; "))
        }
    }

    pub(crate) fn busy() -> Self {
        Self::new(Kind::Busy, "The database is busy or away.")
    }

    /// An emit that may have been stored: to send it again could make a second event. The id is known when the database
    /// lost no more than the commit's confirmation.
    pub(crate) fn unknown(event_id: Option<String>) -> Self {
        let detail = match &event_id {
            Some(id) => format!(
                "The database did not confirm the commit, so the event may or may not be stored. Look up event {id} before \
                 you send it again."
            ),
            None => "The database did not confirm the commit, so the event may or may not be stored. With an `id` or an \
                     Idempotency-Key it can be sent again safely."
                .to_owned(),
        };
        Self {
            event_id,
            ..Self::new(Kind::OutcomeUnknown, detail)
        }
    }

    /// For a person: what is wrong, without pointers into a body that they never saw.
    pub(crate) fn in_words(&self) -> String {
        if self.errors.is_empty() {
            return self.detail.clone();
        }
        let field = |fault: &Fault| match fault.pointer.trim_start_matches('/') {
            "" => fault.detail.clone(),
            name => format!("{}: {}", name.replace(['_', '/'], " "), fault.detail),
        };
        let told: Vec<String> = self.errors.iter().take(FAULTS_IN_WORDS_MAX).map(field).collect();
        told.join("; ")
    }

    /// What stands in the answer.
    pub(crate) fn body(&self) -> Body<'_> {
        let (_, status, title) = self.kind.words();
        Body {
            r#type: self.kind.urn(),
            title,
            status: status.as_u16(),
            detail: &self.detail,
            errors: &self.errors,
            event_id: self.event_id.as_deref(),
        }
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.kind.words().1
    }

    pub(crate) fn title(&self) -> &'static str {
        self.kind.words().2
    }
}

impl From<sqlx::Error> for Problem {
    fn from(error: sqlx::Error) -> Self {
        let told = error.as_database_error();
        let code = told.and_then(|e| e.code());
        // A session that the server ended or would not begin, whatever the reason: the next one may be well.
        let ended = told
            .and_then(|e| e.try_downcast_ref::<PgDatabaseError>())
            .is_some_and(|e| matches!(e.severity(), PgSeverity::Fatal | PgSeverity::Panic));
        let passes = match &error {
            sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::Io(_) => true,
            // What a connection says that was cut in the middle of a message.
            sqlx::Error::Protocol(_) | sqlx::Error::Tls(_) => true,
            _ if ended => true,
            // Locks and deadlocks, cancelled statements, a server that goes down, comes up or has no room or no disk.
            _ => code.is_some_and(|code| {
                matches!(code.as_ref(), "55P03" | "40P01" | "40001" | "57014") || {
                    ["08", "53", "57P", "58"]
                        .iter()
                        .any(|class| code.starts_with(class))
                }
            }),
        };
        tracing::error!(%error, passes, "a request failed in the database");
        if passes {
            Self::busy()
        } else {
            Self::new(Kind::Internal, "It has been logged.")
        }
    }
}

#[derive(Serialize)]
pub(crate) struct Body<'a> {
    r#type: String,
    title: &'a str,
    status: u16,
    detail: &'a str,
    #[serde(skip_serializing_if = "<[Fault]>::is_empty")]
    errors: &'a [Fault],
    #[serde(skip_serializing_if = "Option::is_none")]
    event_id: Option<&'a str>,
}

impl Problem {
    /// What a response says of it beside the body.
    pub(crate) fn set_headers(&self, response: &mut Response) {
        let headers = response.headers_mut();
        match self.kind {
            Kind::Unauthorized => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            Kind::Answered => {
                response.extensions_mut().insert(AnsweredBefore);
            }
            // The rest of the body may still come, and would be taken for the next request.
            Kind::RequestTimeout => {
                headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            Kind::Busy | Kind::TooMany | Kind::KeyInProgress => {
                headers.insert(header::RETRY_AFTER, self.retry_after_seconds.into());
            }
            _ => {}
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = (self.status(), Json(self.body())).into_response();
        response.headers_mut().insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        self.set_headers(&mut response);
        response
    }
}
