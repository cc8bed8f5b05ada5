//! `make soak`: half of what the machine can do, for as long as asked. Memory, the hot tables, latency and throughput must
//! be in the last tenth what they were in the first. The report and its plots go to `docs/soak/`.

use std::{
    convert::Infallible,
    fmt::Write,
    path::Path,
    sync::{Arc, Mutex},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::json;
use sqlx::{PgConnection, Row};
use tokio::net::TcpListener;

use crate::{
    runs,
    support::{Database, Postrider, until},
};

const MINUTES: u64 = 30;
const ENDPOINTS: usize = 10;
/// Of the measured throughput.
const SHARE: f64 = 0.5;
const MEASURED_EVENTS: i32 = 10_000;
/// Between two transactions of the producer.
const TICK: Duration = Duration::from_millis(50);
/// From the first tenth to the last.
const DRIFT_MAX: f64 = 0.10;
/// What caches, pools and the first autovacuum take until everything is as it stays.
const WARM_UP: Duration = Duration::from_secs(30);

fn unix_micros() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_micros() as u64
}

/// How long each delivery took since the last look.
#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u32>>>);

impl Sink {
    async fn start(&self) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let sink = self.clone();
        tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else {
                    continue;
                };
                let sink = sink.clone();
                tokio::spawn(async move {
                    let service = service_fn(|request| sink.clone().take(request));
                    let _ = http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        port
    }

    async fn take(self, request: hyper::Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
        let body = request
            .into_body()
            .collect()
            .await
            .map(|body| body.to_bytes())
            .unwrap_or_default();
        // `"at" : ` and the microseconds at which it was emitted, as `json_build_object` writes it.
        let text = std::str::from_utf8(&body).expect("text");
        let (_, rest) = text.split_once("\"at\" : ").expect("the time of its emit");
        let at: u64 = rest
            .split(',')
            .next()
            .and_then(|at| at.parse().ok())
            .expect("a time");
        let took = unix_micros().saturating_sub(at);
        self.0.lock().expect("not poisoned").push(took as u32);
        Ok(Response::builder()
            .status(204)
            .body(Full::default())
            .expect("a plain answer"))
    }

    fn look(&self) -> Vec<u32> {
        let mut times = std::mem::take(&mut *self.0.lock().expect("not poisoned"));
        times.sort_unstable();
        times
    }

    fn count(&self) -> usize {
        self.0.lock().expect("not poisoned").len()
    }
}

/// One look at everything.
#[derive(Debug, Clone, Copy)]
struct Sample {
    at: f64,
    per_second: f64,
    p50_ms: f64,
    p99_ms: f64,
    memory_mb: f64,
    /// Queue and retries with their indexes: what must not grow.
    hot_mb: f64,
    /// Of events and attempts, for each delivery so far: what grows only with what is kept.
    kept_bytes: f64,
}

async fn emit(producer: &mut PgConnection, count: i32) {
    sqlx::query(
        "select postrider.emit('acme', 'invoice.paid', json_build_object('at', $1, 'padding', repeat('x', 400))::text)
         from generate_series(1, $2)",
    )
    .bind(unix_micros() as i64)
    .bind(count)
    .execute(producer)
    .await
    .expect("emitted");
}

async fn sizes(connection: &mut PgConnection) -> (f64, f64) {
    let row = sqlx::query(
        "select (pg_total_relation_size('postrider.queue') + pg_total_relation_size('postrider.retries'))::float8,
                (select sum(pg_total_relation_size(inhrelid)) from pg_inherits
                 where inhparent in ('postrider.events'::regclass, 'postrider.attempts'::regclass))::float8",
    )
    .fetch_one(connection)
    .await
    .expect("sizes");
    (row.get(0), row.get(1))
}

fn memory_mb(process: &Postrider) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.pid())).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok());
    kilobytes.unwrap_or_default() / 1024.0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "half an hour: `make soak`"]
