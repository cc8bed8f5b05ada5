//! Minute statistics: recorded results, summed in memory by endpoint and minute and written about once a second in a
//! separate statement, so that no page has to count attempts. Also publishes each endpoint's load.
//!
//! Invariant: a row contains the whole count of its minute so far, under an id of this dispatcher. Writing it twice
//! does no harm, and nobody else writes it. When the clock steps back to minutes already forgotten, a new id is used.
//! A killed process loses the counts since its last flush, but not the attempts.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use chrono::{DateTime, Utc};
use postrider_proto::{EndpointId, OutcomeKind};
use sqlx::PgPool;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    bind::BindAll,
    clock::Clock,
    db_timeout::WithDbTimeout,
    deliver::{
        lane::Activity,
        recorder::{Fate, Recorded},
        retry::Next,
    },
    lock::lock,
    store::transitions::AttemptRecord,
};

const FLUSH_EVERY: Duration = Duration::from_secs(1);
const ROWS_MAX: usize = 1_000;
const MINUTE_SECONDS: i64 = 60;

/// The row that counts all endpoints together.
pub const ALL_ENDPOINTS: EndpointId = EndpointId(0);

/// Class of an attempt's outcome. The numbers are indexes into `classes` and must never change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Class {
    Accepted = 0,
    Redirected = 1,
    ClientError = 2,
    ServerError = 3,
    NameNotFound = 4,
    ConnectionFailed = 5,
    TlsFailed = 6,
    TimedOut = 7,
    InvalidResponse = 8,
    Forbidden = 9,
    NotSent = 10,
}

pub const CLASSES: usize = 11;

impl Class {
    pub const ALL: [Self; CLASSES] = [
        Self::Accepted,
        Self::Redirected,
        Self::ClientError,
        Self::ServerError,
        Self::NameNotFound,
        Self::ConnectionFailed,
        Self::TlsFailed,
        Self::TimedOut,
        Self::InvalidResponse,
        Self::Forbidden,
        Self::NotSent,
    ];

    pub fn of(kind: OutcomeKind, status: Option<u16>) -> Self {
        match (kind, status) {
            (OutcomeKind::Accepted, _) => Self::Accepted,
            (OutcomeKind::Refused, Some(300..=399)) => Self::Redirected,
            (OutcomeKind::Refused, Some(400..=499)) => Self::ClientError,
            (OutcomeKind::Refused, _) => Self::ServerError,
            (OutcomeKind::NameNotFound, _) => Self::NameNotFound,
            (OutcomeKind::ConnectionFailed, _) => Self::ConnectionFailed,
            (OutcomeKind::TlsFailed, _) => Self::TlsFailed,
            (OutcomeKind::TimedOut, _) => Self::TimedOut,
            (OutcomeKind::InvalidResponse, _) => Self::InvalidResponse,
            (OutcomeKind::Forbidden, _) => Self::Forbidden,
            // A fault of our own proxy is not the endpoint's.
            (OutcomeKind::NotSent | OutcomeKind::ProxyFailed, _) => Self::NotSent,
        }
    }
}

/// Upper bounds of the duration buckets in milliseconds; one more bucket is for everything slower.
pub const BOUNDS_MS: [u32; 28] = [
    1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1_000, 1_500, 2_000, 3_000, 5_000,
    7_000, 10_000, 15_000, 20_000, 30_000, 60_000,
];
pub const BUCKETS: usize = BOUNDS_MS.len() + 1;

