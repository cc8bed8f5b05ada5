//! Dead letter counts by endpoint, type, reason and failure, read from maintained counters. Also streams the dead letters
//! themselves; the paged list is `GET …/deliveries?state=dead`.

use axum::{
    Json,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use postrider_proto::{
    DeadReason, DeliveryState, EndpointId, EventId, Failure, TypeId,
    api::{DeadLetterGroup, Discarded, NewDiscard, shapes},
    limits::DISCARDED_MAX,
    routing::is_type_name,
};
use serde::Deserialize;
use serde_json::json;

use super::export::{download, format};

use crate::{
    actions::{
        delivery_filter::parse_time,
        discards::{self, count_within},
        export::Exported,
    },
    auth::{Call, Rule::Own},
    http::{
        idempotency::{Claim, Work},
        input::{Body, Query},
        pagination::{self, Position, cut},
        problem::Problem,
    },
    openapi::{Operation, schema_of},
    tables::{
        dead_letters::{self, Group, GroupFilter, GroupPosition, read_reason},
        deliveries::{Filter, first_id_of},
        endpoints, event_types,
    },
};

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::read(Own, "/v1/tenants/{tenant}/dead-letters", list)
            .named("countDeadLetters", "Count dead letters by endpoint, type, reason and failure")
            .describe(
                "Reads maintained counters; with `since` or `until` the dead letters are counted one by one. The `ndjson` and \
                 `csv` formats stream the dead letters themselves; for a paged list use deliveries in state `dead`.",
            )
            .query("endpoint", json!({"type": "string"}), "Only dead letters of this endpoint.")
            .query("type", schema_of(shapes::type_name()), "Only dead letters of this event type.")
            .query("reason", schema_of(shapes::dead_reason()), "Only dead letters with this reason.")
            .query("failure", json!({"type": "string"}), "Only groups with this failure: a status code or an outcome.")
            .query_times()
            .returns_page_or_export::<DeadLetterGroup>(
                "A page of groups, largest first.",
                "`ndjson` and `csv` stream all matching dead letters, or the first `limit`. The `Accept` header works too.",
            ),
        Operation::post(Own, "/v1/tenants/{tenant}/dead-letters/discard", discard)
            .named("discardDeadLetters", "Discard dead letters")
            .describe(
                "Discards the dead letters of an endpoint that match, oldest first, up to 5,000 per request. Their deliveries \
                 are then in state `discarded`: they are kept until their events expire, and each can still be replayed.",
            )
            .accepts::<NewDiscard>()
            .returns::<Discarded>(200, "How many were discarded."),
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
    failure: Option<String>,
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
            failure: group.failure.to_string(),
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
            failure,
        } = self;
        format!("{count}:{}:{}:{reason}:{failure}", endpoint.0, type_id.0)
    }

    fn read(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let read = Self {
            count: parts.next()?.parse().ok()?,
            endpoint: EndpointId(parts.next()?.parse().ok()?),
            type_id: TypeId(parts.next()?.parse().ok()?),
            reason: read_reason(parts.next()?)?,
            failure: parts.next()?.parse().ok()?,
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
    let failure = query.failure.as_deref().map(parse_failure).transpose()?;
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
        if failure.is_some() {
            return Err(Problem::bad_request(
                "Query parameter `failure` can't be combined with a format. List deliveries with `status_code` instead.",
            ));
        }
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
        failure,
        after: pagination::after(query.cursor.as_deref())?,
    };
    let groups = match (is_missing, since.is_some() || until.is_some()) {
        (true, _) => Vec::new(),
        (false, false) => dead_letters::groups(&call.app.pool, &filter, limit + 1).await?,
        (false, true) => {
            let from = since.map_or(EventId::LOWEST, first_id_of);
            let upto = until.map_or(EventId(uuid::Uuid::max()), |until| first_id_of(until).pred());
            count_within(&call.app, &filter, (from, upto), limit + 1).await?
        }
    };
    Ok(Json(cut(groups, limit, Group::position).map(DeadLetterGroup::from)).into_response())
}

async fn discard(call: Call, claim: Claim, Body(form): Body<NewDiscard>) -> Result<Response, Problem> {
    let wanted = discards::read(&call.app, call.tenant.id, form).await?;
    let mut work = Work::begin(&call.app, claim).await?;
    let done = discards::discard(&mut work, &call.actor, &wanted, DISCARDED_MAX).await?;
    work.commit(StatusCode::OK, &done).await
}

fn parse_failure(text: &str) -> Result<Failure, Problem> {
    text.parse().map_err(|_| {
        Problem::bad_request(
            "Query parameter `failure` must be a status code or an outcome, like 503 or `timed_out`.",
        )
    })
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
