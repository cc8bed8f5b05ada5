//! (l) Emits over HTTP compared with plain inserts of the same rows over the same number of connections.

use std::time::{Duration, Instant};

use anyhow::Context;
use postrider_dispatcher::bind::BindAll;
use sqlx::{Connection, PgConnection};
use tokio::task::JoinSet;

use crate::{
    report::Report,
    world::{Ground, World},
};

const CLIENTS: usize = 32;
/// Inserts and emits alternate, so that other load on the machine affects both.
const ROUNDS: usize = 2;

pub(super) async fn run(ground: &mut Ground, report: &mut Report, seconds: u64) -> anyhow::Result<()> {
    let mut world = ground.world().await?;
    world.tenants(1).await?;
    world.endpoints(0, 1, "/fast", 256).await?;
    // Paused: queue rows are written as usual, but nothing is sent meanwhile.
    sqlx::query("update postrider.endpoints set state = 'paused'")
        .execute(&world.pool)
        .await?;
    world.start().await?;
    world.wait_until_owned(1).await?;
    let data = data_of_a_kilobyte();
    let time = Duration::from_secs(seconds.max(3));
    // Warm up connections, prepared statements and the compiled schema.
    emit(&world, &data, Duration::from_secs(1)).await?;
    let (mut inserts, mut emits) = (0.0, 0.0);
    for _ in 0..ROUNDS {
        inserts += insert(&world, &data, time).await?;
        emits += emit(&world, &data, time).await?;
    }
    inserts += insert(&world, &data, time).await?;
    let (inserts, emits) = (inserts / (ROUNDS + 1) as f64, emits / ROUNDS as f64);
    report.note(
        "(l) plain inserts of an event and a queue row, 32 connections, per s",
        inserts,
    );
    report.note("(l) emits over HTTP, 1 KB, 32 clients, per s", emits);
    report.at_least(
        "(l) emits over HTTP as a share of plain inserts",
        emits / inserts,
        0.5,
    );
    world.end().await
}

fn data_of_a_kilobyte() -> String {
    let start = r#"{"object":"invoice","id":"in_1PgcyT2eZvKYlo2C9hGfXkTn","note":""#;
    format!("{start}{}\"}}", "x".repeat(1024 - start.len() - 2))
}

async fn emit(world: &World, data: &str, time: Duration) -> anyhow::Result<f64> {
    let request = world.emit_request("t0", data)?;
    let end = Instant::now() + time;
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        let request = request.try_clone().context("the request cannot be cloned")?;
        clients.spawn(async move {
            let mut count = 0_u64;
            while Instant::now() < end {
                let request = request.try_clone().context("the request cannot be cloned")?;
                // Read the whole response, so that the connection is reused.
                request.send().await?.error_for_status()?.bytes().await?;
                count += 1;
            }
            anyhow::Ok(count)
        });
    }
    rate(clients, time).await
}

/// The rows that one emit writes, each with its own insert, in one transaction.
async fn insert(world: &World, data: &str, time: Duration) -> anyhow::Result<f64> {
    let mut connections = Vec::new();
    for _ in 0..CLIENTS {
        connections.push(PgConnection::connect_with(&world.options).await?);
    }
    let (endpoint, shard, tenant, type_id, schema): (i32, i16, i32, i32, i32) = sqlx::query_as(
        "select e.id, e.shard, e.tenant_id, y.id, s.id from postrider.endpoints e,
             postrider.event_types y join postrider.schemas s on s.type_id = y.id
         where y.name = 'bench.ran'",
    )
    .fetch_one(&world.pool)
    .await?;
    let body = format!(
        r#"{{"id":"evt_01a1e2c3654778c4b6f0d0ac35589b02","type":"bench.ran","created_at":"2026-05-28T10:00:00.000Z","api_version":"2026-01-15","data":{data}}}"#
    );
    let end = Instant::now() + time;
    let mut clients = JoinSet::new();
    for mut connection in connections {
        let body = body.clone().into_bytes();
        clients.spawn(async move {
            let mut count = 0_u64;
            while Instant::now() < end {
                let id = uuid::Uuid::now_v7();
                let mut transaction = connection.begin().await?;
                sqlx::query(
                    "insert into postrider.events (id, tenant_id, type_id, schema_id, body) values ($1, $2, $3, $4, $5)",
                )
                .bind_all((id, tenant, type_id, schema, &body))
                .execute(&mut *transaction)
                .await?;
                sqlx::query(
                    "insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id)
                     values ($1, $2, $3, $4, $5)",
                )
                .bind_all((endpoint, id, shard, tenant, type_id))
                .execute(&mut *transaction)
                .await?;
                transaction.commit().await?;
                count += 1;
            }
            anyhow::Ok(count)
        });
    }
    rate(clients, time).await
}

async fn rate(mut clients: JoinSet<anyhow::Result<u64>>, time: Duration) -> anyhow::Result<f64> {
    let began = Instant::now();
    let mut count = 0;
    while let Some(done) = clients.join_next().await {
        count += done??;
    }
    Ok(count as f64 / began.elapsed().max(time).as_secs_f64())
}
