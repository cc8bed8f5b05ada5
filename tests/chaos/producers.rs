//! Producers that never stop: by SQL in transactions of their own, some of which they roll back, and by HTTP. What was
//! acknowledged goes to a journal on disk before the next one begins. The journal is the oracle, not the database.

use std::{
    fs::File,
    io::Write,
    path::PathBuf,
    sync::{Arc, Mutex, RwLock},
    time::Duration,
};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};
use tokio::{task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;

use crate::{
    history::{Emitted, Mark, Moment, Outcome, Probe, Timeline, Transaction},
    support::ADMIN_API_KEY,
};

pub(crate) const TENANTS: [&str; 2] = ["acme", "beta"];
/// A tenant whose receivers are always well: how soon it is served is measured.
pub(crate) const STEADY: &str = "steady";
/// The tenant of endpoints that come and go.
pub(crate) const VISITORS: &str = "visitors";
/// Of the steady tenant: to receivers that answer at once, and to one that takes over a second.
pub(crate) const STEADY_TYPES: [&str; 2] = ["steady.quick", "steady.slow"];
pub(crate) const TYPES: [&str; 3] = ["order.paid", "order.sent", "user.new"];
const KEYS: u32 = 6;
/// The largest body that is taken, less what is around the padding.
const PADDING_MAX: f64 = 261_000.0;
const PADDING_LEAST: f64 = 100.0;
/// Of events that are of any size up to the largest; the others are small.
pub(crate) const LARGE_SHARE: f64 = 0.12;
const STEADY_SQL_EVERY: Duration = Duration::from_millis(200);
const STEADY_HTTP_EVERY: Duration = Duration::from_millis(250);
const STEADY_SLOW_EVERY: Duration = Duration::from_millis(400);
const STEADY_REPLAY_EVERY: Duration = Duration::from_millis(500);
/// An event of this long ago is surely delivered where nothing is wrong.
const REPLAYED_AFTER: Duration = Duration::from_secs(2);
/// After this a producer gives up on a connection.
const ANSWER_MAX: Duration = Duration::from_secs(15);
/// For this long an HTTP producer repeats a request under its own id.
const REPEAT_FOR: Duration = Duration::from_secs(20);

pub(crate) struct Journal {
    path: PathBuf,
    file: Mutex<File>,
    transactions: Mutex<Vec<Transaction>>,
    probes: Mutex<Vec<Probe>>,
}

impl Journal {
    pub(crate) fn new(folder: &std::path::Path) -> Self {
        let path = folder.join("acknowledged");
        let file = File::create(&path).expect("a journal");
        Self {
            path,
            file: Mutex::new(file),
            transactions: Mutex::default(),
            probes: Mutex::default(),
        }
    }

    fn probe(&self, probe: Probe) {
        self.probes.lock().expect("not poisoned").push(probe);
    }

    pub(crate) fn probes(&self) -> Vec<Probe> {
        self.probes.lock().expect("not poisoned").clone()
    }

    fn write(&self, transaction: Transaction) {
        if transaction.outcome == Outcome::Committed {
            let mut file = self.file.lock().expect("not poisoned");
            for event in &transaction.events {
                writeln!(file, "{}", event.mark).expect("written");
            }
            file.sync_data().expect("on disk");
        }
        self.transactions.lock().expect("not poisoned").push(transaction);
    }

    /// Events that were acknowledged so far.
    pub(crate) fn committed(&self) -> usize {
        let transactions = self.transactions.lock().expect("not poisoned");
        let committed = transactions
            .iter()
            .filter(|transaction| transaction.outcome == Outcome::Committed);
        committed.map(|transaction| transaction.events.len()).sum()
    }

    /// What the disk says was acknowledged, and what the producers know of the rest.
    pub(crate) fn read(&self) -> Vec<Transaction> {
        let acknowledged = std::fs::read_to_string(&self.path).expect("a journal");
        let acknowledged: std::collections::HashSet<&str> = acknowledged.lines().collect();
        let transactions = self.transactions.lock().expect("not poisoned").clone();
        for transaction in &transactions {
            let on_disk = |event: &Emitted| acknowledged.contains(event.mark.as_str());
            let committed = transaction.outcome == Outcome::Committed;
            assert!(transaction.events.iter().all(|event| on_disk(event) == committed));
        }
        transactions
    }
}

/// What all producers share.
#[derive(Clone)]
pub(crate) struct Producers {
    pub(crate) time: Timeline,
    pub(crate) journal: Arc<Journal>,
    pub(crate) database: PgConnectOptions,
    /// Where the APIs are now.
    pub(crate) apis: Arc<RwLock<Vec<String>>>,
    /// Whose events they emit.
    pub(crate) tenants: &'static [&'static str],
    /// The part of events that are of any size up to the largest.
    pub(crate) large_share: f64,
    /// Whether HTTP producers repeat every request until it is known to be done.
    pub(crate) persistent: bool,
    /// Between two transactions of one producer.
    pub(crate) pause: Duration,
    pub(crate) stop: CancellationToken,
}

