//! `make neighbours`: how soon tenants that do no harm are served beside one that takes all it can get, over alone, in one
//! run. A measurement of a whole installation with one dispatcher and one API; the table is its result.

use std::{
    collections::HashMap,
    convert::Infallible,
    fmt,
    sync::{Arc, Mutex, RwLock},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::json;
use sqlx::Row;
use tokio::{net::TcpListener, task::JoinSet, time::MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use crate::{
    bad_tenants::{Bad, BadTenant, Ground},
    runs,
    support::{ADMIN_API_KEY, Api, Database, Postrider},
};

/// Of each stage, alone and beside.
const SECONDS: u64 = 25;
const WARM_UP: Duration = Duration::from_secs(3);
/// After a stage, for what is still on its way. What has not come by then counts with the time until then.
const LATE_MAX: Duration = Duration::from_secs(20);
const TENANTS: usize = 10;
const SLOW_ENDPOINTS_EACH: usize = 5;
const SLOW: Duration = Duration::from_millis(1_200);
const ANSWER_MAX: Duration = Duration::from_secs(20);
const GOAL: f64 = 1.5;
const SLOWEST: usize = 5;
/// The dispatcher's limit of open files where sockets are what runs out.
const FEW_FILES: &str = "ulimit -n 1024; exec \"$@\"";
/// As many as a tenant of some size has.
const LOOKED_THROUGH: i32 = 200_000;

/// What the healthy tenants do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Load {
    /// Emits by SQL, to receivers that answer at once.
    Quick,
    /// The same, to receivers that take over a second.
    Slow,
    /// Emits over HTTP.
    Http,
    /// A replay of one delivery.
    Replay,
}

impl Load {
    fn every(self) -> Duration {
        match self {
            Self::Quick => Duration::from_millis(20),
            Self::Slow | Self::Replay => Duration::from_millis(100),
            Self::Http => Duration::from_millis(40),
        }
    }

    fn words(self) -> &'static str {
        match self {
            Self::Quick => "emit by SQL",
            Self::Slow => "emit by SQL, receivers take 1.2 s",
            Self::Http => "emit by HTTP",
            Self::Replay => "replay of one delivery",
        }
    }
}

struct Scenario {
    row: u64,
    bad: Bad,
    loads: &'static [Load],
}

const SCENARIOS: &[Scenario] = &[
    Scenario {
        row: 1,
        bad: Bad::Hoards,
        loads: &[Load::Quick],
    },
    Scenario {
        row: 2,
        bad: Bad::FallsSilent,
        loads: &[Load::Quick],
    },
    Scenario {
        row: 2,
        bad: Bad::FallsSilentWide,
        loads: &[Load::Quick],
    },
    Scenario {
        row: 5,
        bad: Bad::Lingers,
        loads: &[Load::Slow],
    },
    Scenario {
        row: 6,
        bad: Bad::StopsAccepting,
        loads: &[Load::Quick],
    },
    Scenario {
        row: 7,
        bad: Bad::Replays,
        loads: &[Load::Replay, Load::Quick],
    },
    Scenario {
        row: 17,
        bad: Bad::HoldsKey,
        loads: &[Load::Http],
    },
    Scenario {
        row: 17,
        bad: Bad::DryRuns,
        loads: &[Load::Http],
    },
];

/// By event, path of the receiver, and whether it is a replay.
type Arrival = (String, String, bool);

/// The healthy tenants' receivers: they write down when what came first.
#[derive(Clone, Default)]
struct Sink(Arc<Mutex<HashMap<Arrival, Instant>>>);

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
        let at = Instant::now();
        let (head, body) = request.into_parts();
        let _ = body.collect().await;
        let id = head.headers.get("webhook-id").and_then(|id| id.to_str().ok());
        let arrival = (
            id.unwrap_or_default().to_owned(),
            head.uri.path().to_owned(),
            head.headers.contains_key("webhook-replay"),
        );
        let slow = arrival.1.starts_with("/slow");
        self.0.lock().expect("not poisoned").entry(arrival).or_insert(at);
        if slow {
            tokio::time::sleep(SLOW).await;
        }
        let answer = Response::builder().status(204).body(Full::default());
        Ok(answer.expect("a plain answer"))
    }
}

