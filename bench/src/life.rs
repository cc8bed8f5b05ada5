//! (t) Partitions of ten seconds are created and dropped under a steady load: pending deliveries are not lost with them, and
//! the database stops growing.

use std::time::{Duration, Instant};

use crate::{report::Report, world::Ground};

const RETENTION: &str = "10s";
const EMITS_PER_SECOND: u64 = 100;
const DRAIN_WAIT: Duration = Duration::from_secs(60);

pub(super) async fn run(ground: &mut Ground, report: &mut Report, length: Duration) -> anyhow::Result<()> {
    eprintln!(
        "(t) {} s of life with a retention of {RETENTION} …",
        length.as_secs()
    );
    let mut world = ground.empty_world().await?;
    world.settings.push(("POSTRIDER_RETENTION", RETENTION));
    world.start().await?;
    world.wait_until_owned(1).await?;
    world.tenants(2).await?;
    world.endpoints(0, 1, "/fast/life", 16).await?;
    world.endpoints(1, 2, "/fast/paused", 16).await?;
    world.set_state("t1", "paused").await?;

    let mut tick = tokio::time::interval(Duration::from_micros(1_000_000 / EMITS_PER_SECOND));
    let (began, mut emitted, mut waiting) = (Instant::now(), 0_u64, 0_u64);
    let (mut half, mut names) = (0, std::collections::BTreeSet::new());
    while began.elapsed() < length {
        tick.tick().await;
        world.emit(0).await?;
        emitted += 1;
        if emitted.is_multiple_of(EMITS_PER_SECOND) {
            world.emit(1).await?;
            waiting += 1;
            names.extend(world.partitions().await?);
            if half == 0 && began.elapsed() > length * 2 / 3 {
                half = world.stored_bytes().await?;
            }
        }
    }
    let left = world.partitions().await?;
    let gone = names.iter().filter(|name| !left.contains(name)).count();
    let grown = world.stored_bytes().await? as f64 / half.max(1) as f64;
    world.set_state("t1", "active").await?;
    world.wait_received("paused", waiting, DRAIN_WAIT).await?;
    world.wait_received("life", emitted, DRAIN_WAIT).await?;
    report.at_least("(t) partitions dropped", gone as f64, 2.0);
    report.at_least(
        "(t) what waited for a paused endpoint and arrived, share",
        world.received("paused").await?.count as f64 / waiting as f64,
        1.0,
    );
    report.at_most("(t) stored at the end over two thirds of the way", grown, 1.2);
    world.end().await
}

/// How long it takes to drop an expired day while emits continue.
pub(super) async fn drop_a_day(
    ground: &mut Ground,
    report: &mut Report,
    attempts: i64,
) -> anyhow::Result<()> {
    eprintln!("(t) dropping a day of {attempts} attempts …");
    let world = ground.world().await?;
    world.tenants(1).await?;
    world.endpoints(0, 1, "/fast/dropped", 16).await?;
    let day = (chrono::Utc::now() - chrono::TimeDelta::days(40)).date_naive();
    world.pile_up_day(day, attempts).await?;
    let retention = postrider_dispatcher::Settings::default().retention;
    let began = Instant::now();
    let dropping = postrider_dispatcher::retention::run(&world.pool, retention);
    let emitting = async {
        let mut longest = Duration::ZERO;
        for _ in 0..50 {
            let emit = Instant::now();
            world.emit(0).await?;
            longest = longest.max(emit.elapsed());
        }
        anyhow::Ok(longest)
    };
    let (done, longest) = tokio::join!(async { (dropping.await, began.elapsed()) }, emitting);
    let (done, took) = done;
    report.at_least(
        "(t) partitions of that day dropped",
        done?.partitions_dropped as f64,
        2.0,
    );
    report.at_most("(t) seconds to drop the day", took.as_secs_f64(), 1.0);
    report.at_most(
        "(t) longest emit meanwhile, ms",
        longest?.as_secs_f64() * 1000.0,
        250.0,
    );
    world.end().await
}
