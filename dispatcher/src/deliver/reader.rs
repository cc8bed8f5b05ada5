//! The reader: an exact tail of the queue, on a dedicated connection.
//!
//! Each cycle is one `repeatable read, read only` transaction. It takes the snapshot, reads the queue rows that
//! became visible since the previous cycle, then everything the lanes requested. Every committed row is seen exactly
//! once, whatever order transactions commit in.
//!
//! Invariant: a snapshot is compared only with one of the same connection. When the connection is lost the reader
//! sends [`ReaderMessage::Lost`] and every shard is loaded as if it had just been taken over. All messages go to
//! `engine.rs`.

mod quick;
mod tail;
mod wanted;

use std::{
    collections::{HashMap, HashSet},
    ops::{ControlFlow, Range},
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use postrider_proto::{EndpointId, EventId, Shard, TenantId, TypeId};
use sqlx::{FromRow, PgConnection, Row};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{
    Wake,
    backoff::Backoff,
    clock::Clock,
    connector::Connector,
    db_timeout::WithDbTimeout,
    deliver::{
        bodies::Prefetched,
        change_watcher::Commits,
        endpoint::{self, EndpointRow},
        lane::{DueRead, DueRows, ReadNumber, Refill},
        queued_delivery::QueuedDelivery,
        snapshot::Snapshot,
    },
    health::database,
    store::sending,
    telemetry::metrics::METRICS,
};

/// Rows of one page of the tail.
const PAGE_ROWS: i64 = 256;
/// Rows of one endpoint in one transaction after which the tail skips the rest and leaves it on disk.
const ENDPOINT_ROWS_MAX: usize = 128;
/// Endpoints whose settings are read by one statement.
const LOAD_MAX: usize = 1024;
/// Poll interval on an idle system while commits are not notified. The median latency of an event is half of it.
const POLL_EVERY: Duration = Duration::from_millis(18);
/// While they are notified, the database is checked this often all the same.
const CHECK_EVERY: Duration = Duration::from_secs(2);
/// The switch is read again this often although its row has not changed: a right that is granted or revoked also changes it.
const SWITCH_EVERY: Duration = Duration::from_secs(15);
/// The same while sending is stopped: someone is waiting for the right to have an effect.
const SWITCH_EVERY_STOPPED: Duration = Duration::from_secs(5);
/// While the queue can't be read although the database responds.
const LOG_EVERY: Duration = Duration::from_secs(60);
const RECONNECT: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));

/// What the engine requests in one cycle.
#[derive(Debug, Default)]
pub(crate) struct Cycle {
    pub(crate) number: ReadNumber,
    /// Shards that are tailed.
    pub(crate) owned: Vec<Shard>,
    /// Shards taken over since the previous cycle. `survey.rs` searches them for rows that exist by the end of this
    /// one; from then on the tail shows everything.
    pub(crate) taken: Vec<Shard>,
    /// Endpoints with work and no lane; on a new connection all endpoints with a lane, whose settings may have
    /// changed meanwhile.
    pub(crate) load: Vec<EndpointId>,
    pub(crate) refills: Vec<(EndpointId, Refill)>,
    pub(crate) due: Vec<(EndpointId, DueRead)>,
    /// Ordering keys whose first delivery is wanted.
    pub(crate) keys: Vec<(EndpointId, Vec<i64>)>,
    /// Endpoints whose lanes are gone.
    pub(crate) forget: Vec<EndpointId>,
    /// Nothing is requested: wait until something is committed, or until the engine interrupts.
    pub(crate) may_wait: bool,
}

/// Results of a cycle, in the order in which they must be applied.
#[derive(Debug)]
pub(crate) enum ReaderMessage {
    /// Whether anything may be sent: first of all on a connection, and when it has changed.
    Sending {
        stopped: bool,
    },
    /// Settings of endpoints that were unknown or have changed.
    Endpoints(Vec<EndpointRow>),
    Page {
        rows: Vec<QueueRow>,
        cut: Option<(EndpointId, EventId)>,
    },
    Refilled {
        endpoint: EndpointId,
        asked: Refill,
        rows: Vec<QueuedDelivery>,
    },
    Due {
        endpoint: EndpointId,
        due: DueRows,
    },
    Keys {
        endpoint: EndpointId,
        heads: Vec<QueuedDelivery>,
    },
    /// The cycle is complete. `settings` is its snapshot when settings have changed.
    Done {
        number: ReadNumber,
        /// The tail was read; false when the engine interrupted the cycle.
        tailed: bool,
        /// Something was read from the queue. The first snapshot of a connection is only compared with later ones.
        queue_read: bool,
        rows: usize,
        settings: Option<String>,
    },
    /// The connection is gone, and with it everything known on it.
    Lost,
}

