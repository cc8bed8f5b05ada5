//! (n) One, two and four processes on one database, with many endpoints. Receivers that respond at once show the limit of
//! the machine and the database; slow receivers show how the in-flight capacity of the processes adds up.

use std::time::Duration;

use crate::{
    report::{Report, Row},
    scenarios::{Start, emit_all},
    world::Ground,
};

const PROCESSES: [i64; 3] = [1, 2, 4];
const ENDPOINTS: i32 = 1_000;
const CONCURRENCY: i32 = 16;
const WARM_UP_BATCHES: i32 = 1;
const DRAIN_WAIT: Duration = Duration::from_secs(300);
const BALANCE_WAIT: Duration = Duration::from_secs(60);

struct Receivers {
    label: &'static str,
    path: &'static str,
    settings: &'static [(&'static str, &'static str)],
    /// The deliveries of a bulk scenario are divided by this.
    divisor: i32,
}

const RECEIVERS: [Receivers; 2] = [
    Receivers {
        label: "respond at once",
        path: "/fast/fleet",
        settings: &[],
        divisor: 1,
    },
    // 64 requests in flight at 50 ms each are 1,280 per second and process on any machine.
    Receivers {
        label: "take 50 ms, 64 places each",
        path: "/slow/50/fleet",
        settings: &[("POSTRIDER_MAX_IN_FLIGHT", "64")],
        divisor: 4,
    },
];

pub(super) async fn run(
    ground: &mut Ground,
    report: &mut Report,
    deliveries: i32,
    batch: i32,
    ceiling_per_second: f64,
) -> anyhow::Result<()> {
    for receivers in &RECEIVERS {
        let batches = (deliveries / receivers.divisor / batch).max(1);
        let mut alone = None;
        for processes in PROCESSES {
            let name = format!("(n) processes: {processes}; receivers {}", receivers.label);
            eprintln!("{name} …");
            let row = measure(ground, receivers, processes, batches, batch).await?;
            let per_second = row.per_second;
            eprintln!("  {per_second:.0}/s");
            report.rows.push(Row {
                scenario: name.clone(),
                of_ceiling: Some(per_second / ceiling_per_second),
                ..row
            });
            let alone = *alone.get_or_insert(per_second);
            if processes > 1 {
                report.note(&format!("{name}, over one process"), per_second / alone);
            }
        }
    }
    Ok(())
}

async fn measure(
    ground: &mut Ground,
    receivers: &Receivers,
    processes: i64,
    batches: i32,
    batch: i32,
) -> anyhow::Result<Row> {
    let mut world = ground.world().await?;
    world.settings = receivers.settings.to_vec();
    world.tenants(ENDPOINTS).await?;
    world.endpoints(0, ENDPOINTS, receivers.path, CONCURRENCY).await?;
    for _ in 0..processes {
        world.start().await?;
    }
    world.wait_until_owned(processes).await?;
    world
        .wait("the shards to be shared out evenly", BALANCE_WAIT, || async {
            let uneven: bool = sqlx::query_scalar(
                "select max(n) - min(n) > 1 from (select count(*) as n from postrider.shards group by owner) each",
            )
            .fetch_one(&world.pool)
            .await?;
            Ok(!uneven)
        })
        .await?;
    emit_all(&world, WARM_UP_BATCHES, ENDPOINTS).await?;
    world
        .wait_received("fleet", (WARM_UP_BATCHES * batch) as u64, DRAIN_WAIT)
        .await?;
    world.forget_received().await?;

    ground.begin_profile().await?;
    let start = Start::now(ground, &world);
    emit_all(&world, batches, ENDPOINTS).await?;
    let row = start
        .measure(ground, &world, "fleet", (batches * batch) as u64)
        .await?;
    ground.print_profile().await?;
    world.end().await?;
    Ok(row)
}
