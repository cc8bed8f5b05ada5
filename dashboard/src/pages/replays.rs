//! The pages for bulk replays: the list with progress and time left, the page of a replay, and the actions that cancel,
//! resume and change one. `replay_preview.rs` starts them.

use std::time::Duration;

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    Extension,
    extract::Path,
    response::{IntoResponse, Redirect, Response},
};
use chrono::TimeDelta;
use postrider_dispatcher::replays::{self, Replay};
use postrider_proto::{ReplayKind, ReplayState, TenantId, limits::REPLAY_RATE_MAX};
use serde::Deserialize;

use super::{
    Done, FormErrors, Frame, Markup, Moment, Paged, dead_letters::cause_label, replay_preview::read_rate,
};
use crate::{
    App,
    actions::replays::{change_rate, find, stop},
    auth::{Confirmed, Submitted, Visit},
    http::{
        cells::{Positions, ask_from, interleave},
        input::Query,
        pagination,
        problem::Problem,
    },
    pages::{
        live::{Content, Live, Stream},
        stats_format::{format_duration, format_rate},
    },
    tables::{self, attempts},
};

const LINES: i64 = 25;
const REFRESH: Duration = Duration::from_secs(1);
const DONE: [(&str, &str); 5] = [
    ("started", "Replay started."),
    ("cancelled", "Replay cancelled."),
    ("resumed", "Replay resumed."),
    ("changed", "Rate changed."),
    (
        "finished",
        "Nothing was cancelled: the replay had already finished.",
    ),
];

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct ReplaysQuery {
    cursor: Option<String>,
    endpoint: String,
}

struct Shown {
    replay: Replay,
    created: Moment,
    ended: Moment,
    since: Moment,
    until: Moment,
    /// Counted one by one, if there are not too many.
    counted: Option<i64>,
}

impl From<Replay> for Shown {
    fn from(replay: Replay) -> Self {
        Self {
            created: Moment(Some(replay.created_at)),
            ended: Moment(replay.ended_at),
            since: Moment(replay.since),
            until: Moment(replay.until),
            counted: None,
            replay,
        }
    }
}

impl Shown {
    fn is_running(&self) -> bool {
        self.replay.state == ReplayState::Running
    }

    /// Cancelled, with deliveries that were not sent.
    fn can_resume(&self) -> bool {
        self.replay.state == ReplayState::Cancelled && self.replay.cancelled() > 0
    }

    /// Whether its numbers are final. After a cancellation, attempts in flight still end.
    fn is_settled(&self) -> bool {
        !self.is_running() && self.replay.queued() == 0
    }

    /// What is replayed.
    fn selection(&self) -> &'static str {
        match (self.replay.kind, self.replay.delivery_state.as_deref()) {
            (ReplayKind::Missing, _) => "Missed events",
            (ReplayKind::Deliveries, Some("dead")) => "Dead letters",
            (ReplayKind::Deliveries, Some("delivered")) => "Delivered events",
            (ReplayKind::Deliveries, Some(_)) => "Pending deliveries",
            (ReplayKind::Deliveries, None) => "Undelivered events",
        }
    }

    /// `Replay of dead letters: order.created`.
    fn title(&self) -> String {
        let title = format!("Replay of {}", self.selection().to_lowercase());
        match &self.replay.event_type {
            Some(name) => format!("{title}: {name}"),
            None => title,
        }
    }

    fn reason(&self) -> Option<String> {
        let Replay { reason, failure, .. } = self.replay;
        (reason.is_some() || failure.is_some()).then(|| cause_label(reason, failure))
    }

    fn time_left(&self) -> String {
        match self.replay.seconds_left() {
            None => "estimating…".to_owned(),
            Some(seconds) => format_duration(TimeDelta::seconds(seconds)),
        }
    }

    fn rate(&self) -> String {
        self.replay.rate().map_or_else(
            || "measuring…".to_owned(),
            |rate| format!("{} per second", format_rate(f64::from(rate))),
        )
    }

    fn percent(&self) -> i64 {
        match self.replay.total {
            0 => 100,
            total => self.replay.done() * 100 / total,
        }
    }

    /// A replay with what it has delivered.
    async fn load(app: &App, scope: Option<TenantId>, id: &str) -> Result<Self, Problem> {
        let replay = find(app, scope, id).await?;
        let counted = attempts::delivered_by_replay(&app.pool, &replay.public_id).await?;
        Ok(Self {
            counted,
            ..Self::from(replay)
        })
    }

    /// Sent, and neither retrying nor a dead letter of this replay: delivered, or a dead letter that is none any more.
    fn settled(&self) -> i64 {
        let replay = &self.replay;
        (replay.done() - replay.skipped - replay.retrying - replay.dead).max(0)
    }

    fn delivered(&self) -> i64 {
        self.counted.unwrap_or_else(|| self.settled())
    }

    /// Failed again, and since then discarded, replayed or expired.
    fn resolved(&self) -> i64 {
        self.counted
            .map_or(0, |delivered| (self.settled() - delivered).max(0))
    }
}

