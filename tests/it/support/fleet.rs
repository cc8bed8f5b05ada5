//! A dashboard and several dispatchers on one database, each a process of its own.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Mutex,
};

use serde_json::{Value, json};
use sqlx::Row;
use uuid::Uuid;

use super::{Api, Database, Postrider, Received, api::Endpoint, process::Launch, until};

/// Endpoints that are made at a time.
const AT_ONCE: usize = 8;

pub(crate) struct Fleet {
    database: Database,
    dashboard: Postrider,
    launch: Launch,
    dispatchers: BTreeMap<Uuid, Postrider>,
    /// Event types that are there.
    types: Mutex<HashSet<String>>,
}

impl Fleet {
    /// With the tenant `acme` and the type `invoice.paid`.
    pub(crate) async fn start(dispatchers: usize) -> Self {
        Self::start_on(Database::fresh().await, dispatchers, &[]).await
    }

    pub(crate) async fn start_on(database: Database, dispatchers: usize, settings: &[(&str, &str)]) -> Self {
        let dashboard = Postrider::on_database("dashboard", &database).start().await;
        let mut launch = Postrider::on_database("dispatcher", &database);
        for (name, value) in settings {
            launch = launch.set(name, value);
        }
        let mut fleet = Self {
            database,
            dashboard,
            launch,
            dispatchers: BTreeMap::new(),
            types: Mutex::default(),
        };
        fleet.api().tenant("acme").await;
        fleet.api().event_type("invoice.paid").await;
        for _ in 0..dispatchers {
            fleet.add().await;
        }
        fleet
    }

    pub(crate) fn database(&self) -> &Database {
        &self.database
    }

    pub(crate) fn api(&self) -> Api {
        self.dashboard.api()
    }

    /// An endpoint of `acme`.
    pub(crate) async fn endpoint(&self, url: &str, more: Value) -> Endpoint {
        self.api().endpoint("acme", url, more).await
    }

    /// An endpoint of `acme` for a type of its own.
    pub(crate) async fn endpoint_for(&self, r#type: &str, url: &str, mut more: Value) -> Endpoint {
        let new = self.types.lock().expect("not poisoned").insert(r#type.to_owned());
        if new {
            self.api().event_type(r#type).await;
        }
        more["types"] = json!([r#type]);
        self.endpoint(url, more).await
    }

    /// Many of the same kind, made side by side.
    pub(crate) async fn endpoints_for(&self, r#type: &str, urls: Vec<String>, more: Value) {
        let mut urls = urls.into_iter();
        if let Some(first) = urls.next() {
            self.endpoint_for(r#type, &first, more.clone()).await;
        }
        let mut made = tokio::task::JoinSet::new();
        for url in urls {
            // Within what a tenant may ask for at a time.
            if made.len() >= AT_ONCE {
                made.join_next().await.expect("one").expect("it was made");
            }
            let (api, mut more) = (self.api(), more.clone());
            more["types"] = json!([r#type]);
            made.spawn(async move { api.endpoint("acme", &url, more).await });
        }
        made.join_all().await;
    }

    /// Emits this many events in one transaction, with the ids `<prefix>-1` and so on.
    pub(crate) async fn emit(&self, r#type: &str, prefix: &str, count: usize) {
        let mut producer = self.database.connect().await;
        sqlx::query("select postrider.emit('acme', $1, '{}', $2 || '-' || n) from generate_series(1, $3) n")
            .bind(r#type)
            .bind(prefix)
            .bind(count as i32)
            .execute(&mut producer)
            .await
            .expect("emitted");
    }

    /// Starts one more dispatcher and answers who it is, in the table of dispatchers.
    pub(crate) async fn add(&mut self) -> Uuid {
        let known = self.registered().await;
        let started = self.launch.clone().start().await;
        let id = until("the new dispatcher says who it is", || async {
            let now = self.registered().await;
            now.into_iter().find(|id| !known.contains(id))
        })
        .await;
        self.dispatchers.insert(id, started);
        id
    }

    pub(crate) fn dispatcher(&mut self, id: Uuid) -> &mut Postrider {
        self.dispatchers.get_mut(&id).expect("one of the fleet")
    }

    pub(crate) fn ids(&self) -> Vec<Uuid> {
        self.dispatchers.keys().copied().collect()
    }

    pub(crate) fn kill(&mut self, id: Uuid) {
        self.dispatchers.remove(&id).expect("one of the fleet").kill();
    }

    pub(crate) async fn stop(&mut self, id: Uuid) {
        let mut stopped = self.dispatchers.remove(&id).expect("one of the fleet");
        assert!(stopped.stop().await.success(), "exit status 0");
    }

    async fn registered(&self) -> Vec<Uuid> {
        let mut connection = self.database.connect().await;
        sqlx::query_scalar("select id from postrider.dispatchers")
            .fetch_all(&mut connection)
            .await
            .expect("read")
    }

    /// How many shards each owner has; those without one under nil.
    pub(crate) async fn shares(&self) -> HashMap<Uuid, i64> {
        let mut connection = self.database.connect().await;
        let rows = sqlx::query("select owner, count(*) from postrider.shards group by owner")
            .fetch_all(&mut connection)
            .await
            .expect("read");
        rows.iter()
            .map(|row| (row.get::<Option<Uuid>, _>(0).unwrap_or_default(), row.get(1)))
            .collect()
    }

    /// Waits until every shard belongs to one of ours, to each as many as to the others.
    pub(crate) async fn balanced(&self) {
        until("the shards are shared out", || async {
            let shares = self.shares().await;
            let fair = |count: i64| (64 / self.dispatchers.len() as i64..).take(2).any(|n| n == count);
            let ours = |id| self.dispatchers.contains_key(id);
            let done = shares.len() == self.dispatchers.len()
                && shares.iter().all(|(id, count)| ours(id) && fair(*count));
            done.then_some(())
        })
        .await;
    }

    /// The dispatcher that sends to an endpoint now.
    pub(crate) async fn owner_of(&self, endpoint: &Endpoint) -> Uuid {
        until("the endpoint has an owner", || async {
            let mut connection = self.database.connect().await;
            let owner: Option<Uuid> = sqlx::query_scalar(
                "select s.owner from postrider.endpoints e join postrider.shards s using (shard)
                 where e.public_id = $1",
            )
            .bind(&endpoint.id)
            .fetch_one(&mut connection)
            .await
            .expect("read");
            owner
        })
        .await
    }

    /// No dispatcher found by its sweep what its tail should have shown.
    pub(crate) fn assert_nothing_missed(&self) {
        for (id, dispatcher) in &self.dispatchers {
            let missed: Vec<String> = dispatcher
                .log_lines()
                .into_iter()
                .filter(|line| line.contains("the tail had missed"))
                .collect();
            assert!(missed.is_empty(), "{id}: {missed:?}");
        }
    }
}

/// How often each event came, by path and id.
pub(crate) fn times(requests: &[Received]) -> BTreeMap<(String, String), usize> {
    let mut times = BTreeMap::new();
    for request in requests {
        let key = (request.path.clone(), request.event_id().to_owned());
        *times.entry(key).or_default() += 1;
    }
    times
}

/// Those that came more than once.
pub(crate) fn repeated(requests: &[Received]) -> Vec<(String, String)> {
    let repeated = times(requests).into_iter().filter(|(_, count)| *count > 1);
    repeated.map(|(key, _)| key).collect()
}
