//! The outcome of one attempt. A receiver that rejects a request is data, never an error.

use std::time::Duration;

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

impl Outcome {
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
