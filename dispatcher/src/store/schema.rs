//! The database's schema: brought up to date by `up` and `migrate`, only checked by the production roles.

use sqlx::{Connection, PgConnection, PgPool, migrate::Migrator, postgres::PgPoolOptions};

/// sqlx's own record of what has run, kept beside the tables so that nothing is made outside our schema.
const APPLIED_TABLE: &str = "postrider.schema_migrations";

#[derive(Debug, thiserror::Error)]
pub enum SchemaError {
    #[error("the database has no Postrider schema yet: run `postrider migrate` first")]
    Missing,
    #[error(
        "the database's schema is at version {found}, this program needs {needed}: run `postrider migrate` first"
    )]
    Older { found: i64, needed: i64 },
    #[error("the database's encoding is {0}, Postrider needs UTF8")]
    Encoding(String),
    #[error("Postgres runs with `{0}` off: a crash could lose what was committed. Turn it on")]
    NotDurable(String),
    #[error("this database has Postrider's main schema: an outbox goes into a producer's own database")]
    NotAnOutbox,
    #[error(
        "the role {role} may not create schemas and extensions in the database {database}: as its owner or a superuser run \
         `grant create on database {database} to {role}`"
    )]
    MayNotCreate { role: String, database: String },
    #[error("the migration failed: {0}")]
    Migrate(#[from] sqlx::migrate::MigrateError),
    #[error("the tables of the background jobs could not be made: {0}")]
    Jobs(#[source] sqlx::migrate::MigrateError),
    #[error("the database did not answer: {0}")]
    Database(#[from] sqlx::Error),
}

fn migrator() -> Migrator {
    let mut migrator = sqlx::migrate!("../migrations");
    migrator.create_schema("postrider");
    migrator.dangerous_set_table_name(APPLIED_TABLE);
    migrator
}

/// The job queue's extensions are found by their names alone, wherever they lie: with it by default, or where an operator or
/// an earlier version has put them. $1 says whether only for this transaction.
const FIND_EXTENSIONS: &str = "select set_config('search_path', concat_ws(', ', nullif(current_setting('search_path'), ''),
        coalesce((select quote_ident(n.nspname) from pg_extension e join pg_namespace n on n.oid = e.extnamespace
                  where e.extname = 'hstore'), 'apalis')), $1)";

/// Makes new things in the job queue's own schema, and finds its extensions where they are.
const MAKE_IN_APALIS: &str = "select set_config('search_path', concat_ws(', ', 'apalis',
        (select string_agg(distinct quote_ident(n.nspname), ', ') from pg_extension e
         join pg_namespace n on n.oid = e.extnamespace where e.extname in ('hstore', 'pgcrypto'))), false)";

/// Migrations before this one give what producers call to a role `postrider_emit`, which one of them takes for granted.
const EMIT_ROLE_UNTIL: i64 = 195;
const MAKE_EMIT_ROLE: &str = "do $$ begin
    if (select rolsuper from pg_roles where rolname = current_user)
       and not exists (select from pg_roles where rolname = 'postrider_emit') then
        create role postrider_emit nologin;
    end if;
end $$";

/// Functions that run with their owner's rights never run with a superuser's. What a superuser has made or restored is given
/// to `pg_database_owner`, with just the rights it needs: that role is in every cluster, so that a dump which names it can be
/// restored everywhere. A role of our own, which earlier versions made, would be missing there.
const GIVE_UP_SUPERUSER: &str = "do $$
declare
    f regprocedure;
begin
    if not (select rolsuper from pg_roles where rolname = current_user) then
        return;
    end if;
    grant usage on schema postrider to pg_database_owner;
    grant select on postrider.tenants, postrider.event_types, postrider.schemas, postrider.endpoints to pg_database_owner;
    -- One column, for a lock on the row.
    grant update (name) on postrider.tenants to pg_database_owner;
    grant update (emitted) on postrider.schemas to pg_database_owner;
    grant select, insert on postrider.events, postrider.event_ids, postrider.queue to pg_database_owner;
    grant select, insert, update on postrider.ordering_keys to pg_database_owner;
    grant insert on postrider.traces to pg_database_owner;
    grant execute on all functions in schema postrider to pg_database_owner;
    for f in select p.oid::regprocedure from pg_proc p join pg_roles r on r.oid = p.proowner
             where p.pronamespace = 'postrider'::regnamespace and p.prosecdef
               and (r.rolsuper or r.rolname = 'postrider_emit') loop
        execute format('alter function %s owner to pg_database_owner', f);
    end loop;
    if exists (select from pg_roles where rolname = 'postrider_emit') then
        revoke all on all tables in schema postrider from postrider_emit;
        revoke all on all functions in schema postrider from postrider_emit;
        revoke all on schema postrider from postrider_emit;
    end if;
