//! The outcome of one attempt. A receiver that rejects a request is data, never an error.

use std::{fmt, str::FromStr, time::Duration};

/// An endpoint's response, truncated to what is stored.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Response {
    pub head: String,
    pub body: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// 2xx.
    Accepted { status: u16, response: Response },
    /// Any other status. This includes redirects, which are never followed.
    Refused {
        status: u16,
        retry_after: Option<Duration>,
        response: Response,
    },
    /// No response: DNS, the connection, TLS or the protocol failed. The text is for people.
    Unreachable { kind: OutcomeKind, error: String },
    /// The address is not allowed. Nothing was sent.
    Forbidden { error: String },
    /// A cause on our side: the event is gone, the endpoint was disabled. Nothing was sent.
    NotSent { error: String },
}

/// The class of an outcome, as stored in the database. The numbers never change their meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i16)]
pub enum OutcomeKind {
    Accepted = 1,
    Refused = 2,
    NameNotFound = 3,
    ConnectionFailed = 4,
    TlsFailed = 5,
    TimedOut = 6,
    InvalidResponse = 7,
    Forbidden = 8,
    NotSent = 9,
    /// The operator's egress proxy failed: this says nothing about the endpoint.
    ProxyFailed = 10,
}

impl OutcomeKind {
    pub const ALL: [Self; 10] = [
        Self::Accepted,
        Self::Refused,
        Self::NameNotFound,
        Self::ConnectionFailed,
        Self::TlsFailed,
        Self::TimedOut,
        Self::InvalidResponse,
        Self::Forbidden,
        Self::NotSent,
        Self::ProxyFailed,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Refused => "refused",
            Self::NameNotFound => "dns_failed",
            Self::ConnectionFailed => "connection_failed",
            Self::TlsFailed => "tls_failed",
            Self::TimedOut => "timed_out",
            Self::InvalidResponse => "invalid_response",
            Self::Forbidden => "forbidden_address",
            Self::NotSent => "not_sent",
            Self::ProxyFailed => "proxy_failed",
        }
    }

    pub fn from_number(number: i16) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as i16 == number)
    }
}

/// What an attempt failed with, as one number: the status of the response, or the number of the [`OutcomeKind`] if there was
/// none. Deliveries that failed the same way have the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "sqlx", derive(sqlx::Type), sqlx(transparent))]
pub struct Failure(i16);

impl Failure {
    /// Dead letters are counted by failure, and a receiver may respond with any status. Unusual ones are counted by their
    /// first digit, so that the number of counters is limited.
    pub fn new(status: Option<i16>, outcome: i16) -> Self {
        Self(match status {
            Some(status @ (300..=308 | 400..=431 | 451 | 500..=511 | 520..=530)) => status,
            Some(status) => status / 100 * 100 + 99,
            None => outcome,
        })
    }

    /// The status of the response; 499 stands for unusual ones that begin with 4, and so on.
    pub fn status(self) -> Option<i16> {
        Some(self.0).filter(|number| *number >= 100)
    }

    /// Without a response.
    pub fn kind(self) -> Option<OutcomeKind> {
        OutcomeKind::from_number(self.0)
    }
}

/// `503`, `timed_out`.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind() {
            Some(kind) => f.write_str(kind.as_str()),
            None => self.0.fmt(f),
        }
    }
}

/// The text is not a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a failure")]
pub struct NotAFailure;

impl FromStr for Failure {
    type Err = NotAFailure;

    fn from_str(text: &str) -> Result<Self, NotAFailure> {
        if let Some(kind) = OutcomeKind::ALL.into_iter().find(|kind| kind.as_str() == text) {
            return Ok(Self(kind as i16));
        }
        let status = text.parse().ok().filter(|status| (100..1000).contains(status));
        status.map(Self).ok_or(NotAFailure)
    }
}

impl Outcome {
    pub fn failure(&self) -> Failure {
        let status = self
            .status()
            .map(|status| i16::try_from(status).unwrap_or(i16::MAX));
        Failure::new(status, self.kind() as i16)
    }

    pub fn kind(&self) -> OutcomeKind {
        match self {
            Self::Accepted { .. } => OutcomeKind::Accepted,
            Self::Refused { .. } => OutcomeKind::Refused,
            Self::Unreachable { kind, .. } => *kind,
            Self::Forbidden { .. } => OutcomeKind::Forbidden,
            Self::NotSent { .. } => OutcomeKind::NotSent,
        }
    }

    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Accepted { status, .. } | Self::Refused { status, .. } => Some(*status),
            Self::Unreachable { .. } | Self::Forbidden { .. } | Self::NotSent { .. } => None,
        }
    }

    pub fn response(&self) -> Option<&Response> {
        match self {
            Self::Accepted { response, .. } | Self::Refused { response, .. } => Some(response),
            Self::Unreachable { .. } | Self::Forbidden { .. } | Self::NotSent { .. } => None,
        }
    }

    pub fn error(&self) -> Option<&str> {
        match self {
            Self::Accepted { .. } | Self::Refused { .. } => None,
            Self::Unreachable { error, .. } | Self::Forbidden { error } | Self::NotSent { error } => {
                Some(error)
            }
        }
    }

    pub fn is_success(&self) -> bool {
        matches!(self, Self::Accepted { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_read_back_and_are_few() {
        for (status, outcome, text) in [
            (Some(401), 2, "401"),
            (Some(410), 2, "410"),
            (Some(499), 2, "499"),
            (Some(440), 2, "499"),
            (Some(900), 2, "999"),
            (None, 6, "timed_out"),
            (None, 9, "not_sent"),
        ] {
            let failure = Failure::new(status, outcome);
            assert_eq!(failure.to_string(), text);
            assert_eq!(text.parse(), Ok(failure));
        }
        for text in ["", "99", "1000", "-1", "late"] {
            assert_eq!(text.parse::<Failure>(), Err(NotAFailure), "{text}");
        }
        let all: std::collections::HashSet<Failure> =
            (100..1000).map(|status| Failure::new(Some(status), 2)).collect();
        assert!(all.len() < 100, "{}", all.len());
    }
}
