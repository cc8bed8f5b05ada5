//! Reads requests: JSON bodies and query strings, with errors as problems.
//! Invariant: a body is never read beyond its limit, and one that is not UTF-8 is rejected here.

use std::{
    error::Error,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use axum::{
    body::{Bytes, HttpBody},
    extract::{FromRequest, FromRequestParts, Request, rejection::QueryRejection},
    http::{HeaderMap, header, request::Parts},
};
use http_body_util::BodyExt;
use postrider_proto::json::find_duplicate;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::error::Category;

use crate::http::{
    input_errors::{body_error, query_error},
    problem::{Kind, Problem},
};

/// Enough for any body except events and schemas.
pub(crate) const BODY_BYTES_MAX: usize = 64 * 1024;

const BODY_BYTES_DRAINED_MAX: usize = 32 * 1024 * 1024;

/// Whether a request is waiting for its own body.
#[derive(Clone, Default)]
pub(crate) struct BodyWait(Arc<AtomicBool>);

impl BodyWait {
    pub(crate) fn watch(request: Request) -> (Request, Self) {
        let wait = Self::default();
        let watched = wait.clone();
        let request = request.map(|inner| axum::body::Body::new(WatchedBody { inner, wait: watched }));
        (request, wait)
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

struct WatchedBody {
    inner: axum::body::Body,
    wait: BodyWait,
}

impl HttpBody for WatchedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<hyper::body::Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(context);
        self.wait.0.store(polled.is_pending(), Ordering::Relaxed);
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.inner.size_hint()
    }
}

/// The text of a body of at most `MAX` bytes.
pub(crate) struct Text<const MAX: usize>(Bytes);

impl<const MAX: usize> Text<MAX> {
    /// None if it is too large.
    pub(crate) fn of(bytes: Bytes) -> Option<Self> {
        (bytes.len() <= MAX).then_some(Self(bytes))
    }

    /// Malformed JSON is 400; an invalid value or unknown field is 422.
    pub(crate) fn read<'a, T: Deserialize<'a>>(&'a self) -> Result<T, Problem> {
        read_form(self.text()?)
    }

    /// Also rejects duplicate names at any depth. Not for events, whose data belongs to the producer.
    pub(crate) fn read_once<'a, T: Deserialize<'a>>(&'a self) -> Result<T, Problem> {
        let text = self.text()?;
        if let Some(pointer) = find_duplicate(text) {
            return Err(Problem::invalid(pointer, "is given twice"));
        }
        read_form(text)
    }

    fn text(&self) -> Result<&str, Problem> {
        std::str::from_utf8(&self.0).map_err(|e| Problem::bad_request(format!("The body is not UTF-8: {e}.")))
    }

    fn is_empty(&self) -> bool {
        self.0.iter().all(u8::is_ascii_whitespace)
    }
}

/// Parses the text, or reports what is wrong with it.
pub(crate) fn read_form<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, Problem> {
    let broken =
        |error: serde_json::Error| Problem::bad_request(format!("The body is not valid JSON: {error}."));
    if text.trim_ascii_start().starts_with('[') {
        // `serde` would read the fields of a struct from an array in order.
        serde_json::from_str::<serde::de::IgnoredAny>(text).map_err(broken)?;
        return Err(Problem::invalid("", "must be an object, not an array"));
    }
    serde_json::from_str(text).map_err(|error| match error.classify() {
        // Parsed again, more slowly, to find the location of the error.
        Category::Data => Problem::faults(vec![body_error::<T>(text)]),
        Category::Syntax | Category::Eof | Category::Io => broken(error),
    })
}

impl<S: Send + Sync, const MAX: usize> FromRequest<S> for Text<MAX> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let encoding = request.headers().get(header::CONTENT_ENCODING);
        if encoding.is_some_and(|value| !value.as_bytes().eq_ignore_ascii_case(b"identity")) {
            // A few bytes could decompress to gigabytes.
            return Err(Problem::new(
                Kind::UnsupportedEncoding,
                "Send the body uncompressed, without Content-Encoding.",
            ));
        }
        let kind = request.headers().get(header::CONTENT_TYPE);
        if kind.is_some_and(|kind| !is_json(kind.as_bytes())) {
            return Err(Problem::new(
                Kind::UnsupportedMediaType,
                "Send UTF-8 JSON with Content-Type: application/json.",
            ));
        }
        Ok(Self(read_body(request.into_body(), MAX).await?))
    }
}