end $$";

/// Runs what has not run yet. Safe to call from several processes at once: sqlx takes a lock.
pub async fn migrate(pool: &PgPool) -> Result<(), SchemaError> {
    let mut connection = pool.acquire().await?.detach();
    check_server(&mut connection).await?;
    check_rights(&mut connection).await?;
    // A migration waits for no one: an emit would queue behind it.
    sqlx::query("set lock_timeout = '5s'")
        .execute(&mut connection)
        .await?;
    if (1..EMIT_ROLE_UNTIL).contains(&version(&mut connection).await?) {
        sqlx::raw_sql(MAKE_EMIT_ROLE).execute(&mut connection).await?;
    }
    migrator().run(&mut connection).await?;
    sqlx::raw_sql(GIVE_UP_SUPERUSER).execute(&mut connection).await?;
    sqlx::raw_sql(MAKE_IN_APALIS).execute(&mut connection).await?;
    apalis_postgres::PostgresStorage::migrations()
        .run(&mut connection)
        .await
        .map_err(SchemaError::Jobs)?;
    connection.close().await?;
    Ok(())
}

/// A pool that background work can be done with.
pub fn finding_extensions(options: PgPoolOptions) -> PgPoolOptions {
    options.after_connect(|connection, _| {
        Box::pin(async move {
            sqlx::query(FIND_EXTENSIONS)
                .bind(false)
                .execute(connection)
                .await
                .map(|_| ())
        })
    })
}

/// Until the end of the caller's transaction, on a connection of any pool.
pub(crate) async fn find_extensions(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::query(FIND_EXTENSIONS)
        .bind(true)
        .execute(connection)
        .await?;
    Ok(())
}

/// Before anything is made: half a schema helps nobody, and Postgres does not say what it is that is missing.
async fn check_rights(connection: &mut PgConnection) -> Result<(), SchemaError> {
    let (role, database, may): (String, String, bool) = sqlx::query_as(
        "select '\"' || replace(current_user, '\"', '\"\"') || '\"',
                '\"' || replace(current_database(), '\"', '\"\"') || '\"',
                has_database_privilege(current_database(), 'create')",
    )
    .fetch_one(connection)
    .await?;
    match may {
        true => Ok(()),
        false => Err(SchemaError::MayNotCreate { role, database }),
    }
}

/// Of the newest migration that has run; 0 when there is no schema.
async fn version(connection: &mut PgConnection) -> Result<i64, sqlx::Error> {
    let present: bool = sqlx::query_scalar("select to_regclass('postrider.schema_migrations') is not null")
        .fetch_one(&mut *connection)
        .await?;
    if !present {
        return Ok(0);
    }
    sqlx::query_scalar("select coalesce(max(version), 0) from postrider.schema_migrations where success")
        .fetch_one(connection)
        .await
}

/// Refuses a schema older than this program, and a server that may lose commits. A newer schema is fine: migrations
/// expand first and contract a release later.
pub async fn check(connection: &mut PgConnection) -> Result<(), SchemaError> {
    check_server(&mut *connection).await?;
    let needed = migrator().iter().map(|m| m.version).max().unwrap_or(0);
    let found = version(&mut *connection).await?;
    if found == 0 {
        return Err(SchemaError::Missing);
    }
    if found < needed {
        return Err(SchemaError::Older { found, needed });
    }
    warn_of_superuser(connection).await?;
    Ok(())
}

/// A restore leaves everything to the one who restored it, until `migrate` has run.
async fn warn_of_superuser(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    let functions: Vec<String> = sqlx::query_scalar(
        "select p.proname::text from pg_proc p join pg_roles r on r.oid = p.proowner
         where p.pronamespace = 'postrider'::regnamespace and p.prosecdef and r.rolsuper order by 1",
    )
    .fetch_all(connection)
    .await?;
    if !functions.is_empty() {
        let functions = functions.join(", ");
        tracing::warn!(
            functions,
            "producers call functions that run with the rights of a superuser: run `postrider migrate` as that superuser"
        );
    }
    Ok(())
}

async fn check_server(connection: &mut PgConnection) -> Result<(), SchemaError> {
    let (encoding, fsync, full_pages): (String, String, String) = sqlx::query_as(
        "select current_setting('server_encoding'), current_setting('fsync'), current_setting('full_page_writes')",
    )
    .fetch_one(connection)
    .await?;
    if encoding != "UTF8" {
        return Err(SchemaError::Encoding(encoding));
    }
    for (name, value) in [("fsync", fsync), ("full_page_writes", full_pages)] {
        if value != "on" {
            return Err(SchemaError::NotDurable(name.to_owned()));
        }
    }
    Ok(())
}