/// What one load of one stage gave.
#[derive(Debug, Clone, Default)]
struct Measured {
    /// Ascending.
    times: Vec<Duration>,
    /// Not taken, or never come.
    failed: usize,
    /// The slowest few, each with the time since the stage began: a burst and a steady delay look the same in a percentile.
    slowest: Vec<(Duration, Duration)>,
}

impl Measured {
    fn of(&self, share: f64) -> f64 {
        let place = (self.times.len().saturating_sub(1) as f64 * share) as usize;
        let time = self.times.get(place).copied().unwrap_or(LATE_MAX);
        time.as_secs_f64() * 1_000.0
    }
}

struct Line {
    row: u64,
    bad: Bad,
    load: Load,
    alone: Measured,
    beside: Measured,
}

impl Line {
    fn ratio(&self) -> f64 {
        self.beside.of(0.99) / self.alone.of(0.99).max(0.001)
    }

    fn is_good(&self) -> bool {
        self.ratio() <= GOAL && self.beside.failed == 0
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (alone, beside) = (&self.alone, &self.beside);
        write!(
            f,
            "| {:>3} | {:<15} | {:<33} | {:>5} | {:>9.1} | {:>9.1} | {:>9.1} | {:>9.1} | {:>7.2} | {:>6} | {:<4} |",
            self.row,
            format!("{:?}", self.bad),
            self.load.words(),
            beside.times.len(),
            alone.of(0.5),
            alone.of(0.99),
            beside.of(0.5),
            beside.of(0.99),
            self.ratio(),
            beside.failed,
            if self.is_good() { "yes" } else { "NO" }
        )
    }
}

/// One installation with its healthy tenants.
struct Place {
    database: Database,
    dashboard: Postrider,
    _dispatcher: Postrider,
    sink: Sink,
    /// Of the first tenant: what can be replayed.
    delivered: Vec<(String, String)>,
}

impl Place {
    async fn make(scenario: &Scenario) -> Self {
        let database = Database::fresh().await;
        let dashboard = Postrider::on_database("dashboard", &database).start().await;
        let mut dispatcher = Postrider::on_database("dispatcher", &database);
        if scenario.bad == Bad::StopsAccepting {
            dispatcher = dispatcher.under(&["/bin/sh", "-c", FEW_FILES, "sh"]);
        }
        let dispatcher = dispatcher.start().await;
        let sink = Sink::default();
        let port = sink.start().await;
        let api = dashboard.api();
        api.event_type("healthy.event").await;
        for tenant in 0..TENANTS {
            let name = format!("healthy-{tenant}");
            api.tenant(&name).await;
            if scenario.loads.contains(&Load::Slow) {
                for number in 0..SLOW_ENDPOINTS_EACH {
                    let url = format!("http://127.0.0.1:{port}/slow/{tenant}/{number}");
                    api.endpoint(&name, &url, json!({})).await;
                }
            } else {
                let url = format!("http://127.0.0.1:{port}/quick/{tenant}");
                api.endpoint(&name, &url, json!({})).await;
            }
        }
        let mut place = Self {
            database,
            dashboard,
            _dispatcher: dispatcher,
            sink,
            delivered: Vec::new(),
        };
        if scenario.loads.contains(&Load::Replay) {
            place.deliver_what_is_replayed(&api).await;
        }
        place
    }

