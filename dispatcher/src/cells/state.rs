//! Whether a cell takes tenants, or is drained of them.

use sqlx::PgConnection;

use crate::bind::BindAll;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Open,
    Draining,
}

impl State {
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "open" => Some(Self::Open),
            "draining" => Some(Self::Draining),
            _ => None,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Draining => "draining",
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("there is no cell of this name")]
    NoCell,
    #[error("this is the last open cell: its tenants have nowhere to go")]
    LastOpen,
    #[error(transparent)]
    Database(#[from] sqlx::Error),
}

/// At home, in one transaction, or in that of the caller.
pub async fn set(home: &mut PgConnection, name: &str, state: State) -> Result<(), StateError> {
    let mut transaction = sqlx::Connection::begin(home).await?;
    // Two at once could drain the last two.
    sqlx::query("select from postrider.cells order by id for update")
        .execute(&mut *transaction)
        .await?;
    let known: bool = sqlx::query_scalar("select exists (select from postrider.cells where name = $1)")
        .bind(name)
        .fetch_one(&mut *transaction)
        .await?;
    if !known {
        return Err(StateError::NoCell);
    }
    let others_open: bool =
        sqlx::query_scalar("select exists (select from postrider.cells where state = 'open' and name <> $1)")
            .bind(name)
            .fetch_one(&mut *transaction)
            .await?;
    if state == State::Draining && !others_open {
        return Err(StateError::LastOpen);
    }
    sqlx::query("update postrider.cells set state = $2 where name = $1")
        .bind_all((name, state.name()))
        .execute(&mut *transaction)
        .await?;
    transaction.commit().await?;
    Ok(())
}
