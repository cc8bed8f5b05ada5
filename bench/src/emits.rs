//! (l) (i) (s) What an emit costs: over HTTP and from SQL, compared with plain inserts of the same rows over the same
//! number of connections, and with own ids and ordering keys compared with neither. `sizing.rs` has (o).

use std::time::{Duration, Instant};

use anyhow::Context;
use postrider_dispatcher::bind::BindAll;
use sqlx::{Connection, PgConnection};
use tokio::task::JoinSet;

use crate::{
    report::Report,
    sizing,
    world::{Ground, World, event},
};

const CLIENTS: usize = 32;
const SQL_CONNECTIONS: usize = 16;
/// What is compared alternates, so that other load on the machine affects all of it.
const ROUNDS: usize = 2;
/// Objects that each client emits events about in turn.
const KEYS: u64 = 100;

/// What an event has besides its data.
#[derive(Clone, Copy)]
enum With {
    Nothing,
    OwnId,
    OrderingKey,
}

impl With {
    /// Id and ordering key of the client's next event.
    fn next(self, client: uuid::Uuid, count: u64) -> (Option<String>, Option<String>) {
        match self {
            Self::Nothing => (None, None),
            Self::OwnId => (Some(format!("{}:{count}", client.simple())), None),
            Self::OrderingKey => (None, Some(format!("{}:{}", client.simple(), count % KEYS))),
        }
    }
}

/// Those of the scenarios that are wanted, by letter.
pub(super) async fn run(
    ground: &mut Ground,
    report: &mut Report,
    seconds: u64,
    wanted: impl Fn(char) -> bool,
) -> anyhow::Result<()> {
    if wanted('l') {
        eprintln!("(l) emits over HTTP beside plain inserts …");
        beside_inserts(ground, report, seconds).await?;
    }
    if wanted('i') {
        eprintln!("(i) emits over HTTP with own ids and ordering keys …");
        with_ids_and_keys(ground, report, seconds).await?;
    }
    if wanted('s') {
        eprintln!("(s) one emit per transaction from SQL …");
        from_sql(ground, report, seconds).await?;
    }
    if wanted('o') {
        sizing::run(ground, report).await?;
    }
    Ok(())
}

