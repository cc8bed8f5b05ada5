//! A connection reserved for one task that runs statements continuously. A pool checks a connection before and after
//! each use, which on the hot path cost more round trips than the work itself.

use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};

use crate::db_timeout::WithDbTimeout;

/// Opened on first use, and again after an error.
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

    /// After an error the state of the connection is unknown.
    pub(crate) fn close(&mut self) {
        self.connection = None;
    }
}
