//! `make failover`: an installation on a Patroni cluster whose primary is killed, frozen and switched over again and again,
//! while producers emit by SQL and HTTP. Half of the processes know every node, the other half know HAProxy.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    sync::{Arc, Mutex, RwLock},
    time::Duration,
};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use rustix::process::Signal;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};
use tempfile::TempDir;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::{
    checker::judge,
    history::{EndpointLife, Harm, History, Moment, Outcome, Request, SecretLife, Spell, Timeline},
    installation::{ALARMS, PATIENT, http_client, new_secret, stored},
    patroni::{Patroni, missing_programs},
    producers::{Journal, LARGE_SHARE, Producers, TENANTS, TYPES, emit_directly},
    receivers::Receivers,
    runs::{alone, number},
    support::{ADMIN_API_KEY, ADMIN_PASSWORD, Launch, MASTER_KEY, Postrider},
};

/// What `make failover` does, in each round.
const ROUND: [Blow; 6] = [
    Blow::SwitchOver,
    Blow::KillPostgres,
    Blow::Zombie,
    Blow::SwitchOver,
    Blow::KillNode,
    Blow::KillPostgres,
];
const ROUNDS: u64 = 4;
/// Before each blow: the cluster is whole, and deliveries are as they should be.
const CALM: Duration = Duration::from_secs(2);
/// A zombie's Postgres wakes this long before its Patroni, which demotes it.
const ZOMBIE: Duration = Duration::from_secs(4);
/// No producer waits longer for a zombie's word.
const ZOMBIE_ANSWER_MAX: Duration = Duration::from_secs(3);
/// The primary is kept without etcd for longer than its key is valid.
const WITHOUT_ETCD: Duration = Duration::from_secs(30);
const DRAIN_MAX: Duration = Duration::from_secs(60);
const TIMEOUT_MS: u64 = 2_000;
const RESPONSE_TIME_MAX: Duration = Duration::from_secs(15);
const SEED: u64 = 21;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Blow {
    /// `patronictl switchover`
    SwitchOver,
    /// `kill -9` of the primary's Postgres.
    KillPostgres,
    /// `kill -9` of the primary's Postgres and Patroni, as when a machine dies.
    KillNode,
    /// The primary and its Patroni are frozen until another is promoted. Then the old primary wakes, for a while without
    /// its Patroni, and is asked to take events.
    Zombie,
    /// All of etcd is frozen. No other primary is needed.
    LoseEtcd,
}

impl Blow {
    fn name(self) -> &'static str {
        match self {
            Self::SwitchOver => "switchover",
            Self::KillPostgres => "kill -9 postgres",
            Self::KillNode => "kill -9 postgres and patroni",
            Self::Zombie => "frozen, then a zombie",
            Self::LoseEtcd => "etcd frozen",
        }
    }
}

/// One process and how it reaches the database.
struct Role {
    process: Postrider,
    route: &'static str,
}

struct Failover {
    time: Timeline,
    patroni: Patroni,
    roles: Vec<Role>,
    addresses: Arc<RwLock<Vec<String>>>,
    receivers: Receivers,
    journal: Arc<Journal>,
    endpoints: Vec<EndpointLife>,
    spells: Mutex<Vec<Spell>>,
    /// Events that a zombie was asked to take, and how many it acknowledged.
    zombies: Mutex<(usize, usize)>,
    _folder: TempDir,
}

impl Failover {
    async fn start() -> Self {
        let patroni = Patroni::start().await;
        let several = patroni.url([0, 1, 2]);
        let migrated = launch("migrate", &several).output();
        let said = String::from_utf8_lossy(&migrated.stderr).into_owned();
        assert!(migrated.status.success(), "{said}");
        let mut roles = Vec::new();
        let ways = [("every node", several), ("HAProxy", patroni.url_of_haproxy())];
        for role in ["dashboard", "dispatcher"] {
            for (route, url) in &ways {
                let process = launch(role, url).start().await;
                roles.push(Role { process, route });
            }
        }
        let (time, folder) = (Timeline::start(), tempfile::tempdir().expect("a folder"));
        let addresses = roles[..ways.len()]
            .iter()
            .map(|role| role.process.url(""))
            .collect();
        let mut it = Self {
            time,
            patroni,
            roles,
            addresses: Arc::new(RwLock::new(addresses)),
            receivers: Receivers::start(time).await,
            journal: Journal::new(folder.path()).into(),
            endpoints: Vec::new(),
            spells: Mutex::default(),
            zombies: Mutex::default(),
            _folder: folder,
        };
        it.furnish().await;
        it
    }

