//! The production roles: a dispatcher, a dashboard, a migration. `up` composes the same parts in one process.
//! Invariant: only `up` and `migrate` change the schema; the others refuse one that is too old.

use std::{net::SocketAddr, process::ExitCode, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use postrider_dashboard::{App, Emits, Pool, RequestRates, Reserves, Trials, TrustedProxies};
use postrider_dispatcher::{
    Dispatcher, Wake,
    cells::HOME,
    connector::Connector,
    guard::Guard,
    health,
    key_holders::{self, HELD_SECONDS, Holding},
    partitions, relay, schema, sealed,
    traces::Tracer,
    vault::Vault,
};
use sqlx::{PgConnection, PgPool};
use tokio::{net::TcpListener, task::JoinHandle, time::timeout};
use tokio_util::sync::CancellationToken;

use crate::{
    admin, connect, log, machine, metrics, open_cell, parts::Parts, settings::Settings, traces::Export,
};

/// The exit status of `migrate --check` if there is something to apply.
const EXIT_PENDING: u8 = 3;

/// Long enough for a load balancer to notice, with the usual intervals.
const DRAIN_DELAY: Duration = Duration::from_secs(5);
const WAITING_END_MAX: Duration = Duration::from_millis(500);

pub(crate) async fn migrate(settings: Settings) -> anyhow::Result<()> {
    let database = settings.require_database()?;
    let pool = connect::pool(&database.direct, "migrate").await?;
    let report = bring_up_to_date(&pool, settings.dispatcher.retention).await?;
    pool.close().await;
    match (report.newer, report.is_empty()) {
        (Some(_), _) => {}
        (None, true) => tracing::info!("the schema is up to date; nothing was applied"),
        (None, false) => tracing::info!(applied = %report, "the schema is up to date"),
    }
    Ok(())
}

/// Prints what `migrate` would apply. The exit status says whether there is anything.
pub(crate) async fn check_migrations(settings: Settings) -> anyhow::Result<ExitCode> {
    let database = settings.require_database()?;
    let pool = connect::pool(&database.direct, "migrate").await?;
    let report = schema::pending(&mut *pool.acquire().await?).await?;
    pool.close().await;
    if let Some(found) = report.newer {
        println!(
            "Nothing to apply: the schema is at version {found}, newer than this program and compatible with it."
        );
    } else if report.is_empty() {
        println!("Nothing to apply.");
    } else {
        println!("To apply: {report}");
        return Ok(ExitCode::from(EXIT_PENDING));
    }
    Ok(ExitCode::SUCCESS)
}

/// In a producer's own database.
pub(crate) async fn migrate_outbox(settings: Settings) -> anyhow::Result<()> {
    let database = settings.require_database()?;
    relay::migrate_outbox(&database.direct).await?;
    tracing::info!("the outbox is up to date");
    Ok(())
}

pub(crate) async fn bring_up_to_date(pool: &PgPool, retention: Duration) -> anyhow::Result<schema::Report> {
    let report = schema::migrate(pool).await?;
    partitions::make_ahead(pool, retention)
        .await
        .context("cannot create the partitions of the coming days")?;
    Ok(report)
}

pub(crate) async fn dispatcher(mut settings: Settings, stop: CancellationToken) -> anyhow::Result<()> {
    machine::fit(&mut settings.dispatcher);
    let database = settings.require_database()?.clone();
    let vault = settings.require_vault()?;
    let health = listen_for_health(&settings).await?;
    let guard = settings.guard(&addresses([health.as_ref()])?);
    // It serves no requests that could be drained.
    let mut parts = Parts::new(stop.clone(), Duration::ZERO);
    parts.add_health(health);
    let prepared = parts.prepare(&database.direct, async || {
        let pool = connect::working_pool(&database.direct, "dispatcher").await?;
        check(&pool.clone().into(), &vault).await?;
        let keys = register_keys(&pool.clone().into(), &vault, "dispatcher").await?;
        Ok((pool, keys))
    });
    let Some((pool, keys)) = prepared.await? else {
        return parts.run_until_stopped().await;
    };
    let (export, tracer) = Export::start(&settings, "dispatcher", stop)?;
    let shared = Shared {
        guard,
        wake: Wake::default(),
        settings,
        vault,
        tracer,
    };
    keep_keys(&mut parts, &pool.clone().into(), &shared.vault, keys);
    dispatcher_part(&mut parts, shared, pool.clone(), &database.direct);
    parts.add_database_metrics(pool.clone().into());
    parts.add_log_filter(pool.clone().into());
    let ended = parts.run_until_stopped().await;
    export.finish().await;
    connect::close(pool.close()).await;
    ended
}

pub(crate) async fn dashboard(settings: Settings, stop: CancellationToken) -> anyhow::Result<()> {
    let database = settings.require_database()?.clone();
    let vault = settings.require_vault()?;
    let listener = connect::listen(settings.values.listen, "POSTRIDER_LISTEN").await?;
    announce(&listener, "api")?;
    let health = listen_for_health(&settings).await?;
    let own = addresses([Some(&listener), health.as_ref()])?;
    let drain_delay = settings.values.drain_delay.unwrap_or(DRAIN_DELAY);
    let mut parts = Parts::new(stop.clone(), drain_delay);
    parts.add_health(health);
    let (listener, waiting) = Waiting::serve(listener)?;
    let prepared = parts.prepare(&database.pooled, async || {
        let reserves = connect::serving_pools(&database.pooled).await?;
        check(&reserves.rest, &vault).await?;
        refuse_cell(&mut *reserves.rest.acquire().await?).await?;
        admin::create_missing(&reserves.rest, &settings).await?.print();
        let keys = register_keys(&reserves.rest, &vault, "dashboard").await?;
        Ok((reserves, keys))
    });
    let prepared = prepared.await;
    waiting.end().await;
    let Some((reserves, keys)) = prepared? else {
        return parts.run_until_stopped().await;
    };
    let replica = connect::replica(&database).await;
    let grpc = listen_for_grpc(&settings).await?;
    let (export, tracer) = Export::start(&settings, "dashboard", stop)?;
    let serving = Serving {
        public_url: public_url(&settings, &listener)?,
        // Empty: only the key in the table gives access.
        admin_api_key: settings.values.admin_api_key.clone().unwrap_or_default(),
        reserves: &reserves,
        replica,
        listener,
        grpc,
    };
    let shared = Shared {
        guard: settings.guard(&[own, addresses([serving.grpc.as_ref()])?].concat()),
        wake: Wake::default(),
        settings,
        vault,
        tracer,
    };
    keep_keys(&mut parts, &reserves.rest, &shared.vault, keys);
    dashboard_part(&mut parts, shared, serving)?;
    parts.add_database_metrics(reserves.rest.clone());
    parts.add_log_filter(reserves.rest.clone());
    let ended = parts.run_until_stopped().await;
    export.finish().await;
    connect::close(reserves.close()).await;
    ended
}

/// What a dispatcher and a dashboard both need; in `up` they share it.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    pub(crate) vault: Vault,
    pub(crate) guard: Guard,
    /// Lets an emit over HTTP wake a dispatcher in the same process.
    pub(crate) wake: Wake,
    pub(crate) tracer: Tracer,
}

