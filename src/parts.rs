//! The tasks that run side by side in one process.
//! Invariant: when one ends, all are stopped.

use std::time::Duration;

use anyhow::anyhow;
use postrider_dashboard::Pool;
use postrider_dispatcher::telemetry::metrics;
use tokio::{net::TcpListener, task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;

use crate::{health, log};

/// The last resort for a part that does not stop by itself: longer than the longest attempt.
const STOP_TIMEOUT: Duration = Duration::from_secs(75);

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
                Err(error) => Err(error.into().context(format!("the {name} failed"))),
                Ok(()) if stop.is_cancelled() => Ok(()),
                Ok(()) => Err(anyhow!("the {name} ended unexpectedly")),
            }
        });
    }

    /// Where an address is set for it.
    pub(crate) fn add_health(&mut self, listener: Option<TcpListener>, pool: Pool) {
        if let Some(listener) = listener {
            self.add("health listener", |stop| health::serve(listener, pool, stop));
        }
    }

    /// Metrics of the whole installation.
    pub(crate) fn add_database_metrics(&mut self, pool: Pool) {
        self.add("database metrics", |stop| async move {
            metrics::watch_database(pool, stop).await;
            Ok::<(), anyhow::Error>(())
        });
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
        if timeout(STOP_TIMEOUT, rest).await.is_err() {
            return Err(anyhow!(
                "not every part stopped within {} s",
                STOP_TIMEOUT.as_secs()
            ));
        }
        result
    }
}
