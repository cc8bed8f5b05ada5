//! The overview of an endpoint: health, statistics and latest deliveries, with actions to pause, test and probe it.

use std::time::Duration;

use askama::Template;
use askama_web::WebTemplate;
use axum::{Extension, extract::Path, response::Redirect};
use chrono::{DateTime, TimeDelta, Utc};
use postrider_proto::{EndpointState, api::EndpointSettings};
use serde::Deserialize;

use super::{DeliverySummary, Done, Frame, Markup, Paged, endpoint_trials::Tried};
use crate::{
    Pool, Shared,
    actions::{
        self,
        attempt_view::Shown,
        trials::{self, Asked, Recorded},
    },
    auth::{Confirmed, Session, Submitted, Tenant, Visit},
    http::{input::Query, problem::Problem},
    pages::{
        chart::{self, Histogram, Svg},
        live::{Content, Live, Stream},
        stats_format::{Series, Totals, class_label, format_duration, format_ms, format_percent, grouped},
    },
    tables::{
        self,
        activity::{self, ActivityRow},
        deliveries::{self, Filter},
        endpoints::{self, EndpointRow, OutdatedPin},
        rotations::{self, Of},
        statistics, tenants,
    },
};

const REFRESH: Duration = Duration::from_secs(2);
const LINES: i64 = 8;
/// 15 minutes each.
const STEPS: usize = 96;

const DONE: [(&str, &str); 5] = [
    ("paused", "Endpoint paused. New events are queued."),
    ("resumed", "Endpoint resumed. Queued events are being sent."),
    ("saved", "Saved."),
    (
        "created",
        "Endpoint added. Reveal its secret and share it with whoever runs the receiver.",
    ),
    (
        "rotated",
        "Secret rotated. Requests are signed with both secrets until the old one expires.",
    ),
];

/// An endpoint and its tenant, as shown at the top of each of its pages.
pub(super) struct Subject {
    pub(super) row: EndpointRow,
    pub(super) tenant: Tenant,
}

impl Subject {
    pub(super) async fn find(visit: &Visit, id: &str) -> Result<Self, Problem> {
        let missing = || Problem::not_found("endpoint");
        let row = endpoints::find_in(&visit.app.pool, visit.session.scope(), id)
            .await?
            .ok_or_else(missing)?;
        let slug = tenants::slug(&visit.app.pool, row.tenant_id)
            .await?
            .ok_or_else(missing)?;
        let tenant = Tenant {
            id: row.tenant_id,
            slug,
        };
        Ok(Self { row, tenant })
    }

    pub(super) fn id(&self) -> &str {
        &self.row.public_id
    }

    pub(super) fn url(&self) -> &str {
        &self.row.settings.url
    }

    pub(super) fn state(&self) -> EndpointState {
        self.row.settings.state
    }

    /// Why the endpoint is paused or disabled, and what to do about it.
    pub(super) fn notice(&self) -> Option<&'static str> {
        match (self.state(), self.row.settings.state_reason.as_deref()) {
            (EndpointState::Disabled, Some("gone")) => Some(
                "Disabled because it responded with 410 Gone. New events are not queued for it. Enable it once the \
                 receiver is back; missed events can then be replayed.",
            ),
            (EndpointState::Disabled, _) => Some(
                "Disabled after five days without a successful delivery. New events are not queued for it. Fix the \
                 receiver, send a test event, then enable the endpoint; missed events can be replayed.",
            ),
            (EndpointState::Paused, _) => Some("Paused. New events are queued and sent when it is resumed."),
            (EndpointState::Active | EndpointState::Deleted, _) => None,
        }
    }
}

pub(super) fn framed(session: &Session, done: &str) -> Frame {
    Frame::new(session.clone(), "endpoints").with_done(done, &DONE)
}

#[derive(Template, WebTemplate)]
#[template(path = "endpoint.html")]
pub(crate) struct EndpointPage {
    frame: Frame,
    tab: &'static str,
    subject: Subject,
    now: Markup,
    pins: Vec<OutdatedPin>,
    refusals: i64,
    tried: Tried,
    lines: Vec<DeliverySummary>,
}

