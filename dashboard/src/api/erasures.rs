//! Erasures: the jobs that delete a deleted tenant's data, with their progress.

use axum::{
    Json,
    extract::{Path, State},
};
use postrider_dispatcher::erasure;
use postrider_proto::api::Erasure;

use super::{ApiResult, Partial};
use crate::{
    Shared,
    auth::Rule::Admin,
    http::{
        cells::{Positions, ask, ask_from, interleave, not_responding},
        input::Query,
        pagination::{Page, PageQuery, encode},
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
    if !is_public_id("era", &id) {
        return Err(Problem::not_found("erasure"));
    }
    let answers = ask(&app, move |app| {
        let id = id.clone();
        async move { Ok(erasure::find(&app.pool, &id).await?) }
    })
    .await?;
    let silent = answers.silent.clone();
    match answers.parts().into_iter().flatten().next() {
        Some(found) => Ok(Json(view(found))),
        None if silent.is_empty() => Err(Problem::not_found("erasure")),
        None => Err(not_responding(&silent)),
    }
}

async fn list(
    State(app): State<Shared>,
    Query(query): Query<PageQuery>,
) -> Result<Partial<Page<Erasure>>, Problem> {
    let (limit, before) = (query.limit()?, query.after::<Positions>()?.unwrap_or_default());
    let answers = ask_from(&app, &before, move |app, before| async move {
        Ok(erasure::list(&app.pool, before.unwrap_or(i64::MAX), limit + 1).await?)
    })
    .await?;
    let silent = answers.silent.clone();
    let (rows, next) = interleave(answers.found, &before, limit, |row| row.created_at, |row| row.id);
    let page = Page {
        data: rows.into_iter().map(view).collect(),
        next_cursor: next.map(|next| encode(&next)),
    };
    Ok(Partial::without(page, &silent))
}
