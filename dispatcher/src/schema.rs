//! The database's schema: brought up to date by `up` and `migrate`, only checked by the production roles.

use sqlx::{Connection, PgConnection, PgPool, migrate::Migrator};

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
    #[error("the migration failed: {0}")]
    Migrate(#[from] sqlx::migrate::MigrateError),
    #[error("the tables of the background jobs could not be made: {0}")]
    Jobs(#[from] apalis_postgres::Error),
    #[error("the database did not answer: {0}")]
    Database(#[from] sqlx::Error),
}

fn migrator() -> Migrator {
    let mut migrator = sqlx::migrate!("../migrations");
    migrator.create_schema("postrider");
    migrator.dangerous_set_table_name(APPLIED_TABLE);
    migrator
}

/// Runs what has not run yet. Safe to call from several processes at once: sqlx takes a lock.
pub async fn migrate(pool: &PgPool) -> Result<(), SchemaError> {
    let mut connection = pool.acquire().await?.detach();
    check_server(&mut connection).await?;
    // A migration waits for no one: an emit would queue behind it.
    sqlx::query("set lock_timeout = '5s'")
        .execute(&mut connection)
        .await?;
    migrator().run(&mut connection).await?;
    connection.close().await?;
    crate::jobs::migrate(pool).await?;
    Ok(())
}

/// Refuses a schema older than this program, and a server that may lose commits. A newer schema is fine: migrations
/// expand first and contract a release later.
pub async fn check(connection: &mut PgConnection) -> Result<(), SchemaError> {
    check_server(&mut *connection).await?;
    let needed = migrator().iter().map(|m| m.version).max().unwrap_or(0);
    let present: bool = sqlx::query_scalar("select to_regclass('postrider.schema_migrations') is not null")
        .fetch_one(&mut *connection)
        .await?;
    if !present {
        return Err(SchemaError::Missing);
    }
    let found: i64 =
        sqlx::query_scalar("select coalesce(max(version), 0) from postrider.schema_migrations where success")
            .fetch_one(&mut *connection)
            .await?;
    if found < needed {
        return Err(SchemaError::Older { found, needed });
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
