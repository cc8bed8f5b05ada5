//! The recorder: results become rows, up to 500 in one statement.
//!
//! Invariant: a result counts only while its shard has the owner and the epoch it was sent under. The statement takes
//! the shards `for share`, so that a takeover waits for it and nothing is recorded after one. Rows that did not match
//! are results of a lost lease: void.
//! What was recorded goes back to `engine.rs`.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use postrider_proto::{DeadReason, EndpointId, Epoch, EventId, FinalState, Outcome, Shard};
use sqlx::{FromRow, PgPool};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    disable::{Cause, disable},
    endpoint::Endpoint,
    engine::Event,
    job::Job,
    retry::Next,
};

const BATCH_MAX: usize = 500;
const RETRY_WAIT_MAX: Duration = Duration::from_secs(1);

/// An attempt that has come to its end.
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
    /// Given back once it is recorded: the number of results that wait for the database is bounded.
    #[expect(dead_code, reason = "held, not read")]
    pub(crate) room: OwnedSemaphorePermit,
}

impl Finished {
    /// A delivery that dies without an attempt, because its endpoint is disabled.
    pub(crate) fn buried(
        endpoint: &Endpoint,
        epoch: Epoch,
        job: &Job,
        reason: DeadReason,
        now: DateTime<Utc>,
        room: OwnedSemaphorePermit,
    ) -> Self {
        Self {
            endpoint: endpoint.id,
            event: job.event,
            shard: endpoint.shard,
            epoch,
            number: job.number(),
            started_at: now,
            duration: Duration::ZERO,
            signature: None,
            outcome: Outcome::NotSent {
                error: "the endpoint is disabled".to_owned(),
            },
            next: Next::Dead(reason),
            room,
        }
    }
}

/// What became of it in the database.
#[derive(Debug)]
pub(crate) struct Recorded {
    pub(crate) endpoint: EndpointId,
    pub(crate) event: EventId,
    pub(crate) number: u16,
    pub(crate) fate: Fate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Ended,
    /// Waits in `retries`.
    Due(DateTime<Utc>),
    /// No row matched: the lease was lost, or an earlier try of the same batch had committed without our hearing of it.
    Void,
}

pub(crate) struct Recorder {
    pub(crate) pool: PgPool,
    pub(crate) owner: Uuid,
    pub(crate) finished: mpsc::UnboundedReceiver<Finished>,
    pub(crate) out: mpsc::UnboundedSender<Event>,
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
            tokio::select! {
                () = self.record(&batch) => {}
                () = abandon.cancelled() => return,
            }
            batch.clear();
        }
    }

    async fn record(&self, batch: &[Finished]) {
        let mut wait = Duration::from_millis(20);
        loop {
            let began = Instant::now();
            match write(&self.pool, self.owner, batch).await {
                Ok(rows) => {
                    metrics::histogram!("postrider_record_seconds").record(began.elapsed());
                    metrics::histogram!("postrider_record_rows").record(batch.len() as f64);
                    for (endpoint, cause) in to_disable(batch, &rows) {
                        if let Err(error) = disable(&self.pool, endpoint, cause).await {
                            // Its next answer brings us here again.
                            tracing::warn!(%endpoint, %error, "an endpoint could not be disabled yet");
                        }
                    }
                    count_filtered(batch, &rows);
                    let _ = self.out.send(Event::Recorded(fates(batch, &rows)));
                    return;
                }
                Err(error) if is_about_the_rows(&error) => {
                    return self.record_apart(batch, &error).await;
                }
                Err(error) => {
                    tracing::warn!(%error, results = batch.len(), "results could not be recorded yet; trying again");
                    tokio::time::sleep(wait).await;
                    wait = (wait * 2).min(RETRY_WAIT_MAX);
                }
            }
        }
    }

    /// One row that the database refuses must not hold up the others.
    async fn record_apart(&self, batch: &[Finished], error: &sqlx::Error) {
        if let [one] = batch {
            tracing::error!(%error, endpoint = %one.endpoint, event = %one.event, "a result can't be recorded");
            let _ = self.out.send(Event::Recorded(fates(batch, &[])));
            return;
        }
        let (left, right) = batch.split_at(batch.len() / 2);
        Box::pin(self.record(left)).await;
        Box::pin(self.record(right)).await;
    }
}

