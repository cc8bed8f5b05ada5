//! How the parts of a dispatcher are connected, started and shut down.
//!
//! Shutdown goes backwards along a delivery's path: the engine stops picking, the lease ends, attempts finish or are
//! handed back, the recorder writes the last results, and only then the shards are released.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use postrider_proto::EndpointId;
use sqlx::{PgPool, postgres::PgPoolOptions};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use uuid::Uuid;

use crate::{
    Dispatcher, DispatcherError, Wake,
    clock::Clock,
    connector::Connector,
    db_timeout,
    dedicated_connection::DedicatedConnection,
    deliver::{
        attempt::{Attempts, Picked},
        bodies::{LargeBodies, Prefetched},
        capacity::Capacity,
        change_watcher::{self, Commits},
        engine::{Engine, EngineMessage, State},
        lane::{Activity, Pace, Withdrawal},
        reader::{Reader, ReaderMessage},
        recorder::{Finished, Recorder},
        sending_switch::SendingSwitch,
        survey::Surveyor,
        worker_pool::WorkerPool,
    },
    health::{self, Vital},
    http::client::HttpSender,
    maintenance::{
        deleted_endpoints, disable, jobs,
        moves::Mover,
        notices::Notifier,
        relay,
        replays::{run::Runner, withdraw},
        vacuum::{self, DeadRows},
    },
    ownership::{
        applied::{self, APPLIED, QUIET},
        lease::Lease,
        shards::Shards,
    },
    telemetry::{
        metrics,
        statistics::{Flusher, Statistics},
    },
};

/// Connections that take and release shards, besides the one that renews the lease.
const LEASE_CONNECTIONS: u32 = 1;
/// Connections for tasks that API callers wait for: applied settings, cancelled replays, endpoints to disable; one each.
/// Background work can't take them away.
const CONTROL_CONNECTIONS: u32 = 3;
/// How many messages the reader may be ahead of the engine.
const READ_AHEAD: usize = 16;
/// Time for the last results to be recorded.
const RECORD_MAX: Duration = Duration::from_secs(5);
/// Time for background tasks to end: a little more than the limit of one statement.
const BACKGROUND_END_MAX: Duration = Duration::from_secs(12);

