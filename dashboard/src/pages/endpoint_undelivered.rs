//! The banner of an endpoint with undelivered events: since when it fails and with what, when it will be disabled, and what to
//! do. A live part.

use askama::Template;
use postrider_proto::{DeliveryId, EndpointState};

use super::{Frame, Markup, Moment, endpoint::Subject};
use crate::{
    Pool,
    actions::failures::{advice, concerns_signature, verb},
    http::problem::Problem,
    pages::stats_format::grouped,
    tables::failures::{self, Failed, Sample, Undelivered},
};

#[derive(Template)]
#[template(path = "endpoint_undelivered.html")]
pub(super) struct UndeliveredPart {
    endpoint: String,
    failing_since: Option<Moment>,
    /// What happens to requests, as a clause.
    cause: Option<String>,
    advice: Option<&'static str>,
    concerns_signature: bool,
    disabled_after: Option<Moment>,
    count: i64,
    /// There are more than `count`.
    is_cut: bool,
    dead: i64,
    /// The delivery that failed last.
    latest: Option<String>,
    may_replay: bool,
}

impl UndeliveredPart {
    pub(super) async fn render(pool: &Pool, frame: &Frame, subject: &Subject) -> Result<Markup, Problem> {
        let undelivered = failures::count(pool, subject.row.id).await?;
        let sample = match undelivered.count() {
            0 => Sample::default(),
            _ => failures::sample(pool, subject.row.id).await?,
        };
        Markup::of(&Self::of(frame, subject, undelivered, &sample))
    }

    fn of(frame: &Frame, subject: &Subject, undelivered: Undelivered, sample: &Sample) -> Self {
        // The notice of a paused or disabled endpoint says what there is to do.
        let since = (subject.state() == EndpointState::Active)
            .then_some(subject.health.failing_since)
            .flatten();
        let failed = sample.failed.iter().filter(|one| Some(one.at) >= since);
        let failed: Vec<&Failed> = failed.collect();
        let latest = failed.iter().max_by_key(|one| (one.at, one.event));
        Self {
            endpoint: subject.id().to_owned(),
            failing_since: since.map(|since| Moment(Some(since))),
            cause: since.and_then(|_| cause(&failed, sample.is_cut)),
            advice: latest.and_then(|one| advice(one.failure)),
            concerns_signature: latest.is_some_and(|one| concerns_signature(one.failure)),
            disabled_after: since
                .and(subject.health.disabled_after)
                .map(|time| Moment(Some(time))),
            count: undelivered.count(),
            is_cut: undelivered.is_cut(),
            dead: undelivered.dead,
            latest: latest.map(|one| {
                let (event, endpoint) = (one.event, subject.row.id);
                DeliveryId { event, endpoint }.to_string()
            }),
            may_replay: frame.may_operate()
                && matches!(subject.state(), EndpointState::Active | EndpointState::Paused),
        }
    }

    /// `3`, `5,000+`.
    fn number(&self) -> String {
        let more = if self.is_cut { "+" } else { "" };
        format!("{}{more}", grouped(self.count))
    }

    fn events(&self) -> String {
        let noun = if self.count == 1 { "event" } else { "events" };
        format!("{} {noun}", self.number())
    }
}

/// `every request gets 401 Unauthorized`, if that is known of all of them.
fn cause(failed: &[&Failed], is_cut: bool) -> Option<String> {
    let latest = failed.iter().max_by_key(|one| one.at)?;
    let (every, all, what) = verb(latest.failure);
    let is_same = failed.iter().all(|one| one.failure == latest.failure);
    Some(match (is_same, is_cut) {
        (true, false) => format!("every request {every}{what}"),
        (true, true) => format!("the latest requests {all}{what}"),
        (false, _) => format!("requests fail in several ways, the latest one {every}{what}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::DateTime;
    use postrider_proto::EventId;

    fn failed(second: i64, failure: &str) -> Failed {
        Failed {
            event: EventId::LOWEST,
            at: DateTime::from_timestamp(second, 0).expect("a time"),
            failure: failure.parse().expect("a failure"),
        }
    }

    #[test]
    fn every_request_is_said_only_of_all_of_them() {
        let (one, same, other) = (failed(2, "401"), failed(1, "401"), failed(3, "timed_out"));
        assert_eq!(cause(&[], false), None);
        let all = [&one, &same];
        assert_eq!(
            cause(&all, false).as_deref(),
            Some("every request gets 401 Unauthorized")
        );
        assert_eq!(
            cause(&all, true).as_deref(),
            Some("the latest requests get 401 Unauthorized")
        );
        assert_eq!(
            cause(&[&one, &other, &same], false).as_deref(),
            Some("requests fail in several ways, the latest one times out")
        );
    }
}
