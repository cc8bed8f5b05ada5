//! Test events and probes.

use serde::{Deserialize, Serialize};

use super::Attempt;

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TestRequest {
    #[cfg_attr(feature = "openapi", schema(schema_with = super::shapes::type_to_test_or_null))]
    pub r#type: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TestAttempt {
    #[serde(flatten)]
    pub attempt: Attempt,
    pub event: String,
    pub r#type: String,
    pub version: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ProbeReport {
    pub endpoint: String,
    pub url: String,
    pub r#type: String,
    /// Score out of 100.
    pub score: u32,
    /// No check failed and none was skipped.
    pub passed: bool,
    pub requests: usize,
    pub duration_ms: u64,
    pub checks: Vec<ProbeFinding>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ProbeFinding {
    #[cfg_attr(feature = "openapi", schema(inline))]
    pub check: Check,
    #[cfg_attr(feature = "openapi", schema(inline))]
    pub verdict: Verdict,
    pub title: String,
    /// What was observed.
    pub found: String,
    pub meaning: String,
    pub fix: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Check {
    ValidEvent,
    ChangedBody,
    StaleTimestamp,
    WrongSignature,
    MissingSignature,
    Rotation,
    Duplicate,
    ConcurrentDuplicates,
    OutOfOrder,
    Speed,
    NoRedirect,
    Certificate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Verdict {
    Pass,
    /// It works, but will cause problems.
    Warning,
    Fail,
    /// Pointless after an earlier result, or there was no time left.
    Skipped,
}
