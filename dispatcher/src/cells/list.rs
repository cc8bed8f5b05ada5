//! What home knows of each cell, and whether it responds.

use std::time::Duration;

use serde::Serialize;
use sqlx::{Connection, FromRow, PgConnection};
use tokio::task::JoinSet;

use super::HOME;
use crate::{
    connector::{Access, Connector},
    db_timeout::within,
    vault::Vault,
};

/// Events in the outbox that are counted.
pub const COUNTED_MAX: i64 = 10_000;
const REACH_MAX: Duration = Duration::from_secs(3);

#[derive(Debug, FromRow)]
struct Row {
    id: i16,
    name: String,
    state: String,
    url: Option<Vec<u8>>,
    tenants: i64,
    outbox: i64,
    follows: Option<bool>,
    behind_bytes: Option<i64>,
    wal_status: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Cell {
    pub id: i16,
    pub name: String,
    pub state: String,
    pub tenants: i64,
    /// Events that wait at home for its relay, up to [`COUNTED_MAX`].
    pub outbox: i64,
    /// How its copy of the directory is doing: `up to date`, or what is wrong.
    pub directory: String,
    /// What its database says, or the error.
    pub database: String,
}

/// Asks all cells at once.
pub async fn list(home: &mut PgConnection, vault: &Vault) -> Result<Vec<Cell>, sqlx::Error> {
    let rows: Vec<Row> = sqlx::query_as(include_str!("sql/list.sql"))
        .bind(COUNTED_MAX)
        .fetch_all(home)
        .await?;
    let mut asked = JoinSet::new();
    for row in rows {
        let address = row.address(vault);
        asked.spawn(async move {
            let database = match address {
                Ok(connector) => ask(&connector, row.id).await,
                Err(reason) => reason.to_owned(),
            };
            row.cell(database)
        });
    }
    let mut cells = asked.join_all().await;
    cells.sort_by_key(|cell| cell.id);
    Ok(cells)
}

impl Row {
    fn cell(self, database: String) -> Cell {
        Cell {
            directory: self.directory(),
            database,
            id: self.id,
            name: self.name,
            state: self.state,
            tenants: self.tenants,
            outbox: self.outbox,
        }
    }

    fn directory(&self) -> String {
        const BEHIND_BYTES: i64 = 16 << 20;
        match (self.id, self.follows, self.behind_bytes) {
            (HOME, ..) => "here".to_owned(),
            (_, None, _) => "no replication slot".to_owned(),
            (_, Some(_), _) if self.wal_status.as_deref() == Some("lost") => {
                "replication slot lost".to_owned()
            }
            (_, Some(false), _) => "not connected".to_owned(),
            (_, Some(true), Some(bytes)) if bytes > BEHIND_BYTES => format!("{} MiB behind", bytes >> 20),
            (_, Some(true), _) => "up to date".to_owned(),
        }
    }

    /// Or why there is nobody to ask.
    fn address(&self, vault: &Vault) -> Result<Connector, &'static str> {
        let sealed = match (&self.url, self.id) {
            (Some(sealed), _) => sealed,
            (None, HOME) => return Err("here"),
            (None, _) => return Err("no address"),
        };
        let url = vault
            .open_cell_url(self.id, sealed)
            .map_err(|_| "the address is encrypted with another master key")?;
        Connector::parse(&url, Access::Writes).map_err(|_| "invalid address")
    }
}

async fn ask(cell: &Connector, id: i16) -> String {
    match within(REACH_MAX, dispatchers(cell, id)).await {
        Ok(None) => "the address leads to another cell".to_owned(),
        Ok(Some(0)) => "no dispatcher is running".to_owned(),
        Ok(Some(1)) => "1 dispatcher".to_owned(),
        Ok(Some(count)) => format!("{count} dispatchers"),
        Err(error) => format!("does not respond: {error}"),
    }
}

/// How many run; none if this is another cell.
async fn dispatchers(cell: &Connector, id: i16) -> Result<Option<i64>, sqlx::Error> {
    let mut connection = cell.connect().await?;
    let (found, count): (i16, i64) = sqlx::query_as(
        "select c.id, (select count(*) from postrider.dispatchers d where d.expires_at > clock_timestamp())
         from postrider.this_cell c",
    )
    .fetch_one(&mut connection)
    .await?;
    connection.close().await?;
    Ok((found == id).then_some(count))
}
