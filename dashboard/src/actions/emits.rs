//! Group commit for single emits: emits that arrive together share a transaction, so that one commit serves them all.
//! Invariants: an invalid request does not affect the others. A rejected event is a value; if the database rejects
//! the whole group and nothing of it was stored, each member runs alone. An event that may have been stored is never
//! emitted again. Tenants take turns, and none holds more than its share of the queue and of the connections.

pub(crate) mod batch;
mod checks;
mod contended;
pub(crate) mod place;
mod queue;
pub(crate) mod rules;

use std::{
    io::ErrorKind,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use postrider_dispatcher::{Wake, health::database};
use postrider_sender::{EmitError, Emitted, Emitter, LockWait, NewEvent};
use sqlx::{Connection, Postgres, Transaction};
use tokio::{sync::oneshot, time::timeout};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    Pool,
    http::{
        metrics::METRICS,
        problem::{Kind, Problem},
        shares::{Bounds, Share, Shares},
        trace_context::Carried,
    },
    tables::{
        self,
        pool::{PooledConnection, proves_rollback},
    },
};
use checks::Checks;
use contended::Contended;
use queue::{Queue, Waiting};
use rules::refusal;

/// Events in one transaction. More would make the first wait for the last.
const GROUP_MAX: usize = 64;
/// Concurrent groups: while one waits for the disk, the next one is written.
const GROUPS_AT_ONCE: usize = 2;
/// A worker keeps its connection this long between two groups: the pool checks each one that it hands out or gets back.
const KEPT_MAX: Duration = Duration::from_secs(1);
const PING_MAX: Duration = Duration::from_secs(1);
/// Enough for a busy database. After it the outcome is unknown.
const GROUP_TIME_MAX: Duration = Duration::from_secs(10);
/// A little longer than a group waits for a lock (`LockWait::Short`): an emit that waits longer holds up every group it is in.
const LOCK_WAIT_SHORT: Duration = Duration::from_millis(150);
/// Single emits that are queued or running.
const SINGLES: Bounds = Bounds {
    each: 1_024,
    all: 4_096,
    waiting: 1_024,
    wait: Duration::from_secs(3),
};
/// Emits with a transaction of their own: batches, requests with an `Idempotency-Key`, and emits that could not join
/// a group.
const TRANSACTIONS: Bounds = Bounds {
    each: 3,
    all: 6,
    waiting: 1_024,
    wait: Duration::from_secs(3),
};
/// Those of them whose id or ordering key is known to be locked by another transaction.
const CONTENDED: Bounds = Bounds {
    each: 1,
    all: 3,
    waiting: 64,
    wait: Duration::from_secs(1),
};

/// An event that outlives its request: after a timeout it may still be emitted.
#[derive(Debug, Clone)]
pub(crate) struct OwnedEvent {
    pub(crate) tenant: String,
    pub(crate) type_name: String,
    pub(crate) data: String,
    pub(crate) id: Option<String>,
    pub(crate) version: Option<String>,
    pub(crate) ordering_key: Option<String>,
    pub(crate) trace: Option<Carried>,
    /// The schema that the data was validated against.
    pub(crate) checked: Option<i32>,
}

impl OwnedEvent {
    pub(crate) fn borrow(&self) -> NewEvent<'_> {
        NewEvent::new(&self.tenant, &self.type_name, &self.data)
            .id(self.id.as_deref())
            .version(self.version.as_deref())
            .ordering_key(self.ordering_key.as_deref())
            .trace(self.trace.as_ref().map(|trace| trace.context))
            .trace_state(self.trace.as_ref().and_then(|trace| trace.state.as_ref()))
            .checked(self.checked)
    }

    /// Whether it may have to wait for another transaction.
    fn takes_lock(&self) -> bool {
        self.id.is_some() || self.ordering_key.is_some()
    }

    /// The outcome is unknown. With an id of its own the event can safely be sent again.
    fn unknown(&self, emitted: Option<&Emitted>) -> Problem {
        match self.id {
            Some(_) => Problem::busy(),
            None => Problem::unknown(emitted.map(|emitted| emitted.id.clone())),
        }
    }
}

/// Emits of this process to one database.
pub struct Emits {
    worker: Worker,
    checks: Checks,
    singles: Arc<Shares>,
    /// Set until the first emit, which runs inside a runtime.
    idle: Mutex<Option<CancellationToken>>,
    _stop: DropGuard,
}

impl Emits {
    /// Connections needed: those of the groups, and those of emits with a transaction of their own.
    pub const CONNECTIONS_MAX: u32 = (GROUPS_AT_ONCE + TRANSACTIONS.all) as u32;

    pub fn new(pool: Pool, wake: Wake) -> Self {
        let stop = CancellationToken::new();
        let emitter = Emitter::default();
        Self {
            checks: Checks::new(emitter.clone(), pool.clone()),
            worker: Worker {
                pool,
                emitter,
                wake,
                queue: Arc::default(),
                contended: Arc::default(),
                transactions: Shares::new(TRANSACTIONS),
                contended_shares: Shares::new(CONTENDED),
            },
            singles: Shares::new(SINGLES),
            idle: Mutex::new(Some(stop.clone())),
            _stop: stop.drop_guard(),
        }
    }