/// The part that is updated live.
#[derive(Template)]
#[template(path = "endpoint_now.html")]
struct Now {
    total: Totals,
    health: Svg,
    histogram: Option<Histogram>,
    activity: Option<ActivityRow>,
    concurrency: usize,
    in_flight_bar: Svg,
    oldest: Option<String>,
    state: EndpointState,
}

impl Now {
    fn success(&self) -> String {
        self.total
            .success_percent()
            .map_or("–".to_owned(), format_percent)
    }

    fn percentile(&self, share: f64) -> String {
        self.total.percentile_ms(share).map_or("–".to_owned(), format_ms)
    }

    fn failures(&self) -> Vec<(&'static str, String, Svg)> {
        let failures = self.total.failures();
        let highest = failures.first().map_or(1, |(_, count)| *count) as f64;
        failures
            .into_iter()
            .map(|(class, count)| {
                let bar = chart::share("bad", count as f64, highest, class_label(class));
                (class_label(class), grouped(count), bar)
            })
            .collect()
    }

    /// Queued deliveries as reported by dispatchers. Without a report, the number for a paused endpoint is unknown.
    fn queued(&self) -> String {
        let is_paused = self.state == EndpointState::Paused;
        match &self.activity {
            Some(activity) => {
                let more = if activity.more_waiting { "+" } else { "" };
                let count = format!("{}{more}", grouped(activity.waiting));
                if is_paused {
                    format!("on hold ({count})")
                } else {
                    count
                }
            }
            None if is_paused => "on hold".to_owned(),
            None => "0".to_owned(),
        }
    }

    /// The CSS class, the state and its explanation.
    fn circuit(&self) -> (&'static str, &'static str, &'static str) {
        match &self.activity {
            Some(activity) if activity.circuit_open => (
                "open",
                "open",
                "Opened after 10 consecutive failures. One attempt at a time is let through until one succeeds.",
            ),
            _ => ("closed", "closed", "Attempts are sent as usual."),
        }
    }
}

async fn load(app: &Shared, row: &EndpointRow) -> Result<Now, Problem> {
    let pool: &Pool = &app.pool;
    let now: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()")
        .fetch_one(pool)
        .await?;
    let mut series = Series::until(now, TimeDelta::minutes(15), STEPS);
    for count in statistics::minutes(pool, &[row.id], series.begin).await? {
        series.add(&count);
    }
    let activity = activity::of_endpoints(pool, &[row.id]).await?.pop();
    let concurrency = row
        .settings
        .concurrency
        .map_or(usize::from(app.defaults.concurrency), |n| n.max(1) as usize);
    let in_flight = activity.as_ref().map_or(0, |activity| activity.in_flight);
    let total = series.total();
    Ok(Now {
        health: chart::health(&series),
        histogram: chart::histogram(&total),
        in_flight_bar: chart::share(
            "accent",
            f64::from(in_flight),
            concurrency as f64,
            "Concurrent requests in use",
        ),
        oldest: activity
            .as_ref()
            .and_then(|activity| activity.oldest_at)
            .map(|at| format_duration(now - at)),
        state: row.settings.state,
        total,
        activity,
        concurrency,
    })
}

async fn page(visit: &Visit, subject: Subject, done: &str, tried: Tried) -> Result<EndpointPage, Problem> {
    let filter = Filter {
        tenant: Some(subject.tenant.id),
        endpoint: Some(subject.row.id),
        ..Filter::default()
    };
    let pool = &visit.app.pool;
    let (found, _) = deliveries::list(pool, &filter, None, LINES).await?;
    let rotation = rotations::list(pool, Of::Endpoint(subject.row.id), 0, 1)
        .await?
        .pop();
    Ok(EndpointPage {
        frame: framed(&visit.session, done),
        tab: "overview",
        now: Markup::of(&load(&visit.app, &subject.row).await?)?,
        pins: endpoints::outdated_pins(pool, &[subject.row.id]).await?,
        refusals: rotation.map_or(0, |row| row.refusals_since),
        lines: found.iter().map(DeliverySummary::from).collect(),
        tried,
        subject,
    })
}

