//! The list of deliveries, newest first. The filters are part of the address, so that a view can be shared.

use askama::Template;
use askama_web::WebTemplate;
use chrono::{DateTime, NaiveDateTime, TimeDelta, Utc};
use postrider_proto::{EventId, TenantId, routing::is_type_name};
use serde::{Deserialize, Serialize};

use super::{DeliverySummary, Frame, Moment, Paged};
use crate::{
    Shared,
    actions::delivery_filter::{parse_state, parse_status, parse_time},
    auth::{Session, Visit},
    http::{input::Query, pagination, problem::Problem},
    tables::{
        deliveries::{self, Filter},
        endpoints, event_types, events, tenants,
    },
};

const LINES: i64 = 50;
/// Event types suggested by the filter.
const TYPES_OFFERED_MAX: i64 = 200;
/// Time ranges offered by the filter: the value in the address, the label, and the minutes.
const WITHIN: [(&str, &str, i64); 4] = [
    ("15m", "last 15 minutes", 15),
    ("1h", "last hour", 60),
    ("24h", "last 24 hours", 24 * 60),
    ("7d", "last 7 days", 7 * 24 * 60),
];

/// The filters as given in the address. An empty filter matches everything.
#[derive(Default, Clone, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct DeliveriesQuery {
    tenant: String,
    state: String,
    endpoint: String,
    r#type: String,
    event: String,
    status_code: String,
    within: String,
    since: String,
    until: String,
    #[serde(skip_serializing)]
    cursor: Option<String>,
}