impl Producers {
    /// Ends when told to stop, and each with what it has begun.
    pub(crate) fn start(&self, seed: u64, by_sql: u64, by_http: u64) -> JoinSet<()> {
        let mut running = JoinSet::new();
        for number in 0..by_sql {
            let one = Producer::new(self, seed, 's', number);
            running.spawn(one.run_by_sql());
        }
        for number in 0..by_http {
            let one = Producer::new(self, seed, 'h', number);
            running.spawn(one.run_by_http());
        }
        running
    }
}

struct Producer {
    shared: Producers,
    rng: StdRng,
    name: String,
    count: u64,
    client: Client,
}

/// An event before it is emitted.
struct Draft {
    emitted: Emitted,
    key: Option<String>,
    data: Value,
}

impl Draft {
    fn as_request(&self, with_id: bool) -> Value {
        let mut body = json!({ "type": self.emitted.type_name, "data": self.data });
        if with_id {
            body["id"] = json!(self.emitted.mark);
        }
        if let Some(key) = &self.key {
            body["ordering_key"] = json!(key);
        }
        body
    }
}

impl Producer {
    fn new(shared: &Producers, seed: u64, kind: char, number: u64) -> Self {
        let client = crate::support::http_client().timeout(ANSWER_MAX);
        Self {
            shared: shared.clone(),
            rng: StdRng::seed_from_u64(seed ^ (kind as u64) << 32 ^ number),
            name: format!("{kind}{number}"),
            count: 0,
            client: client.build().expect("a client"),
        }
    }

    fn draft(&mut self, tenant: &'static str) -> Draft {
        self.count += 1;
        let type_name = TYPES[self.rng.random_range(0..TYPES.len())];
        let mark = format!("{}-{}", self.name, self.count);
        let key = self.rng.random_bool(0.4).then(|| {
            let key = self.rng.random_range(0..KEYS);
            format!("k{key}")
        });
        let padding = self.padding();
        let data = json!({ "mark": mark, "key": key, "padding": padding });
        let emitted = Emitted {
            mark,
            tenant,
            type_name,
        };
        Draft { emitted, key, data }
    }

    /// Small for the most part; otherwise of any order of magnitude up to the largest.
    fn padding(&mut self) -> String {
        if !self.rng.random_bool(self.shared.large_share) {
            return "é".repeat(self.rng.random_range(0..60));
        }
        let bytes = PADDING_LEAST * (PADDING_MAX / PADDING_LEAST).powf(self.rng.random_range(0.0..=1.0));
        "é".repeat(bytes as usize / 2)
    }