#[derive(Template, WebTemplate)]
#[template(path = "replays.html")]
struct ReplaysPage {
    frame: Frame,
    recover: RecoverForm,
    errors: FormErrors,
    replays: Vec<Shown>,
    next: Option<String>,
}

/// The form that recovers an endpoint, as given in the address.
#[derive(Default)]
struct RecoverForm {
    endpoint: String,
    kind: String,
    since: String,
    until: String,
}

impl RecoverForm {
    fn read(query: &str) -> Self {
        let mut form = Self::default();
        for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
            match name.as_ref() {
                "endpoint" => form.endpoint = value.into_owned(),
                "kind" => form.kind = value.into_owned(),
                "since" => form.since = value.into_owned(),
                "until" => form.until = value.into_owned(),
                _ => {}
            }
        }
        form
    }
}

impl ReplaysPage {
    /// The choices of what to send.
    fn kinds(&self) -> [(&'static str, &'static str); 3] {
        [
            ("failed", "All undelivered events"),
            ("missing", "Missed events (before it existed or while disabled)"),
            ("delivered", "Delivered events"),
        ]
    }
}

pub(crate) async fn list(visit: Visit, Query(query): Query<ReplaysQuery>) -> Paged<Response> {
    Ok(load_list(visit, query).await?.into_response())
}

/// The list with the form that recovers an endpoint, which was rejected.
pub(super) async fn rejected(visit: Visit, query: &str, problem: Problem) -> Paged<Response> {
    let page = ReplaysPage {
        errors: FormErrors::of(problem)?,
        recover: RecoverForm::read(query),
        ..load_list(visit, ReplaysQuery::default()).await?
    };
    Ok((page.errors.status(), page).into_response())
}

async fn load_list(visit: Visit, query: ReplaysQuery) -> Result<ReplaysPage, Problem> {
    let before: Positions = pagination::after(query.cursor.as_deref())?.unwrap_or_default();
    let scope = visit.session.scope();
    let answers = ask_from(&visit.app, &before, move |app, before| async move {
        Ok(replays::list(&app.pool, scope, before.unwrap_or(i64::MAX), LINES + 1).await?)
    })
    .await?;
    let frame = Frame::new(visit.session, "replays").without(&answers.silent);
    let (rows, next) = interleave(
        answers.found,
        &before,
        LINES,
        |one| one.created_at,
        |one| one.id.0,
    );
    Ok(ReplaysPage {
        frame,
        recover: RecoverForm {
            endpoint: query.endpoint,
            ..RecoverForm::default()
        },
        errors: FormErrors::default(),
        replays: rows.into_iter().map(Shown::from).collect(),
        next: next.map(|next| pagination::encode(&next)),
    })
}

#[derive(Template, WebTemplate)]
#[template(path = "replay.html")]
pub(crate) struct ReplayPage {
    frame: Frame,
    shown: Shown,
    actions: Markup,
    now: Markup,
    /// The rate in the form.
    rate: String,
    rate_max: i32,
    errors: FormErrors,
}

