//! The cells beside home: the app of each, which has that cell's connections, and questions that all of them are asked.
//! Invariants: a cell that does not respond delays no request by more than `ASK_TIME_MAX`, and no request of another cell at
//! all. Without other cells nothing is looked up and nothing is asked twice.

pub(crate) mod copies;
mod directory;
mod everywhere;
mod follow;

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{Arc, OnceLock, RwLock},
};

use axum::{extract::FromRequestParts, http::request::Parts};
use tokio::sync::Notify;

use crate::{
    App, Shared,
    http::problem::{Kind, Problem},
    tables::cells::{CellRow, HOME},
};

use directory::Directory;
pub(crate) use directory::Purpose;
pub(crate) use everywhere::{Positions, ask, ask_from, ask_within, interleave, merge, part, silent_text};
pub(crate) use follow::{Begin, follow};
pub use follow::{OpenCell, OpenedCell};

/// The cells that an app can ask. That of a single cell asks none.
#[derive(Clone)]
pub struct Cells(Option<Arc<Others>>);

#[derive(Default)]
struct Others {
    cells: RwLock<BTreeMap<i16, Cell>>,
    /// Home without the others; set before the first of them.
    home: OnceLock<Shared>,
    directory: Directory,
    /// Wakes the task that opens cells.
    unknown: Notify,
}

/// A cell beside home.
#[derive(Clone)]
pub(crate) struct Cell {
    pub(crate) row: CellRow,
    /// None until its database was opened.
    app: Option<Shared>,
}

impl Cell {
    /// None while it does not respond.
    pub(crate) fn app(&self) -> Option<&Shared> {
        self.app.as_ref().filter(|app| !app.pool.is_down())
    }
}

impl Default for Cells {
    fn default() -> Self {
        Self(Some(Arc::default()))
    }
}

impl Cells {
    /// Of an app whose requests concern one cell.
    fn none() -> Self {
        Self(None)
    }

    /// Whether there are others than home.
    pub(crate) fn any(&self) -> bool {
        self.0.as_ref().is_some_and(|others| {
            let cells = others.cells.read().unwrap_or_else(|e| e.into_inner());
            !cells.is_empty()
        })
    }

    /// Those beside home.
    pub(crate) fn list(&self) -> Vec<Cell> {
        let Some(others) = &self.0 else {
            return Vec::new();
        };
        let cells = others.cells.read().unwrap_or_else(|e| e.into_inner());
        cells.values().cloned().collect()
    }

    fn find(&self, id: i16) -> Option<Cell> {
        let others = self.0.as_ref()?;
        let cells = others.cells.read().unwrap_or_else(|e| e.into_inner());
        cells.get(&id).cloned()
    }

    fn set(&self, cell: Cell) {
        if let Some(others) = &self.0 {
            let mut cells = others.cells.write().unwrap_or_else(|e| e.into_inner());
            cells.insert(cell.row.id, cell);
        }
    }

    fn remove(&self, id: i16) {
        if let Some(others) = &self.0 {
            let mut cells = others.cells.write().unwrap_or_else(|e| e.into_inner());
            cells.remove(&id);
        }
    }

    /// The tenant was changed: where it lives is looked up again.
    pub(crate) fn forget(&self, slug: &str) {
        if let Some(others) = &self.0 {
            others.directory.forget(slug);
        }
    }

    fn others(&self) -> Option<&Others> {
        self.0.as_deref().filter(|_| self.any())
    }
}

/// What a request runs with: the app of the cell that it concerns, and that of the whole installation.
#[derive(Clone)]
pub(crate) struct Here {
    pub(crate) app: Shared,
    pub(crate) home: Shared,
    /// Events of the tenant are stored at home until its cell takes them.
    pub(crate) waits: bool,
}

impl FromRequestParts<Shared> for Here {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, app: &Shared) -> Result<Self, Infallible> {
        let here = parts.extensions.get().cloned();
        Ok(here.unwrap_or_else(|| Self::anywhere(app)))
    }
}

/// The app of a cell. Requests that concern only home get one that asks no others.
pub(crate) fn app_of(app: &Shared, cell: i16) -> Result<Shared, Problem> {
    let Some(others) = app.cells.others() else {
        return Ok(app.clone());
    };
    if cell == HOME {
        return Ok(others.home.get().unwrap_or(app).clone());
    }
    match app.cells.find(cell) {
        Some(cell) => cell
            .app()
            .cloned()
            .ok_or_else(|| not_responding(&[cell.row.name])),
        // It was added a moment ago.
        None => {
            others.unknown.notify_one();
            Err(Problem::busy())
        }
    }
}

/// The app of the cell with this name; without a name, home's.
pub(crate) fn named(app: &Shared, name: &str) -> Result<Shared, Problem> {
    let cells = app.cells.list();
    let found = cells.iter().find(|cell| cell.row.name == name);
    match found {
        Some(cell) => app_of(app, cell.row.id),
        None if name.is_empty() || name == "home" => app_of(app, HOME),
        None => Err(Problem::not_found("cell")),
    }
}

/// The name of a cell, in an installation that has several.
pub(crate) fn name_of(app: &App, cell: i16) -> Option<String> {
    if app.cell.is_some() {
        return app.cell.clone();
    }
    app.cells.others()?;
    match cell {
        HOME => Some("home".to_owned()),
        _ => app.cells.find(cell).map(|cell| cell.row.name),
    }
}

pub(crate) fn not_responding(cells: &[String]) -> Problem {
    let names = cells.join(", ");
    Problem::new(
        Kind::Busy,
        format!("No response from cell {names}. Try again shortly."),
    )
}
