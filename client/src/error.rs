//! Errors of a call.

use std::fmt;

use serde::{Deserialize, Serialize};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server rejected the request and returned a problem.
    #[error("{0}")]
    Refused(Box<Problem>),
    #[error("could not connect to {url}: {reason}")]
    Unreachable { url: String, reason: String },
    /// Not a response from Postrider: often a proxy in between, or another server at this address.
    #[error("unexpected response from {url}: {reason}")]
    Unreadable { url: String, reason: String },
    #[error("`{0}` is not a valid URL, like https://hooks.example.com")]
    BadUrl(String),
    #[error("the API key contains characters that are not allowed in an HTTP header")]
    BadKey,
}

impl Error {
    /// The problem, if the server rejected the request.
    pub fn problem(&self) -> Option<&Problem> {
        match self {
            Self::Refused(problem) => Some(problem),
            _ => None,
        }
    }
}

/// An error response (RFC 9457).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// `urn:postrider:problem:…`: stable for each cause.
    #[serde(rename = "type")]
    pub kind: String,
    pub title: String,
    pub status: u16,
    #[serde(default)]
    pub detail: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<Fault>,
    /// The value of `Retry-After`.
    #[serde(skip)]
    pub retry_after_seconds: Option<u64>,
}

/// An invalid part of the request, by its JSON pointer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    pub pointer: String,
    pub detail: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.title, self.status)?;
        if !self.detail.is_empty() {
            write!(f, ": {}", self.detail)?;
        }
        Ok(())
    }
}