    async fn furnish(&mut self) {
        for tenant in TENANTS {
            self.call("PUT", &format!("/tenants/{tenant}"), json!({})).await;
        }
        for name in TYPES {
            let schemas = json!({ "schemas": { "2026-01-15": { "type": "object" } } });
            self.call("PUT", &format!("/event-types/{name}"), schemas).await;
        }
        for (tenant, types, bulkhead, ordered) in [
            ("acme", "*", 4, false),
            ("acme", "order.*", 4, true),
            ("acme", "user.*", 2, false),
            ("beta", "*", 8, false),
            ("beta", "*", 2, true),
        ] {
            let (_, url) = self.receivers.open();
            let secret = new_secret();
            let body = json!({ "url": url, "types": [types], "concurrency": bulkhead, "timeout_ms": TIMEOUT_MS,
                               "ordered": ordered, "secret": secret, "retry_schedule": PATIENT });
            let made = self
                .call("POST", &format!("/tenants/{tenant}/endpoints"), body)
                .await;
            let now = self.time.now();
            self.endpoints.push(EndpointLife {
                id: made["id"].as_str().expect("an id").to_owned(),
                tenant,
                types,
                ordered,
                standard: false,
                bulkhead,
                made: (now, now),
                deleted: None,
                pauses: Vec::new(),
                secrets: vec![SecretLife {
                    secret,
                    asked: Moment::ZERO,
                    in_effect: Some(Moment::ZERO),
                    retires_unix: None,
                }],
            });
        }
    }

    async fn call(&self, method: &str, path: &str, body: Value) -> Value {
        let base = self.addresses.read().expect("not poisoned")[0].clone();
        let answer = http_client()
            .request(method.parse().expect("a method"), format!("{base}/v1{path}"))
            .bearer_auth(ADMIN_API_KEY)
            .header("content-type", "application/json")
            .timeout(RESPONSE_TIME_MAX)
            .body(body.to_string())
            .send()
            .await
            .expect("answered");
        let (status, text) = (answer.status(), answer.text().await.expect("a body"));
        assert!(status.is_success(), "{method} {path}: {status} {text}");
        serde_json::from_str(&text).unwrap_or_default()
    }

    /// By SQL through HAProxy, as an application would that has no list of hosts.
    fn producers(&self) -> Producers {
        Producers {
            time: self.time,
            journal: self.journal.clone(),
            database: self.patroni.options(self.patroni.primary_port),
            apis: self.addresses.clone(),
            tenants: &TENANTS,
            large_share: LARGE_SHARE,
            persistent: false,
            pause: Duration::from_millis(60),
            stop: CancellationToken::new(),
        }
    }

    /// Returns when the cluster is whole again.
    async fn strike(&self, number: usize, blow: Blow) {
        let old = self.patroni.whole().await;
        sleep(CALM).await;
        let from = self.time.now();
        let node = &self.patroni.nodes[old];
        match blow {
            Blow::SwitchOver => self.patroni.switch_over(old).await,
            Blow::KillPostgres => {
                node.kill_postgres();
                self.patroni.another_than(old).await;
            }
            Blow::KillNode => {
                node.kill_patroni();
                node.kill_postgres();
                self.patroni.another_than(old).await;
                self.patroni.start_patroni(node);
            }
            Blow::Zombie => self.freeze_and_wake(old).await,
            Blow::LoseEtcd => {
                self.patroni.signal_etcd(Signal::STOP);
                sleep(WITHOUT_ETCD).await;
                self.patroni.signal_etcd(Signal::CONT);
            }
        }
        let to = self.time.now();
        println!(
            "{number:3}. {:7.1} s  {} of node {}: {:.1} s",
            from.as_secs_f64(),
            blow.name(),
            node.name,
            (to - from).as_secs_f64()
        );
        self.spells.lock().expect("not poisoned").push(Spell {
            what: format!("{blow:?} of node {}", node.name),
            kind: blow.name(),
            harm: Harm::Outage,
            disturbs: true,
            from,
            to,
        });
    }

