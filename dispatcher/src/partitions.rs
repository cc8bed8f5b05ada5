//! The days' partitions of events and attempts: made ahead of time, at the start and hourly.
//! Invariant: a partition for every instant from now to the horizon exists, so that no emit can fail for want of one.

use chrono::{DateTime, Days, NaiveDate, Utc};
use sqlx::{AssertSqlSafe, PgPool};

const DAYS_AHEAD: u64 = 14;

/// Makes what is missing from yesterday to the horizon. Yesterday's is for an emit that crosses midnight.
pub async fn make_ahead(pool: &PgPool) -> Result<(), sqlx::Error> {
    let today: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()")
        .fetch_one(pool)
        .await?;
    let today = today.date_naive();
    let first = today.pred_opt().unwrap_or(today);
    for day in first.iter_days().take(DAYS_AHEAD as usize + 2) {
        for table in ["events", "attempts"] {
            make(pool, table, day).await?;
        }
    }
    Ok(())
}

/// Created alone and attached afterwards: `create … partition of` would queue every emit behind an open producer.
async fn make(pool: &PgPool, table: &'static str, day: NaiveDate) -> Result<(), sqlx::Error> {
    let name = format!("{table}_{}", day.format("%Y%m%d"));
    let exists: bool = sqlx::query_scalar(
        "select exists (select from pg_inherits where inhrelid = to_regclass('postrider.' || $1))",
    )
    .bind(&name)
    .fetch_one(pool)
    .await?;
    if exists {
        return Ok(());
    }
    let from = day.and_time(chrono::NaiveTime::MIN).and_utc();
    let to = from.checked_add_days(Days::new(1)).unwrap_or(from);
    let (from, to): (String, String) =
        sqlx::query_as("select postrider.uuid_floor($1)::text, postrider.uuid_floor($2)::text")
            .bind(from)
            .bind(to)
            .fetch_one(pool)
            .await?;
    let mut tx = pool.begin().await?;
    sqlx::query("set local lock_timeout = '1s'")
        .execute(&mut *tx)
        .await?;
    // Two processes may be here at once.
    sqlx::query("select pg_advisory_xact_lock(hashtext('postrider.partitions'))")
        .execute(&mut *tx)
        .await?;
    let exists: bool = sqlx::query_scalar("select to_regclass('postrider.' || $1) is not null")
        .bind(&name)
        .fetch_one(&mut *tx)
        .await?;
    // Every part of these statements is made here: a table's name, a date and two uuids.
    if !exists {
        let create = format!("create table postrider.{name} (like postrider.{table} including all)");
        sqlx::raw_sql(AssertSqlSafe(create)).execute(&mut *tx).await?;
        let attach = format!(
            "alter table postrider.{table} attach partition postrider.{name} for values from ('{from}') to ('{to}')"
        );
        sqlx::raw_sql(AssertSqlSafe(attach)).execute(&mut *tx).await?;
    }
    tx.commit().await
}
