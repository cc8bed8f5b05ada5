//! Connections and listeners, each with a bound.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, bail};
use postrider_dashboard::{Emits, Pool, Reserves, STATEMENT_TIMEOUT};
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

/// The dispatcher and the API have pools of their own, so that neither can use up the other's connections.
const POOL_CONNECTIONS_MAX: u32 = 16;
/// The API's, 20 together.
const LOOKUP_CONNECTIONS_MAX: u32 = 3;
const EMIT_CONNECTIONS_MAX: u32 = Emits::CONNECTIONS_MAX;
const REST_CONNECTIONS_MAX: u32 = 9;
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(10);
const CLOSE_WAIT: Duration = Duration::from_secs(3);
/// The primary answers for a replica that does not.
const REPLICA_TIMEOUT: Duration = Duration::from_secs(1);
/// Between tries at the start: the database may be starting at the same time.
const CONNECT_PAUSE: Duration = Duration::from_millis(200);

pub(crate) async fn pool(options: &PgConnectOptions, role: &'static str) -> anyhow::Result<PgPool> {
    until_answered(options).await?;
    connect(
        &named(options, role),
        role,
        POOL_CONNECTIONS_MAX,
        PgPoolOptions::new(),
    )
    .await
}

/// For a dispatcher, which does the background work. Never through a pooler: its sessions have settings of their own.
pub(crate) async fn working_pool(options: &PgConnectOptions, role: &'static str) -> anyhow::Result<PgPool> {
    until_answered(options).await?;
    let settings = schema::finding_extensions(PgPoolOptions::new());
    connect(&named(options, role), role, POOL_CONNECTIONS_MAX, settings).await
}

async fn until_answered(options: &PgConnectOptions) -> anyhow::Result<()> {
    let patience = Instant::now() + ACQUIRE_TIMEOUT;
    // One connection alone first: a pool that can't connect only says that it waited.
    while let Err(error) = try_once(options).await {
        let starting = matches!(error, sqlx::Error::Io(_));
        if !starting || Instant::now() >= patience {
            return Err(error).context("the database did not answer");
        }
        time::sleep(CONNECT_PAUSE).await;
    }
    Ok(())
}

async fn connect(
    options: &PgConnectOptions,
    label: &'static str,
    most: u32,
    settings: PgPoolOptions,
) -> anyhow::Result<PgPool> {
    let pool = answer::lively(settings)
        .max_connections(most)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .connect_with(options.clone())
        .await
        .context("the database did not answer")?;
    meters::watch_pool(label, &pool);
    Ok(pool)
}

/// Not for ever: a connection that fell silent in the middle of a statement never comes back to its pool.
pub(crate) async fn close(closing: impl Future<Output = ()>) {
    if time::timeout(CLOSE_WAIT, closing).await.is_err() {
        tracing::warn!("a connection was still in use as the program ended");
    }
}

/// For the API, which may be reached through a pooler.
pub(crate) async fn serving_pools(options: &PgConnectOptions) -> anyhow::Result<Reserves> {
    const ROLE: &str = "dashboard";
    until_answered(options).await?;
    let way = Way::of(options).await?;
    if way == Way::Forgetting {
        tracing::info!(
            "the database is behind a pooler that does not remember prepared statements: each statement is a transaction. \
             PgBouncer 1.21 with max_prepared_statements is faster"
        );
    }
    let options = named(&way.prepare(options), ROLE);
    let reserve =
        async |label, most| anyhow::Ok(way.over(connect(&options, label, most, PgPoolOptions::new()).await?));
    Ok(Reserves {
        lookups: reserve("dashboard_lookups", LOOKUP_CONNECTIONS_MAX).await?,
        emits: reserve("dashboard_emits", EMIT_CONNECTIONS_MAX).await?,
        rest: reserve(ROLE, REST_CONNECTIONS_MAX).await?,
    })
}

/// What is between the API and the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Nothing that shows.
    Straight,
    /// A pooler that takes no settings for a session.
    Pooled,
    /// One that forgets prepared statements too.
    Forgetting,
}

impl Way {
    async fn of(options: &PgConnectOptions) -> anyhow::Result<Self> {
        Ok(match remembers_statements(options).await? {
            false => Self::Forgetting,
            true if takes_settings(options).await? => Self::Straight,
            true => Self::Pooled,
        })
    }

    fn prepare(self, options: &PgConnectOptions) -> PgConnectOptions {
        match self {
            Self::Straight => limited(options),
            Self::Pooled => options.clone(),
            Self::Forgetting => options.clone().statement_cache_capacity(0),
        }
    }

    fn over(self, connections: PgPool) -> Pool {
        match self {
            Self::Straight => connections.into(),
            Self::Pooled => Pool::pooled(connections),
            Self::Forgetting => Pool::in_transactions(connections),
        }
    }
}

/// The server ends what takes too long, also when nobody waits for it any more.
fn limited(options: &PgConnectOptions) -> PgConnectOptions {
    options
        .clone()
        .options([("statement_timeout", STATEMENT_TIMEOUT)])
}

/// A pooler refuses settings for a session, or ignores them.
async fn takes_settings(options: &PgConnectOptions) -> anyhow::Result<bool> {
    let asked = async {
        let mut connection = PgConnection::connect_with(&limited(options)).await?;
        let told: String = sqlx::query_scalar("select current_setting('statement_timeout')")
            .fetch_one(&mut connection)
            .await?;
        connection.close().await?;
        Ok(told == STATEMENT_TIMEOUT)
    };
    match time::timeout(ACQUIRE_TIMEOUT, asked).await {
        Ok(Err(sqlx::Error::Database(_))) => Ok(false),
        asked => asked
            .context("the database did not answer")?
            .context("the database did not answer"),
    }
}

/// None where none is set. One that does not answer now may do so later.
pub(crate) async fn replica(database: &Database) -> Option<Pool> {
    const ROLE: &str = "reads";
    let options = database.replica.as_ref()?;
    // Without its word the way that always works, if slower.
    let way = match time::timeout(REPLICA_TIMEOUT, Way::of(options)).await {
        Ok(Ok(way)) => way,
        _ => Way::Forgetting,
    };
    let connections = answer::lively(PgPoolOptions::new())
        .max_connections(POOL_CONNECTIONS_MAX)
        .acquire_timeout(REPLICA_TIMEOUT)
        .connect_lazy_with(named(&way.prepare(options), ROLE));
    meters::watch_pool(ROLE, &connections);
    Some(way.over(connections))
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
