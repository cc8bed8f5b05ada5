//! A probe: a few dozen requests that test a receiver's implementation. `checks` explains each result.
//! Invariant: at most `REQUESTS_MAX` requests, finished within `TIME_MAX`, whatever the receiver does.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::body::Bytes;
use chrono::TimeDelta;
use postrider_dispatcher::http::client::HttpSender;
use postrider_proto::{
    Outcome, OutcomeKind,
    api::{Check, Verdict},
    signature::Secret,
};
use tokio::task::JoinSet;

use super::{
    Sent, Target,
    certificate::valid_until,
    checks::{Finding, place},
    event::{Model, TestEvent},
};
use crate::actions::numbers::counted;

const REQUESTS_MAX: usize = 35;
/// Less than the request timeout of the API.
const TIME_MAX: Duration = Duration::from_secs(16);
const STALE_SECONDS: i64 = 600;
const DUPLICATES: usize = 5;
const PARALLEL: usize = 20;
/// The first one, four that must be rejected, two of a rotation, a duplicate, two out of order.
const _: () = assert!(1 + 4 + 2 + 1 + DUPLICATES + 2 + PARALLEL == REQUESTS_MAX);
const FAST: Duration = Duration::from_secs(2);
const CERTIFICATE_DAYS_MIN: i64 = 14;

pub(crate) struct Probe {
    target: Target,
    model: Model,
    sender: HttpSender,
    ends: Instant,
    requests: AtomicUsize,
}

/// A prepared request.
struct Shot {
    event: String,
    unix_seconds: i64,
    signature: Option<String>,
    body: Bytes,
}

type Judged = (Verdict, String);

impl Probe {
    pub(crate) fn new(target: Target, model: Model, sender: HttpSender) -> Arc<Self> {
        Arc::new(Self {
            target,
            model,
            sender,
            ends: Instant::now() + TIME_MAX,
            requests: AtomicUsize::new(0),
        })
    }

    pub(crate) fn requests(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }

    pub(crate) async fn run(self: &Arc<Self>) -> Vec<Finding> {
        let mut seen = Vec::new();
        let event = self.event(None);
        let first = self.post(self.good(&event)).await;
        let mut findings = vec![
            found(Check::ValidEvent, valid(&first)),
            found(Check::Certificate, self.certificate(&first)),
        ];
        if first.outcome.is_success() {
            for (check, shots) in self.plan(&event) {
                let judged = match self.ends.checked_duration_since(Instant::now()) {
                    None => (Verdict::Skipped, "skipped: no time left".to_owned()),
                    Some(_) => {
                        let sent = match check {
                            Check::OutOfOrder | Check::Duplicate => self.one_by_one(shots).await,
                            _ => self.at_once(shots).await,
                        };
                        let judged = judge(check, &sent);
                        seen.extend(sent);
                        judged
                    }
                };
                findings.push(found(check, judged));
            }
        } else {
            let why = "skipped: valid events are rejected";
            for (check, _) in self.plan(&event) {
                findings.push(found(check, (Verdict::Skipped, why.to_owned())));
            }
        }
        seen.push(first);
        findings.push(found(Check::NoRedirect, no_redirect(&seen)));
        findings.sort_by_key(|finding| place(finding.check));
        findings
    }

    /// The requests of each check after the first. `event` was accepted before.
    fn plan(&self, event: &TestEvent) -> Vec<(Check, Vec<Shot>)> {
        let copy = self.event(None);
        // The newer one is sent first.
        let (newer, older) = (self.event(Some(2)), self.older_event());
        vec![
            (Check::ChangedBody, vec![self.changed()]),
            (Check::StaleTimestamp, vec![self.stale()]),
            (Check::WrongSignature, vec![self.signed_with(&[self.stranger()])]),
            (Check::MissingSignature, vec![self.unsigned()]),
            (Check::Rotation, self.rotating()),
            (Check::Duplicate, vec![self.good(event)]),
            (
                Check::ConcurrentDuplicates,
                (0..DUPLICATES).map(|_| self.good(&copy)).collect(),
            ),
            (Check::OutOfOrder, vec![self.good(&newer), self.good(&older)]),
            (
                Check::Speed,
                (0..PARALLEL).map(|_| self.good(&self.event(None))).collect(),
            ),
        ]
    }

    fn event(&self, sequence: Option<i64>) -> TestEvent {
        self.model.event(self.target.now(), sequence)
    }

    fn older_event(&self) -> TestEvent {
        self.model
            .event(self.target.now() - TimeDelta::minutes(1), Some(1))
    }

    fn good(&self, event: &TestEvent) -> Shot {
        self.shot(event, &self.target.secrets, 0)
    }

    fn shot(&self, event: &TestEvent, secrets: &[Secret], ago_seconds: i64) -> Shot {
        let unix_seconds = self.target.now().timestamp() - ago_seconds;
        Shot {
            signature: Some(self.target.sign(&event.id, unix_seconds, &event.body, secrets)),
            event: event.id.clone(),
            unix_seconds,
            body: event.body.clone(),
        }
    }

    fn signed_with(&self, secrets: &[Secret]) -> Shot {
        self.shot(&self.event(None), secrets, 0)
    }

    fn stale(&self) -> Shot {
        self.shot(&self.event(None), &self.target.secrets, STALE_SECONDS)
    }

    fn unsigned(&self) -> Shot {
        Shot {
            signature: None,
            ..self.good(&self.event(None))
        }
    }

