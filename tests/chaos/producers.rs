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
use reqwest::Client;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};
use tokio::{task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;

use crate::{
    history::{Emitted, Outcome, Timeline, Transaction},
    support::ADMIN_API_KEY,
};

pub(crate) const TENANTS: [&str; 2] = ["acme", "beta"];
pub(crate) const TYPES: [&str; 3] = ["order.paid", "order.sent", "user.new"];
const KEYS: u32 = 6;
/// After this a producer gives up on a connection.
const ANSWER_MAX: Duration = Duration::from_secs(15);
/// For this long an HTTP producer repeats a request under its own id.
const REPEAT_FOR: Duration = Duration::from_secs(20);

pub(crate) struct Journal {
    path: PathBuf,
    file: Mutex<File>,
    transactions: Mutex<Vec<Transaction>>,
}

impl Journal {
    pub(crate) fn new(folder: &std::path::Path) -> Self {
        let path = folder.join("acknowledged");
        let file = File::create(&path).expect("a journal");
        Self {
            path,
            file: Mutex::new(file),
            transactions: Mutex::default(),
        }
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
        let client = Client::builder().no_proxy().timeout(ANSWER_MAX);
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
        let padding = "é".repeat(self.rng.random_range(0..60));
        let data = json!({ "mark": mark, "key": key, "padding": padding });
        let emitted = Emitted {
            mark,
            tenant,
            type_name,
        };
        Draft { emitted, key, data }
    }

    fn tenant(&mut self) -> &'static str {
        TENANTS[self.rng.random_range(0..TENANTS.len())]
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
        let api = {
            let apis = self.shared.apis.read().expect("not poisoned");
            apis[self.rng.random_range(0..apis.len())].clone()
        };
        let request = self
            .client
            .post(format!("{api}{path}"))
            .bearer_auth(ADMIN_API_KEY);
        let request = request
            .header("content-type", "application/json")
            .body(body.to_string());
        match request.send().await.map(|answer| answer.status()) {
            Ok(status) if status.is_success() => Outcome::Committed,
            Ok(status) if status.is_client_error() => panic!("an emit was refused with {status}: {body}"),
            // 503 says "try again": it may have been committed or not. Another one is an alarm of the server's log.
            Ok(_) | Err(_) => Outcome::Unknown,
        }
    }
}

/// The outcome, and whether the connection can be used again.
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
