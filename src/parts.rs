//! The tasks that run side by side in one process.
//! Invariant: when one ends, all are stopped. The API goes on for a while, so that its clients notice; what observes the
//! process ends last.

use std::time::Duration;

use anyhow::{Context as _, anyhow};
use postrider_dashboard::Pool;
use postrider_dispatcher::{
    connector::Connector,
    health::{self, database},
    telemetry::metrics,
};
use sqlx::PgPool;
use tokio::{
    net::TcpListener,
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{health as health_listener, log};

/// The last resort for a part that does not stop by itself: longer than the longest attempt.
const STOP_TIMEOUT: Duration = Duration::from_secs(75);
/// The same for the last ones, when nothing else runs any more.
const LAST_TIMEOUT: Duration = Duration::from_secs(2);

pub(crate) struct Parts {
    running: JoinSet<anyhow::Result<()>>,
    /// Health, metrics and the state of the database.
    last: JoinSet<()>,
    /// Whether the state of the database is.
    is_watched: bool,
    /// A stop was requested, or a part has ended.
    stop: CancellationToken,
    /// Nobody sends requests any more.
    close: CancellationToken,
    /// Everything in `running` has ended.
    end: CancellationToken,
    /// How long requests are served after `stop`.
    drain_delay: Duration,
}

impl Parts {
    pub(crate) fn new(stop: CancellationToken, drain_delay: Duration) -> Self {
        Self {
            running: JoinSet::new(),
            last: JoinSet::new(),
            is_watched: false,
            stop,
            close: CancellationToken::new(),
            end: CancellationToken::new(),
            drain_delay,
        }
    }

    pub(crate) fn add<F, E>(&mut self, name: &'static str, start: impl FnOnce(CancellationToken) -> F)
    where
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<anyhow::Error> + Send,
    {
        self.add_until(self.stop.clone(), name, start);
    }

    /// For the API and what it needs.
    pub(crate) fn add_serving<F, E>(&mut self, name: &'static str, start: impl FnOnce(CancellationToken) -> F)
    where
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<anyhow::Error> + Send,
    {
        self.add_until(self.close.clone(), name, start);
    }

    fn add_until<F, E>(
        &mut self,
        stop: CancellationToken,
        name: &'static str,
        start: impl FnOnce(CancellationToken) -> F,
    ) where
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<anyhow::Error> + Send,
    {
        let part = start(stop.clone());
        self.running.spawn(async move {
            match part.await {
                Err(error) => Err(error.into().context(format!("the {name} failed"))),
                Ok(()) if stop.is_cancelled() => Ok(()),
                Ok(()) => Err(anyhow!("the {name} ended unexpectedly")),
            }
        });
    }

    /// Where an address is set for it.
    pub(crate) fn add_health(&mut self, listener: Option<TcpListener>) {
        if let Some(listener) = listener {
            let end = self.end.clone();
            self.last.spawn(async move {
                if let Err(error) = health_listener::serve(listener, end).await {
                    tracing::error!(%error, "the health listener failed");
                }
            });
        }
    }

    /// Waits for the database and does the work that a start needs, again if an outage interrupts it. None if a stop was
    /// requested first. The process is live meanwhile but not ready, instead of exiting into a restart loop that backs off
    /// for minutes. A database that refuses the settings, such as a wrong password, is an error.
    pub(crate) async fn prepare<T>(
        &mut self,
        database: &Connector,
        mut work: impl AsyncFnMut() -> anyhow::Result<T>,
    ) -> anyhow::Result<Option<T>> {
        while self
            .wait_for_database(database)
            .await
            .context("cannot connect to the database")?
        {
            match work().await {
                Err(error) if database::reports(error.as_ref()) => {}
                done => return done.map(Some),
            }
            // Such as an embedded database that can't be kept running.
            if let Some(ended) = self.running.try_join_next() {
                return ended?.map(|()| None);
            }
            if database::pause_before_retry(&self.stop).await.is_break() {
                break;
            }
        }
        Ok(None)
    }

    /// False if a stop was requested first. From the first time on its state is watched.
    async fn wait_for_database(&mut self, database: &Connector) -> Result<bool, sqlx::Error> {
        let is_there = database::wait_until_writable(database, &self.stop).await?;
        if is_there && !self.is_watched {
            self.is_watched = true;
            self.last
                .spawn(database::watch(database.clone(), self.end.clone()));
        }
        Ok(is_there)
    }

    /// Metrics of the whole installation.
    pub(crate) fn add_database_metrics(&mut self, pool: Pool) {
        self.last
            .spawn(metrics::watch_table_bytes(pool.clone(), self.end.clone()));
        self.last.spawn(metrics::watch_database(pool, self.end.clone()));
    }

    /// The endpoints with the most failed attempts, if the operator wants any.
    pub(crate) fn add_top_endpoints(&mut self, pool: PgPool, count: usize) {
        if count > 0 {
            self.add("metric of failing endpoints", |stop| async move {
                metrics::watch_top_endpoints(pool, count, stop).await;
                Ok::<(), anyhow::Error>(())
            });
        }
    }

    /// Follows the log filter that operators set while this process runs.
    pub(crate) fn add_log_filter(&mut self, pool: Pool) {
        self.add("log filter", |stop| async move {
            log::follow(pool, stop).await;
            Ok::<(), anyhow::Error>(())
        });
    }

    /// Returns when every part has ended: without an error if they were asked to stop.
    pub(crate) async fn run_until_stopped(mut self) -> anyhow::Result<()> {
        let mut result = Ok(());
        health::started();
        tokio::select! {
            () = self.stop.cancelled() => {}
            Some(ended) = self.running.join_next() => result = ended.unwrap_or_else(|panic| Err(panic.into())),
        }
        health::stopping();
        self.stop.cancel();
        let rest = async {
            if result.is_ok() {
                sleep(self.drain_delay).await;
            }
            self.close.cancel();
            while let Some(ended) = self.running.join_next().await {
                let ended = ended.unwrap_or_else(|panic| Err(panic.into()));
                if result.is_ok() {
                    result = ended;
                }
            }
        };
        if timeout(self.drain_delay + STOP_TIMEOUT, rest).await.is_err() {
            result = Err(anyhow!(
                "not every part stopped within {} s",
                STOP_TIMEOUT.as_secs()
            ));
        }
        self.end.cancel();
        // What is left is aborted.
        let _ = timeout(LAST_TIMEOUT, async {
            while self.last.join_next().await.is_some() {}
        })
        .await;
        result
    }
}
