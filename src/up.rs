//! `up`: everything in one process, with nothing set up before.
//! Invariant: an embedded server does not outlive a clean stop.

use anyhow::{Context, bail};
use postrider_dashboard::{App, Emits, RequestRates, TrustedProxies};
use postrider_dispatcher::{Dispatcher, Wake, sealed, vault::Vault};
use sqlx::PgPool;
use tokio::{net::TcpListener, task::spawn_blocking};
use tokio_util::sync::CancellationToken;

use crate::{
    admin,
    banner::{Banner, Shown},
    connect,
    data_dir::DataDir,
    demo,
    embedded::{self, Cluster, Home},
    health, machine,
    roles::{self, Parts},
    settings::{Database, Settings},
    traces::Export,
};

pub(crate) async fn up(mut settings: Settings, stop: CancellationToken) -> anyhow::Result<()> {
    machine::fit(&mut settings.dispatcher);
    let data_dir = DataDir::open(&settings.data_dir)?;
    // Before the database is started: a taken port is told at once.
    let listener = connect::listen(settings.listen, "POSTRIDER_LISTEN").await?;
    if let Some(database) = settings.database.clone() {
        return run(settings, data_dir, database, None, listener, stop).await;
    }
    let cluster = start_embedded(&data_dir).await?;
    let database = Database {
        pooled: cluster.options(),
        direct: cluster.options(),
        replica: None,
    };
    let ended = run(
        settings,
        data_dir,
        database,
        Some(cluster.clone()),
        listener,
        stop,
    )
    .await;
    let stopped = spawn_blocking(move || cluster.stop()).await?;
    ended.and(stopped.context("the embedded database could not be stopped"))
}

async fn start_embedded(data_dir: &DataDir) -> anyhow::Result<Cluster> {
    let folder = data_dir.path().to_owned();
    tracing::info!(data_dir = %folder.display(), "starting the embedded database");
    let cluster =
        spawn_blocking(move || Home::below(&folder).and_then(|home| Cluster::start(home, ""))).await??;
    let made = async {
        cluster.make_database().await?;
        data_dir.write("database-url", &cluster.url())
    };
    match made.await {
        Ok(()) => Ok(cluster),
        Err(error) => {
            spawn_blocking(move || cluster.stop()).await??;
            Err(error)
        }
    }
}

async fn run(
    settings: Settings,
    data_dir: DataDir,
    database: Database,
    cluster: Option<Cluster>,
    listener: TcpListener,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let sending_pool = connect::working_pool(&database.direct, "dispatcher").await?;
    roles::bring_up_to_date(&sending_pool, settings.dispatcher.retention).await?;
    let vault = match &settings.vault {
        Some(vault) => vault.clone(),
        None => kept_vault(&data_dir, &sending_pool).await?,
    };
    sealed::check(&mut *sending_pool.acquire().await?, &vault).await?;
    let api_key = Shown::set_or_kept(&settings.admin_api_key, "POSTRIDER_ADMIN_API_KEY", || {
        data_dir.keep("admin-api-key", admin::new_api_key)
    })?;
    let password = Shown::set_or_kept(&settings.admin_password, "POSTRIDER_ADMIN_PASSWORD", || {
        data_dir.keep("admin-password", admin::new_password)
    })?;

    admin::set_password(&mut *sending_pool.acquire().await?, &password.value).await?;
    let reserves = connect::serving_pools(&database.pooled).await?;
    let replica = connect::replica(&database).await;

    let health = roles::listen_for_health(&settings).await?;
    let grpc = roles::listen_for_grpc(settings.grpc_listen).await?;
    let guard = settings.guard(&roles::addresses([
        Some(&listener),
        health.as_ref(),
        grpc.as_ref(),
    ])?);
    let (export, tracer) = Export::start(&settings, "up", stop.clone())?;
    let mut parts = Parts::new(stop.clone());
    if let Some(cluster) = cluster.clone() {
        parts.add("embedded database", |stop| embedded::keep_running(cluster, stop));
    }
    if let Some(listener) = health {
        parts.add("health", |stop| {
            health::serve(listener, reserves.lookups.clone(), stop)
        });
    }
    roles::tell_keys(&mut parts, &reserves.rest, &vault, "up").await?;
    let wake = Wake::default();
    let dispatcher = Dispatcher {
        sources: settings.sources.clone(),
        pool: sending_pool.clone(),
        direct: connect::named(&database.direct, "dispatcher"),
        settings: postrider_dispatcher::Settings {
            public_url: Some(roles::public_url(&settings, &listener)?),
            ..settings.dispatcher.clone()
        },
        guard: guard.clone(),
        vault: vault.clone(),
        wake: wake.clone(),
        tracer: tracer.clone(),
    };
    parts.add("dispatcher", |stop| dispatcher.run(stop));
    parts.watch_database(reserves.rest.clone());

    let public_url = roles::public_url(&settings, &listener)?;
    let api_url = connect::local_url(listener.local_addr()?);
    let app = App {
        pool: reserves.rest.clone(),
        lookups: reserves.lookups.clone(),
        limits: Default::default(),
        emits: Emits::new(reserves.emits.clone(), wake.clone()).into(),
        wake,
        vault,
        trials: roles::trials(guard.clone())?,
        guard,
        request_rates: RequestRates::new(settings.request_rate, settings.tenant_request_rate).into(),
        trusted_proxies: TrustedProxies::new(settings.trusted_proxies.clone()),
        defaults: settings.dispatcher.clone(),
        public_url: public_url.clone(),
        admin_api_key: api_key.value.clone(),
        metrics: crate::metrics::render,
        tracer,
        stop,
        streams: postrider_dashboard::streams(),
    };
    roles::announce(&listener, "api")?;
    parts.add("dashboard", |stop| {
        postrider_dashboard::serve(listener, grpc, app, replica, stop)
    });

    let banner = Banner {
        public_url,
        api_url: api_url.clone(),
        api_key,
        password,
        cluster,
    };
    parts.add("demo", |stop| async move {
        demo::wait_for_api(&api_url, &stop).await?;
        if stop.is_cancelled() {
            return Ok(());
        }
        let demo = match &banner.cluster {
            Some(_) => Some(demo::start(&data_dir, &api_url, &banner.api_key.value, &stop).await?),
            None => None,
        };
        banner.print(demo.is_some());
        match demo {
            Some(receiver) => receiver.serve(stop).await,
            None => {
                stop.cancelled().await;
                Ok(())
            }
        }
    });
    let ended = parts.run_until_stopped().await;
    export.finish().await;
    connect::close(reserves.close()).await;
    connect::close(sending_pool.close()).await;
    ended
}

/// The key of the data directory, made at the first start. With a new one what is stored could not be read any more, so
/// that none is made where something is.
async fn kept_vault(data_dir: &DataDir, pool: &PgPool) -> anyhow::Result<Vault> {
    const NAME: &str = "master-key";
    if data_dir.read(NAME)?.is_none() && sealed::is_any(pool).await? {
        bail!(
            "{} is missing, and the database holds secrets that were encrypted with the key in it: put the file back, or \
             set POSTRIDER_MASTER_KEY to that key",
            data_dir.path().join(NAME).display()
        );
    }
    let key = data_dir.keep(NAME, admin::new_master_key)?;
    Vault::parse(&key.value).with_context(|| format!("{} can't be used", key.path.display()))
}
