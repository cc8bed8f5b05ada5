//! The API's database connections. A pooler in transaction mode may assign every transaction to another server
//! connection, and one that does not track prepared statements loses a statement before the next round trip uses it.
//! Through such a pooler every statement runs in a transaction, which stays on one server connection, and starts by
//! discarding what others prepared there.
//! Invariants: writes are committed before anyone learns of them, and no statement runs longer than
//! `STATEMENT_TIMEOUT`: the server cancels it, even if nobody waits for it any more. Nobody waits for a connection while its
//! database is known to be down.

use std::{
    io::ErrorKind,
    ops::{Deref, DerefMut},
    pin::Pin,
    task::{Context, Poll, ready},
};

use postrider_dispatcher::health::database;
use sqlx::{
    Describe, Either, Error, Execute, Executor, PgConnection, PgPool, Postgres, SqlStr, Transaction,
    pool::PoolConnection,
    postgres::{PgDatabaseError, PgQueryResult, PgRow, PgSeverity, PgStatement, PgTypeInfo},
};
use tokio::sync::watch;
use tokio_stream::{Stream, StreamExt};

/// Of every session, in Postgres syntax.
pub const STATEMENT_TIMEOUT: &str = "10s";
/// The server ends a transaction whose next statement does not come: a process that was cut off, or is stopped, would keep its
/// locks for hours.
pub const IDLE_TRANSACTION_TIMEOUT: &str = "10s";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Directly to the server: a connection is a session with its own settings.
    Sessions,
    /// A pooler that tracks prepared statements but not session settings: they are set in each transaction.
    Pooled,
    /// One that does not track prepared statements either.
    Transactions,
}

/// The API's connections, divided by purpose: one kind of request does not wait for another kind's connections.
#[derive(Debug, Clone)]
pub struct Reserves {
    /// Authentication and stored responses: single rows by primary key.
    pub lookups: Pool,
    pub emits: Pool,
    pub rest: Pool,
}

/// How a pool knows that its database is down.
#[derive(Debug, Clone)]
enum Health {
    /// The main database of the process.
    Main,
    /// Nobody watches a replica.
    Unknown,
    /// Of a cell: true while it is down.
    Cell(watch::Receiver<bool>),
}

impl Reserves {
    /// The same connections, to a cell. `down` is true while its database does not respond.
    pub fn of_cell(self, down: &watch::Receiver<bool>) -> Self {
        let of_cell = |pool: Pool| Pool {
            health: Health::Cell(down.clone()),
            ..pool
        };
        Self {
            lookups: of_cell(self.lookups),
            emits: of_cell(self.emits),
            rest: of_cell(self.rest),
        }
    }

    pub async fn close(&self) {
        for pool in [&self.lookups, &self.emits, &self.rest] {
            pool.close().await;
        }
    }
}

/// One for each role that serves requests.
#[derive(Debug, Clone)]
pub struct Pool {
    connections: PgPool,
    way: Way,
    health: Health,
}

/// The sessions of these connections already have their `STATEMENT_TIMEOUT`.
impl From<PgPool> for Pool {
    fn from(connections: PgPool) -> Self {
        Self {
            connections,
            way: Way::Sessions,
            health: Health::Main,
        }
    }
}

impl Pool {
    /// Through a pooler that does not keep session settings.
    pub fn pooled(connections: PgPool) -> Self {
        Self {
            connections,
            way: Way::Pooled,
            health: Health::Main,
        }
    }

    /// Through a pooler that loses prepared statements. The connections must not cache any either.
    pub fn in_transactions(connections: PgPool) -> Self {
        Self {
            connections,
            way: Way::Transactions,
            health: Health::Main,
        }
    }

    /// The same connections, to a streaming replica.
    pub fn to_replica(self) -> Self {
        Self {
            health: Health::Unknown,
            ..self
        }
    }

    pub async fn begin(&self) -> Result<Transaction<'static, Postgres>, Error> {
        let statement = match self.way {
            Way::Sessions => "begin",
            Way::Pooled => {
                "begin; set local statement_timeout = '10s'; set local idle_in_transaction_session_timeout = '10s'"
            }
            Way::Transactions => {
                "begin; set local statement_timeout = '10s'; set local idle_in_transaction_session_timeout = '10s'; \
                 deallocate all"
            }
        };
        self.begin_with(statement).await
    }

    /// For a request: lock and statement timeouts are short.
    pub(crate) async fn begin_request(&self) -> Result<Transaction<'static, Postgres>, Error> {
        let statement = match self.way {
            Way::Sessions | Way::Pooled => {
                "begin; set local lock_timeout = '5s'; set local statement_timeout = '10s'; \
                 set local idle_in_transaction_session_timeout = '10s'"
            }
            Way::Transactions => {
                "begin; set local lock_timeout = '5s'; set local statement_timeout = '10s'; \
                 set local idle_in_transaction_session_timeout = '10s'; deallocate all"
            }
        };
        self.begin_with(statement).await
    }

    async fn begin_with(&self, statement: &'static str) -> Result<Transaction<'static, Postgres>, Error> {
        self.unless_down(self.connections.begin_with(statement)).await
    }

    pub(crate) fn is_down(&self) -> bool {
        match &self.health {
            Health::Main => database::is_down(),
            Health::Unknown => false,
            Health::Cell(down) => *down.borrow(),
        }
    }

    /// Returns when the database does not respond.
    pub(crate) async fn down(&self) {
        let is_known = match &self.health {
            Health::Main => {
                database::down().await;
                true
            }
            Health::Unknown => false,
            Health::Cell(down) => down.clone().wait_for(|down| *down).await.is_ok(),
        };
        if !is_known {
            std::future::pending::<()>().await;
        }
    }

    /// The result of `work`, or an error as soon as the database is known to be down. For work that may be abandoned at any
    /// point, such as waiting for a connection.
    pub(crate) async fn unless_down<T>(
        &self,
        work: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        tokio::select! {
            biased;
            result = work => result,
            () = self.down() => Err(Error::Io(ErrorKind::NotConnected.into())),
        }
    }

    /// For several independent statements. Writers must call `done`.
    pub async fn acquire(&self) -> Result<PooledConnection, Error> {
        Ok(match self.way {
            Way::Sessions => PooledConnection::Connection(self.connection().await?),
            Way::Pooled | Way::Transactions => PooledConnection::Transaction(self.begin().await?),
        })
    }

    async fn connection(&self) -> Result<PoolConnection<Postgres>, Error> {
        self.unless_down(self.connections.acquire()).await
    }

    pub async fn close(&self) {
        self.connections.close().await;
    }
}

