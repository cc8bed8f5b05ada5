//! The recorder writes results of attempts, up to 500 in one statement.
//!
//! Invariant: a result counts only while its shard has the owner and epoch it was sent under. The statement locks the
//! shards `for share`, so that a takeover waits for it and nothing is recorded afterwards. Results whose row does not
//! match are discarded: the lease was lost, or the delivery has moved on and the row has another attempt number. What
//! was recorded is reported to `engine.rs`.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use postrider_proto::{DeadReason, EndpointId, Epoch, EventId, FinalState, Outcome, OutcomeKind, Shard};
use sqlx::{AssertSqlSafe, FromRow, PgConnection};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    Wake,
    clock::Clock,
    db_timeout::WithDbTimeout,
    dedicated_connection::DedicatedConnection,
    deliver::{endpoint::Endpoint, engine::EngineMessage, queued_delivery::QueuedDelivery, retry::Next},
    telemetry::{metrics::METRICS, statistics::Statistics},
};

const BATCH_MAX: usize = 500;
const RETRY_WAIT_MAX: Duration = Duration::from_secs(1);
/// An endpoint is disabled when it has failed for this many days without one success,
const FAILING_DAYS: i32 = 5;
/// on at least this many of them,
const FAILED_ON_DAYS_MIN: i32 = 3;
/// with at most this many days between two days of failure.
const FAILING_PAUSE_DAYS_MAX: i32 = 2;

/// An attempt that has ended.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) endpoint: EndpointId,
    pub(crate) event: EventId,
    pub(crate) shard: Shard,
    pub(crate) epoch: Epoch,
    pub(crate) number: u16,
    pub(crate) started_at: DateTime<Utc>,
    pub(crate) duration: Duration,
    pub(crate) signature: Option<String>,
    pub(crate) outcome: Outcome,
    pub(crate) next: Next,
    /// Its event has outlived its partition, and so have its attempts.
    pub(crate) held: bool,
    /// Released once the result is recorded: bounds the number of unrecorded results.
    #[expect(dead_code, reason = "held, not read")]
    pub(crate) result_permit: OwnedSemaphorePermit,
}

impl Finished {
    /// A delivery that becomes a dead letter without an attempt, because its endpoint is disabled.
    pub(crate) fn dead_without_attempt(
        endpoint: &Endpoint,
        epoch: Epoch,
        delivery: &QueuedDelivery,
        reason: DeadReason,
        now: DateTime<Utc>,
        result_permit: OwnedSemaphorePermit,
    ) -> Self {
        Self {
            endpoint: endpoint.id,
            event: delivery.event,
            shard: endpoint.shard,
            epoch,
            number: delivery.number(),
            started_at: now,
            duration: Duration::ZERO,
            signature: None,
            outcome: Outcome::NotSent {
                error: "the endpoint is disabled".to_owned(),
            },
            next: Next::Dead(reason),
            held: false,
            result_permit,
        }
    }
}

/// What happened to a result in the database.
#[derive(Debug)]
pub(crate) struct Recorded {
    pub(crate) endpoint: EndpointId,
    pub(crate) epoch: Epoch,
    pub(crate) event: EventId,
    pub(crate) number: u16,
    pub(crate) fate: Fate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Ended,
    /// Waiting in `retries`.
    Due(DateTime<Utc>),
    /// No row matched: the lease was lost, or an earlier try of the same batch committed without our knowing.
    Discarded,
}

pub(crate) struct Recorder {
    pub(crate) connection: DedicatedConnection,
    /// Notified when endpoints are to be disabled; the recorder does not wait for that.
    pub(crate) to_disable: Wake,
    pub(crate) owner: Uuid,
    pub(crate) finished: mpsc::UnboundedReceiver<Finished>,
    pub(crate) out: mpsc::UnboundedSender<EngineMessage>,
    pub(crate) clock: Clock,
    pub(crate) statistics: Statistics,
}

impl Recorder {
    /// Runs until every sender of results is gone, so that a stopping dispatcher loses none. `abandon` ends it early.
    pub(crate) async fn run(mut self, abandon: CancellationToken) {
        let mut batch = Vec::with_capacity(BATCH_MAX);
        loop {
            tokio::select! {
                n = self.finished.recv_many(&mut batch, BATCH_MAX) => if n == 0 { return },
                () = abandon.cancelled() => return,
            }
            let held: Vec<Finished> = batch.extract_if(.., |one| one.held).collect();
            for (batch, kept) in [(&batch, Kept::ByDay), (&held, Kept::Held)] {
                if batch.is_empty() {
                    continue;
                }
                tokio::select! {
                    () = self.record(batch, kept) => {}
                    () = abandon.cancelled() => return,
                }
            }
            batch.clear();
        }
    }

