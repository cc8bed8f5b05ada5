//! Indexes added to tables in use, built without blocking writers: on a partitioned table one partition at a time.
//! Nothing is recorded: what is left to do is read from the catalog, so that a build that was killed is resumed by the next
//! `migrate`.

use sqlx::{AssertSqlSafe, PgConnection};

use super::{LockTries, SET_LOCK_TIMEOUT, SchemaError};
use crate::bind::BindAll;

/// `create index concurrently` may wait as long as transactions are open: nobody waits behind it.
const UNSET_LOCK_TIMEOUT: &str = "set lock_timeout = 0";
/// Partitions may come and go meanwhile.
const PASSES_MAX: usize = 10;

#[derive(Debug, Clone, Copy)]
pub struct OnlineIndex {
    pub table: &'static str,
    /// Starts with the table's name and an underscore.
    pub name: &'static str,
    /// What follows the table in `create index`: columns and predicate.
    pub definition: &'static str,
}

impl OnlineIndex {
    /// The name of its part on a partition.
    fn part(&self, partition: &str) -> String {
        let suffix = self.name.strip_prefix(self.table).unwrap_or(self.name);
        format!("{partition}_{}", suffix.trim_start_matches('_'))
    }
}

/// Whether `build` has something to do.
pub(super) async fn is_missing(
    connection: &mut PgConnection,
    index: &OnlineIndex,
) -> Result<bool, sqlx::Error> {
    let present: bool = sqlx::query_scalar("select to_regnamespace('postrider') is not null")
        .fetch_one(&mut *connection)
        .await?;
    Ok(!present || is_valid(connection, index.name).await? != Some(true))
}

pub(super) async fn build(connection: &mut PgConnection, index: &OnlineIndex) -> Result<(), SchemaError> {
    let OnlineIndex {
        table,
        name,
        definition,
    } = index;
    if !is_partitioned(connection, table).await? {
        return build_one(connection, table, name, definition).await;
    }
    for _ in 0..PASSES_MAX {
        match is_valid(connection, name).await? {
            Some(true) => return Ok(()),
            Some(false) => {}
            // Invalid until every partition has its part. Partitions created from now on get theirs at once.
            None => {
                let create = format!("create index {name} on only postrider.{table} {definition}");
                execute(connection, &create).await?;
            }
        }
        for partition in partitions_without(connection, index).await? {
            let part = index.part(&partition);
            if let Err(error) = build_part(connection, index, &partition, &part).await {
                // Retention may drop a partition at any time.
                if partitions_without(connection, index).await?.contains(&partition) {
                    return Err(error);
                }
            }
        }
        validate(connection, index).await?;
    }
    Err(SchemaError::Locked)
}

async fn build_part(
    connection: &mut PgConnection,
    index: &OnlineIndex,
    partition: &str,
    part: &str,
) -> Result<(), SchemaError> {
    build_one(connection, partition, part, index.definition).await?;
    attach(connection, index.name, part).await
}

async fn attach(connection: &mut PgConnection, index: &str, part: &str) -> Result<(), SchemaError> {
    let attach = format!("alter index postrider.{index} attach partition postrider.{part}");
    execute(connection, &attach).await
}

/// On one table that is not partitioned.
async fn build_one(
    connection: &mut PgConnection,
    table: &str,
    name: &str,
    definition: &str,
) -> Result<(), SchemaError> {
    let mut tries = LockTries::default();
    loop {
        match is_valid(connection, name).await? {
            Some(true) => return Ok(()),
            // Left behind by a build that was interrupted.
            Some(false) => {
                concurrently(connection, &format!("drop index concurrently postrider.{name}")).await?
            }
            None => {}
        }
        let create = format!("create index concurrently {name} on postrider.{table} {definition}");
        match concurrently(connection, &create).await {
            Ok(()) => {
                tracing::info!(index = name, "index built");
                return Ok(());
            }
            Err(error) => tries.again(error.into()).await?,
        }
    }
}

async fn concurrently(connection: &mut PgConnection, statement: &str) -> Result<(), sqlx::Error> {
    sqlx::query(UNSET_LOCK_TIMEOUT).execute(&mut *connection).await?;
    let done = sqlx::query(AssertSqlSafe(statement))
        .execute(&mut *connection)
        .await;
    sqlx::query(SET_LOCK_TIMEOUT).execute(&mut *connection).await?;
    done.map(|_| ())
}

async fn execute(connection: &mut PgConnection, statement: &str) -> Result<(), SchemaError> {
    let mut tries = LockTries::default();
    while let Err(error) = sqlx::query(AssertSqlSafe(statement))
        .execute(&mut *connection)
        .await
    {
        tries.again(error.into()).await?;
    }
    Ok(())
}

/// Postgres marks the index valid when its last part is attached, not when the last partition without a part is dropped.
/// Attaching a part once more makes it look again.
async fn validate(connection: &mut PgConnection, index: &OnlineIndex) -> Result<(), SchemaError> {
    if is_valid(connection, index.name).await? == Some(true)
        || !partitions_without(connection, index).await?.is_empty()
    {
        return Ok(());
    }
    let part: Option<String> = sqlx::query_scalar(
        "select c.relname::text from pg_inherits i join pg_class c on c.oid = i.inhrelid
         where i.inhparent = to_regclass('postrider.' || $1) limit 1",
    )
    .bind(index.name)
    .fetch_optional(&mut *connection)
    .await?;
    match part {
        Some(part) => attach(connection, index.name, &part).await,
        None => Ok(()),
    }
}

/// None: it does not exist.
async fn is_valid(connection: &mut PgConnection, name: &str) -> Result<Option<bool>, sqlx::Error> {
    sqlx::query_scalar(
        "select i.indisvalid from pg_index i where i.indexrelid = to_regclass('postrider.' || $1)",
    )
    .bind(name)
    .fetch_optional(connection)
    .await
}

async fn is_partitioned(connection: &mut PgConnection, table: &str) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("select c.relkind = 'p' from pg_class c where c.oid = ('postrider.' || $1)::regclass")
        .bind(table)
        .fetch_one(connection)
        .await
}

async fn partitions_without(
    connection: &mut PgConnection,
    index: &OnlineIndex,
) -> Result<Vec<String>, sqlx::Error> {
    sqlx::query_scalar(
        "select c.relname::text from pg_inherits t join pg_class c on c.oid = t.inhrelid
         where t.inhparent = ('postrider.' || $1)::regclass and not t.inhdetachpending
           and not exists (select from pg_inherits i join pg_index x on x.indexrelid = i.inhrelid
                           where i.inhparent = to_regclass('postrider.' || $2) and x.indrelid = c.oid)
         order by 1",
    )
    .bind_all((index.table, index.name))
    .fetch_all(connection)
    .await
}