#[derive(Debug)]
pub(crate) struct QueueRow {
    pub(crate) endpoint: EndpointId,
    pub(crate) shard: Shard,
    pub(crate) delivery: QueuedDelivery,
}

pub(crate) struct Reader {
    pub(crate) connector: Connector,
    pub(crate) clock: Clock,
    /// An API in this process has committed something. Not needed while commits are notified.
    pub(crate) wake: Wake,
    pub(crate) commits: Commits,
    /// The engine wants another cycle.
    pub(crate) interrupt: Wake,
    pub(crate) cycles: mpsc::Receiver<Cycle>,
    pub(crate) out: mpsc::Sender<ReaderMessage>,
    /// Where attempts find bodies that came with their rows.
    pub(crate) prefetched: Prefetched,
    pub(crate) with_traces: bool,
}

/// State that belongs to one connection.
struct Session {
    connection: PgConnection,
    /// The server's process, once it is known.
    backend: Option<i32>,
    opened_at: Instant,
    switch_read_at: Instant,
    is_stopped: bool,
    previous: Option<Snapshot>,
    known: Known,
}

/// Endpoints whose settings were sent to the engine on this connection. Settings of others are sent before their
/// first row; changes are sent for these only.
///
/// Invariant, kept together with `engine.rs`: a known and owned endpoint has a lane, or its settings can't be used.
/// The engine has every other one forgotten.
#[derive(Debug, Default)]
pub(crate) struct Known(HashSet<EndpointId>);

impl Known {
    pub(crate) fn forget(&mut self, ids: &[EndpointId]) {
        for id in ids {
            self.0.remove(id);
        }
    }

    /// Marks these endpoints as known and returns those that were not before.
    pub(crate) fn introduce(&mut self, ids: impl Iterator<Item = EndpointId>) -> Vec<EndpointId> {
        ids.filter(|id| self.0.insert(*id)).collect()
    }

    pub(crate) fn contains(&self, id: &EndpointId) -> bool {
        self.0.contains(id)
    }
}

#[derive(Debug, thiserror::Error)]
enum ReadError {
    #[error(transparent)]
    Database(#[from] sqlx::Error),
    #[error("the server is in recovery (a replica)")]
    InRecovery,
    #[error("the database was read-only, or moved to another host, since this connection was opened")]
    Outdated,
    #[error("a pooler led this connection to another session of the server")]
    OtherSession,
    #[error("invalid snapshot from the server: {0}")]
    Snapshot(String),
    #[error("the engine has stopped")]
    Closed,
}

impl ReadError {
    /// Whether it is part of an outage that is logged elsewhere.
    fn is_reported(&self) -> bool {
        match self {
            Self::Database(error) => database::reports_from(module_path!(), error),
            Self::InRecovery | Self::Outdated => true,
            Self::OtherSession | Self::Snapshot(_) | Self::Closed => false,
        }
    }
}

impl Reader {
    /// Runs each requested cycle, until the engine has stopped or `stop` is cancelled.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut session: Option<Session> = None;
        let mut backoff = RECONNECT;
        let mut logged_at: Option<Instant> = None;
        loop {
            let cycle = tokio::select! {
                cycle = self.cycles.recv() => cycle,
                () = stop.cancelled() => None,
            };
            let Some(cycle) = cycle else { break };
            let result = match &mut session {
                Some(session) => session.cycle(&cycle, &self).await,
                None => match Session::open(&self.connector).await {
                    Ok(mut opened) => {
                        let result = opened.cycle(&cycle, &self).await;
                        session = Some(opened);
                        result
                    }
                    Err(e) => Err(e.into()),
                },
            };
            match result {
                Ok(false) => {}
                Ok(true) => {
                    backoff.reset();
                    if logged_at.take().is_some() {
                        tracing::info!("the queue can be read again");
                    }
                }
                Err(ReadError::Closed) => break,
                Err(error) => {
                    let is_logged = logged_at.is_some_and(|at| at.elapsed() < LOG_EVERY);
                    if !error.is_reported() && !is_logged {
                        logged_at = Some(Instant::now());
                        tracing::warn!(%error, "reading the queue failed; reconnecting and reloading every shard");
                    }
                    session = None;
                    let jitter = 0.5 + rand::random::<f64>() / 2.0;
                    tokio::time::sleep(backoff.delay().mul_f64(jitter)).await;
                    if self.out.send(ReaderMessage::Lost).await.is_err() {
                        break;
                    }
                }
            }
        }
    }
}

