//! `postrider-bench seed`: fills a database with a generated history, to test the pages at scale. Generated in SQL.
//! Invariant: none of it is ever sent. Pending deliveries belong to paused endpoints.

use std::time::Instant;

use anyhow::ensure;
use postrider_dispatcher::{bind::BindAll, rollup, statistics::BOUNDS_MS};
use sqlx::{AssertSqlSafe, PgPool};
use uuid::Uuid;

const TENANTS: i32 = 8;
const ENDPOINTS_PER_TENANT: i32 = 10;
/// Bounds the running time of one statement.
const EVENTS_PER_STATEMENT: i64 = 50_000;
const ATTEMPTS_MAX: i64 = 100_000_000;

/// The schema must be up to date.
pub async fn run(pool: &PgPool, attempts: i64) -> anyhow::Result<()> {
    ensure!(
        (1..=ATTEMPTS_MAX).contains(&attempts),
        "--attempts must be a number from 1 to {ATTEMPTS_MAX}"
    );
    let began = Instant::now();
    make_tenants(pool).await?;
    // Each event goes to all endpoints of its tenant.
    let events = (attempts / i64::from(ENDPOINTS_PER_TENANT)).max(1);
    let mut made = 0;
    while made < events {
        let upto = (made + EVENTS_PER_STATEMENT).min(events);
        make_deliveries(pool, made, upto, events).await?;
        made = upto;
        eprintln!(
            "{} attempts, {} s",
            made * i64::from(ENDPOINTS_PER_TENANT),
            began.elapsed().as_secs()
        );
    }
    make_statistics(pool).await?;
    rollup::run(pool).await?;
    for table in [
        "events",
        "attempts",
        "queue",
        "retries",
        "dead_letters",
        "minute_statistics",
    ] {
        // A name from the list above: vacuum takes no parameters.
        sqlx::raw_sql(AssertSqlSafe(format!("vacuum analyze postrider.{table}")))
            .execute(pool)
            .await?;
    }
    eprintln!("done in {} s", began.elapsed().as_secs());
    Ok(())
}

/// The first endpoint of each tenant is paused, so that it can have pending deliveries.
async fn make_tenants(pool: &PgPool) -> Result<(), sqlx::Error> {
    sqlx::query(include_str!("../sql/seed_tenants.sql"))
        .bind_all((TENANTS, ENDPOINTS_PER_TENANT))
        .execute(pool)
        .await?;
    Ok(())
}

/// Spread over the last day. A quarter of the deliveries to a paused endpoint are pending; nearly all others are
/// delivered, and some of the last endpoint's are dead.
async fn make_deliveries(pool: &PgPool, from: i64, upto: i64, of: i64) -> Result<(), sqlx::Error> {
    sqlx::query(include_str!("../sql/seed_deliveries.sql"))
        .bind_all((from, upto, of as f64, i64::from(TENANTS)))
        .execute(pool)
        .await?;
    Ok(())
}

/// As a dispatcher would have counted them, per endpoint and in total.
async fn make_statistics(pool: &PgPool) -> Result<(), sqlx::Error> {
    let bounds: Vec<i32> = BOUNDS_MS.iter().map(|ms| *ms as i32 + 1).collect();
    sqlx::query(include_str!("../sql/seed_statistics.sql"))
        .bind_all((Uuid::now_v7(), bounds))
        .execute(pool)
        .await?;
    Ok(())
}
