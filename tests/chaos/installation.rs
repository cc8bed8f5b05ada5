//! A whole installation: a database on a disk of its own, dispatchers and APIs as processes, each behind a proxy,
//! receivers and endpoints. Whatever dies is started again, as a supervisor would.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, LazyLock, Mutex, RwLock},
    time::Duration,
};

use rustix::process::Signal;
use serde_json::{Value, json};
use sqlx::{PgConnection, Row, postgres::PgConnectOptions};
use tempfile::TempDir;
use tokio::sync::Mutex as AsyncMutex;

use crate::{
    bad_tenants::{BadReceiver, Ground},
    history::{
        EndpointLife, Harm, History, Moment, SecretLife, Spell, Stored, StoredAttempt, StoredDelivery,
        Timeline,
    },
    machine::{SmallDisk, skewed_clock},
    plan::{APIS, DISPATCHERS, Fault, GUESTS, Target, VISITED},
    pooler::Pooler,
    producers::{Journal, STEADY, STEADY_TYPES, Steady, TENANTS, TYPES, VISITORS},
    proxy::Proxy,
    receivers::{Mood, Receivers},
    support::{Database, Launch, Postrider, until},
};

/// Enough for every fault of a plan to end within it.
pub(crate) const PATIENT: &[&str] = &[
    "0s", "200ms", "400ms", "800ms", "1s", "1s", "1s", "1s", "2s", "2s", "2s", "2s", "2s", "2s", "2s", "2s",
    "2s", "2s", "2s", "2s", "2s", "2s", "2s", "2s", "2s", "2s", "2s", "2s", "2s", "2s", "2s", "2s", "2s",
    "2s", "2s", "2s", "2s", "2s", "2s", "2s",
];
const IMPATIENT: &[&str] = &["0s", "300ms", "500ms"];
const TIMEOUT_MS: u64 = 2_000;
/// The write-ahead log must fit a small disk.
const SERVER: &str = "max_wal_size = '160MB'\nmin_wal_size = '64MB'\nwal_recycle = off\n";
const SKEW_SECONDS: i64 = -420;
/// How long the steady tenant's slow receiver takes: its lane is a slow one.
const SLOW: Duration = Duration::from_millis(1_200);
const STEADY_ENDPOINTS: usize = 12;
/// Events that the dry runs of a bad tenant look through.
const LOOKED_THROUGH: i32 = 20_000;
const BAD_TIMEOUT: Duration = Duration::from_secs(10);
/// An API that takes longer counts as unavailable.
const RESPONSE_TIME_MAX: Duration = Duration::from_secs(15);
/// Every process has a pool, and so has PgBouncer.
const WHOLE_SERVER: &str =
    "max_wal_size = '160MB'\nmin_wal_size = '64MB'\nwal_recycle = off\nmax_connections = 400\n";
/// What nobody should ever read in a log.
pub(crate) const ALARMS: [&str; 4] = [
    "the tail had missed",
    "panicked at",
    "the database rejected a result",
    // Answered with 500, not 503.
    "\"passes\":false",
];

/// One process and the way it reaches the database.
pub(crate) struct Slot {
    launch: Launch,
    pub(crate) proxy: Proxy,
    /// None while it is down.
    pub(crate) running: AsyncMutex<Option<Postrider>>,
    alarms: Mutex<Vec<String>>,
}

impl Slot {
    fn new(launch: Launch, proxy: Proxy) -> Self {
        Self {
            launch,
            proxy,
            running: AsyncMutex::new(None),
            alarms: Mutex::default(),
        }
    }

    /// Reads the log of one that is about to go.
    fn listen_for_alarms(&self, process: &Postrider) {
        let heard = process.log_lines().into_iter().filter(|line| {
            // The number of an attempt that was recorded before, unheard, is taken: that is how it is found out.
            let known = line.contains("duplicate key value");
            !known && ALARMS.iter().any(|alarm| line.contains(alarm))
        });
        self.alarms.lock().expect("not poisoned").extend(heard);
    }