/// Planner settings of the hot path's sessions: an index scan for each row of a list. The planner does not know how long
/// the lists are, plans for tables that were empty a moment ago, and would choose a sequential scan. Where these settings
/// are not enough a statement says `offset 0`, or repeats the predicate of the partial index it needs.
/// `tests/it/plans.rs` checks every plan.
const HOT_PLANS: [(&str, &str); 6] = [
    ("enable_seqscan", "off"),
    ("enable_bitmapscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("plan_cache_mode", "force_generic_plan"),
    ("jit", "off"),
];

/// The tasks around the engine.
struct Running {
    parts: Parts,
    attempts: Arc<Attempts>,
    loaders: TaskTracker,
    recorder: JoinHandle<()>,
    /// Results that can't be written are abandoned.
    abandon: CancellationToken,
}

/// Shared by every part.
struct Parts {
    id: Uuid,
    clock: Clock,
    lease: Lease,
    switch: SendingSwitch,
    pool: PgPool,
    control: PgPool,
    /// With the planner settings of the hot path.
    direct: Connector,
    engine: mpsc::UnboundedSender<EngineMessage>,
    background: TaskTracker,
    /// Background tasks end.
    leave: CancellationToken,
    statistics: Statistics,
    to_disable: Wake,
    dead_rows: DeadRows,
    /// Interrupts the reader's wait for changes.
    interrupt: Wake,
    commits: Commits,
}

/// The receiving ends of what the engine sends to background tasks.
struct EngineOutput {
    deleted: mpsc::UnboundedReceiver<EndpointId>,
    withdrawals: mpsc::UnboundedReceiver<Withdrawal>,
    applied: watch::Receiver<Option<String>>,
    quiet: watch::Receiver<Option<String>>,
    activity: watch::Receiver<Vec<Activity>>,
}

impl Parts {
    fn new(dispatcher: &Dispatcher, clock: Clock, engine: mpsc::UnboundedSender<EngineMessage>) -> Self {
        let settings = db_timeout::lively(PgPoolOptions::new()).max_connections(CONTROL_CONNECTIONS);
        let control = dispatcher.direct.pool_lazily(settings, None);
        metrics::watch_pool("control", &control);
        Self {
            id: Uuid::now_v7(),
            clock,
            lease: Lease::new(),
            switch: SendingSwitch::default(),
            pool: dispatcher.pool.clone(),
            control,
            direct: dispatcher.direct.with(|options| options.options(HOT_PLANS)),
            engine,
            background: TaskTracker::new(),
            leave: CancellationToken::new(),
            statistics: Statistics::default(),
            to_disable: Wake::default(),
            dead_rows: DeadRows::default(),
            interrupt: Wake::default(),
            commits: Commits::default(),
        }
    }
}

pub(crate) async fn run(
    dispatcher: Dispatcher,
    clock: Clock,
    stop: CancellationToken,
) -> Result<(), DispatcherError> {
    let wake = dispatcher.wake.clone();
    let (engine, messages, rows, running) = start(dispatcher, clock, &stop)?;
    engine.run(messages, rows, wake, stop).await;
    running.shut_down().await;
    Ok(())
}

/// An engine ready to run, with its channels.
type Started = (
    Engine,
    mpsc::UnboundedReceiver<EngineMessage>,
    mpsc::Receiver<ReaderMessage>,
    Running,
);

/// Needs no database: every part waits for it by itself.
fn start(dispatcher: Dispatcher, clock: Clock, stop: &CancellationToken) -> Result<Started, DispatcherError> {
    let (to_engine, messages) = mpsc::unbounded_channel();
    let parts = Parts::new(&dispatcher, clock, to_engine);
    let (finished, finished_out) = mpsc::unbounded_channel();
    let abandon = CancellationToken::new();
    let recorder = recorder(&parts, finished_out);
    let attempts = Arc::new(attempts(&dispatcher, &parts, finished.clone())?);
    let (loaders, picked) = start_loaders(&attempts);
    let (rows_in, rows) = mpsc::channel(READ_AHEAD);
    let (cycles, cycles_out) = mpsc::channel(1);
    let (surveys, surveys_out) = mpsc::unbounded_channel();
    let (drained, drained_out) = mpsc::unbounded_channel();
    let (deleted, deleted_out) = mpsc::unbounded_channel();
    let (withdrawals, withdrawals_out) = mpsc::unbounded_channel();
    let (applied, applied_out) = watch::channel(None);
    let (quiet, quiet_out) = watch::channel(None);
    let (activity, activity_out) = watch::channel(Vec::new());
    let reader = Reader {
        wake: dispatcher.wake.clone(),
        commits: parts.commits.clone(),
        interrupt: parts.interrupt.clone(),
        connector: parts.direct.clone(),
        clock: parts.clock.clone(),
        cycles: cycles_out,
        out: rows_in,
        prefetched: attempts.prefetched.clone(),
        with_traces: dispatcher.tracer.is_on(),
    };
    let surveyor = Surveyor::new(parts.direct.clone(), surveys_out, parts.engine.clone());
    start_ownership(&dispatcher, &parts, drained_out, stop);
    let recorder = tokio::spawn(recorder.run(abandon.clone()));
    parts.background.spawn(reader.run(parts.leave.clone()));
    let watcher = change_watcher::run(parts.direct.clone(), parts.commits.clone(), parts.leave.clone());
    parts.background.spawn(watcher);
    tokio::spawn(surveyor.run(parts.leave.clone()));
    let output = EngineOutput {
        deleted: deleted_out,
        withdrawals: withdrawals_out,
        applied: applied_out,
        quiet: quiet_out,
        activity: activity_out,
    };
    start_maintenance(&dispatcher, &parts, output, stop);
    let vital = Arc::new(Vital::new(parts.lease.clone()));
    health::watch(vital.clone());
    let engine = Engine {
        vital,
        capacity: Capacity::new(dispatcher.settings.max_in_flight),
        settings: dispatcher.settings,
        vault: dispatcher.vault,
        clock: parts.clock.clone(),
        inbox: parts.engine.clone(),
        picked,
        finished,
        started: Instant::now(),
        cycles,
        commits: parts.commits.clone(),
        interrupt: parts.interrupt.clone(),
        drained,
        deleted,
        withdrawals,
        surveys,
        applied,
        quiet,
        activity,
        switch: parts.switch.clone(),
        state: State::default(),
    };
    let running = Running {
        parts,
        attempts,
        loaders,
        recorder,
        abandon,
    };
    Ok((engine, messages, rows, running))
}

fn recorder(parts: &Parts, finished: mpsc::UnboundedReceiver<Finished>) -> Recorder {
    Recorder {
        connection: DedicatedConnection::new(parts.direct.clone()),
        to_disable: parts.to_disable.clone(),
        dead_rows: parts.dead_rows.clone(),
        owner: parts.id,
        finished,
        out: parts.engine.clone(),
        clock: parts.clock.clone(),
        statistics: parts.statistics.clone(),
    }
}

fn attempts(
    dispatcher: &Dispatcher,
    parts: &Parts,
    finished: mpsc::UnboundedSender<Finished>,
) -> Result<Attempts, DispatcherError> {
    Ok(Attempts {
        database: parts.direct.clone(),
        sender: HttpSender::new(dispatcher.guard.clone(), dispatcher.settings.max_in_flight)?,
        clock: parts.clock.clone(),
        lease: parts.lease.clone(),
        switch: parts.switch.clone(),
        jitter: dispatcher.settings.jitter,
        finished,
        tasks: TaskTracker::new(),
        workers: WorkerPool::new(),
        large_bodies: LargeBodies::new(&parts.direct, dispatcher.tracer.is_on()),
        prefetched: Prefetched::default(),
        tracer: dispatcher.tracer.clone(),
    })
}

/// One task for each pace reads the bodies of picked deliveries and starts their attempts.
fn start_loaders(attempts: &Arc<Attempts>) -> (TaskTracker, [mpsc::UnboundedSender<Picked>; Pace::COUNT]) {
    let loaders = TaskTracker::new();
    let picked = Pace::ALL.map(|pace| {
        let (picked, picked_out) = mpsc::unbounded_channel();
        loaders.spawn(attempts.clone().run(pace, picked_out));
        picked
    });
    loaders.close();
    (loaders, picked)
}

fn start_ownership(
    dispatcher: &Dispatcher,
    parts: &Parts,
    drained: mpsc::UnboundedReceiver<postrider_proto::Shard>,
    stop: &CancellationToken,
) {
    let settings = db_timeout::lively(PgPoolOptions::new()).max_connections(LEASE_CONNECTIONS);
    let leases = dispatcher.direct.pool_lazily(settings, None);
    metrics::watch_pool("lease", &leases);
    let shards = Shards {
        renewals: DedicatedConnection::new(dispatcher.direct.clone()),
        pool: leases,
        id: parts.id,
        name: dispatcher.settings.name.clone(),
        lease: parts.lease.clone(),
        had_lease: false,
        engine: parts.engine.clone(),
        drained,
    };
    parts
        .background
        .spawn(shards.run(stop.clone(), parts.leave.clone()));
}

/// Everything that API callers or operators wait for, but no delivery.
fn start_maintenance(dispatcher: &Dispatcher, parts: &Parts, output: EngineOutput, stop: &CancellationToken) {
    let (control, leave) = (&parts.control, &parts.leave);
    tokio::spawn(applied::publish(
        control.clone(),
        parts.id,
        APPLIED,
        output.applied,
    ));
    tokio::spawn(applied::publish(control.clone(), parts.id, QUIET, output.quiet));
    tokio::spawn(deleted_endpoints::run(
        parts.pool.clone(),
        output.deleted,
        leave.clone(),
    ));
    tokio::spawn(withdraw::run(
        control.clone(),
        parts.id,
        output.withdrawals,
        parts.engine.clone(),
        leave.clone(),
    ));
    tokio::spawn(disable::run(
        control.clone(),
        parts.to_disable.clone(),
        leave.clone(),
    ));
    tokio::spawn(vacuum::run(
        dispatcher.direct.clone(),
        parts.dead_rows.clone(),
        leave.clone(),
    ));
    let flusher = Flusher {
        pool: parts.pool.clone(),
        writer: parts.id,
        clock: parts.clock.clone(),
        statistics: parts.statistics.clone(),
        activity: output.activity,
    };
    parts.background.spawn(flusher.run(leave.clone()));
    let runner = Runner {
        pool: parts.pool.clone(),
        wake: dispatcher.wake.clone(),
        commits: parts.commits.clone(),
        retention: dispatcher.settings.retention,
        stop: leave.clone(),
    };
    let notifier = Notifier {
        pool: parts.pool.clone(),
        wake: dispatcher.wake.clone(),
        commits: parts.commits.clone(),
        public_url: dispatcher.settings.public_url.clone(),
    };
    let mover = Mover {
        home: dispatcher.direct.clone(),
        pool: parts.pool.clone(),
        vault: dispatcher.vault.clone(),
        commits: parts.commits.clone(),
        stop: leave.clone(),
    };
    parts.background.spawn(mover.run());
    let jobs = jobs::run(
        parts.pool.clone(),
        dispatcher.vault.clone(),
        runner,
        notifier,
        leave.clone(),
    );
    parts.background.spawn(jobs);
    start_relays(dispatcher, parts, stop);
}

/// What brings events in from other databases.
fn start_relays(dispatcher: &Dispatcher, parts: &Parts, stop: &CancellationToken) {
    for (number, source) in dispatcher.sources.iter().enumerate() {
        let (pool, wake) = (parts.pool.clone(), dispatcher.wake.clone());
        let relay = relay::source::run(number + 1, source.clone(), pool, wake);
        parts
            .background
            .spawn(stop.clone().run_until_cancelled_owned(relay));
    }
    let relay = relay::home::HomeRelay {
        home: dispatcher.home.clone(),
        direct: dispatcher.direct.clone(),
        pool: parts.pool.clone(),
        wake: dispatcher.wake.clone(),
    };
    parts
        .background
        .spawn(stop.clone().run_until_cancelled_owned(relay.run()));
}

impl Running {
    /// After the engine has ended: attempts still in flight have had their time and are handed back to the next owner.
    async fn shut_down(self) {
        let parts = self.parts;
        parts.lease.end();
        self.loaders.wait().await;
        self.attempts.workers.close();
        self.attempts.tasks.close();
        self.attempts.tasks.wait().await;
        // The recorder ends when the last sender of results is gone, and the attempts hold one.
        drop(self.attempts);
        if tokio::time::timeout(RECORD_MAX, self.recorder).await.is_err() {
            self.abandon.cancel();
            tracing::warn!("recording the last results failed; their deliveries will be sent again");
        }
        parts.leave.cancel();
        parts.interrupt.now();
        parts.background.close();
        // Each task has its own limit except apalis, which waits without one on a connection that hangs.
        let ended = tokio::time::timeout(BACKGROUND_END_MAX, parts.background.wait()).await;
        if ended.is_err() {
            tracing::warn!("background tasks did not end in time; abandoning them");
        }
    }
}
