//! The cells of the installation: which respond, how many tenants each has, and the tenants that move between them.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    extract::Path,
    response::{IntoResponse, Redirect, Response},
};
use postrider_dispatcher::moves;
use postrider_proto::api::{Cell, CellSettings, Move, NewMove};
use serde::Deserialize;

use super::{Done, FormErrors, Frame, Moment, Paged};
use crate::{
    actions::{self, cells},
    auth::{Confirmed, Submitted, Visit},
    http::{input::Query, problem::Problem},
};

const MOVES_SHOWN: i64 = 50;
const DONE: [(&str, &str); 4] = [
    (
        "moving",
        "The tenant is moving. Its events are accepted and wait.",
    ),
    ("cancelled", "The move is being cancelled."),
    (
        "draining",
        "The cell is draining. Its tenants move to the open cells.",
    ),
    ("open", "The cell is open for tenants."),
];

#[derive(Template, WebTemplate)]
#[template(path = "cells.html")]
pub(crate) struct CellsPage {
    frame: Frame,
    cells: Vec<Cell>,
    moves: Vec<Move>,
    form: MoveForm,
    errors: FormErrors,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct MoveForm {
    tenant: String,
    to: String,
}

#[derive(Deserialize)]
pub(crate) struct StateForm {
    state: String,
}

impl CellsPage {
    fn created(&self, cell: &Cell) -> Moment {
        Moment(Some(cell.created_at))
    }

    fn begun(&self, one: &Move) -> Moment {
        Moment(Some(one.created_at))
    }

    /// Whether the new cell has not taken over.
    fn can_be_cancelled(&self, one: &Move) -> bool {
        self.frame.may_administer() && ["stopping", "copying"].contains(&one.state.as_str())
    }
}

pub(crate) async fn show(visit: Visit, Query(query): Query<Done>) -> Paged<CellsPage> {
    let page = load(&visit).await?;
    Ok(CellsPage {
        frame: page.frame.with_done(&query.done, &DONE),
        ..page
    })
}

async fn load(visit: &Visit) -> Result<CellsPage, Problem> {
    let cells = cells::list(&visit.app).await?;
    let silent = cells.iter().filter(|cell| !cell.reachable);
    let silent: Vec<String> = silent.map(|cell| cell.name.clone()).collect();
    let moves = moves::list(&visit.app.pool, None, i64::MAX, MOVES_SHOWN).await?;
    Ok(CellsPage {
        frame: Frame::new(visit.session.clone(), "system").without(&silent),
        cells,
        moves: moves.into_iter().map(actions::moves::view).collect(),
        form: MoveForm::default(),
        errors: FormErrors::default(),
    })
}

pub(crate) async fn move_tenant(visit: Visit, Submitted(form): Submitted<MoveForm>) -> Paged<Response> {
    let wanted = NewMove {
        tenant: form.tenant.trim().to_owned(),
        to: form.to.clone(),
    };
    let begun = actions::moves::begin(&visit.app, &visit.actor, &wanted).await;
    match begun {
        Ok(_) => Ok(Redirect::to("/cells?done=moving").into_response()),
        Err(problem) => {
            let errors = FormErrors::of(problem)?;
            let page = load(&visit).await?;
            Ok((errors.status(), CellsPage { form, errors, ..page }).into_response())
        }
    }
}

pub(crate) async fn cancel_move(visit: Visit, Path(id): Path<String>, _: Confirmed) -> Paged<Redirect> {
    actions::moves::cancel(&visit.app, &visit.actor, &id).await?;
    Ok(Redirect::to("/cells?done=cancelled"))
}

pub(crate) async fn set_state(
    visit: Visit,
    Path(name): Path<String>,
    Submitted(form): Submitted<StateForm>,
) -> Paged<Redirect> {
    let settings = CellSettings { state: form.state };
    cells::put(&visit.app, &visit.actor, &name, &settings).await?;
    Ok(Redirect::to(&format!("/cells?done={}", settings.state)))
}
