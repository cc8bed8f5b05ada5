//! Cells: which databases the installation has.

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::StatusCode,
};
use postrider_proto::api::{CellSettings, Cells};

use super::ApiResult;
use crate::{
    Shared,
    actions::cells,
    auth::{Actor, Rule::Admin},
    http::{input::Body, problem::Problem},
    openapi::Operation,
};

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get(Admin, "/v1/cells", list)
            .named("listCells", "List cells")
            .describe(
                "The databases of the installation, home first, and whether each responds. There are at most 64. They are added \
                 with `postrider cells add`.",
            )
            .returns::<Cells>(200, "All cells."),
        Operation::put(Admin, "/v1/cells/{cell}", put)
            .named("putCell", "Drain or open a cell")
            .describe(
                "A cell that is `draining` takes no new tenants, and its tenants move to the open cells, each to the one with the \
                 fewest. `GET /v1/moves` shows the progress. `open` ends that; moves that have begun go on.",
            )
            .accepts::<CellSettings>()
            .returns_nothing("The cell has the state."),
    ]
}

async fn list(State(app): State<Shared>) -> ApiResult<Cells> {
    let data = cells::list(&app).await?;
    Ok(Json(Cells { data }))
}

async fn put(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Path(name): Path<String>,
    Body(form): Body<CellSettings>,
) -> Result<StatusCode, Problem> {
    cells::put(&app, &actor, &name, &form).await?;
    Ok(StatusCode::NO_CONTENT)
}
