//! Endpoints: where a tenant's events are sent, and how.

use axum::{Json, extract::Path, http::StatusCode, response::Response};
use postrider_proto::{
    EndpointId,
    api::{Endpoint, EndpointSettings},
};
use serde_json::{Value, json};

use super::ApiResult;
use crate::{
    actions::endpoints::{self, NewEndpoint, form::view, health},
    auth::{Call, Rule::Own},
    http::{
        idempotency::{Claim, Work},
        input::{Body, Query},
        pagination::{Page, PageQuery, cut},
        problem::Problem,
    },
    openapi::Operation,
    tables::endpoints as table,
};

const ENDPOINTS: &str = "/v1/tenants/{tenant}/endpoints";
const ENDPOINT: &str = "/v1/tenants/{tenant}/endpoints/{endpoint}";

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::read(Own, ENDPOINTS, list)
            .named("listEndpoints", "List endpoints")
            .returns_page::<Endpoint>("A page of endpoints, in order of creation."),
        Operation::post(Own, ENDPOINTS, create)
            .named("createEndpoint", "Create an endpoint")
            .accepts_part_of::<EndpointSettings>("NewEndpoint", |schema| {
                without(schema, "enabled");
                schema["required"] = json!(["url"]);
            })
            .returns::<Endpoint>(201, "The endpoint with its signing secret."),
        Operation::get(Own, ENDPOINT, get)
            .named("getEndpoint", "Retrieve an endpoint")
            .returns::<Endpoint>(200, "The endpoint."),
        Operation::patch(Own, ENDPOINT, patch)
            .named("updateEndpoint", "Update an endpoint")
            .describe(
                "Omitted fields are left unchanged; null resets a field to its default. `enabled: false` pauses the \
                 endpoint, and its deliveries are queued; `true` resumes or re-enables it. A URL with a new host drops \
                 custom headers unless they are sent again. Responds once the change is in effect.",
            )
            .accepts_part_of::<EndpointSettings>("EndpointUpdate", |schema| without(schema, "secret"))
            .returns::<Endpoint>(200, "The updated endpoint."),
        Operation::delete(Own, ENDPOINT, delete)
            .named("deleteEndpoint", "Delete an endpoint")
            .describe("Responds once no more requests to it are started.")
            .returns_nothing("The endpoint was deleted."),
    ]
}

fn without(schema: &mut Value, property: &str) {
    if let Some(properties) = schema["properties"].as_object_mut() {
        properties.remove(property);
    }
}

async fn create(call: Call, claim: Claim, Body(form): Body<EndpointSettings>) -> Result<Response, Problem> {
    let new = NewEndpoint::read(form, &call.app.guard)?;
    let mut work = Work::begin(&call.app, claim).await?;
    let created = endpoints::create(&call.app, &call.actor, &call.tenant, &mut work, new).await?;
    let view = Endpoint {
        secret: created.shown.secret,
        public_key: created.shown.public_key,
        ..view(&call.app.vault, created.row)
    };
    let response = work.commit(StatusCode::CREATED, &view).await?;
    call.app.wake.now();
    Ok(response)
}

async fn get(call: Call, Path((_, id)): Path<(String, String)>) -> ApiResult<Endpoint> {
    let row = table::find(&call.app.pool, call.tenant.id, &id)
        .await?
        .ok_or_else(|| Problem::not_found("endpoint"))?;
    let health = health::of(&call.app.pool, &[row.id]).await?.remove(&row.id);
    Ok(Json(Endpoint {
        health,
        ..view(&call.app.vault, row)
    }))
}

async fn list(call: Call, Query(query): Query<PageQuery>) -> ApiResult<Page<Endpoint>> {
    let (limit, after) = (query.limit()?, query.after::<i32>()?.unwrap_or_default());
    let rows = table::list(&call.app.pool, call.tenant.id, after, limit + 1).await?;
    let page = cut(rows, limit, |row| row.id.0);
    let ids: Vec<EndpointId> = page.data.iter().map(|row| row.id).collect();
    let mut health = health::of(&call.app.pool, &ids).await?;
    Ok(Json(page.map(|row| Endpoint {
        health: health.remove(&row.id),
        ..view(&call.app.vault, row)
    })))
}

/// Responds once the change is in effect.
async fn patch(
    call: Call,
    Path((_, id)): Path<(String, String)>,
    Body(form): Body<EndpointSettings>,
) -> ApiResult<Endpoint> {
    let row = endpoints::change(&call.app, &call.actor, &call.tenant, &id, form).await?;
    Ok(Json(view(&call.app.vault, row)))
}

/// Responds once no more requests to it are started.
async fn delete(call: Call, Path((_, id)): Path<(String, String)>) -> Result<StatusCode, Problem> {
    endpoints::delete(&call.app, &call.actor, &call.tenant, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}