    pub(crate) fn ended(&self, process: Postrider) {
        self.listen_for_alarms(&process);
    }

    /// Tries until it runs: a database that is away lets none start.
    pub(crate) async fn start(&self, running: &mut Option<Postrider>) {
        while running.is_none() {
            *running = self.launch.clone().spawn().await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

pub(crate) struct Installation {
    pub(crate) time: Timeline,
    pub(crate) database: Database,
    pub(crate) disk: Option<SmallDisk>,
    pub(crate) dispatchers: Vec<Slot>,
    /// Dispatchers that come and go; none runs at the start.
    pub(crate) guests: Vec<Slot>,
    pub(crate) apis: Vec<Slot>,
    pub(crate) producers_proxy: Proxy,
    pub(crate) addresses: Arc<RwLock<Vec<String>>>,
    pub(crate) receivers: Receivers,
    pub(crate) endpoints: Mutex<Vec<EndpointLife>>,
    /// Endpoints whose settings are being changed: one change of each at a time.
    pub(crate) changing: Mutex<HashSet<usize>>,
    pub(crate) spells: Mutex<Vec<Spell>>,
    /// One thing at a time is done to the database server.
    pub(crate) server: AsyncMutex<()>,
    pub(crate) journal: Arc<Journal>,
    /// Of bad tenants that behave by now: they are there until the end.
    pub(crate) reformed: Mutex<Vec<BadReceiver>>,
    pub(crate) undrained: Mutex<Option<String>>,
    steady: Mutex<Option<Steady>>,
    _pooler: Option<Pooler>,
    _folder: TempDir,
}

/// What there is beside dispatchers, APIs and the tenants that faults are made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extent {
    Small,
    /// An API behind PgBouncer, dispatchers that come and go, a steady tenant and one of visitors.
    Whole,
}

/// One client for every call, because building one costs as much CPU as dozens of calls and the machine under test shares it.
/// It keeps no idle connections: those would belong to the runtime of the test that opened them.
pub(crate) fn http_client() -> &'static reqwest::Client {
    static CLIENT: LazyLock<reqwest::Client> = LazyLock::new(|| {
        let client = crate::support::http_client().timeout(RESPONSE_TIME_MAX);
        client.pool_max_idle_per_host(0).build().expect("a client")
    });
    &CLIENT
}

impl Installation {
    pub(crate) async fn start(disk_megabytes: Option<u32>) -> Arc<Self> {
        Self::start_with(disk_megabytes, SERVER).await
    }

    /// With everything that there is.
    pub(crate) async fn start_whole(disk_megabytes: Option<u32>) -> Arc<Self> {
        Self::build(disk_megabytes, WHOLE_SERVER, Extent::Whole).await
    }

    /// With these lines in the server's configuration.
    pub(crate) async fn start_with(disk_megabytes: Option<u32>, server: &'static str) -> Arc<Self> {
        Self::build(disk_megabytes, server, Extent::Small).await
    }

