//! The functions of the schema, and their triggers. Unlike tables they have no history: each file holds the current text, and is
//! applied again whenever its checksum changes or someone has changed one of its functions or triggers in the database.

use std::borrow::Cow;

use sha2::{Digest, Sha256};
use sqlx::{AssertSqlSafe, Connection, FromRow, PgConnection};

use super::{SchemaSet, with_full_names};
use crate::bind::BindAll;

/// A file of `migrations/functions/`.
#[derive(Debug, Clone)]
pub struct FunctionFile {
    pub name: &'static str,
    pub sql: Cow<'static, str>,
}

macro_rules! files {
    ($folder:literal: $($name:literal),+) => {
        vec![$(FunctionFile {
            name: $name,
            sql: Cow::Borrowed(include_str!(concat!("../../../../migrations/", $folder, "/", $name, ".sql"))),
        }),+]
    };
}

pub(super) fn main() -> Vec<FunctionFile> {
    files!("functions": "event_ids", "emit", "notices", "changes", "quotas", "switches", "cells", "moves")
}

pub(super) fn outbox() -> Vec<FunctionFile> {
    files!("outbox/functions": "emit")
}

const CREATE_TABLE: &str = "create table if not exists postrider.function_versions (
    file       text primary key,
    checksum   bytea not null,              -- sha-256 of the file
    installed  text not null,               -- hash of its functions and triggers as Postgres shows them
    release    int[] not null,              -- of the program that applied it
    applied_at timestamptz not null default clock_timestamp()
)";

#[derive(Debug, FromRow)]
struct Applied {
    file: String,
    checksum: Vec<u8>,
    installed: String,
    release: Vec<i32>,
}

/// A function before the files are applied.
#[derive(Debug, FromRow)]
struct Existing {
    oid: sqlx::postgres::types::Oid,
    name: String,
    /// The roles that may execute it, quoted.
    grantees: Vec<String>,
}

impl FunctionFile {
    const CREATE: &str = "create or replace function postrider.";
    const CREATE_TRIGGER: &str = "create or replace trigger ";
    /// What a hash starts with. Those of the first release had no prefix: they left out the triggers, and names were shown as the
    /// role that migrated would see them.
    const HASH_VERSION: &str = "2:";

    fn checksum(&self) -> Vec<u8> {
        Sha256::digest(self.sql.as_bytes()).to_vec()
    }

    /// The names of the functions it creates.
    fn functions(&self) -> Vec<&str> {
        let created = self.sql.split(Self::CREATE).skip(1);
        let names = created.filter_map(|text| text.split('(').next());
        names.map(str::trim).collect()
    }

    /// The names of the triggers it creates.
    fn triggers(&self) -> Vec<&str> {
        let created = self.sql.split(Self::CREATE_TRIGGER).skip(1);
        created
            .filter_map(|text| text.split_whitespace().next())
            .collect()
    }