pub fn bucket_of(duration: Duration) -> usize {
    BOUNDS_MS.partition_point(|bound| u128::from(*bound) < duration.as_millis())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Counts {
    delivered: i32,
    retried: i32,
    dead: i32,
    classes: [i32; CLASSES],
    durations: [i32; BUCKETS],
    /// Changed since the last flush.
    changed: bool,
}

impl Counts {
    fn add(&mut self, one: &AttemptRecord) {
        match one.next {
            Next::Delivered => self.delivered += 1,
            Next::Retry { .. } => self.retried += 1,
            Next::Dead(_) => self.dead += 1,
            Next::Filtered => return,
        }
        self.changed = true;
        self.classes[Class::of(one.outcome.kind(), one.outcome.status()) as usize] += 1;
        // A delivery without an attempt, or to a forbidden address, has no duration.
        if one.signature.is_some() {
            self.durations[bucket_of(one.duration)] += 1;
        }
    }

    fn any_failed(&self) -> bool {
        self.classes[Class::Accepted as usize + 1..]
            .iter()
            .any(|n| *n > 0)
    }
}

/// An endpoint, a minute since 1970, and the writer's id.
type Key = (EndpointId, i64, Uuid);

/// Shared by the recorder, which adds, and the flush.
#[derive(Clone, Default)]
pub(crate) struct Statistics(Arc<Mutex<Totals>>);

struct Totals {
    counts: HashMap<Key, Counts>,
    writer: Uuid,
    /// The latest minute counted under this writer.
    latest: i64,
}

impl Default for Totals {
    fn default() -> Self {
        Self {
            counts: HashMap::new(),
            writer: Uuid::now_v7(),
            latest: i64::MIN,
        }
    }
}

impl Totals {
    /// The writer of a minute's row. A minute that may have been written and forgotten starts again under a new id.
    fn writer_of(&mut self, minute: i64) -> Uuid {
        if minute < self.latest.saturating_sub(1) {
            self.writer = Uuid::now_v7();
            self.latest = minute;
        }
        self.latest = self.latest.max(minute);
        self.writer
    }
}

impl Statistics {
    /// Counts what was written; a void result was another's to count.
    pub(crate) fn add(&self, now: DateTime<Utc>, batch: &[AttemptRecord], recorded: &[Recorded]) {
        let minute = now.timestamp().div_euclid(MINUTE_SECONDS);
        let mut totals = lock(&self.0);
        let writer = totals.writer_of(minute);
        for (one, recorded) in batch.iter().zip(recorded) {
            if recorded.fate == Fate::Discarded {
                continue;
            }
            for endpoint in [one.endpoint, ALL_ENDPOINTS] {
                let counts = totals.counts.entry((endpoint, minute, writer));
                counts.or_default().add(one);
            }
        }
    }

    /// Takes changed rows as written. Past minutes that were written are removed.
    fn take(&self, now: DateTime<Utc>) -> Vec<(Key, Counts)> {
        let minute = now.timestamp().div_euclid(MINUTE_SECONDS);
        let counts = &mut lock(&self.0).counts;
        counts.retain(|(_, of, _), counts| *of >= minute - 1 || counts.changed);
        let changed = |(key, counts): (&Key, &mut Counts)| {
            std::mem::take(&mut counts.changed).then_some((*key, *counts))
        };
        counts.iter_mut().filter_map(changed).collect()
    }

    /// The write failed: mark the rows as changed again.
    fn give_back(&self, rows: &[(Key, Counts)]) {
        let mut totals = lock(&self.0);
        for (key, _) in rows {
            if let Some(counts) = totals.counts.get_mut(key) {
                counts.changed = true;
            }
        }
    }
}

pub(crate) struct Flusher {
    pub(crate) pool: PgPool,
    pub(crate) writer: Uuid,
    pub(crate) clock: Clock,
    pub(crate) statistics: Statistics,
    pub(crate) activity: watch::Receiver<Vec<Activity>>,
}

impl Flusher {
    /// Runs until `leave`; then flushes once more and removes its activity.
    pub(crate) async fn run(mut self, leave: CancellationToken) {
        let mut published = HashMap::new();
        while !leave.is_cancelled() {
            leave.run_until_cancelled(tokio::time::sleep(FLUSH_EVERY)).await;
            self.flush_counts().await;
            let activity = self.activity.borrow_and_update().clone();
            if let Err(error) = publish(&self.pool, self.writer, &mut published, &activity)
                .with_db_timeout()
                .await
            {
                tracing::debug!(%error, "publishing endpoint activity failed; retrying");
                published.clear();
            }
        }
        let _ = publish(&self.pool, self.writer, &mut published, &[])
            .with_db_timeout()
            .await;
    }

    async fn flush_counts(&self) {
        let rows = self.statistics.take(self.clock.now());
        for part in rows.chunks(ROWS_MAX) {
            if let Err(error) = write(&self.pool, part).with_db_timeout().await {
                tracing::debug!(%error, "writing statistics failed; retrying");
                self.statistics.give_back(part);
            }
        }
    }
}

async fn write(pool: &PgPool, rows: &[(Key, Counts)]) -> Result<(), sqlx::Error> {
    let column = |of: fn(&Counts) -> i32| rows.iter().map(|(_, counts)| of(counts)).collect::<Vec<i32>>();
    let minutes: Vec<i64> = rows.iter().map(|((_, minute, _), _)| *minute).collect();
    let writers: Vec<Uuid> = rows.iter().map(|((_, _, writer), _)| *writer).collect();
    let endpoints: Vec<EndpointId> = rows.iter().map(|((endpoint, ..), _)| *endpoint).collect();
    let classes: Vec<i32> = rows.iter().flat_map(|(_, counts)| counts.classes).collect();
    let durations: Vec<i32> = rows.iter().flat_map(|(_, counts)| counts.durations).collect();
    let failed: Vec<bool> = rows.iter().map(|(_, counts)| counts.any_failed()).collect();
    // An array of arrays can't be unnested by rows: the flat one is sliced by the row's number.
    sqlx::query(include_str!("sql/minute_statistics.sql"))
        .bind_all((writers, endpoints, minutes, column(|counts| counts.delivered)))
        .bind_all((column(|counts| counts.retried), column(|counts| counts.dead)))
        .bind_all((failed, classes, durations, CLASSES as i32, BUCKETS as i32))
        .execute(pool)
        .await?;
    Ok(())
}

/// Writes rows that are new or changed since they were published, and deletes those that are gone.
async fn publish(
    pool: &PgPool,
    writer: Uuid,
    published: &mut HashMap<EndpointId, Activity>,
    activity: &[Activity],
) -> Result<(), sqlx::Error> {
    let now: HashMap<EndpointId, Activity> = activity.iter().map(|one| (one.endpoint, *one)).collect();
    let gone: Vec<EndpointId> = published
        .keys()
        .filter(|id| !now.contains_key(id))
        .copied()
        .collect();
    if !gone.is_empty() {
        sqlx::query("delete from postrider.endpoint_activity where endpoint_id = any($1) and writer = $2")
            .bind_all((gone, writer))
            .execute(pool)
            .await?;
    }
    let changed: Vec<&Activity> = activity
        .iter()
        .filter(|one| published.get(&one.endpoint) != Some(one))
        .collect();
    for part in changed.chunks(ROWS_MAX) {
        write_activity(pool, writer, part).await?;
    }
    *published = now;
    Ok(())
}

async fn write_activity(pool: &PgPool, writer: Uuid, rows: &[&Activity]) -> Result<(), sqlx::Error> {
    sqlx::query(include_str!("sql/endpoint_activity.sql"))
        .bind_all((writer, rows.iter().map(|one| one.endpoint).collect::<Vec<_>>()))
        .bind(rows.iter().map(|one| one.in_flight as i32).collect::<Vec<_>>())
        .bind(rows.iter().map(|one| one.limit as i32).collect::<Vec<_>>())
        .bind(rows.iter().map(|one| one.waiting as i32).collect::<Vec<_>>())
        .bind(rows.iter().map(|one| one.more_waiting).collect::<Vec<_>>())
        .bind(rows.iter().map(|one| one.oldest).collect::<Vec<_>>())
        .bind(rows.iter().map(|one| one.circuit_open).collect::<Vec<_>>())
        .execute(pool)
        .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_goes_into_the_first_bucket_that_holds_it() {
        for (ms, bucket) in [(0, 0), (1, 0), (2, 1), (4, 3), (5, 3), (60_000, 27), (60_001, 28)] {
            assert_eq!(bucket_of(Duration::from_millis(ms)), bucket, "{ms}");
        }
    }

    #[test]
    fn each_outcome_has_its_class() {
        for kind in OutcomeKind::ALL {
            let class = Class::of(kind, None);
            assert_eq!(Class::ALL[class as usize], class);
        }
        assert_eq!(Class::of(OutcomeKind::Refused, Some(302)), Class::Redirected);
        assert_eq!(Class::of(OutcomeKind::Refused, Some(429)), Class::ClientError);
        assert_eq!(Class::of(OutcomeKind::Refused, Some(503)), Class::ServerError);
    }

    #[test]
    fn what_was_not_written_is_written_next_time_and_what_was_is_forgotten() {
        let statistics = Statistics::default();
        let at = |minute: i64| DateTime::from_timestamp(minute * 60, 0).expect("a time");
        let counts = Counts {
            delivered: 3,
            changed: true,
            ..Counts::default()
        };
        let writer = lock(&statistics.0).writer_of(10);
        let key = (EndpointId(7), 10, writer);
        lock(&statistics.0).counts.insert(key, counts);
        let taken = statistics.take(at(10));
        assert_eq!(taken.len(), 1);
        assert!(statistics.take(at(10)).is_empty(), "it did not change again");
        statistics.give_back(&taken);
        assert_eq!(
            statistics.take(at(12)).len(),
            1,
            "also when its minute is over by now"
        );
        assert!(statistics.take(at(12)).is_empty());
        assert!(lock(&statistics.0).counts.is_empty());
    }

    #[test]
    fn a_minute_that_was_forgotten_and_comes_again_is_not_written_over() {
        let mut totals = Totals::default();
        let first = totals.writer_of(100);
        assert_eq!(totals.writer_of(101), first);
        assert_eq!(totals.writer_of(100), first, "it is still known");
        let second = totals.writer_of(90);
        assert_ne!(second, first, "the clock stepped back");
        assert_eq!(totals.writer_of(91), second);
        assert_eq!(
            totals.writer_of(100),
            second,
            "and what comes then is another row too"
        );
    }
}