    /// An event for each replay of both stages.
    async fn deliver_what_is_replayed(&mut self, api: &Api) {
        let count = 2 * (seconds() * 1_000 / Load::Replay.every().as_millis() as u64) + 20;
        self.database
            .execute(&format!(
                "select postrider.emit('healthy-0', 'healthy.event', '{{}}', 'again-' || n)
                 from generate_series(1, {count}) n"
            ))
            .await;
        self.database.drained().await;
        let mut connection = self.database.connect().await;
        let rows = sqlx::query(
            "select a.event_id, a.endpoint_id, v.chosen_id from postrider.attempts a
             join postrider.events v on v.id = a.event_id where v.chosen_id like 'again-%'",
        )
        .fetch_all(&mut connection)
        .await
        .expect("deliveries");
        self.delivered = rows
            .iter()
            .map(|row| {
                let delivery = postrider_proto::DeliveryId {
                    event: postrider_proto::EventId(row.get(0)),
                    endpoint: postrider_proto::EndpointId(row.get(1)),
                };
                (delivery.to_string(), row.get(2))
            })
            .collect();
        assert!(self.delivered.len() as u64 >= count, "everything is delivered");
        api.get("/tenants/healthy-0").await;
    }

    fn ground(&self) -> Ground {
        Ground {
            apis: Arc::new(RwLock::new(vec![self.dashboard.url("")])),
            database: self.database.options(),
            dispatchers: 1,
            looked_through: LOOKED_THROUGH,
            timeout: Duration::from_secs(20),
        }
    }

    /// Each request begins at its time, however long the ones before take.
    async fn measure(&mut self, load: Load, stage: &str, length: Duration) -> Measured {
        let mut tick = tokio::time::interval(load.every());
        tick.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let pool = sqlx::postgres::PgPoolOptions::new()
            .max_connections(8)
            .connect_lazy_with(self.database.options());
        let client = crate::support::http_client().timeout(ANSWER_MAX);
        let client = client.build().expect("a client");
        let mut asked: Vec<(Arrival, Instant)> = Vec::new();
        let mut asking = JoinSet::new();
        let began = Instant::now();
        let mut number = 0;
        while began.elapsed() < length {
            tick.tick().await;
            number += 1;
            let tenant = number % TENANTS;
            let id = format!("{stage}-{load:?}-{number}");
            let at = Instant::now();
            match load {
                Load::Quick | Load::Slow => {
                    let (pool, id) = (pool.clone(), id.clone());
                    asking.spawn(async move {
                        sqlx::query("select postrider.emit($1, 'healthy.event', '{}', $2)")
                            .bind(format!("healthy-{tenant}"))
                            .bind(id)
                            .execute(&pool)
                            .await
                            .is_ok()
                    });
                }
                Load::Http | Load::Replay => {
                    let path = match load {
                        Load::Http => format!("/v1/tenants/healthy-{tenant}/events"),
                        _ => {
                            let Some((delivery, event)) = self.delivered.pop() else {
                                break;
                            };
                            asked.push(((event, "/quick/0".to_owned(), true), at));
                            format!("/v1/tenants/healthy-0/deliveries/{delivery}/replay")
                        }
                    };
                    let body = match load {
                        Load::Http => json!({ "type": "healthy.event", "data": {}, "id": id }),
                        _ => json!({}),
                    };
                    let request = client
                        .post(self.dashboard.url(&path))
                        .bearer_auth(ADMIN_API_KEY)
                        .header("content-type", "application/json")
                        .body(body.to_string());
                    asking.spawn(async move {
                        let answer = request.send().await;
                        answer.is_ok_and(|answer| answer.status().is_success())
                    });
                }
            }
            match load {
                Load::Quick | Load::Http => asked.push(((id, format!("/quick/{tenant}"), false), at)),
                Load::Slow => asked.extend((0..SLOW_ENDPOINTS_EACH).map(|endpoint| {
                    let path = format!("/slow/{tenant}/{endpoint}");
                    ((id.clone(), path, false), at)
                })),
                Load::Replay => {}
            }
        }
        let taken = asking.join_all().await;
        let refused = taken.iter().filter(|taken| !**taken).count();
        self.collect(asked, refused).await
    }

