//! Adds a cell. Each step can be repeated: after an interruption the same command continues, and the cell is in the directory only
//! when all of it is done.

use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, Connection, PgConnection};

use super::{CELLS_MAX, HOME, SLOT, SUBSCRIPTION};
use crate::{
    bind::BindAll,
    connector::Connector,
    store::schema::{self, SchemaError},
    vault::Vault,
};

/// Until a cell has a copy of the directory.
const COPY_MAX: Duration = Duration::from_secs(120);
const COPY_POLL: Duration = Duration::from_millis(200);
/// A slot can be created once every transaction that was open has ended.
const SLOT_TIMEOUT: &str = "set statement_timeout = '120s'";
const SHORT_LOCKS: &str = "set lock_timeout = '3s'";
/// Held in the home database while a cell is added: "postcell".
const ADD_LOCK: i64 = 0x706f_7374_6365_6c6c;
/// Column lists of publications.
const VERSION_MIN: i32 = 150_000;
const QUERY_CANCELED: &str = "57014";

/// A cell to be added.
pub struct NewCell {
    pub name: String,
    /// The URL of its database, as API processes will connect.
    pub url: String,
    pub database: Connector,
    /// For the subscription, which only a superuser may create. None: the role of the URL is one.
    pub superuser: Option<Connector>,
    /// How the cell's server connects to the home database, for libpq.
    pub home_for_server: String,
}

#[derive(Debug, thiserror::Error)]
pub enum AddError {
    #[error("a cell's name is 1 to 32 of the characters a-z 0-9 -, and does not begin with -; {0:?} is not")]
    Name(String),
    #[error("POSTRIDER_DATABASE_URL leads to a cell: run this on the home database")]
    NotHome,
    #[error("the {0} database's server is Postgres {1}: cells need 15 or newer on both sides")]
    Version(&'static str, String),
    #[error(
        "the home database's server runs with wal_level = {0}: set `wal_level = logical` and restart it. The directory reaches \
         cells by logical replication"
    )]
    WalLevel(String),
    #[error(
        "the role {0} may not create a replication slot on the home database's server: as a superuser there run \
         `alter role {0} replication`"
    )]
    MayNotReplicate(String),
    #[error("this is the home database: a cell needs a database of its own")]
    SameDatabase,
    #[error("there is already a cell {0:?}, with another database")]
    NameTaken(String),
    #[error("this database is already cell {id}, which the directory calls {name:?}")]
    Taken { id: i16, name: String },
    #[error("the database has tenants, keys or people already: a cell begins as an empty database")]
    NotEmpty,
    #[error("there are {CELLS_MAX} cells, which is the limit")]
    TooMany,
    #[error("the schema of the {0} database: {1}")]
    Schema(&'static str, #[source] SchemaError),
    #[error(
        "the subscription can't be created: on Postgres 15 only a superuser may. Set POSTRIDER_CELL_SUPERUSER_URL to a URL of the \
         cell's database with such a role"
    )]
    MayNotSubscribe,
    #[error(
        "the replication slot could not be created within two minutes: it waits for every transaction that is open on the home \
         database's server. End long transactions and run this again"
    )]
    SlotTimeout,
    #[error(
        "the cell's replication slot is lost, and with it what has changed since: docs/cells.md, \"When the replication slot is lost\""
    )]
    SlotLost,
    #[error(
        "the cell has no copy of the directory after {0} seconds. Its server connects with POSTRIDER_REPLICATION_URL; its log says \
         why it can't. Fix that and run this again"
    )]
    NoCopy(u64),
    #[error("the {0} database: {1}")]
    Database(&'static str, #[source] sqlx::Error),
}

fn at_home(error: sqlx::Error) -> AddError {
    AddError::Database("home", error)
}

fn in_cell(error: sqlx::Error) -> AddError {
    AddError::Database("cell's", error)
}

/// Returns the cell's id. `report` is told of each step that is done.
pub async fn add(
    home: &Connector,
    vault: &Vault,
    cell: &NewCell,
    report: impl Fn(&str),
) -> Result<i16, AddError> {
    if !is_name(&cell.name) {
        return Err(AddError::Name(cell.name.clone()));
    }
    let mut home = home.connect().await.map_err(at_home)?;
    let mut new = cell.database.connect().await.map_err(in_cell)?;
    check_home(&mut home).await?;
    check_version(&mut new, "cell's").await?;
    schema::check(&mut home)
        .await
        .map_err(|error| AddError::Schema("home", error))?;
    schema::check(&mut new)
        .await
        .map_err(|error| AddError::Schema("cell's", error))?;
    sqlx::query("select pg_advisory_lock($1)")
        .bind(ADD_LOCK)
        .execute(&mut home)
        .await
        .map_err(at_home)?;
    if !try_lock(&mut new).await.map_err(in_cell)? {
        return Err(AddError::SameDatabase);
    }
    let id = choose_id(&mut home, &mut new, &cell.name).await?;
    become_cell(&mut new, id).await.map_err(in_cell)?;
    report("the cell's ids are its own");
    let subscribed = is_subscribed(&mut new).await.map_err(in_cell)?;
    let slot = publish(&mut home, id, subscribed).await?;
    report("the home database publishes the directory");
    if !subscribed {
        subscribe(cell, &mut new, &slot).await?;
    }
    wait_for_copy(&mut new).await?;
    report("the cell has a copy of the directory");
    register(&mut home, id, cell, vault).await.map_err(at_home)?;
    home.close().await.map_err(at_home)?;
    new.close().await.map_err(in_cell)?;
    Ok(id)
}