/// Whether the database answered that the values themselves are wrong, which trying again would not change.
fn is_about_the_rows(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(e) => e.code().is_some_and(|code| matches!(&code[..2], "22" | "23")),
        sqlx::Error::Encode(_) => true,
        _ => false,
    }
}

#[derive(Debug, FromRow)]
struct WrittenRow {
    endpoint_id: EndpointId,
    event_id: EventId,
    due_at: Option<DateTime<Utc>>,
    failing_long: bool,
}

/// Endpoints that these results take out of service. Void ones do not count.
fn to_disable(batch: &[Finished], rows: &[WrittenRow]) -> HashMap<EndpointId, Cause> {
    let written: HashSet<_> = rows.iter().map(|row| (row.endpoint_id, row.event_id)).collect();
    let gone = batch
        .iter()
        .filter(|one| one.outcome.status() == Some(410) && written.contains(&(one.endpoint, one.event)))
        .map(|one| (one.endpoint, Cause::Gone));
    let answered = |id| {
        batch
            .iter()
            .any(|one| one.endpoint == id && one.next == Next::Delivered)
    };
    rows.iter()
        .filter(|row| row.failing_long && !answered(row.endpoint_id))
        .map(|row| (row.endpoint_id, Cause::Failing))
        .chain(gone)
        .collect()
}

fn count_filtered(batch: &[Finished], rows: &[WrittenRow]) {
    let is_written = |one: &&Finished| {
        rows.iter()
            .any(|row| row.endpoint_id == one.endpoint && row.event_id == one.event)
    };
    let filtered = batch.iter().filter(|one| one.next == Next::Filtered);
    let count = filtered.filter(is_written).count() as u64;
    if count > 0 {
        metrics::counter!("postrider_deliveries_filtered_total").increment(count);
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
                None => Fate::Void,
            };
            Recorded {
                endpoint: one.endpoint,
                event: one.event,
                number: one.number,
                fate,
            }
        })
        .collect()
}

