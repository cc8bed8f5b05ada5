//! Dead letter counts by endpoint, type and reason, read from maintained counters. Also streams the dead letters
//! themselves; the paged list is `GET …/deliveries?state=dead`.

use axum::{
    Json,
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use chrono::{DateTime, Utc};
use postrider_proto::{
    DeadReason, DeliveryState, EndpointId, EventId, TypeId,
    api::{DeadLetterGroup, shapes},
    routing::is_type_name,
};
use serde::Deserialize;
use serde_json::json;

use super::export::{download, format};

use crate::{
    Shared,
    actions::{delivery_filter::parse_time, export::Exported},
    auth::{Call, Rule::Own},
    http::{
        input::Query,
        pagination::{self, Position, cut},
        problem::{Kind, Problem},
    },
    openapi::{Operation, schema_of},
    tables::{
        self,
        dead_letters::{self, Group, GroupFilter, GroupPosition, read_reason},
        deliveries::{Filter, first_id_of},
        endpoints, event_types,
    },
};

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::read(Own, "/v1/tenants/{tenant}/dead-letters", list)
            .named("countDeadLetters", "Count dead letters by endpoint, type and reason")
            .describe(
                "Reads maintained counters; with `since` or `until` the dead letters are counted one by one. The `ndjson` and \
                 `csv` formats stream the dead letters themselves; for a paged list use deliveries in state `dead`.",
            )
            .query("endpoint", json!({"type": "string"}), "Only dead letters of this endpoint.")
            .query("type", schema_of(shapes::type_name()), "Only dead letters of this event type.")
            .query("reason", schema_of(shapes::dead_reason()), "Only dead letters with this reason.")
            .query_times()
            .returns_page_or_export::<DeadLetterGroup>(
                "A page of groups, largest first.",
                "`ndjson` and `csv` stream all matching dead letters, or the first `limit`. The `Accept` header works too.",
            ),
    ]
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeadLetterQuery {
    limit: Option<String>,
    cursor: Option<String>,
    endpoint: Option<String>,
    r#type: Option<String>,
    reason: Option<String>,
    since: Option<String>,
    until: Option<String>,
    format: Option<String>,
}

impl From<Group> for DeadLetterGroup {
    fn from(group: Group) -> Self {
        Self {
            endpoint: group.endpoint,
            url: group.url,
            r#type: group.event_type,
            reason: group.reason,
            count: group.count,
            endpoint_state: group.endpoint_state,
        }
    }
}

impl Position for GroupPosition {
    fn write(&self) -> String {
        let Self {
            count,
            endpoint,
            type_id,
            reason,
        } = self;
        format!("{count}:{}:{}:{reason}", endpoint.0, type_id.0)
    }

    fn read(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let read = Self {
            count: parts.next()?.parse().ok()?,
            endpoint: EndpointId(parts.next()?.parse().ok()?),
            type_id: TypeId(parts.next()?.parse().ok()?),
            reason: read_reason(parts.next()?)?,
        };
        parts.next().is_none().then_some(read)
    }
}

/// Returns the counts, or all dead letters as a stream.
async fn list(
    call: Call,
    headers: HeaderMap,
    Query(query): Query<DeadLetterQuery>,
) -> Result<Response, Problem> {
    let limit = pagination::limit(query.limit.as_deref())?;
    let format = format(query.format.as_deref(), &headers)?;
    let time = |name: &str, text: &Option<String>| text.as_deref().map(|t| parse_time(name, t)).transpose();
    let (since, until) = (time("since", &query.since)?, time("until", &query.until)?);
    let reason = query.reason.as_deref().map(parse_reason).transpose()?;
    if query.r#type.as_deref().is_some_and(|name| !is_type_name(name)) {
        return Err(Problem::bad_request(
            "Query parameter `type` must be an event type name, like `invoice.paid`.",
        ));
    }
    let endpoint = match &query.endpoint {
        None => None,
        Some(id) => Some(endpoints::find_number(&call.app.pool, Some(call.tenant.id), id).await?),
    };
    // An unknown endpoint has no dead letters.
    let is_missing = endpoint == Some(None);
    if let Some(format) = format {
        let filter = Filter {
            tenant: Some(call.tenant.id),
            state: Some(DeliveryState::Dead),
            endpoint: endpoint.flatten(),
            since,
            until,
            event_type: query.r#type,
            reason,
            ..Filter::default()
        };
        let wanted = Exported {
            filter: (!is_missing).then_some(filter),
            after: pagination::after(query.cursor.as_deref())?,
            limit: query.limit.is_some().then_some(limit),
        };
        return download(&call.app, &call.tenant.slug, "dead-letters", wanted, format).await;
    }
    let filter = GroupFilter {
        tenant: Some(call.tenant.id),
        endpoint: endpoint.flatten(),
        types: match &query.r#type {
            None => None,
            Some(name) => Some(event_types::numbers(&call.app.pool, name).await?),
        },
        reason,
        after: pagination::after(query.cursor.as_deref())?,
    };
    let groups = match (is_missing, since.is_some() || until.is_some()) {
        (true, _) => Vec::new(),
        (false, false) => dead_letters::groups(&call.app.pool, &filter, limit + 1).await?,
        (false, true) => count_within(&call.app, &filter, since, until, limit + 1).await?,
    };
    Ok(Json(cut(groups, limit, Group::position).map(DeadLetterGroup::from)).into_response())
}

async fn count_within(
    app: &Shared,
    filter: &GroupFilter,
    since: Option<DateTime<Utc>>,
    until: Option<DateTime<Utc>>,
    limit: i64,
) -> Result<Vec<Group>, Problem> {
    let lowest = since.map_or(EventId::LOWEST, first_id_of);
    let below = until.map_or(EventId(uuid::Uuid::max()), first_id_of);
    // A transaction for its statement timeout: there may be millions of rows.
    let mut transaction = tables::begin(&app.pool).await?;
    let counted = dead_letters::groups_within(&mut *transaction, filter, lowest, below, limit).await;
    match counted {
        Err(error) if error.as_database_error().and_then(|e| e.code()).as_deref() == Some("57014") => {
            Err(Problem::new(
                Kind::CountTimeout,
                "Counting took too long. Narrow the range with `since` and `until`.",
            ))
        }
        counted => Ok(counted?),
    }
}

fn parse_reason(text: &str) -> Result<DeadReason, Problem> {
    read_reason(text).ok_or_else(|| {
        let words: Vec<&str> = DeadReason::ALL.iter().map(|reason| reason.as_str()).collect();
        Problem::bad_request(format!(
            "Query parameter `reason` must be one of {}.",
            words.join(", ")
        ))
    })
}