    async fn build(disk_megabytes: Option<u32>, server: &'static str, extent: Extent) -> Arc<Self> {
        let folder = tempfile::tempdir().expect("a folder");
        let disk = disk_megabytes.and_then(SmallDisk::mount);
        if disk_megabytes.is_some() && disk.is_none() {
            eprintln!("SKIPPED: nothing may be mounted here, so that the disk is never full");
        }
        let below = disk
            .as_ref()
            .map_or_else(std::env::temp_dir, |disk| disk.folder().to_owned());
        let database = Database::on_private_server_in(below, server).await;
        let clock = skewed_clock(folder.path());
        if clock.is_none() {
            eprintln!("SKIPPED: no C compiler, so that no dispatcher's clock is wrong");
        }
        let proxy = || Proxy::start(database.socket());
        let mut dispatchers = Vec::new();
        for number in 0..DISPATCHERS {
            let proxy = proxy().await;
            let mut launch = launch("dispatcher", &database, &proxy);
            if let (0, Some(clock)) = (number, &clock) {
                launch = launch
                    .set("LD_PRELOAD", clock.display())
                    .set("SKEW_SECONDS", SKEW_SECONDS);
            }
            dispatchers.push(Slot::new(launch, proxy));
        }
        let mut apis = Vec::new();
        for _ in 0..APIS {
            let proxy = proxy().await;
            apis.push(Slot::new(launch("dashboard", &database, &proxy), proxy));
        }
        let (mut guests, mut pooler) = (Vec::new(), None);
        if extent == Extent::Whole {
            for _ in 0..GUESTS {
                let proxy = proxy().await;
                guests.push(Slot::new(launch("dispatcher", &database, &proxy), proxy));
            }
            let proxy = proxy().await;
            pooler = Pooler::start(&proxy).await;
            let mut api = launch("dashboard", &database, &proxy);
            match &pooler {
                Some(pooler) => api = api.set("POSTRIDER_DATABASE_URL", pooler.url(&database)),
                None => eprintln!("SKIPPED: PgBouncer is not installed, so that no API is behind it"),
            }
            apis.push(Slot::new(api, proxy));
        }
        let time = Timeline::start();
        let installation = Self {
            time,
            producers_proxy: proxy().await,
            disk,
            dispatchers,
            guests,
            addresses: Arc::new(RwLock::new(vec![String::new(); apis.len()])),
            apis,
            receivers: Receivers::start(time).await,
            endpoints: Mutex::default(),
            changing: Mutex::default(),
            spells: Mutex::default(),
            server: AsyncMutex::new(()),
            journal: Arc::new(Journal::new(folder.path())),
            reformed: Mutex::default(),
            undrained: Mutex::default(),
            steady: Mutex::default(),
            _pooler: pooler,
            _folder: folder,
            database,
        };
        for number in 0..installation.apis.len() {
            installation.start_process(Target::Api(number)).await;
        }
        for number in 0..DISPATCHERS {
            installation.start_process(Target::Dispatcher(number)).await;
        }
        installation.furnish().await;
        if extent == Extent::Whole {
            installation.furnish_the_rest().await;
        }
        Arc::new(installation)
    }

    pub(crate) fn slot(&self, target: Target) -> Option<&Slot> {
        match target {
            Target::Dispatcher(number) => Some(&self.dispatchers[number]),
            Target::Api(number) => Some(&self.apis[number]),
            Target::Producers => None,
        }
    }

    pub(crate) fn proxy(&self, target: Target) -> &Proxy {
        self.slot(target)
            .map_or(&self.producers_proxy, |slot| &slot.proxy)
    }

    pub(crate) async fn start_process(&self, target: Target) {
        if let Some(slot) = self.slot(target) {
            let mut running = slot.running.lock().await;
            self.start_in(target, slot, &mut running).await;
        }
    }

    pub(crate) async fn start_in(&self, target: Target, slot: &Slot, running: &mut Option<Postrider>) {
        slot.start(running).await;
        if let (Target::Api(number), Some(process)) = (target, running) {
            self.addresses.write().expect("not poisoned")[number] = process.url("");
        }
    }

    pub(crate) fn producers_options(&self) -> PgConnectOptions {
        PgConnectOptions::new_without_pgpass()
            .host("127.0.0.1")
            .port(self.producers_proxy.address().port())
            .username("postrider")
            .database(self.database.name())
            .ssl_mode(sqlx::postgres::PgSslMode::Disable)
    }

