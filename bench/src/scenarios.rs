//! The scenarios, each with its own database and process.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use sqlx::{Connection, PgConnection};

use crate::{
    emits, fleet, life, light, replays,
    report::{Report, Row},
    usage,
    world::{Ground, World, start_self},
};

const DRAIN_WAIT: Duration = Duration::from_secs(300);
const CONCURRENCY: i32 = 256;
/// Events per transaction.
const BATCH: i32 = 1_000;
/// Emits per second to the healthy endpoints, and the number of those endpoints.
pub(super) const HEALTHY_RATE: u64 = 200;
pub(super) const HEALTHY: i32 = 10;

#[derive(Clone, Copy)]
pub(super) struct Size {
    ceiling_seconds: u64,
    deliveries: i32,
    healthy_seconds: u64,
    hanging_backlog: i64,
    hanging_endpoints: i32,
    idle_emits: u32,
    /// To settle, and to measure.
    idle_seconds: (u64, u64),
    dead_letters: i64,
    replay_rate: i32,
    life_seconds: u64,
    day_attempts: i64,
    backlogs: [i64; 3],
}

pub(super) const FULL: Size = Size {
    ceiling_seconds: 8,
    deliveries: 150_000,
    healthy_seconds: 15,
    hanging_backlog: 100_000,
    hanging_endpoints: 2_000,
    idle_emits: 200,
    idle_seconds: (10, 30),
    dead_letters: 100_000,
    replay_rate: 1_000,
    life_seconds: 180,
    day_attempts: 1_000_000,
    backlogs: [10_000, 100_000, 1_000_000],
};

pub(super) const QUICK: Size = Size {
    ceiling_seconds: 2,
    deliveries: 5_000,
    healthy_seconds: 3,
    hanging_backlog: 5_000,
    hanging_endpoints: 200,
    idle_emits: 30,
    idle_seconds: (0, 5),
    dead_letters: 4_000,
    replay_rate: 300,
    life_seconds: 60,
    day_attempts: 50_000,
    backlogs: [1_000, 5_000, 20_000],
};

struct Bench {
    ground: Ground,
    size: Size,
    report: Report,
    ceiling_per_second: f64,
}

pub(super) async fn run(ground: Ground, size: Size, only: Option<&str>) -> anyhow::Result<Report> {
    let mut bench = Bench {
        ground,
        size,
        report: Report::default(),
        ceiling_per_second: 0.0,
    };
    let wanted = |letter: char| only.is_none_or(|letters| letters.contains(letter));
    // Everything else is compared with the ceiling.
    bench.ceiling().await?;
    if wanted('b') {
        let name = "(b) 1 endpoint, concurrency 256";
        let plain = bench.bulk(name, 1, 1, CONCURRENCY, false).await?;
        let share = plain / bench.ceiling_per_second;
        let name = "(b) share of the ceiling, emits going on meanwhile";
        bench.report.at_least(name, share, 0.5);
        if wanted('h') {
            let name = "(h) as (b), an idle transaction held open";
            let held = bench.bulk(name, 1, 1, CONCURRENCY, true).await?;
            let name = "(h) rate with an idle transaction over (b)";
            bench.report.at_least(name, held / plain, 0.9);
        }
    }
    if wanted('c') {
        let name = "(c) 1 event to 10 endpoints";
        let rate = bench.bulk(name, 1, 10, CONCURRENCY / 4, false).await?;
        let share = rate / bench.ceiling_per_second;
        bench.report.at_least("(c) share of the ceiling", share, 0.6);
    }
    if wanted('d') {
        let rate = bench.bulk("(d) 1,000 endpoints", 1_000, 1, 16, false).await?;
        let share = rate / bench.ceiling_per_second;
        bench.report.note("(d) share of the ceiling", share);
    }
    if wanted('e') {
        bench.beside_hanging().await?;
    }
    if wanted('f') {
        bench.idle().await?;
    }
    if wanted('g') {
        bench.backlog().await?;
    }
    if wanted('k') {
        bench.takeover().await?;
    }
    emits::run(&mut bench.ground, &mut bench.report, size.healthy_seconds, wanted).await?;
    if wanted('m') {
        let length = Duration::from_secs(2 * size.healthy_seconds);
        light::run(&mut bench.ground, &mut bench.report, length).await?;
    }
    if wanted('n') {
        let (deliveries, ceiling) = (size.deliveries, bench.ceiling_per_second);
        fleet::run(&mut bench.ground, &mut bench.report, deliveries, BATCH, ceiling).await?;
    }
    if wanted('r') {
        replays::run(
            &mut bench.ground,
            &mut bench.report,
            size.dead_letters,
            size.replay_rate,
            Duration::from_secs(size.healthy_seconds),
        )
        .await?;
    }
    if wanted('t') {
        let length = Duration::from_secs(size.life_seconds);
        life::run(&mut bench.ground, &mut bench.report, length).await?;
        life::drop_a_day(&mut bench.ground, &mut bench.report, size.day_attempts).await?;
    }
    Ok(bench.report)
}