/// What only a dashboard needs.
pub(crate) struct Serving<'r> {
    pub(crate) listener: TcpListener,
    pub(crate) grpc: Option<TcpListener>,
    pub(crate) reserves: &'r Reserves,
    pub(crate) replica: Option<Pool>,
    pub(crate) public_url: String,
    pub(crate) admin_api_key: String,
}

pub(crate) fn dispatcher_part(parts: &mut Parts, shared: Shared, pool: PgPool, direct: &Connector) {
    parts.add_top_endpoints(pool.clone(), shared.settings.values.metrics_top_endpoints);
    let dispatcher = Dispatcher {
        pool,
        direct: connect::named(direct, "dispatcher"),
        sources: shared.settings.values.sources.unwrap_or_default(),
        home: shared.settings.values.home_database_url,
        settings: shared.settings.dispatcher,
        guard: shared.guard,
        vault: shared.vault,
        wake: shared.wake,
        tracer: shared.tracer,
    };
    health::expect_dispatcher();
    parts.add("dispatcher", |stop| dispatcher.run(stop));
}

pub(crate) fn dashboard_part(parts: &mut Parts, shared: Shared, serving: Serving<'_>) -> anyhow::Result<()> {
    let (reserves, values) = (serving.reserves, shared.settings.values);
    let trials = Trials::new(shared.guard.clone())
        .map_err(|error| anyhow!("cannot create the HTTP client for test events: {error}"))?;
    let app = |stop| App {
        pool: reserves.rest.clone(),
        lookups: reserves.lookups.clone(),
        home: reserves.rest.clone(),
        cells: Default::default(),
        cell: None,
        limits: Default::default(),
        emits: Emits::new(reserves.emits.clone(), shared.wake.clone()).into(),
        wake: shared.wake,
        vault: shared.vault,
        trials,
        guard: shared.guard,
        request_rates: RequestRates::new(values.request_rate, values.tenant_request_rate).into(),
        trusted_proxies: TrustedProxies::new(values.trusted_proxies.unwrap_or_default()),
        defaults: shared.settings.dispatcher,
        public_url: serving.public_url,
        admin_api_key: serving.admin_api_key,
        metrics: metrics::render,
        check_log_filter: log::check_filter,
        tracer: shared.tracer,
        stop,
        streams: postrider_dashboard::streams(),
    };
    parts.add_serving("dashboard", |stop| {
        let app = app(stop.clone());
        let open_cell = open_cell::opener(app.vault.clone(), stop.clone());
        postrider_dashboard::serve(
            serving.listener,
            serving.grpc,
            app,
            serving.replica,
            open_cell,
            stop,
        )
    });
    Ok(())
}

