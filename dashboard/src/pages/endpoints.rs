//! The list of endpoints with their health over the last 24 hours, and the list of secret rotations.

use std::{cmp::Reverse, collections::HashMap};

use askama::Template;
use askama_web::WebTemplate;
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, TimeDelta, Utc};
use postrider_proto::{EndpointId, EndpointState, TenantId, limits::URL_BYTES_MAX};
use serde::Deserialize;

use super::{
    FormErrors, Frame, Markup, Paged, When,
    endpoint::badge,
    list_filters::{given, read},
    search::similar_tenants,
};
use crate::{
    Shared,
    auth::{Session, Visit},
    http::{
        cells::{ask, merge, part},
        input::{Query, is_plain_text},
        pagination,
        problem::{Faults, Problem},
    },
    pages::{
        chart::{self, Svg, address_time},
        stats_format::{Series, format_percent},
    },
    tables::{
        activity::{self, ActivityRow},
        endpoints::{self, ListedRow, Narrow},
        holds::Switches,
        rotations::{self, Of, RotationRow},
        statistics::{self, CountRow},
        tenants,
    },
};

const LINES: i64 = 30;
const HOURS_SHOWN: usize = 24;

#[derive(Default, Clone, Deserialize)]
#[serde(default)]
pub(crate) struct EndpointsQuery {
    tenant: String,
    state: String,
    text: String,
    cursor: Option<String>,
}

struct EndpointLine {
    row: ListedRow,
    is_team: bool,
    health: Svg,
    success: Option<String>,
    activity: Option<ActivityRow>,
    /// Pinned versions that events are no longer published with.
    outdated_pins: Option<String>,
}

impl EndpointLine {
    fn badge(&self) -> (&'static str, &'static str) {
        let activity = self.activity.as_ref();
        let switches = Switches {
            endpoint_state: self.row.state,
            tenant_paused: self.row.tenant_paused,
            sending_stopped: self.row.sending_stopped,
        };
        badge(
            self.row.state,
            switches.hold().and_then(|hold| hold.badge(self.is_team)),
            activity.is_some_and(|activity| activity.circuit_open),
            self.row.failing_since.is_some(),
        )
    }
}

#[derive(Template, WebTemplate)]
#[template(path = "endpoints.html")]
pub(crate) struct EndpointsPage {
    frame: Frame,
    query: EndpointsQuery,
    no_such_tenant: bool,
    similar_tenants: Markup,
    lines: Vec<EndpointLine>,
    next: Option<String>,
    errors: FormErrors,
}

impl EndpointsPage {
    fn is_narrowed(&self) -> bool {
        !(self.query.tenant.is_empty() && self.query.state.is_empty() && self.query.text.is_empty())
    }
}

pub(crate) async fn show(visit: Visit, Query(query): Query<EndpointsQuery>) -> Paged<Response> {
    let before: Option<i32> = pagination::after(query.cursor.as_deref())?;
    let scope = narrowed(&visit.app, &visit.session, &query.tenant).await?;
    let narrow = read_filter(scope.unwrap_or_default(), &query);
    let is_team = visit.session.tenant.is_none();
    let mut silent = Vec::new();
    let (lines, next) = match (scope, &narrow) {
        (Some(_), Ok(narrow)) => {
            let narrow = narrow.clone();
            let answers = ask(&visit.app, move |app| {
                let narrow = narrow.clone();
                async move {
                    let before = before.unwrap_or(i32::MAX);
                    let rows = endpoints::search(&app.pool, &narrow, before, LINES + 1).await?;
                    let (rows, end) = part(rows, LINES, |row| row.id);
                    Ok((described(&app, rows, is_team).await?, end))
                }
            })
            .await?;
            silent.clone_from(&answers.silent);
            merge(answers.parts(), LINES, |line| line.row.id)
        }
        _ => (Vec::new(), None),
    };
    let errors = narrow.err().map(FormErrors::of).transpose()?.unwrap_or_default();
    let page = EndpointsPage {
        errors,
        lines,
        frame: Frame::new(visit.session, "endpoints").without(&silent),
        no_such_tenant: scope.is_none(),
        similar_tenants: match scope {
            Some(_) => Markup::default(),
            None => similar_tenants(&visit.app.pool, "/endpoints", &query.tenant).await?,
        },
        next: next.map(|id| pagination::encode(&id.0)),
        query,
    };
    Ok((page.errors.status(), page).into_response())
}