impl DeliveriesQuery {
    /// The address of another page with the same filters.
    fn address(&self, cursor: Option<&str>) -> String {
        let mut address = url::form_urlencoded::Serializer::new(String::new());
        let fields = [
            ("tenant", &self.tenant),
            ("state", &self.state),
            ("endpoint", &self.endpoint),
            ("type", &self.r#type),
            ("event", &self.event),
            ("status_code", &self.status_code),
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
        format!("/deliveries?{}", address.finish())
    }

    fn is_empty(&self) -> bool {
        self.address(None) == "/deliveries?"
    }

    /// Whether a filter under “More filters” is set.
    fn has_more(&self) -> bool {
        [&self.endpoint, &self.event, &self.since, &self.until]
            .into_iter()
            .any(|value| !value.is_empty())
    }
}

/// Why the list is empty: a filter names something that does not exist.
enum Nothing {
    Tenant,
    Endpoint,
    Event,
}

impl Nothing {
    const fn message(&self) -> &'static str {
        match self {
            Self::Tenant => "There is no tenant with this ID.",
            Self::Endpoint => {
                "There is no endpoint with this ID. Endpoint IDs start with ep_ and are shown in the endpoint's settings."
            }
            Self::Event => "There is no event with this ID.",
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
    /// How many tenants have an event with the given ID; the newest is shown.
    tenants_with_event: usize,
    lines: Vec<DeliverySummary>,
    /// How far back the search went, if it stopped before the page was full.
    searched_to: Moment,
    next: Option<String>,
}

impl DeliveriesPage {
    fn within(&self) -> [(&'static str, &'static str, i64); 4] {
        WITHIN
    }
}

pub(crate) async fn show(visit: Visit, Query(query): Query<DeliveriesQuery>) -> Paged<DeliveriesPage> {
    let after = pagination::after(query.cursor.as_deref())?;
    let mut page = DeliveriesPage {
        types: event_types::list(&visit.app.pool, "", TYPES_OFFERED_MAX)
            .await?
            .into_iter()
            .map(|row| row.name)
            .collect(),
        nothing: None,
        tenants_with_event: 0,
        lines: Vec::new(),
        searched_to: Moment(None),
        next: None,
        query: query.clone(),
        frame: Frame::new(visit.session.clone(), "deliveries"),
    };
    match filter(&visit.app, &visit.session, &query, &mut page.tenants_with_event).await? {
        Err(nothing) => page.nothing = Some(nothing),
        Ok(filter) => {
            let (found, next) = deliveries::list(&visit.app.pool, &filter, after, LINES).await?;
            page.lines = found.iter().map(DeliverySummary::from).collect();
            if let Some(last) = next.filter(|_| (found.len() as i64) < LINES) {
                page.searched_to = Moment(DateTime::from_timestamp_millis(last.event.unix_ms()));
            }
            page.next = next.map(|id| query.address(Some(&pagination::encode(&id))));
        }
    }
    Ok(page)
}

async fn filter(
    app: &Shared,
    session: &Session,
    query: &DeliveriesQuery,
    tenants_with_event: &mut usize,
) -> Result<Result<Filter, Nothing>, Problem> {
    fn given(text: &str) -> Option<&str> {
        Some(text.trim()).filter(|text| !text.is_empty())
    }
    let time = |name: &str, text: &str| given(text).map(|text| read_time(name, text)).transpose();
    let mut filter = Filter {
        tenant: session.scope(),
        state: given(&query.state).map(parse_state).transpose()?,
        status_code: given(&query.status_code).map(parse_status).transpose()?,
        since: time("since", &query.since)?,
        until: time("until", &query.until)?,
        ..Filter::default()
    };
    if let Some((_, _, minutes)) = WITHIN.iter().find(|(word, _, _)| *word == query.within) {
        let now: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()")
            .fetch_one(&app.pool)
            .await?;
        let since = now - TimeDelta::minutes(*minutes);
        filter.since = Some(filter.since.map_or(since, |given| given.max(since)));
    }
    if let (None, Some(slug)) = (filter.tenant, given(&query.tenant)) {
        match tenants::find(&app.pool, slug).await? {
            Some(row) => filter.tenant = Some(row.id),
            None => return Ok(Err(Nothing::Tenant)),
        }
    }
    if let Some(name) = given(&query.r#type) {
        if !is_type_name(name) {
            return Err(Problem::bad_request(format!(
                "Invalid type {name:?}: an event type may contain only lower-case letters, digits, underscores and dots."
            )));
        }
        filter.event_type = Some(name.to_owned());
    }
    if let Some(endpoint) = given(&query.endpoint) {
        filter.endpoint = endpoints::find_number(&app.pool, filter.tenant, endpoint).await?;
        if filter.endpoint.is_none() {
            return Ok(Err(Nothing::Endpoint));
        }
    }
    if let Some(event) = given(&query.event) {
        let found = find_events(app, filter.tenant, event).await?;
        *tenants_with_event = found.len();
        filter.event = found.into_iter().max();
        if filter.event.is_none() {
            return Ok(Err(Nothing::Event));
        }
    }
    Ok(Ok(filter))
}

/// IDs chosen by producers are unique only within a tenant, so several tenants may have the same one.
async fn find_events(app: &Shared, tenant: Option<TenantId>, id: &str) -> Result<Vec<EventId>, Problem> {
    if !events::is_public_id(id) {
        return Ok(Vec::new());
    }
    Ok(match tenant {
        Some(tenant) => events::find_number(&app.pool, tenant, id)
            .await?
            .into_iter()
            .collect(),
        None => events::find_numbers(&app.pool, id).await?,
    })
}

/// RFC 3339, or the format of `datetime-local` inputs, which is read as UTC.
fn read_time(name: &str, text: &str) -> Result<DateTime<Utc>, Problem> {
    let plain = NaiveDateTime::parse_from_str(text, "%Y-%m-%dT%H:%M")
        .or_else(|_| NaiveDateTime::parse_from_str(text, "%Y-%m-%dT%H:%M:%S"));
    match plain {
        Ok(time) => parse_time(name, &time.and_utc().to_rfc3339()),
        Err(_) => parse_time(name, text),
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

    #[test]
    fn times_are_read_from_browsers_and_as_rfc_3339() {
        let at = |text| read_time("since", text).map(|time| time.timestamp()).ok();
        assert_eq!(at("2026-05-28T10:00"), at("2026-05-28T12:00:00+02:00"));
        assert_eq!(at("yesterday"), None);
    }
}
