//! Errors as clients see them: RFC 9457 `application/problem+json`.
//! Invariant: `type`, `title` and `status` of a kind never change; internal causes are logged here and never exposed.

use std::{fmt, ops::RangeInclusive, time::Duration};

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use postrider_dispatcher::health::{self, database};
use postrider_proto::api;
pub(crate) use postrider_proto::api::Fault;
use sqlx::postgres::{PgDatabaseError, PgSeverity};

/// Errors listed in `detail`; `errors` has all of them.
const FAULTS_IN_WORDS_MAX: usize = 10;

/// Characters of a rejected value that a message repeats.
const EXCERPT_CHARS_MAX: usize = 64;

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $name:literal, $status:ident, $title:literal;)+) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Kind {
            $($(#[$doc])* $kind,)+
            /// The same request was completed a moment ago: its stored response is returned instead.
            Handled,
            /// The tenant has left this cell: it is looked up again.
            OtherCell,
        }

        impl Kind {
            /// All that clients see.
            pub(crate) const ALL: [Self; [$($name),+].len()] = [$(Self::$kind),+];

            /// The last part of `type`, the status and the title.
            pub(crate) const fn definition(self) -> (&'static str, StatusCode, &'static str) {
                match self {
                    $(Self::$kind => ($name, StatusCode::$status, $title),)+
                    Self::Handled => Self::Conflict.definition(),
                    Self::OtherCell => Self::Busy.definition(),
                }
            }
        }
    };
}
kinds! {
    BadRequest = "bad-request", BAD_REQUEST, "Malformed request";
    Unauthorized = "unauthorized", UNAUTHORIZED, "Missing or invalid API key";
    Forbidden = "forbidden", FORBIDDEN, "This key does not have permission";
    NotFound = "not-found", NOT_FOUND, "Not found";
    MethodNotAllowed = "method-not-allowed", METHOD_NOT_ALLOWED, "Method not allowed";
    /// The client did not send its request in time.
    RequestTimeout = "request-timeout", REQUEST_TIMEOUT, "Request timeout";
    Conflict = "conflict", CONFLICT, "Conflict with the current state";
    /// An `Idempotency-Key` that was used with a different body.
    KeyReused = "idempotency-key-reused", CONFLICT, "Idempotency-Key reused with a different body";
    /// The first request with this `Idempotency-Key` is still running.
    KeyInProgress = "idempotency-key-in-progress", CONFLICT, "Request with this Idempotency-Key in progress";
    /// An event id that was used with different content.
    EventIdConflict = "event-id-conflict", CONFLICT, "Event id already used with different content";
    /// A published version of an event type with a different schema.
    SchemaPublished = "schema-version-published", CONFLICT, "Schema version already published";
    /// A disabled endpoint, which must be enabled first.
    EndpointDisabled = "endpoint-disabled", CONFLICT, "Endpoint disabled";
    /// All sending is stopped, or this is a restored copy that is not confirmed.
    SendingStopped = "sending-stopped", CONFLICT, "Sending is stopped";
    /// The operator has paused the tenant.
    TenantPaused = "tenant-paused", CONFLICT, "Tenant paused";
    /// A fixed limit of a tenant, an endpoint or a delivery.
    LimitReached = "limit-reached", CONFLICT, "Limit reached";
    TooLarge = "too-large", PAYLOAD_TOO_LARGE, "Body too large";
    UnsupportedEncoding = "unsupported-encoding", UNSUPPORTED_MEDIA_TYPE, "Compressed bodies are not supported";
    UnsupportedMediaType = "unsupported-media-type", UNSUPPORTED_MEDIA_TYPE, "Unsupported media type";
    Invalid = "invalid", UNPROCESSABLE_ENTITY, "Invalid request";
    /// A rate or concurrency limit.
    TooMany = "too-many", TOO_MANY_REQUESTS, "Too many requests";
    /// The tenant's quota of emits.
    EmitQuota = "emit-quota-exceeded", TOO_MANY_REQUESTS, "Emit quota exceeded";
    /// The tenant's quota of stored bytes.
    StorageQuota = "storage-quota-exceeded", TOO_MANY_REQUESTS, "Storage quota exceeded";
    Internal = "internal", INTERNAL_SERVER_ERROR, "Internal error";
    Busy = "busy", SERVICE_UNAVAILABLE, "Temporarily unavailable";
    /// Committed, but the dispatcher has not confirmed that it applied the change.
    ChangePending = "change-pending", SERVICE_UNAVAILABLE, "Change stored but not yet applied";
    /// A count that exceeded the statement timeout.
    CountTimeout = "count-timeout", SERVICE_UNAVAILABLE, "Count took too long";
    /// The database did not confirm whether the event was stored.
    OutcomeUnknown = "outcome-unknown", SERVICE_UNAVAILABLE, "Outcome unknown";
}

