//! (r) Dead letters of a recovered endpoint are replayed in bulk while the program is killed twice: all arrive, and neither
//! other endpoints nor new events of the same endpoint are delayed.

use std::time::{Duration, Instant};

use anyhow::Context;
use reqwest::Method;
use serde_json::{Value, json};

use crate::{
    report::Report,
    scenarios::{HEALTHY, HEALTHY_RATE},
    sink::REPLAYED,
    world::{Ground, World},
};

const DRAIN_WAIT: Duration = Duration::from_secs(600);

struct Latencies {
    others: f64,
    same: f64,
}

pub(super) async fn run(
    ground: &mut Ground,
    report: &mut Report,
    dead_letters: i64,
    rate: i32,
    length: Duration,
) -> anyhow::Result<()> {
    eprintln!("(r) replay of {dead_letters} dead letters …");
    let mut world = ground.world().await?;
    world.tenants(HEALTHY + 1).await?;
    world.endpoints(0, HEALTHY, "/fast/others", 16).await?;
    world.endpoints(HEALTHY, HEALTHY + 1, "/fast/same", 16).await?;
    world.pile_up_dead(dead_letters, HEALTHY).await?;
    world.start().await?;
    world.wait_until_owned(1).await?;
    steady(&world, Duration::from_secs(2)).await?;
    let alone = steady(&world, length).await?;

    let path = format!("/tenants/t{HEALTHY}/replays");
    let body = json!({ "state": "dead", "rate_per_second": rate });
    let begun = Instant::now();
    let replay = world.call(Method::POST, &path, body).await?;
    let path = format!(
        "{path}/{}",
        replay["id"].as_str().context("the replay has no id")?
    );
    world.wait_received(REPLAYED, 1, DRAIN_WAIT).await?;
    let beside = steady(&world, length).await?;
    let now = progress(&world, &path).await?;
    eprintln!("  {now}");
    report.at_most(
        "(r) others' p99 beside a replay, over without",
        beside.others / alone.others,
        1.3,
    );
    report.at_most(
        "(r) new events' p99 of the same endpoint, over without",
        beside.same / alone.same,
        1.5,
    );
    report.note("(r) others' p99 without, ms", alone.others);

    let mut killed = 0.0;
    for _ in 0..2 {
        let before = progress(&world, &path).await?["done"].as_i64().unwrap_or(0);
        let process = world.processes.last_mut().context("no process")?;
        process.kill().await?;
        world.start().await?;
        world.wait_until_owned(1).await?;
        world
            .wait("the replay to go on", DRAIN_WAIT, || async {
                let now = progress(&world, &path).await?;
                Ok(now["state"] == "done" || now["done"].as_i64() > Some(before + 50))
            })
            .await?;
        killed += 1.0;
    }
    world
        .wait("the replay to end", DRAIN_WAIT, || async {
            Ok(progress(&world, &path).await?["state"] == "done")
        })
        .await?;
    let end = progress(&world, &path).await?;
    let share = |field: &str| end[field].as_f64().unwrap_or(0.0) / dead_letters as f64;
    report.at_least("(r) kills in the middle of it", killed, 2.0);
    report.at_least("(r) done of all", share("done"), 1.0);
    let arrived = world.delivered_replays().await? as f64;
    report.at_least("(r) arrived of all", arrived / dead_letters as f64, 1.0);
    let left = (share("dead") + share("retrying") + share("skipped")) * dead_letters as f64;
    report.at_most("(r) dead, waiting or passed over", left, 0.0);
    report.note(
        "(r) seconds from the first to the last",
        begun.elapsed().as_secs_f64(),
    );
    world.end().await
}

async fn progress(world: &World, path: &str) -> anyhow::Result<Value> {
    world.call(Method::GET, path, Value::Null).await
}

/// Single emits to all endpoints in turn; returns the p99 of each group.
async fn steady(world: &World, length: Duration) -> anyhow::Result<Latencies> {
    world.forget_received().await?;
    let mut tick = tokio::time::interval(Duration::from_micros(1_000_000 / HEALTHY_RATE));
    let end = Instant::now() + length;
    let mut emitted: u64 = 0;
    while Instant::now() < end {
        tick.tick().await;
        // Every second emit is for the endpoint with the dead letters.
        let tenant = if emitted.is_multiple_of(2) {
            HEALTHY
        } else {
            (emitted / 2 % HEALTHY as u64) as i32
        };
        world.emit(tenant).await?;
        emitted += 1;
    }
    world.wait_received("others", emitted / 2, DRAIN_WAIT).await?;
    world
        .wait_received("same", emitted.div_ceil(2), DRAIN_WAIT)
        .await?;
    Ok(Latencies {
        others: world.received("others").await?.p99_ms,
        same: world.received("same").await?.p99_ms,
    })
}
