//! The pages for bulk replays: the list with progress and time left, the page of a replay, the preview, and the actions
//! that start and cancel one.

use std::time::Duration;

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    Extension,
    extract::{Path, RawQuery},
    http::StatusCode,
    response::{IntoResponse, Redirect, Response},
};
use chrono::TimeDelta;
use data_encoding::BASE64URL_NOPAD;
use postrider_dispatcher::replays::{self, RATE_DEFAULT, Replay};
use postrider_proto::{
    DeadReason, ReplayKind, ReplayState, TenantId,
    api::{NewReplay, ReplayPreview},
    limits::REPLAY_RATE_MAX,
};
use serde::Deserialize;

use super::{
    Done, FormErrors, Frame, Markup, Moment, Paged,
    dead_letters::{self, reason_label},
};
use crate::{
    App,
    actions::replays::{Wanted, begin, dry_run, find, read, stop},
    auth::{Confirmed, Submitted, Visit},
    http::{
        input::Query,
        pagination,
        problem::{Problem, excerpt},
    },
    pages::{
        live::{Content, Live, Stream},
        stats_format::{format_duration, format_rate},
    },
    tables::{
        self,
        endpoints::{self, EndpointRow},
    },
};

const LINES: i64 = 25;
/// Groups that can be replayed at once. Each becomes its own replay.
const GROUPS_MAX: usize = 50;
const REFRESH: Duration = Duration::from_secs(1);
const DONE: [(&str, &str); 3] = [
    ("started", "Replay started."),
    ("cancelled", "Replay cancelled."),
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
}

impl From<Replay> for Shown {
    fn from(replay: Replay) -> Self {
        Self {
            created: Moment(Some(replay.created_at)),
            ended: Moment(replay.ended_at),
            since: Moment(replay.since),
            until: Moment(replay.until),
            replay,
        }
    }
}

