//! The API's connections. A pooler in transaction mode may give every transaction another server. One that does not
//! remember prepared statements has forgotten a statement when the next round trip uses it. Through such a pooler every
//! statement runs in a transaction, which stays on one server, and begins by forgetting what others prepared there.
//! Invariant: what was written is committed before anybody learns of it.

use std::{
    ops::{Deref, DerefMut},
    pin::Pin,
    task::{Context, Poll, ready},
};

use sqlx::{
    Describe, Either, Error, Execute, Executor, PgConnection, PgPool, Postgres, SqlStr, Transaction,
    pool::PoolConnection,
    postgres::{PgQueryResult, PgRow, PgStatement, PgTypeInfo},
};
use tokio_stream::{Stream, StreamExt};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// A connection is the same server for as long as it lasts, or the pooler makes it look so.
    Sessions,
    Transactions,
}

/// One for each role that serves.
#[derive(Debug, Clone)]
pub struct Pool {
    connections: PgPool,
    way: Way,
}

impl From<PgPool> for Pool {
    fn from(connections: PgPool) -> Self {
        Self {
            connections,
            way: Way::Sessions,
        }
    }
}

impl Pool {
    /// Through a pooler that forgets prepared statements. The connections must not keep any either: their cache is off.
    pub fn in_transactions(connections: PgPool) -> Self {
        Self {
            connections,
            way: Way::Transactions,
        }
    }

    pub async fn begin(&self) -> Result<Transaction<'static, Postgres>, Error> {
        self.begin_as("begin", "begin; deallocate all").await
    }

    /// For a request: it waits for nobody long.
    pub(crate) async fn begin_request(&self) -> Result<Transaction<'static, Postgres>, Error> {
        self.begin_as(
            "begin; set local lock_timeout = '5s'; set local statement_timeout = '10s'",
            "begin; set local lock_timeout = '5s'; set local statement_timeout = '10s'; deallocate all",
        )
        .await
    }

    async fn begin_as(
        &self,
        plain: &'static str,
        forgetting: &'static str,
    ) -> Result<Transaction<'static, Postgres>, Error> {
        let statement = match self.way {
            Way::Sessions => plain,
            Way::Transactions => forgetting,
        };
        self.connections.begin_with(statement).await
    }

    /// For several statements, none of which needs the others. Whoever writes says `done`.
    pub async fn acquire(&self) -> Result<Held, Error> {
        Ok(match self.way {
            Way::Sessions => Held::Connection(self.connections.acquire().await?),
            Way::Transactions => Held::Transaction(self.begin().await?),
        })
    }

    pub async fn close(&self) {
        self.connections.close().await;
    }
}

/// A connection until it is dropped.
#[derive(Debug)]
pub enum Held {
    Connection(PoolConnection<Postgres>),
    Transaction(Transaction<'static, Postgres>),
}

impl Held {
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
            Way::Transactions => Box::pin(AfterCommit::Running(Box::pin(async move {
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
            Way::Transactions => Box::pin(async move {
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
