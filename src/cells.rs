//! `cells`: adds cells and lists them. `postrider_dispatcher::cells` does the work.

use anyhow::Context;
use clap::{Args, Subcommand};
use postrider_dispatcher::cells::{
    add::{self, NewCell},
    list::{self, COUNTED_MAX, Cell},
    state::{self, State},
};
use serde_json::json;
use sqlx::Connection;

use crate::{
    connect, roles,
    settings::{Flags, SettingError, Settings},
};

#[derive(Args)]
pub(crate) struct CellsArguments {
    #[command(flatten)]
    pub(crate) flags: Flags,
    #[command(subcommand)]
    command: CellsCommand,
}

#[derive(Subcommand)]
enum CellsCommand {
    /// Add the empty database of POSTRIDER_CELL_DATABASE_URL as a cell; can be repeated after an interruption
    Add {
        /// 1 to 32 of the characters a-z 0-9 -
        name: String,
    },
    /// Move all tenants of a cell to the others, two at a time; `list` shows how many are left
    Drain { name: String },
    /// End a drain: the cell takes new tenants again
    Open { name: String },
    /// List the cells, whether they respond, and what waits for them
    List {
        /// Output JSON
        #[arg(long)]
        json: bool,
    },
}

pub(crate) async fn run(arguments: &CellsArguments, settings: &Settings) -> anyhow::Result<()> {
    match &arguments.command {
        CellsCommand::Add { name } => add(name, settings).await,
        CellsCommand::Drain { name } => set_state(name, State::Draining, settings).await,
        CellsCommand::Open { name } => set_state(name, State::Open, settings).await,
        CellsCommand::List { json } => list(*json, settings).await,
    }
}

async fn add(name: &str, settings: &Settings) -> anyhow::Result<()> {
    let home = &settings.require_database()?.direct;
    let vault = settings.require_vault()?;
    let values = &settings.values;
    let cell = values
        .cell_database_url
        .as_ref()
        .ok_or(SettingError::Missing("POSTRIDER_CELL_DATABASE_URL"))?;
    let replication = values
        .replication_url
        .as_ref()
        .ok_or(SettingError::Missing("POSTRIDER_REPLICATION_URL"))?;
    let pool = connect::pool(&cell.connector, "cells").await?;
    roles::bring_up_to_date(&pool, settings.dispatcher.retention)
        .await
        .context("cannot bring the cell's schema up to date")?;
    pool.close().await;
    println!("The cell's schema is up to date.");
    let new = NewCell {
        name: name.to_owned(),
        url: cell.text.clone(),
        database: cell.connector.clone(),
        superuser: values.cell_superuser_url.clone(),
        home_for_server: replication.clone(),
    };
    let id = add::add(home, &vault, &new, |step| println!("Done: {step}.")).await?;
    println!(
        "Cell {name} has id {id} and is open for tenants. Start its dispatchers with its database as POSTRIDER_DATABASE_URL and \
         this one as POSTRIDER_HOME_DATABASE_URL."
    );
    Ok(())
}

async fn set_state(name: &str, state: State, settings: &Settings) -> anyhow::Result<()> {
    let home = &settings.require_database()?.direct;
    let mut home = home.connect().await.context("cannot connect to the database")?;
    state::set(&mut home, name, state).await?;
    home.close().await?;
    match state {
        State::Draining => {
            println!("Cell {name} is draining: a dispatcher at home moves its tenants to the open cells.")
        }
        State::Open => println!("Cell {name} is open."),
    }
    Ok(())
}

async fn list(as_json: bool, settings: &Settings) -> anyhow::Result<()> {
    let vault = settings.require_vault()?;
    let mut home = settings
        .require_database()?
        .direct
        .connect()
        .await
        .context("cannot connect to the database")?;
    let cells = list::list(&mut home, &vault).await?;
    home.close().await?;
    if as_json {
        println!("{}", json!({ "cells": cells }));
        return Ok(());
    }
    println!(
        "{:<4}{:<20}{:<10}{:<9}{:<8}{:<22}DATABASE",
        "ID", "NAME", "STATE", "TENANTS", "OUTBOX", "DIRECTORY"
    );
    for cell in &cells {
        print(cell);
    }
    Ok(())
}

fn print(cell: &Cell) {
    let Cell {
        id,
        name,
        state,
        tenants,
        directory,
        database,
        ..
    } = cell;
    let outbox = match cell.outbox {
        COUNTED_MAX => format!("{COUNTED_MAX}+"),
        fewer => fewer.to_string(),
    };
    println!("{id:<4}{name:<20}{state:<10}{tenants:<9}{outbox:<8}{directory:<22}{database}");
}
