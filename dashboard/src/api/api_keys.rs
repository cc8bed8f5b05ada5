//! API keys: create, list without the secret part, revoke.

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::StatusCode,
    response::Response,
};
use postrider_proto::api::{ApiKey, NewApiKey};

use super::ApiResult;
use crate::{
    Shared,
    actions::api_keys::{end, make},
    auth::{Actor, Rule::Admin},
    http::{
        idempotency::{Claim, Work},
        input::{Body, Query},
        pagination::{Page, PageQuery, cut},
        problem::Problem,
    },
    openapi::Operation,
    tables::api_keys,
};

const KEYS: &str = "/v1/api-keys";

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::post(Admin, KEYS, create)
            .named("createApiKey", "Create an API key")
            .accepts::<NewApiKey>()
            .returns::<ApiKey>(201, "The API key. The key itself is returned only once."),
        Operation::get(Admin, KEYS, list)
            .named("listApiKeys", "List API keys")
            .returns_page::<ApiKey>("A page of API keys, without the keys themselves."),
        Operation::delete(Admin, "/v1/api-keys/{key}", revoke)
            .named("revokeApiKey", "Revoke an API key")
            .returns_nothing("The API key was revoked."),
    ]
}

async fn create(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    claim: Claim,
    Body(form): Body<NewApiKey>,
) -> Result<Response, Problem> {
    let mut work = Work::begin(&app, claim).await?;
    let key = make(&mut work, &actor, form).await?;
    if let Some(tenant) = &key.tenant {
        work.is_of(tenant);
    }
    work.commit(StatusCode::CREATED, &key).await
}

async fn list(State(app): State<Shared>, Query(query): Query<PageQuery>) -> ApiResult<Page<ApiKey>> {
    let (limit, after) = (query.limit()?, query.after::<i32>()?.unwrap_or_default());
    let rows = api_keys::list(&app.pool, after, limit + 1).await?;
    Ok(Json(cut(rows, limit, |row| row.id).map(|row| ApiKey {
        id: row.public_id,
        role: row.role,
        tenant: row.tenant,
        name: row.name,
        created_at: row.created_at,
        revoked_at: row.revoked_at,
        prefix: row.prefix,
        expires_at: row.expires_at,
        last_used_at: row.last_used_at,
        key: None,
    })))
}

async fn revoke(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Path(id): Path<String>,
) -> Result<StatusCode, Problem> {
    end(&app, &actor, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}