    async fn record(&mut self, batch: &[Finished], kept: Kept) {
        let mut wait = Duration::from_millis(20);
        loop {
            let began = Instant::now();
            match self.write(batch, kept).await {
                Ok(rows) => {
                    METRICS.record_seconds.record(began.elapsed());
                    METRICS.record_rows.record(batch.len() as f64);
                    if rows.iter().any(|row| row.disabling) {
                        self.to_disable.now();
                    }
                    let recorded = fates(batch, &rows);
                    count(batch, &recorded);
                    self.statistics.add(self.clock.now(), batch, &recorded);
                    let _ = self.out.send(EngineMessage::Recorded(recorded));
                    return;
                }
                Err(error) if is_about_the_rows(&error) => {
                    return self.record_apart(batch, kept, &error).await;
                }
                Err(error) => {
                    self.connection.close();
                    tracing::warn!(%error, results = batch.len(), "recording results failed; retrying");
                    tokio::time::sleep(wait).await;
                    wait = (wait * 2).min(RETRY_WAIT_MAX);
                }
            }
        }
    }

    /// Usually all results are successful first attempts, which a shorter statement records: their rows are in
    /// `queue`.
    async fn write(&mut self, batch: &[Finished], kept: Kept) -> Result<Vec<WrittenRow>, sqlx::Error> {
        let connection = self.connection.open().await?;
        let delivered = |one: &Finished| one.next == Next::Delivered && one.number == 1;
        if kept == Kept::Held || !batch.iter().all(delivered) {
            return write(connection, self.owner, batch, kept).with_db_timeout().await;
        }
        let written = write_delivered(connection, self.owner, batch)
            .with_db_timeout()
            .await?;
        Ok(written
            .into_iter()
            .filter_map(|position| batch.get(position as usize))
            .map(|one| WrittenRow {
                endpoint_id: one.endpoint,
                event_id: one.event,
                due_at: None,
                disabling: false,
            })
            .collect())
    }

    /// One row that the database rejects must not block the others.
    async fn record_apart(&mut self, batch: &[Finished], kept: Kept, error: &sqlx::Error) {
        if let [one] = batch {
            // Its partition was dropped while the attempt was in flight.
            if kept == Kept::ByDay && has_no_partition(error) {
                return Box::pin(self.record(batch, Kept::Held)).await;
            }
            tracing::error!(%error, endpoint = %one.endpoint, event = %one.event, "the database rejected a result; it is discarded");
            let _ = self.out.send(EngineMessage::Recorded(fates(batch, &[])));
            return;
        }
        let (left, right) = batch.split_at(batch.len() / 2);
        Box::pin(self.record(left, kept)).await;
        Box::pin(self.record(right, kept)).await;
    }
}

/// Where attempts are written: into the partition of their event, or into the table of archived attempts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kept {
    ByDay,
    Held,
}

/// The table of attempts has no other check constraint.
fn has_no_partition(error: &sqlx::Error) -> bool {
    error
        .as_database_error()
        .is_some_and(|e| e.code().as_deref() == Some("23514"))
}

/// Whether the database rejected the values themselves, so that a retry would fail again.
fn is_about_the_rows(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(e) => e
            .code()
            .is_some_and(|code| matches!(&code[..2], "21" | "22" | "23")),
        sqlx::Error::Encode(_) => true,
        _ => false,
    }
}

#[derive(Debug, FromRow)]
struct WrittenRow {
    endpoint_id: EndpointId,
    event_id: EventId,
    due_at: Option<DateTime<Utc>>,
    /// Its endpoint is to be disabled.
    disabling: bool,
}

/// Discarded results are counted by the dispatcher that owns the delivery.
fn count(batch: &[Finished], recorded: &[Recorded]) {
    for (one, recorded) in batch.iter().zip(recorded) {
        match one.next {
            _ if recorded.fate == Fate::Discarded => {}
            Next::Filtered => METRICS.filtered.increment(1),
            Next::Dead(reason) => METRICS.died(reason),
            Next::Delivered | Next::Retry { .. } => {}
        }
    }
}