    /// Tenants, types and the endpoints that are there from the start.
    async fn furnish(&self) {
        for tenant in TENANTS {
            self.call("PUT", &format!("/tenants/{tenant}"), json!({})).await;
        }
        for name in TYPES {
            let schemas = json!({ "schemas": { "2026-01-15": { "type": "object" } } });
            self.call("PUT", &format!("/event-types/{name}"), schemas).await;
        }
        for (tenant, types, bulkhead, more) in [
            ("acme", "*", 4, json!({ "retry_schedule": PATIENT })),
            (
                "acme",
                "order.*",
                4,
                json!({ "retry_schedule": PATIENT, "ordered": true }),
            ),
            (
                "acme",
                "*",
                2,
                json!({ "retry_schedule": PATIENT, "signature": "standard" }),
            ),
            ("acme", "user.*", 3, json!({ "retry_schedule": IMPATIENT })),
            ("beta", "*", 8, json!({ "retry_schedule": PATIENT })),
            (
                "beta",
                "*",
                2,
                json!({ "retry_schedule": PATIENT, "ordered": true }),
            ),
        ] {
            let (_, made) = self.endpoint(tenant, types, bulkhead, more).await;
            assert!(made, "an endpoint is made before anything happens");
        }
    }

    /// The steady tenant, whose receivers are always well, and the tenant of endpoints that come and go.
    async fn furnish_the_rest(&self) {
        for tenant in [STEADY, VISITORS] {
            self.call("PUT", &format!("/tenants/{tenant}"), json!({})).await;
        }
        for name in STEADY_TYPES.iter().chain(&VISITED) {
            let schemas = json!({ "schemas": { "2026-01-15": { "type": "object" } } });
            self.call("PUT", &format!("/event-types/{name}"), schemas).await;
        }
        // Several of each, so that every dispatcher has one of them.
        let mut steady = Steady {
            quick: Vec::new(),
            slow: Vec::new(),
            quick_id: String::new(),
            database: self.database.options(),
        };
        for number in 0..STEADY_ENDPOINTS {
            let quick = number % 2 == 0;
            let type_name = STEADY_TYPES[usize::from(!quick)];
            let patient = json!({ "retry_schedule": PATIENT });
            let (place, made) = self.endpoint(STEADY, type_name, 16, patient).await;
            assert!(made, "an endpoint is made before anything happens");
            let time = if quick { Duration::ZERO } else { SLOW };
            self.receivers.set(place, Mood::Takes(time));
            if quick {
                steady.quick.push(place);
            } else {
                steady.slow.push(place);
            }
        }
        let endpoints = self.endpoints.lock().expect("not poisoned");
        steady.quick_id.clone_from(&endpoints[steady.quick[0]].id);
        *self.steady.lock().expect("not poisoned") = Some(steady);
    }

    pub(crate) fn steady(&self) -> Option<Steady> {
        self.steady.lock().expect("not poisoned").clone()
    }

    /// Where bad tenants are let loose.
    pub(crate) fn ground(&self) -> Ground {
        Ground {
            apis: self.addresses.clone(),
            database: self.database.options(),
            dispatchers: DISPATCHERS,
            looked_through: LOOKED_THROUGH,
            timeout: BAD_TIMEOUT,
        }
    }

