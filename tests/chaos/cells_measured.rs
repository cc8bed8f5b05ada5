//! `make cells`, measured: what a cell's outage does to the others, what home still does, how cells add up, and what a transaction
//! that stays open costs the relay.

use std::{
    collections::{HashMap, HashSet},
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use sqlx::{Connection, PgConnection};
use tokio::{task::JoinSet, time::sleep};

use crate::{
    cells::{Cells, endpoint, kill_postgres, start_postgres},
    history::{Harm, Moment},
    installation::new_secret,
    producers::TYPES,
    receivers::Mood,
    runs::{alone, number},
    support::{Database, until},
};

const TYPE: &str = TYPES[0];
/// Between two emits of one tenant whose latency is measured.
const EVERY: Duration = Duration::from_millis(20);
const AWAY_SECONDS: u64 = 60;
/// A cell that responds in a few milliseconds may take a few more on a busy machine.
const NOISE: Duration = Duration::from_millis(10);
const FAN_OUT: usize = 10;
/// A cell that was away.
const CATCHES_UP_MAX: Duration = Duration::from_secs(60);

/// An event, and when its commit was acknowledged.
type Emits = Vec<(String, Moment)>;

async fn emit(connection: &mut PgConnection, tenant: &str, mark: &str) {
    sqlx::query("select postrider.emit($1, $2, format('{\"mark\": \"%s\", \"key\": null}', $3::text), $3)")
        .bind(tenant)
        .bind(TYPE)
        .bind(mark)
        .execute(connection)
        .await
        .expect("emitted");
}

/// Emits of one tenant at home, at an even pace.
async fn emit_steadily(cells: &Cells, tenant: &'static str, phase: &str, time: Duration) -> Emits {
    let mut connection = cells.home().connect().await;
    let (began, mut emits) = (cells.time.now(), Vec::new());
    while cells.time.now() - began < time {
        let mark = format!("{phase}-{tenant}-{}", emits.len());
        emit(&mut connection, tenant, &mark).await;
        emits.push((mark, cells.time.now()));
        sleep(EVERY).await;
    }
    emits
}

/// From the commit to the receiver, ascending. Those that have not arrived count as long as until now.
fn latencies(cells: &Cells, emits: &Emits) -> Vec<Duration> {
    let mut arrived: HashMap<String, Moment> = HashMap::new();
    for request in cells.receivers.requests() {
        arrived.entry(request.mark).or_insert(request.at);
    }
    let now = cells.time.now();
    let mut all: Vec<Duration> = emits
        .iter()
        .map(|(mark, at)| arrived.get(mark).copied().unwrap_or(now).saturating_sub(*at))
        .collect();
    all.sort();
    all
}

fn share(sorted: &[Duration], share: f64) -> Duration {
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}

/// Endpoints that always accept at once, for one tenant.
async fn endpoints(cells: &Cells, cell: usize, tenant: &str, count: usize) {
    let mut connection = cells.cells[cell].database.connect().await;
    for _ in 0..count {
        let (place, url) = cells.receivers.open();
        cells.receivers.set(place, Mood::Takes(Duration::ZERO));
        endpoint(&mut connection, tenant, &url, &new_secret(), false).await;
    }
}

fn seconds(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1_000.0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: make cells"]
async fn a_cell_fails_alone() {
    let _alone = alone().await;
    let away = Duration::from_secs(number("POSTRIDER_CELLS_AWAY_SECONDS", AWAY_SECONDS));
    let mut cells = Cells::empty(2).await;
    cells.types(&[TYPE]).await;
    cells.tenants(3).await;
    for cell in 0..3 {
        endpoints(&cells, cell, cells.tenants[cell], 1).await;
    }
    cells.start_all().await;
    let [home, a, b] = [cells.tenants[0], cells.tenants[1], cells.tenants[2]];
    let phase = async |name: &str| {
        let (_, in_a, in_b) = tokio::join!(
            emit_steadily(&cells, home, name, away),
            emit_steadily(&cells, a, name, away),
            emit_steadily(&cells, b, name, away)
        );
        (in_a, in_b)
    };
    let (_, warm) = phase("before").await;
    let before = latencies(&cells, &warm);
    cells.cells[1].database.stop_server().await;
    let from = cells.time.now();
    let (waited, other) = phase("away").await;
    let during = latencies(&cells, &other);
    let of_a: HashSet<&String> = waited.iter().map(|(mark, _)| mark).collect();
    let early = cells
        .receivers
        .requests()
        .iter()
        .filter(|request| of_a.contains(&request.mark))
        .count();
    assert_eq!(early, 0, "a is stopped");
    start_postgres(&cells.cells[1].database).await;
    let back = Instant::now();
    let has_caught_up = || {
        let arrived: HashSet<String> = cells
            .receivers
            .requests()
            .into_iter()
            .map(|request| request.mark)
            .collect();
        of_a.iter().all(|mark| arrived.contains(*mark))
    };
    while !has_caught_up() {
        assert!(back.elapsed() < CATCHES_UP_MAX, "a does not catch up");
        sleep(Duration::from_millis(200)).await;
    }
    cells.note(
        "the Postgres of a was stopped".to_owned(),
        "stopped",
        Harm::Outage,
        from,
    );
    let (p99, p99_during) = (share(&before, 0.99), share(&during, 0.99));
    println!(
        "alone       b while a is stopped for {} s: p50 {} → {}, p99 {} → {} (ratio {:.2}); {} events of a waited and \
         were all sent {:.1} s after it was back",
        away.as_secs(),
        seconds(share(&before, 0.5)),
        seconds(share(&during, 0.5)),
        seconds(p99),
        seconds(p99_during),
        p99_during.as_secs_f64() / p99.as_secs_f64(),
        of_a.len(),
        back.elapsed().as_secs_f64()
    );
    assert!(p99_during <= p99.mul_f64(1.2).max(p99 + NOISE), "b noticed it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: make cells"]
async fn home_may_be_away() {
    const EVENTS: usize = 600;
    let _alone = alone().await;
    let mut cells = Cells::empty(2).await;
    cells.types(&[TYPE]).await;
    cells.tenants(3).await;
    for cell in 0..3 {
        endpoints(&cells, cell, cells.tenants[cell], 1).await;
    }
    // One fails, so that there is something to retry; the other has a backlog.
    cells.receivers.set(1, Mood::Fails);
    cells.receivers.set(2, Mood::Takes(Duration::from_millis(50)));
    cells.start_all().await;
    let mut connection = cells.home().connect().await;
    for n in 0..EVENTS {
        emit(&mut connection, cells.tenants[1 + n % 2], &format!("e{n}")).await;
    }
    drop(connection);
    let outbox = "select count(*) from postrider.cell_outbox";
    until("all events are in their cells", || async {
        (cells.home().count(outbox).await == 0).then_some(())
    })
    .await;
    kill_postgres(cells.home());
    let held = "select (select count(*) from postrider.queue) + (select count(*) from postrider.retries)";
    let before = [
        cells.cells[1].database.count(held).await,
        cells.cells[2].database.count(held).await,
    ];
    sleep(Duration::from_secs(10)).await;
    cells.receivers.set(1, Mood::Takes(Duration::ZERO));
    let began = Instant::now();
    for cell in [1, 2] {
        until("what the cell holds is delivered", || async {
            (cells.cells[cell].database.count(held).await == 0).then_some(())
        })
        .await;
    }
    let drained = began.elapsed();
    start_postgres(cells.home()).await;
    let back = Instant::now();
    let mut connection = cells.home().connect().await;
    for cell in [1, 2] {
        emit(&mut connection, cells.tenants[cell], &format!("after-{cell}")).await;
    }
    until("events of after the outage arrive", || async {
        let requests = cells.receivers.requests();
        let after: HashSet<&String> = requests
            .iter()
            .map(|request| &request.mark)
            .filter(|mark| mark.starts_with("after"))
            .collect();
        (after.len() == 2).then_some(())
    })
    .await;
    println!(
        "home away   a held {} to retry and b {} queued: all delivered {:.1} s after the receiver recovered, with home \
         stopped; a new event arrived {:.1} s after home was back",
        before[0],
        before[1],
        drained.as_secs_f64(),
        back.elapsed().as_secs_f64()
    );
    assert!(before[0] > 0 && before[1] > 0, "there was something to do");
}

/// CPU of a server and all that it has started, in seconds.
fn cpu(database: &Database) -> f64 {
    const TICKS: f64 = 100.0;
    let postmaster = database.cluster().pid().expect("it runs").to_string();
    let fields = |pid: &str| -> Option<Vec<String>> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let rest = text.rsplit_once(") ")?.1;
        Some(rest.split_whitespace().map(ToOwned::to_owned).collect())
    };
    let mut ticks = 0.0;
    let processes = fs::read_dir("/proc").expect("a list");
    for name in processes.filter_map(|entry| entry.ok()?.file_name().into_string().ok()) {
        let Some(fields) = fields(&name) else { continue };
        // After the name: state, parent, … utime, stime, cutime, cstime.
        let number = |at: usize| fields[at].parse::<f64>().unwrap_or_default();
        if name == postmaster {
            ticks += (11..15).map(number).sum::<f64>();
        } else if fields[1] == postmaster {
            ticks += (11..13).map(number).sum::<f64>();
        }
    }
    ticks / TICKS
}

async fn wal_bytes(database: &Database) -> f64 {
    database
        .count("select pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint")
        .await as f64
}

/// Emits as fast as a few producers can, ten events in a transaction.
async fn emit_fast(database: &Database, tenant: &'static str, mark: &str, count: usize) {
    const PRODUCERS: usize = 4;
    const TOGETHER: usize = 10;
    let mut producers = JoinSet::new();
    for producer in 0..PRODUCERS {
        let (mut connection, mark) = (database.connect().await, mark.to_owned());
        producers.spawn(async move {
            for n in 0..count / PRODUCERS / TOGETHER {
                let mut transaction = connection.begin().await.expect("begun");
                for event in 0..TOGETHER {
                    emit(
                        &mut transaction,
                        tenant,
                        &format!("{mark}-{producer}-{n}-{event}"),
                    )
                    .await;
                }
                transaction.commit().await.expect("committed");
            }
        });
    }
    producers.join_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: make cells"]
async fn home_does_less() {
    const SHARE_MAX: f64 = 0.2;
    let _alone = alone().await;
    let events = number("POSTRIDER_CELLS_FANNED_OUT", 4_000) as usize;
    let mut cells = Cells::empty(2).await;
    cells.types(&[TYPE]).await;
    cells.tenants(2).await;
    for cell in 0..2 {
        endpoints(&cells, cell, cells.tenants[cell], FAN_OUT).await;
    }
    cells.start_all().await;
    // What processes that wait cost every second, with and without cells, is no part of a delivery.
    emit_fast(cells.home(), cells.tenants[0], "warm", 200).await;
    emit_fast(cells.home(), cells.tenants[1], "warm-a", 200).await;
    cells.drained().await.expect("drained");
    let (before, began) = (cpu(cells.home()), Instant::now());
    sleep(Duration::from_secs(5)).await;
    let idle = (cpu(cells.home()) - before) / began.elapsed().as_secs_f64();
    let mut figures = Vec::new();
    for cell in 0..2 {
        cells.home().execute_here_as_superuser("checkpoint").await;
        let (before, wal, began) = (cpu(cells.home()), wal_bytes(cells.home()).await, Instant::now());
        emit_fast(
            cells.home(),
            cells.tenants[cell],
            &format!("measured-{cell}"),
            events,
        )
        .await;
        let emitted = began.elapsed();
        cells.drained().await.expect("drained");
        let time = began.elapsed().as_secs_f64();
        let all = cpu(cells.home()) - before;
        let thousands = (events * FAN_OUT) as f64 / 1_000.0;
        let written = (wal_bytes(cells.home()).await - wal) / 1_024.0 / thousands;
        println!(
            "home        {}: {events} events emitted in {:.1} s, drained after {time:.1} s; {all:.2} s CPU, of which {:.2} s idle",
            cells.cells[cell].name,
            emitted.as_secs_f64(),
            idle * time
        );
        figures.push(((all - idle * time) * 1_000.0 / thousands, written));
    }
    let [(cpu, wal), (cpu_cells, wal_cells)] = figures[..] else {
        unreachable!("two figures")
    };
    let shares = [cpu_cells / cpu, wal_cells / wal];
    println!(
        "home        for 1,000 deliveries with fan-out {FAN_OUT}: {cpu:.1} ms CPU and {wal:.0} KiB WAL on one database; \
         {cpu_cells:.1} ms and {wal_cells:.0} KiB at home for a tenant in a cell: {:.2} and {:.2}",
        shares[0], shares[1]
    );
    assert!(
        shares.iter().all(|share| *share <= SHARE_MAX),
        "home does more than {SHARE_MAX}"
    );
}

/// A control group that all processes of a server are in.
struct Limited(PathBuf);

impl Limited {
    /// None where groups can't be made.
    fn of(database: &Database, name: &str) -> Option<Self> {
        let folder = ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup"]
            .into_iter()
            .map(Path::new)
            .find(|root| root.join("cgroup.procs").exists())?
            .join(format!("postrider-{name}-{}", std::process::id()));
        fs::create_dir(&folder).ok()?;
        let group = Self(folder);
        let postmaster = database.cluster().pid()?.to_string();
        // New backends are in the group of the one that forks them.
        fs::write(group.0.join("cgroup.procs"), &postmaster).ok()?;
        let processes = fs::read_dir("/proc").ok()?;
        for name in processes.filter_map(|entry| entry.ok()?.file_name().into_string().ok()) {
            let stat = fs::read_to_string(format!("/proc/{name}/stat")).unwrap_or_default();
            let parent = stat
                .rsplit_once(") ")
                .and_then(|(_, rest)| rest.split(' ').nth(1));
            if parent == Some(&postmaster) {
                let _ = fs::write(group.0.join("cgroup.procs"), &name);
            }
        }
        group.set(None).then_some(group)
    }

    /// The microseconds of CPU in each period of 100 ms.
    fn set(&self, microseconds: Option<u32>) -> bool {
        const PERIOD: u32 = 100_000;
        let write = |file: &str, text: String| fs::write(self.0.join(file), text).is_ok();
        if self.0.join("cpu.max").exists() {
            let quota = microseconds.map_or("max".to_owned(), |quota| quota.to_string());
            return write("cpu.max", format!("{quota} {PERIOD}"));
        }
        let quota = microseconds.map_or("-1".to_owned(), |quota| quota.to_string());
        write("cpu.cfs_period_us", PERIOD.to_string()) && write("cpu.cfs_quota_us", quota)
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: make cells"]
async fn cells_add_up() {
    const LINEAR: f64 = 0.9;
    const ENDPOINTS: usize = 16;
    const CELLS: usize = 4;
    let _alone = alone().await;
    // 2 % of a core for each cell's Postgres, so that the rest of the machine has enough to do with four of them.
    let share = number("POSTRIDER_CELLS_SHARE_US", 2_000) as u32;
    let events = number("POSTRIDER_CELLS_DELIVERIES_EACH", 24_000) as usize;
    let mut cells = Cells::empty(CELLS).await;
    cells.types(&[TYPE]).await;
    cells.tenants(CELLS + 1).await;
    let mut limits = Vec::new();
    for cell in 1..=CELLS {
        endpoints(&cells, cell, cells.tenants[cell], ENDPOINTS).await;
        let Some(limit) = Limited::of(&cells.cells[cell].database, cells.cells[cell].name) else {
            crate::support::skip(
                "cells_measured::cells_add_up",
                "control groups can't be made here",
            );
            return;
        };
        limits.push(limit);
    }
    let mut rates = Vec::new();
    for count in [1, 2, 4] {
        for cell in 1..=count {
            limits[cell - 1].set(None);
            let fill = format!(
                "select count(postrider.emit('{}', '{TYPE}', '{{\"mark\": \"{count}-' || n || '\"}}')) from generate_series(1, {}) n;
                 vacuum analyze",
                cells.tenants[cell],
                events / ENDPOINTS
            );
            for statement in fill.split(';') {
                cells.cells[cell].database.execute(statement).await;
            }
        }
        for cell in 1..=count {
            cells.cells[cell].dispatcher.start().await;
        }
        // The first ones are being sent.
        sleep(Duration::from_secs(1)).await;
        for limit in &limits[..count] {
            assert!(limit.set(Some(share)), "limited");
        }
        sleep(Duration::from_secs(2)).await;
        let (before, began) = (cells.receivers.count(), Instant::now());
        sleep(Duration::from_secs(number("POSTRIDER_CELLS_SCALE_SECONDS", 12))).await;
        let rate = (cells.receivers.count() - before) as f64 / began.elapsed().as_secs_f64();
        let mut left = Vec::new();
        for (cell, limit) in limits[..count].iter().enumerate() {
            limit.set(None);
            let queued = "select count(*) from postrider.queue";
            left.push(cells.cells[cell + 1].database.count(queued).await);
        }
        println!("scale       {count} cells: {rate:.0} deliveries/s, {left:?} left");
        assert!(
            left.iter().all(|left| *left > 0),
            "a backlog remains to the end: raise the number of events"
        );
        for cell in 1..=count {
            cells.cells[cell].dispatcher.kill();
            cells.cells[cell]
                .database
                .execute("delete from postrider.queue; delete from postrider.retries")
                .await;
        }
        rates.push(rate / count as f64);
    }
    println!(
        "scale       of linear: {:.2} with two cells, {:.2} with four",
        rates[1] / rates[0],
        rates[2] / rates[0]
    );
    assert!(
        rates.iter().all(|rate| *rate >= rates[0] * LINEAR),
        "less than {LINEAR} of linear"
    );
}

/// From a commit of many events until the outbox is empty, in events per second.
async fn relay_rate(cells: &Cells, round: usize, events: usize) -> f64 {
    const BATCH: usize = 1_000;
    let mut connection = cells.home().connect().await;
    sqlx::raw_sql("begin")
        .execute(&mut connection)
        .await
        .expect("begun");
    for batch in 0..events / BATCH {
        sqlx::query(
            "select count(*) from postrider.emit_batch($1, array_fill($2::text, array[$3]),
                 (select array_agg(format('{\"mark\": \"%s-%s-%s\"}', $4::int, $5::int, n)) from generate_series(1, $3) n))",
        )
        .bind(cells.tenants[1])
        .bind(TYPE)
        .bind(BATCH as i32)
        .bind(round as i32)
        .bind(batch as i32)
        .execute(&mut connection)
        .await
        .expect("emitted");
    }
    sqlx::raw_sql("commit")
        .execute(&mut connection)
        .await
        .expect("committed");
    let began = Instant::now();
    let left = "select count(*) from (select from postrider.cell_outbox where cell_id = 1 order by xid desc, n desc limit 1) o";
    while cells.home().count(left).await > 0 {
        sleep(Duration::from_millis(5)).await;
    }
    events as f64 / began.elapsed().as_secs_f64()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: make cells"]
async fn a_transaction_that_stays_open_at_home_does_not_slow_the_relay() {
    const ROUNDS: usize = 5;
    let _alone = alone().await;
    let events = number("POSTRIDER_CELLS_RELAYED", 20_000) as usize;
    let mut cells = Cells::empty(1).await;
    cells.types(&[TYPE]).await;
    cells.tenants(2).await;
    cells.cells[1].dispatcher.start().await;
    let mut medians = Vec::new();
    let mut held = None;
    for is_held in [false, true] {
        if is_held {
            let mut connection = cells.home().connect().await;
            let hold = "begin isolation level repeatable read; select pg_current_xact_id(); select count(*) from postrider.tenants";
            sqlx::raw_sql(hold)
                .execute(&mut connection)
                .await
                .expect("a snapshot");
            held = Some(connection);
        }
        let mut rates = Vec::new();
        for round in 0..ROUNDS {
            let number = round + if is_held { ROUNDS } else { 0 };
            rates.push(relay_rate(&cells, number, events).await);
        }
        println!(
            "relay       with{} an open transaction: {:.0?} events/s",
            if is_held { "" } else { "out" },
            rates
        );
        // The last ones have the most dead rows behind them.
        let mut last = rates[1..].to_vec();
        last.sort_by(f64::total_cmp);
        medians.push(last[last.len() / 2]);
    }
    drop(held);
    let ratio = medians[1] / medians[0];
    let dead = cells
        .home()
        .count("select coalesce(n_dead_tup, 0) from pg_stat_user_tables where relname = 'cell_outbox'")
        .await;
    println!(
        "relay       {:.0} events/s, and {:.0} with a transaction open at home and {dead} dead rows: {ratio:.2}",
        medians[0], medians[1]
    );
    assert!(ratio >= 0.9, "the relay is slower: {ratio:.2}");
}