pub(crate) async fn show(
    visit: Visit,
    Path(id): Path<String>,
    Query(query): Query<Done>,
) -> Paged<EndpointPage> {
    let subject = Subject::find(&visit, &id).await?;
    Ok(page(&visit, subject, &query.done, Tried::default()).await?)
}

pub(crate) async fn follow(
    visit: Visit,
    Extension(live): Extension<Live>,
    Path(id): Path<String>,
) -> Result<Stream, Problem> {
    Subject::find(&visit, &id).await?;
    live.stream(
        &visit.app.pool.clone(),
        visit.session.clone(),
        REFRESH,
        move || {
            let (visit, id) = (visit.clone(), id.clone());
            async move {
                let subject = Subject::find(&visit, &id).await?;
                Ok(Content::Html(
                    Markup::of(&load(&visit.app, &subject.row).await?)?.0,
                ))
            }
        },
    )
}

pub(crate) async fn pause(visit: Visit, Path(id): Path<String>, _: Confirmed) -> Paged<Redirect> {
    enable(&visit, &id, false).await?;
    Ok(Redirect::to(&format!("/endpoints/{id}?done=paused")))
}

pub(crate) async fn resume(visit: Visit, Path(id): Path<String>, _: Confirmed) -> Paged<Redirect> {
    enable(&visit, &id, true).await?;
    Ok(Redirect::to(&format!("/endpoints/{id}?done=resumed")))
}

async fn enable(visit: &Visit, id: &str, enabled: bool) -> Result<(), Problem> {
    let subject = Subject::find(visit, id).await?;
    let change = EndpointSettings {
        enabled: Some(Some(enabled)),
        ..EndpointSettings::default()
    };
    actions::endpoints::change(&visit.app, &visit.actor, &subject.tenant, id, change).await?;
    Ok(())
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct TrialFields {
    r#type: String,
}

impl TrialFields {
    fn event_type(&self) -> Option<&str> {
        Some(self.r#type.trim()).filter(|name| !name.is_empty())
    }
}

/// Sends a test event and renders the page with its result.
pub(crate) async fn test(
    visit: Visit,
    Path(id): Path<String>,
    Submitted(form): Submitted<TrialFields>,
) -> Paged<EndpointPage> {
    let subject = Subject::find(&visit, &id).await?;
    let asked = asked(&visit, &subject);
    let test = trials::test(&visit.app, &asked, form.event_type()).await?;
    record(&visit.app, &asked, &test).await?;
    let tried = Tried {
        test: Some(test),
        ..Tried::default()
    };
    Ok(page(&visit, subject, "", tried).await?)
}

/// Runs the probe and renders the page with its findings.
pub(crate) async fn probe(
    visit: Visit,
    Path(id): Path<String>,
    Submitted(form): Submitted<TrialFields>,
) -> Paged<EndpointPage> {
    let subject = Subject::find(&visit, &id).await?;
    let asked = asked(&visit, &subject);
    let report = trials::probe(&visit.app, &asked, form.event_type()).await?;
    record(&visit.app, &asked, &report).await?;
    let tried = Tried {
        probe: Some(report),
        ..Tried::default()
    };
    Ok(page(&visit, subject, "", tried).await?)
}

fn asked(visit: &Visit, subject: &Subject) -> Asked {
    Asked {
        actor: visit.actor.clone(),
        tenant: subject.tenant.clone(),
        endpoint: subject.id().to_owned(),
    }
}

async fn record(app: &Shared, asked: &Asked, result: &impl Recorded) -> Result<(), Problem> {
    let mut transaction = tables::begin(&app.pool).await?;
    trials::record(&mut transaction, asked, result).await?;
    Ok(transaction.commit().await?)
}
