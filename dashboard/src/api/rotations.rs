//! The rotation status of a tenant's secrets: when each was rotated, until when the old one signs, when the next
//! rotation is due, and whether the receiver has rejected requests since. A sender can't know whether a receiver
//! still needs the old secret; a 401 or 403 since the rotation is the closest indication.

use axum::Json;

use super::ApiResult;
use crate::{
    auth::{Call, Rule::Own},
    http::{
        input::Query,
        pagination::{Page, PageQuery, cut},
    },
    openapi::Operation,
    tables::rotations::{self, Of, RotationRow},
};

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::read(Own, "/v1/tenants/{tenant}/rotations", list)
            .named("listRotations", "List secret rotations")
            .returns_page::<RotationRow>("A page with the rotation status of each endpoint."),
    ]
}

async fn list(call: Call, Query(query): Query<PageQuery>) -> ApiResult<Page<RotationRow>> {
    let (limit, after) = (query.limit()?, query.after::<i32>()?.unwrap_or_default());
    let rows = rotations::list(&call.app.pool, Of::Tenant(call.tenant.id), after, limit + 1).await?;
    Ok(Json(cut(rows, limit, |row| row.number.0)))
}
