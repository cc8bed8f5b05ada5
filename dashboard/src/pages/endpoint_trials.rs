//! The results of test events and probes on the endpoint's page, read from the API's responses.

use std::collections::BTreeMap;

use axum::response::Response;
use serde::{Deserialize, de::DeserializeOwned};

use crate::{
    http::{
        input::read_body,
        problem::{Kind, Problem},
    },
    tables::attempt_view::{attempt_summary, attempt_tone},
};

const RESPONSE_BYTES_MAX: usize = 1024 * 1024;

/// At most one of them is set.
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
    pub(super) fn summary(&self) -> String {
        attempt_summary(self.status, self.error.as_deref(), &self.outcome)
    }

    pub(super) fn tone(&self) -> &'static str {
        attempt_tone(self.status)
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct Probe {
    pub(super) score: u32,
    passed: bool,
    pub(super) requests: u64,
    pub(super) duration_ms: i64,
    pub(super) checks: Vec<Finding>,
}

impl Probe {
    pub(super) fn summary(&self) -> &'static str {
        match (self.passed, self.checks.iter().any(Finding::needs_attention)) {
            (true, false) => "The receiver passed all checks.",
            (true, true) => "The receiver passed, with warnings.",
            (false, _) => "Fix the failed checks in your receiver.",
        }
    }
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
    /// The CSS class and the text of its badge.
    pub(super) fn badge(&self) -> (&'static str, &'static str) {
        match self.verdict.as_str() {
            "pass" => ("good", "Pass"),
            "warning" => ("wait", "Warning"),
            "fail" => ("bad", "Fail"),
            _ => ("mute", "Skipped"),
        }
    }

    pub(super) fn needs_attention(&self) -> bool {
        matches!(self.verdict.as_str(), "warning" | "fail")
    }
}

pub(super) async fn read_response<T: DeserializeOwned>(response: Response) -> Result<T, Problem> {
    let body = read_body(response.into_body(), RESPONSE_BYTES_MAX).await?;
    serde_json::from_slice(&body).map_err(|error| {
        tracing::error!(%error, "failed to parse the result of a test or probe");
        Problem::new(
            Kind::Internal,
            "The result could not be read. The error has been logged.",
        )
    })
}
