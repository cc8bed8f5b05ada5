//! Deliveries and their attempts, and the replay of a single delivery.

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use postrider_proto::{DeliveryId, routing::is_type_name};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use utoipa::ToSchema;

use super::{Answer, events};
use crate::{
    Shared,
    actions::{
        attempt_view::{Attempt, attempts_of},
        delivery_filter::{parse_state, parse_status, parse_time},
        delivery_view::DeliveryView,
        export::{self, Exported, Format},
        replay::Asked,
    },
    auth::{Actor, Arrived, Tenant},
    http::{
        idempotency::{Claim, Work},
        input::Query,
        pagination::{self, Page},
        problem::Problem,
    },
    tables::{
        deliveries::{self, Filter},
        endpoints,
    },
};

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeliveryQuery {
    limit: Option<String>,
    cursor: Option<String>,
    state: Option<String>,
    endpoint: Option<String>,
    r#type: Option<String>,
    event: Option<String>,
    status_code: Option<String>,
    since: Option<String>,
    until: Option<String>,
    format: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(crate) struct DeliveryWithAttempts {
    #[serde(flatten)]
    delivery: DeliveryView,
    url: String,
    /// Newest first.
    attempts: Vec<Attempt>,
}

/// Returns a page, or all matching deliveries as a stream.
pub(crate) async fn list(
    State(app): State<Shared>,
    Extension(tenant): Extension<Tenant>,
    headers: HeaderMap,
    Query(query): Query<DeliveryQuery>,
) -> Result<Response, Problem> {
    let limit = pagination::limit(query.limit.as_deref())?;
    let after = query.cursor.as_deref().map(pagination::decode).transpose()?;
    let format = Format::wanted(query.format.as_deref(), &headers)?;
    let filter = filter(&app, &tenant, &query).await?;
    if let Some(format) = format {
        let wanted = Exported {
            name: "deliveries",
            filter,
            after,
            limit: query.limit.is_some().then_some(limit),
        };
        let share = app.limits.exports.take(&tenant.slug).await?;
        return Ok(export::stream(app.pool.clone(), share, wanted, format));
    }
    let (found, next) = match &filter {
        Some(filter) => deliveries::list(&app.pool, filter, after, limit).await?,
        None => (Vec::new(), None),
    };
    let page = Page {
        data: found.iter().map(DeliveryView::from).collect(),
        next_cursor: next.map(|id| pagination::encode(&id)),
    };
    Ok(Json(page).into_response())
}

/// None if the filter names an endpoint or event that does not exist: nothing can match.
async fn filter(app: &Shared, tenant: &Tenant, query: &DeliveryQuery) -> Result<Option<Filter>, Problem> {
    let mut filter = Filter {
        tenant: Some(tenant.id),
        state: query.state.as_deref().map(parse_state).transpose()?,
        since: query
            .since
            .as_deref()
            .map(|t| parse_time("since", t))
            .transpose()?,
        until: query
            .until
            .as_deref()
            .map(|t| parse_time("until", t))
            .transpose()?,
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
    Ok(Some(filter))
}

fn parse_id(text: &str) -> Result<DeliveryId, Problem> {
    text.parse().map_err(|_| Problem::not_found("delivery"))
}

pub(crate) async fn get(
    State(app): State<Shared>,
    Extension(tenant): Extension<Tenant>,
    Path((_, id)): Path<(String, String)>,
) -> Answer<DeliveryWithAttempts> {
    let mut connection = app.pool.acquire().await?;
    Ok(Json(load(&app, &mut connection, &tenant, parse_id(&id)?).await?))
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
        delivery: DeliveryView::from(&delivery),
        url: delivery.url,
        attempts,
    })
}

pub(crate) async fn replay(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    Extension(arrived): Extension<Arrived>,
    Path((_, id)): Path<(String, String)>,
    claim: Claim,
) -> Result<Response, Problem> {
    let id = parse_id(&id)?;
    let asked = Asked { arrived, seen: None };
    let mut work = Work::begin(&app, claim).await?;
    crate::actions::replay::replay(&mut work, &actor, Some(tenant.id), id, asked).await?;
    let delivery = load(&app, &mut work, &tenant, id).await?;
    let response = work.commit(StatusCode::ACCEPTED, &delivery).await?;
    app.wake.now();
    Ok(response)
}
