//! A connection of one's own, for statements that come one after the other all day. A pool asks whether a connection is
//! alive before and after each use, which on the hot path was more round trips than work.

use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};

use crate::db_timeout::WithDbTimeout;

/// Opened when it is first needed, and again after an error.
pub(crate) struct DedicatedConnection {
    options: PgConnectOptions,
    connection: Option<PgConnection>,
}

impl DedicatedConnection {
    pub(crate) fn new(options: PgConnectOptions) -> Self {
        Self {
            options,
            connection: None,
        }
    }

    pub(crate) async fn open(&mut self) -> Result<&mut PgConnection, sqlx::Error> {
        match &mut self.connection {
            Some(connection) => Ok(connection),
            none => {
                let opened = PgConnection::connect_with(&self.options)
                    .with_db_timeout()
                    .await?;
                Ok(none.insert(opened))
            }
        }
    }

    /// After an error nobody knows what state the connection is in.
    pub(crate) fn close(&mut self) {
        self.connection = None;
    }
}
