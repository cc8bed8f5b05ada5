//! A cell as a move sees it: a connection that holds the tenant's lock there.

use std::time::Duration;

use postrider_proto::{EventId, TenantId};
use sqlx::{PgConnection, postgres::PgPoolOptions};

use crate::{
    bind::BindAll,
    connector::Connector,
    db_timeout::{WithDbTimeout, within},
    maintenance::partitions,
};

/// With the id of the tenant.
const TENANT_LOCK: i32 = 0x7074_656e;
const PARTITIONS_TIME_MAX: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
pub(super) enum StepError {
    #[error("{0}")]
    Home(sqlx::Error),
    #[error("cell {cell}: {error}")]
    Cell { cell: String, error: sqlx::Error },
    #[error("cell {0}: its address is encrypted with another master key, or invalid")]
    Address(String),
    #[error(
        "cell {0}: its address leads through a connection pooler in transaction mode: a move needs sessions"
    )]
    Pooler(String),
    #[error("waits for {0}")]
    Waits(String),
    #[error("stopped")]
    Stopped,
}

/// A cell, with the tenant locked there.
pub(super) struct Place {
    pub(super) name: String,
    connector: Connector,
    pub(super) connection: PgConnection,
}

impl Place {
    /// Connects, and waits for the connection of a process that was cut off.
    pub(super) async fn open(
        name: String,
        connector: Connector,
        tenant: TenantId,
    ) -> Result<Self, StepError> {
        let failed = |error| StepError::Cell {
            cell: name.clone(),
            error,
        };
        let mut connection = connector.connect().with_db_timeout().await.map_err(failed)?;
        // Waits for the connection of a process that was cut off.
        sqlx::query("select pg_advisory_lock($1, $2)")
            .bind_all((TENANT_LOCK, tenant))
            .execute(&mut connection)
            .with_db_timeout()
            .await
            .map_err(failed)?;
        Ok(Place {
            name,
            connector,
            connection,
        })
    }

    pub(super) fn failed(&self) -> impl Fn(sqlx::Error) -> StepError + use<> {
        let cell = self.name.clone();
        move |error| StepError::Cell {
            cell: cell.clone(),
            error,
        }
    }

    /// The lock belongs to the session. A pooler in transaction mode may give every statement to another one.
    pub(super) async fn check_lock(&mut self, tenant: TenantId) -> Result<(), StepError> {
        let held: bool = sqlx::query_scalar(
            "select exists (select from pg_locks
                            where pid = pg_backend_pid() and locktype = 'advisory' and granted
                              and classid = $1::int::oid and objid = $2::int::oid)",
        )
        .bind_all((TENANT_LOCK, tenant))
        .fetch_one(&mut self.connection)
        .with_db_timeout()
        .await
        .map_err(self.failed())?;
        match held {
            true => Ok(()),
            false => Err(StepError::Pooler(self.name.clone())),
        }
    }

    /// Whether this cell accepts the tenant's events. `None`: it does not know the tenant yet.
    pub(super) async fn has_tenant(&mut self, tenant: TenantId) -> Result<Option<bool>, StepError> {
        sqlx::query_scalar("select is_here from postrider.tenants where id = $1")
            .bind(tenant)
            .fetch_optional(&mut self.connection)
            .with_db_timeout()
            .await
            .map_err(self.failed())
    }
}

/// The first transaction id that is not assigned yet.
pub(super) async fn next_transaction(db: &mut PgConnection) -> Result<String, sqlx::Error> {
    sqlx::query_scalar("select pg_snapshot_xmax(pg_current_snapshot())::text")
        .fetch_one(db)
        .with_db_timeout()
        .await
}

/// Whether every transaction below the barrier has ended.
pub(super) async fn has_passed(db: &mut PgConnection, barrier: &str) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("select pg_snapshot_xmin(pg_current_snapshot()) >= $1::xid8")
        .bind(barrier)
        .fetch_one(db)
        .with_db_timeout()
        .await
}

/// The target has partitions for what it stored itself. The tenant may be older.
pub(super) async fn make_partitions(
    source: &mut Place,
    target: &mut Place,
    tenant: TenantId,
) -> Result<(), StepError> {
    let oldest: Option<EventId> =
        sqlx::query_scalar("select id from postrider.events where tenant_id = $1 order by id limit 1")
            .bind(tenant)
            .fetch_optional(&mut source.connection)
            .with_db_timeout()
            .await
            .map_err(source.failed())?;
    let Some(since) = oldest.and_then(|event| chrono::DateTime::from_timestamp_millis(event.unix_ms()))
    else {
        return Ok(());
    };
    let pool = target
        .connector
        .pool_lazily(PgPoolOptions::new().max_connections(1), None);
    let made = within(PARTITIONS_TIME_MAX, partitions::make_since(&pool, since)).await;
    pool.close().await;
    made.map_err(target.failed())
}
