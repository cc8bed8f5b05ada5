//! Cells: which databases the installation has.

use axum::{Json, extract::State};
use postrider_proto::api::Cells;

use super::ApiResult;
use crate::{Shared, actions::cells, auth::Rule::Admin, openapi::Operation};

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get(Admin, "/v1/cells", list)
            .named("listCells", "List cells")
            .describe(
                "The databases of the installation, home first, and whether each responds. There are at most 64. They are added \
                 with `postrider cells add`.",
            )
            .returns::<Cells>(200, "All cells."),
    ]
}

async fn list(State(app): State<Shared>) -> ApiResult<Cells> {
    let data = cells::list(&app).await?;
    Ok(Json(Cells { data }))
}
