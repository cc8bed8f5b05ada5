//! Tenants: the customers of the team that runs Postrider.

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use postrider_proto::api::{self, TenantPause, TenantSettings};

use super::ApiResult;
use crate::{
    App, Shared,
    actions::tenants::{self, remove, store},
    auth::{
        Actor, Call,
        Rule::{Admin, Own},
    },
    http::{
        cells::name_of,
        input::{OptionalBody, Query},
        pagination::{Page, PageQuery, cut},
        problem::Problem,
    },
    openapi::Operation,
    tables::{self, tenants::TenantRow},
};

const TENANT: &str = "/v1/tenants/{tenant}";
const PAUSE: &str = "/v1/tenants/{tenant}/pause";

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::read(Admin, "/v1/tenants", list)
            .named("listTenants", "List tenants")
            .returns_page::<api::Tenant>("A page of tenants, ordered by id."),
        Operation::put(Admin, TENANT, put)
            .named("putTenant", "Create or update a tenant")
            .describe(
                "Replaces all settings: a setting that is omitted is reset to its default. The cell of a tenant is chosen when \
                 it is created, and stays.",
            )
            .may_accept::<TenantSettings>()
            .returns::<api::Tenant>(201, "The tenant was created.")
            .returns::<api::Tenant>(200, "The tenant was updated."),
        Operation::get(Own, TENANT, get)
            .named("getTenant", "Retrieve a tenant")
            .returns::<api::Tenant>(200, "The tenant."),
        Operation::delete(Admin, TENANT, delete)
            .named("deleteTenant", "Delete a tenant")
            .describe(
                "Deletes the tenant with its endpoints and revokes its keys. Responds once nothing more is sent for it. A \
                 background job erases its stored data: `Location` points to its progress.",
            )
            .returns_nothing("The tenant was deleted."),
        Operation::put(Admin, PAUSE, pause)
            .named("pauseTenant", "Pause a tenant")
            .describe(
                "Stops sending to all endpoints of the tenant. Events are queued and nothing is lost. Responds once no more \
                 requests are started. If the tenant is paused already, the time and the reason of the first pause are kept; \
                 the audit log has both.",
            )
            .may_accept::<TenantPause>()
            .returns::<api::Tenant>(200, "The tenant is paused."),
        Operation::delete(Admin, PAUSE, resume)
            .named("resumeTenant", "Resume a tenant")
            .describe("Sends what was queued. Endpoints that are paused themselves stay paused.")
            .returns_nothing("The tenant is not paused."),
    ]
}

fn view(app: &App, row: TenantRow) -> api::Tenant {
    api::Tenant {
        cell: name_of(app, row.cell_id),
        id: row.slug,
        name: row.name,
        rotate_every_days: row.rotate_every_days,
        retention_days: row.retention_days,
        all_operational_events: row.all_operational_events,
        paused_at: row.paused_at,
        pause_reason: row.pause_reason,
        created_at: row.created_at,
    }
}

async fn put(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Path(slug): Path<String>,
    OptionalBody(form): OptionalBody<TenantSettings>,
) -> Result<Response, Problem> {
    let (row, is_new) = store(&app, &actor, &slug, form).await?;
    let status = if is_new {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    Ok((status, Json(view(&app, row))).into_response())
}

async fn pause(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Path(slug): Path<String>,
    OptionalBody(form): OptionalBody<TenantPause>,
) -> ApiResult<api::Tenant> {
    let row = tenants::pause(&app, &actor, &slug, form.reason.as_deref()).await?;
    Ok(Json(view(&app, row)))
}

async fn resume(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Path(slug): Path<String>,
) -> Result<StatusCode, Problem> {
    tenants::resume(&app, &actor, &slug).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn get(call: Call) -> ApiResult<api::Tenant> {
    let row = tables::tenants::find(&call.app.pool, &call.tenant.slug)
        .await?
        .ok_or_else(|| Problem::not_found("tenant"))?;
    Ok(Json(view(&call.app, row)))
}

/// Deletes the tenant with its endpoints and revokes its keys. Responds once nothing more is sent for it; `Location`
/// points to the job that erases its stored data.
async fn delete(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Path(slug): Path<String>,
) -> Result<Response, Problem> {
    let erasure = remove(&app, &actor, &slug).await?;
    let location = format!("/v1/erasures/{erasure}");
    Ok((StatusCode::NO_CONTENT, [(header::LOCATION, location)]).into_response())
}

async fn list(State(app): State<Shared>, Query(query): Query<PageQuery>) -> ApiResult<Page<api::Tenant>> {
    let (limit, after) = (query.limit()?, query.after::<String>()?.unwrap_or_default());
    let rows = tables::tenants::list(&app.pool, &after, limit + 1).await?;
    Ok(Json(
        cut(rows, limit, |row| row.slug.clone()).map(|row| view(&app, row)),
    ))
}
