//! Connections and listeners, each with a bound.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, bail};
use postrider_dashboard::Pool;
use postrider_dispatcher::{answer, meters, schema};
use sqlx::{
    Connection, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::{
    net::TcpListener,
    time::{self, Instant},
};

use crate::settings::Database;

/// The dispatcher and the API have a pool each, so that neither can use up the other's connections.
const POOL_CONNECTIONS_MAX: u32 = 16;
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(10);
const CLOSE_WAIT: Duration = Duration::from_secs(3);
/// The primary answers for a replica that does not.
const REPLICA_TIMEOUT: Duration = Duration::from_secs(1);
/// Between tries at the start: the database may be starting at the same time.
const CONNECT_PAUSE: Duration = Duration::from_millis(200);

pub(crate) async fn pool(options: &PgConnectOptions, role: &'static str) -> anyhow::Result<PgPool> {
    open(options, role, PgPoolOptions::new()).await
}

/// For a dispatcher, which does the background work. Never through a pooler: its sessions have settings of their own.
pub(crate) async fn working_pool(options: &PgConnectOptions, role: &'static str) -> anyhow::Result<PgPool> {
    open(options, role, schema::finding_extensions(PgPoolOptions::new())).await
}

async fn open(
    options: &PgConnectOptions,
    role: &'static str,
    settings: PgPoolOptions,
) -> anyhow::Result<PgPool> {
    let patience = Instant::now() + ACQUIRE_TIMEOUT;
    // One connection alone first: a pool that can't connect only says that it waited.
    while let Err(error) = try_once(options).await {
        let starting = matches!(error, sqlx::Error::Io(_));
        if !starting || Instant::now() >= patience {
            return Err(error).context("the database did not answer");
        }
        time::sleep(CONNECT_PAUSE).await;
    }
    let pool = answer::lively(settings)
        .max_connections(POOL_CONNECTIONS_MAX)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .connect_with(named(options, role))
        .await
        .context("the database did not answer")?;
    meters::watch_pool(role, &pool);
    Ok(pool)
}

/// Not for ever: a connection that fell silent in the middle of a statement never comes back to its pool.
pub(crate) async fn close(closing: impl Future<Output = ()>) {
    if time::timeout(CLOSE_WAIT, closing).await.is_err() {
        tracing::warn!("a connection was still in use as the program ended");
    }
}

/// For the API, which may be reached through a pooler.
pub(crate) async fn serving_pool(options: &PgConnectOptions, role: &'static str) -> anyhow::Result<Pool> {
    let connections = pool(options, role).await?;
    if remembers_statements(options).await? {
        return Ok(connections.into());
    }
    connections.close().await;
    tracing::info!(
        "the database is behind a pooler that does not remember prepared statements: each statement is a transaction. \
         PgBouncer 1.21 with max_prepared_statements is faster"
    );
    let uncached = options.clone().statement_cache_capacity(0);
    Ok(Pool::in_transactions(pool(&uncached, role).await?))
}

/// None where none is set. One that does not answer now may do so later.
pub(crate) async fn replica(database: &Database) -> Option<Pool> {
    const ROLE: &str = "reads";
    let options = database.replica.as_ref()?;
    // Without its word the way that always works, if slower.
    let remembers = time::timeout(REPLICA_TIMEOUT, remembers_statements(options)).await;
    let remembers = matches!(remembers, Ok(Ok(true)));
    let options = match remembers {
        true => options.clone(),
        false => options.clone().statement_cache_capacity(0),
    };
    let connections = answer::lively(PgPoolOptions::new())
        .max_connections(POOL_CONNECTIONS_MAX)
        .acquire_timeout(REPLICA_TIMEOUT)
        .connect_lazy_with(named(&options, ROLE));
    meters::watch_pool(ROLE, &connections);
    Some(match remembers {
        true => connections.into(),
        false => Pool::in_transactions(connections),
    })
}

/// Statements are prepared in one round trip and used in the next. A pooler that gives each its own server, and does not
/// remember statements, lets one connection work and breaks down under two: found out at the start, not at the first load.
async fn remembers_statements(options: &PgConnectOptions) -> anyhow::Result<bool> {
    const STATEMENT_EXISTS: &str = "42P05";
    const NO_STATEMENT: &str = "26000";
    let asked = async {
        let mut first = PgConnection::connect_with(options).await?;
        let mut second = PgConnection::connect_with(options).await?;
        for number in 0..8_i32 {
            for connection in [&mut first, &mut second] {
                sqlx::query("select $1").bind(number).execute(connection).await?;
            }
        }
        first.close().await?;
        second.close().await
    };
    let asked = time::timeout(ACQUIRE_TIMEOUT, asked).await;
    let code = match &asked {
        Ok(Err(sqlx::Error::Database(error))) => error.code(),
        _ => None,
    };
    if code.is_some_and(|code| [STATEMENT_EXISTS, NO_STATEMENT].contains(&&*code)) {
        return Ok(false);
    }
    asked
        .context("the database did not answer")?
        .context("the database did not answer")?;
    Ok(true)
}

async fn try_once(options: &PgConnectOptions) -> Result<(), sqlx::Error> {
    match time::timeout(ACQUIRE_TIMEOUT, PgConnection::connect_with(options)).await {
        Ok(connected) => connected?.close().await,
        Err(_) => Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into())),
    }
}

/// `pg_stat_activity` shows who is who.
pub(crate) fn named(options: &PgConnectOptions, role: &str) -> PgConnectOptions {
    options.clone().application_name(&format!("postrider {role}"))
}

pub(crate) async fn listen(address: SocketAddr, setting: &str) -> anyhow::Result<TcpListener> {
    match TcpListener::bind(address).await {
        Ok(listener) => Ok(listener),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            bail!("{address} is in use by another program: stop it, or set {setting} to another address")
        }
        Err(error) => Err(error).with_context(|| format!("{setting}: nothing can listen on {address}")),
    }
}

/// Where a listener can be reached from this machine: one on all addresses is reached on loopback.
pub(crate) fn local_url(address: SocketAddr) -> String {
    let host = match address {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => "127.0.0.1".to_owned(),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => "[::1]".to_owned(),
        SocketAddr::V4(v4) => v4.ip().to_string(),
        SocketAddr::V6(v6) => format!("[{}]", v6.ip()),
    };
    format!("http://{host}:{}", address.port())
}
