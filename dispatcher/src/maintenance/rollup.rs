//! Aggregates minutes into hours and deletes old ones. An hourly duty of `jobs`.
//! Invariant: an hour is computed from its minutes while all of them exist, and computing it again gives the same
//! result.

use chrono::{DateTime, Utc};
use sqlx::PgPool;

use crate::bind::BindAll;

/// Minutes are read for charts of a day; a little longer tolerates a missed duty.
const MINUTES_KEPT_HOURS: i32 = 50;
const HOURS_KEPT_DAYS: i32 = 90;
/// The latest hour is computed again: a dispatcher may have written its last minute late.
const MADE_AGAIN_HOURS: i32 = 2;

pub async fn run(pool: &PgPool) -> Result<(), sqlx::Error> {
    for hour in hours_to_make(pool).await? {
        make(pool, hour).await?;
    }
    for (statement, kept) in [
        (
            "delete from postrider.minute_statistics where minute < clock_timestamp() - make_interval(hours => $1)",
            MINUTES_KEPT_HOURS,
        ),
        (
            "delete from postrider.hour_statistics where hour < clock_timestamp() - make_interval(days => $1)",
            HOURS_KEPT_DAYS,
        ),
    ] {
        sqlx::query(statement).bind(kept).execute(pool).await?;
    }
    Ok(())
}

/// Hours that are over, from a little before the latest one computed.
async fn hours_to_make(pool: &PgPool) -> Result<Vec<DateTime<Utc>>, sqlx::Error> {
    sqlx::query_scalar(
        "select hour from generate_series(
             greatest(
                 -- One from the future was made by a clock that was ahead, and says nothing about what is missing.
                 (select max(hour) from postrider.hour_statistics where endpoint_id = 0 and hour <= clock_timestamp())
                     - make_interval(hours => $1),
                 date_trunc('hour', clock_timestamp(), 'UTC') - make_interval(hours => $2)),
             date_trunc('hour', clock_timestamp(), 'UTC') - interval '1 hour', interval '1 hour') as hour",
    )
    .bind_all((MADE_AGAIN_HOURS, MINUTES_KEPT_HOURS - 1))
    .fetch_all(pool)
    .await
}

async fn make(pool: &PgPool, hour: DateTime<Utc>) -> Result<(), sqlx::Error> {
    sqlx::query(include_str!("sql/roll_up_hour.sql"))
        .bind(hour)
        .execute(pool)
        .await?;
    Ok(())
}
