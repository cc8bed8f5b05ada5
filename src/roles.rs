//! The production roles: a dispatcher, a dashboard, a migration. Each needs a database of its own accord.
//! Invariant: only `up` and `migrate` change the schema; the others refuse one that is too old.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, anyhow, bail};
use postrider_dashboard::{App, Emits, Pool, RequestRates, Trials, TrustedProxies};
use postrider_dispatcher::{
    Dispatcher, Wake,
    guard::Guard,
    key_holders::{HELD_SECONDS, Holding},
    meters, partitions, relay, schema, sealed,
    vault::Vault,
};
use sqlx::PgPool;
use tokio::{net::TcpListener, task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;

use crate::{admin, connect, health, machine, settings::Settings, traces::Export};

/// The last resort for a part that does not end by itself: longer than the longest attempt.
const STOP_WAIT: Duration = Duration::from_secs(75);

pub(crate) async fn migrate(settings: Settings) -> anyhow::Result<()> {
    let database = settings.require_database()?;
    let pool = connect::pool(&database.direct, "migrate").await?;
    bring_up_to_date(&pool, settings.dispatcher.retention).await?;
    pool.close().await;
    tracing::info!("the schema is up to date");
    Ok(())
}

/// Into a producer's own database.
pub(crate) async fn migrate_outbox(settings: Settings) -> anyhow::Result<()> {
    let database = settings.require_database()?;
    relay::migrate_outbox(&database.direct).await?;
    tracing::info!("the outbox is up to date");
    Ok(())
}

pub(crate) async fn bring_up_to_date(pool: &PgPool, retention: Duration) -> anyhow::Result<()> {
    schema::migrate(pool).await?;
    partitions::make_ahead(pool, retention)
        .await
        .context("the partitions of the coming days could not be made")
}

pub(crate) async fn dispatcher(mut settings: Settings, stop: CancellationToken) -> anyhow::Result<()> {
    machine::fit(&mut settings.dispatcher);
    let database = settings.require_database()?.clone();
    let vault = settings.require_vault()?;
    let health = listen_for_health(&settings).await?;
    let pool = connect::working_pool(&database.direct, "dispatcher").await?;
    check(&pool.clone().into(), &vault).await?;
    let (export, tracer) = Export::start(&settings, "dispatcher", stop.clone())?;
    let mut parts = Parts::new(stop);
    let listeners = addresses([health.as_ref()])?;
    if let Some(listener) = health {
        parts.add("health", |stop| {
            health::serve(listener, pool.clone().into(), stop)
        });
    }
    tell_keys(&mut parts, &pool.clone().into(), &vault, "dispatcher").await?;
    let dispatcher = Dispatcher {
        sources: settings.sources.clone(),
        pool: pool.clone(),
        direct: connect::named(&database.direct, "dispatcher"),
        guard: settings.guard(&listeners),
        settings: settings.dispatcher,
        vault,
        wake: Wake::default(),
        tracer,
    };
    parts.add("dispatcher", |stop| dispatcher.run(stop));
    parts.watch_database(pool.clone().into());
    let ended = parts.run_until_stopped().await;
    export.finish().await;
    connect::close(pool.close()).await;
    ended
}

pub(crate) async fn dashboard(settings: Settings, stop: CancellationToken) -> anyhow::Result<()> {
    let database = settings.require_database()?.clone();
    let vault = settings.require_vault()?;
    let listener = connect::listen(settings.listen, "POSTRIDER_LISTEN").await?;
    let health = listen_for_health(&settings).await?;
    let reserves = connect::serving_pools(&database.pooled).await?;
    let pool = reserves.rest.clone();
    check(&pool, &vault).await?;
    let replica = connect::replica(&database).await;
    let made = admin::make_missing(&pool, &settings).await?;
    if let Some(key) = made.api_key {
        println!("The admin API key, shown this once: {key}");
    }
    if let Some(password) = made.password {
        println!("The password of the login `admin`, shown this once: {password}");
    }
    let grpc = listen_for_grpc(settings.grpc_listen).await?;
    let listeners = addresses([Some(&listener), health.as_ref(), grpc.as_ref()])?;
    let (export, tracer) = Export::start(&settings, "dashboard", stop.clone())?;
    let mut parts = Parts::new(stop.clone());
    if let Some(listener) = health {
        parts.add("health", |stop| {
            health::serve(listener, reserves.lookups.clone(), stop)
        });
    }
    tell_keys(&mut parts, &pool, &vault, "dashboard").await?;
    // Empty is none: then the key in the table is the way in.
    let admin_api_key = settings.admin_api_key.clone().unwrap_or_default();
    let guard = settings.guard(&listeners);
    let app = App {
        pool: pool.clone(),
        lookups: reserves.lookups.clone(),
        limits: Default::default(),
        emits: Emits::new(reserves.emits.clone(), Wake::default()).into(),
        wake: Wake::default(),
        vault,
        trials: trials(guard.clone())?,
        guard,
        request_rates: RequestRates::new(settings.request_rate, settings.tenant_request_rate).into(),
        trusted_proxies: TrustedProxies::new(settings.trusted_proxies.clone()),
        public_url: public_url(&settings, &listener)?,
        defaults: settings.dispatcher,
        admin_api_key,
        metrics: crate::metrics::render,
        tracer,
        stop,
        streams: postrider_dashboard::streams(),
    };
    announce(&listener, "api")?;
    parts.add("dashboard", |stop| {
        postrider_dashboard::serve(listener, grpc, app, replica, stop)
    });
    parts.watch_database(pool.clone());
    let ended = parts.run_until_stopped().await;
    export.finish().await;
    connect::close(reserves.close()).await;
    ended
}

/// Nothing is served from a schema that is too old, or with a key that opens nothing.
async fn check(pool: &Pool, vault: &Vault) -> anyhow::Result<()> {
    let mut connection = pool.acquire().await?;
    schema::check(&mut connection).await?;
    Ok(sealed::check(&mut connection, vault).await?)
}

pub(crate) async fn listen_for_health(settings: &Settings) -> anyhow::Result<Option<TcpListener>> {
    let Some(address) = settings.metrics_listen else {
        return Ok(None);
    };
    let listener = connect::listen(address, "POSTRIDER_METRICS_LISTEN").await?;
    announce(&listener, "health")?;
    Ok(Some(listener))
}

pub(crate) async fn listen_for_grpc(address: Option<SocketAddr>) -> anyhow::Result<Option<TcpListener>> {
    let Some(address) = address else {
        return Ok(None);
    };
    let listener = connect::listen(address, "POSTRIDER_GRPC_LISTEN").await?;
    announce(&listener, "grpc")?;
    Ok(Some(listener))
}

/// Where these listen: no endpoint may be there.
pub(crate) fn addresses<'l>(
    listeners: impl IntoIterator<Item = Option<&'l TcpListener>>,
) -> std::io::Result<Vec<SocketAddr>> {
    listeners
        .into_iter()
        .flatten()
        .map(TcpListener::local_addr)
        .collect()
}

