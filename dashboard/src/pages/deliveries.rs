//! The list of deliveries, newest first. The filters are part of the address, so that a view can be shared.

use std::{sync::Arc, time::Duration};

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    Extension,
    response::{IntoResponse, Response},
};
use chrono::DateTime;
use postrider_proto::TenantId;
use serde::{Deserialize, Serialize};

use super::{
    DeliverySummary, FormErrors, Frame, Markup, Moment, Paged,
    delivery_list::{NewBar, SHOWN_MAX, ShownRows, ShownRowsQuery},
    list_filters::{TIME, WITHIN, check_type, given, offered_types, read, read_time, since_within},
    live::{Content, Live, Stream},
    search::similar_tenants,
};
use crate::{
    Shared,
    actions::{
        delivery_filter::{FAILURES, parse_attempts, parse_failure, parse_state, parse_status},
        export::{Exported, Format},
        replays,
    },
    api::export::download,
    auth::{Session, Visit},
    http::{
        cells::{ask, merge},
        input::Query,
        pagination,
        problem::{Faults, Kind, Problem, excerpt},
    },
    pages::stats_format::class_label,
    tables::{
        deliveries::{self, Attempted, Failure, Filter},
        endpoints,
        events::{self, Effort},
        tenants,
    },
};

const LINES: i64 = SHOWN_MAX as i64;
const REFRESH: Duration = Duration::from_secs(3);

/// The filters as given in the address. An empty filter matches everything.
#[derive(Default, Clone, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct DeliveriesQuery {
    tenant: String,
    state: String,
    endpoint: String,
    r#type: String,
    event: String,
    replay: String,
    status_code: String,
    failure: String,
    attempts: String,
    within: String,
    since: String,
    until: String,
    attempted_since: String,
    attempted_until: String,
    #[serde(skip_serializing)]
    cursor: Option<String>,
}

impl DeliveriesQuery {
    /// The address of another page with the same filters.
    fn address(&self, cursor: Option<&str>) -> String {
        let cursor = cursor.map(|cursor| ("cursor", cursor.to_owned()));
        format!("/deliveries?{}", self.encoded(cursor))
    }

    /// The address of a file with all that match.
    fn export_address(&self, format: &str) -> String {
        format!(
            "/deliveries/export?{}",
            self.encoded([("format", format.to_owned())])
        )
    }

    /// The address of the stream that updates a page.
    fn live_address(&self, shown: &ShownRows) -> String {
        let cursor = self.cursor.clone().map(|cursor| ("cursor", cursor));
        format!(
            "/live/deliveries?{}",
            self.encoded(shown.pairs().into_iter().chain(cursor))
        )
    }

    /// The filters that are set, and more.
    fn encoded(&self, more: impl IntoIterator<Item = (&'static str, String)>) -> String {
        let mut address = url::form_urlencoded::Serializer::new(String::new());
        let fields = [
            ("tenant", &self.tenant),
            ("state", &self.state),
            ("endpoint", &self.endpoint),
            ("type", &self.r#type),
            ("event", &self.event),
            ("replay", &self.replay),
            ("status_code", &self.status_code),
            ("failure", &self.failure),
            ("attempts", &self.attempts),
            ("within", &self.within),
            ("since", &self.since),
            ("until", &self.until),
            ("attempted_since", &self.attempted_since),
            ("attempted_until", &self.attempted_until),
        ];
        for (name, value) in fields {
            if !value.is_empty() {
                address.append_pair(name, value);
            }
        }
        address.extend_pairs(more);
        address.finish()
    }

    fn is_empty(&self) -> bool {
        self.address(None) == "/deliveries?"
    }

    /// Whether attempts of a time are asked for. The kind of failure is then one of theirs, not of the last attempt.
    fn is_by_attempt(&self) -> bool {
        !self.attempted_since.is_empty() || !self.attempted_until.is_empty()
    }

    /// Whether a filter under “More filters” is set.
    fn has_more(&self) -> bool {
        let more = [
            &self.endpoint,
            &self.status_code,
            &self.attempts,
            &self.replay,
            &self.since,
            &self.until,
            &self.attempted_since,
            &self.attempted_until,
        ];
        more.into_iter().any(|value| !value.is_empty())
    }
}

/// Why the list is empty: a filter names something that does not exist.
enum Nothing {
    Tenant,
    Endpoint,
    Event,
    Replay,
    /// The filters can't be applied.
    Invalid,
}

impl Nothing {
    const fn message(&self) -> &'static str {
        match self {
            Self::Tenant => "There is no tenant with this ID.",
            Self::Endpoint => {
                "There is no endpoint with this ID. Endpoint IDs start with ep_ and are shown on the endpoint's page."
            }
            Self::Event => "There is no event with this ID.",
            Self::Replay => "There is no replay with this ID.",
            Self::Invalid => "Correct the filters marked above.",
        }
    }
}

#[derive(Template, WebTemplate)]
#[template(path = "deliveries.html")]
pub(crate) struct DeliveriesPage {
    frame: Frame,
    query: DeliveriesQuery,
    types: Vec<String>,
    nothing: Option<Nothing>,
    similar_tenants: Markup,
    /// How many tenants have an event with the given ID; the newest is shown.
    tenants_with_event: usize,
    lines: Vec<DeliverySummary>,
    new: Markup,
    rows: Markup,
    /// The address of the stream.
    live: Option<String>,
    /// How far back the search went, if it stopped before the page was full.
    searched_to: Moment,
    next: Option<String>,
    errors: FormErrors,
}

/// The table, a live part.
#[derive(Template)]
#[template(path = "deliveries_rows.html")]
struct Rows<'a> {
    is_team: bool,
    lines: &'a [DeliverySummary],
}

