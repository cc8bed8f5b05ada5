//! `make cells`: home and two cells, each with a Postgres and a dispatcher of its own, and 200 tenants that live in one of them.
//! Producers emit at home by SQL, a tenth of it rolled back, and by HTTP. What dies is started again, as a supervisor would.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, RwLock},
    time::Duration,
};

use postrider_dispatcher::vault::{Owner, Purpose, Vault};
use postrider_proto::{EndpointId, TenantId};
use rustix::process::{Pid, Signal, kill_process};
use sqlx::PgConnection;
use tempfile::TempDir;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::{
    checker::{Judgement, judge},
    history::{EndpointLife, Harm, History, Moment, SecretLife, Spell, Stored, Timeline},
    installation::{ALARMS, new_secret, stored},
    producers::{Journal, Producers, TYPES},
    receivers::Receivers,
    runs::{alone, number},
    support::{Database, Launch, MASTER_KEY, Postrider, until},
};

/// Every process has a pool, and each cell a walsender.
pub(crate) const SERVER: &str = "wal_level = logical
max_wal_senders = 20
max_replication_slots = 20
max_worker_processes = 24
max_connections = 300
max_wal_size = '512MB'
";
const CELL_NAMES: [&str; 4] = ["a", "b", "c", "d"];
const TENANTS: usize = 200;
const APIS: usize = 2;
const EVENTS: u64 = 100_000;
/// Everything is killed at least so many times.
const ROUNDS_LEAST: usize = 2;
const SEED: u64 = 21;
/// Between two kills: the killed one has started again and caught up.
const CALM: Duration = Duration::from_secs(3);
const DOWN: Duration = Duration::from_millis(500);
const DRAIN_MAX: Duration = Duration::from_secs(120);
const TIMEOUT_MS: i32 = 2_000;
const BULKHEAD: usize = 4;
/// In milliseconds, as `PATIENT` of the other runs.
fn patient() -> Vec<i32> {
    let mut delays = vec![0, 200, 400, 800];
    delays.extend([1_000; 4]);
    delays.extend([2_000; 32]);
    delays
}

/// A process that can be killed.
pub(crate) struct Part {
    launch: Launch,
    running: Option<Postrider>,
    alarms: Vec<String>,
}

impl Part {
    pub(crate) fn new(launch: Launch) -> Self {
        Self {
            launch,
            running: None,
            alarms: Vec::new(),
        }
    }

    fn listen(&mut self) {
        let Some(process) = &self.running else { return };
        let heard = process.log_lines().into_iter().filter(|line| {
            let known = line.contains("duplicate key value");
            !known && ALARMS.iter().any(|alarm| line.contains(alarm))
        });
        self.alarms.extend(heard);
    }

    pub(crate) fn kill(&mut self) {
        self.listen();
        if let Some(mut process) = self.running.take() {
            process.kill();
        }
    }

    pub(crate) async fn start(&mut self) {
        while self.running.is_none() {
            self.running = self.launch.clone().spawn().await;
            sleep(Duration::from_millis(100)).await;
        }
    }
}

/// Home is the first.
pub(crate) struct Cell {
    pub(crate) name: &'static str,
    pub(crate) database: Database,
    pub(crate) dispatcher: Part,
}

pub(crate) struct Cells {
    pub(crate) time: Timeline,
    pub(crate) cells: Vec<Cell>,
    pub(crate) apis: Vec<Part>,
    pub(crate) addresses: Arc<RwLock<Vec<String>>>,
    pub(crate) receivers: Receivers,
    pub(crate) journal: Arc<Journal>,
    pub(crate) endpoints: Vec<EndpointLife>,
    pub(crate) tenants: &'static [&'static str],
    spells: Mutex<Vec<Spell>>,
    _folder: TempDir,
}

/// With `role` as its arguments.
fn launch(role: &'static str, database: &Database, home: &Database) -> Launch {
    let launch = Postrider::on_database(role, database);
    match database.url() == home.url() {
        true => launch,
        false => launch.set("POSTRIDER_HOME_DATABASE_URL", home.url()),
    }
}

fn commands(name: &str) -> &'static str {
    ["cells add a", "cells add b", "cells add c", "cells add d"]
        .into_iter()
        .find(|command| command.ends_with(name))
        .expect("a command")
}