/// A URL of any length can be looked for.
fn read_filter(tenant: Option<TenantId>, query: &EndpointsQuery) -> Result<Narrow, Problem> {
    const STATES: &str = "active, paused or disabled";
    let mut faults = Faults::default();
    let text = given(&query.text);
    if text.is_some_and(|text| !is_plain_text(text, URL_BYTES_MAX)) {
        let detail = format!("must be plain text of at most {URL_BYTES_MAX} bytes");
        faults.add("text", detail);
    }
    let state = read(&mut faults, ("state", &query.state), parse_state, STATES);
    faults.done()?;
    Ok(Narrow {
        tenant,
        state,
        text: text.map(str::to_owned),
    })
}

/// `None` if the given tenant does not exist.
async fn narrowed(app: &Shared, session: &Session, slug: &str) -> Result<Option<Option<TenantId>>, Problem> {
    Ok(match (session.scope(), slug) {
        (Some(own), _) => Some(Some(own)),
        (None, "") => Some(None),
        (None, slug) => tenants::find(&app.pool, slug).await?.map(|row| Some(row.id)),
    })
}

fn parse_state(word: &str) -> Result<EndpointState, Problem> {
    use EndpointState::{Active, Disabled, Paused};
    let found = [Active, Paused, Disabled]
        .into_iter()
        .find(|state| state.as_str() == word);
    let detail = || format!("Invalid state {word:?}: must be active, paused or disabled.");
    found.ok_or_else(|| Problem::bad_request(detail()))
}

async fn described(app: &Shared, rows: Vec<ListedRow>, is_team: bool) -> Result<Vec<EndpointLine>, Problem> {
    let ids: Vec<EndpointId> = rows.iter().map(|row| row.id).collect();
    let now: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()")
        .fetch_one(&app.pool)
        .await?;
    let empty = Series::until(now, TimeDelta::hours(1), HOURS_SHOWN);
    let mut series: HashMap<EndpointId, Series> = HashMap::new();
    for row in statistics::plain_hours(&app.pool, &ids, empty.begin).await? {
        series
            .entry(row.endpoint_id)
            .or_insert_with(|| empty.clone())
            .add(&CountRow::from(row));
    }
    let mut activity: HashMap<EndpointId, ActivityRow> = activity::of_endpoints(&app.pool, &ids)
        .await?
        .into_iter()
        .map(|row| (row.endpoint_id, row))
        .collect();
    let mut outdated_pins: HashMap<EndpointId, Vec<String>> = HashMap::new();
    for pin in endpoints::outdated_pins(&app.pool, &ids).await? {
        if let Some(emitted) = pin.emitted {
            outdated_pins.entry(pin.endpoint_id).or_default().push(format!(
                "Pinned to version {} of {}; events are published with version {emitted}.",
                pin.pinned, pin.event_type
            ));
        }
    }
    Ok(rows
        .into_iter()
        .map(|row| {
            let series = series.remove(&row.id).unwrap_or_else(|| empty.clone());
            EndpointLine {
                is_team,
                health: chart::small_health(&series),
                success: series.total().success_percent().map(format_percent),
                activity: activity.remove(&row.id),
                outdated_pins: outdated_pins.remove(&row.id).map(|pins| pins.join(" ")),
                row,
            }
        })
        .collect())
}

/// The address of the deliveries that were rejected since the current secret was created.
pub(crate) fn refused_since(row: &RotationRow) -> String {
    let since = address_time(row.rotated_at);
    format!(
        "/deliveries?endpoint={}&failure=4xx&attempted_since={since}",
        row.endpoint
    )
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct RotationsQuery {
    cursor: Option<String>,
}

#[derive(Template, WebTemplate)]
#[template(path = "rotations.html")]
pub(crate) struct RotationsPage {
    frame: Frame,
    rows: Vec<RotationRow>,
    next: Option<String>,
}

pub(crate) async fn rotations(visit: Visit, Query(query): Query<RotationsQuery>) -> Paged<RotationsPage> {
    let after: Option<i32> = pagination::after(query.cursor.as_deref())?;
    let of = Of::Busy(visit.session.scope());
    let answers = ask(&visit.app, move |app| async move {
        let rows = rotations::list(&app.pool, of, after.unwrap_or_default(), LINES + 1).await?;
        Ok(part(rows, LINES, |row| Reverse(row.number)))
    })
    .await?;
    let frame = Frame::new(visit.session, "endpoints").without(&answers.silent);
    let (rows, next) = merge(answers.parts(), LINES, |row| Reverse(row.number));
    Ok(RotationsPage {
        frame,
        rows,
        next: next.map(|Reverse(number)| pagination::encode(&number.0)),
    })
}