    /// The hash of what is in the database. A trigger that is disabled is not the same.
    async fn installed(&self, connection: &mut PgConnection) -> Result<String, sqlx::Error> {
        let mut transaction = with_full_names(connection).await?;
        let hash: String = sqlx::query_scalar(
            "select md5(coalesce(string_agg(d.text, '' order by d.text collate \"C\"), '')) from (
                 select pg_get_functiondef(p.oid) from pg_proc p
                 where p.pronamespace = 'postrider'::regnamespace and p.proname = any($1)
                 union all
                 select pg_get_triggerdef(g.oid) || ' ' || g.tgenabled::text
                 from pg_trigger g join pg_class c on c.oid = g.tgrelid
                 where c.relnamespace = 'postrider'::regnamespace and g.tgparentid = 0 and not g.tgisinternal
                   and g.tgname = any($2)
             ) d (text)",
        )
        .bind_all((self.functions(), self.triggers()))
        .fetch_one(&mut *transaction)
        .await?;
        transaction.rollback().await?;
        Ok(format!("{}{hash}", Self::HASH_VERSION))
    }

    /// As the first release did it, for a role that is named like the schema or not.
    async fn installed_without_version(
        &self,
        connection: &mut PgConnection,
        search_path: &str,
    ) -> Result<String, sqlx::Error> {
        let mut transaction = connection.begin().await?;
        sqlx::query("select set_config('search_path', $1, true)")
            .bind(search_path)
            .execute(&mut *transaction)
            .await?;
        let hash = sqlx::query_scalar(
            "select md5(coalesce(string_agg(f.text, '' order by f.text), ''))
             from pg_proc p cross join lateral pg_get_functiondef(p.oid) f (text)
             where p.pronamespace = 'postrider'::regnamespace and p.proname = any($1)",
        )
        .bind(self.functions())
        .fetch_one(&mut *transaction)
        .await?;
        transaction.rollback().await?;
        Ok(hash)
    }

    /// Whether this text was applied and nobody has changed the result.
    async fn is_current(
        &self,
        connection: &mut PgConnection,
        applied: &[Applied],
    ) -> Result<bool, sqlx::Error> {
        let Some(before) = applied.iter().find(|one| one.file == self.name) else {
            return Ok(false);
        };
        if before.checksum != self.checksum() {
            return Ok(false);
        }
        if before.has_version() {
            return Ok(before.installed == self.installed(connection).await?);
        }
        for search_path in ["postrider, public", "public"] {
            if before.installed == self.installed_without_version(connection, search_path).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl Applied {
    fn has_version(&self) -> bool {
        self.installed.starts_with(FunctionFile::HASH_VERSION)
    }
}

/// Applies files that are out of date, and the rights, in one transaction.
pub(super) async fn apply(connection: &mut PgConnection, set: &SchemaSet) -> Result<(), sqlx::Error> {
    let mut transaction = connection.begin().await?;
    sqlx::raw_sql(CREATE_TABLE).execute(&mut *transaction).await?;
    let applied = applied(&mut transaction).await?;
    if is_newer(&applied, set) {
        tracing::warn!("the functions are of a later release and are left unchanged");
        return transaction.commit().await;
    }
    let existing = existing(&mut transaction).await?;
    let mut changed = Vec::new();
    for file in &set.functions {
        // A hash without a version says nothing about the triggers: once, the file is applied for their sake.
        let has_version = |one: &Applied| one.file == file.name && one.has_version();
        if !applied.iter().any(has_version) || !file.is_current(&mut transaction, &applied).await? {
            sqlx::raw_sql(AssertSqlSafe(file.sql.as_ref()))
                .execute(&mut *transaction)
                .await?;
            changed.push(file);
        }
    }
    restrict_new(&mut transaction, &existing).await?;
    sqlx::raw_sql(set.rights).execute(&mut *transaction).await?;
    for file in changed {
        record(&mut transaction, file, set).await?;
    }
    transaction.commit().await
}

/// Files that `apply` would apply: out of date, or with a function or trigger that was changed by hand.
pub(super) async fn outdated(
    connection: &mut PgConnection,
    set: &SchemaSet,
) -> Result<Vec<String>, sqlx::Error> {
    let present: bool = sqlx::query_scalar("select to_regclass('postrider.function_versions') is not null")
        .fetch_one(&mut *connection)
        .await?;
    let applied = match present {
        true => applied(connection).await?,
        false => Vec::new(),
    };
    let mut outdated = Vec::new();
    for file in set.functions.iter().filter(|_| !is_newer(&applied, set)) {
        if !file.is_current(connection, &applied).await? {
            outdated.push(file.name.to_owned());
        }
    }
    Ok(outdated)
}

/// Whether `apply` would change nothing. Changes by hand are not looked for.
pub(super) async fn are_current(connection: &mut PgConnection, set: &SchemaSet) -> Result<bool, sqlx::Error> {
    let present: bool = sqlx::query_scalar("select to_regclass('postrider.function_versions') is not null")
        .fetch_one(&mut *connection)
        .await?;
    if !present {
        return Ok(false);
    }
    let applied = applied(connection).await?;
    let is_of = |one: &Applied, file: &FunctionFile| one.file == file.name && one.checksum == file.checksum();
    let is_applied = |file: &FunctionFile| applied.iter().any(|one| is_of(one, file));
    Ok(is_newer(&applied, set) || set.functions.iter().all(is_applied))
}

fn is_newer(applied: &[Applied], set: &SchemaSet) -> bool {
    applied.iter().any(|one| one.release > set.release)
}

async fn applied(connection: &mut PgConnection) -> Result<Vec<Applied>, sqlx::Error> {
    sqlx::query_as("select file, checksum, installed, release from postrider.function_versions")
        .fetch_all(connection)
        .await
}

async fn existing(connection: &mut PgConnection) -> Result<Vec<Existing>, sqlx::Error> {
    sqlx::query_as(
        "select p.oid, p.proname::text as name,
                array(select case when a.grantee = 0 then 'public' else a.grantee::regrole::text end
                      from aclexplode(p.proacl) a where a.privilege_type = 'EXECUTE') as grantees
         from pg_proc p where p.pronamespace = 'postrider'::regnamespace",
    )
    .fetch_all(connection)
    .await
}

/// A new function is not for everyone, as Postgres would have it. One with a changed signature is a new function too: the
/// roles that could execute its predecessor can execute it.
async fn restrict_new(connection: &mut PgConnection, existing: &[Existing]) -> Result<(), sqlx::Error> {
    let oids: Vec<_> = existing.iter().map(|one| one.oid).collect();
    let new: Vec<(String, String)> = sqlx::query_as(
        "select p.oid::regprocedure::text, p.proname::text from pg_proc p
         where p.pronamespace = 'postrider'::regnamespace and p.oid <> all($1)",
    )
    .bind(oids)
    .fetch_all(&mut *connection)
    .await?;
    for (function, name) in new {
        let predecessors = existing.iter().filter(|one| one.name == name);
        let grants = predecessors.flat_map(|one| &one.grantees);
        let mut statements = format!("revoke all on function {function} from public;");
        for role in grants {
            statements += &format!("grant execute on function {function} to {role};");
        }
        sqlx::raw_sql(AssertSqlSafe(statements))
            .execute(&mut *connection)
            .await?;
    }
    Ok(())
}

async fn record(
    connection: &mut PgConnection,
    file: &FunctionFile,
    set: &SchemaSet,
) -> Result<(), sqlx::Error> {
    let installed = file.installed(&mut *connection).await?;
    sqlx::query(
        "insert into postrider.function_versions as f (file, checksum, installed, release) values ($1, $2, $3, $4)
         on conflict (file) do update set checksum = excluded.checksum, installed = excluded.installed,
             release = excluded.release, applied_at = clock_timestamp()",
    )
    .bind_all((file.name, file.checksum(), installed, &set.release))
    .execute(connection)
    .await?;
    tracing::info!(file = file.name, "functions applied");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_is_in_one_file_and_can_be_applied_again() {
        let mut all = Vec::new();
        for file in main() {
            for line in file.sql.lines().filter(|line| line.starts_with("create ")) {
                assert!(line.starts_with("create or replace "), "{}: {line}", file.name);
            }
            let functions: Vec<String> = file.functions().into_iter().map(str::to_owned).collect();
            assert!(!functions.is_empty(), "{}", file.name);
            all.extend(functions);
        }
        let count = all.len();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), count, "{all:?}");
    }

    #[test]
    fn every_file_is_embedded() {
        for (folder, files) in [("functions", main()), ("outbox/functions", outbox())] {
            let path = format!("{}/../migrations/{folder}", env!("CARGO_MANIFEST_DIR"));
            let mut found: Vec<String> = std::fs::read_dir(path)
                .expect("the folder is there")
                .map(|entry| entry.expect("readable").file_name().into_string().expect("UTF-8"))
                .collect();
            found.sort();
            let mut embedded: Vec<String> = files.iter().map(|file| format!("{}.sql", file.name)).collect();
            embedded.sort();
            assert_eq!(found, embedded);
        }
    }
}