/// For as long as the role runs: `rotate-master-key` asks who would be locked out. Refuses to run beside a role that has none
/// of these keys.
pub(crate) async fn tell_keys(
    parts: &mut Parts,
    pool: &Pool,
    vault: &Vault,
    role: &'static str,
) -> anyhow::Result<()> {
    let mut transaction = pool.begin().await?;
    let holding = match Holding::begin(&mut transaction, vault, role).await? {
        Ok(holding) => holding,
        Err(others) => bail!(
            "POSTRIDER_MASTER_KEY has no key in common with those of the roles that run on this database: {}. What one of them \
             encrypts the other could not read. Set the same key. One that was killed is forgotten after {HELD_SECONDS} seconds",
            others
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        ),
    };
    transaction.commit().await?;
    let (pool, vault) = (pool.clone(), vault.clone());
    parts.add("word of its keys", |stop| holding.keep(pool, vault, stop));
    Ok(())
}

/// With port 0 the system chooses: this line is how a program that started us learns the address.
pub(crate) fn announce(listener: &TcpListener, service: &str) -> anyhow::Result<()> {
    let address = listener.local_addr()?;
    tracing::info!(service, %address, "listening");
    Ok(())
}

pub(crate) fn trials(guard: Guard) -> anyhow::Result<Trials> {
    Trials::new(guard).map_err(|error| anyhow!("the HTTP client could not be made: {error}"))
}

pub(crate) fn public_url(settings: &Settings, listener: &TcpListener) -> anyhow::Result<String> {
    Ok(match &settings.public_url {
        Some(url) => url.clone(),
        None => connect::local_url(listener.local_addr()?),
    })
}

/// What runs side by side in one process. When one part ends, all are stopped.
pub(crate) struct Parts {
    running: JoinSet<anyhow::Result<()>>,
    stop: CancellationToken,
}

impl Parts {
    pub(crate) fn new(stop: CancellationToken) -> Self {
        Self {
            running: JoinSet::new(),
            stop,
        }
    }

    pub(crate) fn add<F, E>(&mut self, name: &'static str, start: impl FnOnce(CancellationToken) -> F)
    where
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<anyhow::Error> + Send,
    {
        let stop = self.stop.clone();
        let part = start(stop.clone());
        self.running.spawn(async move {
            match part.await {
                Err(error) => Err(error.into().context(format!("the {name} ended"))),
                Ok(()) if stop.is_cancelled() => Ok(()),
                Ok(()) => Err(anyhow!("the {name} ended by itself")),
            }
        });
    }

    /// The figures of the whole installation.
    pub(crate) fn watch_database(&mut self, pool: Pool) {
        self.add("watch of the database", |stop| async move {
            meters::watch_database(pool, stop).await;
            Ok::<(), anyhow::Error>(())
        });
    }

    /// Returns when every part has ended: without an error when they were told to.
    pub(crate) async fn run_until_stopped(mut self) -> anyhow::Result<()> {
        let mut result = Ok(());
        tokio::select! {
            () = self.stop.cancelled() => {}
            Some(ended) = self.running.join_next() => result = ended.unwrap_or_else(|panic| Err(panic.into())),
        }
        self.stop.cancel();
        let rest = async {
            while let Some(ended) = self.running.join_next().await {
                let ended = ended.unwrap_or_else(|panic| Err(panic.into()));
                if result.is_ok() {
                    result = ended;
                }
            }
        };
        if timeout(STOP_WAIT, rest).await.is_err() {
            return Err(anyhow!("not every part stopped within {} s", STOP_WAIT.as_secs()));
        }
        result
    }
}
