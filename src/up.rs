//! `up`: everything in one process, with nothing to set up first.
//! Invariant: an embedded server does not outlive a clean stop.

use anyhow::{Context, bail};
use postrider_dashboard::Reserves;
use postrider_dispatcher::{Wake, health::database, key_holders::Holding, sealed, vault::Vault};
use postrider_embedded::{Cluster, Home, keep_running};
use sqlx::PgPool;
use tokio::{net::TcpListener, task::spawn_blocking};
use tokio_util::sync::CancellationToken;

use crate::{
    admin,
    banner::{Banner, Shown},
    connect,
    data_dir::DataDir,
    demo, machine,
    parts::Parts,
    roles::{self, Serving, Shared},
    settings::{Database, Settings},
    traces::Export,
};

pub(crate) async fn up(mut settings: Settings, stop: CancellationToken) -> anyhow::Result<()> {
    machine::fit(&mut settings.dispatcher);
    let data_dir = DataDir::open(&settings.values.data_dir)?;
    // Before the database is started: a port in use is reported at once.
    let listener = connect::listen(settings.values.listen, "POSTRIDER_LISTEN").await?;
    let (database, cluster) = match settings.database.clone() {
        Some(database) => (database, None),
        None => {
            let cluster = start_embedded(&data_dir).await?;
            let database = Database {
                pooled: cluster.options().into(),
                direct: cluster.options().into(),
                replica: None,
            };
            (database, Some(cluster))
        }
    };
    let installation = Installation {
        settings,
        data_dir,
        database,
        cluster: cluster.clone(),
    };
    let ended = installation.run(listener, stop).await;
    let Some(cluster) = cluster else {
        return ended;
    };
    let stopped = spawn_blocking(move || cluster.stop()).await?;
    ended.and(stopped.context("cannot stop the embedded database"))
}

async fn start_embedded(data_dir: &DataDir) -> anyhow::Result<Cluster> {
    let folder = data_dir.path().to_owned();
    tracing::info!(data_dir = %folder.display(), "starting the embedded database");
    let cluster =
        spawn_blocking(move || Home::below(&folder).and_then(|home| Cluster::start(home, ""))).await??;
    let prepared = async {
        cluster.make_database().await?;
        data_dir.write("database-url", &cluster.url())
    };
    match prepared.await {
        Ok(()) => Ok(cluster),
        Err(error) => {
            spawn_blocking(move || cluster.stop()).await??;
            Err(error)
        }
    }
}

struct Installation {
    settings: Settings,
    data_dir: DataDir,
    database: Database,
    /// None: the database is the operator's own.
    cluster: Option<Cluster>,
}

/// What protects an installation, from the settings or the data directory.
struct Credentials {
    vault: Vault,
    api_key: Shown,
    password: Shown,
}

/// What the start takes from the database.
struct Prepared {
    sending_pool: PgPool,
    reserves: Reserves,
    credentials: Credentials,
    keys: Holding,
}

