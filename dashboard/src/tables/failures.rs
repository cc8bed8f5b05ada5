//! What the undelivered deliveries of an endpoint have failed with: rows of `dead_letters`, and of `retries` with their last
//! attempt.
//! Invariant: a sample reads at most `SAMPLED_MAX` rows of each table, the newest, by their primary keys.

use chrono::{DateTime, Utc};
use postrider_dispatcher::bind::BindAll;
use postrider_proto::{EndpointId, EventId, Failure};
use sqlx::{FromRow, PgExecutor};

const SAMPLED_MAX: i64 = 200;
const RETRIES_COUNTED_MAX: i64 = 5_000;

#[derive(Debug, FromRow)]
struct FailedRow {
    event_id: EventId,
    failed_at: DateTime<Utc>,
    failure: Option<Failure>,
    status: Option<i16>,
    outcome: Option<i16>,
}

/// A delivery that failed and was not delivered since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failed {
    pub(crate) event: EventId,
    pub(crate) at: DateTime<Utc>,
    pub(crate) failure: Failure,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Sample {
    /// In no particular order.
    pub(crate) failed: Vec<Failed>,
    /// There are older ones.
    pub(crate) is_cut: bool,
}

pub(crate) async fn sample(db: impl PgExecutor<'_>, endpoint: EndpointId) -> sqlx::Result<Sample> {
    let rows: Vec<FailedRow> = sqlx::query_as(include_str!("sql/failures_of_endpoint.sql"))
        .bind_all((endpoint, SAMPLED_MAX))
        .fetch_all(db)
        .await?;
    let dead = rows.iter().filter(|row| row.failure.is_some()).count() as i64;
    Ok(Sample {
        is_cut: dead >= SAMPLED_MAX || rows.len() as i64 - dead >= SAMPLED_MAX,
        failed: rows
            .into_iter()
            .map(|row| Failed {
                event: row.event_id,
                at: row.failed_at,
                failure: row
                    .failure
                    .unwrap_or_else(|| Failure::new(row.status, row.outcome.unwrap_or_default())),
            })
            .collect(),
    })
}

/// How many deliveries of an endpoint have failed and were not delivered since.
#[derive(Debug, Clone, Copy, Default, FromRow)]
pub(crate) struct Undelivered {
    pub(crate) dead: i64,
    /// At most `RETRIES_COUNTED_MAX`.
    pub(crate) retrying: i64,
}

impl Undelivered {
    pub(crate) fn count(&self) -> i64 {
        self.dead + self.retrying
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.retrying >= RETRIES_COUNTED_MAX
    }
}

pub(crate) async fn count(db: impl PgExecutor<'_>, endpoint: EndpointId) -> sqlx::Result<Undelivered> {
    sqlx::query_as(
        "select (select coalesce(sum(c.count), 0)::bigint from postrider.dead_letter_counts c
                 where c.endpoint_id = $1) as dead,
                (select count(*) from (select from postrider.retries r where r.endpoint_id = $1 limit $2) r) as retrying",
    )
    .bind_all((endpoint, RETRIES_COUNTED_MAX))
    .fetch_one(db)
    .await
}
