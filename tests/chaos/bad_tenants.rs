//! Tenants that take as much as they can get of what is shared: body memory, capacity on the wire, sockets, connections to
//! the database, time of the workers. Each does only what any tenant or its receivers may do. Whatever they do, the
//! deliveries of the others must stay quick.

use std::{
    net::SocketAddr,
    sync::{
        Arc, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Response, body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};
use tokio::{
    net::{TcpListener, TcpSocket},
    sync::watch,
    task::{JoinHandle, JoinSet},
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{installation::http_client, support::ADMIN_API_KEY};

/// For this long a call is repeated while the API is away.
const PREPARE_MAX: Duration = Duration::from_secs(30);
const LARGE_BYTES: i32 = 250 * 1024;
const MIDDLE_BYTES: i32 = 64 * 1024;
const HOARD: i32 = 400;
const HOARD_EVERY: Duration = Duration::from_secs(8);
const SILENT_ENDPOINTS: usize = 60;
const SILENT_EVENTS_EACH: i32 = 18;
const WIDE: usize = 1_024;
const WIDE_EVENTS: i32 = 1_100;
const LINGER: Duration = Duration::from_secs(50);
const LINGERING_EVENTS: i32 = 2_500;
const REPLAYS: usize = 600;
const REPLAYED_EVENTS: i32 = 20;
const CLIENTS: usize = 32;
const KEY_EMITS_EVERY: Duration = Duration::from_millis(100);
const UNACCEPTED_CONCURRENCY: usize = 256;
const UNACCEPTED_EVENTS: i32 = 20_000;
const ACCEPTED_CONNECTIONS: usize = 8;
/// Events of one statement.
const EMIT_BATCH: i32 = 2_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bad {
    /// 400 waiting events of 250 KiB for one wide endpoint, released at once.
    Hoards,
    /// 60 quick endpoints with large bodies fall silent together.
    FallsSilent,
    /// One wide endpoint does.
    FallsSilentWide,
    /// Two wide endpoints for each dispatcher answer 200 after 50 seconds.
    Lingers,
    /// 600 replays of a paused endpoint.
    Replays,
    /// An open SQL transaction that holds an ordering key, and HTTP emits of that key.
    HoldsKey,
    /// Dry runs of replays over all events, from 32 clients of each API.
    DryRuns,
    /// Serves the connections it has, and accepts no other.
    StopsAccepting,
}

impl Bad {
    /// By its name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let mut kinds = Self::OF_CHAOS.into_iter();
        kinds.find(|bad| format!("{bad:?}").eq_ignore_ascii_case(name))
    }

    /// What a run of faults chooses from. The last one needs a low limit of open files to be of any harm.
    pub(crate) const OF_CHAOS: [Self; 7] = [
        Self::Hoards,
        Self::FallsSilent,
        Self::FallsSilentWide,
        Self::Lingers,
        Self::Replays,
        Self::HoldsKey,
        Self::DryRuns,
    ];
}

/// Where a bad tenant is let loose.
#[derive(Clone)]
pub(crate) struct Ground {
    pub(crate) apis: Arc<RwLock<Vec<String>>>,
    pub(crate) database: PgConnectOptions,
    /// How many there are: each has its own share of what is taken.
    pub(crate) dispatchers: usize,
    /// Events that dry runs look through.
    pub(crate) looked_through: i32,
    /// The time limit of the endpoints that fall silent.
    pub(crate) timeout: Duration,
}

impl Ground {
    fn apis(&self) -> Vec<String> {
        self.apis.read().expect("not poisoned").clone()
    }

    fn any_api(&self) -> String {
        let apis = self.apis();
        apis[rand::random_range(0..apis.len())].clone()
    }

    /// The answer to a call that was obeyed.
    async fn ask(&self, method: Method, path: &str, key: &str, body: &Value) -> Option<Value> {
        self.ask_at(&self.any_api(), method, path, key, body).await
    }

    async fn ask_at(&self, api: &str, method: Method, path: &str, key: &str, body: &Value) -> Option<Value> {
        let request = http_client()
            .request(method, format!("{api}/v1{path}"))
            .bearer_auth(key)
            .header("content-type", "application/json")
            .body(body.to_string());
        let answer = request.send().await.ok()?;
        let obeyed = answer.status().is_success();
        let text = answer.text().await.ok()?;
        obeyed.then(|| serde_json::from_str(&text).unwrap_or_default())
    }

    async fn insist(&self, method: Method, path: &str, body: Value) -> Option<Value> {
        let repeated = async {
            loop {
                if let Some(answer) = self.ask(method.clone(), path, ADMIN_API_KEY, &body).await {
                    return answer;
                }
                sleep(Duration::from_millis(200)).await;
            }
        };
        timeout(PREPARE_MAX, repeated).await.ok()
    }

    async fn connect(&self) -> Option<PgConnection> {
        PgConnection::connect_with(&self.database).await.ok()
    }

    /// Events of so many bytes, in turn of each type.
    async fn emit(&self, tenant: &str, types: usize, count: i32, bytes: i32) -> Option<()> {
        let mut connection = self.connect().await?;
        for start in (0..count).step_by(EMIT_BATCH as usize) {
            sqlx::query(
                "select postrider.emit($1, 'bad.t' || n % $2, json_build_object('padding', repeat('x', $3))::text)
                 from generate_series($4, $5) n",
            )
            .bind(tenant)
            .bind(types as i32)
            .bind(bytes)
            .bind(start)
            .bind((start + EMIT_BATCH).min(count) - 1)
            .execute(&mut connection)
            .await
            .ok()?;
        }
        Some(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    Quick,
    Silent,
    After(Duration),
}

/// The receivers of a bad tenant. They count and do not record: what they get is judged by whether anything is left over.
pub(crate) struct BadReceiver {
    address: SocketAddr,
    manner: watch::Sender<Manner>,
    count: Arc<AtomicUsize>,
    accepting: JoinHandle<()>,
}

impl BadReceiver {
    async fn start(connections: usize) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        socket.bind(any).expect("a port");
        let backlog = if connections == usize::MAX { 1_024 } else { 1 };
        let listener = socket.listen(backlog).expect("listens");
        let address = listener.local_addr().expect("bound");
        let (manner, count) = (watch::Sender::new(Manner::Quick), Arc::default());
        let accepting = tokio::spawn(accept(listener, connections, manner.clone(), Arc::clone(&count)));
        Self {
            address,
            manner,
            count,
            accepting,
        }
    }

    fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    async fn wait_for(&self, count: usize) {
        let reached = async {
            while self.count.load(Ordering::Relaxed) < count {
                sleep(Duration::from_millis(20)).await;
            }
        };
        let _ = timeout(PREPARE_MAX, reached).await;
    }
}

impl Drop for BadReceiver {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, most: usize, manner: watch::Sender<Manner>, count: Arc<AtomicUsize>) {
    let mut connections = JoinSet::new();
    loop {
        if connections.len() >= most {
            while connections.try_join_next().is_some() {}
            sleep(Duration::from_millis(100)).await;
            continue;
        }
        let Ok((stream, _)) = listener.accept().await else {
            continue;
        };
        let (manner, count) = (manner.clone(), count.clone());
        connections.spawn(async move {
            let service = service_fn(|request| respond(request, manner.subscribe(), count.clone()));
            let _ = http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
        if most == usize::MAX {
            while connections.try_join_next().is_some() {}
        }
    }
}

async fn respond(
    request: hyper::Request<Incoming>,
    mut manner: watch::Receiver<Manner>,
    count: Arc<AtomicUsize>,
) -> Result<Response<Full<Bytes>>, std::io::Error> {
    let body = request.into_body().collect().await;
    body.map_err(std::io::Error::other)?;
    count.fetch_add(1, Ordering::Relaxed);
    loop {
        let now = *manner.borrow_and_update();
        match now {
            Manner::Quick => break,
            Manner::Silent => {
                let _ = manner.changed().await;
            }
            Manner::After(time) => {
                tokio::select! {
                    () = sleep(time) => break,
                    _ = manner.changed() => {}
                }
            }
        }
    }
    let answer = Response::builder().status(204).body(Full::default());
    Ok(answer.expect("a plain answer"))
}

pub(crate) struct BadTenant {
    bad: Bad,
    name: String,
    ground: Ground,
    receiver: BadReceiver,
    endpoints: Vec<String>,
    /// A tenant's own.
    key: String,
}

static NUMBER: AtomicUsize = AtomicUsize::new(0);

impl BadTenant {
    /// Everything that it needs, while it still behaves. None when the installation is too broken to be misused.
    pub(crate) async fn prepare(ground: &Ground, bad: Bad) -> Option<Self> {
        let name = format!(
            "bad-{}-{}",
            format!("{bad:?}").to_lowercase(),
            NUMBER.fetch_add(1, Ordering::Relaxed)
        );
        ground
            .insist(Method::PUT, &format!("/tenants/{name}"), json!({}))
            .await?;
        let role = json!({ "role": "tenant", "tenant": name, "name": name });
        let key = ground.insist(Method::POST, "/api-keys", role).await?;
        let accepted = if bad == Bad::StopsAccepting {
            ACCEPTED_CONNECTIONS
        } else {
            usize::MAX
        };
        let mut tenant = Self {
            bad,
            name,
            ground: ground.clone(),
            receiver: BadReceiver::start(accepted).await,
            endpoints: Vec::new(),
            key: key["key"].as_str()?.to_owned(),
        };
        tenant.settle_in().await?;
        Some(tenant)
    }

    async fn settle_in(&mut self) -> Option<()> {
        self.types(self.types_used()).await?;
        match self.bad {
            Bad::Hoards | Bad::FallsSilentWide => self.endpoint("*", json!({ "concurrency": WIDE })).await?,
            Bad::FallsSilent => {
                for number in 0..SILENT_ENDPOINTS {
                    self.endpoint(&format!("bad.t{number}"), json!({})).await?;
                }
            }
            Bad::Lingers => {
                for _ in 0..2 * self.ground.dispatchers {
                    let wide = json!({ "concurrency": WIDE, "timeout_ms": 60_000 });
                    self.endpoint("*", wide).await?;
                }
            }
            Bad::StopsAccepting => {
                self.endpoint("*", json!({ "concurrency": UNACCEPTED_CONCURRENCY }))
                    .await?;
            }
            Bad::Replays => {
                self.endpoint("*", json!({})).await?;
                self.ground.emit(&self.name, 1, REPLAYED_EVENTS, 10).await?;
                self.receiver.wait_for(REPLAYED_EVENTS as usize).await;
                return self.enable(false).await;
            }
            Bad::DryRuns => {
                let events = self.ground.looked_through;
                self.ground.emit(&self.name, 1, events, 10).await?;
                // Made after the events: it never got one of them.
                return self.endpoint("*", json!({})).await;
            }
            Bad::HoldsKey => return Some(()),
        }
        // One quick answer for each: from here on they count as quick endpoints.
        let types = self.types_used();
        self.ground.emit(&self.name, types, types as i32, 10).await?;
        self.receiver.wait_for(self.endpoints.len()).await;
        Some(())
    }

    fn types_used(&self) -> usize {
        match self.bad {
            Bad::FallsSilent => SILENT_ENDPOINTS,
            _ => 1,
        }
    }

    async fn types(&self, count: usize) -> Option<()> {
        for number in 0..count {
            let schemas = json!({ "schemas": { "2026-01-15": { "type": "object" } } });
            let path = format!("/event-types/bad.t{number}");
            self.ground.insist(Method::PUT, &path, schemas).await?;
        }
        Some(())
    }

    async fn endpoint(&mut self, types: &str, more: Value) -> Option<()> {
        let mut body = json!({
            "url": self.receiver.url(), "types": [types], "timeout_ms": self.ground.timeout.as_millis() as u64,
            "retry_schedule": ["0s", "2s", "2s", "2s", "2s", "2s", "2s", "2s"],
        });
        if let (Value::Object(body), Value::Object(more)) = (&mut body, more) {
            body.extend(more);
        }
        let path = format!("/tenants/{}/endpoints", self.name);
        let made = self.ground.insist(Method::POST, &path, body).await?;
        self.endpoints.push(made["id"].as_str()?.to_owned());
        Some(())
    }

    async fn enable(&self, enabled: bool) -> Option<()> {
        for id in &self.endpoints {
            let path = format!("/tenants/{}/endpoints/{id}", self.name);
            let body = json!({ "enabled": enabled });
            self.ground.insist(Method::PATCH, &path, body).await?;
        }
        Some(())
    }

    /// Misbehaves until it is told to stop.
    pub(crate) async fn misbehave(&self, stop: &CancellationToken) {
        let misbehaving = async {
            match self.bad {
                Bad::Hoards => self.hoard().await,
                Bad::FallsSilent => {
                    self.receiver.manner.send_replace(Manner::Silent);
                    let events = SILENT_EVENTS_EACH * SILENT_ENDPOINTS as i32;
                    // 60 endpoints with 64 KiB take the memory of one dispatcher; of three they hold a third each.
                    let bytes = (MIDDLE_BYTES * self.ground.dispatchers as i32).min(LARGE_BYTES);
                    self.ground
                        .emit(&self.name, SILENT_ENDPOINTS, events, bytes)
                        .await
                }
                Bad::FallsSilentWide => {
                    self.receiver.manner.send_replace(Manner::Silent);
                    self.ground.emit(&self.name, 1, WIDE_EVENTS, MIDDLE_BYTES).await
                }
                Bad::Lingers => {
                    self.receiver.manner.send_replace(Manner::After(LINGER));
                    self.ground.emit(&self.name, 1, LINGERING_EVENTS, 10).await
                }
                Bad::StopsAccepting => self.ground.emit(&self.name, 1, UNACCEPTED_EVENTS, 10).await,
                Bad::Replays => self.replay().await,
                Bad::HoldsKey => self.hold_key().await,
                Bad::DryRuns => self.dry_run().await,
            };
            // What was begun goes on: their endpoints stay as they are.
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = misbehaving => {}
            () = stop.cancelled() => {}
        }
    }

    /// Answers everything at once, takes back what it asked for, and hands out its receivers: they go on until the end.
    pub(crate) async fn behave(self) -> BadReceiver {
        self.receiver.manner.send_replace(Manner::Quick);
        if self.bad == Bad::Replays {
            self.cancel_replays().await;
        }
        self.enable(true).await;
        self.receiver
    }

    async fn hoard(&self) -> Option<()> {
        loop {
            self.enable(false).await?;
            self.ground.emit(&self.name, 1, HOARD, LARGE_BYTES).await?;
            self.enable(true).await?;
            sleep(HOARD_EVERY).await;
        }
    }

    async fn replay(&self) -> Option<()> {
        let path = format!("/tenants/{}/replays", self.name);
        let endpoint = self.endpoints.first()?;
        let body = json!({ "endpoint": endpoint, "state": "delivered", "rate_per_second": 1 });
        let mut asking = JoinSet::new();
        for client in 0..CLIENTS {
            let (ground, key, path, body) =
                (self.ground.clone(), self.key.clone(), path.clone(), body.clone());
            asking.spawn(async move {
                for _ in (client..REPLAYS).step_by(CLIENTS) {
                    let _ = ground.ask(Method::POST, &path, &key, &body).await;
                }
            });
        }
        asking.join_all().await;
        Some(())
    }

    async fn cancel_replays(&self) {
        let path = format!("/tenants/{}/replays", self.name);
        let list = self
            .ground
            .insist(Method::GET, &format!("{path}?limit=1000"), json!({}))
            .await;
        let list = list.unwrap_or_default();
        let running: Vec<String> = list["data"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|replay| replay["state"] == "running")
            .filter_map(|replay| replay["id"].as_str().map(ToOwned::to_owned))
            .collect();
        let running = Arc::new(std::sync::Mutex::new(running));
        let mut asking = JoinSet::new();
        for _ in 0..CLIENTS / 4 {
            let (ground, path, running) = (self.ground.clone(), path.clone(), running.clone());
            asking.spawn(async move {
                loop {
                    let next = running.lock().expect("not poisoned").pop();
                    let Some(id) = next else { return };
                    let path = format!("{path}/{id}");
                    let _ = ground.insist(Method::DELETE, &path, json!({})).await;
                }
            });
        }
        asking.join_all().await;
    }

    async fn hold_key(&self) -> Option<()> {
        let mut holder = self.ground.connect().await?;
        sqlx::raw_sql("begin").execute(&mut holder).await.ok()?;
        sqlx::query("select postrider.emit($1, 'bad.t0', '{}', null, null, 'k')")
            .bind(&self.name)
            .execute(&mut holder)
            .await
            .ok()?;
        let path = format!("/tenants/{}/events", self.name);
        let body = json!({ "type": "bad.t0", "data": {}, "ordering_key": "k" });
        let mut asking = JoinSet::new();
        loop {
            for api in self.ground.apis() {
                let (ground, path, body) = (self.ground.clone(), path.clone(), body.clone());
                asking.spawn(async move {
                    let _ = ground
                        .ask_at(&api, Method::POST, &path, ADMIN_API_KEY, &body)
                        .await;
                });
            }
            while asking.try_join_next().is_some() {}
            sleep(KEY_EMITS_EVERY).await;
        }
    }

    async fn dry_run(&self) -> Option<()> {
        let path = format!("/tenants/{}/replays", self.name);
        let endpoint = self.endpoints.first()?;
        let since = chrono::Utc::now() - chrono::TimeDelta::hours(1);
        let body = json!({ "dry_run": true, "kind": "missing", "endpoint": endpoint, "since": since });
        let mut asking = JoinSet::new();
        for _ in 0..CLIENTS * self.ground.apis().len() {
            let (ground, key, path, body) =
                (self.ground.clone(), self.key.clone(), path.clone(), body.clone());
            asking.spawn(async move {
                loop {
                    if ground.ask(Method::POST, &path, &key, &body).await.is_none() {
                        sleep(Duration::from_millis(50)).await;
                    }
                }
            });
        }
        asking.join_all().await;
        Some(())
    }
}
