//! The reader: an exact tail of the queue, on a connection of its own.
//!
//! Each cycle is one `repeatable read, read only` transaction. It takes the snapshot, reads the queue rows that became
//! visible since the cycle before, then what the lanes asked for. Every committed row is seen exactly once, whatever
//! order transactions commit in.
//!
//! Invariant: a snapshot is compared only with one of the same connection. When the connection is lost the reader says
//! [`Message::Lost`] and every shard is loaded as if it had just been taken.
//! What is read goes to `engine.rs`.

use std::{
    collections::HashSet,
    ops::Range,
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use postrider_proto::{EndpointId, EventId, Shard, TenantId, TypeId};
use sqlx::{Connection, FromRow, PgConnection, Row, postgres::PgConnectOptions};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{
    Wake,
    answer::Answered,
    clock::Clock,
    endpoint::{self, EndpointRow},
    job::Job,
    lane::{DueRead, DueRows, ReadNumber, Refill},
    lookout::Lookout,
    meters::METERS,
    snapshot::Snapshot,
};

/// Rows of one page of the tail.
const PAGE_ROWS: i64 = 256;
/// Rows of one endpoint in one transaction after which the tail leaves the rest on disk and goes on behind it.
const ENDPOINT_ROWS_MAX: usize = 128;
/// Endpoints whose settings are read by one statement.
const LOAD_MAX: usize = 1024;
/// After this the engine is asked whether it wants something else.
const IDLE_WAIT_MAX: Duration = Duration::from_secs(2);
const RECONNECT_WAIT_MAX: Duration = Duration::from_secs(2);

/// What the engine wants of one cycle.
#[derive(Debug, Default)]
pub(crate) struct Cycle {
    pub(crate) number: ReadNumber,
    /// Shards that are tailed.
    pub(crate) owned: Vec<Shard>,
    /// Shards taken since the cycle before. What they hold by the end of this one is looked for by `survey.rs`; from then on
    /// the tail shows everything.
    pub(crate) taken: Vec<Shard>,
    /// Endpoints that have work and no lane; on a new connection all that have one, whose settings may have changed meanwhile.
    pub(crate) load: Vec<EndpointId>,
    pub(crate) refills: Vec<(EndpointId, Refill)>,
    pub(crate) due: Vec<(EndpointId, DueRead)>,
    /// Ordering keys whose first delivery is wanted.
    pub(crate) keys: Vec<(EndpointId, Vec<i64>)>,
    /// Endpoints whose lanes are gone.
    pub(crate) forget: Vec<EndpointId>,
    /// Nothing is wanted: wait here until something is committed, or until told to hurry.
    pub(crate) patient: bool,
}

/// What the reader found, in the order in which it must be applied.
#[derive(Debug)]
pub(crate) enum Message {
    /// Settings of endpoints that were not known, or that changed.
    Endpoints(Vec<EndpointRow>),
    Page {
        rows: Vec<QueueRow>,
        cut: Option<(EndpointId, EventId)>,
    },
    Refilled {
        endpoint: EndpointId,
        asked: Refill,
        rows: Vec<Job>,
    },
    Due {
        endpoint: EndpointId,
        due: DueRows,
    },
    Keys {
        endpoint: EndpointId,
        heads: Vec<Job>,
    },
    /// The cycle is over. `settings` is its snapshot when it brought changed settings.
    Done {
        number: ReadNumber,
        /// The tail was read; not when nothing was wanted and nothing happened.
        tailed: bool,
        rows: usize,
        settings: Option<String>,
    },
    /// The connection is gone, and with it what was known.
    Lost,
}

#[derive(Debug)]
pub(crate) struct QueueRow {
    pub(crate) endpoint: EndpointId,
    pub(crate) shard: Shard,
    pub(crate) job: Job,
}

pub(crate) struct Reader {
    pub(crate) options: PgConnectOptions,
    pub(crate) clock: Clock,
    pub(crate) wake: Wake,
    /// The engine wants another cycle.
    pub(crate) hurry: Wake,
    pub(crate) cycles: mpsc::Receiver<Cycle>,
    pub(crate) out: mpsc::Sender<Message>,
}

/// What is known on one connection.
struct Session {
    connection: PgConnection,
    lookout: Lookout,
    previous: Option<Snapshot>,
    known: Known,
}

/// Endpoints whose settings the engine was told of on this connection. The settings of others are told before their first
/// row is; changes are told of these only.
///
/// Invariant, kept with `engine.rs`: one that is known and owned has a lane, or its settings can't be used. The engine has
/// every other one forgotten.
#[derive(Debug, Default)]
pub(crate) struct Known(HashSet<EndpointId>);

impl Known {
    pub(crate) fn forget(&mut self, ids: &[EndpointId]) {
        for id in ids {
            self.0.remove(id);
        }
    }

    /// Of these, those not known so far, each once. They are from now on.
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
    #[error("the server is in recovery: it is a replica")]
    InRecovery,
    #[error("the server's snapshot can't be read: {0}")]
    Snapshot(String),
    #[error("the engine is gone")]
    Closed,
}

impl Reader {
    /// Answers each cycle with messages, until the engine is gone or told to stop.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut session: Option<Session> = None;
        let mut wait = Duration::from_millis(50);
        loop {
            let cycle = tokio::select! {
                cycle = self.cycles.recv() => cycle,
                () = stop.cancelled() => None,
            };
            let Some(cycle) = cycle else { break };
            let result = match &mut session {
                Some(session) => session.cycle(&cycle, &self).await,
                None => match Session::open(&self.options).await {
                    Ok(mut opened) => {
                        let result = opened.cycle(&cycle, &self).await;
                        session = Some(opened);
                        result
                    }
                    Err(e) => Err(e.into()),
                },
            };
            match result {
                Ok(()) => wait = Duration::from_millis(50),
                Err(ReadError::Closed) => break,
                Err(error) => {
                    tracing::warn!(%error, "the reader lost its connection; every shard will be loaded again");
                    session = None;
                    tokio::time::sleep(wait.mul_f64(0.5 + rand::random::<f64>() / 2.0)).await;
                    wait = (wait * 2).min(RECONNECT_WAIT_MAX);
                    if self.out.send(Message::Lost).await.is_err() {
                        break;
                    }
                }
            }
        }
    }
}

