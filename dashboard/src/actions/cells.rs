//! The cells of an installation, and how each of them is.

use std::collections::HashMap;

use postrider_dispatcher::{
    cells::state::{self, State, StateError},
    sending,
};
use postrider_proto::api::{Cell, CellSettings};
use serde_json::json;

use crate::{
    Shared,
    auth::Actor,
    http::{cells::ask, problem::Problem},
    tables::{
        self, activity,
        audit::{self, Action, Entry},
        cells,
    },
};

const DISPATCHERS_COUNTED_MAX: i64 = 1_000;

/// Home first.
pub(crate) async fn list(app: &Shared) -> Result<Vec<Cell>, Problem> {
    let rows = cells::list(&app.pool).await?;
    let tenants: HashMap<i16, i64> = cells::tenants(&app.pool).await?.into_iter().collect();
    let answers = ask(app, |app| async move {
        let stopped = sending::state(&app.pool).await?.stopped;
        let dispatchers = activity::dispatchers(&app.pool, DISPATCHERS_COUNTED_MAX).await?;
        Ok((stopped, dispatchers.len() as i64))
    })
    .await?;
    let states: HashMap<i16, (bool, i64)> = answers.found.into_iter().collect();
    let view = |row: cells::CellRow| {
        let state = states.get(&row.id);
        Cell {
            tenants: tenants.get(&row.id).copied().unwrap_or_default(),
            reachable: state.is_some(),
            sending_stopped: state.map(|(stopped, _)| *stopped),
            dispatchers: state.map(|(_, dispatchers)| *dispatchers),
            name: row.name,
            state: row.state,
            created_at: row.created_at,
        }
    };
    Ok(rows.into_iter().map(view).collect())
}

/// Drains a cell, or opens it again.
pub(crate) async fn put(app: &Shared, actor: &Actor, name: &str, form: &CellSettings) -> Result<(), Problem> {
    let state = State::parse(&form.state)
        .ok_or_else(|| Problem::invalid("/state", "must be `open` or `draining`"))?;
    let mut transaction = tables::begin(&app.pool).await?;
    match state::set(&mut transaction, name, state).await {
        Err(StateError::NoCell) => return Err(Problem::not_found("cell")),
        Err(refused @ StateError::LastOpen) => return Err(Problem::conflict(format!("{refused}."))),
        Err(StateError::Database(error)) => return Err(error.into()),
        Ok(()) => {}
    }
    let entry = Entry::new(actor, Action::CellPut, None, name).with(json!({"state": form.state}));
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    Ok(())
}