async fn beside_inserts(ground: &mut Ground, report: &mut Report, seconds: u64) -> anyhow::Result<()> {
    let world = started(ground).await?;
    let data = data_of_a_kilobyte();
    let time = Duration::from_secs(seconds.max(3));
    // Warm up connections, prepared statements and the compiled schema.
    emit(&world, &data, With::Nothing, Duration::from_secs(1)).await?;
    let (mut inserts, mut emits) = (0.0, 0.0);
    for _ in 0..ROUNDS {
        inserts += insert(&world, &data, CLIENTS, time).await?;
        emits += emit(&world, &data, With::Nothing, time).await?;
    }
    inserts += insert(&world, &data, CLIENTS, time).await?;
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

async fn with_ids_and_keys(ground: &mut Ground, report: &mut Report, seconds: u64) -> anyhow::Result<()> {
    let world = started(ground).await?;
    let data = data_of_a_kilobyte();
    let time = Duration::from_secs(seconds.max(3));
    emit(&world, &data, With::OwnId, Duration::from_secs(1)).await?;
    let (mut plain, mut ids, mut keys) = (0.0, 0.0, 0.0);
    for _ in 0..ROUNDS {
        plain += emit(&world, &data, With::Nothing, time).await?;
        ids += emit(&world, &data, With::OwnId, time).await?;
        keys += emit(&world, &data, With::OrderingKey, time).await?;
    }
    report.note(
        "(i) emits over HTTP without id and ordering key, per s",
        plain / ROUNDS as f64,
    );
    report.at_least(
        "(i) emits over HTTP with own ids, over without",
        ids / plain,
        0.85,
    );
    report.at_least(
        "(i) emits over HTTP with ordering keys, over without",
        keys / plain,
        0.7,
    );
    world.end().await
}

async fn from_sql(ground: &mut Ground, report: &mut Report, seconds: u64) -> anyhow::Result<()> {
    let world = started(ground).await?;
    let data = data_of_a_kilobyte();
    let time = Duration::from_secs(seconds.max(3));
    let (mut inserts, mut plain, mut ids, mut keys) = (0.0, 0.0, 0.0, 0.0);
    for _ in 0..ROUNDS {
        inserts += insert(&world, &data, SQL_CONNECTIONS, time).await?;
        ids += emit_from_sql(&world, &data, With::OwnId, time).await?;
        plain += emit_from_sql(&world, &data, With::Nothing, time).await?;
        keys += emit_from_sql(&world, &data, With::OrderingKey, time).await?;
    }
    report.note(
        "(s) plain inserts of an event and a queue row, 16 connections, per s",
        inserts / ROUNDS as f64,
    );
    report.note(
        "(s) one emit per transaction, over plain inserts",
        plain / inserts,
    );
    report.at_least(
        "(s) the same with own ids, over plain inserts",
        ids / inserts,
        0.7,
    );
    report.note(
        "(s) the same with ordering keys, over plain inserts",
        keys / inserts,
    );
    world.end().await
}

/// With one endpoint that is paused: queue rows are written as usual, but nothing is sent meanwhile.
async fn started(ground: &mut Ground) -> anyhow::Result<World> {
    let mut world = ground.world().await?;
    world.tenants(1).await?;
    world.endpoints(0, 1, "/fast", 256).await?;
    sqlx::query("update postrider.endpoints set state = 'paused'")
        .execute(&world.pool)
        .await?;
    world.start().await?;
    world.wait_until_owned(1).await?;
    Ok(world)
}

pub(super) fn data_of_a_kilobyte() -> String {
    let start = r#"{"object":"invoice","id":"in_1PgcyT2eZvKYlo2C9hGfXkTn","note":""#;
    format!("{start}{}\"}}", "x".repeat(1024 - start.len() - 2))
}

async fn emit(world: &World, data: &str, with: With, time: Duration) -> anyhow::Result<f64> {
    let request = world.emit_request("t0", data)?;
    let end = Instant::now() + time;
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        let request = request.try_clone().context("the request cannot be cloned")?;
        let data = data.to_owned();
        clients.spawn(async move {
            let (client, mut count) = (uuid::Uuid::now_v7(), 0_u64);
            while Instant::now() < end {
                let (id, key) = with.next(client, count);
                let id = id.map(|id| format!(r#""id":"{id}","#));
                let key = key.map(|key| format!(r#""ordering_key":"{key}","#));
                let more = id.or(key).unwrap_or_default();
                let request = request.try_clone().context("the request cannot be cloned")?;
                // Read the whole response, so that the connection is reused.
                let response = request.body(event(&data, &more)).send().await?;
                response.error_for_status()?.bytes().await?;
                count += 1;
            }
            anyhow::Ok(count)
        });
    }
    rate(clients, time).await
}

async fn emit_from_sql(world: &World, data: &str, with: With, time: Duration) -> anyhow::Result<f64> {
    let connections = connect(world, SQL_CONNECTIONS).await?;
    let end = Instant::now() + time;
    let mut clients = JoinSet::new();
    for mut connection in connections {
        let data = data.to_owned();
        clients.spawn(async move {
            let (client, mut count) = (uuid::Uuid::now_v7(), 0_u64);
            while Instant::now() < end {
                let (id, key) = with.next(client, count);
                sqlx::query("select postrider.emit('t0', 'bench.ran', $1, $2, ordering_key => $3)")
                    .bind(&data)
                    .bind(id)
                    .bind(key)
                    .execute(&mut connection)
                    .await?;
                count += 1;
            }
            anyhow::Ok(count)
        });
    }
    rate(clients, time).await
}

async fn connect(world: &World, count: usize) -> anyhow::Result<Vec<PgConnection>> {
    let mut connections = Vec::new();
    for _ in 0..count {
        connections.push(PgConnection::connect_with(&world.options).await?);
    }
    Ok(connections)
}

/// The rows that one emit writes, each with its own insert, in one transaction.
async fn insert(world: &World, data: &str, clients: usize, time: Duration) -> anyhow::Result<f64> {
    let connections = connect(world, clients).await?;
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
