//! Database connections and listeners, each with a limit.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, bail};
use postrider_dashboard::{Emits, IDLE_TRANSACTION_TIMEOUT, Pool, Reserves, STATEMENT_TIMEOUT};
use postrider_dispatcher::{
    connector::{Connector, Setup},
    db_timeout::{self, within},
    schema,
    telemetry::metrics,
};
use sqlx::{Connection, PgPool, error::DatabaseError, postgres::PgPoolOptions};
use tokio::{
    net::TcpListener,
    time::{self, Instant},
};

use crate::settings::Database;

/// The dispatcher and the API have separate pools, so that neither can exhaust the other's connections.
const POOL_CONNECTIONS_MAX: u32 = 16;
/// The API's pools, 20 connections in total.
const LOOKUP_CONNECTIONS_MAX: u32 = 3;
const EMIT_CONNECTIONS_MAX: u32 = Emits::CONNECTIONS_MAX;
const REST_CONNECTIONS_MAX: u32 = 9;
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(10);
const CLOSE_WAIT: Duration = Duration::from_secs(3);
const IDLE_TRANSACTIONS_END: (&str, &str) = ("idle_in_transaction_session_timeout", IDLE_TRANSACTION_TIMEOUT);
/// After this, the primary serves the read.
const REPLICA_TIMEOUT: Duration = Duration::from_secs(1);
/// Between attempts at startup: the database may be starting at the same time.
const CONNECT_RETRY_DELAY: Duration = Duration::from_millis(200);

pub(crate) async fn pool(database: &Connector, role: &'static str) -> anyhow::Result<PgPool> {
    wait_for_database(database).await?;
    connect(&named(database, role), role, POOL_CONNECTIONS_MAX, None).await
}

/// For a dispatcher and its background work. Never through a pooler: its sessions have their own settings.
pub(crate) async fn working_pool(database: &Connector, role: &'static str) -> anyhow::Result<PgPool> {
    let setup = Some(schema::FINDING_EXTENSIONS);
    let database = database.with(|options| options.options([IDLE_TRANSACTIONS_END]));
    connect(&named(&database, role), role, POOL_CONNECTIONS_MAX, setup).await
}

/// For commands that a person or a job waits for. The roles wait longer: `Parts::wait_for_database`.
async fn wait_for_database(database: &Connector) -> anyhow::Result<()> {
    let deadline = Instant::now() + ACQUIRE_TIMEOUT;
    // A single connection first: a pool that cannot connect only reports a timeout.
    while let Err(error) = try_once(database).await {
        let starting = matches!(error, sqlx::Error::Io(_));
        if !starting || Instant::now() >= deadline {
            return Err(error).context("cannot connect to the database");
        }
        time::sleep(CONNECT_RETRY_DELAY).await;
    }
    Ok(())
}

async fn connect(
    database: &Connector,
    label: &'static str,
    most: u32,
    setup: Option<Setup>,
) -> anyhow::Result<PgPool> {
    let settings = db_timeout::lively(PgPoolOptions::new())
        .max_connections(most)
        .acquire_timeout(ACQUIRE_TIMEOUT);
    let pool = database
        .pool(settings, setup)
        .await
        .context("cannot connect to the database")?;
    metrics::watch_pool(label, &pool);
    Ok(pool)
}

/// For the API, to the database of a cell.
pub(crate) async fn cell_pools(database: &Connector) -> anyhow::Result<Reserves> {
    let route = Route::of(database).await?;
    let database = named(&route.prepare(database), "dashboard");
    let reserve = async |most| {
        let settings = db_timeout::lively(PgPoolOptions::new())
            .max_connections(most)
            .acquire_timeout(ACQUIRE_TIMEOUT);
        anyhow::Ok(route.over(database.pool(settings, None).await?))
    };
    Ok(Reserves {
        lookups: reserve(LOOKUP_CONNECTIONS_MAX).await?,
        emits: reserve(EMIT_CONNECTIONS_MAX).await?,
        rest: reserve(REST_CONNECTIONS_MAX).await?,
    })
}

/// With a timeout: a connection that hangs in a statement never returns to its pool.
pub(crate) async fn close(closing: impl Future<Output = ()>) {
    if time::timeout(CLOSE_WAIT, closing).await.is_err() {
        tracing::warn!("a database connection was still in use at shutdown");
    }
}

/// For the API, which may connect through a pooler.
pub(crate) async fn serving_pools(database: &Connector) -> anyhow::Result<Reserves> {
    const ROLE: &str = "dashboard";
    let route = Route::of(database).await?;
    if route == Route::PooledWithoutStatements {
        tracing::info!(
            "the connection pooler does not support prepared statements, so each statement runs in its own transaction. \
             PgBouncer 1.21 with max_prepared_statements is faster"
        );
    }
    let database = named(&route.prepare(database), ROLE);
    let reserve = async |label, most| anyhow::Ok(route.over(connect(&database, label, most, None).await?));
    Ok(Reserves {
        lookups: reserve("dashboard_lookups", LOOKUP_CONNECTIONS_MAX).await?,
        emits: reserve("dashboard_emits", EMIT_CONNECTIONS_MAX).await?,
        rest: reserve(ROLE, REST_CONNECTIONS_MAX).await?,
    })
}

