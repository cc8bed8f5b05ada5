//! (o) What one delivered event of 1 KB costs: bytes on disk by table, write-ahead log, and CPU of Postrider and Postgres.
//! These are the inputs of the sizing table in docs/operations.md.

use std::time::Duration;

use sqlx::{Connection, PgConnection};
use tokio::task::JoinSet;

use crate::{
    emits::data_of_a_kilobyte,
    report::{Report, Sizing},
    world::{Ground, World},
};

/// Deliveries that are counted.
const COUNTED: i64 = 20_000;
/// Endpoints of an event, to tell what each further one costs.
const FAN_OUT: i64 = 10;
/// A steady load, where less is done at a time than under pressure: events per second of each producer.
const STEADY_RATE: u64 = 250;
const BATCH: i32 = 1_000;
/// Producers that emit one event per transaction.
const PRODUCERS: i64 = 4;
const RECORDED_WAIT: Duration = Duration::from_secs(300);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Emitted {
    Batches,
    BatchesWithIds,
    /// Each in a transaction of its own, as most applications do it.
    OneByOne,
    /// The same at a steady rate.
    Steadily,
    /// The same to several endpoints.
    ToMany,
}

impl Emitted {
    fn endpoints(self) -> i64 {
        if self == Self::ToMany { FAN_OUT } else { 1 }
    }

    fn events(self) -> i64 {
        COUNTED / self.endpoints()
    }
}

/// Totals of a database at one moment.
struct Totals {
    events: i64,
    attempts: i64,
    event_ids: i64,
    wal: i64,
    postrider_cpu: Duration,
    postgres_cpu: Duration,
}

pub(super) async fn run(ground: &mut Ground, report: &mut Report) -> anyhow::Result<()> {
    eprintln!("(o) bytes and CPU of a delivered event …");
    let batches = measure(ground, Emitted::Batches).await?;
    let disk = batches.event_bytes + batches.attempt_bytes;
    report.at_most("(o) one delivered 1 KB event: bytes on disk", disk, 1_450.0);
    report.at_most(
        "(o) one delivered 1 KB event: bytes of WAL",
        batches.wal_bytes,
        1_900.0,
    );
    let with_ids = measure(ground, Emitted::BatchesWithIds).await?;
    let disk = with_ids.event_bytes + with_ids.attempt_bytes + with_ids.own_id_bytes;
    report.note("(o) one delivered 1 KB event with own id: bytes on disk", disk);
    report.note(
        "(o) one delivered 1 KB event with own id: bytes of WAL",
        with_ids.wal_bytes,
    );
    let one_by_one = measure(ground, Emitted::OneByOne).await?;
    report.note("(o) one emit per transaction: bytes of WAL", one_by_one.wal_bytes);
    report.note(
        "(o) one emit per transaction: ms of CPU, Postrider",
        one_by_one.postrider_cpu_ms,
    );
    report.note(
        "(o) one emit per transaction: ms of CPU, Postgres",
        one_by_one.postgres_cpu_ms,
    );
    let steadily = measure(ground, Emitted::Steadily).await?;
    report.note(
        "(o) 1,000 events/s, one emit per transaction: ms of CPU, Postrider",
        steadily.postrider_cpu_ms,
    );
    report.note(
        "(o) 1,000 events/s, one emit per transaction: ms of CPU, Postgres",
        steadily.postgres_cpu_ms,
    );
    let to_many = measure(ground, Emitted::ToMany).await?;
    // Of one event to ten endpoints, what one event to one endpoint does not explain.
    let further = |many: f64, one: f64| (many - one) / (FAN_OUT - 1) as f64;
    let further_wal = further(to_many.wal_bytes, one_by_one.wal_bytes);
    report.note("(o) each further endpoint: bytes of WAL", further_wal);
    report.note(
        "(o) each further endpoint: ms of CPU, Postrider",
        further(to_many.postrider_cpu_ms, one_by_one.postrider_cpu_ms),
    );
    report.note(
        "(o) each further endpoint: ms of CPU, Postgres",
        further(to_many.postgres_cpu_ms, one_by_one.postgres_cpu_ms),
    );
    report.sizing = Some(Sizing {
        own_id_bytes: with_ids.own_id_bytes,
        further_wal_bytes: further_wal,
        postrider_cpu_ms: steadily.postrider_cpu_ms,
        postgres_cpu_ms: steadily.postgres_cpu_ms,
        ..one_by_one
    });
    Ok(())
}