impl Session {
    async fn open(options: &PgConnectOptions) -> Result<Self, sqlx::Error> {
        let connection = PgConnection::connect_with(options).answered().await?;
        Ok(Self {
            connection,
            lookout: Lookout::start(options.clone()),
            previous: None,
            known: Known::default(),
        })
    }

    async fn cycle(&mut self, cycle: &Cycle, reader: &Reader) -> Result<(), ReadError> {
        let Reader {
            clock,
            wake,
            hurry,
            out,
            ..
        } = reader;
        self.known.forget(&cycle.forget);
        if cycle.patient && self.previous.is_some() && !self.wait_for_change(clock, wake, hurry).await? {
            let nothing = Message::Done {
                number: cycle.number,
                tailed: false,
                rows: 0,
                settings: None,
            };
            return say(out, nothing).await;
        }
        let begin = "begin isolation level repeatable read, read only; \
                     select pg_current_snapshot()::text, pg_is_in_recovery(), clock_timestamp()";
        let asked_at = Instant::now();
        let row = sqlx::raw_sql(begin)
            .fetch_one(&mut self.connection)
            .answered()
            .await?;
        let (snapshot, now) = self.snapshot_of(&row)?;
        clock.set(asked_at, now);
        let mut rows = 0;
        let mut settings = false;
        if let Some(previous) = self.previous.clone() {
            let new = snapshot.since(&previous);
            settings = self.changed_settings(&new, out).await?;
            rows = self.tail(&new, &cycle.owned, out).await?;
        }
        self.load(&cycle.load, out).await?;
        if !cycle.refills.is_empty() {
            let began = Instant::now();
            self.refill(&cycle.refills, out).await?;
            METERS.refill_seconds.record(began.elapsed());
        }
        self.read_due(&cycle.due, now, out).await?;
        self.read_keys(&cycle.keys, out).await?;
        sqlx::raw_sql("commit")
            .execute(&mut self.connection)
            .answered()
            .await?;
        // Settings of taken shards are as new as this snapshot too.
        let settings = (settings || !cycle.taken.is_empty()).then(|| snapshot.as_str().to_owned());
        self.previous = Some(snapshot);
        say(
            out,
            Message::Done {
                number: cycle.number,
                tailed: true,
                rows,
                settings,
            },
        )
        .await
    }

    /// On an idle system: until any transaction has begun or ended. Producers in SQL are found by this; an API in this
    /// process wakes us.
    async fn wait_for_change(&mut self, clock: &Clock, wake: &Wake, hurry: &Wake) -> Result<bool, ReadError> {
        let Some(previous) = &self.previous else {
            return Ok(true);
        };
        let changed = tokio::select! {
            changed = self.lookout.changed(previous.as_str()) => changed,
            () = wake.wait() => true,
            () = hurry.wait() => return Ok(false),
            () = tokio::time::sleep(IDLE_WAIT_MAX) => false,
        };
        if changed {
            return Ok(true);
        }
        // Is our own connection still there?
        let asked_at = Instant::now();
        let row = sqlx::query("select pg_current_snapshot()::text, pg_is_in_recovery(), clock_timestamp()")
            .fetch_one(&mut self.connection)
            .answered()
            .await?;
        let (snapshot, now) = self.snapshot_of(&row)?;
        clock.set(asked_at, now);
        Ok(Some(&snapshot) != self.previous.as_ref())
    }