fn is_name(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    (1..=32).contains(&name.len()) && name.chars().all(is_part) && !name.starts_with('-')
}

async fn check_home(home: &mut PgConnection) -> Result<(), AddError> {
    check_version(home, "home").await?;
    let (level, role, may): (String, String, bool) = sqlx::query_as(
        "select current_setting('wal_level'), quote_ident(current_user), rolsuper or rolreplication
         from pg_roles where rolname = current_user",
    )
    .fetch_one(&mut *home)
    .await
    .map_err(at_home)?;
    if this_cell(home).await.map_err(at_home)? != HOME {
        return Err(AddError::NotHome);
    }
    if level != "logical" {
        return Err(AddError::WalLevel(level));
    }
    match may {
        true => Ok(()),
        false => Err(AddError::MayNotReplicate(role)),
    }
}

async fn check_version(connection: &mut PgConnection, whose: &'static str) -> Result<(), AddError> {
    let (number, version): (i32, String) = sqlx::query_as(
        "select current_setting('server_version_num')::int, current_setting('server_version')",
    )
    .fetch_one(connection)
    .await
    .map_err(|error| AddError::Database(whose, error))?;
    match number >= VERSION_MIN {
        true => Ok(()),
        false => Err(AddError::Version(whose, version)),
    }
}

async fn this_cell(connection: &mut PgConnection) -> Result<i16, sqlx::Error> {
    sqlx::query_scalar("select id from postrider.this_cell")
        .fetch_one(connection)
        .await
}

/// Advisory locks belong to a database: the one that is held at home can't be taken there again.
async fn try_lock(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("select pg_try_advisory_lock($1)")
        .bind(ADD_LOCK)
        .fetch_one(connection)
        .await
}

/// The id that the database has from an earlier run, or the next one.
async fn choose_id(home: &mut PgConnection, new: &mut PgConnection, name: &str) -> Result<i16, AddError> {
    let before = this_cell(new).await.map_err(in_cell)?;
    let known: Vec<(i16, String)> = sqlx::query_as("select id, name from postrider.cells order by id")
        .fetch_all(&mut *home)
        .await
        .map_err(at_home)?;
    let named = known.iter().find(|(_, known)| known == name).map(|(id, _)| *id);
    if named.is_some_and(|id| id != before || before == HOME) {
        return Err(AddError::NameTaken(name.to_owned()));
    }
    if before != HOME {
        return match known.into_iter().find(|(id, _)| *id == before) {
            Some((id, known)) if known != name => Err(AddError::Taken { id, name: known }),
            _ => Ok(before),
        };
    }
    let is_empty: bool = sqlx::query_scalar(
        "select not exists (select from postrider.tenants) and not exists (select from postrider.api_keys)
            and not exists (select from postrider.people)",
    )
    .fetch_one(new)
    .await
    .map_err(in_cell)?;
    if !is_empty {
        return Err(AddError::NotEmpty);
    }
    let is_free = |id: &i16| !known.iter().any(|(known, _)| known == id);
    (HOME + 1..CELLS_MAX).find(is_free).ok_or(AddError::TooMany)
}

/// From then on the database has no directory of its own.
async fn become_cell(new: &mut PgConnection, id: i16) -> Result<(), sqlx::Error> {
    let mut transaction = new.begin().await?;
    let changed = sqlx::query("update postrider.this_cell set id = $1 where id = 0")
        .bind(id)
        .execute(&mut *transaction)
        .await?;
    if changed.rows_affected() == 1 {
        for table in [
            "delete from postrider.schemas",
            "delete from postrider.event_types",
            "delete from postrider.cells",
        ] {
            sqlx::query(table).execute(&mut *transaction).await?;
        }
        limit_ids(&mut transaction, id).await?;
    }
    transaction.commit().await
}

async fn limit_ids(connection: &mut PgConnection, id: i16) -> Result<(), sqlx::Error> {
    sqlx::query("select postrider.limit_ids($1)")
        .bind(id)
        .execute(connection)
        .await?;
    Ok(())
}