    /// Its place, and whether it is certain that the endpoint was made.
    pub(crate) async fn endpoint(
        &self,
        tenant: &'static str,
        types: &'static str,
        bulkhead: usize,
        more: Value,
    ) -> (usize, bool) {
        let (place, url) = self.receivers.open();
        // Our own: the answer may be lost, and it signs all the same.
        let secret = new_secret();
        let mut body = json!({ "url": url, "types": [types], "concurrency": bulkhead, "timeout_ms": TIMEOUT_MS,
                               "secret": secret });
        if let (Value::Object(body), Value::Object(more)) = (&mut body, more.clone()) {
            body.extend(more);
        }
        let asked = self.time.now();
        let made = self
            .call("POST", &format!("/tenants/{tenant}/endpoints"), body)
            .await;
        let answered = self.time.now();
        let known = made.is_some();
        let id = made.unwrap_or_default()["id"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let life = EndpointLife {
            id,
            tenant,
            types,
            ordered: more["ordered"] == true,
            standard: more["signature"] == "standard",
            bulkhead,
            made: (asked, if known { answered } else { Moment::MAX }),
            deleted: None,
            pauses: Vec::new(),
            secrets: vec![SecretLife {
                secret,
                asked,
                in_effect: Some(answered),
                retires_unix: None,
            }],
        };
        let mut endpoints = self.endpoints.lock().expect("not poisoned");
        // Two may be made at once, and their receivers' places are taken in another order.
        if endpoints.len() <= place {
            endpoints.resize(place + 1, life.clone());
        }
        endpoints[place] = life;
        (place, known)
    }

    /// Endpoints whose making was never answered may be there all the same.
    async fn find_unanswered(&self) {
        let mut connection = self.database.connect().await;
        let rows = sqlx::query("select public_id, url from postrider.endpoints")
            .fetch_all(&mut connection)
            .await
            .expect("endpoints");
        let mut endpoints = self.endpoints.lock().expect("not poisoned");
        for row in rows {
            let place = row
                .get::<&str, _>(1)
                .rsplit('/')
                .next()
                .and_then(|n| n.parse::<usize>().ok());
            if let Some(life) = place.and_then(|place| endpoints.get_mut(place)) {
                life.id = row.get(0);
            }
        }
    }

    /// The answer to a call that was obeyed. An API that is down or frozen, or a database that is away, answers nothing.
    pub(crate) async fn call(&self, method: &str, path: &str, body: Value) -> Option<Value> {
        self.call_once(method, path, None, body).await
    }

    /// Under one `Idempotency-Key` until it is known to be done, as a caller who got no answer should.
    pub(crate) async fn call_until_known(&self, path: &str, body: Value, most: Duration) -> Option<Value> {
        let key = uuid::Uuid::new_v4().to_string();
        let repeated = async {
            loop {
                if let Some(answer) = self.call_once("POST", path, Some(&key), body.clone()).await {
                    return answer;
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        };
        tokio::time::timeout(most, repeated).await.ok()
    }

    async fn call_once(&self, method: &str, path: &str, key: Option<&str>, body: Value) -> Option<Value> {
        let bases = self.addresses.read().expect("not poisoned").clone();
        let base = &bases[(self.time.now().as_micros() % bases.len() as u128) as usize];
        let method: reqwest::Method = method.parse().expect("a method");
        let mut request = http_client()
            .request(method, format!("{base}/v1{path}"))
            .bearer_auth(crate::support::ADMIN_API_KEY)
            .header("content-type", "application/json");
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        let answer = request.body(body.to_string()).send().await.ok()?;
        let obeyed = answer.status().is_success();
        let text = answer.text().await.ok()?;
        obeyed.then(|| serde_json::from_str(&text).unwrap_or_default())
    }

    pub(crate) fn note(&self, fault: &Fault, harm: Harm, from: Moment) {
        let to = self.time.now();
        let spell = Spell {
            what: format!("{fault:?}"),
            kind: fault.kind(),
            disturbs: fault.disturbs(),
            harm,
            from,
            to,
        };
        self.spells.lock().expect("not poisoned").push(spell);
    }

    /// Everything runs, nothing is held up: as the plan leaves it, made sure of.
    pub(crate) async fn heal(&self) {
        if let Some(disk) = &self.disk {
            disk.empty();
        }
        self.receivers.come_back().await;
        let _ = self.database.start_server().await;
        let targets = (0..DISPATCHERS).map(Target::Dispatcher);
        for target in targets.chain((0..self.apis.len()).map(Target::Api)) {
            if let Some(slot) = self.slot(target) {
                let mut running = slot.running.lock().await;
                if let Some(process) = running.as_mut() {
                    if process.is_running() {
                        process.signal(Signal::CONT);
                    } else if let Some(ended) = running.take() {
                        slot.ended(ended);
                    }
                }
                self.start_in(target, slot, &mut running).await;
            }
        }
        let count = self.endpoints.lock().expect("not poisoned").len();
        for number in 0..count {
            self.resume(number).await;
        }
    }

    /// Until it is certain that the endpoint is not paused.
    pub(crate) async fn resume(&self, number: usize) {
        let (tenant, id, deleted) = {
            let endpoints = self.endpoints.lock().expect("not poisoned");
            let life = &endpoints[number];
            (life.tenant, life.id.clone(), life.deleted.is_some())
        };
        if deleted || id.is_empty() {
            return;
        }
        let path = format!("/tenants/{tenant}/endpoints/{id}");
        until("the endpoint goes on", || async {
            self.call("PATCH", &path, json!({ "enabled": true })).await
        })
        .await;
    }

    /// Waits until nothing waits, as long as it gets less or nothing is due; answers how long that took, or what is left.
    pub(crate) async fn drained(&self, patience: Duration) -> Result<Duration, String> {
        let began = self.time.now();
        let (mut least, mut came, mut moved) = (i64::MAX, 0, began);
        loop {
            let waiting = self
                .database
                .count(
                    "select (select count(*) from postrider.queue) + (select count(*) from postrider.retries)
                          + (select count(*) from postrider.replays where state = 'running')",
                )
                .await;
            let due = self
                .database
                .count(
                    "select (select count(*) from postrider.queue)
                          + (select count(*) from postrider.retries where due_at <= clock_timestamp())
                          + (select count(*) from postrider.replays where state = 'running')",
                )
                .await;
            let now = self.time.now();
            if waiting == 0 {
                return Ok(now - began);
            }
            let count = self.receivers.count();
            if waiting < least || count > came || due == 0 {
                (least, came, moved) = (waiting.min(least), count, now);
            }
            if now - moved > patience || now - began > patience * 10 {
                return Err(format!("{waiting} deliveries wait:\n{}", self.what_waits().await));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// A line for each endpoint that has deliveries waiting.
    async fn what_waits(&self) -> String {
        let rows: Vec<(String,)> = sqlx::query_as(
            "select format('%s %s: %s in the queue, %s to retry, due from %s to %s, up to attempt %s', e.public_id, e.state,
                           count(*) filter (where q.due_at is null), count(q.due_at), min(q.due_at), max(q.due_at), max(q.attempt))
             from (select endpoint_id, attempt, null::timestamptz as due_at from postrider.queue
                   union all select endpoint_id, attempt, due_at from postrider.retries) q
             join postrider.endpoints e on e.id = q.endpoint_id group by e.id order by e.id",
        )
        .fetch_all(&mut self.database.connect().await)
        .await
        .expect("read");
        rows.into_iter().map(|(line,)| line + "\n").collect()
    }

    /// Another database of the same server.
    pub(crate) async fn connect_to(&self, database: &str) -> PgConnection {
        let options = self.database.options().database(database);
        <PgConnection as sqlx::Connection>::connect_with(&options)
            .await
            .expect("connected")
    }

    pub(crate) async fn history(&self) -> History {
        let mut alarms = Vec::new();
        for slot in self.dispatchers.iter().chain(&self.guests).chain(&self.apis) {
            if let Some(process) = slot.running.lock().await.as_ref() {
                slot.listen_for_alarms(process);
            }
            alarms.append(&mut slot.alarms.lock().expect("not poisoned"));
        }
        self.find_unanswered().await;
        let endpoints = self.endpoints.lock().expect("not poisoned").clone();
        let stored = stored(&mut self.database.connect().await, &endpoints).await;
        History {
            transactions: self.journal.read(),
            probes: self.journal.probes(),
            undrained: self.undrained.lock().expect("not poisoned").clone(),
            requests: self.receivers.requests(),
            spells: self.spells.lock().expect("not poisoned").clone(),
            endpoints,
            stored,
            alarms,
            loses_unacknowledged: false,
        }
    }
}

pub(crate) fn new_secret() -> String {
    let bytes: [u8; 32] = rand::random();
    format!("whsec_{}", data_encoding::BASE64.encode(&bytes))
}

/// A program that belongs to the server, beside its `psql`.
pub(crate) fn server_program(database: &Database, name: &str) -> std::process::Command {
    let psql = database.cluster().psql();
    std::process::Command::new(psql.with_file_name(name))
}

fn launch(role: &'static str, database: &Database, proxy: &Proxy) -> Launch {
    let url = format!(
        "postgresql://postrider@{}/{}?sslmode=disable",
        proxy.address(),
        database.name()
    );
    Postrider::on_database(role, database).set("POSTRIDER_DATABASE_URL", url)
}

pub(crate) async fn stored(connection: &mut PgConnection, endpoints: &[EndpointLife]) -> Stored {
    let places: HashMap<&str, usize> = endpoints
        .iter()
        .enumerate()
        .map(|(place, life)| (life.id.as_str(), place))
        .collect();
    let mut stored = Stored::default();
    let mut marks: HashMap<uuid::Uuid, String> = HashMap::new();
    // What the bad tenants sent is large, and is judged by whether anything of it is left over.
    let events = sqlx::query(
        "select e.id, e.body from postrider.events e join postrider.tenants t on t.id = e.tenant_id
         where t.slug not like 'bad-%'",
    )
    .fetch_all(&mut *connection)
    .await
    .expect("events");
    for row in events {
        let body: Vec<u8> = row.get(1);
        let event: Value = serde_json::from_slice(&body).expect("a stored body is JSON");
        let mark = event["data"]["mark"].as_str().unwrap_or_default().to_owned();
        marks.insert(row.get(0), mark.clone());
        // Operational events have none.
        let again = stored.bodies.insert(mark.clone(), body).is_some();
        if again && !mark.is_empty() {
            *stored.copies.entry(mark).or_insert(1) += 1;
        }
    }
    let rows = sqlx::query(
        "select d.event_id, e.public_id, d.place, d.number, d.status, d.signature, d.final, d.replay
         from (select event_id, endpoint_id, 'queue' as place, null::smallint as number, null::smallint as status,
                      null as signature, null as final, replay_id is not null as replay from postrider.queue
               union all select event_id, endpoint_id, 'retries', null, null, null, null, replay_id is not null from postrider.retries
               union all select event_id, endpoint_id, 'dead', null, null, null, null, false from postrider.dead_letters
               union all select event_id, endpoint_id, 'attempt', number, status, signature, final::text, replay_id is not null
                         from postrider.attempts) d
         join postrider.endpoints e on e.id = d.endpoint_id
         join postrider.tenants t on t.id = e.tenant_id and t.slug not like 'bad-%'",
    )
    .fetch_all(&mut *connection)
    .await
    .expect("deliveries");
    for row in rows {
        let mark = marks
            .get(&row.get::<uuid::Uuid, _>(0))
            .cloned()
            .unwrap_or_default();
        let Some(place) = places.get(row.get::<&str, _>(1)) else {
            continue;
        };
        let delivery: &mut StoredDelivery = stored.deliveries.entry((mark, *place)).or_default();
        match row.get::<&str, _>(2) {
            "queue" => delivery.queued = true,
            "retries" => delivery.waiting = true,
            "dead" => delivery.dead_letter = true,
            _ => {
                delivery.replays += usize::from(row.get::<bool, _>(7));
                delivery.attempts.push(StoredAttempt {
                    number: row.get(3),
                    status: row.get::<Option<i16>, _>(4).map(|status| status as u16),
                    signature: row.get(5),
                    ended: row.get(6),
                });
            }
        }
    }
    stored.unfinished_replays = sqlx::query_scalar(
        "select format('replay %s of %s: %s, %s of %s put in line, %s passed over', r.public_id, r.kind, r.state,
                       sum(p.moved), sum(p.total), sum(p.skipped))
         from postrider.replays r left join postrider.replay_parts p on p.replay_id = r.id
         group by r.id having r.state = 'running' or (r.state = 'done' and sum(p.moved + p.skipped) <> sum(p.total))",
    )
    .fetch_all(connection)
    .await
    .expect("replays");
    stored
}