    fn snapshot_of(&self, row: &sqlx::postgres::PgRow) -> Result<(Snapshot, DateTime<Utc>), ReadError> {
        if row.try_get::<bool, _>(1)? {
            return Err(ReadError::InRecovery);
        }
        let text: String = row.try_get(0)?;
        let snapshot = Snapshot::parse(&text).ok_or(ReadError::Snapshot(text))?;
        Ok((snapshot, row.try_get(2)?))
    }

    /// Settings of known endpoints that changed, found as queue rows are. Applied before the tail.
    async fn changed_settings(
        &mut self,
        new: &[Range<u64>],
        out: &mpsc::Sender<Message>,
    ) -> Result<bool, ReadError> {
        let changed: Vec<EndpointId> = sqlx::query_scalar(
            "select e.id from unnest($1::xid8[], $2::xid8[]) as r(low, high)
             join postrider.endpoints e on e.xid >= r.low and e.xid < r.high
             union
             select s.endpoint_id from unnest($1::xid8[], $2::xid8[]) as r(low, high)
             join postrider.secrets s on s.xid >= r.low and s.xid < r.high",
        )
        .bind(xids(new.iter().map(|range| range.start)))
        .bind(xids(new.iter().map(|range| range.end)))
        .fetch_all(&mut self.connection)
        .answered()
        .await?;
        let known: Vec<EndpointId> = changed
            .iter()
            .copied()
            .filter(|id| self.known.contains(id))
            .collect();
        if !known.is_empty() {
            let rows = endpoint::load(&mut self.connection, &known).answered().await?;
            say(out, Message::Endpoints(rows)).await?;
        }
        Ok(!changed.is_empty())
    }

    /// The rows of transactions that became visible, page by page.
    async fn tail(
        &mut self,
        new: &[Range<u64>],
        owned: &[Shard],
        out: &mpsc::Sender<Message>,
    ) -> Result<usize, ReadError> {
        let mut after = TailKey::before(0);
        let mut total = 0;
        loop {
            let left = &new[new.partition_point(|range| range.end <= after.xid)..];
            if left.is_empty() || owned.is_empty() {
                return Ok(total);
            }
            let page = self.page(left, owned, &after).await?;
            total += page.len();
            let full = page.len() as i64 == PAGE_ROWS;
            let Some(last) = page.last().map(|row| row.key) else {
                return Ok(total);
            };
            let of_last = page
                .iter()
                .rev()
                .take_while(|row| row.key.endpoint == last.endpoint && row.key.xid == last.xid);
            // One transaction may have made a million rows for one endpoint: its lane reads them from disk, later.
            let cut = full && of_last.count() >= ENDPOINT_ROWS_MAX;
            after = last;
            if cut {
                after.event = EventId(uuid::Uuid::max());
            }
            self.introduce(page.iter().map(|row| row.key.endpoint), out)
                .await?;
            let rows = page
                .into_iter()
                .map(|row| QueueRow {
                    endpoint: row.key.endpoint,
                    shard: row.shard,
                    job: row.job,
                })
                .collect();
            say(
                out,
                Message::Page {
                    rows,
                    cut: cut.then_some((last.endpoint, last.event)),
                },
            )
            .await?;
            if !full {
                return Ok(total);
            }
        }
    }

    /// A walk of the index for each range of transactions, in their order. The bounds are plain parameters: with a
    /// function of the snapshot in the query the planner scans the table, and with `= any` it sorts everything. A range has
    /// one lower bound, made here: of two the index would take the wrong one and walk over what was read before.
    async fn page(
        &mut self,
        new: &[Range<u64>],
        owned: &[Shard],
        after: &TailKey,
    ) -> Result<Vec<TailRow>, sqlx::Error> {
        let starts: Vec<TailKey> = new
            .iter()
            .map(|range| TailKey::before(range.start).max(*after))
            .collect();
        sqlx::query_as(
            "select q.* from unnest($1::xid8[], $2::int[], $3::uuid[], $4::xid8[]) as r(xid, endpoint_id, event_id, high)
             cross join lateral (
                 select q.xid::text as xid, endpoint_id, event_id, shard, tenant_id, type_id, key_id, attempt, replay_id
                 from postrider.queue q
                 where (q.xid, endpoint_id, event_id) > (r.xid, r.endpoint_id, r.event_id) and q.xid < r.high
                   and shard = any($5) and shard >= 0
                 order by q.xid, endpoint_id, event_id limit $6
             ) q
             limit $6",
        )
        .bind(xids(starts.iter().map(|start| start.xid)))
        .bind(starts.iter().map(|start| start.endpoint).collect::<Vec<_>>())
        .bind(starts.iter().map(|start| start.event).collect::<Vec<_>>())
        .bind(xids(new.iter().map(|range| range.end)))
        .bind(owned)
        .bind(PAGE_ROWS)
        .fetch_all(&mut self.connection)
        .answered()
        .await
    }