impl DeliveriesPage {
    fn within(&self) -> [(&'static str, &'static str, i64); 4] {
        WITHIN
    }

    /// Kinds of failure: the value in the address and the label.
    fn failures(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        FAILURES.into_iter().map(|(word, failure)| match failure {
            Failure::Any => (word, "failed"),
            Failure::Class(class) => (word, class_label(class)),
        })
    }
}

pub(crate) async fn show(visit: Visit, Query(query): Query<DeliveriesQuery>) -> Paged<Response> {
    let after = pagination::after(query.cursor.as_deref())?;
    let mut page = DeliveriesPage {
        types: offered_types(&visit.app.pool).await?,
        nothing: None,
        similar_tenants: Markup::default(),
        tenants_with_event: 0,
        lines: Vec::new(),
        new: NewBar::of(0, "")?,
        rows: Markup::default(),
        live: None,
        searched_to: Moment(None),
        next: None,
        errors: FormErrors::default(),
        query: query.clone(),
        frame: Frame::new(visit.session.clone(), "deliveries"),
    };
    match filter(&visit.app, &visit.session, &query, &mut page.tenants_with_event).await {
        Err(problem) => {
            page.errors = FormErrors::of(problem)?;
            page.nothing = Some(Nothing::Invalid);
        }
        Ok(Err(nothing)) => {
            if matches!(nothing, Nothing::Tenant) {
                page.similar_tenants = similar_tenants(&visit.app.pool, "/deliveries", &query.tenant).await?;
            }
            page.nothing = Some(nothing);
        }
        Ok(Ok(filter)) => {
            let answers = ask(&visit.app, move |app| {
                let filter = filter.clone();
                async move { Ok(deliveries::list(&app.pool, &filter, after, LINES).await?) }
            })
            .await?;
            page.frame = page.frame.without(&answers.silent);
            let (found, next) = merge(answers.parts(), LINES, deliveries::Delivery::id);
            page.lines = found.iter().map(DeliverySummary::from).collect();
            page.rows = rows(&visit.session, &page.lines)?;
            page.live = Some(query.live_address(&ShownRows::of(&found, next)));
            if let Some(last) = next.filter(|_| (found.len() as i64) < LINES) {
                page.searched_to = Moment(DateTime::from_timestamp_millis(last.event.unix_ms()));
            }
            page.next = next.map(|id| query.address(Some(&pagination::encode(&id))));
        }
    }
    Ok((page.errors.status(), page).into_response())
}

/// The filters that need no lookup, or an error for each that can't be read.
fn read_filter(session: &Session, query: &DeliveriesQuery) -> Result<Filter, Problem> {
    const STATES: &str = "pending, delivered, dead or discarded";
    const STATUS: &str = "a number from 100 to 999";
    const ATTEMPTS: &str = "a number from 1 to 1000";
    let mut faults = Faults::default();
    let time = |text: &str| read_time("time", text);
    let status_code = ("status_code", query.status_code.as_str());
    let (since, until) = (query.attempted_since.as_str(), query.attempted_until.as_str());
    let attempted = Attempted {
        since: read(&mut faults, ("attempted_since", since), time, TIME),
        until: read(&mut faults, ("attempted_until", until), time, TIME),
    };
    let filter = Filter {
        attempted: Some(attempted).filter(|attempted| *attempted != Attempted::default()),
        tenant: session.scope(),
        state: read(&mut faults, ("state", &query.state), parse_state, STATES),
        status_code: read(&mut faults, status_code, parse_status, STATUS),
        failure: read(
            &mut faults,
            ("failure", &query.failure),
            parse_failure,
            "one of those offered",
        ),
        attempts_min: read(
            &mut faults,
            ("attempts", &query.attempts),
            parse_attempts,
            ATTEMPTS,
        ),
        since: read(&mut faults, ("since", &query.since), time, TIME),
        until: read(&mut faults, ("until", &query.until), time, TIME),
        event_type: given(&query.r#type).map(str::to_owned),
        ..Filter::default()
    };
    check_type(&mut faults, filter.event_type.as_deref());
    faults.done()?;
    Ok(filter)
}

fn rows(session: &Session, lines: &[DeliverySummary]) -> Result<Markup, Problem> {
    let is_team = session.tenant.is_none();
    Markup::of(&Rows { is_team, lines })
}

/// The filters and the format of a file.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct ExportQuery {
    #[serde(flatten)]
    filters: DeliveriesQuery,
    format: String,
}

