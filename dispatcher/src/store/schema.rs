//! The database schema: migrated by `up` and `migrate`, only checked by the production roles.
//! `migrations/README.md` explains the files and how to change them.
//! Invariant: while the schema is migrated, no emit waits longer than one short lock timeout.

mod functions;
mod indexes;
mod report;

use std::time::Duration;

use sqlx::{
    Connection, PgConnection, PgPool, PgTransaction,
    migrate::{MigrateError, Migration, Migrator},
};

use crate::{connector::Setup, store::sending};

pub use functions::FunctionFile;
pub use indexes::OnlineIndex;
pub use report::Report;

/// The newest migration of the first release. Migrations up to this one never change.
pub const BASELINE_VERSION: i64 = 7;

/// The newest migration that a program must know in order to use this schema. Raised by the release that drops what earlier
/// programs use: see "Expand, then contract" in `migrations/README.md`.
const OLDEST_COMPATIBLE_VERSION: i64 = BASELINE_VERSION;

/// Indexes added to tables that may be large. Migrations must not create those: see `migrations/README.md`.
const ONLINE_INDEXES: &[OnlineIndex] = &[];

const COMPATIBILITY: &str = "postrider.schema_compatibility";

/// Held by the session that migrates: "postrmig".
const MIGRATION_LOCK: i64 = 0x706f_7374_726d_6967;
const MIGRATION_LOCK_POLL: Duration = Duration::from_millis(200);
/// A statement that waits for a table lock makes every later emit wait behind it, so each try is short, and emits get through
/// in the pauses.
const SET_LOCK_TIMEOUT: &str = "set lock_timeout = '300ms'";
const LOCK_TRIES_MAX: u32 = 60;
const LOCK_PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub enum SchemaError {
    #[error("the database has no Postrider schema yet: run `postrider migrate` first")]
    Missing,
    #[error(
        "the database's schema is at version {found}, this program needs {needed}: run `postrider migrate` first"
    )]
    Older { found: i64, needed: i64 },
    #[error(
        "the database's schema is at version {found} and needs a program that knows version {oldest} or later, but this one \
         knows it only up to version {known}: use the release that migrated the database, or a later one"
    )]
    TooNew { found: i64, known: i64, oldest: i64 },
    #[error("the functions of the database's schema are out of date: run `postrider migrate` first")]
    OlderFunctions,
    #[error(
        "this database was created by a pre-release build and can't be migrated: create a new database and run \
         `postrider migrate` there"
    )]
    PreRelease,
    #[error("the database's encoding is {0}, Postrider needs UTF8")]
    Encoding(String),
    #[error("Postgres runs with `{0}` off: a crash could lose committed data. Turn it on")]
    NotDurable(String),
    #[error("this database has Postrider's main schema: an outbox goes into a producer's own database")]
    NotAnOutbox,
    #[error(
        "the role {role} may not create schemas and extensions in the database {database}: as its owner or a superuser run \
         `grant create on database {database} to {role}`"
    )]
    MayNotCreate { role: String, database: String },
    #[error(
        "a table could not be locked because a long transaction is using it: end that transaction and run \
         `postrider migrate` again"
    )]
    Locked,
    #[error("the migration failed: {0}")]
    Migrate(#[from] MigrateError),
    #[error("the tables of the background jobs could not be created: {0}")]
    Jobs(#[source] MigrateError),
    #[error("database error: {0}")]
    Database(#[from] sqlx::Error),
}

/// Everything that makes up a schema, in the order it is applied.
#[derive(Debug, Clone)]
pub struct SchemaSet {
    pub migrations: Vec<Migration>,
    /// Where applied migrations are recorded. In our own schema, so that nothing is created outside of it.
    table: &'static str,
    pub functions: Vec<FunctionFile>,
    /// Who may do what. Runs in the transaction that replaces the functions.
    rights: &'static str,
    pub indexes: Vec<OnlineIndex>,
    /// Programs that know less are refused.
    pub oldest_compatible: i64,
    /// The version of the program, as numbers. Functions of a later one are never replaced.
    pub release: Vec<i32>,
}

impl SchemaSet {
    /// The schema of Postrider's own database.
    pub fn main() -> Self {
        Self {
            migrations: sqlx::migrate!("../migrations").iter().cloned().collect(),
            table: "postrider.schema_migrations",
            functions: functions::main(),
            rights: include_str!("../../../migrations/rights.sql"),
            indexes: ONLINE_INDEXES.to_vec(),
            oldest_compatible: OLDEST_COMPATIBLE_VERSION,
            release: release(),
        }
    }

    /// The outbox in a producer's own database.
    pub(crate) fn outbox() -> Self {
        Self {
            migrations: sqlx::migrate!("../migrations/outbox").iter().cloned().collect(),
            table: "postrider.outbox_migrations",
            functions: functions::outbox(),
            rights: "",
            indexes: Vec::new(),
            oldest_compatible: 0,
            release: release(),
        }
    }

    fn migrator(&self) -> Migrator {
        let mut migrator = Migrator::with_migrations(self.migrations.clone());
        migrator.create_schema("postrider");
        migrator.dangerous_set_table_name(self.table);
        // `MIGRATION_LOCK` covers more than the migrations.
        migrator.set_locking(false);
        migrator
    }

    fn version(&self) -> i64 {
        self.migrations.iter().map(|one| one.version).max().unwrap_or(0)
    }
}

fn release() -> Vec<i32> {
    let numbers = env!("CARGO_PKG_VERSION").split(['.', '-', '+']);
    numbers.map_while(|number| number.parse().ok()).collect()
}

/// The job queue's extensions are found by their names alone, in whichever schema they were created.
/// $1 says whether only for this transaction.
const FIND_EXTENSIONS: &str = "select set_config('search_path', concat_ws(', ', nullif(current_setting('search_path'), ''),
        coalesce((select quote_ident(n.nspname) from pg_extension e join pg_namespace n on n.oid = e.extnamespace
                  where e.extname = 'hstore'), 'apalis')), $1)";