async fn write(pool: &PgPool, owner: Uuid, batch: &[Finished]) -> Result<Vec<WrittenRow>, sqlx::Error> {
    let column = |f: &dyn Fn(&Finished) -> i64| batch.iter().map(f).collect::<Vec<i64>>();
    let retry = |one: &Finished| match one.next {
        Next::Retry { step, wait } => (i64::from(step), wait.as_millis() as i64),
        Next::Delivered | Next::Dead(_) | Next::Filtered => (0, 0),
    };
    sqlx::query_as(
        "with input as materialized (
             select * from unnest($2::int[], $3::uuid[], $4::bigint[], $5::bigint[], $6::bigint[], $7::timestamptz[],
                                  $8::bigint[], $9::bigint[], $10::bigint[], $11::text[], $12::text[], $13::text[],
                                  $14::bytea[], $15::postrider.final_state[], $16::postrider.dead_reason[],
                                  $17::bigint[], $18::bigint[], $19::bool[])
                 as i(endpoint_id, event_id, shard, epoch, number, started_at, duration_ms, outcome, status, error,
                      signature, head, body, final, reason, step, wait_ms, filtered)
         ),
         held as materialized (
             select s.shard, s.epoch from postrider.shards s
             where s.owner = $1 and s.shard in (select i.shard from input i)
             order by s.shard for share
         ),
         result as materialized (
             select i.* from input i join held h on h.shard = i.shard and h.epoch = i.epoch
         ),
         from_queue as (
             delete from postrider.queue q using result r
             where q.endpoint_id = r.endpoint_id and q.event_id = r.event_id
             returning q.endpoint_id, q.event_id, q.tenant_id, q.type_id, q.key_id, q.sequence, q.replay_id
         ),
         ended as (
             delete from postrider.retries w using result r
             where w.endpoint_id = r.endpoint_id and w.event_id = r.event_id and r.final is not null
             returning w.endpoint_id, w.event_id, w.tenant_id, w.type_id, w.replay_id
         ),
         again as (
             update postrider.retries w
             set attempt = r.number, step = r.step, due_at = clock_timestamp() + r.wait_ms * interval '1 millisecond'
             from result r
             where w.endpoint_id = r.endpoint_id and w.event_id = r.event_id and r.final is null
             returning w.endpoint_id, w.event_id, w.tenant_id, w.type_id, w.replay_id, w.due_at
         ),
         moved as (
             insert into postrider.retries (endpoint_id, event_id, tenant_id, type_id, key_id, sequence, replay_id,
                                            attempt, step, due_at)
             select q.endpoint_id, q.event_id, q.tenant_id, q.type_id, q.key_id, q.sequence, q.replay_id,
                    r.number, r.step, clock_timestamp() + r.wait_ms * interval '1 millisecond'
             from from_queue q join result r using (endpoint_id, event_id)
             where r.final is null and not r.filtered
             returning endpoint_id, event_id, due_at
         ),
         matched as (
             select endpoint_id, event_id, tenant_id, type_id, replay_id from from_queue
             union all select endpoint_id, event_id, tenant_id, type_id, replay_id from ended
             union all select endpoint_id, event_id, tenant_id, type_id, replay_id from again
         ),
         attempt as (
             insert into postrider.attempts (event_id, endpoint_id, number, tenant_id, type_id, started_at, duration_ms,
                                             outcome, status, error, signature, response_head, response_body,
                                             replay_id, final)
             select r.event_id, r.endpoint_id, r.number, m.tenant_id, m.type_id, r.started_at, r.duration_ms,
                    r.outcome, r.status, r.error, r.signature, r.head, r.body, m.replay_id, r.final
             from matched m join result r using (endpoint_id, event_id)
             where not r.filtered
         ),
         dead as (
             insert into postrider.dead_letters (endpoint_id, event_id, tenant_id, type_id, reason, attempt)
             select r.endpoint_id, r.event_id, m.tenant_id, m.type_id, r.reason, r.number
             from matched m join result r using (endpoint_id, event_id)
             where r.final = 'dead'
         ),
         counted as (
             insert into postrider.dead_letter_counts as c (endpoint_id, type_id, reason, tenant_id, count)
             select r.endpoint_id, m.type_id, r.reason, min(m.tenant_id), count(*)
             from matched m join result r using (endpoint_id, event_id)
             where r.final = 'dead'
             group by r.endpoint_id, m.type_id, r.reason
             on conflict (endpoint_id, type_id, reason) do update set count = c.count + excluded.count
         ),
         recovered as (
             delete from postrider.endpoint_health h
             where h.endpoint_id in (select r.endpoint_id from result r where r.final = 'delivered')
         ),
         failing as (
             insert into postrider.endpoint_health (endpoint_id)
             select r.endpoint_id from result r
             where r.outcome between 2 and 7
             group by r.endpoint_id
             having not exists (select from result s where s.endpoint_id = r.endpoint_id and s.final = 'delivered')
             on conflict do nothing
         )
         select m.endpoint_id, m.event_id, coalesce(n.due_at, a.due_at) as due_at,
                coalesce(h.failing_since < clock_timestamp() - interval '5 days', false) as failing_long
         from matched m
         left join moved n using (endpoint_id, event_id)
         left join again a using (endpoint_id, event_id)
         left join postrider.endpoint_health h using (endpoint_id)",
    )
    .bind(owner)
    .bind(batch.iter().map(|one| one.endpoint).collect::<Vec<_>>())
    .bind(batch.iter().map(|one| one.event).collect::<Vec<_>>())
    .bind(column(&|one| one.shard.0.into()))
    .bind(column(&|one| one.epoch.0))
    .bind(column(&|one| one.number.into()))
    .bind(batch.iter().map(|one| one.started_at).collect::<Vec<_>>())
    .bind(column(&|one| one.duration.as_millis() as i64))
    .bind(column(&|one| one.outcome.kind() as i64))
    .bind(batch.iter().map(|one| one.outcome.status().map(i64::from)).collect::<Vec<_>>())
    .bind(batch.iter().map(|one| one.outcome.error()).collect::<Vec<_>>())
    .bind(batch.iter().map(|one| one.signature.as_deref()).collect::<Vec<_>>())
    .bind(batch.iter().map(|one| one.outcome.answer().map(|a| a.head.as_str())).collect::<Vec<_>>())
    .bind(batch.iter().map(|one| one.outcome.answer().map(|a| a.body.as_slice())).collect::<Vec<_>>())
    .bind(batch.iter().map(|one| final_state(one.next)).collect::<Vec<_>>())
    .bind(batch.iter().map(|one| dead_reason(one.next)).collect::<Vec<_>>())
    .bind(column(&|one| retry(one).0))
    .bind(column(&|one| retry(one).1))
    .bind(batch.iter().map(|one| one.next == Next::Filtered).collect::<Vec<_>>())
    .fetch_all(pool)
    .await
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