async fn measure(ground: &mut Ground, how: Emitted) -> anyhow::Result<Sizing> {
    let mut world = ground.world().await?;
    world.tenants(1).await?;
    for _ in 0..how.endpoints() {
        world.endpoints(0, 1, "/fast", 256).await?;
    }
    world.start().await?;
    world.wait_until_owned(1).await?;
    let before = totals(ground, &world).await?;
    match how {
        Emitted::Batches => emit_batches(&world, false).await?,
        Emitted::BatchesWithIds => emit_batches(&world, true).await?,
        Emitted::OneByOne | Emitted::Steadily | Emitted::ToMany => emit_one_by_one(&world, how).await?,
    }
    world
        .wait("every delivery to be recorded", RECORDED_WAIT, || async {
            let left: (i64,) = sqlx::query_as("select count(*) from postrider.queue")
                .fetch_one(&world.pool)
                .await?;
            Ok(left.0 == 0)
        })
        .await?;
    let after = totals(ground, &world).await?;
    world.end().await?;
    let events = how.events() as f64;
    let each = |before: i64, after: i64| (after - before) as f64 / events;
    let ms = |before: Duration, after: Duration| (after - before).as_secs_f64() * 1000.0 / events;
    Ok(Sizing {
        event_bytes: each(before.events, after.events),
        attempt_bytes: each(before.attempts, after.attempts),
        own_id_bytes: each(before.event_ids, after.event_ids),
        wal_bytes: each(before.wal, after.wal),
        further_wal_bytes: 0.0,
        postrider_cpu_ms: ms(before.postrider_cpu, after.postrider_cpu),
        postgres_cpu_ms: ms(before.postgres_cpu, after.postgres_cpu),
    })
}

async fn emit_batches(world: &World, with_ids: bool) -> anyhow::Result<()> {
    for batch in 0..COUNTED / i64::from(BATCH) {
        sqlx::query(
            "select postrider.emit_batch('t0', array_fill('bench.ran'::text, array[$1]), array_fill($2, array[$1]),
                 case when $3 then array(select 'in_1PgcyT2eZvKY:' || $4 || ':' || n from generate_series(1, $1) n) end)",
        )
        .bind(BATCH)
        .bind(data_of_a_kilobyte())
        .bind(with_ids)
        .bind(batch)
        .execute(&world.pool)
        .await?;
    }
    Ok(())
}

async fn emit_one_by_one(world: &World, how: Emitted) -> anyhow::Result<()> {
    let mut producers = JoinSet::new();
    for _ in 0..PRODUCERS {
        let mut connection = PgConnection::connect_with(&world.options).await?;
        producers.spawn(async move {
            let data = data_of_a_kilobyte();
            let mut tick = tokio::time::interval(Duration::from_micros(1_000_000 / STEADY_RATE));
            for _ in 0..how.events() / PRODUCERS {
                if how == Emitted::Steadily {
                    tick.tick().await;
                }
                sqlx::query("select postrider.emit('t0', 'bench.ran', $1)")
                    .bind(&data)
                    .execute(&mut connection)
                    .await?;
            }
            // A session's CPU time counts while it is open, and after the server has reaped it.
            anyhow::Ok(connection)
        });
    }
    let mut open = Vec::new();
    while let Some(done) = producers.join_next().await {
        open.push(done??);
    }
    for connection in open {
        connection.close().await?;
    }
    Ok(())
}

/// Heaps and indexes of what stays after a delivery, the position in the write-ahead log, and CPU.
async fn totals(ground: &Ground, world: &World) -> anyhow::Result<Totals> {
    let (events, attempts, event_ids, wal) = sqlx::query_as(
        "select (select sum(pg_total_relation_size(inhrelid)) from pg_inherits
                 where inhparent = 'postrider.events'::regclass)::bigint,
                (select sum(pg_total_relation_size(inhrelid)) from pg_inherits
                 where inhparent = 'postrider.attempts'::regclass)::bigint,
                pg_total_relation_size('postrider.event_ids'),
                pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint",
    )
    .fetch_one(&world.pool)
    .await?;
    Ok(Totals {
        events,
        attempts,
        event_ids,
        wal,
        postrider_cpu: world.cpu(),
        postgres_cpu: ground.postgres_cpu(),
    })
}