    async fn collect(&self, asked: Vec<(Arrival, Instant)>, refused: usize) -> Measured {
        let until = Instant::now() + LATE_MAX;
        loop {
            let (mut times, mut missing) = (Vec::new(), 0);
            let mut slowest = Vec::new();
            let began = asked.first().map(|(_, at)| *at);
            {
                let arrivals = self.sink.0.lock().expect("not poisoned");
                for (what, at) in &asked {
                    match arrivals.get(what) {
                        Some(came) => {
                            let took = came.saturating_duration_since(*at);
                            times.push(took);
                            slowest.push((took, began.map_or(Duration::ZERO, |began| *at - began)));
                        }
                        None => missing += 1,
                    }
                }
            }
            if missing <= refused || Instant::now() > until {
                // What never came took at least until now.
                let now = Instant::now();
                let never = now.saturating_duration_since(asked.first().map_or(now, |(_, at)| *at));
                times.extend(std::iter::repeat_n(never, missing));
                times.sort_unstable();
                slowest.sort_unstable_by(|a, b| b.cmp(a));
                slowest.truncate(SLOWEST);
                let failed = refused.max(missing);
                return Measured {
                    times,
                    failed,
                    slowest,
                };
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn stage(&mut self, loads: &[Load], stage: &str, length: Duration) -> Vec<Measured> {
        let mut measured = Vec::new();
        // One after the other, so that one load is not the neighbour of the other.
        for load in loads {
            measured.push(self.measure(*load, stage, length / loads.len() as u32).await);
        }
        measured
    }
}

fn seconds() -> u64 {
    runs::number("POSTRIDER_NEIGHBOURS_SECONDS", SECONDS)
}

/// All of them, or the rows that are asked for: `1,5`.
fn wanted(row: u64) -> bool {
    std::env::var("POSTRIDER_NEIGHBOURS_ROWS").map_or(true, |rows| {
        rows.is_empty() || rows.split(',').any(|wanted| wanted.trim().parse() == Ok(row))
    })
}

async fn play(scenario: &Scenario) -> Vec<Line> {
    let length = Duration::from_secs(seconds());
    let mut place = Place::make(scenario).await;
    let tenant = BadTenant::prepare(&place.ground(), scenario.bad)
        .await
        .expect("an installation that is well");
    let first = scenario.loads[0];
    if first != Load::Replay {
        place.measure(first, "warm", WARM_UP).await;
    }
    let alone = place.stage(scenario.loads, "alone", length).await;
    let stop = CancellationToken::new();
    let beside = {
        let misbehaving = tenant.misbehave(&stop);
        let measuring = async {
            let beside = place.stage(scenario.loads, "beside", length).await;
            stop.cancel();
            beside
        };
        tokio::join!(misbehaving, measuring).1
    };
    let lines = scenario.loads.iter().zip(alone).zip(beside);
    lines
        .map(|((load, alone), beside)| Line {
            row: scenario.row,
            bad: scenario.bad,
            load: *load,
            alone,
            beside,
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement of minutes: make neighbours"]
async fn healthy_tenants_are_served_beside_a_bad_one_as_they_are_alone() {
    let _alone = runs::alone().await;
    let mut lines = Vec::new();
    for scenario in SCENARIOS.iter().filter(|scenario| wanted(scenario.row)) {
        let played = play(scenario).await;
        for line in &played {
            println!("{line}");
            let slowest = line.beside.slowest.iter();
            let slowest: Vec<String> = slowest
                .map(|(took, at)| format!("{} ms at {:.1} s", took.as_millis(), at.as_secs_f64()))
                .collect();
            println!("      slowest beside: {}", slowest.join(", "));
        }
        lines.extend(played);
    }
    println!(
        "\nHealthy tenants, from the request to its arrival at the receiver, milliseconds; alone and beside a bad tenant, {} s each:\n",
        seconds()
    );
    println!(
        "| row | bad tenant      | healthy tenants                   |     n | alone p50 | alone p99 | with p50  | with p99  | p99 × | failed | ≤ {GOAL} |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for line in &lines {
        println!("{line}");
    }
    let lost: usize = lines.iter().map(|line| line.beside.failed).sum();
    assert_eq!(lost, 0, "requests of healthy tenants were refused or never came");
}