    fn tenant(&mut self) -> &'static str {
        let tenants = self.shared.tenants;
        tenants[self.rng.random_range(0..tenants.len())]
    }

    async fn pause(&mut self) -> bool {
        let pause = self.shared.pause.mul_f64(self.rng.random_range(0.2..1.8));
        tokio::select! {
            () = self.shared.stop.cancelled() => false,
            () = tokio::time::sleep(pause) => true,
        }
    }

    async fn run_by_sql(mut self) {
        let mut connection: Option<PgConnection> = None;
        while self.pause().await {
            let mut open = match connection.take() {
                Some(open) => open,
                None => match timeout(ANSWER_MAX, PgConnection::connect_with(&self.shared.database)).await {
                    Ok(Ok(open)) => open,
                    _ => continue,
                },
            };
            let tenant = self.tenant();
            let mut drafts: Vec<Draft> = (0..self.rng.random_range(1..4))
                .map(|_| self.draft(tenant))
                .collect();
            // In one order, so that two producers wait for each other and do not deadlock.
            drafts.sort_by(|a, b| a.key.cmp(&b.key));
            let undone = self.rng.random_bool(0.1).then(|| self.draft(tenant));
            let roll_back = self.rng.random_bool(0.1);
            let began = self.shared.time.now();
            let outcome = transact(&mut open, &drafts, undone.as_ref(), roll_back).await;
            let ended = self.shared.time.now();
            if let Some(undone) = undone {
                self.shared.journal.write(Transaction {
                    events: vec![undone.emitted],
                    outcome: Outcome::RolledBack,
                    began,
                    ended,
                });
            }
            let events = drafts.into_iter().map(|draft| draft.emitted).collect();
            self.shared.journal.write(Transaction {
                events,
                outcome: outcome.0,
                began,
                ended,
            });
            connection = outcome.1.then_some(open);
        }
    }

    async fn run_by_http(mut self) {
        while self.pause().await {
            let tenant = self.tenant();
            let began = self.shared.time.now();
            let (drafts, outcome) = match self.rng.random_range(0..10) {
                // Under an id of its own, repeated until it is known to be there.
                0..6 => {
                    let draft = self.draft(tenant);
                    let path = format!("/v1/tenants/{tenant}/events");
                    let outcome = self.repeat(&path, &draft.as_request(true)).await;
                    (vec![draft], outcome)
                }
                // Without one it can't be repeated.
                6..8 if !self.shared.persistent => {
                    let draft = self.draft(tenant);
                    let path = format!("/v1/tenants/{tenant}/events");
                    let outcome = self.post(&path, &draft.as_request(false)).await;
                    (vec![draft], outcome)
                }
                _ => {
                    let drafts: Vec<Draft> = (0..3).map(|_| self.draft(tenant)).collect();
                    let events: Vec<Value> = drafts.iter().map(|draft| draft.as_request(true)).collect();
                    let path = format!("/v1/tenants/{tenant}/events/batch");
                    let body = json!({ "events": events });
                    let outcome = if self.shared.persistent {
                        self.repeat(&path, &body).await
                    } else {
                        self.post(&path, &body).await
                    };
                    (drafts, outcome)
                }
            };
            let events = drafts.into_iter().map(|draft| draft.emitted).collect();
            let ended = self.shared.time.now();
            self.shared.journal.write(Transaction {
                events,
                outcome,
                began,
                ended,
            });
        }
    }

    async fn repeat(&mut self, path: &str, body: &Value) -> Outcome {
        let repeated = async {
            loop {
                match self.post(path, body).await {
                    Outcome::Unknown => tokio::time::sleep(Duration::from_millis(100)).await,
                    known => return known,
                }
            }
        };
        timeout(REPEAT_FOR, repeated).await.unwrap_or(Outcome::Unknown)
    }

    async fn post(&mut self, path: &str, body: &Value) -> Outcome {
        let (status, answer) = self.try_post(path, body.to_string()).await;
        match status {
            Some(status) if status.is_success() => Outcome::Committed,
            Some(status) if status.is_client_error() => panic!("an emit was refused with {status}: {answer}"),
            // 503 says "try again": it may have been committed or not. Another one is an alarm of the server's log.
            Some(_) | None => Outcome::Unknown,
        }
    }

    /// The status and the body of the answer, if there is one.
    async fn try_post(&mut self, path: &str, body: String) -> (Option<StatusCode>, String) {
        let api = {
            let apis = self.shared.apis.read().expect("not poisoned");
            apis[self.rng.random_range(0..apis.len())].clone()
        };
        let request = self
            .client
            .post(format!("{api}{path}"))
            .bearer_auth(ADMIN_API_KEY);
        let request = request.header("content-type", "application/json").body(body);
        match request.send().await {
            Ok(answer) => {
                let status = answer.status();
                (Some(status), answer.text().await.unwrap_or_default())
            }
            Err(_) => (None, String::new()),
        }
    }
}

/// The steady tenant: its endpoints by their places, and who asks for what.
#[derive(Clone)]
pub(crate) struct Steady {
    pub(crate) quick: Vec<usize>,
    pub(crate) slow: Vec<usize>,
    /// The public id of the first quick one.
    pub(crate) quick_id: String,
    /// Straight to the server, to look up what to replay.
    pub(crate) database: PgConnectOptions,
}

