//! Errors of a call.

use postrider_proto::api::Problem;

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
