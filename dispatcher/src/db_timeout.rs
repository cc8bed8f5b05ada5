//! How long the database may take to answer. A connection that was cut off without a word, by a firewall or a machine
//! that died, is silent for ever: whoever waits on it without a limit looks alive and does nothing.

use std::{io::ErrorKind, time::Duration};

use sqlx::{Connection, PgConnection, Row, postgres::PgPoolOptions};
use tokio::time::timeout;

/// Any one statement of ours, on a busy database too.
pub(crate) const DB_TIMEOUT: Duration = Duration::from_secs(10);
/// Whether a connection is still there.
const PING_MAX: Duration = Duration::from_secs(1);

/// The answer, or an error as from a connection that is gone. The statement may have been done all the same.
pub(crate) async fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    match timeout(limit, work).await {
        Ok(answer) => answer,
        Err(_) => Err(sqlx::Error::Io(ErrorKind::TimedOut.into())),
    }
}

/// `.with_db_timeout().await`: any statement, with the limit.
pub(crate) trait WithDbTimeout<T>: Future<Output = Result<T, sqlx::Error>> + Sized {
    fn with_db_timeout(self) -> impl Future<Output = Result<T, sqlx::Error>> + Send
    where
        Self: Send,
    {
        within(DB_TIMEOUT, self)
    }
}

impl<T, F: Future<Output = Result<T, sqlx::Error>>> WithDbTimeout<T> for F {}

/// A pool that neither hands out nor keeps a connection that is silent. By itself it would wait for one for ever as it
/// is given back, and be smaller by one. Nor does it keep one with an open transaction: when a `begin` is dropped before it
/// was answered, nobody rolls back, and what the next user of the connection writes would be acknowledged and never committed.
pub fn lively(options: PgPoolOptions) -> PgPoolOptions {
    options
        .acquire_timeout(DB_TIMEOUT)
        .test_before_acquire(false)
        .before_acquire(|connection, _| Box::pin(async move { is_alive(connection).await }))
        .after_release(|connection, _| Box::pin(async move { is_idle(connection).await }))
}

/// A statement that begins its own transaction begins with it.
async fn is_idle(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    let alone = sqlx::raw_sql("select pg_catalog.now() = pg_catalog.statement_timestamp()");
    let row = within(PING_MAX, alone.fetch_one(connection)).await?;
    row.try_get(0)
}

async fn is_alive(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    within(PING_MAX, connection.ping()).await.map(|()| true)
}
