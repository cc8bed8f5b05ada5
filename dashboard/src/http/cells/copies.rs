//! What was changed at home reaches the cells a moment later. Responses wait for that, so that whoever gets one can rely on it.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{Cell, not_responding};
use crate::{
    Shared,
    http::problem::{Kind, Problem},
    tables::cells::{self, Copied, HOME},
};

const WAIT_MAX: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Returns once the tenant's cell has the tenant as it is at home.
pub(crate) async fn of_tenant(app: &Shared, tenant: Copied, cell: i16) -> Result<(), Problem> {
    if cell == HOME || !app.cells.any() {
        return Ok(());
    }
    let Some(cell) = app.cells.find(cell) else {
        return Err(pending(&["a new cell".to_owned()]));
    };
    wait(app, tenant, &[cell]).await
}

/// Returns once all cells that respond have it. The others get it before they take events again.
pub(crate) async fn of_all(app: &Shared, what: Copied) -> Result<(), Problem> {
    let cells: Vec<Cell> = app.cells.list();
    let up: Vec<Cell> = cells.into_iter().filter(|cell| cell.app().is_some()).collect();
    wait(app, what, &up).await
}

async fn wait(app: &Shared, what: Copied, cells: &[Cell]) -> Result<(), Problem> {
    let deadline = Instant::now() + WAIT_MAX;
    for cell in cells {
        let name = || vec![cell.row.name.clone()];
        let Some(there) = cell.app() else {
            return Err(pending(&name()));
        };
        while cells::digest(&there.pool, what)
            .await
            .map_err(|_| not_responding(&name()))?
            != cells::digest(&app.pool, what).await?
        {
            if Instant::now() >= deadline {
                return Err(pending(&name()));
            }
            sleep(LOOK_EVERY).await;
        }
    }
    Ok(())
}

fn pending(cells: &[String]) -> Problem {
    Problem::new(
        Kind::ChangePending,
        format!(
            "The change is stored, but it has not reached {} yet. Check the current state before you repeat the request.",
            cells.join(", ")
        ),
    )
}