fn fates(batch: &[Finished], rows: &[WrittenRow]) -> Vec<Recorded> {
    let written: HashMap<_, _> = rows
        .iter()
        .map(|row| ((row.endpoint_id, row.event_id), row.due_at))
        .collect();
    batch
        .iter()
        .map(|one| {
            let fate = match written.get(&(one.endpoint, one.event)) {
                Some(Some(due)) => Fate::Due(*due),
                Some(None) => Fate::Ended,
                None => Fate::Discarded,
            };
            Recorded {
                endpoint: one.endpoint,
                epoch: one.epoch,
                event: one.event,
                number: one.number,
                fate,
            }
        })
        .collect()
}

/// Records deliveries that ended with their first attempt; returns their positions in the batch.
///
/// `= any (array[…])` allows an index lookup per row but no merge join: for a merge join the planner scanned the
/// whole index of a queue that it estimated as empty, once for each result.
async fn write_delivered(
    connection: &mut PgConnection,
    owner: Uuid,
    batch: &[Finished],
) -> Result<Vec<i32>, sqlx::Error> {
    let statement = "with held as materialized (
             select s.shard, s.epoch from postrider.shards s
             where s.owner = $1 and s.shard = any($4::smallint[])
             order by s.shard for share
         ),
         result as materialized (
             select i.* from unnest($2::int[], $3::uuid[], $4::bigint[], $5::bigint[], $6::timestamptz[], $7::int[],
                                    $8::smallint[], $9::text[], $10::text[], $11::bytea[])
                 with ordinality as i(endpoint_id, event_id, shard, epoch, started_at, duration_ms, status, signature, head,
                                      body, position)
             where i.shard << 48 | i.epoch = any (array(select h.shard::bigint << 48 | h.epoch from held h))
         ),
         taken as (
             delete from postrider.queue q using result r
             where q.endpoint_id = any (array[r.endpoint_id]) and q.event_id = r.event_id and q.attempt = 0
             returning r.*, q.tenant_id, q.type_id, q.replay_id
         ),
         attempt as (
             insert into postrider.attempts (event_id, endpoint_id, number, tenant_id, type_id, started_at, duration_ms,
                                             outcome, status, signature, response_head, response_body, replay_id, final)
             select event_id, endpoint_id, 1, tenant_id, type_id, started_at, duration_ms,
                    $12, status, signature, head, body, replay_id, 'delivered'
             from taken
         ),
         recovered as (
             delete from postrider.endpoint_health h
             where h.endpoint_id = any (array(select distinct t.endpoint_id from taken t))
         )
         select coalesce(array_agg(position::int - 1), '{}') from taken";
    sqlx::query_scalar(statement)
        .bind(owner)
        .bind(column(batch, |one| one.endpoint))
        .bind(column(batch, |one| one.event))
        .bind(column(batch, |one| i64::from(one.shard.0)))
        .bind(column(batch, |one| one.epoch))
        .bind(column(batch, |one| one.started_at))
        .bind(column(batch, duration_ms))
        .bind(column(batch, |one| one.outcome.status().map(small)))
        .bind(column(batch, |one| one.signature.as_deref()))
        .bind(column(batch, |one| {
            one.outcome.answer().map(|answer| answer.head.as_str())
        }))
        .bind(column(batch, |one| {
            one.outcome.answer().map(|answer| answer.body.as_slice())
        }))
        .bind(OutcomeKind::Accepted as i16)
        .fetch_one(connection)
        .await
}