/// Creates new objects in the job queue's own schema, and finds its extensions where they are.
const MAKE_IN_APALIS: &str = "select set_config('search_path', concat_ws(', ', 'apalis',
        (select string_agg(distinct quote_ident(n.nspname), ', ') from pg_extension e
         join pg_namespace n on n.oid = e.extnamespace where e.extname in ('hstore', 'pgcrypto'))), false)";

/// Brings the database up to date and returns what was applied. Safe to call from several processes at once.
pub async fn migrate(pool: &PgPool) -> Result<Report, SchemaError> {
    migrate_to(pool, &SchemaSet::main()).await
}

/// What `migrate` would apply now. Changes nothing.
pub async fn pending(connection: &mut PgConnection) -> Result<Report, SchemaError> {
    report::pending(connection, &SchemaSet::main()).await
}

/// The same as `migrate`, to a given set.
pub async fn migrate_to(pool: &PgPool, set: &SchemaSet) -> Result<Report, SchemaError> {
    let mut connection = pool.acquire().await?.detach();
    check_server(&mut connection).await?;
    check_rights(&mut connection).await?;
    let report = apply(&mut connection, set).await?;
    // The job queue of the newer program may be newer, too.
    if report.newer.is_some() {
        connection.close().await?;
        return Ok(report);
    }
    if has_table(&mut connection, "postrider.sending").await? {
        sending::remember_database(&mut connection).await?;
    }
    sqlx::raw_sql(MAKE_IN_APALIS).execute(&mut connection).await?;
    let mut tries = LockTries::default();
    while let Err(error) = apalis_postgres::PostgresStorage::migrations()
        .run(&mut connection)
        .await
    {
        tries.again(SchemaError::Jobs(error)).await?;
    }
    connection.close().await?;
    Ok(report)
}

/// The lock is held until the connection is closed.
pub(crate) async fn apply(connection: &mut PgConnection, set: &SchemaSet) -> Result<Report, SchemaError> {
    lock(connection).await?;
    sqlx::query(SET_LOCK_TIMEOUT).execute(&mut *connection).await?;
    let report = report::pending(connection, set).await?;
    if let Some(found) = report.newer {
        let known = set.version();
        tracing::warn!(
            found,
            known,
            "the schema is newer than this program and compatible with it: nothing is migrated"
        );
        return Ok(report);
    }
    let mut tries = LockTries::default();
    while let Err(error) = set.migrator().run(&mut *connection).await {
        tries.again(error.into()).await?;
    }
    while let Err(error) = functions::apply(connection, set).await {
        tries.again(error.into()).await?;
    }
    for index in &set.indexes {
        indexes::build(connection, index).await?;
    }
    record_compatibility(connection, set).await?;
    Ok(report)
}

/// Programs that are older than the schema read it. It is never lowered.
async fn record_compatibility(connection: &mut PgConnection, set: &SchemaSet) -> Result<(), sqlx::Error> {
    if set.oldest_compatible == 0 || !has_table(connection, COMPATIBILITY).await? {
        return Ok(());
    }
    sqlx::query("update postrider.schema_compatibility set oldest_version = $1 where oldest_version < $1")
        .bind(set.oldest_compatible)
        .execute(connection)
        .await?;
    Ok(())
}

/// A newer schema is fine if its migrations did not drop what this program uses.
async fn check_compatible(
    connection: &mut PgConnection,
    set: &SchemaSet,
    found: i64,
) -> Result<(), SchemaError> {
    if set.oldest_compatible == 0 || !has_table(connection, COMPATIBILITY).await? {
        return Ok(());
    }
    let oldest: i64 = sqlx::query_scalar("select max(oldest_version) from postrider.schema_compatibility")
        .fetch_one(connection)
        .await?;
    let known = set.version();
    match oldest > known {
        true => Err(SchemaError::TooNew { found, known, oldest }),
        false => Ok(()),
    }
}

async fn has_table(connection: &mut PgConnection, table: &str) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("select to_regclass($1) is not null")
        .bind(table)
        .fetch_one(connection)
        .await
}

