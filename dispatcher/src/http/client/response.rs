//! The part of a receiver's response that is read and stored.
//! Invariant: at most 64 KiB of a response is read and 4 KiB stored, as raw bytes: nothing is decompressed.

use std::time::Duration;

use http::{HeaderValue, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use postrider_proto::{
    Outcome, OutcomeKind, Response,
    limits::{RESPONSE_KEPT_BYTES_MAX, RESPONSE_READ_BYTES_MAX, RETRY_AFTER_SECONDS_MAX},
};

/// Progress of an exchange, kept outside of it so that a timeout does not lose it.
#[derive(Default)]
pub(super) struct Progress {
    head: Option<Head>,
    body: Vec<u8>,
}

struct Head {
    status: u16,
    retry_after: Option<Duration>,
    text: String,
}

impl Head {
    fn of(response: &http::Response<Incoming>) -> Self {
        let mut text = format!("{:?} {}\n", response.version(), response.status());
        for (name, value) in response.headers() {
            if text.len() >= RESPONSE_KEPT_BYTES_MAX {
                break;
            }
            text.push_str(name.as_str());
            text.push_str(": ");
            text.push_str(&String::from_utf8_lossy(value.as_bytes()));
            text.push('\n');
        }
        Self {
            status: response.status().as_u16(),
            retry_after: response.headers().get(header::RETRY_AFTER).and_then(retry_after),
            text: kept_text(text),
        }
    }
}

impl Progress {
    /// The status has already decided the outcome; the body is only for display. Stops at the cap, at the timeout, or
    /// when the connection breaks. Returns whether it was read to its end.
    pub(super) async fn read(&mut self, mut response: http::Response<Incoming>) -> bool {
        self.head = Some(Head::of(&response));
        let mut read = 0;
        while let Some(frame) = response.frame().await {
            let Ok(frame) = frame else { return false };
            let Some(chunk) = frame.data_ref() else { continue };
            let space = RESPONSE_KEPT_BYTES_MAX + 1 - self.body.len();
            self.body.extend_from_slice(&chunk[..chunk.len().min(space)]);
            read += chunk.len();
            if read >= RESPONSE_READ_BYTES_MAX {
                return false;
            }
        }
        true
    }

    pub(super) fn outcome(self) -> Outcome {
        let Some(head) = self.head else {
            return Outcome::Unreachable {
                kind: OutcomeKind::InvalidResponse,
                error: "no response".to_owned(),
            };
        };
        let response = Response {
            head: head.text,
            body: self.body,
        };
        match head.status {
            200..=299 => Outcome::Accepted {
                status: head.status,
                response,
            },
            status => Outcome::Refused {
                status,
                retry_after: head.retry_after,
                response,
            },
        }
    }

    /// The outcome at the timeout. `connected` tells the operator where to look.
    pub(super) fn cut_off(self, limit: Duration, connected: bool) -> Outcome {
        let waited_for = if connected { "no response" } else { "no connection" };
        match self.head {
            Some(_) => self.outcome(),
            None => Outcome::Unreachable {
                kind: OutcomeKind::TimedOut,
                error: format!("{waited_for} within {}", words_for(limit)),
            },
        }
    }
}

fn words_for(limit: Duration) -> String {
    match limit.as_millis() {
        ms if ms % 1000 == 0 => format!("{} s", ms / 1000),
        ms => format!("{ms} ms"),
    }
}

/// Seconds, or an HTTP date. Both only ever postpone, and never past the limit.
#[expect(
    clippy::disallowed_methods,
    reason = "the header holds the receiver's wall clock, whole seconds"
)]
pub fn retry_after(value: &HeaderValue) -> Option<Duration> {
    let text = value.to_str().ok()?.trim();
    let most = Duration::from_secs(RETRY_AFTER_SECONDS_MAX);
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
        // More digits than an integer can hold still means "very late".
        return Some(text.parse().map_or(most, Duration::from_secs).min(most));
    }
    let at = httpdate::parse_http_date(text).ok()?;
    Some(
        at.duration_since(std::time::SystemTime::now())
            .unwrap_or_default()
            .min(most),
    )
}

/// Postgres does not accept NUL in text.
pub(super) fn kept_text(text: String) -> String {
    let end = text.floor_char_boundary(RESPONSE_KEPT_BYTES_MAX);
    text[..end].replace('\0', "\u{fffd}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(value: &str) -> Option<u64> {
        retry_after(&HeaderValue::from_str(value).expect("a header value")).map(|d| d.as_secs())
    }

    #[test]
    fn b10_retry_after_is_read_as_seconds_or_a_date_and_clamped() {
        assert_eq!(asked("120"), Some(120));
        assert_eq!(asked("99999999999999999999999"), Some(RETRY_AFTER_SECONDS_MAX));
        assert_eq!(
            asked("Fri, 31 Dec 9999 23:59:59 GMT"),
            Some(RETRY_AFTER_SECONDS_MAX)
        );
        assert_eq!(asked("Thu, 01 Jan 1970 00:00:00 GMT"), Some(0));
        for bad in ["", "-5", "soon", "1.5", "12 34"] {
            assert_eq!(asked(bad), None, "{bad}");
        }
    }

    #[test]
    fn kept_text_is_cut_at_a_character_and_holds_no_nul() {
        let text = kept_text(format!("a\0{}", "é".repeat(5_000)));
        assert!(text.len() <= RESPONSE_KEPT_BYTES_MAX + 2 && !text.contains('\0'));
    }
}
