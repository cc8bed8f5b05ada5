//! The recorder writes results of attempts, up to 500 in one statement.
//!
//! Invariant: a result counts only while its shard has the owner and epoch it was sent under. The statement locks the
//! shards `for share`, so that a takeover waits for it and nothing is recorded afterwards. Results whose row does not
//! match are discarded: the lease was lost, or the delivery has moved on and the row has another attempt number. What
//! was recorded is reported to `engine.rs`.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use postrider_proto::{DeadReason, EndpointId, Epoch, EventId, Outcome};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    Wake,
    backoff::Backoff,
    clock::Clock,
    db_timeout::WithDbTimeout,
    dedicated_connection::DedicatedConnection,
    deliver::{endpoint::Endpoint, engine::EngineMessage, queued_delivery::QueuedDelivery, retry::Next},
    health::database::warn_unless_outage,
    maintenance::vacuum::DeadRows,
    store::transitions::{self, AttemptRecord, RecordedRow},
    telemetry::{metrics::METRICS, statistics::Statistics},
};

const BATCH_MAX: usize = 500;
const RETRY: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(1));

/// An attempt that has ended.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) result: AttemptRecord,
    /// Released once the result is recorded: bounds the number of unrecorded results.
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
            result: AttemptRecord {
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
                timing: None,
                archived: false,
            },
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
    pub(crate) dead_rows: DeadRows,
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
            let finished = batch.drain(..).map(|one| (one.result, one.result_permit));
            let (mut results, _permits): (Vec<_>, Vec<_>) = finished.unzip();
            tokio::select! {
                () = self.record(&mut results) => {}
                () = abandon.cancelled() => return,
            }
            self.dead_rows.add(results.len());
        }
    }

    async fn record(&mut self, batch: &mut [AttemptRecord]) {
        let mut backoff = RETRY;
        loop {
            let began = Instant::now();
            match self.write(batch).await {
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
                    return self.record_apart(batch, &error).await;
                }
                Err(error) => {
                    self.connection.close();
                    warn_unless_outage!(error, results = batch.len(), "recording results failed; retrying");
                    tokio::time::sleep(backoff.delay()).await;
                }
            }
        }
    }

    /// Most batches are first attempts that succeeded, which a shorter statement records.
    async fn write(&mut self, batch: &[AttemptRecord]) -> Result<Vec<RecordedRow>, sqlx::Error> {
        let connection = self.connection.open().await?;
        let mut rows = if batch.iter().all(AttemptRecord::is_plain_success) {
            transitions::record_delivered(connection, self.owner, batch)
                .with_db_timeout()
                .await?
        } else {
            transitions::record_batch(connection, self.owner, batch)
                .with_db_timeout()
                .await?
        };
        let unmatched = unmatched(batch, &rows);
        if unmatched.is_empty() {
            return Ok(rows);
        }
        // A replay or its withdrawal that committed meanwhile has moved a row to a table where this statement's snapshot
        // did not show it. A second statement sees it; results of a lost lease match nothing again.
        let moved = transitions::record_batch(connection, self.owner, &unmatched)
            .with_db_timeout()
            .await;
        match moved {
            Ok(moved) => rows.extend(moved),
            Err(error) => {
                self.connection.close();
                warn_unless_outage!(
                    error,
                    results = unmatched.len(),
                    "results without a delivery could not be looked up again"
                );
            }
        }
        Ok(rows)
    }

    /// One row that the database rejects must not block the others.
    async fn record_apart(&mut self, batch: &mut [AttemptRecord], error: &sqlx::Error) {
        if let [one] = batch {
            // Its partition was dropped while the attempt was in flight.
            if !one.archived && has_no_partition(error) {
                one.archived = true;
                return Box::pin(self.record(batch)).await;
            }
            tracing::error!(%error, endpoint = %one.endpoint, event = %one.event, "the database rejected a result; it is discarded");
            let _ = self.out.send(EngineMessage::Recorded(fates(batch, &[])));
            return;
        }
        let (left, right) = batch.split_at_mut(batch.len() / 2);
        Box::pin(self.record(left)).await;
        Box::pin(self.record(right)).await;
    }
}

fn unmatched(batch: &[AttemptRecord], rows: &[RecordedRow]) -> Vec<AttemptRecord> {
    if rows.len() == batch.len() {
        return Vec::new();
    }
    let matched: HashSet<_> = rows.iter().map(|row| (row.endpoint_id, row.event_id)).collect();
    let unmatched = batch
        .iter()
        .filter(|one| !matched.contains(&(one.endpoint, one.event)));
    unmatched.cloned().collect()
}

/// Postgres reports a missing partition as a check violation that names no constraint.
fn has_no_partition(error: &sqlx::Error) -> bool {
    error
        .as_database_error()
        .is_some_and(|e| e.code().as_deref() == Some("23514") && e.constraint().is_none())
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

/// Discarded results are counted by the dispatcher that owns the delivery.
fn count(batch: &[AttemptRecord], recorded: &[Recorded]) {
    for (one, recorded) in batch.iter().zip(recorded) {
        match one.next {
            _ if recorded.fate == Fate::Discarded => {}
            Next::Filtered => METRICS.filtered.increment(1),
            Next::Dead(reason) => METRICS.died(reason),
            Next::Delivered | Next::Retry { .. } => {}
        }
    }
}

fn fates(batch: &[AttemptRecord], rows: &[RecordedRow]) -> Vec<Recorded> {
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
