//! The API's connections. A pooler in transaction mode may give every transaction another server. One that does not
//! remember prepared statements has forgotten a statement when the next round trip uses it. Through such a pooler every
//! statement runs in a transaction, which stays on one server, and begins by forgetting what others prepared there.
//! Invariants: what was written is committed before anybody learns of it, and no statement runs for longer than
//! `STATEMENT_TIMEOUT`: the server ends it, also when nobody waits for it any more.

use std::{
    ops::{Deref, DerefMut},
    pin::Pin,
    task::{Context, Poll, ready},
};

use sqlx::{
    Describe, Either, Error, Execute, Executor, PgConnection, PgPool, Postgres, SqlStr, Transaction,
    pool::PoolConnection,
    postgres::{PgDatabaseError, PgQueryResult, PgRow, PgSeverity, PgStatement, PgTypeInfo},
};
use tokio_stream::{Stream, StreamExt};

/// Of every session, as Postgres reads and shows it.
pub const STATEMENT_TIMEOUT: &str = "10s";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Straight to the server: a connection is a session, with settings of its own.
    Sessions,
    /// A pooler that remembers prepared statements but takes no settings: they are set in each transaction.
    Pooled,
    /// One that forgets prepared statements too.
    Transactions,
}

/// The API's connections, divided by what they are for: what one kind of request waits for holds up no other kind.
#[derive(Debug, Clone)]
pub struct Reserves {
    /// Who asks, and what was answered before: single rows by their keys.
    pub lookups: Pool,
    pub emits: Pool,
    pub rest: Pool,
}

impl Reserves {
    pub async fn close(&self) {
        for pool in [&self.lookups, &self.emits, &self.rest] {
            pool.close().await;
        }
    }
}

/// One for each role that serves.
#[derive(Debug, Clone)]
pub struct Pool {
    connections: PgPool,
    way: Way,
}

/// The sessions of these connections have their `STATEMENT_TIMEOUT` already.
impl From<PgPool> for Pool {
    fn from(connections: PgPool) -> Self {
        Self {
            connections,
            way: Way::Sessions,
        }
    }
}

impl Pool {
    /// Through a pooler that takes no settings for a session.
    pub fn pooled(connections: PgPool) -> Self {
        Self {
            connections,
            way: Way::Pooled,
        }
    }

    /// Through a pooler that forgets prepared statements. The connections must not keep any either: their cache is off.
    pub fn in_transactions(connections: PgPool) -> Self {
        Self {
            connections,
            way: Way::Transactions,
        }
    }

    pub async fn begin(&self) -> Result<Transaction<'static, Postgres>, Error> {
        let statement = match self.way {
            Way::Sessions => "begin",
            Way::Pooled => "begin; set local statement_timeout = '10s'",
            Way::Transactions => "begin; set local statement_timeout = '10s'; deallocate all",
        };
        self.connections.begin_with(statement).await
    }

    /// For a request: it waits for nobody long.
    pub(crate) async fn begin_request(&self) -> Result<Transaction<'static, Postgres>, Error> {
        let statement = match self.way {
            Way::Sessions | Way::Pooled => {
                "begin; set local lock_timeout = '5s'; set local statement_timeout = '10s'"
            }
            Way::Transactions => {
                "begin; set local lock_timeout = '5s'; set local statement_timeout = '10s'; deallocate all"
            }
        };
        self.connections.begin_with(statement).await
    }

    /// For several statements, none of which needs the others. Whoever writes says `done`.
    pub async fn acquire(&self) -> Result<Held, Error> {
        Ok(match self.way {
            Way::Sessions => Held::Connection(self.connections.acquire().await?),
            Way::Pooled | Way::Transactions => Held::Transaction(self.begin().await?),
        })
    }

    pub async fn close(&self) {
        self.connections.close().await;
    }
}

/// Whether the error says for certain that nothing was committed. An error is also what a pooler makes up when it lost the
/// server in the middle of a commit (08P01), and what a connection ends with: the commit may have been done all the same.
pub(crate) fn proves_rollback(error: &Error) -> bool {
    /// The server's own refusals of a statement: data, constraints, locks, limits, and what functions raise.
    const CLASSES: [&str; 9] = ["22", "23", "26", "40", "42", "54", "55", "P0", "PR"];
    const CANCELLED: &str = "57014";
    const COMPLETION_UNKNOWN: &str = "40003";
    let Some(told) = error
        .as_database_error()
        .and_then(|error| error.try_downcast_ref::<PgDatabaseError>())
    else {
        return false;
    };
    let code = told.code();
    told.severity() == PgSeverity::Error
        && code != COMPLETION_UNKNOWN
        && (code == CANCELLED || CLASSES.iter().any(|class| code.starts_with(class)))
}

/// A connection until it is dropped.
#[derive(Debug)]
pub enum Held {
    Connection(PoolConnection<Postgres>),
    Transaction(Transaction<'static, Postgres>),
}

impl Held {
    /// Whether nothing is there to stay before `done`.
    pub(crate) fn is_transaction(&self) -> bool {
        matches!(self, Self::Transaction(_))
    }

    /// What was written is there to stay.
    pub async fn done(self) -> Result<(), Error> {
        match self {
            Self::Connection(_) => Ok(()),
            Self::Transaction(transaction) => transaction.commit().await,
        }
    }
}

impl Deref for Held {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        match self {
            Self::Connection(connection) => connection,
            Self::Transaction(transaction) => transaction,
        }
    }
}

impl DerefMut for Held {
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
        match self.way {
            Way::Sessions => self.connections.fetch_many(query),
            Way::Pooled | Way::Transactions => Box::pin(AfterCommit::Running(Box::pin(async move {
                let mut transaction = self.begin().await?;
                let mut found = Vec::new();
                let mut parts = transaction.fetch_many(query);
                while let Some(part) = parts.next().await {
                    found.push(part?);
                }
                drop(parts);
                transaction.commit().await?;
                Ok(found)
            }))),
        }
    }

    fn fetch_optional<'e, 'q: 'e, E>(self, query: E) -> Promise<'e, Option<PgRow>>
    where
        'p: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        match self.way {
            Way::Sessions => self.connections.fetch_optional(query),
            Way::Pooled | Way::Transactions => Box::pin(async move {
                let mut transaction = self.begin().await?;
                let found = transaction.fetch_optional(query).await?;
                transaction.commit().await?;
                Ok(found)
            }),
        }
    }

    /// Nothing here prepares a statement to use it later: that could not work through every pooler.
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

/// All that a statement answers, given out once it is committed.
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
