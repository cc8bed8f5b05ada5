//! Moves of tenants between cells, with their progress.

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use postrider_dispatcher::moves;
use postrider_proto::api::{Move, NewMove};

use super::ApiResult;
use crate::{
    Shared, actions,
    auth::{Actor, Rule::Admin},
    http::{
        input::{Body, Query},
        pagination::{Page, PageQuery, cut},
        problem::Problem,
    },
    openapi::Operation,
};

const MOVE: &str = "/v1/moves/{move}";

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::read(Admin, "/v1/moves", list)
            .named("listMoves", "List moves")
            .describe("Moves of tenants between cells.")
            .returns_page::<Move>("A page of moves, newest first."),
        Operation::post(Admin, "/v1/moves", begin)
            .named("moveTenant", "Move a tenant")
            .describe(
                "Moves a tenant with all its data to another cell, in the background. Its events are accepted meanwhile and \
                 wait; nothing is sent and nothing of it can be changed. Ids stay as they are.",
            )
            .accepts::<NewMove>()
            .returns::<Move>(202, "The move has begun."),
        Operation::get(Admin, MOVE, get)
            .named("getMove", "Retrieve a move")
            .returns::<Move>(200, "The move with its progress."),
        Operation::delete(Admin, MOVE, cancel)
            .named("cancelMove", "Cancel a move")
            .describe("The tenant goes on where it was. Possible until the new cell has taken over.")
            .returns::<Move>(202, "The move is being cancelled."),
    ]
}

async fn list(State(app): State<Shared>, Query(query): Query<PageQuery>) -> ApiResult<Page<Move>> {
    let (limit, before) = (query.limit()?, query.after::<i64>()?.unwrap_or(i64::MAX));
    let rows = moves::list(&app.pool, None, before, limit + 1).await?;
    Ok(Json(cut(rows, limit, |row| row.id).map(actions::moves::view)))
}

async fn begin(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Body(form): Body<NewMove>,
) -> Result<Response, Problem> {
    let begun = actions::moves::begin(&app, &actor, &form).await?;
    let location = format!("/v1/moves/{}", begun.id);
    Ok((StatusCode::ACCEPTED, [(header::LOCATION, location)], Json(begun)).into_response())
}

async fn get(State(app): State<Shared>, Path(id): Path<String>) -> ApiResult<Move> {
    Ok(Json(actions::moves::find(&app, &id).await?))
}

async fn cancel(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Path(id): Path<String>,
) -> Result<Response, Problem> {
    let cancelled = actions::moves::cancel(&app, &actor, &id).await?;
    Ok((StatusCode::ACCEPTED, Json(cancelled)).into_response())
}