impl Bench {
    async fn ceiling(&mut self) -> anyhow::Result<()> {
        eprintln!("(a) the ceiling: the bare client, no database …");
        let url = format!("http://127.0.0.1:{}/fast/a", self.ground.sink_port);
        let seconds = self.size.ceiling_seconds.to_string();
        let sink_before = self.ground.sink_cpu();
        let started = Instant::now();
        let (mut child, mut lines) = start_self(&["ceiling", &url, &CONCURRENCY.to_string(), &seconds])?;
        let pid = child.id().unwrap_or(0);
        let sent: u64 = lines
            .next_line()
            .await?
            .context("the ceiling could not be measured")?
            .trim()
            .parse()?;
        let elapsed = started.elapsed();
        let (cpu, memory) = (usage::cpu(pid), usage::peak_memory_mb(pid));
        child.wait().await?;
        self.ceiling_per_second = sent as f64 / self.size.ceiling_seconds as f64;
        let per_thousand = |cpu: Duration| cpu.as_secs_f64() * 1000.0 / sent as f64;
        self.report.rows.push(Row {
            scenario: "(a) ceiling: the client alone".to_owned(),
            deliveries: sent,
            per_second: self.ceiling_per_second,
            of_ceiling: Some(1.0),
            sender_cpu: per_thousand(cpu),
            sink_cpu: per_thousand(self.ground.sink_cpu() - sink_before),
            peak_memory_mb: memory,
            ..Row::default()
        });
        eprintln!(
            "  {:.0}/s in {:.1} s",
            self.ceiling_per_second,
            elapsed.as_secs_f64()
        );
        Ok(())
    }

    /// Emits in batches as fast as the database allows while events are delivered. Returns deliveries per second from the
    /// first emit to the last arrival.
    async fn bulk(
        &mut self,
        name: &str,
        tenants: i32,
        endpoints_each: i32,
        concurrency: i32,
        idle_transaction: bool,
    ) -> anyhow::Result<f64> {
        eprintln!("{name} …");
        let mut world = self.ground.world().await?;
        world.tenants(tenants).await?;
        for _ in 0..endpoints_each {
            world.endpoints(0, tenants, "/fast/bulk", concurrency).await?;
        }
        let mut holder = None;
        if idle_transaction {
            let mut connection = PgConnection::connect_with(&world.options).await?;
            sqlx::raw_sql("begin; select pg_current_xact_id()")
                .execute(&mut connection)
                .await?;
            holder = Some(connection);
        }
        world.start().await?;
        world.wait_until_owned(1).await?;
        // Warm up connections and cached plans before the clock starts.
        emit_all(&world, 1, tenants).await?;
        world
            .wait_received("bulk", (BATCH * endpoints_each) as u64, DRAIN_WAIT)
            .await?;
        world.forget_received().await?;

        self.ground.begin_profile().await?;
        let events = (self.size.deliveries / endpoints_each).max(BATCH);
        let expected = (events / BATCH * BATCH * endpoints_each) as u64;
        let (began, start) = (Instant::now(), Start::now(&self.ground, &world));
        emit_all(&world, events / BATCH, tenants).await?;
        let emitted = began.elapsed().as_secs_f64();
        let row = start.measure(&self.ground, &world, "bulk", expected).await?;
        let per_second = row.per_second;
        eprintln!("  {per_second:.0}/s; emitted in {emitted:.1} s");
        self.report.rows.push(Row {
            scenario: name.to_owned(),
            of_ceiling: Some(per_second / self.ceiling_per_second),
            ..row
        });
        self.ground.print_profile().await?;
        if let Some(connection) = holder {
            connection.close().await?;
        }
        world.end().await?;
        Ok(per_second)
    }

