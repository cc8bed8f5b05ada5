//! The list of events, newest first, whether or not an endpoint got them.

use askama::Template;
use askama_web::WebTemplate;
use axum::response::{IntoResponse, Response};
use chrono::DateTime;
use postrider_proto::EventId;
use serde::Deserialize;
use uuid::Uuid;

use super::{
    FormErrors, Frame, Markup, Moment, Paged, When,
    list_filters::{TIME, WITHIN, check_type, given, offered_types, read, read_time, since_within},
    search::similar_tenants,
};
use crate::{
    Shared,
    auth::{Session, Visit},
    http::{
        cells::{ask, merge},
        input::Query,
        pagination,
        problem::{Faults, Problem},
    },
    tables::{
        event_list::{self, EventFilter, EventSummary},
        events::{self, Effort},
        tenants,
    },
};

const LINES: i64 = 50;

/// The filters as given in the address. An empty filter matches everything.
#[derive(Default, Clone, Deserialize)]
#[serde(default)]
pub(crate) struct EventsQuery {
    tenant: String,
    event: String,
    r#type: String,
    /// `none`: only events without a delivery.
    deliveries: String,
    within: String,
    since: String,
    until: String,
    cursor: Option<String>,
}

impl EventsQuery {
    /// The address of another page with the same filters.
    fn address(&self, cursor: Option<&str>) -> String {
        let mut address = url::form_urlencoded::Serializer::new(String::new());
        let fields = [
            ("tenant", &self.tenant),
            ("event", &self.event),
            ("type", &self.r#type),
            ("deliveries", &self.deliveries),
            ("within", &self.within),
            ("since", &self.since),
            ("until", &self.until),
        ];
        for (name, value) in fields {
            if !value.is_empty() {
                address.append_pair(name, value);
            }
        }
        if let Some(cursor) = cursor {
            address.append_pair("cursor", cursor);
        }
        format!("/events?{}", address.finish())
    }

    fn is_empty(&self) -> bool {
        self.address(None) == "/events?"
    }

    /// Whether a filter under “More filters” is set.
    fn has_more(&self) -> bool {
        !(self.since.is_empty() && self.until.is_empty())
    }
}

/// Which events to show, or why there are none.
enum Wanted {
    Matching(EventFilter),
    Found(Vec<EventSummary>),
    Nothing(&'static str),
    NoTenant,
}

#[derive(Template, WebTemplate)]
#[template(path = "events.html")]
pub(crate) struct EventsPage {
    frame: Frame,
    query: EventsQuery,
    types: Vec<String>,
    nothing: Option<&'static str>,
    similar_tenants: Markup,
    lines: Vec<EventSummary>,
    /// How far back the search went, if it stopped before the page was full.
    searched_to: Moment,
    next: Option<String>,
    errors: FormErrors,
}

impl EventsPage {
    fn within(&self) -> [(&'static str, &'static str, i64); 4] {
        WITHIN
    }
}

pub(crate) async fn show(visit: Visit, Query(query): Query<EventsQuery>) -> Paged<Response> {
    let pool = &visit.app.pool;
    let before = pagination::after::<Uuid>(query.cursor.as_deref())?.map(EventId);
    let mut page = EventsPage {
        types: offered_types(pool).await?,
        nothing: None,
        similar_tenants: Markup::default(),
        lines: Vec::new(),
        searched_to: Moment(None),
        next: None,
        errors: FormErrors::default(),
        query: query.clone(),
        frame: Frame::new(visit.session.clone(), "events"),
    };
    match wanted(&visit.app, &visit.session, &query).await {
        Err(problem) => {
            page.errors = FormErrors::of(problem)?;
            page.nothing = Some("Correct the filters marked above.");
        }
        Ok(Wanted::NoTenant) => {
            page.similar_tenants = similar_tenants(pool, "/events", &query.tenant).await?;
            page.nothing = Some("There is no tenant with this ID.");
        }
        Ok(Wanted::Nothing(message)) => page.nothing = Some(message),
        Ok(Wanted::Found(found)) => page.lines = found,
        Ok(Wanted::Matching(filter)) => {
            let answers = ask(&visit.app, move |app| {
                let filter = filter.clone();
                async move { Ok(event_list::list(&app.pool, &filter, before, LINES).await?) }
            })
            .await?;
            page.frame = page.frame.without(&answers.silent);
            let (found, next) = merge(answers.parts(), LINES, |event| event.id);
            if let Some(last) = next.filter(|_| (found.len() as i64) < LINES) {
                page.searched_to = Moment(DateTime::from_timestamp_millis(last.unix_ms()));
            }
            page.lines = found;
            page.next = next.map(|id| query.address(Some(&pagination::encode(&id.0))));
        }
    }
    Ok((page.errors.status(), page).into_response())
}

async fn wanted(app: &Shared, session: &Session, query: &EventsQuery) -> Result<Wanted, Problem> {
    let mut filter = read_filter(session, query)?;
    filter.since = since_within(&app.pool, &query.within, filter.since).await?;
    if let (None, Some(slug)) = (filter.tenant, given(&query.tenant)) {
        match tenants::find(&app.pool, slug).await? {
            Some(row) => filter.tenant = Some(row.id),
            None => return Ok(Wanted::NoTenant),
        }
    }
    let Some(event) = given(&query.event) else {
        return Ok(Wanted::Matching(filter));
    };
    let (tenant, event) = (filter.tenant, event.to_owned());
    let answers = ask(app, move |app| {
        let event = event.clone();
        async move {
            let found = events::find_in(&app.pool, tenant, &event, Effort::Full).await?;
            Ok(event_list::summaries(&app.pool, &found).await?)
        }
    })
    .await?;
    let found: Vec<EventSummary> = answers.parts().into_iter().flatten().collect();
    Ok(match found.is_empty() {
        true => Wanted::Nothing("There is no event with this ID."),
        false => Wanted::Found(found),
    })
}

/// The filters that need no lookup, or an error for each that can't be read.
fn read_filter(session: &Session, query: &EventsQuery) -> Result<EventFilter, Problem> {
    let mut faults = Faults::default();
    let time = |text: &str| read_time("time", text);
    let is_none = |text: &str| match text {
        "none" => Ok(true),
        _ => Err(Problem::bad_request("Query parameter `deliveries` must be none.")),
    };
    let filter = EventFilter {
        tenant: session.scope(),
        event_type: given(&query.r#type).map(str::to_owned),
        since: read(&mut faults, ("since", &query.since), time, TIME),
        until: read(&mut faults, ("until", &query.until), time, TIME),
        is_unsent: read(&mut faults, ("deliveries", &query.deliveries), is_none, "none").unwrap_or_default(),
    };
    check_type(&mut faults, filter.event_type.as_deref());
    faults.done()?;
    Ok(filter)
}