/// What is between the API and the database server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route {
    /// Nothing that matters.
    Direct,
    /// A pooler that does not allow session settings.
    Pooled,
    /// One without prepared statements either.
    PooledWithoutStatements,
}

impl Route {
    async fn of(database: &Connector) -> anyhow::Result<Self> {
        Ok(match keeps_statements(database).await? {
            false => Self::PooledWithoutStatements,
            true if allows_settings(database).await? => Self::Direct,
            true => Self::Pooled,
        })
    }

    fn prepare(self, database: &Connector) -> Connector {
        match self {
            Self::Direct => limited(database),
            Self::Pooled => database.clone(),
            Self::PooledWithoutStatements => database.with(|options| options.statement_cache_capacity(0)),
        }
    }

    fn over(self, connections: PgPool) -> Pool {
        match self {
            Self::Direct => connections.into(),
            Self::Pooled => Pool::pooled(connections),
            Self::PooledWithoutStatements => Pool::in_transactions(connections),
        }
    }
}

/// The server cancels slow statements and ends idle transactions, even when the client is gone.
fn limited(database: &Connector) -> Connector {
    database
        .with(|options| options.options([("statement_timeout", STATEMENT_TIMEOUT), IDLE_TRANSACTIONS_END]))
}

/// A pooler rejects session settings, or ignores them.
async fn allows_settings(database: &Connector) -> anyhow::Result<bool> {
    let asked = async {
        let mut connection = limited(database).connect().await?;
        let setting: String = sqlx::query_scalar("select current_setting('statement_timeout')")
            .fetch_one(&mut connection)
            .await?;
        connection.close().await?;
        Ok(setting == STATEMENT_TIMEOUT)
    };
    match within(ACQUIRE_TIMEOUT, asked).await {
        Err(sqlx::Error::Database(error)) if !is_unavailable(&*error) => Ok(false),
        asked => asked.context("cannot connect to the database"),
    }
}

/// A server that starts, stops or has no connection left rejects everybody, whatever they ask for.
fn is_unavailable(error: &dyn DatabaseError) -> bool {
    let code = error.code().unwrap_or_default();
    ["57P", "53"].iter().any(|class| code.starts_with(class))
}

/// None if none is set. One that is unreachable now may become reachable later.
pub(crate) async fn replica(database: &Database) -> Option<Pool> {
    const ROLE: &str = "reads";
    let replica = database.replica.as_ref()?;
    // If unknown, use what always works but is slower.
    let route = match time::timeout(REPLICA_TIMEOUT, Route::of(replica)).await {
        Ok(Ok(route)) => route,
        _ => Route::PooledWithoutStatements,
    };
    let settings = db_timeout::lively_reads(PgPoolOptions::new())
        .max_connections(POOL_CONNECTIONS_MAX)
        .acquire_timeout(REPLICA_TIMEOUT);
    let connections = named(&route.prepare(replica), ROLE).pool_lazily(settings, None);
    metrics::watch_pool(ROLE, &connections);
    Some(route.over(connections).to_replica())
}

/// Statements are prepared in one round trip and executed in the next. A pooler that routes each to another server and does
/// not track statements works with one client but fails with two: detected at startup, not under the first load.
async fn keeps_statements(database: &Connector) -> anyhow::Result<bool> {
    const STATEMENT_EXISTS: &str = "42P05";
    const NO_STATEMENT: &str = "26000";
    let asked = async {
        let mut first = database.connect().await?;
        let mut second = database.connect().await?;
        for number in 0..8_i32 {
            for connection in [&mut first, &mut second] {
                sqlx::query("select $1").bind(number).execute(connection).await?;
            }
        }
        first.close().await?;
        second.close().await
    };
    let Err(error) = within(ACQUIRE_TIMEOUT, asked).await else {
        return Ok(true);
    };
    let code = error.as_database_error().and_then(|error| error.code());
    match code.as_deref() {
        Some(STATEMENT_EXISTS | NO_STATEMENT) => Ok(false),
        _ => Err(error).context("cannot connect to the database"),
    }
}

async fn try_once(database: &Connector) -> Result<(), sqlx::Error> {
    let connected = within(ACQUIRE_TIMEOUT, database.connect()).await?;
    connected.close().await
}

/// The name shown in `pg_stat_activity`.
pub(crate) fn named(database: &Connector, role: &str) -> Connector {
    database.with(|options| options.application_name(&format!("postrider {role}")))
}

pub(crate) async fn listen(address: SocketAddr, setting: &str) -> anyhow::Result<TcpListener> {
    match TcpListener::bind(address).await {
        Ok(listener) => Ok(listener),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            bail!("{address} is already in use: stop the other program, or set {setting} to another address")
        }
        Err(error) => Err(error).with_context(|| format!("{setting}: cannot listen on {address}")),
    }
}

/// The URL of a listener on this machine: loopback if it listens on all addresses.
pub(crate) fn local_url(address: SocketAddr) -> String {
    let host = match address {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => "127.0.0.1".to_owned(),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => "[::1]".to_owned(),
        SocketAddr::V4(v4) => v4.ip().to_string(),
        SocketAddr::V6(v6) => format!("[{}]", v6.ip()),
    };
    format!("http://{host}:{}", address.port())
}
