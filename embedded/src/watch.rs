//! Watches the server while the program runs, and restarts it when it exits.
//! Invariant: a server that does not stay up ends the program, so that its supervisor notices.

use std::time::{Duration, Instant};

use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;

use super::{Cluster, EmbeddedError};

/// Looking costs a process of its own in some containers, and an idle system should stay idle.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// While the server seems to be gone.
const POLL_INTERVAL_MIN: Duration = Duration::from_millis(500);
/// The first restart is immediate, the delay doubles with each further one. Remains of the old server may need a moment.
const DELAY_MIN: Duration = Duration::from_secs(1);
/// Consecutive restarts, without a server that stayed up for `STABLE` in between.
const RESTARTS_MAX: u32 = 5;
const STABLE: Duration = Duration::from_secs(10 * 60);

/// Runs until stopped. Fails when the server does not stay up. `seems_down` returns when the server does not respond.
pub async fn keep_running(
    cluster: Cluster,
    seems_down: impl AsyncFn(),
    stop: CancellationToken,
) -> Result<(), EmbeddedError> {
    let (mut starts, mut up_since) = (0, Instant::now());
    loop {
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL) => {}
            () = async { tokio::time::sleep(POLL_INTERVAL_MIN).await; seems_down().await } => {}
            () = stop.cancelled() => return Ok(()),
        }
        if is_running(&cluster).await? {
            continue;
        }
        if up_since.elapsed() > STABLE {
            starts = 0;
        }
        let mut last = EmbeddedError::KeepsExiting;
        loop {
            if starts == RESTARTS_MAX {
                return Err(last);
            }
            let wait = match starts {
                0 => Duration::ZERO,
                starts => DELAY_MIN * 2_u32.pow(starts - 1),
            };
            starts += 1;
            tracing::error!(
                restart = starts,
                "the embedded database server exited; restarting it"
            );
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = stop.cancelled() => return Ok(()),
            }
            let started = cluster.clone();
            match spawn_blocking(move || started.restart()).await {
                Ok(Ok(())) => break,
                Ok(Err(error)) => {
                    tracing::error!(%error, "cannot start the embedded database server");
                    last = error;
                }
                Err(_) => return Err(EmbeddedError::KeepsExiting),
            }
        }
        up_since = Instant::now();
    }
}

async fn is_running(cluster: &Cluster) -> Result<bool, EmbeddedError> {
    let watched = cluster.clone();
    spawn_blocking(move || watched.is_running())
        .await
        .map_err(|_| EmbeddedError::KeepsExiting)
}