    /// Still valid JSON, so that a receiver that parses before it verifies does not reject it for another reason.
    fn changed(&self) -> Shot {
        let shot = self.good(&self.event(None));
        let mut body = shot.body.to_vec();
        body.pop();
        body.extend_from_slice(br#","changed":true}"#);
        Shot {
            body: body.into(),
            ..shot
        }
    }

    /// A well-formed secret that the receiver does not know.
    fn stranger(&self) -> Secret {
        Secret::generate(self.target.format, &rand::random())
    }

    /// The valid signature second, as if we rotated before the receiver, and first, as if the receiver did.
    fn rotating(&self) -> Vec<Shot> {
        let Some(good) = self.target.secrets.first().cloned() else {
            return Vec::new();
        };
        vec![
            self.signed_with(&[self.stranger(), good.clone()]),
            self.signed_with(&[good, self.stranger()]),
        ]
    }

    async fn post(&self, shot: Shot) -> Sent {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let left = self.ends.saturating_duration_since(Instant::now());
        let timeout = self.target.timeout.min(left.max(Duration::from_millis(100)));
        self.target
            .send(
                &self.sender,
                &shot.event,
                shot.unix_seconds,
                shot.signature,
                shot.body,
                timeout,
            )
            .await
    }

    async fn one_by_one(&self, shots: Vec<Shot>) -> Vec<Sent> {
        let mut sent = Vec::new();
        for shot in shots {
            sent.push(self.post(shot).await);
        }
        sent
    }

    async fn at_once(self: &Arc<Self>, shots: Vec<Shot>) -> Vec<Sent> {
        let mut running = JoinSet::new();
        for shot in shots {
            let probe = self.clone();
            running.spawn(async move { probe.post(shot).await });
        }
        running.join_all().await
    }

    fn certificate(&self, first: &Sent) -> Judged {
        if self.target.url.scheme() != "https" {
            return (Verdict::Warning, "the endpoint uses plain http".to_owned());
        }
        if let Outcome::Unreachable {
            kind: OutcomeKind::TlsFailed,
            error,
        } = &first.outcome
        {
            return (Verdict::Fail, error.clone());
        }
        let Some(certificate) = &first.certificate else {
            return (
                Verdict::Skipped,
                "skipped: no connection was established".to_owned(),
            );
        };
        match valid_until(certificate) {
            None => (
                Verdict::Warning,
                "the certificate's expiry date can't be read".to_owned(),
            ),
            Some(end) => {
                let days = (end - self.target.now()).num_days();
                let verdict = if days < CERTIFICATE_DAYS_MIN {
                    Verdict::Fail
                } else {
                    Verdict::Pass
                };
                (
                    verdict,
                    format!(
                        "valid until {} ({})",
                        end.format("%Y-%m-%d"),
                        counted(days, "day", "days")
                    ),
                )
            }
        }
    }
}

fn found(check: Check, (verdict, found): Judged) -> Finding {
    Finding {
        check,
        verdict,
        found,
    }
}

fn judge(check: Check, sent: &[Sent]) -> Judged {
    match check {
        Check::ChangedBody | Check::StaleTimestamp | Check::WrongSignature | Check::MissingSignature => {
            sent.first().map_or((Verdict::Skipped, String::new()), refused)
        }
        Check::Speed => fast(sent),
        _ => accepted(sent),
    }
}

fn valid(sent: &Sent) -> Judged {
    let verdict = match sent.outcome.is_success() {
        false => Verdict::Fail,
        true if sent.duration > FAST => Verdict::Warning,
        true => Verdict::Pass,
    };
    (verdict, summary(sent))
}

/// For a request that must be rejected.
fn refused(sent: &Sent) -> Judged {
    match &sent.outcome {
        Outcome::Accepted { status, .. } => (Verdict::Fail, format!("accepted with {status}")),
        Outcome::Refused {
            status: 400..=499, ..
        } => (Verdict::Pass, summary(sent)),
        Outcome::Refused { .. } => (
            Verdict::Warning,
            format!("{}: respond with 401 instead", summary(sent)),
        ),
        _ => (
            Verdict::Warning,
            format!("{}: a missing response is not a rejection", summary(sent)),
        ),
    }
}

/// For requests that must all be accepted.
fn accepted(sent: &[Sent]) -> Judged {
    match sent.iter().find(|one| !one.outcome.is_success()) {
        Some(bad) => (Verdict::Fail, summary(bad)),
        None => (Verdict::Pass, slowest(sent)),
    }
}

fn fast(sent: &[Sent]) -> Judged {
    match accepted(sent) {
        (Verdict::Pass, found) if sent.iter().any(|one| one.duration > FAST) => (Verdict::Warning, found),
        judged => judged,
    }
}

fn no_redirect(sent: &[Sent]) -> Judged {
    let redirect = sent
        .iter()
        .find(|one| matches!(one.outcome.status(), Some(300..=399)));
    match redirect {
        Some(one) => (Verdict::Fail, summary(one)),
        None if sent.iter().all(|one| one.outcome.status().is_none()) => {
            (Verdict::Skipped, "skipped: no response".to_owned())
        }
        None => {
            let responses = counted(sent.len(), "response", "responses");
            (Verdict::Pass, format!("no redirects in {responses}"))
        }
    }
}

fn summary(sent: &Sent) -> String {
    let ms = sent.duration.as_millis();
    match (sent.outcome.status(), sent.outcome.error()) {
        (Some(status), _) => format!("{status} after {ms} ms"),
        (None, Some(error)) => format!("{error} ({ms} ms)"),
        (None, None) => format!("no response after {ms} ms"),
    }
}

fn slowest(sent: &[Sent]) -> String {
    let most = sent.iter().map(|one| one.duration.as_millis()).max().unwrap_or(0);
    match sent {
        [one] => summary(one),
        _ => format!("{} accepted, slowest {most} ms", sent.len()),
    }
}