/// All deliveries that match, as a file.
pub(crate) async fn export(visit: Visit, Query(query): Query<ExportQuery>) -> Paged<Response> {
    let format = match query.format.as_str() {
        "csv" => Format::Csv,
        "ndjson" => Format::Ndjson,
        other => {
            let detail = format!("Invalid format {:?}: must be csv or ndjson.", excerpt(other));
            return Err(Problem::bad_request(detail).into());
        }
    };
    let filter = filter(&visit.app, &visit.session, &query.filters, &mut 0).await?;
    let wanted = Exported {
        filter: filter.ok(),
        after: None,
        limit: None,
    };
    // People count individually, customers with their tenant.
    let share = match &visit.session.tenant {
        Some(tenant) => tenant.slug.as_str(),
        None => visit.actor.name.as_str(),
    };
    Ok(download(&visit.app, share, "deliveries", wanted, format).await?)
}

/// The filters and what the page shows.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct FollowQuery {
    #[serde(flatten)]
    filters: DeliveriesQuery,
    #[serde(flatten)]
    shown: ShownRowsQuery,
}

/// Updates the rows of a page and counts new deliveries, which belong on the first page.
pub(crate) async fn follow(
    visit: Visit,
    Extension(live): Extension<Live>,
    Query(query): Query<FollowQuery>,
) -> Result<Stream, Problem> {
    let shown = Arc::new(ShownRows::read(&query.shown)?);
    let filter = filter(&visit.app, &visit.session, &query.filters, &mut 0).await?;
    let filter = filter.map_err(|nothing| Problem::bad_request(nothing.message()))?;
    let is_first = query.filters.cursor.is_none();
    let (filter, address) = (Arc::new(filter), Arc::new(query.filters.address(None)));
    let pool = visit.app.home.clone();
    live.stream(&pool, visit.session.clone(), REFRESH, move || {
        let (visit, shown, shown_again) = (visit.clone(), shown.clone(), shown.clone());
        let (filter, address) = (filter.clone(), address.clone());
        async move {
            let scope = visit.session.scope();
            let answers = ask(&visit.app, move |app| {
                let (shown, filter) = (shown.clone(), filter.clone());
                async move {
                    let lines = shown.load(&app.pool, scope).await?;
                    let count = match is_first {
                        true => shown.count_new(&app.pool, &filter).await?,
                        false => 0,
                    };
                    Ok((lines, count))
                }
            })
            .await?;
            let (lines, counts): (Vec<_>, Vec<usize>) = answers.parts().into_iter().unzip();
            let new = NewBar::of(counts.into_iter().sum(), &address)?;
            let lines = shown_again.in_order(lines.into_iter().flatten().collect());
            Ok(Content::Html(new.0 + &rows(&visit.session, &lines)?.0))
        }
    })
}

async fn filter(
    app: &Shared,
    session: &Session,
    query: &DeliveriesQuery,
    tenants_with_event: &mut usize,
) -> Result<Result<Filter, Nothing>, Problem> {
    let mut filter = read_filter(session, query)?;
    filter.since = since_within(&app.pool, &query.within, filter.since).await?;
    if let (None, Some(slug)) = (filter.tenant, given(&query.tenant)) {
        match tenants::find(&app.pool, slug).await? {
            Some(row) => filter.tenant = Some(row.id),
            None => return Ok(Err(Nothing::Tenant)),
        }
    }
    if let Some(replay) = given(&query.replay) {
        filter.replay = find_replay(app, filter.tenant, replay).await?;
        if filter.replay.is_none() {
            return Ok(Err(Nothing::Replay));
        }
    }
    if let Some(endpoint) = given(&query.endpoint) {
        filter.endpoint = endpoints::find_number(&app.pool, filter.tenant, endpoint).await?;
        if filter.endpoint.is_none() {
            return Ok(Err(Nothing::Endpoint));
        }
    }
    if let Some(event) = given(&query.event) {
        let found = events::find_in(&app.pool, filter.tenant, event, Effort::Full).await?;
        *tenants_with_event = found.len();
        filter.event = found.into_iter().map(|(event, _)| event).max();
        if filter.event.is_none() {
            return Ok(Err(Nothing::Event));
        }
    }
    Ok(Ok(filter))
}

/// The public ID of a replay that the session may see.
async fn find_replay(app: &Shared, tenant: Option<TenantId>, id: &str) -> Result<Option<String>, Problem> {
    match replays::find(app, tenant, id).await {
        Ok(replay) => Ok(Some(replay.public_id)),
        Err(problem) if problem.kind == Kind::NotFound => Ok(None),
        Err(problem) => Err(problem),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_contains_only_the_filters_that_are_set() {
        let query = DeliveriesQuery {
            state: "dead".to_owned(),
            r#type: "a&b=c".to_owned(),
            cursor: Some("old".to_owned()),
            ..DeliveriesQuery::default()
        };
        assert_eq!(
            query.address(Some("new")),
            "/deliveries?state=dead&type=a%26b%3Dc&cursor=new"
        );
        assert!(DeliveriesQuery::default().is_empty());
    }
}