impl Session {
    async fn open(connector: &Connector) -> Result<Self, sqlx::Error> {
        let connection = connector.connect().with_db_timeout().await?;
        Ok(Self {
            connection,
            opened_at: Instant::now(),
            switch_read_at: Instant::now(),
            is_stopped: false,
            backend: None,
            previous: None,
            known: Known::default(),
        })
    }

    /// Returns whether something was read from the queue.
    async fn cycle(&mut self, cycle: &Cycle, reader: &Reader) -> Result<bool, ReadError> {
        let out = &Output {
            reader,
            opened_at: self.opened_at,
        };
        if reader.connector.is_outdated(self.opened_at.elapsed()) {
            return Err(ReadError::Outdated);
        }
        self.known.forget(&cycle.forget);
        let is_switch_due = self.is_switch_due();
        if cycle.may_wait
            && !is_switch_due
            && let Some(queue_read) = self.wait_and_read(cycle, out).await?
        {
            return Ok(queue_read);
        }
        reader.prefetched.clear();
        let begin = "begin isolation level repeatable read, read only; \
                     select pg_current_snapshot()::text, pg_is_in_recovery(), clock_timestamp(), pg_backend_pid()";
        let asked_at = Instant::now();
        let row = sqlx::raw_sql(begin)
            .fetch_one(&mut self.connection)
            .with_db_timeout()
            .await?;
        let (snapshot, now) = parse_snapshot(row.try_get(0)?, row.try_get(1)?, row.try_get(2)?)?;
        self.recognise(row.try_get(3)?)?;
        reader.clock.set(asked_at, now);
        if is_switch_due {
            self.read_switch(out).await?;
        }
        let (mut rows, mut settings) = (0, false);
        let queue_read = self.previous.is_some();
        if let Some(previous) = self.previous.clone() {
            let new = snapshot.since(&previous);
            settings = self.changed_settings(&new, out).await?;
            rows = self.tail(&new, &cycle.owned, out).await?;
            reader.commits.count(rows);
        }
        self.load(&cycle.load, out).await?;
        if !cycle.refills.is_empty() {
            let began = Instant::now();
            self.refill(&cycle.refills, out).await?;
            METRICS.refill_seconds.record(began.elapsed());
        }
        self.read_due(&cycle.due, now, out).await?;
        self.read_keys(&cycle.keys, out).await?;
        sqlx::raw_sql("commit")
            .execute(&mut self.connection)
            .with_db_timeout()
            .await?;
        // Settings of shards taken over are as new as this snapshot too.
        let settings = (settings || !cycle.taken.is_empty()).then(|| snapshot.as_str().to_owned());
        self.previous = Some(snapshot);
        send(
            out,
            ReaderMessage::Done {
                number: cycle.number,
                tailed: true,
                queue_read,
                rows,
                settings,
            },
        )
        .await?;
        Ok(queue_read)
    }

    fn is_switch_due(&self) -> bool {
        let every = if self.is_stopped {
            SWITCH_EVERY_STOPPED
        } else {
            SWITCH_EVERY
        };
        self.previous.is_none() || self.switch_read_at.elapsed() >= every
    }

    /// A cycle when little happens. None if it takes a whole one after all.
    async fn wait_and_read(&mut self, cycle: &Cycle, out: &Output<'_>) -> Result<Option<bool>, ReadError> {
        let interrupted = wait_for_change(out.reader).await.is_break();
        let rows = match interrupted {
            true => Some(0),
            false => self.read_quickly(&cycle.owned, out).await?,
        };
        let Some(rows) = rows else { return Ok(None) };
        out.reader.commits.count(rows);
        let done = ReaderMessage::Done {
            number: cycle.number,
            tailed: !interrupted,
            queue_read: !interrupted,
            rows,
            settings: None,
        };
        send(out, done).await?;
        Ok(Some(!interrupted))
    }

