//! Deliveries and their attempts, and the replay and discard of a single delivery.

use axum::{
    Extension, Json,
    extract::Path,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use postrider_proto::{
    DeliveryId, DeliveryState,
    api::{Delivery, DeliveryWithAttempts, shapes},
    routing::is_type_name,
};
use serde::Deserialize;
use serde_json::json;
use sqlx::PgConnection;

use super::{
    ApiResult, events,
    export::{download, format},
};
use crate::{
    Shared,
    actions::{
        attempt_view::attempts_of,
        delivery_filter::{parse_state, parse_status, parse_time},
        discards,
        export::Exported,
        replay::Asked,
        replays,
    },
    auth::{Arrived, Call, Rule::Own, Tenant},
    http::{
        idempotency::{Claim, Work},
        input::Query,
        pagination::{self, Page},
        problem::{Kind, Problem},
    },
    openapi::{Operation, schema_of},
    tables::{
        deliveries::{self, Filter},
        endpoints,
    },
};

pub(crate) fn operations() -> Vec<Operation> {
    let text = || json!({"type": "string"});
    vec![
        Operation::read(Own, "/v1/tenants/{tenant}/deliveries", list)
            .named("listDeliveries", "List deliveries")
            .describe("If few deliveries match, a page may be short or even empty and still have a `next_cursor`.")
            .query("state", schema_of(shapes::delivery_state()), "Only deliveries in this state.")
            .query("endpoint", text(), "Only deliveries of this endpoint.")
            .query("type", schema_of(shapes::type_name()), "Only deliveries of this event type.")
            .query("event", text(), "Only deliveries of this event.")
            .query("replay", text(), "Only deliveries of this bulk replay.")
            .query(
                "status_code",
                json!({"type": "integer", "minimum": 100, "maximum": 999}),
                "Only deliveries whose last response had this HTTP status.",
            )
            .query_times()
            .returns_page_or_export::<Delivery>(
                "A page of deliveries, newest first.",
                "`ndjson` and `csv` stream all matching deliveries, or the first `limit`. The `Accept` header works too.",
            ),
        Operation::read(Own, "/v1/tenants/{tenant}/deliveries/{delivery}", get)
            .named("getDelivery", "Retrieve a delivery with its attempts")
            .returns::<DeliveryWithAttempts>(200, "The delivery with its attempts."),
        Operation::post(Own, "/v1/tenants/{tenant}/deliveries/{delivery}/replay", replay)
            .named("replayDelivery", "Replay a delivery")
            .describe(
                "Queues the delivery again, due now. Returns 409 `endpoint-disabled` if its endpoint is disabled and 409 \
                 `limit-reached` if it has reached the maximum number of attempts.",
            )
            .returns::<DeliveryWithAttempts>(202, "The delivery, pending again."),
        Operation::post(Own, "/v1/tenants/{tenant}/deliveries/{delivery}/discard", discard)
            .named("discardDelivery", "Discard a dead letter")
            .describe(
                "The delivery is then in state `discarded`: it is kept until its event expires, and can still be replayed. \
                 Returns 409 if it is not a dead letter.",
            )
            .returns::<DeliveryWithAttempts>(200, "The discarded delivery.")
            .fails_with(&[409]),
    ]
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeliveryQuery {
    limit: Option<String>,
    cursor: Option<String>,
    state: Option<String>,
    endpoint: Option<String>,
    r#type: Option<String>,
    event: Option<String>,
    replay: Option<String>,
    status_code: Option<String>,
    since: Option<String>,
    until: Option<String>,
    format: Option<String>,
}

/// Returns a page, or all matching deliveries as a stream.
async fn list(
    call: Call,
    headers: HeaderMap,
    Query(query): Query<DeliveryQuery>,
) -> Result<Response, Problem> {
    let limit = pagination::limit(query.limit.as_deref())?;
    let after = pagination::after(query.cursor.as_deref())?;
    let format = format(query.format.as_deref(), &headers)?;
    let filter = filter(&call.app, &call.tenant, &query).await?;
    if let Some(format) = format {
        let wanted = Exported {
            filter,
            after,
            limit: query.limit.is_some().then_some(limit),
        };
        return download(&call.app, &call.tenant.slug, "deliveries", wanted, format).await;
    }
    let (found, next) = match &filter {
        Some(filter) => deliveries::list(&call.app.pool, filter, after, limit).await?,
        None => (Vec::new(), None),
    };
    let page = Page {
        data: found.iter().map(Delivery::from).collect(),
        next_cursor: next.map(|id| pagination::encode(&id)),
    };
    Ok(Json(page).into_response())
}

/// None if the filter names an endpoint or event that does not exist: nothing can match.
async fn filter(app: &Shared, tenant: &Tenant, query: &DeliveryQuery) -> Result<Option<Filter>, Problem> {
    let time = |name: &str, text: &Option<String>| text.as_deref().map(|t| parse_time(name, t)).transpose();
    let mut filter = Filter {
        tenant: Some(tenant.id),
        state: query.state.as_deref().map(parse_state).transpose()?,
        since: time("since", &query.since)?,
        until: time("until", &query.until)?,
        status_code: query.status_code.as_deref().map(parse_status).transpose()?,
        ..Filter::default()
    };
    if let Some(name) = &query.r#type {
        if !is_type_name(name) {
            return Err(Problem::bad_request(
                "Query parameter `type` must be an event type name, like `invoice.paid`.",
            ));
        }
        filter.event_type = Some(name.clone());
    }
    if let Some(endpoint) = &query.endpoint {
        filter.endpoint = endpoints::find_number(&app.pool, Some(tenant.id), endpoint).await?;
        if filter.endpoint.is_none() {
            return Ok(None);
        }
    }
    if let Some(event) = &query.event {
        filter.event = events::find_number(app, tenant, event).await?;
        if filter.event.is_none() {
            return Ok(None);
        }
    }
    if let Some(replay) = &query.replay {
        match replays::find(app, Some(tenant.id), replay).await {
            Ok(replay) => filter.replay = Some(replay.public_id),
            Err(problem) if problem.kind == Kind::NotFound => return Ok(None),
            Err(problem) => return Err(problem),
        }
    }
    Ok(Some(filter))
}

fn parse_id(text: &str) -> Result<DeliveryId, Problem> {
    text.parse().map_err(|_| Problem::not_found("delivery"))
}

async fn get(call: Call, Path((_, id)): Path<(String, String)>) -> ApiResult<DeliveryWithAttempts> {
    let mut connection = call.app.pool.acquire().await?;
    Ok(Json(
        load(&call.app, &mut connection, &call.tenant, parse_id(&id)?).await?,
    ))
}

async fn load(
    app: &Shared,
    connection: &mut PgConnection,
    tenant: &Tenant,
    id: DeliveryId,
) -> Result<DeliveryWithAttempts, Problem> {
    let missing = || Problem::not_found("delivery");
    let delivery = deliveries::find(&mut *connection, Some(tenant.id), id)
        .await?
        .ok_or_else(missing)?;
    let attempts = attempts_of(app, connection, &delivery).await?;
    Ok(DeliveryWithAttempts {
        delivery: Delivery::from(&delivery),
        url: delivery.url,
        attempts,
    })
}

async fn discard(
    call: Call,
    Path((_, id)): Path<(String, String)>,
    claim: Claim,
) -> Result<Response, Problem> {
    let id = parse_id(&id)?;
    let mut work = Work::begin(&call.app, claim).await?;
    let mut delivery = load(&call.app, &mut work, &call.tenant, id).await?;
    let seen = Some(delivery.delivery.attempt_count);
    let tenant = Some(call.tenant.id);
    if discards::discard_one(&mut work, &call.actor, tenant, id, seen)
        .await?
        .is_none()
    {
        return Err(Problem::conflict(format!(
            "Only dead letters can be discarded. The delivery is {}.",
            delivery.delivery.state.as_str()
        )));
    }
    // Not read again: if its attempts have expired, nothing of it is left.
    delivery.delivery.state = DeliveryState::Discarded;
    delivery.delivery.reason = None;
    work.commit(StatusCode::OK, &delivery).await
}

async fn replay(
    call: Call,
    Extension(arrived): Extension<Arrived>,
    Path((_, id)): Path<(String, String)>,
    claim: Claim,
) -> Result<Response, Problem> {
    let id = parse_id(&id)?;
    let asked = Asked { arrived, seen: None };
    let mut work = Work::begin(&call.app, claim).await?;
    crate::actions::replay::replay(&mut work, &call.actor, Some(call.tenant.id), id, asked).await?;
    let delivery = load(&call.app, &mut work, &call.tenant, id).await?;
    let response = work.commit(StatusCode::ACCEPTED, &delivery).await?;
    call.app.wake.now();
    Ok(response)
}