impl Kind {
    /// Whether the same request may succeed later.
    pub(crate) const fn is_temporary(self) -> bool {
        matches!(
            self,
            Self::Busy
                | Self::OtherCell
                | Self::ChangePending
                | Self::CountTimeout
                | Self::TooMany
                | Self::EmitQuota
                | Self::StorageQuota
                | Self::KeyInProgress
        )
    }

    pub(crate) fn urn(self) -> String {
        format!("urn:postrider:problem:{}", self.definition().0)
    }
}

/// Marks a response that `idempotency` replaces with the stored one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HandledBefore;

#[derive(Debug, Clone)]
pub(crate) struct Problem {
    pub(crate) kind: Kind,
    pub(crate) detail: String,
    pub(crate) errors: Vec<Fault>,
    /// The event that may have been stored.
    event_id: Option<String>,
    /// For temporary conditions.
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

    /// A limit that clears after `wait`.
    pub(crate) fn too_many(detail: impl Into<String>, wait: Duration) -> Self {
        Self {
            // Rounded up, so that a client that waits this long is admitted.
            retry_after_seconds: wait.as_secs()
                + u64::from(wait.subsec_nanos() > 0).max(u64::from(wait.is_zero())),
            ..Self::new(Kind::TooMany, detail)
        }
    }

    /// A quota that admits more after `wait`.
    pub(crate) fn over_quota(kind: Kind, detail: impl Into<String>, wait: Duration) -> Self {
        Self {
            kind,
            ..Self::too_many(detail, wait)
        }
    }

    pub(crate) fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(Kind::BadRequest, detail)
    }

    /// Also for another tenant's resources: their existence is not disclosed.
    pub(crate) fn not_found(what: &str) -> Self {
        Self::new(Kind::NotFound, format!("The requested {what} does not exist."))
    }

    pub(crate) fn conflict(detail: impl Into<String>) -> Self {
        Self::new(Kind::Conflict, detail)
    }

    pub(crate) fn limit_reached(detail: impl Into<String>) -> Self {
        Self::new(Kind::LimitReached, detail)
    }

    pub(crate) fn endpoint_disabled(detail: impl Into<String>) -> Self {
        Self::new(Kind::EndpointDisabled, detail)
    }

    /// An unexpected error. It is logged with an id that the client can quote; its cause is not exposed.
    pub(crate) fn internal(message: &str, error: impl fmt::Display) -> Self {
        let id = format!("err_{:016x}", rand::random::<u64>());
        tracing::error!(%error, error_id = id, "{message}");
        Self::new(
            Kind::Internal,
            format!("Internal error. Quote error id {id} when you report it."),
        )
    }

    pub(crate) fn invalid(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::faults(vec![Fault {
            pointer: pointer.into(),
            detail: detail.into(),
        }])
    }

    pub(crate) fn faults(errors: Vec<Fault>) -> Self {
        let mut listed: Vec<String> = errors
            .iter()
            .take(FAULTS_IN_WORDS_MAX)
            .map(|fault| match fault.pointer.as_str() {
                "" => fault.detail.clone(),
                pointer => format!("{pointer}: {}", fault.detail),
            })
            .collect();
        if errors.len() > FAULTS_IN_WORDS_MAX {
            listed.push(format!("and {} more", errors.len() - FAULTS_IN_WORDS_MAX));
        }
        Self {
            errors,
            ..Self::new(Kind::Invalid, listed.join("; "))
        }
    }

    pub(crate) fn busy() -> Self {
        Self::new(
            Kind::Busy,
            "The database is busy or unreachable. Try again shortly.",
        )
    }

    pub(crate) fn not_ready(reasons: &[health::Reason]) -> Self {
        let reasons: Vec<String> = reasons.iter().map(ToString::to_string).collect();
        Self::new(Kind::Busy, format!("Not ready: {}.", reasons.join("; ")))
    }

    /// A failover: there is no primary at the moment.
    fn read_only() -> Self {
        Self::new(
            Kind::Busy,
            "The database accepts no writes at the moment. Try again shortly.",
        )
    }

    /// An emit without an id of its own that may have been stored: sending it again could create a second event. No
    /// `Retry-After`, which clients would follow blindly. The id is known if only the confirmation of the commit was lost.
    pub(crate) fn unknown(event_id: Option<String>) -> Self {
        let detail = match &event_id {
            Some(id) => format!(
                "The database did not confirm the commit, so the event may or may not be stored. Look up event {id}. If it \
                 stays not found, emit it again with this `id`."
            ),
            None => "The database did not confirm the commit, so the event may or may not be stored. Emits with an `id` or an \
                     Idempotency-Key can be repeated safely; this one had neither."
                .to_owned(),
        };
        Self {
            event_id,
            ..Self::new(Kind::OutcomeUnknown, detail)
        }
    }

    /// The errors for a person, without JSON pointers into a body they never saw.
    pub(crate) fn in_words(&self) -> String {
        if self.errors.is_empty() {
            return self.detail.clone();
        }
        let field = |fault: &Fault| match fault.pointer.trim_start_matches('/') {
            "" => fault.detail.clone(),
            name => format!("{}: {}", name.replace(['_', '/'], " "), fault.detail),
        };
        let listed: Vec<String> = self.errors.iter().take(FAULTS_IN_WORDS_MAX).map(field).collect();
        listed.join("; ")
    }

    /// The response body.
    pub(crate) fn body(&self) -> api::Problem {
        let (_, status, title) = self.kind.definition();
        api::Problem {
            kind: self.kind.urn(),
            title: title.to_owned(),
            status: status.as_u16(),
            detail: self.detail.clone(),
            errors: self.errors.clone(),
            event_id: self.event_id.clone(),
            retry_after_seconds: None,
        }
    }

    pub(crate) fn retry_after_seconds(&self) -> Option<u64> {
        self.kind.is_temporary().then_some(self.retry_after_seconds)
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.kind.definition().1
    }

    pub(crate) fn title(&self) -> &'static str {
        self.kind.definition().2
    }
}