    /// Emits in a transaction shared with other requests. Returns once it has committed.
    pub(crate) async fn emit(&self, event: OwnedEvent) -> Result<Emitted, Problem> {
        let event = self.checks.check(event).await?;
        let share = self.singles.take(&event.tenant).await?;
        self.start();
        let (reply, replied) = oneshot::channel();
        let waiting = Waiting::new(event, reply, share);
        match self.worker.contended.is_contended(&waiting.event) {
            true => self.worker.start_alone(waiting),
            false => self.worker.queue.push(waiting),
        }
        replied.await.unwrap_or_else(|_| Err(Problem::busy()))
    }

    /// A transaction for emits of this tenant that is not shared with others.
    pub(crate) async fn begin(
        &self,
        tenant: &str,
    ) -> Result<(Transaction<'static, Postgres>, Share), Problem> {
        let share = self.worker.transactions.take(tenant).await?;
        Ok((tables::begin(&self.worker.pool).await?, share))
    }

    pub(crate) fn emitter(&self) -> &Emitter {
        &self.worker.emitter
    }

    pub(crate) fn checks(&self) -> &Checks {
        &self.checks
    }

    fn start(&self) {
        let stop = match self.idle.lock() {
            Ok(mut idle) => idle.take(),
            Err(_) => None,
        };
        let Some(stop) = stop else { return };
        for _ in 0..GROUPS_AT_ONCE {
            let (worker, stop) = (self.worker.clone(), stop.clone());
            tokio::spawn(async move { stop.run_until_cancelled(worker.run()).await });
        }
    }
}

/// Why a group was not emitted.
enum Failed {
    /// Nothing of it was stored.
    RolledBack(sqlx::Error),
    /// It may have been committed; has the results if the database returned them.
    Unknown(sqlx::Error, Option<Vec<Result<Emitted, EmitError>>>),
}

#[derive(Clone)]
struct Worker {
    pool: Pool,
    emitter: Emitter,
    wake: Wake,
    queue: Arc<Queue>,
    contended: Arc<Contended>,
    transactions: Arc<Shares>,
    contended_shares: Arc<Shares>,
}

impl Worker {
    async fn run(self) {
        let mut kept = None;
        loop {
            let group = match timeout(KEPT_MAX, self.queue.take(GROUP_MAX)).await {
                Ok(group) => group,
                Err(_) => {
                    kept = None;
                    self.queue.take(GROUP_MAX).await
                }
            };
            self.emit_together(group, &mut kept).await;
        }
    }

    async fn emit_together(&self, group: Vec<Waiting>, kept: &mut Option<PooledConnection>) {
        match self.try_together(&group, kept).await {
            Ok(results) => {
                self.wake.now();
                for (waiting, result) in group.into_iter().zip(results) {
                    match result {
                        Err(EmitError::Stale) => self.start_alone(waiting),
                        Ok(emitted) => waiting.reply(Ok(emitted)),
                        Err(refused) => waiting.reply(Err(refusal(refused, ""))),
                    }
                }
            }
            Err(Failed::RolledBack(error)) => self.take_apart(group, &error),
            Err(Failed::Unknown(error, results)) => {
                tracing::warn!(%error, members = group.len(), "outcome of an emit group is unknown");
                database::reports(&error);
                let mut results = results.into_iter().flatten();
                for waiting in group {
                    let problem = match results.next() {
                        Some(Err(EmitError::Stale)) => Problem::busy(),
                        Some(Err(refused)) => refusal(refused, ""),
                        Some(Ok(emitted)) => waiting.event.unknown(Some(&emitted)),
                        None => waiting.event.unknown(None),
                    };
                    waiting.reply(Err(problem));
                }
            }
        }
    }

    /// The kept connection, or one from the pool. If the server is gone, the outcome of what is sent to it is unknown: an
    /// event without an id of its own could not be sent again, so the connection is checked first. After an error it goes
    /// back to the pool, which checks it too.
    async fn connection(
        &self,
        group: &[Waiting],
        kept: &mut Option<PooledConnection>,
    ) -> sqlx::Result<PooledConnection> {
        if let Some(mut kept) = kept.take() {
            let can_repeat = group.iter().all(|waiting| waiting.event.id.is_some());
            if can_repeat || matches!(timeout(PING_MAX, kept.ping()).await, Ok(Ok(()))) {
                return Ok(kept);
            }
        }
        self.pool.acquire().await
    }