impl Producers {
    /// Small requests at an even pace, each of which is a probe.
    pub(crate) fn start_steady(&self, steady: &Steady) -> JoinSet<()> {
        let mut running = JoinSet::new();
        let one = |kind| Producer::new(self, 0, kind, 0);
        let [quick, slow] = STEADY_TYPES;
        let places = || (steady.quick.clone(), steady.slow.clone());
        running.spawn(one('q').probe_by_sql("emit by SQL", quick, places().0, STEADY_SQL_EVERY));
        running.spawn(one('l').probe_by_sql("slow receiver", slow, places().1, STEADY_SLOW_EVERY));
        running.spawn(one('w').probe_by_http(quick, places().0));
        running.spawn(one('r').probe_by_replay(steady.clone()));
        running
    }

    /// One event in a transaction of its own, written down like all others.
    pub(crate) async fn emit_once(&self, tenant: &'static str, type_name: &'static str, mark: Mark) {
        let draft = Draft::small(tenant, type_name, mark);
        let began = self.time.now();
        let connect = PgConnection::connect_with(&self.database);
        let Ok(Ok(mut connection)) = timeout(ANSWER_MAX, connect).await else {
            return;
        };
        let (outcome, _) = transact(&mut connection, std::slice::from_ref(&draft), None, false).await;
        self.journal.write(Transaction {
            events: vec![draft.emitted],
            outcome,
            began,
            ended: self.time.now(),
        });
    }
}

impl Draft {
    fn small(tenant: &'static str, type_name: &'static str, mark: Mark) -> Self {
        let data = json!({ "mark": mark, "key": null });
        let emitted = Emitted {
            mark,
            tenant,
            type_name,
        };
        Self {
            emitted,
            key: None,
            data,
        }
    }
}

impl Producer {
    fn next_probe(&mut self, type_name: &'static str) -> Draft {
        self.count += 1;
        Draft::small(STEADY, type_name, format!("{}-{}", self.name, self.count))
    }

    async fn wait(&self, time: Duration) -> bool {
        tokio::select! {
            () = self.shared.stop.cancelled() => false,
            () = tokio::time::sleep(time) => true,
        }
    }

    fn done(&self, draft: Draft, kind: &'static str, endpoints: &[usize], began: Moment, outcome: Outcome) {
        // A connection that was lost asked for nothing that could come late.
        let asked = endpoints.iter().filter(|_| outcome != Outcome::RolledBack);
        for endpoint in asked {
            self.shared.journal.probe(Probe {
                kind,
                mark: draft.emitted.mark.clone(),
                endpoint: *endpoint,
                replay: false,
                asked: began,
            });
        }
        self.shared.journal.write(Transaction {
            events: vec![draft.emitted],
            outcome,
            began,
            ended: self.shared.time.now(),
        });
    }

    async fn probe_by_sql(
        mut self,
        kind: &'static str,
        type_name: &'static str,
        endpoints: Vec<usize>,
        every: Duration,
    ) {
        let mut connection: Option<PgConnection> = None;
        while self.wait(every).await {
            let mut open = match connection.take() {
                Some(open) => open,
                None => match timeout(ANSWER_MAX, PgConnection::connect_with(&self.shared.database)).await {
                    Ok(Ok(open)) => open,
                    _ => continue,
                },
            };
            let draft = self.next_probe(type_name);
            let began = self.shared.time.now();
            let (outcome, usable) = transact(&mut open, std::slice::from_ref(&draft), None, false).await;
            self.done(draft, kind, &endpoints, began, outcome);
            connection = usable.then_some(open);
        }
    }

    async fn probe_by_http(mut self, type_name: &'static str, endpoints: Vec<usize>) {
        let path = format!("/v1/tenants/{STEADY}/events");
        while self.wait(STEADY_HTTP_EVERY).await {
            let draft = self.next_probe(type_name);
            let began = self.shared.time.now();
            let outcome = self.post(&path, &draft.as_request(true)).await;
            self.done(draft, "emit by HTTP", &endpoints, began, outcome);
        }
    }

