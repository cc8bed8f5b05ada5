//! API keys: create, list without the secret part, revoke.

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::StatusCode,
    response::Response,
};

use super::Answer;
use crate::{
    Shared,
    actions::api_keys::{KeyForm, KeyView, end, make},
    auth::Actor,
    http::{
        idempotency::{Claim, Work},
        input::{Body, Query},
        pagination::{Page, PageQuery},
        problem::Problem,
    },
    tables::api_keys,
};

pub(crate) async fn create(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    claim: Claim,
    Body(form): Body<KeyForm>,
) -> Result<Response, Problem> {
    let mut work = Work::begin(&app, claim).await?;
    let view = make(&mut work, &actor, form).await?;
    if let Some(tenant) = &view.tenant {
        work.is_of(tenant);
    }
    work.commit(StatusCode::CREATED, &view).await
}

pub(crate) async fn list(State(app): State<Shared>, Query(query): Query<PageQuery>) -> Answer<Page<KeyView>> {
    let (limit, after) = (query.limit()?, query.after::<i32>()?.unwrap_or_default());
    let rows = api_keys::list(&app.pool, after, limit + 1).await?;
    Ok(Json(Page::cut(rows, limit, |row| row.id).map(|row| KeyView {
        id: row.public_id,
        role: row.role,
        tenant: row.tenant,
        name: row.name,
        created_at: row.created_at,
        revoked_at: row.revoked_at,
        key: None,
    })))
}

pub(crate) async fn revoke(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Path(id): Path<String>,
) -> Result<StatusCode, Problem> {
    end(&app, &actor, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}
