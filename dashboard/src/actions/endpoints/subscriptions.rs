//! What an endpoint would receive, before it is saved: whether its types exist, and which recent events its filter admits.

use chrono::{DateTime, Utc};
use postrider_proto::{
    api,
    filter::Filter,
    routing::{is_pattern, matching_patterns},
};
use postrider_sender::{read_data, read_data_of_body};

use super::rules::{check_filter, check_types, check_versions};
use crate::{
    App,
    auth::Tenant,
    http::problem::{Faults, Problem},
    tables::{
        event_types,
        events::{self, EventRow, RecentEvent},
    },
};

/// How many of the tenant's newest events are searched for those of the endpoint's types.
pub(crate) const EVENTS_SEARCHED_MAX: i64 = 500;
/// How many of these a filter is tested with.
const EVENTS_TESTED_MAX: usize = 20;
/// Of all bodies that are read for one test.
const BYTES_TESTED_MAX: i64 = 2 * 1024 * 1024;

/// Patterns that match no event type yet, other than those that the endpoint already had: a type may have been deleted
/// since, which is no reason to reject an unrelated change.
pub(crate) async fn unmatched(
    app: &App,
    patterns: &[String],
    before: &[String],
) -> Result<Vec<String>, Problem> {
    let asked: Vec<&str> = patterns
        .iter()
        .filter(|pattern| is_pattern(pattern) && *pattern != "*" && !before.contains(pattern))
        .map(String::as_str)
        .collect();
    if asked.is_empty() {
        return Ok(Vec::new());
    }
    let matched = event_types::matched_patterns(&app.pool, &asked).await?;
    let is_unmatched = |pattern: &&str| !matched.iter().any(|known| known == pattern);
    Ok(asked
        .into_iter()
        .filter(is_unmatched)
        .map(str::to_owned)
        .collect())
}

/// The newest events of the endpoint's types, each with whether the filter admits it.
pub(crate) struct FilterTest {
    pub(crate) events: Vec<TestedEvent>,
}

pub(crate) struct TestedEvent {
    /// As the producer or Postrider named it.
    pub(crate) id: String,
    /// The generated id. Unlike a producer's, it is unique across tenants.
    pub(crate) generated: String,
    pub(crate) type_name: String,
    pub(crate) emitted_at: Option<DateTime<Utc>>,
    pub(crate) is_admitted: bool,
}

impl FilterTest {
    pub(crate) fn admitted(&self) -> usize {
        self.events.iter().filter(|event| event.is_admitted).count()
    }
}

/// Changes nothing. A filter is evaluated as the dispatcher would.
pub(crate) async fn test_filter(
    app: &App,
    tenant: &Tenant,
    form: &api::EndpointSettings,
) -> Result<FilterTest, Problem> {
    let types = form.types.clone().flatten().unwrap_or_default();
    let versions = form.versions.clone().flatten().unwrap_or_default();
    let filter = form.filter.clone().flatten();
    let mut faults = Faults::default();
    check_types(&types, &mut faults);
    check_versions(Some(&versions), &mut faults);
    check_filter(filter.as_ref(), &mut faults);
    faults.done()?;
    let filter = filter.as_ref().and_then(|filter| Filter::read(filter).ok());

    let mut bytes = 0;
    let is_subscribed = |event: &RecentEvent| {
        let matching = matching_patterns(&event.type_name);
        let is_pinned_away = versions
            .get(&event.type_name)
            .is_some_and(|pinned| *pinned != event.version);
        !is_pinned_away && matching.iter().any(|pattern| types.contains(pattern))
    };
    let recent = events::recent(&app.pool, tenant.id, EVENTS_SEARCHED_MAX).await?;
    let ids: Vec<_> = recent
        .iter()
        .filter(|event| is_subscribed(event))
        .take_while(|event| {
            bytes += i64::from(event.bytes);
            bytes <= BYTES_TESTED_MAX
        })
        .take(EVENTS_TESTED_MAX)
        .map(|event| event.id)
        .collect();
    let loaded = events::load(&app.pool, tenant.id, &ids).await?;
    let tested = |row: EventRow| TestedEvent {
        id: row.public_id(),
        generated: row.id.generated(),
        emitted_at: DateTime::from_timestamp_millis(row.id.unix_ms()),
        is_admitted: filter.as_ref().is_none_or(|filter| is_admitted(filter, &row)),
        type_name: row.type_name,
    };
    Ok(FilterTest {
        events: loaded.into_iter().map(tested).collect(),
    })
}

/// Data that can't be parsed is sent.
fn is_admitted(filter: &Filter, row: &EventRow) -> bool {
    let data = match &row.full_data {
        Some(data) => std::str::from_utf8(data).ok().and_then(read_data),
        None => read_data_of_body(&row.body),
    };
    data.is_none_or(|data| filter.admits(&data))
}