/// Responds on the API's address until the role can start.
struct Waiting {
    task: JoinHandle<std::io::Result<()>>,
    end: CancellationToken,
}

impl Waiting {
    /// Returns the listener for the API.
    fn serve(listener: TcpListener) -> std::io::Result<(TcpListener, Self)> {
        let listener = listener.into_std()?;
        let copy = TcpListener::from_std(listener.try_clone()?)?;
        let end = CancellationToken::new();
        let task = tokio::spawn(postrider_dashboard::serve_while_starting(copy, end.clone()));
        let waiting = Self { task, end };
        Ok((TcpListener::from_std(listener)?, waiting))
    }

    async fn end(self) {
        self.end.cancel();
        let abort = self.task.abort_handle();
        // A client in the middle of a request does not delay the start.
        if timeout(WAITING_END_MAX, self.task).await.is_err() {
            abort.abort();
        }
    }
}

/// Nothing is served from a schema that is too old, or with a key that decrypts nothing.
pub(crate) async fn check(pool: &Pool, vault: &Vault) -> anyhow::Result<()> {
    let mut connection = pool.acquire().await?;
    schema::check(&mut connection).await?;
    Ok(sealed::check(&mut connection, vault).await?)
}

/// The API runs on the home database: what it would create in a cell, the directory could not.
pub(crate) async fn refuse_cell(connection: &mut PgConnection) -> anyhow::Result<()> {
    let cell: i16 = sqlx::query_scalar("select id from postrider.this_cell")
        .fetch_one(connection)
        .await?;
    if cell != HOME {
        bail!(
            "this database is cell {cell}: only dispatchers run on it. The API and the dashboard run on the home database"
        );
    }
    Ok(())
}

pub(crate) async fn listen_for_health(settings: &Settings) -> anyhow::Result<Option<TcpListener>> {
    let address = settings.values.metrics_listen;
    listen(address, "POSTRIDER_METRICS_LISTEN", "health").await
}

pub(crate) async fn listen_for_grpc(settings: &Settings) -> anyhow::Result<Option<TcpListener>> {
    listen(settings.values.grpc_listen, "POSTRIDER_GRPC_LISTEN", "grpc").await
}

async fn listen(
    address: Option<SocketAddr>,
    variable: &str,
    service: &str,
) -> anyhow::Result<Option<TcpListener>> {
    let Some(address) = address else {
        return Ok(None);
    };
    let listener = connect::listen(address, variable).await?;
    announce(&listener, service)?;
    Ok(Some(listener))
}

/// With port 0 the system chooses: a program that started us learns the address from this line.
pub(crate) fn announce(listener: &TcpListener, service: &str) -> anyhow::Result<()> {
    let address = listener.local_addr()?;
    tracing::info!(service, %address, "listening");
    Ok(())
}

/// Our own addresses, which no endpoint may use.
pub(crate) fn addresses<'l>(
    listeners: impl IntoIterator<Item = Option<&'l TcpListener>>,
) -> std::io::Result<Vec<SocketAddr>> {
    let listeners = listeners.into_iter().flatten();
    listeners.map(TcpListener::local_addr).collect()
}

/// Records which keys this role has, so that `rotate-master-key` locks nobody out. Refuses to run next to a role that shares
/// none of these keys.
pub(crate) async fn register_keys(pool: &Pool, vault: &Vault, role: &'static str) -> anyhow::Result<Holding> {
    let mut transaction = pool.begin().await?;
    let holding = match Holding::begin(&mut transaction, vault, role).await? {
        Ok(holding) => holding,
        Err(others) => bail!(
            "POSTRIDER_MASTER_KEY has no key in common with other roles running on this database: {}. They could not read each \
             other's secrets. Set the same key. A role that was killed is removed from this list after {HELD_SECONDS} seconds",
            key_holders::named(&others)
        ),
    };
    transaction.commit().await?;
    Ok(holding)
}

/// For as long as the role runs.
pub(crate) fn keep_keys(parts: &mut Parts, pool: &Pool, vault: &Vault, holding: Holding) {
    let (pool, vault) = (pool.clone(), vault.clone());
    parts.add_serving("key registration", |stop| holding.keep(pool, vault, stop));
}

pub(crate) fn public_url(settings: &Settings, listener: &TcpListener) -> anyhow::Result<String> {
    Ok(match &settings.values.public_url {
        Some(url) => url.clone(),
        None => connect::local_url(listener.local_addr()?),
    })
}
