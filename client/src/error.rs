//! What can go wrong with a call.

use std::fmt;

use serde::{Deserialize, Serialize};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server said no, and why.
    #[error("{0}")]
    Refused(Box<Problem>),
    #[error("{url} can't be reached: {reason}")]
    Unreachable { url: String, reason: String },
    /// Not an answer of Postrider: often a proxy on the way, or another server at this address.
    #[error("the answer of {url} can't be read: {reason}")]
    Unreadable { url: String, reason: String },
    #[error("`{0}` is not a URL like https://hooks.example.com")]
    BadUrl(String),
    #[error("the API key can't be sent: it has characters that no header may have")]
    BadKey,
}

impl Error {
    /// The problem, when the server refused.
    pub fn problem(&self) -> Option<&Problem> {
        match self {
            Self::Refused(problem) => Some(problem),
            _ => None,
        }
    }
}

/// Why a request was refused (RFC 9457).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// `urn:postrider:problem:…`: the same for every problem of a kind.
    #[serde(rename = "type")]
    pub kind: String,
    pub title: String,
    pub status: u16,
    #[serde(default)]
    pub detail: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<Fault>,
    /// What `Retry-After` said.
    #[serde(skip)]
    pub retry_after_seconds: Option<u64>,
}

/// A part of the request that was refused, by its JSON pointer.
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
