//! (m) A light load: latency and CPU of a few events a second, and CPU beside an application that uses the same database.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use postrider_dispatcher::bind::BindAll;
use sqlx::{Connection, PgConnection};

use crate::{
    emits::data_of_a_kilobyte,
    report::Report,
    world::{Ground, World, event},
};

const HTTP_RATE: u64 = 50;
const SQL_RATE: u64 = 200;
const FOREIGN_RATE: u64 = 200;
const ARRIVAL_WAIT: Duration = Duration::from_secs(60);
/// The system becomes quiet after it has started.
const SETTLE: Duration = Duration::from_secs(3);

pub(super) async fn run(ground: &mut Ground, report: &mut Report, length: Duration) -> anyhow::Result<()> {
    eprintln!("(m) a light load …");
    let mut world = ground.world().await?;
    world.tenants(2).await?;
    world.endpoints(0, 1, "/fast/sql", 16).await?;
    world.endpoints(1, 2, "/fast/http", 16).await?;
    let application = foreign_load(ground, &world, length).await?;
    world.start().await?;
    world.wait_until_owned(1).await?;
    tokio::time::sleep(SETTLE).await;
    let both = foreign_load(ground, &world, length).await?;
    report.at_most(
        "(m) no events beside 200 transactions/s of an application, % of one core",
        both - application,
        2.0,
    );
    over_http(ground, report, &world, length).await?;
    from_sql(report, &world, length).await?;
    world.end().await
}

/// Each event from before its request to its arrival, beside plain inserts of the same size by the same client.
async fn over_http(
    ground: &Ground,
    report: &mut Report,
    world: &World,
    length: Duration,
) -> anyhow::Result<()> {
    let data = data_of_a_kilobyte();
    let mut connection = PgConnection::connect_with(&world.options).await?;
    sqlx::raw_sql("create table public.plain (id uuid primary key, data text not null)")
        .execute(&mut connection)
        .await?;
    let mut inserts = Vec::new();
    at_rate(HTTP_RATE, length / 2, async || {
        let began = Instant::now();
        sqlx::query("insert into public.plain (id, data) values ($1, $2)")
            .bind_all((uuid::Uuid::now_v7(), &data))
            .execute(&mut connection)
            .await?;
        inserts.push(began.elapsed().as_secs_f64() * 1000.0);
        Ok(())
    })
    .await?;
    connection.close().await?;
    // Warms up what the measurement uses.
    at_rate(HTTP_RATE, SETTLE, async || emit(world, &data).await).await?;
    world.forget_received().await?;
    ground.begin_profile().await?;
    let cpu = || world.cpu() + ground.postgres_cpu();
    let (began, before) = (Instant::now(), cpu());
    let emitted = at_rate(HTTP_RATE, length, async || emit(world, &data).await).await?;
    world.wait_received("http", emitted, ARRIVAL_WAIT).await?;
    let used = (cpu() - before).as_secs_f64() / began.elapsed().as_secs_f64();
    ground.print_profile().await?;
    let received = world.received("http").await?;
    inserts.sort_by(f64::total_cmp);
    let at = |share: f64| inserts[(inserts.len() as f64 * share) as usize];
    report.at_most("(m) 50 events/s over HTTP: % of one core", 100.0 * used, 5.0);
    report.note(
        "(m) 50 events/s over HTTP: request to arrival, p50 ms",
        received.p50_ms,
    );
    report.note(
        "(m) 50 events/s over HTTP: request to arrival, p99 ms",
        received.p99_ms,
    );
    report.note("(m) a plain insert and commit, p50 ms", at(0.5));
    report.note("(m) a plain insert and commit, p99 ms", at(0.99));
    report.at_most(
        "(m) arrival p50 over that of a plain insert",
        received.p50_ms / at(0.5),
        1.5,
    );
    report.at_most(
        "(m) arrival p99 over that of a plain insert",
        received.p99_ms / at(0.99),
        2.0,
    );
    Ok(())
}

async fn from_sql(report: &mut Report, world: &World, length: Duration) -> anyhow::Result<()> {
    world.forget_received().await?;
    let emitted = at_rate(SQL_RATE, length / 2, async || world.emit(0).await).await?;
    world.wait_received("sql", emitted, ARRIVAL_WAIT).await?;
    let received = world.received("sql").await?;
    report.at_most(
        "(m) 200 events/s from SQL: emit to arrival, p50 ms",
        received.p50_ms,
        3.0,
    );
    report.note(
        "(m) 200 events/s from SQL: emit to arrival, p99 ms",
        received.p99_ms,
    );
    Ok(())
}

/// The id holds the time before the request, which the sink reads.
async fn emit(world: &World, data: &str) -> anyhow::Result<()> {
    let id = format!("own_{:016x}{:016x}", now_in_uuid_form(), rand::random::<u64>());
    let request = world.emit_request("t1", data)?;
    let response = request
        .body(event(data, &format!(r#""id":"{id}","#)))
        .send()
        .await?;
    response.error_for_status()?.bytes().await?;
    Ok(())
}

/// The first half of a UUID of version 7: 48 bits of milliseconds, and 12 bits that divide one.
fn now_in_uuid_form() -> u64 {
    let micros = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |now| now.as_micros() as u64);
    ((micros / 1000) << 16) | 0x7000 | (micros % 1000 * 4096 / 1000)
}

/// CPU of the database and of Postrider, if it runs, while an application commits small transactions of its own, in % of
/// one core.
async fn foreign_load(ground: &Ground, world: &World, length: Duration) -> anyhow::Result<f64> {
    let mut connection = PgConnection::connect_with(&world.options).await?;
    sqlx::raw_sql("create table if not exists public.application (id int primary key, value int)")
        .execute(&mut connection)
        .await?;
    let cpu = || world.cpu() + ground.postgres_cpu();
    let (began, before) = (Instant::now(), cpu());
    at_rate(FOREIGN_RATE, length, async || {
        sqlx::query(
            "insert into public.application (id, value) values ($1, $2) on conflict (id) do update set value = excluded.value",
        )
        .bind_all((1, 2))
        .execute(&mut connection)
        .await?;
        Ok(())
    })
    .await?;
    let used = (cpu() - before).as_secs_f64() / began.elapsed().as_secs_f64();
    // A session's CPU time counts while it is open.
    connection.close().await?;
    Ok(100.0 * used)
}

/// Does something so many times a second; returns how often.
async fn at_rate(
    rate: u64,
    length: Duration,
    mut work: impl AsyncFnMut() -> anyhow::Result<()>,
) -> anyhow::Result<u64> {
    let mut tick = tokio::time::interval(Duration::from_micros(1_000_000 / rate));
    let end = Instant::now() + length;
    let mut count = 0;
    while Instant::now() < end {
        tick.tick().await;
        work().await?;
        count += 1;
    }
    Ok(count)
}
