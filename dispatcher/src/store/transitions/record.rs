//! Recording attempts.

use std::time::Duration;

use chrono::{DateTime, Utc};
use postrider_proto::{
    DeadReason, EndpointId, Epoch, EventId, Failure, FinalState, Outcome, OutcomeKind, Shard, Timing,
};
use sqlx::{FromRow, PgConnection};
use uuid::Uuid;

use crate::deliver::retry::Next;

/// An endpoint is disabled when it has failed for this many days without a success,
pub const FAILING_DAYS: i32 = 5;
/// on at least this many of them,
const FAILED_ON_DAYS_MIN: i32 = 3;
/// and with at most this many days between two days of failure.
pub const FAILING_PAUSE_DAYS_MAX: i32 = 2;

/// The status of a receiver that wants no more requests.
const GONE: i16 = 410;

/// An attempt that has ended, as it is recorded.
#[derive(Debug, Clone)]
pub(crate) struct AttemptRecord {
    pub(crate) endpoint: EndpointId,
    pub(crate) event: EventId,
    pub(crate) shard: Shard,
    /// The epoch of the shard that the attempt was made under.
    pub(crate) epoch: Epoch,
    pub(crate) number: u16,
    pub(crate) started_at: DateTime<Utc>,
    pub(crate) duration: Duration,
    pub(crate) signature: Option<String>,
    pub(crate) outcome: Outcome,
    pub(crate) next: Next,
    /// Of an attempt that failed: successes are many, and few people look at them.
    pub(crate) timing: Option<Timing>,
    /// Its event has outlived its partition, and so do its attempts.
    pub(crate) archived: bool,
}

impl AttemptRecord {
    /// Whether [`record_delivered`] can record it.
    pub(crate) fn is_plain_success(&self) -> bool {
        self.next == Next::Delivered && self.number == 1 && !self.archived
    }

    fn duration_ms(&self) -> i32 {
        i32::try_from(self.duration.as_millis()).unwrap_or(i32::MAX)
    }

    fn status(&self) -> Option<i16> {
        self.outcome.status().map(small)
    }

    fn response_head(&self) -> Option<&str> {
        self.outcome.response().map(|response| response.head.as_str())
    }

    fn response_body(&self) -> Option<&[u8]> {
        self.outcome.response().map(|response| response.body.as_slice())
    }

    fn final_state(&self) -> Option<FinalState> {
        match self.next {
            Next::Delivered => Some(FinalState::Delivered),
            Next::Dead(_) => Some(FinalState::Dead),
            Next::Retry { .. } | Next::Filtered => None,
        }
    }

    fn dead_reason(&self) -> Option<DeadReason> {
        match self.next {
            Next::Dead(reason) => Some(reason),
            Next::Delivered | Next::Retry { .. } | Next::Filtered => None,
        }
    }

    /// All deliveries that are dead because of one 410 have failed the same way, also those that were not sent after it.
    fn failure(&self) -> Failure {
        match self.next {
            Next::Dead(DeadReason::Gone) => Failure::new(Some(GONE), OutcomeKind::Refused as i16),
            _ => self.outcome.failure(),
        }
    }

    fn retry_step(&self) -> i16 {
        match self.next {
            Next::Retry { step, .. } => small(step),
            Next::Delivered | Next::Dead(_) | Next::Filtered => 0,
        }
    }

    fn retry_wait_ms(&self) -> i64 {
        match self.next {
            Next::Retry { wait, .. } => i64::try_from(wait.as_millis()).unwrap_or(i64::MAX),
            Next::Delivered | Next::Dead(_) | Next::Filtered => 0,
        }
    }
}

/// A result that matched its delivery and was recorded.
#[derive(Debug, FromRow)]
pub(crate) struct RecordedRow {
    pub(crate) endpoint_id: EndpointId,
    pub(crate) event_id: EventId,
    /// When the next attempt is due; none when the delivery has ended.
    pub(crate) due_at: Option<DateTime<Utc>>,
    /// The endpoint has to be disabled.
    pub(crate) disabling: bool,
}

/// queue → delivered: successes of first attempts, if `owner` still owns the shards with the epochs of the results.
pub(crate) async fn record_delivered(
    connection: &mut PgConnection,
    owner: Uuid,
    batch: &[AttemptRecord],
) -> Result<Vec<RecordedRow>, sqlx::Error> {
    let positions: Vec<i32> = sqlx::query_scalar(include_str!("../sql/record_delivered.sql"))
        .bind(owner)
        .bind(column(batch, |one| one.endpoint))
        .bind(column(batch, |one| one.event))
        .bind(column(batch, |one| i64::from(one.shard.0)))
        .bind(column(batch, |one| one.epoch))
        .bind(column(batch, |one| one.started_at))
        .bind(column(batch, AttemptRecord::duration_ms))
        .bind(column(batch, AttemptRecord::status))
        .bind(column(batch, |one| one.signature.as_deref()))
        .bind(column(batch, AttemptRecord::response_head))
        .bind(column(batch, AttemptRecord::response_body))
        .bind(OutcomeKind::Accepted as i16)
        .fetch_one(connection)
        .await?;
    Ok(positions
        .into_iter()
        .filter_map(|position| batch.get(position as usize))
        .map(|one| RecordedRow {
            endpoint_id: one.endpoint,
            event_id: one.event,
            due_at: None,
            disabling: false,
        })
        .collect())
}

/// queue | retries → delivered | dead | retries | gone: results of any kind, if `owner` still owns the shards with the
/// epochs of the results. Only what a filter rejected is gone.
pub(crate) async fn record_batch(
    connection: &mut PgConnection,
    owner: Uuid,
    batch: &[AttemptRecord],
) -> Result<Vec<RecordedRow>, sqlx::Error> {
    sqlx::query_as(include_str!("../sql/record_batch.sql"))
        .bind(owner)
        .bind(column(batch, |one| one.endpoint))
        .bind(column(batch, |one| one.event))
        .bind(column(batch, |one| i64::from(one.shard.0)))
        .bind(column(batch, |one| one.epoch))
        .bind(column(batch, |one| i32::from(one.number)))
        .bind(column(batch, |one| one.started_at))
        .bind(column(batch, AttemptRecord::duration_ms))
        .bind(column(batch, |one| one.outcome.kind() as i16))
        .bind(column(batch, AttemptRecord::status))
        .bind(column(batch, |one| one.outcome.error()))
        .bind(column(batch, |one| one.signature.as_deref()))
        .bind(column(batch, AttemptRecord::response_head))
        .bind(column(batch, AttemptRecord::response_body))
        .bind(column(batch, AttemptRecord::final_state))
        .bind(column(batch, AttemptRecord::dead_reason))
        .bind(column(batch, AttemptRecord::retry_step))
        .bind(column(batch, AttemptRecord::retry_wait_ms))
        .bind(column(batch, |one| one.next == Next::Filtered))
        .bind(column(batch, |one| one.archived))
        .bind(column(batch, AttemptRecord::failure))
        .bind(column(batch, |one| one.timing.map(|timing| timing.to_string())))
        .bind(FAILING_PAUSE_DAYS_MAX)
        .bind(FAILING_DAYS)
        .bind(FAILED_ON_DAYS_MIN)
        .fetch_all(connection)
        .await
}

fn column<'a, T>(batch: &'a [AttemptRecord], of: impl FnMut(&'a AttemptRecord) -> T) -> Vec<T> {
    batch.iter().map(of).collect()
}

/// Never saturates: a status has three digits and a schedule a few dozen steps.
fn small(number: u16) -> i16 {
    i16::try_from(number).unwrap_or(i16::MAX)
}