/// kill -9 of the server; what it leaves behind ends by itself.
pub(crate) fn kill_postgres(database: &Database) {
    let pid = database.cluster().pid().expect("it runs");
    let pid = Pid::from_raw(i32::try_from(pid).expect("a pid")).expect("a pid");
    kill_process(pid, Signal::KILL).expect("killed");
}

pub(crate) async fn start_postgres(database: &Database) {
    until("Postgres has started again", || async {
        let started = database.start_server().await;
        if !started {
            sleep(Duration::from_millis(200)).await;
        }
        started.then_some(())
    })
    .await;
}

impl Cells {
    /// Home and so many cells, without tenants. Nothing runs but the databases.
    pub(crate) async fn empty(count: usize) -> Self {
        let mut cells = Vec::new();
        for name in ["home"].iter().chain(&CELL_NAMES[..count]) {
            let database = Database::on_private_server_in(std::env::temp_dir(), SERVER).await;
            let home = cells.first().map_or(&database, |home: &Cell| &home.database);
            let dispatcher = Part::new(launch("dispatcher", &database, home));
            cells.push(Cell {
                name,
                database,
                dispatcher,
            });
        }
        let home = &cells[0].database;
        home.execute_here_as_superuser("alter role postrider replication")
            .await;
        for cell in &cells[1..] {
            let added = Postrider::on_database(commands(cell.name), home)
                .set("POSTRIDER_CELL_DATABASE_URL", cell.database.url())
                .set("POSTRIDER_CELL_SUPERUSER_URL", cell.database.url_as("postgres"))
                .set("POSTRIDER_REPLICATION_URL", home.url_as("postgres"))
                .output();
            let said = [added.stdout, added.stderr].concat();
            assert!(added.status.success(), "{}", String::from_utf8_lossy(&said));
        }
        let (time, folder) = (Timeline::start(), tempfile::tempdir().expect("a folder"));
        let apis: Vec<Part> = (0..APIS)
            .map(|_| Part::new(launch("dashboard", home, home)))
            .collect();
        Self {
            time,
            addresses: Arc::new(RwLock::new(vec![String::new(); apis.len()])),
            apis,
            cells,
            receivers: Receivers::start(time).await,
            journal: Journal::new(folder.path()).into(),
            endpoints: Vec::new(),
            tenants: &[],
            spells: Mutex::default(),
            _folder: folder,
        }
    }

    pub(crate) async fn types(&self, names: &[&str]) {
        for name in names {
            let parts: Vec<&str> = name.split('.').collect();
            let matches = format!("{{*,{}.*,{name}}}", parts[0]);
            self.home()
                .execute(&format!(
                    "with type as (insert into postrider.event_types (name, matches) values ('{name}', '{matches}') returning id)
                     insert into postrider.schemas (type_id, version, schema) select id, '2026-01-15', '{{}}' from type"
                ))
                .await;
        }
    }

    pub(crate) fn home(&self) -> &Database {
        &self.cells[0].database
    }

    /// Tenants in turn in home and each cell, which have heard of them when this returns.
    pub(crate) async fn tenants(&mut self, count: usize) {
        let tenants: Vec<&'static str> = (0..count)
            .map(|n| &*Box::leak(format!("t{n}").into_boxed_str()))
            .collect();
        self.tenants = Box::leak(tenants.into_boxed_slice());
        self.home()
            .execute(&format!(
                "insert into postrider.tenants (slug, cell_id) select 't' || n, n % {} from generate_series(0, {}) n",
                self.cells.len(),
                count - 1
            ))
            .await;
        self.heard("select count(*) from postrider.tenants", count).await;
    }

    /// Waits until the cells have as many.
    pub(crate) async fn heard(&self, counted: &str, count: usize) {
        for cell in &self.cells[1..] {
            until("the cells have heard of it", || async {
                (cell.database.count(counted).await >= count as i64).then_some(())
            })
            .await;
        }
    }

