//! Quotas of tenants.

use axum::{
    Extension, Json,
    extract::{Path, State},
};
use postrider_proto::api::{QuotaSettings, Quotas};

use super::ApiResult;
use crate::{
    Shared,
    actions::quotas::{self, view},
    auth::{
        Actor, Call,
        Rule::{Admin, Own},
    },
    http::input::Body,
    openapi::Operation,
    tables,
};

const QUOTAS: &str = "/v1/tenants/{tenant}/quotas";

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get(Own, QUOTAS, get)
            .named("getQuotas", "Retrieve a tenant's quotas and usage")
            .returns::<Quotas>(200, "The quotas, and how much of them is used."),
        Operation::put(Admin, QUOTAS, put)
            .named("putQuotas", "Set a tenant's quotas")
            .describe(
                "Null is unlimited, which is the default. Beyond a quota, emits are rejected with 429 and the type \
                 `urn:postrider:problem:emit-quota-exceeded` or `urn:postrider:problem:storage-quota-exceeded`, and in SQL with \
                 SQLSTATE `PR429` or `PR507`. An event that was emitted before is not rejected again.",
            )
            .accepts::<QuotaSettings>()
            .returns::<Quotas>(200, "The quotas, and how much of them is used."),
    ]
}

async fn get(call: Call) -> ApiResult<Quotas> {
    let row = tables::quotas::find(&call.app.pool, call.tenant.id).await?;
    Ok(Json(view(&row)))
}

async fn put(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Path(slug): Path<String>,
    Body(form): Body<QuotaSettings>,
) -> ApiResult<Quotas> {
    let row = quotas::put(&app, &actor, &slug, &form).await?;
    Ok(Json(view(&row)))
}