    /// Settings of endpoints that have no lane yet.
    async fn introduce(
        &mut self,
        endpoints: impl Iterator<Item = EndpointId>,
        out: &mpsc::Sender<Message>,
    ) -> Result<(), ReadError> {
        let unknown = self.known.introduce(endpoints);
        if unknown.is_empty() {
            return Ok(());
        }
        let rows = endpoint::load(&mut self.connection, &unknown).answered().await?;
        say(out, Message::Endpoints(rows)).await
    }

    /// Settings of endpoints that the engine has no lane for, or that a new connection does not know yet.
    async fn load(&mut self, ids: &[EndpointId], out: &mpsc::Sender<Message>) -> Result<(), ReadError> {
        if ids.is_empty() {
            return Ok(());
        }
        self.known.introduce(ids.iter().copied());
        for ids in ids.chunks(LOAD_MAX) {
            let rows = endpoint::load(&mut self.connection, ids).answered().await?;
            say(out, Message::Endpoints(rows)).await?;
        }
        Ok(())
    }

    async fn refill(
        &mut self,
        refills: &[(EndpointId, Refill)],
        out: &mpsc::Sender<Message>,
    ) -> Result<(), ReadError> {
        let endpoints: Vec<EndpointId> = refills.iter().map(|(id, _)| *id).collect();
        let floors: Vec<EventId> = refills.iter().map(|(_, refill)| refill.floor).collect();
        let limits: Vec<i32> = refills.iter().map(|(_, refill)| refill.limit as i32).collect();
        let rows: Vec<WaitingRow> = sqlx::query_as(
            "select q.endpoint_id, q.event_id, q.tenant_id, q.type_id, q.key_id, q.attempt, 0::smallint as step, q.replay_id,
                    null::timestamptz as due_at
             from unnest($1::int[], $2::uuid[], $3::int[]) as r(endpoint_id, floor, n)
             cross join lateral (
                 select * from postrider.queue q
                 where q.endpoint_id = r.endpoint_id and q.event_id > r.floor
                 order by q.event_id limit r.n
             ) q",
        )
        .bind(&endpoints)
        .bind(&floors)
        .bind(&limits)
        .fetch_all(&mut self.connection)
        .answered()
        .await?;
        let mut rows = rows.into_iter().peekable();
        // The lateral join keeps the order of the list, so that each endpoint's rows stand together.
        for (endpoint, asked) in refills {
            let mut jobs = Vec::new();
            while let Some(row) = rows.next_if(|row| row.endpoint_id == *endpoint) {
                jobs.push(row.job());
            }
            say(
                out,
                Message::Refilled {
                    endpoint: *endpoint,
                    asked: *asked,
                    rows: jobs,
                },
            )
            .await?;
        }
        Ok(())
    }

    async fn read_due(
        &mut self,
        due: &[(EndpointId, DueRead)],
        now: DateTime<Utc>,
        out: &mpsc::Sender<Message>,
    ) -> Result<(), ReadError> {
        if due.is_empty() {
            return Ok(());
        }
        let endpoints: Vec<EndpointId> = due.iter().map(|(id, _)| *id).collect();
        let limits: Vec<i32> = due.iter().map(|(_, asked)| asked.limit as i32).collect();
        let rows: Vec<WaitingRow> = sqlx::query_as(
            "select q.endpoint_id, q.event_id, q.tenant_id, q.type_id, q.key_id, q.attempt, q.step, q.replay_id, q.due_at
             from unnest($1::int[], $2::int[], $3::timestamptz[]) as r(endpoint_id, n, from_at)
             cross join lateral (
                 select * from postrider.retries q
                 where q.endpoint_id = r.endpoint_id and q.attempt >= 0 and q.due_at >= r.from_at
                 order by q.due_at limit r.n
             ) q",
        )
        .bind(&endpoints)
        .bind(&limits)
        .bind(due.iter().map(|(_, asked)| asked.from).collect::<Vec<_>>())
        .fetch_all(&mut self.connection)
        .answered()
        .await?;
        let mut rows = rows.into_iter().peekable();
        for (endpoint, asked) in due {
            let (mut due, mut read) = (DueRows::default(), 0);
            while let Some(row) = rows.next_if(|row| row.endpoint_id == *endpoint) {
                read += 1;
                due.first = due.first.or(row.due_at);
                match row.due_at {
                    Some(at) if at > now && !asked.even_later => due.later = due.later.or(Some(at)),
                    _ => due.rows.push(row.job()),
                }
            }
            // As many as were asked for, and all of them due: there may be more.
            if read == asked.limit && due.later.is_none() {
                due.later = Some(now);
            }
            say(
                out,
                Message::Due {
                    endpoint: *endpoint,
                    due,
                },
            )
            .await?;
        }
        Ok(())
    }

