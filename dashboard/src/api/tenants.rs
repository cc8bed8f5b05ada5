//! Tenants: the customers of the team that runs Postrider.

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use chrono::{DateTime, Utc};
use serde::Serialize;
use utoipa::ToSchema;

use super::Answer;
use crate::{
    Shared,
    actions::tenants::{TenantForm, remove, store},
    auth::{Actor, Tenant},
    http::{
        input::{OptionalBody, Query},
        pagination::{Page, PageQuery},
        problem::Problem,
    },
    tables::{self, tenants::TenantRow},
};

#[derive(Serialize, ToSchema)]
#[schema(as = Tenant)]
pub(crate) struct TenantView {
    id: String,
    name: Option<String>,
    rotate_every_days: Option<i16>,
    retention_days: Option<i16>,
    all_operational_events: bool,
    created_at: DateTime<Utc>,
}

impl From<TenantRow> for TenantView {
    fn from(row: TenantRow) -> Self {
        Self {
            id: row.slug,
            name: row.name,
            rotate_every_days: row.rotate_every_days,
            retention_days: row.retention_days,
            all_operational_events: row.all_operational_events,
            created_at: row.created_at,
        }
    }
}

pub(crate) async fn put(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Path(slug): Path<String>,
    OptionalBody(form): OptionalBody<TenantForm>,
) -> Result<Response, Problem> {
    let (row, is_new) = store(&app, &actor, &slug, form).await?;
    let status = if is_new {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    Ok((status, Json(TenantView::from(row))).into_response())
}

pub(crate) async fn get(
    State(app): State<Shared>,
    Extension(tenant): Extension<Tenant>,
) -> Answer<TenantView> {
    let row = tables::tenants::find(&app.pool, &tenant.slug)
        .await?
        .ok_or_else(|| Problem::not_found("tenant"))?;
    Ok(Json(row.into()))
}

/// Deletes the tenant with its endpoints and revokes its keys. Responds once nothing more is sent for it; `Location`
/// points to the job that erases its stored data.
pub(crate) async fn delete(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Path(slug): Path<String>,
) -> Result<Response, Problem> {
    let erasure = remove(&app, &actor, &slug).await?;
    let location = format!("/v1/erasures/{erasure}");
    Ok((StatusCode::NO_CONTENT, [(header::LOCATION, location)]).into_response())
}

pub(crate) async fn list(
    State(app): State<Shared>,
    Query(query): Query<PageQuery>,
) -> Answer<Page<TenantView>> {
    let (limit, after) = (query.limit()?, query.after::<String>()?.unwrap_or_default());
    let rows = tables::tenants::list(&app.pool, &after, limit + 1).await?;
    Ok(Json(
        Page::cut(rows, limit, |row| row.slug.clone()).map(TenantView::from),
    ))
}
