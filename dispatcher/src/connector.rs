//! Opens connections to one database, on whichever of its hosts accepts writes. Everything that connects does so here.
//!
//! With one host this is sqlx and nothing else. With several, a connection goes to the host that was found last and is
//! checked; if that fails, all are asked (`hosts.rs`). A pool opens connections by itself: it is told where to, and each new
//! connection is checked. Connections from before a move to another host are not used again ([`Connector::is_outdated`]).

mod facts;
mod hosts;
mod url;

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use sqlx::{
    ConnectOptions, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};

pub use self::url::{Access, UrlError};
use crate::{
    db_timeout::{is_alive, within},
    health::database,
};
pub(crate) use hosts::HostState;
use hosts::{Fit, Hosts};

/// For a check of an open connection.
const CHECK_MAX: Duration = Duration::from_secs(1);
const CHECK_EVERY: Duration = Duration::from_secs(1);
const CHECK_EVERY_IN_OUTAGE: Duration = Duration::from_millis(200);
/// A primary where a standby is preferred: after this, all are asked again.
const SECOND_BEST_KEPT: Duration = Duration::from_secs(10);

/// Runs on each new connection of a pool.
pub type Setup =
    for<'c> fn(&'c mut PgConnection) -> Pin<Box<dyn Future<Output = Result<(), sqlx::Error>> + Send + 'c>>;

#[derive(Clone)]
pub struct Connector {
    /// Of each host; there is at least one.
    options: Vec<PgConnectOptions>,
    /// None: there is one, used whatever it is.
    hosts: Option<Arc<Hosts>>,
}

/// Names the hosts: the options contain the password.
impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.options.iter().map(url::name))
            .finish()
    }
}

impl From<PgConnectOptions> for Connector {
    fn from(options: PgConnectOptions) -> Self {
        Self {
            options: vec![options],
            hosts: None,
        }
    }
}

impl Connector {
    pub fn parse(text: &str, access: Access) -> Result<Self, UrlError> {
        let parsed = url::parse(text, access)?;
        let is_plain = parsed.hosts.len() == 1 && parsed.wanted == url::Wanted::Any;
        let names = parsed.hosts.iter().map(url::name).collect();
        let hosts =
            (!is_plain).then(|| Hosts::new(names, access, parsed.wanted, parsed.host_time_max).into());
        Ok(Self {
            options: parsed.hosts,
            hosts,
        })
    }

    /// Other settings for the same hosts.
    pub fn with(&self, change: impl Fn(PgConnectOptions) -> PgConnectOptions) -> Self {
        Self {
            options: self.options.iter().cloned().map(change).collect(),
            hosts: self.hosts.clone(),
        }
    }

    pub async fn connect(&self) -> Result<PgConnection, sqlx::Error> {
        match &self.hosts {
            None => self.options[0].connect().await,
            Some(hosts) => hosts.connect(&self.options).await,
        }
    }

    /// How long [`Self::connect`] takes at most, where there are several hosts.
    pub(crate) fn connect_time_max(&self) -> Option<Duration> {
        self.hosts.as_ref().map(|hosts| hosts.connect_time_max())
    }

    /// Whether a connection of this age was opened before the database was last seen read-only, or on another host.
    pub fn is_outdated(&self, age: Duration) -> bool {
        match &self.hosts {
            None => database::is_outdated(age),
            Some(hosts) => {
                hosts.was_left_since(age) || hosts.access == Access::Writes && database::is_outdated(age)
            }
        }
    }

    /// The server that was found accepts no writes: others are asked.
    pub(crate) fn give_up(&self) {
        if let Some(hosts) = &self.hosts {
            hosts.give_up();
        }
    }

    /// A pool of this connector that connects when it is used. `settings` are those of `db_timeout`; `setup` runs on each new
    /// connection.
    pub fn pool_lazily(&self, settings: PgPoolOptions, setup: Option<Setup>) -> PgPool {
        let Some(hosts) = self.hosts.clone() else {
            let settings = match setup {
                Some(setup) => settings.after_connect(move |connection, _| {
                    Box::pin(async move { run(setup, connection).await })
                }),
                None => settings,
            };
            return settings.connect_lazy_with(self.options[0].clone());
        };
        let (new, kept) = (hosts.clone(), self.clone());
        let settings = settings
            .before_acquire(move |connection, opened| {
                let kept = kept.clone();
                Box::pin(async move { Ok(!kept.is_outdated(opened.age) && is_alive(connection).await?) })
            })
            .after_connect(move |connection, _| {
                let hosts = new.clone();
                Box::pin(async move {
                    hosts.check(connection).await?;
                    match setup {
                        Some(setup) => run(setup, connection).await,
                        None => Ok(()),
                    }
                })
            });
        let pool = |host: usize| settings.connect_lazy_with(self.options[host].clone());
        let pool = hosts.register(pool, &self.options);
        if hosts.begin_to_watch() {
            tokio::spawn(self.clone().follow(hosts));
        }
        pool
    }

    /// One that is connected.
    pub async fn pool(&self, settings: PgPoolOptions, setup: Option<Setup>) -> Result<PgPool, sqlx::Error> {
        if self.hosts.is_some() {
            self.connect().await?;
        }
        let pool = self.pool_lazily(settings, setup);
        drop(pool.acquire().await?);
        Ok(pool)
    }

    /// What each host says of itself, if there are several.
    pub(crate) async fn ask_hosts(&self) -> Option<Vec<HostState>> {
        match &self.hosts {
            Some(hosts) if self.options.len() > 1 => Some(hosts.ask_all(&self.options).await),
            _ => None,
        }
    }

    /// Somebody checks all the time whether the database is there, and connects again when it is not.
    pub(crate) fn is_watched(&self) {
        if let Some(hosts) = &self.hosts {
            hosts.begin_to_watch();
        }
    }

    /// For pools of a database that nobody watches: finds the host that they are to connect to.
    async fn follow(self, hosts: Arc<Hosts>) {
        let mut kept: Option<PgConnection> = None;
        let mut found_at = Instant::now();
        while hosts.has_pools() {
            if let Some(mut connection) = kept.take() {
                match within(CHECK_MAX, hosts.examine_open(&mut connection)).await {
                    Ok(Fit::Best) => kept = Some(connection),
                    Ok(Fit::Second) if found_at.elapsed() < SECOND_BEST_KEPT => kept = Some(connection),
                    Ok(Fit::Second | Fit::None) => hosts.give_up(),
                    Err(_) => {}
                }
            }
            if kept.is_none() {
                kept = self.connect().await.ok();
                found_at = Instant::now();
            }
            let wait = match kept {
                Some(_) => CHECK_EVERY,
                None => CHECK_EVERY_IN_OUTAGE,
            };
            tokio::time::sleep(wait).await;
        }
        hosts.end_watch();
    }
}

/// The pool reports only that it got no connection.
async fn run(setup: Setup, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    setup(connection).await.inspect_err(|error| {
        if !database::reports(error) {
            tracing::warn!(%error, "preparing a database connection failed");
        }
    })
}