/// Whether the error proves that nothing was committed. A pooler also reports an error when it lost the server in the
/// middle of a commit (08P01), and so does a closed connection: the commit may have succeeded all the same.
pub(crate) fn proves_rollback(error: &Error) -> bool {
    /// The server's own rejections of a statement: data, constraints, locks, limits, errors raised by functions, and what it could
    /// not do for want of disk or memory. A commit that fails for that reason ends the session or the server instead.
    const CLASSES: [&str; 11] = ["22", "23", "26", "40", "42", "53", "54", "55", "58", "P0", "PR"];
    const CANCELLED: &str = "57014";
    if database::is_read_only(error) {
        return true;
    }
    const COMPLETION_UNKNOWN: &str = "40003";
    let Some(reported) = error
        .as_database_error()
        .and_then(|error| error.try_downcast_ref::<PgDatabaseError>())
    else {
        return false;
    };
    let code = reported.code();
    reported.severity() == PgSeverity::Error
        && code != COMPLETION_UNKNOWN
        && (code == CANCELLED || CLASSES.iter().any(|class| code.starts_with(class)))
}

/// A connection until it is dropped.
#[derive(Debug)]
pub enum PooledConnection {
    Connection(PoolConnection<Postgres>),
    Transaction(Transaction<'static, Postgres>),
}

impl PooledConnection {
    /// Whether nothing is committed before `done`.
    pub(crate) fn is_transaction(&self) -> bool {
        matches!(self, Self::Transaction(_))
    }

    /// Commits what was written.
    pub async fn done(self) -> Result<(), Error> {
        match self {
            Self::Connection(_) => Ok(()),
            Self::Transaction(transaction) => transaction.commit().await,
        }
    }
}

impl Deref for PooledConnection {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        match self {
            Self::Connection(connection) => connection,
            Self::Transaction(transaction) => transaction,
        }
    }
}

impl DerefMut for PooledConnection {
    fn deref_mut(&mut self) -> &mut PgConnection {
        match self {
            Self::Connection(connection) => connection,
            Self::Transaction(transaction) => transaction,
        }
    }
}

type Part = Either<PgQueryResult, PgRow>;
type Promise<'e, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'e>>;

impl<'p> Executor<'p> for &'p Pool {
    type Database = Postgres;

    fn fetch_many<'e, 'q: 'e, E>(
        self,
        query: E,
    ) -> Pin<Box<dyn Stream<Item = Result<Part, Error>> + Send + 'e>>
    where
        'p: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        Box::pin(AfterCommit::Running(Box::pin(async move {
            let mut connection = self.acquire().await?;
            let mut found = Vec::new();
            let mut parts = connection.fetch_many(query);
            while let Some(part) = parts.next().await {
                found.push(part?);
            }
            drop(parts);
            connection.done().await?;
            Ok(found)
        })))
    }

    fn fetch_optional<'e, 'q: 'e, E>(self, query: E) -> Promise<'e, Option<PgRow>>
    where
        'p: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        Box::pin(async move {
            let mut connection = self.acquire().await?;
            let found = connection.fetch_optional(query).await?;
            connection.done().await?;
            Ok(found)
        })
    }

    /// Nothing here prepares a statement for later use: that can't work through every pooler.
    fn prepare_with<'e>(self, sql: SqlStr, parameters: &'e [PgTypeInfo]) -> Promise<'e, PgStatement>
    where
        'p: 'e,
    {
        self.connections.prepare_with(sql, parameters)
    }

    fn describe<'e>(self, sql: SqlStr) -> Promise<'e, Describe<Postgres>>
    where
        'p: 'e,
    {
        self.connections.describe(sql)
    }
}

/// All results of a statement, returned once it is committed.
enum AfterCommit<'e> {
    Running(Promise<'e, Vec<Part>>),
    Committed(std::vec::IntoIter<Part>),
}

impl Stream for AfterCommit<'_> {
    type Item = Result<Part, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Self::Running(running) = &mut *self {
            let ended = ready!(running.as_mut().poll(context));
            // After an error there is nothing more.
            *self = Self::Committed(Vec::new().into_iter());
            match ended {
                Ok(parts) => *self = Self::Committed(parts.into_iter()),
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
        match &mut *self {
            Self::Committed(parts) => Poll::Ready(parts.next().map(Ok)),
            Self::Running(_) => Poll::Ready(None),
        }
    }
}
