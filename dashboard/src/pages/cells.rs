//! The cells of the installation: which respond, and how many tenants each has.

use askama::Template;
use askama_web::WebTemplate;
use postrider_proto::api::Cell;

use super::{Frame, Moment, Paged};
use crate::{actions::cells, auth::Visit};

#[derive(Template, WebTemplate)]
#[template(path = "cells.html")]
pub(crate) struct CellsPage {
    frame: Frame,
    cells: Vec<Cell>,
}

impl CellsPage {
    fn created(&self, cell: &Cell) -> Moment {
        Moment(Some(cell.created_at))
    }
}

pub(crate) async fn show(visit: Visit) -> Paged<CellsPage> {
    let cells = cells::list(&visit.app).await?;
    let silent = cells.iter().filter(|cell| !cell.reachable);
    let silent: Vec<String> = silent.map(|cell| cell.name.clone()).collect();
    Ok(CellsPage {
        frame: Frame::new(visit.session, "system").without(&silent),
        cells,
    })
}