/// The buttons, a live part.
#[derive(Template)]
#[template(path = "replay_actions.html")]
struct Actions<'a> {
    frame: &'a Frame,
    shown: &'a Shown,
}

/// The progress, a live part.
#[derive(Template)]
#[template(path = "replay_now.html")]
struct Now<'a> {
    shown: &'a Shown,
}

pub(crate) async fn show(
    visit: Visit,
    Path(id): Path<String>,
    Query(query): Query<Done>,
) -> Paged<ReplayPage> {
    Ok(page(&visit, &id, &query.done).await?)
}

async fn page(visit: &Visit, id: &str, done: &str) -> Result<ReplayPage, Problem> {
    let shown = Shown::load(&visit.app, visit.session.scope(), id).await?;
    let frame = Frame::new(visit.session.clone(), "replays").with_done(done, &DONE);
    Ok(ReplayPage {
        rate: shown.replay.rate_per_second.to_string(),
        rate_max: REPLAY_RATE_MAX,
        errors: FormErrors::default(),
        actions: Markup::of(&Actions {
            frame: &frame,
            shown: &shown,
        })?,
        frame,
        now: Markup::of(&Now { shown: &shown })?,
        shown,
    })
}

pub(crate) async fn follow(
    visit: Visit,
    Extension(live): Extension<Live>,
    Path(id): Path<String>,
) -> Result<Stream, Problem> {
    let scope = visit.session.scope();
    find(&visit.app, scope, &id).await?;
    let frame = Frame::new(visit.session.clone(), "replays");
    live.stream(&visit.app.home.clone(), visit.session, REFRESH, move || {
        let (app, id, frame) = (visit.app.clone(), id.clone(), frame.clone());
        async move {
            let shown = &Shown::load(&app, scope, &id).await?;
            let frame = &frame;
            let html = Markup::of(&Actions { frame, shown })?.0 + &Markup::of(&Now { shown })?.0;
            Ok(match shown.is_settled() {
                true => Content::Settled(html),
                false => Content::Html(html),
            })
        }
    })
}

pub(crate) async fn cancel(visit: Visit, Path(id): Path<String>, _: Confirmed) -> Paged<Redirect> {
    let replay = stop(&visit.app, &visit.actor, visit.session.scope(), &id).await?;
    let done = match replay.state {
        ReplayState::Done => "finished",
        ReplayState::Cancelled | ReplayState::Running => "cancelled",
    };
    Ok(Redirect::to(&format!(
        "/replays/{}?done={done}",
        replay.public_id
    )))
}

/// Goes on with what was not sent.
pub(crate) async fn resume(visit: Visit, Path(id): Path<String>, _: Confirmed) -> Paged<Redirect> {
    let mut transaction = tables::begin(&visit.app.pool).await?;
    let scope = visit.session.scope();
    let replay = crate::actions::replays::resume(&mut transaction, &visit.actor, scope, &id).await?;
    transaction.commit().await?;
    visit.app.wake.now();
    Ok(Redirect::to(&format!(
        "/replays/{}?done=resumed",
        replay.public_id
    )))
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct RateForm {
    rate_per_second: String,
}

pub(crate) async fn set_rate(
    visit: Visit,
    Path(id): Path<String>,
    Submitted(form): Submitted<RateForm>,
) -> Paged<Response> {
    match try_set_rate(&visit, &id, &form).await {
        Ok(()) => Ok(Redirect::to(&format!("/replays/{id}?done=changed")).into_response()),
        Err(problem) => {
            let page = ReplayPage {
                errors: FormErrors::of(problem)?,
                rate: form.rate_per_second,
                ..page(&visit, &id, "").await?
            };
            Ok((page.errors.status(), page).into_response())
        }
    }
}

async fn try_set_rate(visit: &Visit, id: &str, form: &RateForm) -> Result<(), Problem> {
    let rate = read_rate(form.rate_per_second.trim())?;
    let mut transaction = tables::begin(&visit.app.pool).await?;
    let scope = visit.session.scope();
    change_rate(&mut transaction, &visit.actor, scope, id, Some(rate)).await?;
    Ok(transaction.commit().await?)
}