    /// For each tenant one, in the cell where it lives. Every third wants order.
    async fn furnish(&mut self) {
        for (number, tenant) in self.tenants.iter().enumerate() {
            let cell = &self.cells[number % self.cells.len()];
            let ordered = (number / self.cells.len()).is_multiple_of(3);
            let (_, url) = self.receivers.open();
            let secret = new_secret();
            let mut connection = cell.database.connect().await;
            let id = endpoint(&mut connection, tenant, &url, &secret, ordered).await;
            let now = self.time.now();
            self.endpoints.push(EndpointLife {
                id,
                tenant,
                types: "*",
                ordered,
                standard: false,
                bulkhead: BULKHEAD,
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

    pub(crate) async fn start_all(&mut self) {
        for cell in &mut self.cells {
            cell.dispatcher.start().await;
        }
        for number in 0..self.apis.len() {
            self.start_api(number).await;
        }
    }

    async fn start_api(&mut self, number: usize) {
        let api = &mut self.apis[number];
        api.start().await;
        let url = api.running.as_ref().expect("it runs").url("");
        self.addresses.write().expect("not poisoned")[number] = url;
    }

    pub(crate) fn producers(&self, pause: Duration) -> Producers {
        Producers {
            time: self.time,
            journal: self.journal.clone(),
            database: self.home().options(),
            apis: self.addresses.clone(),
            tenants: self.tenants,
            large_share: 0.01,
            persistent: false,
            pause,
            stop: CancellationToken::new(),
        }
    }

    pub(crate) fn note(&self, what: String, kind: &'static str, harm: Harm, from: Moment) {
        let spell = Spell {
            what,
            kind,
            harm,
            disturbs: true,
            from,
            to: self.time.now(),
        };
        self.spells.lock().expect("not poisoned").push(spell);
    }

    /// Everything that there is, one after the other.
    async fn kill_next(&mut self, number: usize) {
        let cells = self.cells.len();
        let from = self.time.now();
        let target = number % (2 * cells + APIS);
        if target < cells {
            let database = &self.cells[target].database;
            kill_postgres(database);
            sleep(DOWN).await;
            start_postgres(database).await;
            let what = format!("kill -9 of the Postgres of {}", self.cells[target].name);
            self.note(what, "kill -9 postgres", Harm::Outage, from);
        } else if target < 2 * cells {
            let cell = &mut self.cells[target - cells];
            cell.dispatcher.kill();
            sleep(DOWN).await;
            cell.dispatcher.start().await;
            let what = format!("kill -9 of the dispatcher and relay of {}", cell.name);
            self.note(what, "kill -9 dispatcher", Harm::Death, from);
        } else {
            let api = target - 2 * cells;
            self.apis[api].kill();
            sleep(DOWN).await;
            self.start_api(api).await;
            self.note(format!("kill -9 of API {api}"), "kill -9 api", Harm::None, from);
        }
    }

    pub(crate) async fn waiting(&self) -> i64 {
        let outbox = "select count(*) from postrider.cell_outbox";
        let mut waiting = self.home().count(outbox).await;
        for cell in &self.cells {
            let queued =
                "select (select count(*) from postrider.queue) + (select count(*) from postrider.retries)";
            waiting += cell.database.count(queued).await;
        }
        waiting
    }

    /// Returns how long it took, or what is left.
    pub(crate) async fn drained(&self) -> Result<Duration, String> {
        let began = self.time.now();
        loop {
            let waiting = self.waiting().await;
            let took = self.time.now() - began;
            if waiting == 0 {
                return Ok(took);
            }
            if took > DRAIN_MAX {
                return Err(format!(
                    "{waiting} events and deliveries wait {DRAIN_MAX:?} after the end"
                ));
            }
            sleep(Duration::from_millis(200)).await;
        }
    }

    async fn history(&mut self, undrained: Option<String>) -> History {
        let mut alarms = Vec::new();
        let dispatchers = self.cells.iter_mut().map(|cell| &mut cell.dispatcher);
        for part in dispatchers.chain(&mut self.apis) {
            part.listen();
            alarms.append(&mut part.alarms);
        }
        let refused = "select coalesce(string_agg(refusal || ' ' || id || ': ' || message, ', '), '') from
                       (select * from postrider.cell_outbox_refused limit 5) r";
        let refused = self.home().text(refused).await;
        if !refused.is_empty() {
            alarms.push(format!("refused by a cell: {refused}"));
        }
        let spells = self.spells.lock().expect("not poisoned").clone();
        History {
            transactions: self.journal.read(),
            probes: Vec::new(),
            undrained,
            requests: self.receivers.requests(),
            spells,
            endpoints: self.endpoints.clone(),
            stored: self.stored().await,
            alarms,
            loses_unacknowledged: false,
        }
    }

    /// Of all cells together. An event that is in two of them is there twice.
    async fn stored(&self) -> Stored {
        let mut all = Stored::default();
        for cell in &self.cells {
            let one = stored(&mut cell.database.connect().await, &self.endpoints).await;
            for (mark, body) in one.bodies {
                if all.bodies.insert(mark.clone(), body).is_some() && !mark.is_empty() {
                    *all.copies.entry(mark).or_insert(1) += 1;
                }
            }
            for (mark, count) in one.copies {
                *all.copies.entry(mark).or_insert(0) += count;
            }
            all.deliveries.extend(one.deliveries);
            all.unfinished_replays.extend(one.unfinished_replays);
        }
        all
    }

    pub(crate) async fn judged(&mut self) -> Judgement {
        let undrained = self.drained().await;
        if let Ok(took) = &undrained {
            println!("drained {:.1} s after the end", took.as_secs_f64());
        }
        let history = self.history(undrained.err()).await;
        let judgement = judge(&history);
        println!("{judgement}");
        judgement
    }
}

/// As the API would make it. Returns its public id.
pub(crate) async fn endpoint(
    connection: &mut PgConnection,
    tenant: &str,
    url: &str,
    secret: &str,
    ordered: bool,
) -> String {
    let (id, tenant_id, public_id): (i32, i32, String) = sqlx::query_as(
        "insert into postrider.endpoints
            (public_id, tenant_id, shard, url, concurrency, ordered, retry_schedule, timeout_ms)
         select 'ep_' || md5($2), id, abs(hashtext($2)) % 64, $2, $3, $4, $5, $6
         from postrider.tenants where slug = $1 returning id, tenant_id, public_id",
    )
    .bind(tenant)
    .bind(url)
    .bind(i16::try_from(BULKHEAD).expect("a bulkhead"))
    .bind(ordered)
    .bind(patient())
    .bind(TIMEOUT_MS)
    .fetch_one(&mut *connection)
    .await
    .expect("an endpoint");
    let owner = Owner {
        tenant: TenantId(tenant_id),
        endpoint: EndpointId(id),
    };
    let vault = Vault::parse(MASTER_KEY).expect("a key");
    sqlx::query("insert into postrider.secrets (endpoint_id, ciphertext) values ($1, $2)")
        .bind(id)
        .bind(vault.seal(owner, Purpose::Secret, secret.as_bytes()))
        .execute(connection)
        .await
        .expect("a secret");
    public_id
}

/// Events by tenant's cell, for the output.
fn by_cell(cells: &Cells) -> String {
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for request in cells.receivers.requests() {
        let cell = cells.cells[request.endpoint % cells.cells.len()].name;
        *counts.entry(cell).or_default() += 1;
    }
    let mut counts: Vec<String> = counts
        .into_iter()
        .map(|(cell, count)| format!("{count} in {cell}"))
        .collect();
    counts.sort();
    counts.join(", ")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: make cells"]
async fn nothing_is_lost_or_invented_whatever_dies() {
    let _alone = alone().await;
    let events = number("POSTRIDER_CELLS_EVENTS", EVENTS) as usize;
    let seed = number("POSTRIDER_CELLS_SEED", SEED);
    let mut cells = Cells::empty(2).await;
    cells.types(&TYPES).await;
    cells.tenants(TENANTS).await;
    cells.furnish().await;
    cells.start_all().await;
    let producers = cells.producers(Duration::from_millis(8));
    let emitting = producers.start(seed, 8, 4);
    let mut kills = 0;
    let parts = 2 * cells.cells.len() + APIS;
    while cells.journal.committed() < events || kills < ROUNDS_LEAST * parts {
        sleep(CALM).await;
        cells.kill_next(kills).await;
        kills += 1;
    }
    sleep(CALM).await;
    producers.stop.cancel();
    emitting.join_all().await;
    let judgement = cells.judged().await;
    println!("cells       {kills} kills; requests {}", by_cell(&cells));
    assert!(
        judgement.violations.is_empty(),
        "seed {seed} breaks {:?}",
        judgement.broken()
    );
}