    /// The first delivery of each key, where it is a fresh one.
    async fn read_keys(
        &mut self,
        wanted: &[(EndpointId, Vec<i64>)],
        out: &mpsc::Sender<Message>,
    ) -> Result<(), ReadError> {
        for (endpoint, keys) in wanted {
            let rows: Vec<WaitingRow> = sqlx::query_as(
                "select q.endpoint_id, q.event_id, q.tenant_id, q.type_id, q.key_id, q.attempt, 0::smallint as step,
                        q.replay_id, null::timestamptz as due_at
                 from unnest($2::bigint[]) as k(key_id)
                 cross join lateral (
                     select * from postrider.queue q
                     where q.endpoint_id = $1 and q.key_id = k.key_id order by q.sequence limit 1
                 ) q
                 where not exists (select from postrider.retries r
                                   where r.endpoint_id = $1 and r.key_id = k.key_id and r.sequence < q.sequence)",
            )
            .bind(endpoint)
            .bind(keys)
            .fetch_all(&mut self.connection)
            .answered()
            .await?;
            let heads = rows.into_iter().map(WaitingRow::job).collect();
            say(
                out,
                Message::Keys {
                    endpoint: *endpoint,
                    heads,
                },
            )
            .await?;
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct TailKey {
    xid: u64,
    endpoint: EndpointId,
    event: EventId,
}

impl TailKey {
    /// Below every row of the transaction.
    const fn before(xid: u64) -> Self {
        Self {
            xid,
            endpoint: EndpointId(0),
            event: EventId::LOWEST,
        }
    }
}

struct TailRow {
    key: TailKey,
    shard: Shard,
    job: Job,
}

impl FromRow<'_, sqlx::postgres::PgRow> for TailRow {
    fn from_row(row: &sqlx::postgres::PgRow) -> Result<Self, sqlx::Error> {
        let xid: &str = row.try_get("xid")?;
        let waiting = WaitingRow {
            endpoint_id: row.try_get("endpoint_id")?,
            event_id: row.try_get("event_id")?,
            tenant_id: row.try_get("tenant_id")?,
            type_id: row.try_get("type_id")?,
            key_id: row.try_get("key_id")?,
            attempt: row.try_get("attempt")?,
            step: 0,
            replay_id: row.try_get("replay_id")?,
            due_at: None,
        };
        let key = TailKey {
            xid: xid.parse().map_err(|e| sqlx::Error::Decode(Box::new(e)))?,
            endpoint: waiting.endpoint_id,
            event: waiting.event_id,
        };
        Ok(Self {
            key,
            shard: row.try_get("shard")?,
            job: waiting.job(),
        })
    }
}

#[derive(FromRow)]
struct WaitingRow {
    endpoint_id: EndpointId,
    event_id: EventId,
    tenant_id: TenantId,
    type_id: TypeId,
    key_id: Option<i64>,
    attempt: i16,
    step: i16,
    replay_id: Option<String>,
    due_at: Option<DateTime<Utc>>,
}

impl WaitingRow {
    fn job(self) -> Job {
        Job {
            event: self.event_id,
            tenant: self.tenant_id,
            type_id: self.type_id,
            attempt: u16::try_from(self.attempt).unwrap_or(0),
            step: u16::try_from(self.step).unwrap_or(0),
            key: self.key_id,
            replay: self.replay_id.map(String::into_boxed_str),
        }
    }
}

/// sqlx has no type for xid8: they go as text and are cast.
fn xids(list: impl Iterator<Item = u64>) -> Vec<String> {
    list.map(|xid| xid.to_string()).collect()
}

async fn say(out: &mpsc::Sender<Message>, message: Message) -> Result<(), ReadError> {
    out.send(message).await.map_err(|_| ReadError::Closed)
}
