//! The dispatcher: owns shards, reads the queue, signs, sends and records.
//!
//! One delivery's way: `read.rs` sees its row, `engine.rs` puts it into its endpoint's `lane.rs` and picks it,
//! `attempt.rs` makes the attempt through `send.rs`, `retry.rs` decides, `record.rs` writes it down.
//!
//! Invariant: no coordination per delivery. One owner for an endpoint, fenced by an epoch, is what makes the bulkhead
//! exact across machines.

pub mod answer;
mod attempt;
mod bodies;
mod breaker;
mod clock;
mod disable;
mod division;
mod draining;
mod endpoint;
mod engine;
pub mod erasure;
mod fair;
#[cfg(test)]
mod fleet_simulation;
pub mod guard;
mod hands;
mod job;
mod jobs;
pub mod key_holders;
mod lane;
pub mod lease;
mod line;
mod lookout;
pub mod meters;
pub mod notices;
mod ownership;
pub mod partitions;
mod places;
pub mod planned_rotation;
pub mod proxy;
mod rate;
mod read;
#[cfg(test)]
mod reader_simulation;
mod record;
pub mod relay;
pub mod replays;
mod restored;
pub mod retention;
pub mod retry;
pub mod rollup;
mod round_robin;
pub mod schema;
pub mod sealed;
pub mod send;
pub mod settings;
mod shards;
#[cfg(test)]
mod simulation;
mod snapshot;
pub mod statistics;
mod survey;
pub mod tls;
pub mod traces;
pub mod vault;
mod wake;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use postrider_proto::{EndpointId, EventId};
use sqlx::{
    PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::sync::{mpsc, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use uuid::Uuid;

use answer::Answered;
pub use ownership::LEASE;
pub use settings::Settings;
pub use wake::Wake;

/// Connections that renew the lease, apart from all others: nothing else may make it wait. The second one is for when the
/// first has fallen silent.
const LEASE_CONNECTIONS: u32 = 2;
/// Connections for what others wait for: changed settings, cancelled replays and endpoints to disable, one for each of the
/// tasks that use them. Background work can't take them away.
const CONTROL_CONNECTIONS: u32 = 3;
/// For the last statements, once nothing is on the wire. A little more than one may take.
const LEAVE_MAX: Duration = Duration::from_secs(12);

/// How the planner is told to do what the hot path's few statements need: walk an index for each row of a list. It
/// knows nothing of how long the lists are, plans for tables that were empty a moment ago, and would scan them. Where that is
/// not enough a statement says `offset 0`, so that it is asked for each row and not for all beforehand, or names the condition
/// of the index it wants. `tests/it/plans.rs` looks at every plan.
const HOT_PLANS: [(&str, &str); 6] = [
    ("enable_seqscan", "off"),
    ("enable_bitmapscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("plan_cache_mode", "force_generic_plan"),
    ("jit", "off"),
];

/// Messages the reader may be ahead of the engine.
const READ_AHEAD: usize = 16;
const PUBLISH_AGAIN: Duration = Duration::from_millis(100);
const DROP_AGAIN: Duration = Duration::from_millis(100);
const DROP_AGAIN_MAX: Duration = Duration::from_secs(5);
/// Rows of a deleted endpoint removed by one statement.
const DROP_BATCH: i64 = 2_000;

/// Everything a dispatcher needs; made by the root.
pub struct Dispatcher {
    pub pool: PgPool,
    /// The reader's own connection: never through a pooler, because a snapshot is worth something only on the
    /// connection that took it.
    pub direct: PgConnectOptions,
    pub settings: Settings,
    pub guard: guard::Guard,
    pub vault: vault::Vault,
    pub wake: Wake,
    /// Producers' own databases to relay from.
    pub sources: Vec<PgConnectOptions>,
    pub tracer: traces::Tracer,
}

#[derive(Debug, thiserror::Error)]
pub enum DispatcherError {
    #[error("the database did not answer: {0}")]
    Database(#[from] sqlx::Error),
    #[error("the HTTP client can't be made: {0}")]
    Client(#[from] send::SenderError),
}

impl Dispatcher {
    /// Runs until told to stop; then sends nothing new, finishes what is on the wire and hands its shards back.
    pub async fn run(self, stop: CancellationToken) -> Result<(), DispatcherError> {
        meters::start();
        restored::renumber(&self.pool).await?;
        let id = Uuid::now_v7();
        let asked_at = Instant::now();
        let now: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()")
            .fetch_one(&self.pool)
            .await?;
        let clock = clock::Clock::new(asked_at, now);
        let lease = lease::Lease::new();
        let tasks = TaskTracker::new();
        let abandon = CancellationToken::new();
        let leave = CancellationToken::new();

        let (events, heard) = mpsc::unbounded_channel();
        let (finished, finished_out) = mpsc::unbounded_channel();
        let (cycles, cycles_out) = mpsc::channel(1);
        let (messages, messages_out) = mpsc::channel(READ_AHEAD);
        let (drained, drained_out) = mpsc::unbounded_channel();
        let (deleted, deleted_out) = mpsc::unbounded_channel();
        let (withdrawals, withdrawals_out) = mpsc::unbounded_channel();
        let (surveys, surveys_out) = mpsc::unbounded_channel();
        let (applied, applied_out) = watch::channel(None);
        let (activity, activity_out) = watch::channel(Vec::new());
        let statistics = statistics::Statistics::default();

        let direct = self.direct.clone().options(HOT_PLANS);
        let leases = answer::lively(PgPoolOptions::new())
            .max_connections(LEASE_CONNECTIONS)
            .connect_with(self.direct.clone())
            .await?;
        meters::watch_pool("lease", &leases);
        let control = answer::lively(PgPoolOptions::new())
            .max_connections(CONTROL_CONNECTIONS)
            .connect_lazy_with((*self.pool.connect_options()).clone());
        meters::watch_pool("control", &control);
        let to_disable = Wake::default();
        let recorder = record::Recorder {
            line: line::Line::new(direct.clone()),
            to_disable: to_disable.clone(),
            owner: id,
            finished: finished_out,
            out: events.clone(),
            clock: clock.clone(),
            statistics: statistics.clone(),
        };
        let attempts = Arc::new(attempt::Attempts {
            database: direct.clone(),
            sender: send::Sender::new(self.guard, self.settings.max_in_flight)?,
            clock: clock.clone(),
            lease: lease.clone(),
            jitter: self.settings.jitter,
            finished: finished.clone(),
            tasks: tasks.clone(),
            hands: hands::Hands::new(),
            large_bodies: bodies::LargeBodies::new(&direct, self.tracer.is_on()),
            tracer: self.tracer,
        });
        let loaders = TaskTracker::new();
        let picked = lane::Pace::ALL.map(|pace| {
            let (picked, picked_out) = mpsc::unbounded_channel();
            loaders.spawn(attempts.clone().run(pace, picked_out));
            picked
        });
        loaders.close();
        let hurry = Wake::default();
        let surveyor = survey::Surveyor::new(direct.clone(), surveys_out, events.clone());
        let reader = read::Reader {
            wake: self.wake.clone(),
            hurry: hurry.clone(),
            options: direct,
            clock: clock.clone(),
            cycles: cycles_out,
            out: messages,
        };
        let shards = shards::Shards {
            pool: leases,
            id,
            name: self.settings.name.clone(),
            lease: lease.clone(),
            events: events.clone(),
            drained: drained_out,
        };
        let vault = self.vault.clone();
        let flusher = statistics::Flusher {
            pool: self.pool.clone(),
            writer: id,
            clock: clock.clone(),
            statistics,
            activity: activity_out,
        };
        let disabler = disable::Disabler {
            pool: control.clone(),
            wake: to_disable,
            stop: leave.clone(),
        };
        let withdrawer = replays::withdraw::Withdrawer {
            pool: control.clone(),
            owner: id,
            withdrawals: withdrawals_out,
            out: events.clone(),
            stop: leave.clone(),
        };
        let retention = self.settings.retention;
        let public_url = self.settings.public_url.clone();
        let engine = engine::Engine {
            places: places::Places::new(self.settings.max_in_flight),
            settings: self.settings,
            vault: self.vault,
            clock,
            events,
            picked,
            finished,
            started: Instant::now(),
            cycles,
            hurry: hurry.clone(),
            drained,
            deleted,
            withdrawals,
            surveys,
            applied,
            activity,
            state: engine::State::default(),
        };

        let recorder = tokio::spawn(recorder.run(abandon.clone()));
        let reader = tokio::spawn(reader.run(leave.clone()));
        tokio::spawn(surveyor.run(leave.clone()));
        let shards = tokio::spawn(shards.run(stop.clone(), leave.clone()));
        tokio::spawn(publish_applied(control, id, applied_out));
        tokio::spawn(drop_deleted(self.pool.clone(), deleted_out, leave.clone()));
        tokio::spawn(withdrawer.run());
        tokio::spawn(disabler.run());
        let flusher = tokio::spawn(flusher.run(leave.clone()));
        let runner = replays::run::Runner {
            pool: self.pool.clone(),
            wake: self.wake.clone(),
            retention,
            stop: leave.clone(),
        };
        let teller = notices::Teller {
            pool: self.pool.clone(),
            wake: self.wake.clone(),
            public_url,
        };
        let jobs = tokio::spawn(jobs::run(self.pool.clone(), vault, runner, teller, leave.clone()));
        let relays = TaskTracker::new();
        for (number, source) in self.sources.into_iter().enumerate() {
            relays.spawn(relay::run(
                number + 1,
                source,
                self.pool.clone(),
                self.wake.clone(),
                stop.clone(),
            ));
        }
        relays.close();

        engine.run(heard, messages_out, self.wake, stop).await;

        // What is still on the wire has had its time: it is handed back, and another owner sends it.
        lease.end();
        loaders.wait().await;
        attempts.hands.close();
        tasks.close();
        tasks.wait().await;
        // With it goes its sender of results: the recorder ends when the last one is gone.
        drop(attempts);
        let flushed = tokio::time::timeout(Duration::from_secs(5), recorder).await;
        if flushed.is_err() {
            abandon.cancel();
            tracing::warn!("the last results could not be recorded: their deliveries will be sent again");
        }
        leave.cancel();
        hurry.now();
        // Each has its own limit but apalis, which waits for ever on a connection that fell silent.
        let ended = async { tokio::join!(reader, shards, jobs, flusher, relays.wait()) };
        if tokio::time::timeout(LEAVE_MAX, ended).await.is_err() {
            tracing::warn!("background work did not end in time and is left where it stands");
        }
        Ok(())
    }
}

/// Says which settings this dispatcher has applied, for those who wait until a change has taken effect.
async fn publish_applied(pool: PgPool, id: Uuid, mut applied: watch::Receiver<Option<String>>) {
    while applied.changed().await.is_ok() {
        let Some(snapshot) = applied.borrow_and_update().clone() else {
            continue;
        };
        let written = sqlx::query("update postrider.dispatchers set applied = $2::pg_snapshot where id = $1")
            .bind(id)
            .bind(snapshot)
            .execute(&pool)
            .answered()
            .await;
        if let Err(error) = written {
            tracing::warn!(%error, "the applied settings could not be published; trying again");
            tokio::time::sleep(PUBLISH_AGAIN).await;
            applied.mark_changed();
        }
    }
}

/// Rows of deleted endpoints, also those of producers that committed late. A deletion is for good, so that this needs
/// no fence, and what fails is tried again until it succeeds.
async fn drop_deleted(
    pool: PgPool,
    mut deleted: mpsc::UnboundedReceiver<EndpointId>,
    stop: CancellationToken,
) {
    while let Some(endpoint) = deleted.recv().await {
        let mut wait = DROP_AGAIN;
        while let Err(error) = drop_rows(&pool, endpoint, &stop).await {
            tracing::warn!(%error, %endpoint, "rows of a deleted endpoint could not be dropped yet; trying again");
            tokio::select! {
                () = tokio::time::sleep(wait) => wait = (wait * 2).min(DROP_AGAIN_MAX),
                () = stop.cancelled() => return,
            }
        }
    }
}

/// A batch at a time, each after the one before: no statement takes long, and none sees the rows of those before it again.
async fn drop_rows(pool: &PgPool, endpoint: EndpointId, stop: &CancellationToken) -> Result<(), sqlx::Error> {
    for statement in [
        "with picked as materialized (
            select event_id from postrider.queue where endpoint_id = $1 and event_id > $2 order by event_id limit $3
         ), gone as (
            delete from postrider.queue q using picked p where q.endpoint_id = $1 and q.event_id = p.event_id returning 1
         )
         select (select count(*) from gone), (select event_id from picked order by event_id desc limit 1)",
        "with picked as materialized (
            select event_id from postrider.retries where endpoint_id = $1 and event_id > $2 order by event_id limit $3
         ), gone as (
            delete from postrider.retries q using picked p where q.endpoint_id = $1 and q.event_id = p.event_id returning 1
         )
         select (select count(*) from gone), (select event_id from picked order by event_id desc limit 1)",
    ] {
        let mut after = EventId::LOWEST;
        while !stop.is_cancelled() {
            let batch = sqlx::query_as(statement)
                .bind(endpoint)
                .bind(after)
                .bind(DROP_BATCH)
                .fetch_one(pool);
            let (dropped, last): (i64, Option<EventId>) = batch.answered().await?;
            meters::METERS.dropped.increment(dropped.unsigned_abs());
            let Some(last) = last else {
                break;
            };
            after = last;
        }
    }
    Ok(())
}
