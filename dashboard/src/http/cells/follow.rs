//! Opens the cells that home's directory lists, as they appear, and closes those that are removed.

use std::{collections::HashMap, future::Future, pin::Pin, sync::Arc, time::Duration};

use postrider_dispatcher::{Wake, connector::Connector, health::database, sending};
use tokio::{
    sync::{oneshot, watch},
    time::sleep,
};
use tokio_util::sync::CancellationToken;

use super::Cell;
use crate::{
    App, Emits, Pool, Reserves, Shared,
    http::metrics,
    tables::cells::{self, CellRow, HOME},
};

const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Until home has responded for the first time.
const LOOK_FIRST: Duration = Duration::from_millis(200);
const OPEN_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The connections to a cell's database, and how to make more.
pub struct OpenedCell {
    pub reserves: Reserves,
    pub connector: Connector,
}

type Opening = Pin<Box<dyn Future<Output = Result<OpenedCell, String>> + Send>>;

/// Opens the database with this URL.
pub type OpenCell = Arc<dyn Fn(String) -> Opening + Send + Sync>;

/// How a cell is opened, and what is done in it as long as it is.
#[derive(Clone)]
pub(crate) struct Begin {
    pub(crate) open: OpenCell,
    pub(crate) work: fn(Shared, CancellationToken),
}

struct Followed {
    url: Vec<u8>,
    stop: CancellationToken,
}

/// Until `stop`. Says once when the cells are known: before that, requests about their tenants would be served by home.
pub(crate) async fn follow(app: Shared, begin: Begin, known: oneshot::Sender<()>, stop: CancellationToken) {
    let mut known = Some(known);
    if let Some(others) = &app.cells.0 {
        others.home.get_or_init(|| alone(&app));
    }
    let mut followed: HashMap<i16, Followed> = HashMap::new();
    while !stop.is_cancelled() {
        // At home there is nothing to do until it responds.
        if let Ok(rows) = cells::list(&app.lookups).await
            && let Ok(restored) = is_copy(&app, &rows).await
        {
            match restored {
                true => leave(&app, &mut followed, rows),
                false => update(&app, &begin, &mut followed, rows, &stop),
            }
            // Nobody waits any more if the process stops.
            let _ = known.take().map(|known| known.send(()));
        }
        let wait = if known.is_some() { LOOK_FIRST } else { LOOK_EVERY };
        let Some(others) = &app.cells.0 else { return };
        tokio::select! {
            () = sleep(wait) => {}
            () = others.unknown.notified() => {}
            () = stop.cancelled() => {}
        }
    }
}

async fn is_copy(app: &Shared, rows: &[CellRow]) -> sqlx::Result<bool> {
    Ok(rows.len() > 1 && sending::state(&app.lookups).await?.restored)
}

/// A restored copy of home leaves the cells alone: they belong to the installation it is a copy of. To requests, none of them
/// responds.
fn leave(app: &Shared, followed: &mut HashMap<i16, Followed>, rows: Vec<CellRow>) {
    for (_, one) in followed.drain() {
        one.stop.cancel();
    }
    for row in rows.into_iter().filter(|row| row.id != HOME) {
        app.cells.set(Cell { row, app: None });
    }
}

fn update(
    app: &Shared,
    begin: &Begin,
    followed: &mut HashMap<i16, Followed>,
    rows: Vec<CellRow>,
    stop: &CancellationToken,
) {
    followed.retain(|id, one| {
        let is_listed = rows
            .iter()
            .any(|row| row.id == *id && row.url.as_ref() == Some(&one.url));
        if !is_listed {
            one.stop.cancel();
            app.cells.remove(*id);
        }
        is_listed
    });
    for row in rows {
        let Some(url) = row.url.clone().filter(|_| row.id != HOME) else {
            continue;
        };
        if let Some(mut cell) = app.cells.find(row.id).filter(|_| followed.contains_key(&row.id)) {
            cell.row = row;
            app.cells.set(cell);
            continue;
        }
        app.cells.set(Cell {
            row: row.clone(),
            app: None,
        });
        let removed = stop.child_token();
        tokio::spawn(serve(app.clone(), begin.clone(), row.clone(), removed.clone()));
        followed.insert(row.id, Followed { url, stop: removed });
    }
}

/// Opens the cell, again until it succeeds, and watches it until `stop`.
async fn serve(app: Shared, begin: Begin, row: CellRow, stop: CancellationToken) {
    let gauge = metrics::cell_up(&row.name);
    gauge.set(0.0);
    let Some(opened) = stop
        .run_until_cancelled(open_again(&app, &begin.open, &row))
        .await
    else {
        return;
    };
    let (down, is_down) = watch::channel(false);
    let reserves = opened.reserves.of_cell(&is_down);
    let there = app_with(&app, &row, &reserves);
    (begin.work)(there.clone(), stop.clone());
    app.cells.set(Cell {
        app: Some(there),
        row: row.clone(),
    });
    gauge.set(1.0);
    tracing::info!(cell = row.name, "connected to the cell");
    let shown = async {
        let mut is_down = is_down;
        while is_down.changed().await.is_ok() {
            gauge.set(if *is_down.borrow_and_update() { 0.0 } else { 1.0 });
        }
    };
    let name = format!("cell {}", row.name);
    tokio::join!(database::watch_other(opened.connector, &name, down, stop), shown);
    gauge.set(0.0);
    // While the process stops, requests may still use them.
    if !app.stop.is_cancelled() {
        reserves.close().await;
    }
}

async fn open_again(app: &App, open: &OpenCell, row: &CellRow) -> OpenedCell {
    let mut logged = None;
    loop {
        let url = app
            .vault
            .open_cell_url(row.id, row.url.as_deref().unwrap_or_default());
        let opened = match url {
            Ok(url) => open(url).await,
            Err(error) => Err(error.to_string()),
        };
        match opened {
            Ok(opened) => return opened,
            Err(error) if logged.as_ref() != Some(&error) => {
                tracing::warn!(cell = row.name, error, "cannot use the cell; trying again");
                logged = Some(error);
            }
            Err(_) => {}
        }
        sleep(OPEN_AGAIN_AFTER).await;
    }
}

/// The same app for requests that concern home only.
fn alone(home: &Shared) -> Shared {
    Arc::new(App {
        cells: super::Cells::none(),
        cell: Some("home".to_owned()),
        ..App::clone(home)
    })
}

/// The same app with the cell's connections. Sessions and results of forms stay at home.
fn app_with(home: &Shared, row: &CellRow, reserves: &Reserves) -> Shared {
    let pool: Pool = reserves.rest.clone();
    Arc::new(App {
        pool,
        lookups: reserves.lookups.clone(),
        emits: Emits::new(reserves.emits.clone(), Wake::default()).into(),
        // Its dispatchers are other processes.
        wake: Wake::default(),
        cells: super::Cells::none(),
        cell: Some(row.name.clone()),
        ..App::clone(home)
    })
}