/// Returns the name of the slot. One that a cell has been reading from is not replaced: changes would be missing.
async fn publish(home: &mut PgConnection, id: i16, subscribed: bool) -> Result<String, AddError> {
    sqlx::raw_sql(SHORT_LOCKS)
        .execute(&mut *home)
        .await
        .map_err(at_home)?;
    limit_ids(home, HOME).await.map_err(at_home)?;
    let published: bool = sqlx::query_scalar(
        "select exists (select from pg_publication where pubname = 'postrider_directory')",
    )
    .fetch_one(&mut *home)
    .await
    .map_err(at_home)?;
    if !published {
        sqlx::raw_sql("create publication postrider_directory")
            .execute(&mut *home)
            .await
            .map_err(at_home)?;
    }
    sqlx::raw_sql(include_str!("../../../migrations/cells/directory.sql"))
        .execute(&mut *home)
        .await
        .map_err(at_home)?;
    let slot: String = sqlx::query_scalar(SLOT)
        .bind(id)
        .fetch_one(&mut *home)
        .await
        .map_err(at_home)?;
    let exists: bool = sqlx::query_scalar(
        "select exists (select from pg_replication_slots where slot_name = $1 and wal_status is distinct from 'lost')",
    )
    .bind(&slot)
    .fetch_one(&mut *home)
    .await
    .map_err(at_home)?;
    match (exists, subscribed) {
        (true, _) => Ok(slot),
        (false, true) => Err(AddError::SlotLost),
        (false, false) => create_slot(home, slot).await,
    }
}

async fn create_slot(home: &mut PgConnection, slot: String) -> Result<String, AddError> {
    sqlx::raw_sql(SLOT_TIMEOUT)
        .execute(&mut *home)
        .await
        .map_err(at_home)?;
    let created = sqlx::query("select pg_create_logical_replication_slot($1, 'pgoutput')")
        .bind(&slot)
        .execute(home)
        .await;
    match created {
        Ok(_) => Ok(slot),
        Err(error) if code(&error).as_deref() == Some(QUERY_CANCELED) => Err(AddError::SlotTimeout),
        Err(error) => Err(at_home(error)),
    }
}

fn code(error: &sqlx::Error) -> Option<String> {
    error
        .as_database_error()
        .and_then(|error| error.code())
        .map(String::from)
}

async fn is_subscribed(new: &mut PgConnection) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar(
        "select exists (select from pg_subscription s join pg_database d on d.oid = s.subdbid
                        where d.datname = current_database() and s.subname = $1)",
    )
    .bind(SUBSCRIPTION)
    .fetch_one(new)
    .await
}

/// The slot exists already: where both databases are on one server, creating it here would wait for this transaction.
async fn subscribe(cell: &NewCell, new: &mut PgConnection, slot: &str) -> Result<(), AddError> {
    const INSUFFICIENT_PRIVILEGE: &str = "42501";
    // A statement like this takes no parameters. Postgres itself quotes the values.
    let create: String = sqlx::query_scalar(
        "select format('create subscription %I connection %L publication postrider_directory
                        with (create_slot = false, slot_name = %L, copy_data = true)', $1::text, $2::text, $3::text)",
    )
    .bind_all((SUBSCRIPTION, &cell.home_for_server, slot))
    .fetch_one(&mut *new)
    .await
    .map_err(in_cell)?;
    let created = match &cell.superuser {
        None => sqlx::raw_sql(AssertSqlSafe(create)).execute(new).await,
        Some(superuser) => {
            let mut connection = superuser.connect().await.map_err(in_cell)?;
            sqlx::raw_sql(AssertSqlSafe(create))
                .execute(&mut connection)
                .await
        }
    };
    match created {
        Ok(_) => Ok(()),
        Err(error) if code(&error).as_deref() == Some(INSUFFICIENT_PRIVILEGE) => {
            Err(AddError::MayNotSubscribe)
        }
        Err(error) => Err(in_cell(error)),
    }
}

async fn wait_for_copy(new: &mut PgConnection) -> Result<(), AddError> {
    let began = Instant::now();
    while began.elapsed() < COPY_MAX {
        let ready: bool = sqlx::query_scalar(
            "select coalesce(bool_and(r.srsubstate = 'r'), false)
             from pg_subscription_rel r join pg_subscription s on s.oid = r.srsubid
             join pg_database d on d.oid = s.subdbid
             where d.datname = current_database() and s.subname = $1",
        )
        .bind(SUBSCRIPTION)
        .fetch_one(&mut *new)
        .await
        .map_err(in_cell)?;
        if ready {
            return Ok(());
        }
        tokio::time::sleep(COPY_POLL).await;
    }
    Err(AddError::NoCopy(COPY_MAX.as_secs()))
}

/// From then on it may have tenants. A cell that is added again gets the new address.
async fn register(
    home: &mut PgConnection,
    id: i16,
    cell: &NewCell,
    vault: &Vault,
) -> Result<(), sqlx::Error> {
    let mut transaction = home.begin().await?;
    sqlx::query(
        "insert into postrider.cells (id, name, url) values ($1, $2, $3)
         on conflict (id) do update set url = excluded.url",
    )
    .bind_all((id, &cell.name, vault.seal_cell_url(id, &cell.url)))
    .execute(&mut *transaction)
    .await?;
    sqlx::query(
        "insert into postrider.audit (actor, action, subject, detail)
         values ('operator', 'cell.added', $1, jsonb_build_object('id', $2::smallint))",
    )
    .bind_all((&cell.name, id))
    .execute(&mut *transaction)
    .await?;
    transaction.commit().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_plain() {
        for good in ["a", "eu-1", "0"] {
            assert!(is_name(good), "{good}");
        }
        for bad in ["", "-a", "A", "ü", "a b", &"a".repeat(33)] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