async fn half_the_throughput_for_long_changes_nothing() {
    let _alone = runs::alone().await;
    let length = Duration::from_secs(runs::number("POSTRIDER_SOAK_SECONDS", MINUTES * 60));
    let database = Database::on_private_server().await;
    let program = Postrider::start(&database).await;
    let sink = Sink::default();
    let port = sink.start().await;
    program.api().tenant("acme").await;
    program.api().event_type("invoice.paid").await;
    for number in 0..ENDPOINTS {
        let url = format!("http://127.0.0.1:{port}/{number}");
        program.api().endpoint("acme", &url, json!({})).await;
    }
    let mut producer = database.connect().await;
    let mut watcher = database.connect().await;

    // What the machine can do: from the first emit to the last arrival.
    let began = Instant::now();
    for _ in 0..MEASURED_EVENTS / 100 {
        emit(&mut producer, 100).await;
    }
    until("the backlog is sent", || async {
        (sink.count() >= MEASURED_EVENTS as usize * ENDPOINTS).then_some(())
    })
    .await;
    let most = (MEASURED_EVENTS as usize * ENDPOINTS) as f64 / began.elapsed().as_secs_f64();
    let held = most * SHARE;
    let each = (held / ENDPOINTS as f64 * TICK.as_secs_f64()).max(1.0);
    println!(
        "{most:.0} deliveries a second at the most; {held:.0} are held for {} s",
        length.as_secs()
    );
    sink.look();

    let every = (length / 300).max(Duration::from_secs(1));
    let (start, mut next, mut owed) = (Instant::now(), Instant::now() + WARM_UP, 0.0);
    let (mut samples, mut total) = (Vec::new(), MEASURED_EVENTS as usize * ENDPOINTS);
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
    let mut looked = Instant::now();
    while start.elapsed() < length + WARM_UP {
        tick.tick().await;
        owed += each;
        let count = owed as i32;
        owed -= f64::from(count);
        if count > 0 {
            emit(&mut producer, count).await;
        }
        if Instant::now() >= next {
            next += every;
            let times = sink.look();
            let since = looked.elapsed().as_secs_f64();
            looked = Instant::now();
            total += times.len();
            let at = start.elapsed().saturating_sub(WARM_UP);
            // The first look covers the warm-up.
            if samples.is_empty() && at < every / 2 {
                continue;
            }
            let (hot, kept) = sizes(&mut watcher).await;
            let percentile = |share: f64| {
                let place = (times.len() as f64 * share) as usize;
                times
                    .get(place)
                    .map_or(0.0, |micros| f64::from(*micros) / 1_000.0)
            };
            samples.push(Sample {
                at: at.as_secs_f64(),
                per_second: times.len() as f64 / since,
                p50_ms: percentile(0.5),
                p99_ms: percentile(0.99),
                memory_mb: memory_mb(&program),
                hot_mb: hot / 1_048_576.0,
                kept_bytes: kept / total as f64,
            });
        }
    }
    database.drained().await;
    let report = Report {
        samples,
        most,
        held,
        length,
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/soak");
    let folder = std::env::var("POSTRIDER_SOAK_FOLDER").map_or(folder, Into::into);
    let drifted = report.write(&folder);
    assert!(drifted.is_empty(), "not flat: {drifted:?}");
}

struct Report {
    samples: Vec<Sample>,
    most: f64,
    held: f64,
    length: Duration,
}

/// What is plotted: a file, a title, how to read it from a sample, and how far it may drift.
type Curve = (&'static str, &'static str, fn(&Sample) -> f64, Drift);

#[derive(Clone, Copy)]
enum Drift {
    /// Neither more nor less.
    Both(f64),
    /// Not more; a difference below this is noise whatever its share.
    Up(f64),
}

const CURVES: [Curve; 6] = [
    (
        "throughput",
        "deliveries a second",
        |s| s.per_second,
        Drift::Both(0.0),
    ),
    ("latency-p50", "p50, ms", |s| s.p50_ms, Drift::Up(5.0)),
    ("latency-p99", "p99, ms", |s| s.p99_ms, Drift::Up(25.0)),
    ("memory", "resident memory, MB", |s| s.memory_mb, Drift::Up(2.0)),
    (
        "hot-tables",
        "queue and retries, MB",
        |s| s.hot_mb,
        Drift::Up(2.0),
    ),
    (
        "kept",
        "events and attempts, bytes a delivery",
        |s| s.kept_bytes,
        Drift::Up(0.0),
    ),
];

impl Report {
    fn tenth(&self, last: bool, of: fn(&Sample) -> f64) -> f64 {
        let tenth = (self.samples.len() / 10).max(1);
        let part = if last {
            &self.samples[self.samples.len() - tenth..]
        } else {
            &self.samples[..tenth]
        };
        // The middle value: one autovacuum in a second is not a drift.
        let mut values: Vec<f64> = part.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    }

    /// Writes the report and its plots; answers what drifted.
    fn write(&self, folder: &Path) -> Vec<String> {
        std::fs::create_dir_all(folder).expect("a folder");
        let mut drifted = Vec::new();
        let mut text = format!(
            "# Soak\n\n`make soak` sustained {:.0} deliveries per second, {:.0} % of this machine's maximum of {:.0}, including the emits, for \
             {:.0} minutes: one process, {ENDPOINTS} endpoints, bodies of half a kilobyte, a database with durability on.\n\n\
             | | first tenth | last tenth | change | flat |\n|---|---|---|---|---|\n",
            self.held,
            100.0 * SHARE,
            self.most,
            self.length.as_secs_f64() / 60.0
        );
        for (file, title, of, drift) in CURVES {
            let (first, last) = (self.tenth(false, of), self.tenth(true, of));
            let change = if first == 0.0 { 0.0 } else { last / first - 1.0 };
            let flat = match drift {
                Drift::Both(noise) => change.abs() <= DRIFT_MAX || (last - first).abs() <= noise,
                Drift::Up(noise) => change <= DRIFT_MAX || last - first <= noise,
            };
            if !flat {
                drifted.push(format!("{title}: {first:.2}, then {last:.2}"));
            }
            let flat = if flat { "yes" } else { "**no**" };
            let _ = writeln!(
                text,
                "| {title} | {first:.2} | {last:.2} | {:+.1} % | {flat} |",
                100.0 * change
            );
            std::fs::write(folder.join(format!("{file}.svg")), plot(&self.samples, title, of))
                .expect("written");
        }
        text.push_str("\nFlat means within 10 %, or below the noise of the measurement.\n\n");
        for (file, title, ..) in CURVES {
            let _ = writeln!(text, "![{title}]({file}.svg)\n");
        }
        println!("{text}");
        std::fs::write(folder.join("README.md"), text).expect("written");
        drifted
    }
}

/// A plain line over time, from zero.
fn plot(samples: &[Sample], title: &str, of: fn(&Sample) -> f64) -> String {
    const WIDTH: f64 = 720.0;
    const HEIGHT: f64 = 200.0;
    const EDGE: f64 = 48.0;
    let most = samples.iter().map(of).fold(f64::MIN_POSITIVE, f64::max) * 1.1;
    let end = samples.last().map_or(1.0, |sample| sample.at.max(1.0));
    let x = |at: f64| EDGE + at / end * (WIDTH - EDGE - 8.0);
    let y = |value: f64| HEIGHT - 24.0 - value / most * (HEIGHT - 52.0);
    let line: Vec<String> = samples
        .iter()
        .map(|sample| format!("{:.1},{:.1}", x(sample.at), y(of(sample))))
        .collect();
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{EDGE}\" y=\"16\" font-size=\"13\">{title}</text>\n"
    );
    for share in [0.0, 0.5, 1.0] {
        let value = most * share;
        let _ = writeln!(
            svg,
            "<line x1=\"{EDGE}\" x2=\"{}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"#ddd\"/><text x=\"4\" y=\"{:.1}\" fill=\"#555\">{value:.1}</text>",
            WIDTH - 8.0,
            y(value),
            y(value),
            y(value) + 4.0
        );
    }
    let _ = write!(
        svg,
        "<text x=\"{EDGE}\" y=\"{}\" fill=\"#555\">0</text><text x=\"{}\" y=\"{}\" text-anchor=\"end\" fill=\"#555\">{:.0} s</text>\n\
         <polyline fill=\"none\" stroke=\"#1f5fa8\" stroke-width=\"1.5\" points=\"{}\"/>\n</svg>\n",
        HEIGHT - 8.0,
        WIDTH - 8.0,
        HEIGHT - 8.0,
        end,
        line.join(" ")
    );
    svg
}