    /// A pooler may keep this connection and lead it to another server.
    fn recognise(&mut self, backend: i32) -> Result<(), ReadError> {
        match *self.backend.get_or_insert(backend) == backend {
            true => Ok(()),
            false => Err(ReadError::OtherSession),
        }
    }

    async fn read_switch(&mut self, out: &Output<'_>) -> Result<(), ReadError> {
        let state = sending::state(&mut self.connection).with_db_timeout().await?;
        let stopped = state.stopped;
        (self.switch_read_at, self.is_stopped) = (Instant::now(), stopped);
        send(out, ReaderMessage::Sending { stopped }).await
    }

    /// Reads the switch and the settings of known endpoints where they have changed, found as queue rows are. Applied
    /// before the tail.
    async fn changed_settings(&mut self, new: &[Range<u64>], out: &Output<'_>) -> Result<bool, ReadError> {
        // Null stands for the switch that stops all sending.
        let changed: Vec<Option<EndpointId>> = sqlx::query_scalar(
            "select e.id from unnest($1::xid8[], $2::xid8[]) as r(low, high)
             join postrider.endpoints e on e.xid >= r.low and e.xid < r.high
             union
             select s.endpoint_id from unnest($1::xid8[], $2::xid8[]) as r(low, high)
             join postrider.secrets s on s.xid >= r.low and s.xid < r.high
             union
             select null from unnest($1::xid8[], $2::xid8[]) as r(low, high)
             join postrider.sending w on w.xid >= r.low and w.xid < r.high",
        )
        .bind(xids(new.iter().map(|range| range.start)))
        .bind(xids(new.iter().map(|range| range.end)))
        .fetch_all(&mut self.connection)
        .with_db_timeout()
        .await?;
        if changed.contains(&None) {
            self.read_switch(out).await?;
        }
        let known: Vec<EndpointId> = changed
            .iter()
            .copied()
            .flatten()
            .filter(|id| self.known.contains(id))
            .collect();
        if !known.is_empty() {
            let rows = endpoint::load(&mut self.connection, &known)
                .with_db_timeout()
                .await?;
            send(out, ReaderMessage::Endpoints(rows)).await?;
        }
        Ok(!changed.is_empty())
    }

    /// Reads settings of endpoints that have no lane yet.
    async fn introduce(
        &mut self,
        endpoints: impl Iterator<Item = EndpointId>,
        out: &Output<'_>,
    ) -> Result<(), ReadError> {
        let unknown = self.known.introduce(endpoints);
        if unknown.is_empty() {
            return Ok(());
        }
        let rows = endpoint::load(&mut self.connection, &unknown)
            .with_db_timeout()
            .await?;
        send(out, ReaderMessage::Endpoints(rows)).await
    }
}

/// Waits until something may have been committed. Breaks when the engine wants another cycle.
async fn wait_for_change(reader: &Reader) -> ControlFlow<()> {
    let notified = reader.commits.are_notified();
    let check_after = if notified { CHECK_EVERY } else { POLL_EVERY };
    tokio::select! {
        () = reader.commits.wait() => {}
        () = reader.wake.wait(), if !notified => {}
        () = reader.interrupt.wait() => return ControlFlow::Break(()),
        () = tokio::time::sleep(check_after) => {}
    }
    ControlFlow::Continue(())
}

fn parse_snapshot(
    text: &str,
    in_recovery: bool,
    now: DateTime<Utc>,
) -> Result<(Snapshot, DateTime<Utc>), ReadError> {
    if in_recovery {
        return Err(ReadError::InRecovery);
    }
    let snapshot = Snapshot::parse(text).ok_or_else(|| ReadError::Snapshot(text.to_owned()))?;
    Ok((snapshot, now))
}

/// sqlx has no type for xid8: the values are passed as text and cast.
fn xids(list: impl Iterator<Item = u64>) -> Vec<String> {
    list.map(|xid| xid.to_string()).collect()
}

/// What is read goes to the engine, unless the database has moved while it was read: a server that was frozen until then
/// shows what was true before.
struct Output<'r> {
    reader: &'r Reader,
    opened_at: Instant,
}

async fn send(out: &Output<'_>, message: ReaderMessage) -> Result<(), ReadError> {
    if out.reader.connector.is_outdated(out.opened_at.elapsed()) {
        return Err(ReadError::Outdated);
    }
    let sent = out.reader.out.send(message).await;
    sent.map_err(|_| ReadError::Closed)
}