/// `application/json` or a `+json` type, in UTF-8.
fn is_json(content_type: &[u8]) -> bool {
    let text = String::from_utf8_lossy(content_type).to_ascii_lowercase();
    let mut parts = text.split(';').map(str::trim);
    let essence = parts.next().unwrap_or_default();
    let named =
        essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"));
    named
        && parts
            .filter_map(|part| part.strip_prefix("charset="))
            .all(|charset| matches!(charset.trim_matches('"'), "utf-8" | "utf8"))
}

/// Keeps at most `bytes_max`. Excess data is read for a while and discarded: a response sent while the client is
/// still writing is often lost with the connection.
pub(crate) async fn read_body(mut body: axum::body::Body, bytes_max: usize) -> Result<Bytes, Problem> {
    let mut kept = Vec::new();
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| Problem::bad_request("The request body ended early."))?;
        let Ok(data) = frame.into_data() else { continue };
        length += data.len();
        if length > BODY_BYTES_DRAINED_MAX {
            break;
        }
        if length <= bytes_max {
            kept.extend_from_slice(&data);
        } else {
            kept = Vec::new();
        }
    }
    if length > bytes_max {
        let detail = format!("The limit is {}.", size(bytes_max));
        return Err(Problem::new(Kind::TooLarge, detail));
    }
    Ok(kept.into())
}

/// A byte limit for people: `260 KiB`.
pub(crate) fn size(bytes: usize) -> String {
    match (bytes % (1024 * 1024), bytes % 1024) {
        (0, _) => format!("{} MiB", bytes / 1024 / 1024),
        (_, 0) => format!("{} KiB", bytes / 1024),
        _ => format!("{bytes} bytes"),
    }
}

/// A JSON body.
pub(crate) struct Body<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let text = Text::<BODY_BYTES_MAX>::from_request(request, state).await?;
        Ok(Self(text.read_once()?))
    }
}

/// An optional JSON body.
pub(crate) struct OptionalBody<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned + Default> FromRequest<S> for OptionalBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let text = Text::<BODY_BYTES_MAX>::from_request(request, state).await?;
        Ok(Self(if text.is_empty() {
            T::default()
        } else {
            text.read_once()?
        }))
    }
}

/// The query string. An unknown parameter is rejected: a misspelled filter must not widen the result.
pub(crate) struct Query<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Query<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        axum::extract::Query::try_from_uri(&parts.uri)
            .map(|axum::extract::Query(query)| Self(query))
            .map_err(|rejection| Problem::bad_request(refused_query(&rejection)))
    }
}

/// Translates the rejection of a query string.
fn refused_query(rejection: &QueryRejection) -> String {
    let mut cause: Option<&(dyn Error + 'static)> = Some(rejection);
    while let Some(error) = cause {
        if let Some(body_error) = error.downcast_ref() {
            return query_error(body_error);
        }
        cause = error.source();
    }
    rejection.body_text()
}

/// Text for people: within its limit, and without characters that affect the surrounding display, such as terminal
/// control characters and bidirectional overrides.
pub(crate) fn is_plain_text(text: &str, bytes_max: usize) -> bool {
    let is_odd = |c: char| {
        c.is_control() && !matches!(c, '\n' | '\t' | '\r')
            || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.len() <= bytes_max && !text.contains(is_odd)
}

pub(crate) fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers
        .get_all(header::COOKIE)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(';'))
        .filter_map(|pair| pair.trim().split_once('='))
        .find_map(|(found, value)| (found == name).then_some(value))
}

