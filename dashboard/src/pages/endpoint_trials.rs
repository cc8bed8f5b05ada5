//! The result of a test event or a probe on the endpoint's page.

use postrider_proto::api::{ProbeReport, TestAttempt, Verdict};

/// At most one of them is set.
#[derive(Default)]
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