impl Installation {
    async fn run(mut self, listener: TcpListener, stop: CancellationToken) -> anyhow::Result<()> {
        let health = roles::listen_for_health(&self.settings).await?;
        let own = roles::addresses([Some(&listener), health.as_ref()])?;
        let drain_delay = self.settings.values.drain_delay.unwrap_or_default();
        let mut parts = Parts::new(stop.clone(), drain_delay);
        parts.add_health(health);
        if let Some(cluster) = self.cluster.clone() {
            parts.add("embedded database", |stop| {
                keep_running(cluster, database::down, stop)
            });
        }
        let prepared = parts.prepare(&self.database.direct, async || self.prepare().await);
        let Some(prepared) = prepared.await? else {
            return parts.run_until_stopped().await;
        };
        let Prepared {
            sending_pool,
            reserves,
            credentials,
            keys,
        } = prepared;
        let replica = connect::replica(&self.database).await;
        let grpc = roles::listen_for_grpc(&self.settings).await?;
        let addresses = [own, roles::addresses([grpc.as_ref()])?].concat();
        let public_url = roles::public_url(&self.settings, &listener)?;
        self.settings.dispatcher.public_url = Some(public_url.clone());
        let api_url = connect::local_url(listener.local_addr()?);
        let (export, tracer) = Export::start(&self.settings, "up", stop)?;
        let shared = Shared {
            settings: self.settings.clone(),
            vault: credentials.vault.clone(),
            guard: self.settings.guard(&addresses),
            wake: Wake::default(),
            tracer,
        };
        let serving = Serving {
            listener,
            grpc,
            reserves: &reserves,
            replica,
            public_url: public_url.clone(),
            admin_api_key: credentials.api_key.value.clone(),
        };

        roles::keep_keys(&mut parts, &reserves.rest, &shared.vault, keys);
        roles::dispatcher_part(
            &mut parts,
            shared.clone(),
            sending_pool.clone(),
            &self.database.direct,
        );
        parts.add_database_metrics(reserves.rest.clone());
        roles::announce(&serving.listener, "api")?;
        parts.add_log_filter(reserves.rest.clone());
        roles::dashboard_part(&mut parts, shared, serving)?;
        let banner = Banner {
            public_url,
            api_url,
            api_key: credentials.api_key,
            password: credentials.password,
            cluster: self.cluster,
        };
        parts.add("demo", |stop| greet(banner, self.data_dir, stop));

        let ended = parts.run_until_stopped().await;
        export.finish().await;
        connect::close(reserves.close()).await;
        connect::close(sending_pool.close()).await;
        ended
    }

    async fn prepare(&self) -> anyhow::Result<Prepared> {
        let sending_pool = connect::working_pool(&self.database.direct, "dispatcher").await?;
        roles::bring_up_to_date(&sending_pool, self.settings.dispatcher.retention).await?;
        let credentials = self.credentials(&sending_pool).await?;
        let reserves = connect::serving_pools(&self.database.pooled).await?;
        let keys = roles::register_keys(&reserves.rest, &credentials.vault, "up").await?;
        Ok(Prepared {
            sending_pool,
            reserves,
            credentials,
            keys,
        })
    }

    async fn credentials(&self, pool: &PgPool) -> anyhow::Result<Credentials> {
        let values = &self.settings.values;
        let vault = match &values.master_key {
            Some(vault) => vault.clone(),
            None => kept_vault(&self.data_dir, pool).await?,
        };
        sealed::check(&mut *pool.acquire().await?, &vault).await?;
        roles::refuse_cell(&mut *pool.acquire().await?).await?;
        let api_key = Shown::set_or_kept(&values.admin_api_key, "POSTRIDER_ADMIN_API_KEY", || {
            self.data_dir.keep("admin-api-key", admin::new_api_key)
        })?;
        let password = Shown::set_or_kept(&values.admin_password, "POSTRIDER_ADMIN_PASSWORD", || {
            self.data_dir.keep("admin-password", admin::new_password)
        })?;
        admin::set_password(&mut *pool.acquire().await?, &password.value).await?;
        Ok(Credentials {
            vault,
            api_key,
            password,
        })
    }
}

/// The master key in the data directory, generated at the first start. A new one could not decrypt existing secrets, so
/// none is generated if there are any.
async fn kept_vault(data_dir: &DataDir, pool: &PgPool) -> anyhow::Result<Vault> {
    const NAME: &str = "master-key";
    if data_dir.read(NAME)?.is_none() && sealed::is_any(pool).await? {
        bail!(
            "{} is missing, but the database contains secrets encrypted with that key: restore the file, or set \
             POSTRIDER_MASTER_KEY to the key",
            data_dir.path().join(NAME).display()
        );
    }
    let key = data_dir.keep(NAME, admin::new_master_key)?;
    Vault::parse(&key.value).with_context(|| format!("{} is invalid", key.path.display()))
}

/// Prints the banner once the API is ready, and serves the demo's receiver if the database is embedded.
async fn greet(banner: Banner, data_dir: DataDir, stop: CancellationToken) -> anyhow::Result<()> {
    demo::wait_for_api(&banner.api_url, &stop).await?;
    if stop.is_cancelled() {
        return Ok(());
    }
    if banner.cluster.is_none() {
        banner.print(false);
        stop.cancelled().await;
        return Ok(());
    }
    let receiver = demo::start(&data_dir, &banner.api_url, &banner.api_key.value, &stop).await?;
    banner.print(true);
    receiver.serve(stop).await
}
