//! The checks of a probe, with what each result means and how to fix it.
//! Invariant: the weights add up to 100, so that a score is a percentage.

use serde::Serialize;
use utoipa::ToSchema;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Check {
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    Pass,
    /// It works, but will cause problems.
    Warning,
    Fail,
    /// Pointless after an earlier result, or there was no time left.
    Skipped,
}

#[derive(Debug, Clone)]
pub(crate) struct Finding {
    pub(crate) check: Check,
    pub(crate) verdict: Verdict,
    /// What was observed.
    pub(crate) found: String,
}

pub(crate) struct Texts {
    pub(crate) title: &'static str,
    pub(crate) meaning: &'static str,
    pub(crate) fix: &'static str,
    pub(crate) weight: u32,
}

impl Check {
    pub(crate) const ALL: [Self; 12] = [
        Self::ValidEvent,
        Self::ChangedBody,
        Self::StaleTimestamp,
        Self::WrongSignature,
        Self::MissingSignature,
        Self::Rotation,
        Self::Duplicate,
        Self::ConcurrentDuplicates,
        Self::OutOfOrder,
        Self::Speed,
        Self::NoRedirect,
        Self::Certificate,
    ];

    pub(crate) const fn texts(self) -> Texts {
        match self {
            Self::ValidEvent => Texts {
                title: "Accepts a valid event with 2xx in time",
                meaning: "Any response other than a 2xx within the timeout counts as a failure and is retried.",
                fix: "Verify and store the event, respond with 204, and process it afterwards. If a valid event is rejected, \
                       check that the receiver has this endpoint's secret and verifies the raw body.",
                weight: 15,
            },
            Self::ChangedBody => Texts {
                title: "Rejects a body that was modified after signing",
                meaning: "Anyone who can intercept the request can change its content.",
                fix: "Compute the signature over the raw request body, before parsing it, and compare.",
                weight: 12,
            },
            Self::StaleTimestamp => Texts {
                title: "Rejects a request that was signed ten minutes ago",
                meaning: "A recorded request can be replayed by an attacker at any time.",
                fix: "Compare the signed timestamp with your clock and reject requests that are off by more than five minutes.",
                weight: 8,
            },
            Self::WrongSignature => Texts {
                title: "Rejects a signature made with another secret",
                meaning: "Anyone who knows the URL can forge events.",
                fix: "Verify Webhook-Signature with the endpoint's secret and respond with 401 if it does not match.",
                weight: 12,
            },
            Self::MissingSignature => Texts {
                title: "Rejects a request without a signature",
                meaning: "Anyone who knows the URL can forge events.",
                fix: "Treat a missing Webhook-Signature header like an invalid one: respond with 401.",
                weight: 12,
            },
            Self::Rotation => Texts {
                title: "Accepts a request with two signatures if one of them is valid",
                meaning: "While a secret is being rotated, each request carries a signature of the old and of the new secret. \
                          A receiver that checks only one of them breaks during a rotation.",
                fix: "Check every signature in the header, in any order; one match is enough.",
                weight: 10,
            },
            Self::Duplicate => Texts {
                title: "Acknowledges duplicates with 2xx",
                meaning: "An event can be delivered more than once. Rejecting a duplicate causes more retries.",
                fix: "Store each Webhook-Id; if it already exists, respond with 2xx and do nothing.",
                weight: 6,
            },
            Self::ConcurrentDuplicates => Texts {
                title: "Acknowledges five concurrent copies of an event with 2xx",
                meaning: "Copies that arrive together race: a check before an insert lets both through, or one \
                          of them fails.",
                fix: "Put a unique constraint on the event's id and let the database decide: \
                       INSERT … ON CONFLICT DO NOTHING, and respond with 2xx either way.",
                weight: 6,
            },
            Self::OutOfOrder => Texts {
                title: "Accepts events out of order",
                meaning: "Retries and concurrent requests can change the order of events.",
                fix: "Do not reject an event because a newer one arrived first. Compare created_at or sequence with what \
                       you have stored, and ignore what is older.",
                weight: 4,
            },
            Self::Speed => Texts {
                title: "Handles twenty concurrent requests, each within two seconds",
                meaning: "Events arrive in bursts. A slow receiver gets events later and times out under load.",
                fix: "Respond as soon as the event is stored, and process it from your own queue.",
                weight: 5,
            },
            Self::NoRedirect => Texts {
                title: "Does not redirect",
                meaning: "Redirects are never followed: they could send a signed request to another server.",
                fix: "Register the final URL, with its scheme, host and trailing slash.",
                weight: 5,
            },
            Self::Certificate => Texts {
                title: "Valid TLS certificate, not expiring within 2 weeks",
                meaning: "Once the certificate expires, every delivery fails. Plain http can be read and modified in transit.",
                fix: "Serve https and renew the certificate automatically, well before it expires.",
                weight: 5,
            },
        }
    }
}

/// The weighted share of passed checks, in percent. A warning counts half.
pub(crate) fn score(findings: &[Finding]) -> u32 {
    let points: u32 = findings
        .iter()
        .map(|finding| match finding.verdict {
            Verdict::Pass => 2 * finding.check.texts().weight,
            Verdict::Warning => finding.check.texts().weight,
            Verdict::Fail | Verdict::Skipped => 0,
        })
        .sum();
    points / 2
}

/// No check failed and none was skipped.
pub(crate) fn has_passed(findings: &[Finding]) -> bool {
    findings
        .iter()
        .all(|finding| matches!(finding.verdict, Verdict::Pass | Verdict::Warning))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(verdict: Verdict) -> Vec<Finding> {
        Check::ALL
            .map(|check| Finding {
                check,
                verdict,
                found: String::new(),
            })
            .to_vec()
    }

    #[test]
    fn a_score_goes_from_nothing_to_a_hundred() {
        assert_eq!(score(&all(Verdict::Pass)), 100);
        assert_eq!(score(&all(Verdict::Warning)), 50);
        assert_eq!(score(&all(Verdict::Fail)), 0);
        assert!(has_passed(&all(Verdict::Warning)) && !has_passed(&all(Verdict::Skipped)));
    }
}
