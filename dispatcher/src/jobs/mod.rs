//! Durable background work, carried by apalis. Off the hot path: deliveries never pass through here.
//!
//! A cron tick on every node pushes the hour's duties under a key made of the hour, so that one node does them. An
//! apalis job that fails is retried at once and an SQL error ends its worker: each job keeps to its own schedule, and
//! the workers are started again with a pause.

mod duties;
mod works;

use std::time::{Duration, SystemTime};

use apalis::prelude::*;
use apalis_cron::{CronScheduler, Schedule, Tick, timezone::Utc};
use apalis_postgres::{Config, PostgresStorage};
use sqlx::PgPool;
use tokio_util::sync::CancellationToken;

use crate::{replays::run::Runner, vault::Vault};
use duties::Duty;
pub(crate) use works::{Work, push};

const QUEUE: &str = "postrider.duties";
const HOUR_SECONDS: u64 = 3_600;
/// Duties are in no hurry, and an idle system stays idle.
const POLL_EVERY: Duration = Duration::from_secs(10);
const RESTART_WAIT: Duration = Duration::from_secs(5);

/// Makes the tables that apalis keeps its jobs in, in a schema of its own.
pub(crate) async fn migrate(pool: &PgPool) -> Result<(), apalis_postgres::Error> {
    PostgresStorage::setup(pool).await
}

pub(crate) async fn run(pool: PgPool, vault: Vault, runner: Runner, stop: CancellationToken) {
    tokio::join!(
        keep_running("ticks", &stop, || push_ticks(pool.clone(), stop.clone())),
        keep_running("duties", &stop, || do_duties(
            pool.clone(),
            vault.clone(),
            stop.clone()
        )),
        keep_running("works", &stop, || works::do_works(
            pool.clone(),
            runner.clone(),
            stop.clone()
        )),
    );
}

async fn keep_running<F>(name: &'static str, stop: &CancellationToken, mut worker: impl FnMut() -> F)
where
    F: Future<Output = Result<(), WorkerError>>,
{
    while !stop.is_cancelled() {
        match worker().await {
            Ok(()) => {}
            Err(error) => {
                tracing::warn!(worker = name, %error, "a background worker stopped; starting it again")
            }
        }
        tokio::select! {
            () = tokio::time::sleep(RESTART_WAIT) => {}
            () = stop.cancelled() => {}
        }
    }
}

/// The start of each hour.
struct Hourly;

impl Schedule<Utc> for Hourly {
    fn next_tick(&mut self, _: &Utc) -> Option<Tick<Utc>> {
        Some(Tick::new((hours_since_epoch()? + 1) * HOUR_SECONDS))
    }
}

fn hours_since_epoch() -> Option<u64> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok()?;
    Some(now.as_secs() / HOUR_SECONDS)
}

fn this_hour() -> String {
    Tick::<Utc>::new(hours_since_epoch().unwrap_or_default() * HOUR_SECONDS)
        .get_timestamp()
        .to_string()
}

async fn push_ticks(pool: PgPool, stop: CancellationToken) -> Result<(), WorkerError> {
    // This hour's too, unless somebody has: a program that is restarted often must not miss them all.
    if let Err(error) = push_hour(this_hour(), &pool).await {
        tracing::warn!(%error, "the duties of this hour could not be pushed");
    }
    let worker = WorkerBuilder::new(worker_name("ticks"))
        .backend(CronScheduler::new(Hourly))
        .data(pool)
        .build(push_tick);
    worker.run_until(stopped(stop)).await
}

async fn push_tick(tick: Tick<Utc>, pool: Data<PgPool>) -> Result<(), BoxDynError> {
    push_hour(tick.get_timestamp().to_string(), &pool).await
}

/// Once for each hour, whoever is first.
async fn push_hour(hour: String, pool: &PgPool) -> Result<(), BoxDynError> {
    let mut storage = duties_storage(pool);
    for duty in Duty::ALL {
        let key = format!("{duty:?}-{hour}");
        let task = TaskBuilder::new(duty)
            .idempotency_key(key)
            .max_attempts(3)
            .build();
        storage.push_task(task).await?;
    }
    Ok(())
}

async fn do_duties(pool: PgPool, vault: Vault, stop: CancellationToken) -> Result<(), WorkerError> {
    let storage = duties_storage(&pool).poll_with_strategy(Strategy::new().interval(POLL_EVERY));
    let worker = WorkerBuilder::new(worker_name("duties"))
        .backend(storage)
        .data(pool)
        .data(vault)
        .build(duties::perform);
    worker.run_until(stopped(stop)).await
}

fn duties_storage(pool: &PgPool) -> PostgresStorage<Duty> {
    let config = Config::default().queue(QUEUE).batch_size(1);
    PostgresStorage::new(pool).with_config(config)
}

/// apalis takes a worker's name as its identity, also across processes.
fn worker_name(kind: &str) -> String {
    format!("{kind}-{}", uuid::Uuid::now_v7())
}

async fn stopped(stop: CancellationToken) -> std::io::Result<()> {
    stop.cancelled().await;
    Ok(())
}