    /// Steady single emits to healthy endpoints: alone, next to one that hangs with a backlog, next to many that hang.
    async fn beside_hanging(&mut self) -> anyhow::Result<()> {
        let size = self.size;
        eprintln!("(e) healthy endpoints, alone …");
        let alone = self.healthy(0, 0).await?;
        eprintln!(
            "(e) … beside one that hangs with {} waiting …",
            size.hanging_backlog
        );
        let beside_one = self.healthy(1, size.hanging_backlog).await?;
        let over = beside_one / alone;
        let name = "(e) healthy p99 beside one that hangs, over alone";
        self.report.at_most(name, over, 1.2);
        eprintln!("(e) … beside {} that hang …", size.hanging_endpoints);
        let waiting = i64::from(size.hanging_endpoints) * 20;
        let beside_many = self.healthy(size.hanging_endpoints, waiting).await?;
        let over = beside_many / alone;
        let name = "(e) healthy p99 beside 2,000 that hang, over alone";
        self.report.at_most(name, over, 1.3);
        self.report.note("(e) healthy p99 alone, ms", alone);
        Ok(())
    }

    async fn healthy(&mut self, hanging: i32, waiting: i64) -> anyhow::Result<f64> {
        let mut world = self.ground.world().await?;
        world.tenants(HEALTHY + hanging).await?;
        world.endpoints(0, HEALTHY, "/fast/healthy", 16).await?;
        if hanging > 0 {
            world
                .endpoints(HEALTHY, HEALTHY + hanging, "/hang/hanging", 16)
                .await?;
            world.pile_up(waiting, HEALTHY, HEALTHY + hanging).await?;
        }
        world.start().await?;
        world.wait_until_owned(1).await?;
        self.steady(&world, Duration::from_secs(2)).await?;
        world.forget_received().await?;
        let emitted = self
            .steady(&world, Duration::from_secs(self.size.healthy_seconds))
            .await?;
        world.wait_received("healthy", emitted, DRAIN_WAIT).await?;
        let p99 = world.received("healthy").await?.p99_ms;
        world.end().await?;
        Ok(p99)
    }

    async fn steady(&self, world: &World, length: Duration) -> anyhow::Result<u64> {
        let mut tick = tokio::time::interval(Duration::from_micros(1_000_000 / HEALTHY_RATE));
        let end = Instant::now() + length;
        let mut emitted = 0;
        while Instant::now() < end {
            tick.tick().await;
            let tenant = (emitted % HEALTHY as u64) as i32;
            world.emit(tenant).await?;
            emitted += 1;
        }
        Ok(emitted)
    }

    async fn idle(&mut self) -> anyhow::Result<()> {
        eprintln!("(f) one emit at a time on an idle system …");
        let mut world = self.ground.world().await?;
        world.tenants(2).await?;
        world.endpoints(0, 1, "/fast/sql", 16).await?;
        world.endpoints(1, 2, "/fast/http", 16).await?;
        world.start().await?;
        world.wait_until_owned(1).await?;
        world.emit_batch(5, 0, 1).await?;
        world.emit_http("t1").await?;
        world.wait_received("http", 1, DRAIN_WAIT).await?;
        world.wait_received("sql", 5, DRAIN_WAIT).await?;
        world.forget_received().await?;
        for emit in 0..self.size.idle_emits {
            // Not aligned with the reader's polls.
            tokio::time::sleep(Duration::from_millis(25 + u64::from(emit * 7 % 23))).await;
            world.emit(0).await?;
            tokio::time::sleep(Duration::from_millis(25 + u64::from(emit * 11 % 23))).await;
            world.emit_http("t1").await?;
        }
        world
            .wait_received("sql", self.size.idle_emits.into(), DRAIN_WAIT)
            .await?;
        world
            .wait_received("http", self.size.idle_emits.into(), DRAIN_WAIT)
            .await?;
        let (sql, http) = (world.received("sql").await?, world.received("http").await?);
        self.report
            .at_most("(f) idle, HTTP emit to arrival, p50 ms", http.p50_ms, 5.0);
        self.report
            .at_most("(f) idle, HTTP emit to arrival, p99 ms", http.p99_ms, 50.0);
        self.report
            .at_most("(f) idle, SQL emit to arrival, p50 ms", sql.p50_ms, 15.0);
        self.report
            .at_most("(f) idle, SQL emit to arrival, p99 ms", sql.p99_ms, 50.0);
        // Let cleanup after the emits finish first. The kernel counts CPU time in hundredths of a second for each of thirty
        // processes: a short measurement would be mostly rounding.
        let (settle, length) = self.size.idle_seconds;
        tokio::time::sleep(Duration::from_secs(settle)).await;
        let (cpu, postgres) = (world.cpu(), self.ground.postgres_cpu());
        let length = Duration::from_secs(length);
        tokio::time::sleep(length).await;
        let used = world.cpu() - cpu + (self.ground.postgres_cpu() - postgres);
        let share = 100.0 * used.as_secs_f64() / length.as_secs_f64();
        self.report.at_most("(f) idle system, % of one core", share, 2.0);
        world.end().await
    }

