//! What came of a test event or a probe, as the API told it, for the endpoint's page.

use std::collections::BTreeMap;

use axum::response::Response;
use serde::{Deserialize, de::DeserializeOwned};

use crate::{
    input::read_body,
    problem::{Kind, Problem},
    transcript::{attempt_tone, attempt_words},
};

const ANSWER_BYTES_MAX: usize = 1024 * 1024;

/// At most one of them is there.
#[derive(Debug, Default)]
pub(super) struct Tried {
    pub(super) test: Option<Test>,
    pub(super) probe: Option<Probe>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Test {
    status: Option<i16>,
    error: Option<String>,
    outcome: String,
    pub(super) duration_ms: i64,
    #[serde(default)]
    pub(super) request_headers: BTreeMap<String, String>,
    pub(super) response_head: Option<String>,
    pub(super) response_body: Option<String>,
}

impl Test {
    pub(super) fn in_words(&self) -> String {
        attempt_words(self.status, self.error.as_deref(), &self.outcome)
    }

    pub(super) fn tone(&self) -> &'static str {
        attempt_tone(self.status)
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct Probe {
    pub(super) score: u32,
    pub(super) passed: bool,
    pub(super) requests: u64,
    pub(super) duration_ms: i64,
    pub(super) checks: Vec<Finding>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Finding {
    verdict: String,
    pub(super) title: String,
    pub(super) found: String,
    pub(super) meaning: String,
    pub(super) fix: String,
}

impl Finding {
    /// The class of its badge, and the word in it.
    pub(super) fn badge(&self) -> (&'static str, &'static str) {
        match self.verdict.as_str() {
            "pass" => ("good", "right"),
            "warning" => ("wait", "look at it"),
            "fail" => ("bad", "wrong"),
            _ => ("mute", "not tried"),
        }
    }

    pub(super) fn is_trouble(&self) -> bool {
        matches!(self.verdict.as_str(), "warning" | "fail")
    }
}

pub(super) async fn read_answer<T: DeserializeOwned>(answer: Response) -> Result<T, Problem> {
    let body = read_body(answer.into_body(), ANSWER_BYTES_MAX).await?;
    serde_json::from_slice(&body).map_err(|error| {
        tracing::error!(%error, "the answer to a trial can't be read");
        Problem::new(Kind::Internal, "It has been logged.")
    })
}
