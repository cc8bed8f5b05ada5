//! The overview of an endpoint: health, statistics and latest deliveries. `endpoint_actions.rs` has what can be done there.

use std::{sync::Arc, time::Duration};

use askama::Template;
use askama_web::WebTemplate;
use axum::{Extension, extract::Path};
use chrono::{DateTime, TimeDelta, Utc};
use postrider_proto::EndpointState;

use super::{
    DeliverySummary, Done, Frame, Markup, Paged,
    delivery_list::{NewBar, ShownRows, ShownRowsQuery},
    endpoint_glance::Glance,
    endpoint_trials::{TRIED, TrialForms, Tried},
    endpoint_undelivered::UndeliveredPart,
    shortened_url,
};
use crate::{
    Pool, Shared,
    actions::{attempt_view::Shown, delivery_filter::failure_word, form_results},
    auth::{Session, Tenant, Visit},
    http::{input::Query, problem::Problem},
    pages::{
        chart::{self, Histogram, Svg},
        live::{Content, Live, Stream},
        stats_format::{
            Series, Totals, backlog, class_label, format_duration, format_ms, format_pending, format_percent,
            grouped,
        },
    },
    tables::{
        activity::{self, ActivityRow, HealthRow},
        deliveries::{self, Filter},
        endpoints::{self, EndpointRow, OutdatedPin},
        holds::{self, Hold, Switches},
        pending::{self, Pending},
        rotations::{self, Of},
        statistics::{self, CountRow},
    },
};

const REFRESH: Duration = Duration::from_secs(2);
const LINES: i64 = 8;
/// 15 minutes each.
const STEPS: usize = 96;

const DONE: [(&str, &str); 11] = [
    ("paused", "Endpoint paused. New events are queued."),
    ("resumed", "Endpoint resumed. Queued events are being sent."),
    (
        "already-paused",
        "Nothing changed: the endpoint was already paused.",
    ),
    (
        "already-disabled",
        "Nothing changed: the endpoint is disabled. Nothing is sent to it.",
    ),
    (
        "already-active",
        "Nothing changed: the endpoint was already active.",
    ),
    ("saved", "Saved."),
    ("alert-saved", "Alert saved."),
    ("alert-removed", "Alert removed."),
    (
        "created",
        "Endpoint added. Reveal its secret and share it with whoever runs the receiver.",
    ),
    (
        "rotated",
        "Secret rotated. Requests are signed with both secrets until the old one expires.",
    ),
    (
        "revoked",
        "Secret rotated and old secrets revoked. Requests are signed with the new secret only.",
    ),
];

/// An endpoint and its tenant, as shown at the top of each of its pages.
pub(super) struct Subject {
    pub(super) row: EndpointRow,
    pub(super) tenant: Tenant,
    /// What keeps an endpoint from being sent to that was not paused itself.
    hold: Option<Hold>,
    is_team: bool,
    pub(super) health: HealthRow,
    pub(super) trial: TrialForms,
}

impl Subject {
    pub(super) async fn find(visit: &Visit, id: &str) -> Result<Self, Problem> {
        let missing = || Problem::not_found("endpoint");
        let row = endpoints::find_in(&visit.app.pool, visit.session.scope(), id)
            .await?
            .ok_or_else(missing)?;
        let switches = holds::of_tenant(&visit.app.pool, row.tenant_id)
            .await?
            .ok_or_else(missing)?;
        let hold = Switches {
            endpoint_state: row.settings.state,
            tenant_paused: switches.tenant_paused,
            sending_stopped: switches.sending_stopped,
        };
        let tenant = Tenant {
            id: row.tenant_id,
            slug: switches.slug,
        };
        let health = activity::health(&visit.app.pool, row.id).await?;
        Ok(Self {
            row,
            tenant,
            hold: hold.hold(),
            is_team: visit.session.tenant.is_none(),
            health,
            trial: TrialForms::default(),
        })
    }

    pub(super) fn id(&self) -> &str {
        &self.row.public_id
    }

    pub(super) fn url(&self) -> &str {
        &self.row.settings.url
    }

    /// The URL for headings.
    pub(super) fn heading(&self) -> String {
        shortened_url(self.url())
    }

    pub(super) fn state(&self) -> EndpointState {
        self.row.settings.state
    }