    async fn freeze_and_wake(&self, old: usize) {
        let node = &self.patroni.nodes[old];
        // The other way round Patroni would notice that its Postgres does not respond.
        node.signal_patroni(Signal::STOP);
        node.signal_postgres(Signal::STOP);
        self.patroni.another_than(old).await;
        node.signal_postgres(Signal::CONT);
        let asked = async {
            let mut tasks = tokio::task::JoinSet::new();
            for number in 0..4 {
                let options = self.patroni.options(node.port);
                let mark = format!("zombie-{}-{number}", self.time.now().as_micros());
                let (time, journal) = (self.time, self.journal.clone());
                tasks.spawn(
                    async move { emit_directly(time, &journal, &options, mark, ZOMBIE_ANSWER_MAX).await },
                );
            }
            tasks.join_all().await
        };
        let (outcomes, ()) = tokio::join!(asked, sleep(ZOMBIE));
        {
            let mut zombies = self.zombies.lock().expect("not poisoned");
            let reached = |outcome: &&Outcome| **outcome != Outcome::RolledBack;
            zombies.0 += outcomes.iter().filter(reached).count();
            zombies.1 += outcomes
                .iter()
                .filter(|outcome| **outcome == Outcome::Committed)
                .count();
        }
        node.signal_patroni(Signal::CONT);
    }

    async fn connect(&self) -> PgConnection {
        let options = self.patroni.options(self.patroni.primary_port);
        PgConnection::connect_with(&options).await.expect("connected")
    }

    /// Waits until nothing waits; answers what is left.
    async fn drained(&self) -> Result<(), String> {
        let waiting = async {
            loop {
                let mut connection = self.connect().await;
                let waiting: i64 = sqlx::query_scalar(
                    "select (select count(*) from postrider.queue) + (select count(*) from postrider.retries)",
                )
                .fetch_one(&mut connection)
                .await
                .expect("counted");
                connection.close().await.expect("closed");
                if waiting == 0 {
                    return;
                }
                sleep(Duration::from_millis(200)).await;
            }
        };
        timeout(DRAIN_MAX, waiting)
            .await
            .map_err(|_| format!("deliveries wait {DRAIN_MAX:?} after the last failover"))
    }

    async fn history(&mut self, undrained: Option<String>) -> History {
        let mut alarms = Vec::new();
        for role in &mut self.roles {
            let route = role.route;
            if !role.process.is_running() {
                alarms.push(format!("a process connected to {route} has ended"));
            }
            let heard = role.process.log_lines().into_iter();
            alarms.extend(heard.filter(|line| {
                let known = line.contains("duplicate key value");
                !known && ALARMS.iter().any(|alarm| line.contains(alarm))
            }));
        }
        let spells = self.spells.lock().expect("not poisoned").clone();
        let stored = stored(&mut self.connect().await, &self.endpoints).await;
        History {
            transactions: self.journal.read(),
            probes: Vec::new(),
            undrained,
            requests: self.receivers.requests(),
            spells,
            endpoints: self.endpoints.clone(),
            stored,
            alarms,
            loses_unacknowledged: true,
        }
    }

    async fn run(&mut self, blows: &[Blow], seed: u64) {
        let producers = self.producers();
        let emitting = producers.start(seed, 2, 2);
        for (number, blow) in blows.iter().enumerate() {
            self.strike(number + 1, *blow).await;
        }
        self.patroni.whole().await;
        sleep(CALM).await;
        producers.stop.cancel();
        emitting.join_all().await;
        let undrained = self.drained().await.err();
        let history = self.history(undrained).await;
        let judgement = judge(&history);
        let (asked, acknowledged) = *self.zombies.lock().expect("not poisoned");
        println!("{judgement}{}", gaps(&history));
        println!(
            "zombies     {asked} events reached an old primary that did not know it: {acknowledged} acknowledged"
        );
        let moved = blows.iter().filter(|blow| **blow != Blow::LoseEtcd).count();
        println!(
            "failover    {moved} changes of the primary, {} events acknowledged, {} lost, {} invented",
            judgement.figures.committed,
            judgement.figures.lost,
            judgement
                .violations
                .iter()
                .filter(|violation| violation.rule == crate::checker::Rule::Phantom)
                .count()
        );
        if let Err(text) = self.save(&history, &judgement.violations) {
            println!("the report was not written: {text}");
        }
        assert_eq!(acknowledged, 0, "an old primary has acknowledged what is lost");
        assert!(
            judgement.violations.is_empty(),
            "seed {seed} breaks {:?}",
            judgement.broken()
        );
    }