impl Shown {
    fn is_running(&self) -> bool {
        self.replay.state == ReplayState::Running
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

    fn reason(&self) -> Option<&'static str> {
        self.replay.reason.map(reason_label)
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

    fn delivered(&self) -> i64 {
        let replay = &self.replay;
        (replay.done() - replay.skipped - replay.retrying - replay.dead).max(0)
    }
}

#[derive(Template, WebTemplate)]
#[template(path = "replays.html")]
struct ReplaysPage {
    frame: Frame,
    endpoint: String,
    replays: Vec<Shown>,
    next: Option<String>,
}

pub(crate) async fn list(visit: Visit, Query(query): Query<ReplaysQuery>) -> Paged<Response> {
    let before: Option<i64> = pagination::after(query.cursor.as_deref())?;
    let rows = replays::list(
        &visit.app.pool,
        visit.session.scope(),
        before.unwrap_or(i64::MAX),
        LINES + 1,
    )
    .await?;
    let page = pagination::cut(rows, LINES, |replay| replay.id.0);
    let page = ReplaysPage {
        frame: Frame::new(visit.session, "replays"),
        endpoint: query.endpoint,
        replays: page.data.into_iter().map(Shown::from).collect(),
        next: page.next_cursor,
    };
    Ok(page.into_response())
}

#[derive(Template, WebTemplate)]
#[template(path = "replay.html")]
pub(crate) struct ReplayPage {
    frame: Frame,
    shown: Shown,
    actions: Markup,
    now: Markup,
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
    let shown = Shown::from(find(&visit.app, visit.session.scope(), &id).await?);
    let frame = Frame::new(visit.session, "replays").with_done(&query.done, &DONE);
    Ok(ReplayPage {
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
    live.stream(&visit.app.pool.clone(), visit.session, REFRESH, move || {
        let (app, id, frame) = (visit.app.clone(), id.clone(), frame.clone());
        async move {
            let shown = &Shown::from(find(&app, scope, &id).await?);
            let frame = &frame;
            let html = Markup::of(&Actions { frame, shown })?.0 + &Markup::of(&Now { shown })?.0;
            Ok(match shown.is_settled() {
                true => Content::Last(html),
                false => Content::Html(html),
            })
        }
    })
}

/// One of the replays that would be started.
struct Preview {
    form: NewReplay,
    /// The endpoint's URL, or the given ID if there is no such endpoint.
    endpoint: String,
    found: Result<ReplayPreview, String>,
}

impl Preview {
    fn reason(&self) -> Option<&'static str> {
        let given = self.form.reason.as_deref()?;
        let reason = DeadReason::ALL.iter().find(|reason| reason.as_str() == given)?;
        Some(reason_label(*reason))
    }
}

#[derive(Template, WebTemplate)]
#[template(path = "replay_preview.html")]
pub(crate) struct PreviewPage {
    frame: Frame,
    previews: Vec<Preview>,
    total: i64,
    /// The requests, encoded for the form that starts them.
    asks: String,
    rate: String,
    rate_max: i32,
    errors: FormErrors,
}

/// Previews the replay of several groups of dead letters (`group=endpoint~type~reason`), or of one request.
pub(crate) async fn preview(visit: Visit, RawQuery(query): RawQuery) -> Paged<Response> {
    let query = query.unwrap_or_default();
    let forms = read_query(&query);
    if forms.is_empty() || forms.len() > GROUPS_MAX {
        let error = match forms.len() {
            0 => "Select at least one group to replay.".to_owned(),
            count => format!("Select at most {GROUPS_MAX} groups at a time, not {count}."),
        };
        let selected = url::form_urlencoded::parse(query.as_bytes())
            .filter(|(name, _)| name == "group")
            .map(|(_, value)| value.into_owned())
            .collect();
        let page = dead_letters::rejected(visit, selected, error).await?;
        return Ok((StatusCode::BAD_REQUEST, page).into_response());
    }
    Ok(load_preview(&visit, forms).await?.into_response())
}

async fn load_preview(visit: &Visit, forms: Vec<NewReplay>) -> Result<PreviewPage, Problem> {
    let mut previews = Vec::new();
    for form in forms {
        let mut endpoint = form.endpoint.clone().unwrap_or_default();
        let found = match endpoint_of(&visit.app, visit.session.scope(), &form).await {
            Ok(row) => {
                let wanted = read(&visit.app, row.tenant_id, &form).await;
                endpoint = row.settings.url;
                match wanted {
                    Ok(wanted) => count_within_share(&visit.app, &wanted).await,
                    Err(problem) => Err(problem),
                }
            }
            Err(problem) => Err(problem),
        };
        let found = found.map_err(|problem| problem.detail);
        previews.push(Preview {
            form,
            endpoint,
            found,
        });
    }
    let good = previews.iter().filter(|preview| preview.found.is_ok());
    let asks: Vec<&NewReplay> = good.map(|preview| &preview.form).collect();
    let asks = BASE64URL_NOPAD.encode(&serde_json::to_vec(&asks).unwrap_or_default());
    let total = previews.iter().filter_map(|one| one.found.as_ref().ok());
    let total = total.map(|found| found.total).sum();
    Ok(PreviewPage {
        frame: Frame::new(visit.session.clone(), "replays"),
        total,
        asks,
        previews,
        rate: RATE_DEFAULT.to_string(),
        rate_max: REPLAY_RATE_MAX,
        errors: FormErrors::default(),
    })
}

async fn count_within_share(app: &App, wanted: &Wanted) -> Result<ReplayPreview, Problem> {
    let _count = app.limits.counts.take(&wanted.counts_as()).await?;
    dry_run(app, &mut *app.pool.acquire().await?, wanted).await
}

fn read_query(query: &str) -> Vec<NewReplay> {
    let mut one = NewReplay::default();
    let mut groups = Vec::new();
    for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
        let text = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
        match name.as_ref() {
            "group" => groups.extend(read_group(&value)),
            "endpoint" => one.endpoint = text,
            "kind" => one.kind = text,
            "state" => one.state = text,
            "type" => one.r#type = text,
            "since" => one.since = text.map(in_utc),
            "until" => one.until = text.map(in_utc),
            _ => {}
        }
    }
    if groups.is_empty() && one.endpoint.is_some() {
        let NewReplay { kind, state, .. } = &mut one;
        // The form has a single choice for both fields.
        if kind.as_deref() != Some("missing") {
            *state = state.take().or(kind.take()).filter(|word| word != "failed");
        }
        return vec![one];
    }
    for group in &mut groups {
        group.since.clone_from(&one.since);
        group.until.clone_from(&one.until);
    }
    groups
}

fn read_group(text: &str) -> Option<NewReplay> {
    let mut parts = text.split('~').map(str::to_owned);
    Some(NewReplay {
        endpoint: Some(parts.next()?),
        r#type: Some(parts.next()?),
        reason: Some(parts.next()?),
        state: Some("dead".to_owned()),
        ..NewReplay::default()
    })
}

/// Values of `datetime-local` inputs have no time zone.
fn in_utc(text: String) -> String {
    match text.len() {
        16 => format!("{text}:00Z"),
        19 => format!("{text}Z"),
        _ => text,
    }
}

/// The endpoint to replay to. Customers find only their own.
async fn endpoint_of(app: &App, scope: Option<TenantId>, form: &NewReplay) -> Result<EndpointRow, Problem> {
    let public_id = form.endpoint.as_deref().unwrap_or_default();
    let missing = || Problem::invalid("/endpoint", format!("there is no endpoint {public_id:?}"));
    let number = endpoints::find_number(&app.pool, scope, public_id)
        .await?
        .ok_or_else(missing)?;
    endpoints::find_by_id(&app.pool, number)
        .await?
        .ok_or_else(missing)
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct StartForm {
    asks: String,
    rate_per_second: String,
}

pub(crate) async fn start(visit: Visit, Submitted(form): Submitted<StartForm>) -> Paged<Response> {
    let asked = || serde_json::from_slice(&BASE64URL_NOPAD.decode(form.asks.as_bytes()).ok()?).ok();
    let asks: Vec<NewReplay> =
        asked().ok_or_else(|| Problem::bad_request("Malformed form. Go back and try again."))?;
    if asks.is_empty() || asks.len() > GROUPS_MAX {
        return Err(Problem::bad_request("Nothing to replay.").into());
    }
    match begin_all(&visit, &asks, form.rate_per_second.trim()).await {
        Ok(Some(id)) if asks.len() == 1 => {
            Ok(Redirect::to(&format!("/replays/{id}?done=started")).into_response())
        }
        Ok(_) => Ok(Redirect::to("/replays").into_response()),
        Err(problem) => {
            let errors = FormErrors::of(problem)?;
            let page = PreviewPage {
                rate: form.rate_per_second,
                errors,
                ..load_preview(&visit, asks).await?
            };
            Ok((page.errors.status(), page).into_response())
        }
    }
}

/// Returns the id of the first replay.
async fn begin_all(visit: &Visit, asks: &[NewReplay], rate: &str) -> Result<Option<String>, Problem> {
    let rate: i64 = rate.parse().map_err(|_| {
        let detail = format!("must be a whole number, not {:?}", excerpt(rate));
        Problem::invalid("/rate_per_second", detail)
    })?;
    // Before the transaction: a request that holds a connection must not wait for another one.
    let mut all = Vec::new();
    for mut ask in asks.iter().cloned() {
        ask.rate_per_second = Some(rate);
        let endpoint = endpoint_of(&visit.app, visit.session.scope(), &ask).await?;
        all.push(read(&visit.app, endpoint.tenant_id, &ask).await?);
    }
    let _count = match all.first() {
        Some(wanted) => Some(visit.app.limits.counts.take(&wanted.counts_as()).await?),
        None => None,
    };
    let mut transaction = tables::begin(&visit.app.pool).await?;
    let mut first = None;
    for wanted in all {
        let replay = begin(&visit.app, &mut transaction, &visit.actor, &wanted).await?;
        first.get_or_insert(replay.public_id);
    }
    transaction.commit().await?;
    visit.app.wake.now();
    Ok(first)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_and_single_requests_are_read_from_the_address() {
        let forms = read_query("group=ep_1~invoice.paid~gone&group=ep_2~a~exhausted&since=2026-01-01T00:00");
        assert_eq!(forms.len(), 2);
        assert_eq!(forms[0].endpoint.as_deref(), Some("ep_1"));
        assert_eq!(forms[1].reason.as_deref(), Some("exhausted"));
        assert_eq!(forms[1].since.as_deref(), Some("2026-01-01T00:00:00Z"));
        let one = read_query("endpoint=ep_1&kind=failed&since=");
        assert_eq!((one.len(), &one[0].state, &one[0].since), (1, &None, &None));
        assert_eq!(
            read_query("endpoint=ep_1&kind=delivered")[0].state.as_deref(),
            Some("delivered")
        );
        assert_eq!(
            read_query("endpoint=ep_1&kind=missing")[0].kind.as_deref(),
            Some("missing")
        );
        assert!(read_query("group=broken").is_empty());
    }
}
