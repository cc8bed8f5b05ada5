//! Connections and listeners, each with a bound.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, bail};
use postrider_dispatcher::answer;
use sqlx::{
    Connection, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::{
    net::TcpListener,
    time::{self, Instant},
};

/// The dispatcher and the API have a pool each, so that neither can use up the other's connections.
const POOL_CONNECTIONS_MAX: u32 = 16;
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(10);
/// Between tries at the start: the database may be starting at the same time.
const CONNECT_PAUSE: Duration = Duration::from_millis(200);

pub(crate) async fn pool(options: &PgConnectOptions, role: &str) -> anyhow::Result<PgPool> {
    let patience = Instant::now() + ACQUIRE_TIMEOUT;
    // One connection alone first: a pool that can't connect only says that it waited.
    while let Err(error) = try_once(options).await {
        let starting = matches!(error, sqlx::Error::Io(_));
        if !starting || Instant::now() >= patience {
            return Err(error).context("the database did not answer");
        }
        time::sleep(CONNECT_PAUSE).await;
    }
    answer::lively(PgPoolOptions::new())
        .max_connections(POOL_CONNECTIONS_MAX)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .connect_with(named(options, role))
        .await
        .context("the database did not answer")
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
