//! A connection reserved for one task that runs statements continuously. A pool checks a connection before and after
//! each use, which on the hot path cost more round trips than the work itself.

use std::time::{Duration, Instant};

use sqlx::PgConnection;

use crate::{
    connector::Connector,
    db_timeout::{WithDbTimeout, is_alive},
};

/// A connection may have been cut off silently while it was unused for this long.
const UNUSED_MAX: Duration = Duration::from_secs(2);

/// Opened on first use, and again after an error, when it is found dead after it was unused for a while, or when the
/// database was seen read-only or on another host since.
pub(crate) struct DedicatedConnection {
    connector: Connector,
    connection: Option<PgConnection>,
    opened_at: Instant,
    used_at: Instant,
}

impl DedicatedConnection {
    pub(crate) fn new(connector: Connector) -> Self {
        Self {
            connector,
            connection: None,
            opened_at: Instant::now(),
            used_at: Instant::now(),
        }
    }

    pub(crate) async fn open(&mut self) -> Result<&mut PgConnection, sqlx::Error> {
        if self.connector.is_outdated(self.opened_at.elapsed()) {
            self.connection = None;
        }
        if self.used_at.elapsed() > UNUSED_MAX
            && let Some(mut unused) = self.connection.take()
            && is_alive(&mut unused).await.is_ok()
        {
            self.connection = Some(unused);
        }
        self.used_at = Instant::now();
        match &mut self.connection {
            Some(connection) => Ok(connection),
            none => {
                self.opened_at = Instant::now();
                let opened = self.connector.connect().with_db_timeout().await?;
                Ok(none.insert(opened))
            }
        }
    }

    /// After an error the state of the connection is unknown.
    pub(crate) fn close(&mut self) {
        self.connection = None;
    }
}