    pub(super) fn badge(&self) -> (&'static str, &'static str) {
        badge(
            self.state(),
            self.hold.and_then(|hold| hold.badge(self.is_team)),
            self.health.circuit_open,
            self.health.failing_since.is_some(),
        )
    }

    fn deliveries(&self) -> Filter {
        Filter {
            tenant: Some(self.tenant.id),
            endpoint: Some(self.row.id),
            ..Filter::default()
        }
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
            // Customers, and everyone if all sending is stopped, read so at the top of the page.
            (EndpointState::Active, _) if self.is_team && self.hold == Some(Hold::TenantPaused) => {
                Some("The tenant is paused. New events are queued and sent when it is resumed.")
            }
            (EndpointState::Active | EndpointState::Deleted, _) => None,
        }
    }
}

/// The CSS class and the word for an endpoint's state: an active endpoint whose requests fail, or that is sent nothing, is
/// not shown as active.
pub(super) fn badge(
    state: EndpointState,
    held: Option<&'static str>,
    circuit_open: bool,
    is_failing: bool,
) -> (&'static str, &'static str) {
    if let Some(word) = held {
        return ("paused", word);
    }
    match state {
        EndpointState::Active if circuit_open => ("open", "circuit open"),
        EndpointState::Active if is_failing => ("late", "failing"),
        state => (state.as_str(), state.as_str()),
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
    new: Markup,
    latest: Markup,
    undelivered: Markup,
    glance: Glance,
    /// It has had no delivery.
    is_unused: bool,
    /// The address of the stream.
    live: String,
}

/// The latest deliveries, a live part.
#[derive(Template)]
#[template(path = "endpoint_latest.html")]
struct Latest {
    lines: Vec<DeliverySummary>,
}

/// The live parts of `endpoint_head.html`.
#[derive(Template)]
#[template(path = "endpoint_head_parts.html")]
struct HeadParts<'a> {
    frame: &'a Frame,
    subject: &'a Subject,
}

/// The statistics, a live part.
#[derive(Template)]
#[template(path = "endpoint_now.html")]
struct Now {
    total: Totals,
    health: Svg,
    histogram: Option<Histogram>,
    activity: Option<ActivityRow>,
    concurrency: usize,
    in_flight_bar: Svg,
    endpoint: String,
    pending: Pending,
    oldest: Option<String>,
    state: EndpointState,
    hold: Option<Hold>,
    /// When the period began, for addresses.
    since: String,
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

    /// Each with the word that the list of deliveries filters by.
    fn failures(&self) -> Vec<(&'static str, &'static str, String, Svg)> {
        let failures = self.total.failures();
        let highest = failures.first().map_or(1, |(_, count)| *count) as f64;
        failures
            .into_iter()
            .map(|(class, count)| {
                let bar = chart::share("bad", count as f64, highest, class_label(class));
                (failure_word(class), class_label(class), grouped(count), bar)
            })
            .collect()
    }

    fn pending_count(&self) -> String {
        format_pending(self.pending)
    }

    /// The label of the number of pending deliveries, and the hint below it.
    fn pending_words(&self) -> (&'static str, String) {
        match self.state {
            EndpointState::Active if self.hold.is_some() => {
                ("On hold", "sent when sending is resumed".to_owned())
            }
            EndpointState::Active => ("Pending", backlog(self.oldest.as_deref(), self.pending)),
            EndpointState::Paused => ("On hold", "sent when the endpoint is resumed".to_owned()),
            EndpointState::Disabled | EndpointState::Deleted => {
                ("On hold", "not sent while the endpoint is disabled".to_owned())
            }
        }
    }

    /// The CSS class, the state and its explanation.
    fn circuit(&self) -> (&'static str, &'static str, &'static str) {
        match &self.activity {
            _ if self.state == EndpointState::Paused => (
                "paused",
                "paused",
                "Nothing is sent while the endpoint is paused.",
            ),
            _ if self.state != EndpointState::Active => (
                "disabled",
                "disabled",
                "Nothing is sent while the endpoint is disabled.",
            ),
            _ if self.hold.is_some() => ("paused", "paused", "Nothing is sent until sending is resumed."),
            Some(activity) if activity.circuit_open => (
                "open",
                "open",
                "Opened after 10 consecutive failures. One attempt at a time is let through until one succeeds.",
            ),
            _ => ("closed", "closed", "Attempts are sent as usual."),
        }
    }
}

