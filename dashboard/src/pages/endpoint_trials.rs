//! Test events and probes on the endpoint's page: their forms and their results.

use postrider_proto::api::{ProbeReport, TestAttempt, Verdict};
use serde::{Deserialize, Serialize};

use super::FormErrors;

/// The result of the forms.
pub(super) const TRIED: &str = "trial";

/// The form of a test or a probe that was rejected; otherwise both are blank.
#[derive(Default)]
pub(super) struct TrialForms {
    pub(super) r#type: String,
    pub(super) test_errors: FormErrors,
    pub(super) probe_errors: FormErrors,
}

/// At most one of them is set.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Tried {
    pub(super) test: Option<TestAttempt>,
    pub(super) probe: Option<ProbeReport>,
}

impl Tried {
    /// The CSS class and the text of a finding's badge.
    pub(super) fn badge(&self, verdict: &Verdict) -> (&'static str, &'static str) {
        match verdict {
            Verdict::Pass => ("good", "Pass"),
            Verdict::Warning => ("wait", "Warning"),
            Verdict::Fail => ("bad", "Fail"),
            Verdict::Skipped => ("mute", "Skipped"),
        }
    }

    pub(super) fn needs_attention(&self, verdict: &Verdict) -> bool {
        matches!(verdict, Verdict::Warning | Verdict::Fail)
    }

    pub(super) fn summary(&self, probe: &ProbeReport) -> &'static str {
        let warned = probe.checks.iter().any(|one| self.needs_attention(&one.verdict));
        match (probe.passed, warned) {
            (true, false) => "The receiver passed all checks.",
            (true, true) => "The receiver passed, with warnings.",
            (false, _) => "Fix the failed checks in your receiver.",
        }
    }
}
