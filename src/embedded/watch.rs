//! Watches the server while the program runs: one that has ended, killed by the system or by somebody, is started again.
//! Invariant: a server that does not stay up ends the program, so that whoever supervises it learns of it.

use std::time::{Duration, Instant};

use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;

use super::{Cluster, EmbeddedError};

const LOOK_EVERY: Duration = Duration::from_millis(500);
/// The first start comes at once, each further one waits twice as long. What was left of the old server may need a moment.
const WAIT_MIN: Duration = Duration::from_secs(1);
/// Starts in a row, without a server that stayed up for `STEADY` between them.
const STARTS_MAX: u32 = 5;
const STEADY: Duration = Duration::from_secs(10 * 60);

/// Until told to stop. Fails when the server can't be kept running.
pub async fn keep_running(cluster: Cluster, stop: CancellationToken) -> Result<(), EmbeddedError> {
    let (mut starts, mut up_since) = (0, Instant::now());
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            () = stop.cancelled() => return Ok(()),
        }
        if is_running(&cluster).await? {
            continue;
        }
        if up_since.elapsed() > STEADY {
            starts = 0;
        }
        let mut last = EmbeddedError::Ended;
        loop {
            if starts == STARTS_MAX {
                return Err(last);
            }
            let wait = match starts {
                0 => Duration::ZERO,
                starts => WAIT_MIN * 2_u32.pow(starts - 1),
            };
            starts += 1;
            tracing::error!(
                start = starts,
                "the embedded database server has ended; starting it again"
            );
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = stop.cancelled() => return Ok(()),
            }
            let started = cluster.clone();
            match spawn_blocking(move || started.start_again()).await {
                Ok(Ok(())) => break,
                Ok(Err(error)) => {
                    tracing::error!(%error, "the embedded database server does not start");
                    last = error;
                }
                Err(_) => return Err(EmbeddedError::Ended),
            }
        }
        up_since = Instant::now();
    }
}

async fn is_running(cluster: &Cluster) -> Result<bool, EmbeddedError> {
    let looked_at = cluster.clone();
    spawn_blocking(move || looked_at.is_running())
        .await
        .map_err(|_| EmbeddedError::Ended)
}