async fn load(app: &Shared, subject: &Subject) -> Result<Now, Problem> {
    let row = &subject.row;
    let pool: &Pool = &app.pool;
    let now: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()")
        .fetch_one(pool)
        .await?;
    let mut series = Series::until(now, TimeDelta::minutes(15), STEPS);
    for count in statistics::steps(pool, row.id, series.begin, series.step).await? {
        series.add(&CountRow::from(count));
    }
    let mut total = Totals::default();
    for count in statistics::hours(pool, &[row.id], series.begin).await? {
        total.add(&count);
    }
    let activity = activity::of_endpoints(pool, &[row.id]).await?.pop();
    let concurrency = row
        .settings
        .concurrency
        .map_or(usize::from(app.defaults.concurrency), |n| n.max(1) as usize);
    let in_flight = activity.as_ref().map_or(0, |activity| activity.in_flight);
    Ok(Now {
        health: chart::health(&series, &format!("endpoint={}&amp;", row.public_id)),
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
        endpoint: row.public_id.clone(),
        pending: pending::of_endpoints(pool, &[row.id]).await?,
        state: row.settings.state,
        hold: subject.hold,
        since: chart::address_time(series.begin),
        total,
        activity,
        concurrency,
    })
}

pub(super) async fn page(
    visit: &Visit,
    subject: Subject,
    done: &str,
    tried: Tried,
) -> Result<EndpointPage, Problem> {
    let pool = &visit.app.pool;
    let (found, next) = deliveries::list(pool, &subject.deliveries(), None, LINES).await?;
    let shown = ShownRows::of(&found, next).pairs();
    let shown = url::form_urlencoded::Serializer::new(String::new())
        .extend_pairs(shown)
        .finish();
    let lines = found.iter().map(DeliverySummary::from).collect();
    let rotation = rotations::list(pool, Of::Endpoint(subject.row.id), 0, 1)
        .await?
        .pop();
    let frame = framed(&visit.session, done);
    Ok(EndpointPage {
        undelivered: UndeliveredPart::render(pool, &frame, &subject).await?,
        glance: Glance::of(&subject.row.settings, &visit.app.defaults),
        frame,
        tab: "overview",
        now: Markup::of(&load(&visit.app, &subject).await?)?,
        pins: endpoints::outdated_pins(pool, &[subject.row.id]).await?,
        refusals: rotation.map_or(0, |row| row.refusals_since),
        new: NewBar::of(0, "")?,
        latest: Markup::of(&Latest { lines })?,
        is_unused: found.is_empty(),
        live: format!("/live/endpoints/{}?{shown}", subject.id()),
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
    let tried: Option<Tried> = form_results::take(&visit.app, &visit.session, TRIED, &query.result).await?;
    Ok(page(&visit, subject, &query.done, tried.unwrap_or_default()).await?)
}

pub(crate) async fn follow(
    visit: Visit,
    Extension(live): Extension<Live>,
    Path(id): Path<String>,
    Query(query): Query<ShownRowsQuery>,
) -> Result<Stream, Problem> {
    Subject::find(&visit, &id).await?;
    let shown = Arc::new(ShownRows::read(&query)?);
    let pool = visit.app.home.clone();
    live.stream(&pool, visit.session.clone(), REFRESH, move || {
        let (visit, id, shown) = (visit.clone(), id.clone(), shown.clone());
        async move { Ok(Content::Html(parts(&visit, &id, &shown).await?)) }
    })
}

async fn parts(visit: &Visit, id: &str, shown: &ShownRows) -> Result<String, Problem> {
    let pool = &visit.app.pool;
    let subject = &Subject::find(visit, id).await?;
    let frame = &framed(&visit.session, "");
    let count = shown.count_new(pool, &subject.deliveries()).await?;
    let lines = shown.load(pool, Some(subject.tenant.id)).await?;
    let parts = [
        Markup::of(&HeadParts { frame, subject })?,
        UndeliveredPart::render(pool, frame, subject).await?,
        Markup::of(&load(&visit.app, subject).await?)?,
        NewBar::of(count, &format!("/endpoints/{id}"))?,
        Markup::of(&Latest { lines })?,
    ];
    Ok(parts.map(|part| part.0).concat())
}