async fn write(
    connection: &mut PgConnection,
    owner: Uuid,
    batch: &[Finished],
    kept: Kept,
) -> Result<Vec<WrittenRow>, sqlx::Error> {
    let retry = |one: &Finished| match one.next {
        Next::Retry { step, wait } => (small(step), i64::try_from(wait.as_millis()).unwrap_or(i64::MAX)),
        Next::Delivered | Next::Dead(_) | Next::Filtered => (0, 0),
    };
    let statement =
        // Whatever is needed of a result comes back with the row it matched, so that nothing is joined twice: the
        // planner knows nothing of how many rows a CTE has, and joining them again cost thirty times the rest.
        "with held as materialized (
             select s.shard, s.epoch from postrider.shards s
             where s.owner = $1 and s.shard = any($4::smallint[])
             order by s.shard for share
         ),
         result as materialized (
             select i.*, clock_timestamp() + i.wait_ms * interval '1 millisecond' as due_at,
                    least(i.number, 32767) as kept_number
             from unnest($2::int[], $3::uuid[], $4::bigint[], $5::bigint[], $6::int[], $7::timestamptz[],
                         $8::int[], $9::smallint[], $10::smallint[], $11::text[], $12::text[], $13::text[],
                         $14::bytea[], $15::postrider.final_state[], $16::postrider.dead_reason[],
                         $17::smallint[], $18::bigint[], $19::bool[])
                 as i(endpoint_id, event_id, shard, epoch, number, started_at, duration_ms, outcome, status, error,
                      signature, head, body, final, reason, step, wait_ms, filtered)
             where i.shard << 48 | i.epoch = any (array(select h.shard::bigint << 48 | h.epoch from held h))
         ),
         from_queue as (
             delete from postrider.queue q using result r
             where q.endpoint_id = any (array[r.endpoint_id]) and q.event_id = r.event_id and q.attempt + 1 = r.number
             returning r.*, q.tenant_id, q.type_id, q.key_id, q.sequence, q.replay_id
         ),
         moved as (
             insert into postrider.retries (endpoint_id, event_id, tenant_id, type_id, key_id, sequence, replay_id,
                                            attempt, step, due_at)
             select endpoint_id, event_id, tenant_id, type_id, key_id, sequence, replay_id, kept_number, step, due_at
             from from_queue where final is null and not filtered
         ),
         ended as (
             delete from postrider.retries w using result r
             where w.endpoint_id = any (array[r.endpoint_id]) and w.event_id = r.event_id and w.attempt + 1 = r.number
               and (r.final is not null or r.filtered)
             returning r.*, w.tenant_id, w.type_id, w.key_id, w.sequence, w.replay_id
         ),
         again as (
             update postrider.retries w set attempt = r.kept_number, step = r.step, due_at = r.due_at
             from result r
             where w.endpoint_id = any (array[r.endpoint_id]) and w.event_id = r.event_id and w.attempt + 1 = r.number
               and r.final is null and not r.filtered
             returning r.*, w.tenant_id, w.type_id, w.key_id, w.sequence, w.replay_id
         ),
         matched as materialized (
             select * from from_queue union all select * from ended union all select * from again
         ),
         attempt as (
             insert into postrider.attempts (event_id, endpoint_id, number, tenant_id, type_id, started_at, duration_ms,
                                             outcome, status, error, signature, response_head, response_body,
                                             replay_id, final)
             select event_id, endpoint_id, kept_number, tenant_id, type_id, started_at, duration_ms, outcome, status, error,
                    signature, head, body, replay_id, final
             from matched where not filtered
             -- Only the last number that can be stored comes twice.
             on conflict (event_id, endpoint_id, number) do update
                 set started_at = excluded.started_at, duration_ms = excluded.duration_ms, outcome = excluded.outcome,
                     status = excluded.status, error = excluded.error, signature = excluded.signature,
                     response_head = excluded.response_head, response_body = excluded.response_body,
                     replay_id = excluded.replay_id, final = excluded.final
         ),
         dead as (
             insert into postrider.dead_letters (endpoint_id, event_id, tenant_id, type_id, reason, attempt, replay_id)
             select endpoint_id, event_id, tenant_id, type_id, reason, kept_number, replay_id from matched where final = 'dead'
         ),
         counted as (
             insert into postrider.dead_letter_counts as c (endpoint_id, type_id, reason, tenant_id, count)
             select endpoint_id, type_id, reason, min(tenant_id), count(*) from matched where final = 'dead'
             group by endpoint_id, type_id, reason
             on conflict (endpoint_id, type_id, reason) do update set count = c.count + excluded.count
         ),
         recovered as (
             delete from postrider.endpoint_health h
             where h.endpoint_id = any (array(select distinct m.endpoint_id from matched m where m.final = 'delivered'))
         ),
         failed as materialized (
             select endpoint_id from matched
             group by endpoint_id
             having bool_or(outcome between 2 and 7) and bool_and(final is distinct from 'delivered')
         ),
         failing as (
             insert into postrider.endpoint_health (endpoint_id) select endpoint_id from failed on conflict do nothing
         ),
         -- Once a day. After a long pause nobody knows whether the endpoint has failed all the while.
         failing_again as (
             update postrider.endpoint_health h
             set failing_since = case when h.last_failed_on < d.today - $20 then clock_timestamp() else h.failing_since end,
                 failed_days = case when h.last_failed_on < d.today - $20 then 1 else least(h.failed_days + 1, 1000) end,
                 last_failed_on = d.today
             from (select (clock_timestamp() at time zone 'UTC')::date as today) d
             where h.endpoint_id = any (array(select f.endpoint_id from failed f)) and h.last_failed_on < d.today
         ),
         -- As it was before this statement.
         failing_long as materialized (
             select h.endpoint_id
             from postrider.endpoint_health h, (select (clock_timestamp() at time zone 'UTC')::date as today) d
             where h.endpoint_id = any (array(select f.endpoint_id from failed f))
               and h.failing_since < clock_timestamp() - $21 * interval '1 day'
               and h.last_failed_on >= d.today - $20
               and h.failed_days + (h.last_failed_on < d.today)::int >= $22
         ),
         to_disable as (
             insert into postrider.endpoints_to_disable (endpoint_id, cause)
             select endpoint_id, max(cause)
             from (
                 select endpoint_id, 'failing' as cause from failing_long
                 union all
                 select endpoint_id, 'gone' from matched where status = 410
             ) c
             group by endpoint_id
             on conflict do nothing
         )
         select m.endpoint_id, m.event_id, case when m.final is null and not m.filtered then m.due_at end as due_at,
                coalesce(m.status = 410, false)
                    or exists (select from failing_long l where l.endpoint_id = m.endpoint_id) as disabling
         from matched m";
    let query = match kept {
        Kept::ByDay => sqlx::query_as(statement),
        Kept::Held => sqlx::query_as(AssertSqlSafe(
            statement.replace("into postrider.attempts (", "into postrider.attempts_held ("),
        )),
    };
    query
        .bind(owner)
        .bind(column(batch, |one| one.endpoint))
        .bind(column(batch, |one| one.event))
        .bind(column(batch, |one| i64::from(one.shard.0)))
        .bind(column(batch, |one| one.epoch))
        .bind(column(batch, |one| i32::from(one.number)))
        .bind(column(batch, |one| one.started_at))
        .bind(column(batch, duration_ms))
        .bind(column(batch, |one| one.outcome.kind() as i16))
        .bind(column(batch, |one| one.outcome.status().map(small)))
        .bind(column(batch, |one| one.outcome.error()))
        .bind(column(batch, |one| one.signature.as_deref()))
        .bind(column(batch, |one| {
            one.outcome.answer().map(|answer| answer.head.as_str())
        }))
        .bind(column(batch, |one| {
            one.outcome.answer().map(|answer| answer.body.as_slice())
        }))
        .bind(column(batch, |one| final_state(one.next)))
        .bind(column(batch, |one| dead_reason(one.next)))
        .bind(column(batch, |one| retry(one).0))
        .bind(column(batch, |one| retry(one).1))
        .bind(column(batch, |one| one.next == Next::Filtered))
        .bind(FAILING_PAUSE_DAYS_MAX)
        .bind(FAILING_DAYS)
        .bind(FAILED_ON_DAYS_MIN)
        .fetch_all(connection)
        .await
}

fn column<'a, T>(batch: &'a [Finished], of: impl FnMut(&'a Finished) -> T) -> Vec<T> {
    batch.iter().map(of).collect()
}

/// Never saturates in practice: a status has three digits and a schedule a few dozen steps.
fn small(number: u16) -> i16 {
    i16::try_from(number).unwrap_or(i16::MAX)
}

fn duration_ms(one: &Finished) -> i32 {
    i32::try_from(one.duration.as_millis()).unwrap_or(i32::MAX)
}

fn final_state(next: Next) -> Option<FinalState> {
    match next {
        Next::Delivered => Some(FinalState::Delivered),
        Next::Dead(_) => Some(FinalState::Dead),
        Next::Retry { .. } | Next::Filtered => None,
    }
}

fn dead_reason(next: Next) -> Option<DeadReason> {
    match next {
        Next::Dead(reason) => Some(reason),
        Next::Delivered | Next::Retry { .. } | Next::Filtered => None,
    }
}
