//! What a probe looks at, in words for whoever runs the receiver: what each finding means and how to mend it.
//! Invariant: the weights add up to 100, so that a score is a share of what a right receiver does.

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
    /// It works, but will hurt one day.
    Warn,
    Fail,
    /// An earlier finding made it pointless, or there was no time left.
    NotTried,
}

#[derive(Debug, Clone)]
pub(crate) struct Finding {
    pub(crate) check: Check,
    pub(crate) verdict: Verdict,
    /// What was seen.
    pub(crate) found: String,
}

pub(crate) struct Words {
    pub(crate) title: &'static str,
    pub(crate) meaning: &'static str,
    pub(crate) mend: &'static str,
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

    pub(crate) const fn words(self) -> Words {
        match self {
            Self::ValidEvent => Words {
                title: "Answers a valid event with 2xx in time",
                meaning: "Everything but a 2xx within the time limit counts as a failure and is sent again.",
                mend: "Verify, store the event, answer 204, and do the work afterwards. If a valid event is refused, \
                       check that the receiver has this endpoint's secret and verifies the raw body.",
                weight: 15,
            },
            Self::ChangedBody => Words {
                title: "Refuses a body that was changed after it was signed",
                meaning: "Whoever can touch the request on its way can change what it says.",
                mend: "Compute the signature over the bytes as they came in, before parsing, and compare it.",
                weight: 12,
            },
            Self::StaleTimestamp => Words {
                title: "Refuses a request that was signed ten minutes ago",
                meaning: "A request that somebody recorded can be played back at any time.",
                mend: "Compare the signed timestamp with your clock and refuse what is more than five minutes away.",
                weight: 8,
            },
            Self::WrongSignature => Words {
                title: "Refuses a signature made with another secret",
                meaning: "Anybody who knows the URL can make up events.",
                mend: "Verify Webhook-Signature with the endpoint's secret and answer 401 when it does not match.",
                weight: 12,
            },
            Self::MissingSignature => Words {
                title: "Refuses a request without a signature",
                meaning: "Anybody who knows the URL can make up events.",
                mend: "Treat a missing Webhook-Signature header like a wrong one: answer 401.",
                weight: 12,
            },
            Self::Rotation => Words {
                title: "Accepts a request with two signatures when one of them is good",
                meaning: "While a secret is rotated each request carries a signature by the old and by the new one. \
                          A receiver that looks at only one of them stops working during a rotation.",
                mend: "Try every signature in the header, in any order; one that matches is enough.",
                weight: 10,
            },
            Self::Duplicate => Words {
                title: "Answers an event that it has had with 2xx",
                meaning: "An event can come more than once. A refusal makes the sender try again, and again.",
                mend: "Remember each Webhook-Id; when it was there before, answer 2xx and do nothing.",
                weight: 6,
            },
            Self::ConcurrentDuplicates => Words {
                title: "Answers five copies of an event at the same time with 2xx",
                meaning: "Two copies that arrive together race: a check before an insert lets both through, or one \
                          of them fails.",
                mend: "Put a unique constraint on the event's id and let the database decide: \
                       INSERT … ON CONFLICT DO NOTHING, and answer 2xx either way.",
                weight: 6,
            },
            Self::OutOfOrder => Words {
                title: "Takes events out of order",
                meaning: "Retries and parallel sending make events overtake each other.",
                mend: "Do not refuse an event because a newer one was there. Compare created_at or sequence with what \
                       you have stored, and ignore what is older.",
                weight: 4,
            },
            Self::Speed => Words {
                title: "Answers twenty requests at once, each within two seconds",
                meaning: "Events come in bursts. A slow receiver is sent to more slowly, and times out under load.",
                mend: "Answer as soon as the event is stored; do the work in a queue of your own.",
                weight: 5,
            },
            Self::NoRedirect => Words {
                title: "Does not redirect",
                meaning: "Redirects are never followed: they could lead a signed request somewhere else.",
                mend: "Register the final URL, with its scheme, host and trailing slash.",
                weight: 5,
            },
            Self::Certificate => Words {
                title: "Has a valid TLS certificate that does not end soon",
                meaning: "When the certificate ends, every delivery fails. Plain http can be read and changed on its way.",
                mend: "Serve https, and renew the certificate by itself well before it ends.",
                weight: 5,
            },
        }
    }
}

/// The share of what a right receiver does, in percent. A warning counts half.
pub(crate) fn score(findings: &[Finding]) -> u32 {
    let points: u32 = findings
        .iter()
        .map(|finding| match finding.verdict {
            Verdict::Pass => 2 * finding.check.words().weight,
            Verdict::Warn => finding.check.words().weight,
            Verdict::Fail | Verdict::NotTried => 0,
        })
        .sum();
    points / 2
}

/// Nothing failed, and everything was tried.
pub(crate) fn has_passed(findings: &[Finding]) -> bool {
    findings
        .iter()
        .all(|finding| matches!(finding.verdict, Verdict::Pass | Verdict::Warn))
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
        assert_eq!(score(&all(Verdict::Warn)), 50);
        assert_eq!(score(&all(Verdict::Fail)), 0);
        assert!(has_passed(&all(Verdict::Warn)) && !has_passed(&all(Verdict::NotTried)));
    }
}