    /// One statement that is a transaction of its own: no more round trips than a single event needs.
    async fn try_together(
        &self,
        group: &[Waiting],
        kept: &mut Option<PooledConnection>,
    ) -> Result<Vec<Result<Emitted, EmitError>>, Failed> {
        let events: Vec<NewEvent<'_>> = group.iter().map(|waiting| waiting.event.borrow()).collect();
        let mut connection = self.connection(group, kept).await.map_err(Failed::RolledBack)?;
        let is_transaction = connection.is_transaction();
        let began = Instant::now();
        let emitting = self.emitter.emit_all(&mut connection, &events, LockWait::Short);
        let results = self.in_time(emitting).await.map_err(|error| {
            // A transaction whose commit was never requested is rolled back.
            match is_transaction || proves_rollback(&error) {
                true => Failed::RolledBack(error),
                false => Failed::Unknown(error, None),
            }
        })?;
        if is_transaction {
            match self.in_time(connection.done()).await {
                Ok(()) => {}
                Err(error) if proves_rollback(&error) => return Err(Failed::RolledBack(error)),
                Err(error) => return Err(Failed::Unknown(error, Some(results))),
            }
        } else {
            *kept = Some(connection);
        }
        METRICS.statement(events.len(), began.elapsed());
        Ok(results)
    }

    /// Emits that take no lock can be grouped again; each of the others could be the cause.
    fn take_apart(&self, group: Vec<Waiting>, error: &sqlx::Error) {
        tracing::debug!(%error, members = group.len(), "splitting an emit group");
        if database::is_outage(error) || is_out_of_resources(error) || !proves_rollback(error) {
            if !database::reports(error) {
                tracing::warn!(%error, members = group.len(), "emit group failed");
            }
            for waiting in group {
                waiting.reply(Err(Problem::busy()));
            }
            return;
        }
        let locked = is_locked(error);
        for mut waiting in group {
            if locked && !waiting.event.takes_lock() && !waiting.is_second_try {
                waiting.is_second_try = true;
                self.queue.push(waiting);
            } else {
                self.start_alone(waiting);
            }
        }
    }

    /// Without delaying the next group. The number is bounded by the tenants' shares of `SINGLES`.
    fn start_alone(&self, waiting: Waiting) {
        let worker = self.clone();
        tokio::spawn(async move {
            let result = worker.emit_alone(&waiting.event).await;
            waiting.reply(result);
        });
    }

    async fn emit_alone(&self, event: &OwnedEvent) -> Result<Emitted, Problem> {
        // Emits known to wait must not use up the permits of the tenant's other emits.
        let _share = match self.contended.is_contended(event) {
            true => Some(
                self.contended_shares
                    .take(&event.tenant)
                    .await
                    .map_err(|_| lock_conflict())?,
            ),
            false => None,
        };
        let _share = self.transactions.take(&event.tenant).await?;
        let mut emitting = std::pin::pin!(self.try_alone(event));
        let done = match timeout(LOCK_WAIT_SHORT, &mut emitting).await {
            Ok(done) => done,
            Err(_) => {
                if event.takes_lock() {
                    self.contended.note(event);
                }
                emitting.await
            }
        };
        match &done {
            Err(Alone::Refused(EmitError::Database(error))) if is_locked(error) => self.contended.note(event),
            _ => self.contended.forget(event),
        }
        done.map_err(|failed| match failed {
            Alone::Refused(EmitError::Database(error)) if is_locked(&error) => lock_conflict(),
            Alone::Refused(error) => refusal(error, ""),
            Alone::Unknown(emitted) => event.unknown(Some(&emitted)),
        })
    }

    async fn try_alone(&self, event: &OwnedEvent) -> Result<Emitted, Alone> {
        let mut transaction = tables::begin(&self.pool).await?;
        let borrowed = event.borrow();
        let emitted = tokio::select! {
            biased;
            emitted = self.emitter.emit(&mut transaction, &borrowed) => emitted?,
            // Without a commit nothing is stored.
            () = self.pool.down() => return Err(sqlx::Error::Io(ErrorKind::NotConnected.into()).into()),
        };
        if let Err(error) = self.pool.unless_down(transaction.commit()).await {
            return Err(match proves_rollback(&error) {
                true => error.into(),
                false => Alone::Unknown(emitted),
            });
        }
        self.wake.now();
        Ok(emitted)
    }

    async fn in_time<T>(&self, work: impl Future<Output = sqlx::Result<T>>) -> sqlx::Result<T> {
        timeout(GROUP_TIME_MAX, self.pool.unless_down(work))
            .await
            .unwrap_or_else(|_| Err(sqlx::Error::Io(ErrorKind::TimedOut.into())))
    }
}

enum Alone {
    Refused(EmitError),
    /// It may have been committed.
    Unknown(Emitted),
}

impl From<EmitError> for Alone {
    fn from(error: EmitError) -> Self {
        Self::Refused(error)
    }
}

impl From<sqlx::Error> for Alone {
    fn from(error: sqlx::Error) -> Self {
        Self::Refused(error.into())
    }
}

fn lock_conflict() -> Problem {
    Problem::new(
        Kind::Busy,
        "Another transaction holds a lock on this event id or ordering key. Try again once it has finished.",
    )
}

/// No disk or memory: each event on its own would fail in the same way.
fn is_out_of_resources(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.is_some_and(|code| code.starts_with("53"))
}

/// Another transaction holds a lock on the id or ordering key.
fn is_locked(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.is_some_and(|code| matches!(code.as_ref(), "55P03" | "57014" | "40P01"))
}