/// Collects all errors, not only the first one.
#[derive(Default)]
pub(crate) struct Faults(Vec<Fault>);

impl Faults {
    pub(crate) fn add(&mut self, field: &str, detail: impl Into<String>) {
        self.0.push(Fault {
            pointer: format!("/{field}"),
            detail: detail.into(),
        });
    }

    pub(crate) fn number<T: TryFrom<i64>>(
        &mut self,
        field: &str,
        value: Option<i64>,
        range: RangeInclusive<i64>,
    ) -> Option<T> {
        let number = value
            .filter(|n| range.contains(n))
            .and_then(|n| T::try_from(n).ok());
        if let Some(given) = value
            && number.is_none()
        {
            let (low, high) = range.into_inner();
            self.add(
                field,
                format!("must be a whole number from {low} to {high}, not {given}"),
            );
        }
        number
    }

    pub(crate) fn done(self) -> Result<(), Problem> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Problem::faults(self.0))
        }
    }
}

impl From<sqlx::Error> for Problem {
    fn from(error: sqlx::Error) -> Self {
        if database::is_read_only(&error) {
            database::reports(&error);
            return Self::read_only();
        }
        let database_error = error.as_database_error();
        let code = database_error.and_then(|e| e.code());
        // The server ended the session or refused to start it: the next one may succeed.
        let ended = database_error
            .and_then(|e| e.try_downcast_ref::<PgDatabaseError>())
            .is_some_and(|e| matches!(e.severity(), PgSeverity::Fatal | PgSeverity::Panic));
        let is_temporary = match &error {
            sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::Io(_) => true,
            // A connection that was cut in the middle of a message.
            sqlx::Error::Protocol(_) | sqlx::Error::Tls(_) => true,
            _ if ended => true,
            // Locks, deadlocks and cancelled statements; a server that is shutting down, starting up or out of resources.
            _ => code.is_some_and(|code| {
                matches!(code.as_ref(), "55P03" | "40P01" | "40001" | "57014") || {
                    ["08", "53", "57P", "58"]
                        .iter()
                        .any(|class| code.starts_with(class))
                }
            }),
        };
        if is_temporary {
            if !database::reports(&error) {
                tracing::error!(%error, "database error; the client may retry");
            }
            Self::busy()
        } else {
            Self::internal("database error", error)
        }
    }
}

/// An error message as a sentence: `data is empty` becomes `Data is empty.`
pub(crate) fn sentence(error: &impl fmt::Display) -> String {
    let text = error.to_string();
    let mut rest = text.chars();
    match rest.next() {
        Some(first) => format!("{}{}.", first.to_uppercase(), rest.as_str()),
        None => text,
    }
}

/// The start of a rejected value, for messages about fields that hold no secrets.
pub(crate) fn excerpt(value: &str) -> String {
    match value.char_indices().nth(EXCERPT_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value.to_owned(),
    }
}

impl Problem {
    /// Response headers that go with the problem.
    pub(crate) fn set_headers(&self, response: &mut Response) {
        let headers = response.headers_mut();
        match self.kind {
            Kind::Unauthorized => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            Kind::Handled => {
                response.extensions_mut().insert(HandledBefore);
            }
            // The rest of the body may still arrive and would be read as the next request.
            Kind::RequestTimeout => {
                headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        if let Some(seconds) = self.retry_after_seconds() {
            let headers = response.headers_mut();
            headers.insert(header::RETRY_AFTER, seconds.into());
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
        // Browsers get it as a page: `pages::problem`.
        response.extensions_mut().insert(self);
        response
    }
}