/// Polls instead of waiting in one statement: that statement's snapshot would keep `create index concurrently` of the session
/// that has the lock from finishing.
async fn lock(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    let mut is_logged = false;
    loop {
        let locked: bool = sqlx::query_scalar("select pg_try_advisory_lock($1)")
            .bind(MIGRATION_LOCK)
            .fetch_one(&mut *connection)
            .await?;
        if locked {
            return Ok(());
        }
        if !is_logged {
            tracing::info!("another process is migrating this database; waiting");
            is_logged = true;
        }
        tokio::time::sleep(MIGRATION_LOCK_POLL).await;
    }
}

/// Counts the tries to get a lock.
#[derive(Debug, Default)]
struct LockTries(u32);

impl LockTries {
    /// Pauses if the error was a lock timeout; returns any other error.
    async fn again(&mut self, error: SchemaError) -> Result<(), SchemaError> {
        const LOCK_NOT_AVAILABLE: &str = "55P03";
        const DEADLOCK: &str = "40P01";
        let cause = match &error {
            SchemaError::Database(cause)
            | SchemaError::Migrate(MigrateError::Execute(cause) | MigrateError::ExecuteMigration(cause, _))
            | SchemaError::Jobs(MigrateError::Execute(cause) | MigrateError::ExecuteMigration(cause, _)) => {
                cause.as_database_error().and_then(|cause| cause.code())
            }
            _ => None,
        };
        if !matches!(cause.as_deref(), Some(LOCK_NOT_AVAILABLE | DEADLOCK)) {
            return Err(error);
        }
        self.0 += 1;
        if self.0 == LOCK_TRIES_MAX {
            return Err(SchemaError::Locked);
        }
        tracing::info!(%error, "the migration is blocked by a lock; retrying");
        tokio::time::sleep(LOCK_PAUSE).await;
        Ok(())
    }
}

/// For the connections of background jobs.
pub const FINDING_EXTENSIONS: Setup = |connection| {
    Box::pin(async move {
        sqlx::query(FIND_EXTENSIONS)
            .bind(false)
            .execute(connection)
            .await
            .map(|_| ())
    })
};

/// Until the end of the caller's transaction, on a connection of any pool.
pub(crate) async fn find_extensions(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::query(FIND_EXTENSIONS)
        .bind(true)
        .execute(connection)
        .await?;
    Ok(())
}

/// Postgres shows definitions with names as this role would have to write them, and `"$user"` is our schema for a role of that
/// name. In this transaction, which is to be rolled back, each name of ours has its schema, whoever asks.
pub(crate) async fn with_full_names(connection: &mut PgConnection) -> Result<PgTransaction<'_>, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    sqlx::query("set local search_path = pg_catalog, pg_temp")
        .execute(&mut *transaction)
        .await?;
    Ok(transaction)
}

/// Before anything is created: Postgres itself does not say which right is missing.
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

/// The newest applied migration; 0 if there is no schema.
async fn version(connection: &mut PgConnection, set: &SchemaSet) -> Result<i64, SchemaError> {
    let applied = applied_migrations(connection, set).await?;
    Ok(applied.last().map_or(0, |(version, _)| *version))
}

/// With their checksums, in order.
async fn applied_migrations(
    connection: &mut PgConnection,
    set: &SchemaSet,
) -> Result<Vec<(i64, Vec<u8>)>, SchemaError> {
    if !has_table(connection, set.table).await? {
        return Ok(Vec::new());
    }
    let applied: Vec<(i64, Vec<u8>)> = sqlx::query_as(sqlx::AssertSqlSafe(format!(
        "select version, checksum from {} where success order by version",
        set.table
    )))
    .fetch_all(connection)
    .await?;
    // The first file of the baseline never changes: another one is from before the first release.
    if let (Some((_, found)), Some(first)) = (applied.first(), set.migrations.first())
        && found.as_slice() != first.checksum.as_ref()
    {
        return Err(SchemaError::PreRelease);
    }
    Ok(applied)
}

/// Refuses a schema older than this program, and a server that may lose commits. A newer schema is fine: migrations
/// expand first and contract a release later.
pub async fn check(connection: &mut PgConnection) -> Result<(), SchemaError> {
    check_server(&mut *connection).await?;
    let set = SchemaSet::main();
    let (found, needed) = (version(&mut *connection, &set).await?, set.version());
    if found == 0 {
        return Err(SchemaError::Missing);
    }
    if found < needed {
        return Err(SchemaError::Older { found, needed });
    }
    if found > needed {
        check_compatible(&mut *connection, &set, found).await?;
    }
    if found == needed && !functions::are_current(&mut *connection, &set).await? {
        return Err(SchemaError::OlderFunctions);
    }
    warn_of_superuser(connection).await?;
    Ok(())
}

/// A restore makes the restoring role the owner of everything, until `migrate` has run.
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
            "functions that producers call run as a superuser: run `postrider migrate` as that superuser"
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
