//! The recorder: results become rows, up to 500 in one statement.
//!
//! Invariant: a result counts only while its shard has the owner and the epoch it was sent under. The statement takes
//! the shards `for share`, so that a takeover waits for it and nothing is recorded after one. Rows that did not match
//! are results of a lost lease: void. So are those whose delivery has moved on meanwhile: a row counts for the attempt
//! that was made of it, by its number.
//! What was recorded goes back to `engine.rs`.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use postrider_proto::{DeadReason, EndpointId, Epoch, EventId, Outcome};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    Wake,
    clock::Clock,
    db_timeout::WithDbTimeout,
    dedicated_connection::DedicatedConnection,
    deliver::{endpoint::Endpoint, engine::EngineMessage, queued_delivery::QueuedDelivery, retry::Next},
    store::transitions::{self, AttemptResult, RecordedRow},
    telemetry::{metrics::METERS, statistics::Statistics},
};

const BATCH_MAX: usize = 500;
const RETRY_WAIT_MAX: Duration = Duration::from_secs(1);

/// An attempt that has ended.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) result: AttemptResult,
    /// Given back once it is recorded: the number of results that wait for the database is bounded.
    pub(crate) room: OwnedSemaphorePermit,
}

impl Finished {
    /// A delivery that dies without an attempt, because its endpoint is disabled.
    pub(crate) fn buried(
        endpoint: &Endpoint,
        epoch: Epoch,
        delivery: &QueuedDelivery,
        reason: DeadReason,
        now: DateTime<Utc>,
        room: OwnedSemaphorePermit,
    ) -> Self {
        Self {
            result: AttemptResult {
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
                archived: false,
            },
            room,
        }
    }
}

/// What became of it in the database.
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
    /// Waits in `retries`.
    Due(DateTime<Utc>),
    /// No row matched: the lease was lost, or an earlier try of the same batch had committed without our hearing of it.
    Void,
}

pub(crate) struct Recorder {
    pub(crate) connection: DedicatedConnection,
    /// Told when endpoints are to be disabled. Nothing here waits for that.
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
            // The permits are dropped, and so given back, after the results are recorded.
            let (mut results, _permits): (Vec<_>, Vec<_>) = batch
                .drain(..)
                .map(|Finished { result, room }| (result, room))
                .unzip();
            tokio::select! {
                () = self.record(&mut results) => {}
                () = abandon.cancelled() => return,
            }
        }
    }

    async fn record(&mut self, batch: &mut [AttemptResult]) {
        let mut wait = Duration::from_millis(20);
        loop {
            let began = Instant::now();
            match self.write(batch).await {
                Ok(rows) => {
                    METERS.record_seconds.record(began.elapsed());
                    METERS.record_rows.record(batch.len() as f64);
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
                    return self.record_apart(batch, &error).await;
                }
                Err(error) => {
                    self.connection.close();
                    tracing::warn!(%error, results = batch.len(), "results could not be recorded yet; trying again");
                    tokio::time::sleep(wait).await;
                    wait = (wait * 2).min(RETRY_WAIT_MAX);
                }
            }
        }
    }

    /// Most batches are first attempts that succeeded, which a shorter statement records.
    async fn write(&mut self, batch: &[AttemptResult]) -> Result<Vec<RecordedRow>, sqlx::Error> {
        let connection = self.connection.open().await?;
        match batch.iter().all(AttemptResult::is_plain_success) {
            true => {
                transitions::record_delivered(connection, self.owner, batch)
                    .with_db_timeout()
                    .await
            }
            false => {
                transitions::record_batch(connection, self.owner, batch)
                    .with_db_timeout()
                    .await
            }
        }
    }

    /// One row that the database refuses must not delay the others.
    async fn record_apart(&mut self, batch: &mut [AttemptResult], error: &sqlx::Error) {
        if let [one] = batch {
            // Its partition was dropped while the attempt was in flight.
            if !one.archived && has_no_partition(error) {
                one.archived = true;
                return Box::pin(self.record(batch)).await;
            }
            tracing::error!(%error, endpoint = %one.endpoint, event = %one.event, "a result can't be recorded");
            let _ = self.out.send(EngineMessage::Recorded(fates(batch, &[])));
            return;
        }
        let (left, right) = batch.split_at_mut(batch.len() / 2);
        Box::pin(self.record(left)).await;
        Box::pin(self.record(right)).await;
    }
}

/// Postgres reports a missing partition as a check violation that names no constraint.
fn has_no_partition(error: &sqlx::Error) -> bool {
    error
        .as_database_error()
        .is_some_and(|e| e.code().as_deref() == Some("23514") && e.constraint().is_none())
}

/// Whether the database answered that the values themselves are wrong, which trying again would not change.
fn is_about_the_rows(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(e) => e
            .code()
            .is_some_and(|code| matches!(&code[..2], "21" | "22" | "23")),
        sqlx::Error::Encode(_) => true,
        _ => false,
    }
}

/// A void result was another's to count.
fn count(batch: &[AttemptResult], recorded: &[Recorded]) {
    for (one, recorded) in batch.iter().zip(recorded) {
        match one.next {
            _ if recorded.fate == Fate::Void => {}
            Next::Filtered => METERS.filtered.increment(1),
            Next::Dead(reason) => METERS.died(reason),
            Next::Delivered | Next::Retry { .. } => {}
        }
    }
}

fn fates(batch: &[AttemptResult], rows: &[RecordedRow]) -> Vec<Recorded> {
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
                epoch: one.epoch,
                event: one.event,
                number: one.number,
                fate,
            }
        })
        .collect()
}