    /// The cost of reading the queue with a growing backlog for one slow endpoint.
    async fn backlog(&mut self) -> anyhow::Result<()> {
        let mut costs = Vec::new();
        let mut memory = 0.0;
        for waiting in self.size.backlogs {
            eprintln!("(g) fetch with {waiting} waiting …");
            let mut world = self.ground.world().await?;
            world.tenants(1).await?;
            world.endpoints(0, 1, "/slow/20/backlog", 64).await?;
            world.pile_up(waiting, 0, 1).await?;
            world.start().await?;
            world.wait_until_owned(1).await?;
            world.wait_received("backlog", 100, DRAIN_WAIT).await?;
            let before = world.histogram("postrider_refill_seconds").await?;
            tokio::time::sleep(Duration::from_secs(self.size.healthy_seconds.min(8))).await;
            let after = world.histogram("postrider_refill_seconds").await?;
            costs.push(1000.0 * (after.0 - before.0) / (after.1 - before.1).max(1.0));
            self.report.note(
                &format!("(g) fetch with {waiting} waiting, ms"),
                costs[costs.len() - 1],
            );
            memory = usage::peak_memory_mb(world.processes[0].pid());
            world.end().await?;
        }
        let ratio = costs[costs.len() - 1] / costs[0].max(0.001);
        self.report
            .at_most("(g) fetch at the largest backlog over the smallest", ratio, 1.5);
        self.report
            .at_most("(g) peak memory at the largest backlog, MB", memory, 100.0);
        Ok(())
    }

    /// Two dispatchers, one is killed: the time until the other continues its deliveries.
    async fn takeover(&mut self) -> anyhow::Result<()> {
        eprintln!("(k) kill -9 of one of two dispatchers …");
        let mut world = self.ground.world().await?;
        world.tenants(64).await?;
        world.endpoints(0, 64, "/fast/takeover", 16).await?;
        world.start().await?;
        world.start().await?;
        world.wait_until_owned(2).await?;
        world.processes[0].kill().await?;
        let killed = Instant::now();
        world.emit_batch(1, 0, 64).await?;
        world.wait_received("takeover", 64, DRAIN_WAIT).await?;
        let seconds = killed.elapsed().as_secs_f64();
        self.report
            .at_most("(k) kill -9 to its deliveries going on, s", seconds, 10.0);
        world.end().await
    }
}

/// Batches of 1,000 events, each for at most 50 tenants.
pub(super) async fn emit_all(world: &World, batches: i32, tenants: i32) -> anyhow::Result<()> {
    let next = std::sync::atomic::AtomicI32::new(0);
    let width = tenants.min(50);
    let emitter = || async {
        loop {
            let batch = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            if batch >= batches {
                return anyhow::Ok(());
            }
            let from = batch * width % tenants;
            world.emit_batch(BATCH / width, from, from + width).await?;
        }
    };
    // Two concurrent transactions.
    let (a, b) = tokio::join!(emitter(), emitter());
    a.and(b)
}

/// CPU time at the start of a bulk measurement.
pub(super) struct Start {
    unix_us: u64,
    cpu: Duration,
    postgres: Duration,
    sink: Duration,
}

impl Start {
    pub(super) fn now(ground: &Ground, world: &World) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            unix_us: now.map_or(0, |now| now.as_micros() as u64),
            cpu: world.cpu(),
            postgres: ground.postgres_cpu(),
            sink: ground.sink_cpu(),
        }
    }

    /// Waits until everything has arrived.
    pub(super) async fn measure(
        self,
        ground: &Ground,
        world: &World,
        group: &str,
        expected: u64,
    ) -> anyhow::Result<Row> {
        world.wait_received(group, expected, DRAIN_WAIT).await?;
        let received = world.received(group).await?;
        let per_thousand = |used: Duration| used.as_secs_f64() * 1000.0 / expected as f64;
        let memory = world.processes.iter().map(|one| usage::peak_memory_mb(one.pid()));
        Ok(Row {
            deliveries: received.count,
            per_second: expected as f64 * 1e6 / (received.last_us - self.unix_us) as f64,
            p50_ms: Some(received.p50_ms),
            p95_ms: Some(received.p95_ms),
            p99_ms: Some(received.p99_ms),
            sender_cpu: per_thousand(world.cpu() - self.cpu),
            postgres_cpu: Some(per_thousand(ground.postgres_cpu() - self.postgres)),
            sink_cpu: per_thousand(ground.sink_cpu() - self.sink),
            peak_memory_mb: memory.fold(0.0, f64::max),
            ..Row::default()
        })
    }
}