    /// Sends an event of a while ago again.
    async fn probe_by_replay(mut self, steady: Steady) {
        while self.wait(STEADY_REPLAY_EVERY).await {
            let draft = self.next_probe(STEADY_TYPES[0]);
            let mark = draft.emitted.mark.clone();
            self.shared.emit_once(STEADY, STEADY_TYPES[0], mark.clone()).await;
            if !self.wait(REPLAYED_AFTER).await {
                return;
            }
            let Some(delivery) = find_delivery(&steady, &mark).await else {
                continue;
            };
            let path = format!("/v1/tenants/{STEADY}/deliveries/{delivery}/replay");
            let asked = self.shared.time.now();
            let (status, _) = self.try_post(&path, "{}".to_owned()).await;
            // It was not delivered yet, which the other probes judge.
            if status.is_some_and(|status| status.is_client_error()) {
                continue;
            }
            self.shared.journal.probe(Probe {
                kind: "replay",
                mark,
                endpoint: steady.quick[0],
                replay: true,
                asked,
            });
        }
    }
}

async fn find_delivery(steady: &Steady, mark: &str) -> Option<postrider_proto::DeliveryId> {
    let look = async {
        let mut connection = PgConnection::connect_with(&steady.database).await?;
        sqlx::query_as::<_, (uuid::Uuid, i32)>(
            "select i.event_id, e.id from postrider.event_ids i, postrider.endpoints e
             where i.id = $1 and e.public_id = $2",
        )
        .bind(mark)
        .bind(&steady.quick_id)
        .fetch_optional(&mut connection)
        .await
    };
    let (event, endpoint) = timeout(ANSWER_MAX, look).await.ok()?.ok()??;
    Some(postrider_proto::DeliveryId {
        event: postrider_proto::EventId(event),
        endpoint: postrider_proto::EndpointId(endpoint),
    })
}

/// The outcome, and whether the connection can be used again.
/// One event to a server that may not be the primary any more.
pub(crate) async fn emit_directly(
    time: Timeline,
    journal: &Journal,
    options: &PgConnectOptions,
    mark: Mark,
    answer_max: Duration,
) -> Outcome {
    let draft = Draft::small(TENANTS[0], TYPES[0], mark);
    let began = time.now();
    let work = async {
        let mut connection = PgConnection::connect_with(options).await.ok()?;
        Some(
            transact(&mut connection, std::slice::from_ref(&draft), None, false)
                .await
                .0,
        )
    };
    let outcome = match timeout(answer_max, work).await {
        Ok(outcome) => outcome.unwrap_or(Outcome::RolledBack),
        // It may have been asked to commit.
        Err(_) => Outcome::Unknown,
    };
    journal.write(Transaction {
        events: vec![draft.emitted],
        outcome,
        began,
        ended: time.now(),
    });
    outcome
}

async fn transact(
    connection: &mut PgConnection,
    drafts: &[Draft],
    undone: Option<&Draft>,
    roll_back: bool,
) -> (Outcome, bool) {
    let work = async {
        sqlx::raw_sql("begin").execute(&mut *connection).await?;
        for draft in drafts {
            emit(connection, draft).await?;
        }
        if let Some(undone) = undone {
            sqlx::raw_sql("savepoint undone")
                .execute(&mut *connection)
                .await?;
            emit(connection, undone).await?;
            sqlx::raw_sql("rollback to undone")
                .execute(&mut *connection)
                .await?;
        }
        if roll_back {
            sqlx::raw_sql("rollback").execute(&mut *connection).await?;
        }
        Ok::<_, sqlx::Error>(())
    };
    match timeout(ANSWER_MAX, work).await {
        Ok(Ok(())) if roll_back => return (Outcome::RolledBack, true),
        Ok(Ok(())) => {}
        // The commit was never asked for.
        Ok(Err(_)) | Err(_) => return (Outcome::RolledBack, false),
    }
    // From here on any trouble may have come after the commit: also the server's own word that it ends the session.
    let commit = sqlx::raw_sql("commit").execute(&mut *connection);
    match timeout(ANSWER_MAX, commit).await {
        Ok(Ok(_)) => (Outcome::Committed, true),
        Ok(Err(_)) | Err(_) => (Outcome::Unknown, false),
    }
}

async fn emit(connection: &mut PgConnection, draft: &Draft) -> Result<(), sqlx::Error> {
    sqlx::query("select postrider.emit($1, $2, $3, $4, null, $5)")
        .bind(draft.emitted.tenant)
        .bind(draft.emitted.type_name)
        .bind(draft.data.to_string())
        .bind(&draft.emitted.mark)
        .bind(&draft.key)
        .execute(connection)
        .await
        .map(|_| ())
}
