//! The checks of a probe, with what each result means and how to fix it.
//! Invariant: the weights add up to 100, so that a score is a percentage.

use postrider_proto::api::{Check, Verdict};

#[derive(Debug, Clone)]
pub(crate) struct Finding {
    pub(crate) check: Check,
    pub(crate) verdict: Verdict,
    /// What was observed.
    pub(crate) found: String,
}

pub(crate) struct Texts {
    check: Check,
    pub(crate) title: &'static str,
    pub(crate) meaning: &'static str,
    pub(crate) fix: &'static str,
    pub(crate) weight: u32,
}

/// In the order of the report.
static CHECKS: [Texts; 12] = [
    Texts {
        check: Check::ValidEvent,
        title: "Accepts a valid event with 2xx in time",
        meaning: "Any response other than a 2xx within the timeout counts as a failure and is retried.",
        fix: "Verify and store the event, respond with 204, and process it afterwards. If a valid event is rejected, \
               check that the receiver has this endpoint's secret and verifies the raw body.",
        weight: 15,
    },
    Texts {
        check: Check::ChangedBody,
        title: "Rejects a body that was modified after signing",
        meaning: "Anyone who can intercept the request can change its content.",
        fix: "Compute the signature over the raw request body, before parsing it, and compare.",
        weight: 12,
    },
    Texts {
        check: Check::StaleTimestamp,
        title: "Rejects a request that was signed ten minutes ago",
        meaning: "A recorded request can be replayed by an attacker at any time.",
        fix: "Compare the signed timestamp with your clock and reject requests that are off by more than five minutes.",
        weight: 8,
    },
    Texts {
        check: Check::WrongSignature,
        title: "Rejects a signature made with another secret",
        meaning: "Anyone who knows the URL can forge events.",
        fix: "Verify Webhook-Signature with the endpoint's secret and respond with 401 if it does not match.",
        weight: 12,
    },
    Texts {
        check: Check::MissingSignature,
        title: "Rejects a request without a signature",
        meaning: "Anyone who knows the URL can forge events.",
        fix: "Treat a missing Webhook-Signature header like an invalid one: respond with 401.",
        weight: 12,
    },
    Texts {
        check: Check::Rotation,
        title: "Accepts a request with two signatures if one of them is valid",
        meaning: "While a secret is being rotated, each request carries a signature of the old and of the new secret. \
                  A receiver that checks only one of them breaks during a rotation.",
        fix: "Check every signature in the header, in any order; one match is enough.",
        weight: 10,
    },
    Texts {
        check: Check::Duplicate,
        title: "Acknowledges duplicates with 2xx",
        meaning: "An event can be delivered more than once. Rejecting a duplicate causes more retries.",
        fix: "Store each Webhook-Id; if it already exists, respond with 2xx and do nothing.",
        weight: 6,
    },
    Texts {
        check: Check::ConcurrentDuplicates,
        title: "Acknowledges five concurrent copies of an event with 2xx",
        meaning: "Copies that arrive together race: a check before an insert lets both through, or one \
                  of them fails.",
        fix: "Put a unique constraint on the event's id and let the database decide: \
               INSERT … ON CONFLICT DO NOTHING, and respond with 2xx either way.",
        weight: 6,
    },
    Texts {
        check: Check::OutOfOrder,
        title: "Accepts events out of order",
        meaning: "Retries and concurrent requests can change the order of events.",
        fix: "Do not reject an event because a newer one arrived first. Compare created_at or sequence with what \
               you have stored, and ignore what is older.",
        weight: 4,
    },
    Texts {
        check: Check::Speed,
        title: "Handles twenty concurrent requests, each within two seconds",
        meaning: "Events arrive in bursts. A slow receiver gets events later and times out under load.",
        fix: "Respond as soon as the event is stored, and process it from your own queue.",
        weight: 5,
    },
    Texts {
        check: Check::NoRedirect,
        title: "Does not redirect",
        meaning: "Redirects are never followed: they could send a signed request to another server.",
        fix: "Register the final URL, with its scheme, host and trailing slash.",
        weight: 5,
    },
    Texts {
        check: Check::Certificate,
        title: "Valid TLS certificate, not expiring within 2 weeks",
        meaning: "Once the certificate expires, every delivery fails. Plain http can be read and modified in transit.",
        fix: "Serve https and renew the certificate automatically, well before it expires.",
        weight: 5,
    },
];

/// Its position in the report.
pub(crate) fn place(check: Check) -> usize {
    let place = CHECKS.iter().position(|texts| texts.check == check);
    place.unwrap_or_default()
}

pub(crate) fn texts(check: Check) -> &'static Texts {
    &CHECKS[place(check)]
}

/// The weighted share of passed checks, in percent. A warning counts half.
pub(crate) fn score(findings: &[Finding]) -> u32 {
    let points: u32 = findings
        .iter()
        .map(|finding| match finding.verdict {
            Verdict::Pass => 2 * texts(finding.check).weight,
            Verdict::Warning => texts(finding.check).weight,
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
        let finding = |texts: &Texts| Finding {
            check: texts.check,
            verdict,
            found: String::new(),
        };
        CHECKS.iter().map(finding).collect()
    }

    #[test]
    fn a_score_goes_from_nothing_to_a_hundred() {
        assert_eq!(score(&all(Verdict::Pass)), 100);
        assert_eq!(score(&all(Verdict::Warning)), 50);
        assert_eq!(score(&all(Verdict::Fail)), 0);
        assert!(has_passed(&all(Verdict::Warning)) && !has_passed(&all(Verdict::Skipped)));
    }
}
