//! Durable background work on apalis. Off the hot path: deliveries never pass through here. Replays run separately:
//! they need scheduling that is fair between tenants, which a job queue does not provide.
//!
//! A cron tick on every node pushes the hour's duties under an idempotency key derived from the hour, so that one
//! node runs them (more often with a short retention: see `tick_seconds`). apalis retries a failed job at once, and
//! an SQL error ends its worker: each job therefore keeps its own schedule, and workers are restarted after a pause.

mod requested;
mod scheduled;

use std::time::{Duration, Instant, SystemTime};

use apalis::prelude::*;
use apalis_cron::{CronScheduler, Schedule, Tick, timezone::Utc};
use apalis_postgres::{Config, PostgresStorage};
use sqlx::PgPool;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    bind::BindAll,
    health::database,
    maintenance::{notices::Notifier, replays::run::Runner},
    vault::Vault,
};
pub(crate) use requested::{RequestedJob, push};
use scheduled::{Duty, Retention};

const QUEUE: &str = "postrider.scheduled";
const HOUR_SECONDS: u64 = 3_600;
const TICK_SECONDS_MIN: u64 = 5;
/// Duties are not urgent, and an idle system should stay idle.
const POLL_EVERY: Duration = Duration::from_secs(10);
const RESTART_WAIT: Duration = Duration::from_secs(5);

pub(crate) async fn run(
    pool: PgPool,
    vault: Vault,
    runner: Runner,
    notifier: Notifier,
    stop: CancellationToken,
) {
    let every = Every(tick_seconds(runner.retention));
    let kept = Retention(runner.retention);
    // One task each: an apalis worker queries the database whenever its task is woken, for whatever reason.
    let tasks = TaskTracker::new();
    tasks.spawn(keep_running(
        "ticks",
        pool.clone(),
        stop.clone(),
        move |pool, stop| push_ticks(pool, every, stop),
    ));
    tasks.spawn(keep_running(
        "scheduled",
        pool.clone(),
        stop.clone(),
        move |pool, stop| run_scheduled(pool, vault.clone(), kept, stop),
    ));
    tasks.spawn(keep_running("requested", pool, stop.clone(), requested::run));
    tasks.spawn(runner.run());
    tasks.spawn(async move { notifier.run(&stop).await });
    tasks.close();
    tasks.wait().await;
}

async fn keep_running<F: Future<Output = Result<(), WorkerError>>>(
    name: &'static str,
    pool: PgPool,
    stop: CancellationToken,
    worker: impl Fn(PgPool, CancellationToken) -> F,
) {
    while !stop.is_cancelled() {
        let ended = worker(pool.clone(), stop.clone()).await;
        let ended_at = Instant::now();
        stop.run_until_cancelled(tokio::time::sleep(RESTART_WAIT)).await;
        // The error does not tell an outage from a bug. After the wait it is known which one it was.
        if let Err(error) = ended
            && !database::was_out_since(ended_at)
        {
            tracing::warn!(worker = name, %error, "background worker stopped; restarting");
        }
    }
}

/// An hour, or a tenth of a retention that is shorter than ten hours.
fn tick_seconds(retention: Duration) -> u64 {
    (retention.as_secs() / 10).clamp(TICK_SECONDS_MIN, HOUR_SECONDS)
}

/// A schedule with a tick every so many seconds.
#[derive(Clone, Copy)]
struct Every(u64);

impl Schedule<Utc> for Every {
    fn next_tick(&mut self, _: &Utc) -> Option<Tick<Utc>> {
        Some(Tick::new((self.ticks_since_epoch()? + 1) * self.0))
    }
}

impl Every {
    #[expect(
        clippy::disallowed_methods,
        reason = "only names the hour; the database decides which node does it"
    )]
    fn ticks_since_epoch(self) -> Option<u64> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok()?;
        Some(now.as_secs() / self.0)
    }

    fn this_tick(self) -> Tick<Utc> {
        Tick::new(self.ticks_since_epoch().unwrap_or_default() * self.0)
    }
}

async fn push_ticks(pool: PgPool, every: Every, stop: CancellationToken) -> Result<(), WorkerError> {
    // Also this hour's, unless another node has: a process that is restarted often must not miss them all.
    if let Err(error) = push_tick(every.this_tick(), Data(pool.clone())).await
        && !database::reports(&*error)
    {
        tracing::warn!(%error, "scheduling the hourly duties failed");
    }
    let worker = WorkerBuilder::new(worker_name("ticks"))
        .backend(CronScheduler::new(every))
        .data(pool)
        .build(push_tick);
    worker.run_until(stopped(stop)).await
}

/// Once per hour, by the first node.
async fn push_tick(tick: Tick<Utc>, Data(pool): Data<PgPool>) -> Result<(), BoxDynError> {
    let hour = tick.get_timestamp().to_string();
    let mut storage = scheduled_storage(&pool);
    for duty in Duty::ALL {
        let key = format!("{duty:?}-{hour}");
        // Usually another node was first. If two push at the same moment, one of them is rejected.
        if is_pushed(&pool, &key).await? {
            continue;
        }
        let task = TaskBuilder::new(duty)
            .idempotency_key(key)
            .max_attempts(3)
            .build();
        match storage.push_task(task).await {
            Err(error) if is_unique_violation(&error) => {}
            pushed => pushed?,
        }
    }
    Ok(())
}

/// Another node was first by a moment.
fn is_unique_violation(error: &(dyn std::error::Error + 'static)) -> bool {
    let found = database::in_chain(error).and_then(sqlx::Error::as_database_error);
    found.is_some_and(|error| error.is_unique_violation())
}

async fn is_pushed(pool: &PgPool, key: &str) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("select exists (select from apalis.jobs where job_type = $1 and idempotency_key = $2)")
        .bind_all((QUEUE, key))
        .fetch_one(pool)
        .await
}

async fn run_scheduled(
    pool: PgPool,
    vault: Vault,
    kept: Retention,
    stop: CancellationToken,
) -> Result<(), WorkerError> {
    let poll_every = POLL_EVERY.min(kept.0 / 60);
    let storage = scheduled_storage(&pool).poll_with_strategy(Strategy::new().interval(poll_every));
    let worker = WorkerBuilder::new(worker_name("scheduled"))
        .backend(storage)
        .data(pool)
        .data(vault)
        .data(kept)
        .build(scheduled::perform);
    worker.run_until(stopped(stop)).await
}

fn scheduled_storage(pool: &PgPool) -> PostgresStorage<Duty> {
    let config = Config::default().queue(QUEUE).batch_size(1);
    PostgresStorage::new(pool).with_config(config)
}

/// apalis uses a worker's name as its identity, also across processes.
fn worker_name(kind: &str) -> String {
    format!("{kind}-{}", uuid::Uuid::now_v7())
}

async fn stopped(stop: CancellationToken) -> std::io::Result<()> {
    stop.cancelled().await;
    Ok(())
}
