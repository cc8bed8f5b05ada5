//! Jobs requested through the API: pushed in the transaction of the request, so that a job exists if and only if the
//! request was committed. A job runs for as long as it takes; when its worker dies another one resumes it within
//! seconds.

use std::{sync::Arc, time::Duration};

use apalis::prelude::*;
use apalis_postgres::{Config, Error, PostgresStorage, queries::push_tasks};
use serde::{Deserialize, Serialize};
use sqlx::{PgConnection, PgPool};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::{stopped, worker_name};
use crate::{maintenance::erasure, store::schema};

const QUEUE: &str = "postrider.requested";
/// Each poll is several transactions of the library: a shorter interval would cost an idle system more than
/// everything else.
const POLL_EVERY: Duration = Duration::from_secs(4);
/// A worker without a heartbeat for three of these is considered dead. One that only slept does no harm when it
/// resumes: every step checks that it is still wanted.
const HEARTBEAT: Duration = Duration::from_secs(8);
const HEARTBEATS_MISSED_MAX: usize = 3;
/// A job is restarted whenever its worker dies or stops.
const RUNS_MAX: usize = 1_000_000;
/// Jobs fetched by one poll. The library starts all of them at once.
const TAKEN_AT_ONCE_MAX: usize = 4;
/// Erasures running at once in one process. Each holds a connection; the others wait without one.
const ERASURES_AT_ONCE_MAX: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RequestedJob {
    /// From an earlier version. Replays are found by their own rows: see `replays/run.rs`.
    Replay {
        id: i64,
    },
    Erase {
        id: i64,
    },
}

/// Dependencies of requested jobs.
#[derive(Clone)]
struct Means {
    pool: PgPool,
    erasures: Arc<Semaphore>,
    stop: CancellationToken,
}

/// In the caller's transaction. apalis names its extension's types without a schema, so they have to be on the search path.
pub(crate) async fn push(connection: &mut PgConnection, job: &RequestedJob) -> Result<(), sqlx::Error> {
    let args = serde_json::to_vec(job).map_err(|error| sqlx::Error::Encode(Box::new(error)))?;
    let task = TaskBuilder::new(args).max_attempts(RUNS_MAX).build();
    schema::find_extensions(connection).await?;
    push_tasks(connection, QUEUE, vec![task])
        .await
        .map_err(|error| match error {
            Error::Database(error) => error,
            other => sqlx::Error::Encode(Box::new(other)),
        })
}

pub(super) async fn run(pool: PgPool, stop: CancellationToken) -> Result<(), WorkerError> {
    let config = Config::default()
        .queue(QUEUE)
        .batch_size(TAKEN_AT_ONCE_MAX)
        .heartbeat_interval(HEARTBEAT)
        .missed_heartbeats(HEARTBEATS_MISSED_MAX);
    let storage = PostgresStorage::new(&pool)
        .with_config(config)
        .poll_with_strategy(Strategy::new().interval(POLL_EVERY));
    let means = Means {
        pool,
        erasures: Arc::new(Semaphore::new(ERASURES_AT_ONCE_MAX)),
        stop: stop.clone(),
    };
    let worker = WorkerBuilder::new(worker_name("requested"))
        .backend(storage)
        .data(means)
        .build(perform);
    worker.run_until(stopped(stop)).await
}

async fn perform(work: RequestedJob, means: Data<Means>) -> Result<(), BoxDynError> {
    let id = match work {
        RequestedJob::Replay { .. } => return Ok(()),
        RequestedJob::Erase { id } => id,
    };
    let _place = tokio::select! {
        place = means.erasures.acquire() => place?,
        () = means.stop.cancelled() => return Err(erasure::Interrupted::Stopped.into()),
    };
    erasure::run(&means.pool, id, &means.stop).await?;
    Ok(())
}