#[cfg(test)]
mod tests {
    use postrider_proto::api::given;

    use super::*;

    #[derive(Debug, Default, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct Form {
        #[serde(deserialize_with = "given")]
        name: Option<Option<String>>,
    }

    fn read(text: &'static [u8]) -> Result<Form, Kind> {
        Text::<100>(Bytes::from_static(text))
            .read()
            .map_err(|problem| problem.kind)
    }

    #[test]
    fn null_clears_and_absence_keeps() {
        assert_eq!(read(b"{}"), Ok(Form { name: None }));
        assert_eq!(read(br#"{"name":null}"#), Ok(Form { name: Some(None) }));
        assert_eq!(
            read(br#"{"name":"a"}"#),
            Ok(Form {
                name: Some(Some("a".to_owned()))
            })
        );
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only read")]
    struct Parameters {
        limit: Option<i64>,
        state: Option<State>,
        whole: Option<bool>,
        token: String,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum State {
        Dead,
        Delivered,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Nothing {}

    fn told<T: DeserializeOwned + std::fmt::Debug>(query: &str) -> String {
        let uri = format!("/path?{query}").parse().expect("a URI");
        let read = axum::extract::Query::<T>::try_from_uri(&uri);
        refused_query(&read.expect_err(query))
    }

    #[test]
    fn a_query_string_is_refused_in_plain_words() {
        for (query, words) in [
            (
                "x=1",
                "Unknown query parameter `x`. Allowed: limit, state, whole, token.",
            ),
            (
                "a%60%3A%20b=1",
                "Unknown query parameter `a`: b`. Allowed: limit, state, whole, token.",
            ),
            ("limit=1&limit=2", "Query parameter `limit` is given twice."),
            ("limit=1", "Query parameter `token` is required."),
            ("limit=a", "Query parameter `limit` must be a whole number."),
            ("limit=", "Query parameter `limit` must be a whole number."),
            (
                "limit=99999999999999999999",
                "Query parameter `limit` is out of range.",
            ),
            ("whole=yes", "Query parameter `whole` must be true or false."),
            ("state=lost", "Query parameter `state` must be dead or delivered."),
        ] {
            assert_eq!(told::<Parameters>(query), words, "{query}");
        }
        assert_eq!(
            told::<Nothing>("x=1"),
            "Unknown query parameter `x`. This operation has none."
        );
        let _ = (State::Dead, State::Delivered);
    }

    #[test]
    fn only_json_in_utf_8_is_taken() {
        for yes in [
            "application/json",
            "Application/JSON; charset=UTF-8",
            "application/json;charset=\"utf-8\"",
            "application/cloudevents+json",
        ] {
            assert!(is_json(yes.as_bytes()), "{yes}");
        }
        for no in [
            "",
            "text/plain",
            "application/x-www-form-urlencoded",
            "application/json; charset=iso-8859-1",
            "application/jsonp",
        ] {
            assert!(!is_json(no.as_bytes()), "{no}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_told_from_what_is_wrong() {
        assert_eq!(read(b"{\"name\":\"\xff\"}"), Err(Kind::BadRequest));
        assert_eq!(read(b"{\"name\":\"\0\"}"), Err(Kind::BadRequest));
        assert_eq!(read(b"{\"name\""), Err(Kind::BadRequest));
        assert_eq!(read(b"{} {}"), Err(Kind::BadRequest));
        assert_eq!(read(b"{\"name\":1}"), Err(Kind::Invalid));
        assert_eq!(read(b"{\"nam\":1}"), Err(Kind::Invalid));
        assert_eq!(read(b"[null]"), Err(Kind::Invalid));
        assert_eq!(read(b"[null"), Err(Kind::BadRequest));
    }
}
