//! Time limits for database statements. A connection cut off silently, by a firewall or a crashed machine, never
//! returns: a task waiting on it without a limit looks alive and does nothing.

use std::{io::ErrorKind, time::Duration};

use sqlx::{Connection, PgConnection, Row, postgres::PgPoolOptions};
use tokio::time::timeout;

use crate::health::database;

/// For any statement, even on a busy database.
pub(crate) const DB_TIMEOUT: Duration = Duration::from_secs(10);
/// For checking that a connection is alive.
const PING_MAX: Duration = Duration::from_secs(1);

/// The result, or an error like that of a lost connection. The statement may have been executed all the same.
pub async fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    match timeout(limit, work).await {
        Ok(result) => result,
        Err(_) => Err(sqlx::Error::Io(ErrorKind::TimedOut.into())),
    }
}

/// `.with_db_timeout().await` runs a statement with the limit.
pub(crate) trait WithDbTimeout<T>: Future<Output = Result<T, sqlx::Error>> + Sized {
    fn with_db_timeout(self) -> impl Future<Output = Result<T, sqlx::Error>> + Send
    where
        Self: Send,
    {
        within(DB_TIMEOUT, self)
    }
}

impl<T, F: Future<Output = Result<T, sqlx::Error>>> WithDbTimeout<T> for F {}

/// A pool for a primary: it neither hands out nor keeps a connection to a server that has become a standby.
pub fn lively(options: PgPoolOptions) -> PgPoolOptions {
    lively_reads(options)
        .before_acquire(|connection, opened| {
            Box::pin(async move { Ok(!database::is_outdated(opened.age) && is_alive(connection).await?) })
        })
        .after_release(|connection, _| Box::pin(async move { is_idle(connection, PRIMARY_IS_IDLE).await }))
}

/// A pool that neither hands out nor keeps a dead connection. By default it would wait forever when one is returned,
/// and shrink by one. Nor does it keep a connection with an open transaction: when a `begin` is cancelled before its
/// response, nobody rolls back, and the next user's writes would be acknowledged but never committed.
pub fn lively_reads(options: PgPoolOptions) -> PgPoolOptions {
    options
        .acquire_timeout(DB_TIMEOUT)
        .test_before_acquire(false)
        .before_acquire(|connection, _| Box::pin(async move { is_alive(connection).await }))
        .after_release(|connection, _| Box::pin(async move { is_idle(connection, IS_IDLE).await }))
}

/// A statement that starts its own transaction begins with it.
const IS_IDLE: &str = "select pg_catalog.now() = pg_catalog.statement_timestamp()";
const PRIMARY_IS_IDLE: &str = "select pg_catalog.now() = pg_catalog.statement_timestamp() \
     and pg_catalog.current_setting('transaction_read_only') = 'off'";

async fn is_idle(connection: &mut PgConnection, question: &'static str) -> Result<bool, sqlx::Error> {
    let row = within(PING_MAX, sqlx::raw_sql(question).fetch_one(connection)).await?;
    row.try_get(0)
}

pub(crate) async fn is_alive(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    within(PING_MAX, connection.ping()).await.map(|()| true)
}
