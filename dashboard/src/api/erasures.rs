//! Erasures: the jobs that delete a deleted tenant's data, with their progress.

use axum::{
    Json,
    extract::{Path, State},
};
use postrider_dispatcher::erasure;
use postrider_proto::api::Erasure;

use super::ApiResult;
use crate::{
    Shared,
    auth::Rule::Admin,
    http::{
        input::Query,
        pagination::{Page, PageQuery, cut},
        problem::Problem,
    },
    openapi::Operation,
    tables::is_public_id,
};

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::read(Admin, "/v1/erasures", list)
            .named("listErasures", "List erasures")
            .describe("Jobs that erase the data of deleted tenants.")
            .returns_page::<Erasure>("A page of erasures, newest first."),
        Operation::get(Admin, "/v1/erasures/{erasure}", get)
            .named("getErasure", "Retrieve an erasure")
            .returns::<Erasure>(200, "The erasure with its progress."),
    ]
}

fn view(row: erasure::Erasure) -> Erasure {
    let state = if row.ended_at.is_some() { "done" } else { "running" };
    Erasure {
        id: row.public_id,
        tenant: row.slug,
        state: state.to_owned(),
        total: row.total.max(row.done),
        done: row.done,
        created_by: row.asked_by,
        created_at: row.created_at,
        ended_at: row.ended_at,
    }
}

async fn get(State(app): State<Shared>, Path(id): Path<String>) -> ApiResult<Erasure> {
    let found = match is_public_id("era", &id) {
        true => erasure::find(&app.pool, &id).await?,
        false => None,
    };
    let found = found.ok_or_else(|| Problem::not_found("erasure"))?;
    Ok(Json(view(found)))
}

async fn list(State(app): State<Shared>, Query(query): Query<PageQuery>) -> ApiResult<Page<Erasure>> {
    let (limit, before) = (query.limit()?, query.after::<i64>()?.unwrap_or(i64::MAX));
    let rows = erasure::list(&app.pool, before, limit + 1).await?;
    Ok(Json(cut(rows, limit, |row| row.id).map(view)))
}
