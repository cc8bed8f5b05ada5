//! Failures in words, and what to do about them.

use postrider_proto::{Failure, OutcomeKind};

use super::attempt_view::status_line;

/// `401 Unauthorized`, `Timed out`.
pub(crate) fn label(failure: Failure) -> String {
    match (failure.status(), failure.kind()) {
        // Unusual codes are counted together.
        (Some(status), _) if status % 100 == 99 => format!("Other {}xx status", status / 100),
        (Some(status), _) => status_line(status),
        (None, Some(kind)) => kind_label(kind).to_owned(),
        (None, None) => "Unknown failure".to_owned(),
    }
}

/// The end of a sentence that begins with requests: `get 401 Unauthorized`, `time out`.
pub(crate) fn verb(failure: Failure) -> (&'static str, &'static str, String) {
    match (failure.status(), failure.kind()) {
        (Some(status), _) if status % 100 == 99 => {
            ("gets", "get", format!(" an unusual {}xx status", status / 100))
        }
        (Some(_), _) => ("gets", "get", format!(" {}", label(failure))),
        (None, Some(OutcomeKind::TimedOut)) => ("times out", "time out", String::new()),
        (None, _) => ("fails", "fail", format!(" ({})", lowercased(&label(failure)))),
    }
}

/// Abbreviations keep their capitals.
fn lowercased(label: &str) -> String {
    let mut letters = label.chars();
    match (letters.next(), letters.next()) {
        (Some(first), Some(second)) if second.is_lowercase() => {
            first.to_lowercase().chain([second]).chain(letters).collect()
        }
        _ => label.to_owned(),
    }
}

const fn kind_label(kind: OutcomeKind) -> &'static str {
    match kind {
        OutcomeKind::Accepted => "Delivered",
        OutcomeKind::Refused => "Rejected",
        OutcomeKind::NameNotFound => "DNS lookup failed",
        OutcomeKind::ConnectionFailed => "Connection failed",
        OutcomeKind::TlsFailed => "TLS handshake failed",
        OutcomeKind::TimedOut => "Timed out",
        OutcomeKind::InvalidResponse => "Invalid response",
        OutcomeKind::Forbidden => "Address not allowed",
        OutcomeKind::NotSent => "Not sent",
        OutcomeKind::ProxyFailed => "Egress proxy failed",
    }
}

/// Whether the receiver probably rejects our signatures.
pub(crate) fn concerns_signature(failure: Failure) -> bool {
    matches!(failure.status(), Some(401 | 403))
}

/// What to do about a failure. Written for the people who run the receiver.
pub(crate) fn advice(failure: Failure) -> Option<&'static str> {
    let advice = match (failure.status(), failure.kind()) {
        (Some(401 | 403), _) => {
            "The receiver rejects the request. Check that it verifies signatures with the current secret and the raw body, \
             and that no login or firewall stands in front of it."
        }
        (Some(404 | 405), _) => {
            "The receiver has no handler for POST requests at this URL. Check the path in the endpoint's settings."
        }
        (Some(408 | 504), _) => {
            "The receiver, or a proxy in front of it, gave up waiting. Respond with 2xx first and process the event afterwards."
        }
        (Some(410), _) => {
            "The receiver said that this URL is gone for good, so the endpoint was disabled. Change its URL, or enable it once \
             the receiver is back."
        }
        (Some(413), _) => {
            "The receiver rejects bodies of this size. Raise the limit of its web server or framework."
        }
        (Some(400 | 415 | 422), _) => {
            "The receiver could not read the event. Its response and logs should say what it expected; compare it with the \
             event type's schema."
        }
        (Some(429), _) => {
            "The receiver gets more requests than it accepts. Set a rate limit or fewer concurrent requests in the endpoint's \
             settings."
        }
        (Some(502 | 503), _) => {
            "The receiver, or a service behind it, is not running. Check its deployment, then replay what it missed."
        }
        (Some(300..=399), _) => {
            "Redirects are not followed. Set the endpoint's URL to the final address, including the scheme and a trailing slash."
        }
        (Some(500..=599), _) => {
            "The receiver failed while it handled the request. Look for the error in its logs, with the event ID."
        }
        (Some(_), _) => {
            "Only responses with a status from 200 to 299 count as delivered. Respond with one of them."
        }
        (None, Some(kind)) => return kind_advice(kind),
        (None, None) => return None,
    };
    Some(advice)
}

const fn kind_advice(kind: OutcomeKind) -> Option<&'static str> {
    Some(match kind {
        OutcomeKind::NameNotFound => {
            "The host name has no address. Check its spelling and its DNS records; it must resolve on the public internet."
        }
        OutcomeKind::ConnectionFailed => {
            "No connection could be made. Check that the receiver is running, that the port is right and that its firewall \
             lets the requests in."
        }
        OutcomeKind::TlsFailed => {
            "The TLS connection failed. Check that the certificate is valid for this host name, has not expired and is sent \
             with its intermediate certificates."
        }
        OutcomeKind::TimedOut => {
            "The receiver did not respond in time. Respond with 2xx first and process the event afterwards, or raise the \
             timeout in the endpoint's settings."
        }
        OutcomeKind::InvalidResponse => {
            "The response is not valid HTTP. Check that the URL leads to a web server, and that no proxy cuts the response."
        }
        OutcomeKind::Forbidden => {
            "The host name leads to an address that requests may not be sent to, such as a private one. Use a public address."
        }
        OutcomeKind::ProxyFailed => {
            "The request did not leave the platform: its egress proxy failed. The endpoint is not the cause."
        }
        OutcomeKind::Accepted | OutcomeKind::Refused | OutcomeKind::NotSent => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sentence(text: &str) -> String {
        let (every, _, what) = verb(text.parse().expect("a failure"));
        format!("Every request {every}{what}.")
    }

    #[test]
    fn failures_are_told_in_sentences() {
        assert_eq!(sentence("401"), "Every request gets 401 Unauthorized.");
        assert_eq!(sentence("499"), "Every request gets an unusual 4xx status.");
        assert_eq!(sentence("timed_out"), "Every request times out.");
        assert_eq!(
            sentence("connection_failed"),
            "Every request fails (connection failed)."
        );
        assert_eq!(sentence("dns_failed"), "Every request fails (DNS lookup failed).");
    }

    #[test]
    fn every_failure_of_a_receiver_has_advice() {
        for failure in [
            "301",
            "401",
            "404",
            "418",
            "499",
            "500",
            "599",
            "timed_out",
            "tls_failed",
        ] {
            assert!(advice(failure.parse().expect("a failure")).is_some(), "{failure}");
        }
    }
}