    /// What was done, what broke, and what the processes logged.
    fn save(&self, history: &History, violations: &[crate::checker::Violation]) -> std::io::Result<()> {
        let mut text = String::new();
        for spell in &history.spells {
            let (from, to) = (spell.from.as_secs_f64(), spell.to.as_secs_f64());
            let _ = writeln!(text, "{from:8.3} – {to:8.3} s  {}", spell.what);
        }
        for violation in violations {
            let _ = writeln!(text, "{:?}: {}", violation.rule, violation.words);
        }
        for role in &self.roles {
            let _ = writeln!(text, "\nconnected to {}:", role.route);
            for line in role.process.log_lines() {
                let _ = writeln!(text, "{line}");
            }
        }
        text.push_str(&self.patroni.logs());
        let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("failover.txt");
        std::fs::write(&file, text)
    }
}

fn launch(role: &'static str, url: &str) -> Launch {
    let address = match role {
        "dispatcher" => "POSTRIDER_METRICS_LISTEN",
        _ => "POSTRIDER_LISTEN",
    };
    Launch::new(role)
        .set("POSTRIDER_DATABASE_URL", url)
        .set(address, "127.0.0.1:0")
        .set("POSTRIDER_MASTER_KEY", MASTER_KEY)
        .set("POSTRIDER_ADMIN_API_KEY", ADMIN_API_KEY)
        .set("POSTRIDER_ADMIN_PASSWORD", ADMIN_PASSWORD)
        .set("POSTRIDER_ALLOW_NETWORKS", "127.0.0.0/8")
        .set("POSTRIDER_ALLOW_HTTP", "true")
        .set("POSTRIDER_RETRY_JITTER", "0")
        .set("POSTRIDER_DRAIN_DELAY", "0s")
}

/// The longest time without an accepted delivery, of each kind of blow and outside of all.
fn gaps(history: &History) -> String {
    let accepted = |request: &&Request| request.status.is_some_and(|status| status / 100 == 2);
    let mut at: Vec<Moment> = history
        .requests
        .iter()
        .filter(accepted)
        .map(|r| r.ended)
        .collect();
    at.sort_unstable();
    let mut longest: BTreeMap<&str, Vec<Duration>> = BTreeMap::new();
    for spell in &history.spells {
        // A gap that begins during the blow or just before it.
        let begins = |pair: &&[Moment]| pair[1] >= spell.from && pair[0] <= spell.to;
        let gap = at.windows(2).filter(begins).map(|pair| pair[1] - pair[0]).max();
        longest.entry(spell.kind).or_default().extend(gap);
    }
    let mut text = String::new();
    for (kind, mut gaps) in longest {
        gaps.sort_unstable();
        if let (Some(longest), Some(median)) = (gaps.last(), gaps.get(gaps.len() / 2)) {
            let (median, longest) = (median.as_secs_f64(), longest.as_secs_f64());
            let _ = writeln!(
                text,
                "gap         {kind}: {} times, median {median:.1} s without a delivery, longest {longest:.1} s",
                gaps.len()
            );
        }
    }
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: make failover"]
async fn nothing_acknowledged_is_lost_however_often_the_primary_changes() {
    let _alone = alone().await;
    let missing = missing_programs();
    assert!(
        missing.is_empty(),
        "not installed: {}; make failover installs it",
        missing.join(", ")
    );
    let seed = number("POSTRIDER_FAILOVER_SEED", SEED);
    let rounds = number("POSTRIDER_FAILOVER_ROUNDS", ROUNDS);
    let mut dice = StdRng::seed_from_u64(seed);
    let mut blows = Vec::new();
    for _ in 0..rounds {
        let mut round = ROUND;
        for last in (1..round.len()).rev() {
            round.swap(last, dice.random_range(0..=last));
        }
        blows.extend(round);
    }
    blows.push(Blow::LoseEtcd);
    println!("seed {seed}: {} blows", blows.len());
    Failover::start().await.run(&blows, seed).await;
}
