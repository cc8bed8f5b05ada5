//! Tenants that move between cells: nothing is lost, nothing comes twice, every key stays in order, whoever is killed meanwhile.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use sqlx::Connection;

use crate::{
    cells::{Pair, emit, endpoint},
    support::{Answer, Api, Database, Postrider, Receiver, until},
};

const KEYS: usize = 5;

/// A pair with an API and a dispatcher at home, which moves tenants.
pub(crate) struct World {
    pub(crate) pair: Pair,
    pub(crate) dispatcher: Postrider,
    pub(crate) api: Api,
    _dashboard: Postrider,
}

impl World {
    pub(crate) async fn start() -> Self {
        let pair = Pair::start().await;
        let dispatcher = Postrider::on_database("dispatcher", &pair.home).start().await;
        let dashboard = Postrider::on_database("dashboard", &pair.home).start().await;
        Self {
            api: dashboard.api(),
            pair,
            dispatcher,
            _dashboard: dashboard,
        }
    }

    pub(crate) async fn begin(&self, to: &str) -> String {
        let form = json!({ "tenant": "acme", "to": to });
        let (status, begun) = self.api.call(Method::POST, "/moves", Some(form)).await;
        assert_eq!(status, StatusCode::ACCEPTED, "{begun}");
        begun["id"].as_str().expect("an id").to_owned()
    }

    pub(crate) async fn state(&self, id: &str) -> Value {
        self.api.get(&format!("/moves/{id}")).await
    }

    pub(crate) async fn ended(&self, id: &str) -> Value {
        until("the move has ended", || async {
            let now = self.state(id).await;
            (!now["ended_at"].is_null()).then_some(now)
        })
        .await
    }

    pub(crate) async fn move_to(&self, to: &str) {
        let id = self.begin(to).await;
        let ended = self.ended(&id).await;
        assert_eq!(ended["state"], "done", "{ended}");
    }
}

/// Emits at home all the time, and knows what was committed.
pub(crate) struct Producers {
    committed: Arc<Mutex<BTreeSet<String>>>,
    stop: Arc<AtomicBool>,
    running: Vec<tokio::task::JoinHandle<()>>,
}

impl Producers {
    pub(crate) fn start(home: &Database) -> Self {
        let (committed, stop) = (
            Arc::<Mutex<BTreeSet<String>>>::default(),
            Arc::<AtomicBool>::default(),
        );
        let running = (0..KEYS)
            .map(|key| tokio::spawn(produce(home.options(), key, committed.clone(), stop.clone())))
            .collect();
        Self {
            committed,
            stop,
            running,
        }
    }

    pub(crate) async fn end(self) -> BTreeSet<String> {
        self.stop.store(true, Ordering::Relaxed);
        for one in self.running {
            one.await.expect("ended");
        }
        self.committed.lock().expect("not poisoned").clone()
    }
}

/// Every event of a key has the next number; one in ten is rolled back.
async fn produce(
    home: sqlx::postgres::PgConnectOptions,
    key: usize,
    committed: Arc<Mutex<BTreeSet<String>>>,
    stop: Arc<AtomicBool>,
) {
    let mut connection = sqlx::PgConnection::connect_with(&home).await.expect("connected");
    let (mut tried, mut number) = (0, 0);
    while !stop.load(Ordering::Relaxed) {
        tried += 1;
        let id = format!("k{key}-{tried}");
        let data = json!({ "n": number }).to_string();
        let mut transaction = connection.begin().await.expect("begun");
        emit(
            &mut transaction,
            "acme",
            &data,
            Some(&id),
            Some(&format!("k{key}")),
        )
        .await
        .expect("emitted");
        if tried % 10 == 0 {
            transaction.rollback().await.expect("rolled back");
        } else {
            transaction.commit().await.expect("committed");
            committed.lock().expect("not poisoned").insert(id);
            number += 1;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Whatever was committed came, and each key in its order. Returns how many came more than once.
pub(crate) fn check(receiver: &Receiver, committed: &BTreeSet<String>) -> usize {
    let (mut times, mut next) = (BTreeMap::<String, usize>::new(), BTreeMap::<String, i64>::new());
    for request in receiver.received() {
        let id = request.event_id().to_owned();
        let again = times.entry(id.clone()).or_default();
        *again += 1;
        if *again > 1 {
            continue;
        }
        let key = id.split('-').next().unwrap_or_default().to_owned();
        let expected = next.entry(key).or_default();
        assert_eq!(request.field("data")["n"], *expected, "{id} is out of order");
        *expected += 1;
    }
    let came: BTreeSet<String> = times.keys().cloned().collect();
    assert_eq!(&came, committed, "lost or invented");
    times.values().filter(|times| **times > 1).count()
}

pub(crate) async fn ordered_endpoint(database: &Database, url: &str) {
    let id = endpoint(database, "acme", url).await;
    let ordered = format!("update postrider.endpoints set ordered = true where id = {id}");
    database.execute(&ordered).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_that_moves_under_load_loses_nothing_and_gets_nothing_twice() {
    let world = World::start().await;
    let receiver = Receiver::start().await;
    ordered_endpoint(&world.pair.cell, &receiver.url("/hook")).await;
    let producers = Producers::start(&world.pair.home);
    for to in ["home", "a", "home", "a"] {
        let before = receiver.count();
        receiver.wait_for(before + 20).await;
        world.move_to(to).await;
    }
    let committed = producers.end().await;
    receiver.wait_for(committed.len()).await;
    assert_eq!(check(&receiver, &committed), 0, "came twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mover_that_is_killed_is_continued_by_another() {
    let mut world = World::start().await;
    let receiver = Receiver::start().await;
    ordered_endpoint(&world.pair.cell, &receiver.url("/hook")).await;
    let producers = Producers::start(&world.pair.home);
    receiver.wait_for(50).await;
    for (round, to) in ["home", "a", "home", "a"].into_iter().enumerate() {
        let id = world.begin(to).await;
        // Later each time.
        tokio::time::sleep(Duration::from_millis(30 * (1 + 2 * round as u64))).await;
        world.dispatcher.kill();
        world.dispatcher.restart().await;
        assert_eq!(world.ended(&id).await["state"], "done");
    }
    let committed = producers.end().await;
    receiver.wait_for(committed.len()).await;
    let twice = check(&receiver, &committed);
    assert!(twice <= 4 * KEYS, "at most what was in flight at home: {twice}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_failed_what_waits_and_what_was_delivered_move_along() {
    let world = World::start().await;
    let (home, cell) = (&world.pair.home, &world.pair.cell);
    let receiver = Receiver::start().await;
    endpoint(cell, "acme", &receiver.url("/hook")).await;
    let mut producer = home.producer().await;
    receiver.script([Answer::Status(204), Answer::Status(500)]);
    receiver.answer(Answer::Status(410));
    for id in ["delivered", "retried"] {
        emit(&mut producer, "acme", "{\"n\": 1}", Some(id), None)
            .await
            .expect("emitted");
        let recorded = "select count(*) from postrider.attempts";
        let before = cell.count(recorded).await;
        until("it was tried", || async {
            (cell.count(recorded).await > before).then_some(())
        })
        .await;
    }
    emit(&mut producer, "acme", "{\"n\": 1}", Some("dead"), Some("key"))
        .await
        .expect("emitted");
    until("it is dead", || async {
        (cell.count("select count(*) from postrider.dead_letters").await == 2).then_some(())
    })
    .await;
    let before = everything(cell).await;
    assert!(
        before["attempts"].as_array().is_some_and(|rows| rows.len() >= 3),
        "{before}"
    );
    world.move_to("home").await;
    let after = everything(home).await;
    for (table, rows) in before.as_object().expect("tables") {
        assert_eq!(rows, &after[table], "{table}");
    }
    for (table, rows) in everything(cell).await.as_object().expect("tables") {
        assert_eq!(rows, &json!([]), "{table} was not erased");
    }
    // Its id is still taken, and a replay finds it.
    let again = emit(&mut producer, "acme", "{\"n\": 1}", Some("delivered"), None).await;
    assert_eq!(again.expect("the same event"), "delivered");
    let changed = emit(&mut producer, "acme", "{\"n\": 2}", Some("delivered"), None).await;
    assert_eq!(changed.expect_err("other content").0, "PR409");
    receiver.answer(Answer::Status(204));
    home.execute("update postrider.endpoints set state = 'active', state_reason = null")
        .await;
    let (status, replay) = world
        .api
        .call(
            Method::POST,
            "/tenants/acme/replays",
            Some(json!({ "state": "dead" })),
        )
        .await;
    assert_eq!(status, StatusCode::ACCEPTED, "{replay}");
    until("all are delivered", || async {
        let delivered = "select count(*) from postrider.attempts where final = 'delivered'";
        (home.count(delivered).await == 3).then_some(())
    })
    .await;
}

/// The tenant's rows, without what belongs to the database they are in.
async fn everything(database: &Database) -> Value {
    let tables = [
        "endpoints",
        "secrets",
        "events",
        "event_ids",
        "ordering_keys",
        "attempts",
        "dead_letters",
        "dead_letter_counts",
        "queue",
        "retries",
        "archived_events",
        "archived_attempts",
        "endpoint_health",
    ];
    let mut found = serde_json::Map::new();
    for table in tables {
        let query = format!(
            "select coalesce(json_agg(to_jsonb(t) - 'xid' - 'updated_at' order by t::text), '[]')::text
             from postrider.{table} t"
        );
        let rows = database.text(&query).await;
        found.insert(table.to_owned(), serde_json::from_str(&rows).expect("JSON"));
    }
    Value::Object(found)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_is_cancelled_and_refused_in_words() {
    let world = World::start().await;
    let receiver = Receiver::start().await;
    ordered_endpoint(&world.pair.cell, &receiver.url("/hook")).await;
    for (form, status) in [
        (json!({ "tenant": "acme", "to": "a" }), StatusCode::CONFLICT),
        (
            json!({ "tenant": "acme", "to": "nowhere" }),
            StatusCode::UNPROCESSABLE_ENTITY,
        ),
        (
            json!({ "tenant": "nobody", "to": "home" }),
            StatusCode::UNPROCESSABLE_ENTITY,
        ),
        (json!({ "tenant": "acme" }), StatusCode::UNPROCESSABLE_ENTITY),
    ] {
        let (answered, problem) = world.api.call(Method::POST, "/moves", Some(form)).await;
        assert_eq!(answered, status, "{problem}");
    }
    let producers = Producers::start(&world.pair.home);
    receiver.wait_for(20).await;
    // An attempt that hangs keeps the move from going on.
    receiver.answer(Answer::Hold);
    let before = receiver.count();
    receiver.wait_for(before + 1).await;
    let id = world.begin("home").await;
    until("it says what it waits for", || async {
        (world.state(&id).await["waits_for"] == "attempts in flight").then_some(())
    })
    .await;
    let again = json!({ "tenant": "acme", "to": "home" });
    let (status, problem) = world.api.call(Method::POST, "/moves", Some(again)).await;
    assert_eq!(status, StatusCode::CONFLICT, "{problem}");
    let (status, cancelled) = world
        .api
        .call(Method::DELETE, &format!("/moves/{id}"), None)
        .await;
    assert_eq!(status, StatusCode::ACCEPTED, "{cancelled}");
    receiver.answer(Answer::Status(204));
    receiver.release();
    assert_eq!(world.ended(&id).await["state"], "cancelled");
    let (status, _) = world
        .api
        .call(Method::DELETE, &format!("/moves/{id}"), None)
        .await;
    assert_eq!(status, StatusCode::CONFLICT, "it has ended");
    let committed = producers.end().await;
    receiver.wait_for(committed.len()).await;
    assert_eq!(check(&receiver, &committed), 0, "came twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cell_that_is_drained_ends_up_without_tenants() {
    let world = World::start().await;
    let receiver = Receiver::start().await;
    ordered_endpoint(&world.pair.cell, &receiver.url("/hook")).await;
    let (status, _) = world
        .api
        .call(Method::PUT, "/cells/a", Some(json!({ "state": "draining" })))
        .await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    let (status, problem) = world
        .api
        .call(Method::PUT, "/cells/home", Some(json!({ "state": "draining" })))
        .await;
    assert_eq!(status, StatusCode::CONFLICT, "{problem}");
    until("the cell has no tenants", || async {
        let left = "select count(*) from postrider.tenants where cell_id = 1 or moving";
        (world.pair.home.count(left).await == 0).then_some(())
    })
    .await;
    let mut producer = world.pair.home.producer().await;
    emit(&mut producer, "acme", "{\"n\": 0}", Some("k0-1"), Some("k0"))
        .await
        .expect("emitted");
    receiver.wait_for(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restored_copy_of_home_leaves_the_cells_alone() {
    let world = World::start().await;
    let receiver = Receiver::start().await;
    ordered_endpoint(&world.pair.cell, &receiver.url("/hook")).await;
    until("its API serves the cell", || async {
        let (status, _) = world.api.call(Method::GET, "/tenants/acme/endpoints", None).await;
        (status == StatusCode::OK).then_some(())
    })
    .await;
    world
        .pair
        .home
        .execute("update postrider.sending set identity = 'another'")
        .await;
    until("its API has left the cell", || async {
        let (status, _) = world.api.call(Method::GET, "/tenants/acme/endpoints", None).await;
        (status == StatusCode::SERVICE_UNAVAILABLE).then_some(())
    })
    .await;
    let id = world.begin("home").await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let now = world.state(&id).await;
    assert_eq!(
        (&now["state"], &now["waits_for"]),
        (&json!("stopping"), &Value::Null),
        "{now}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_that_stays_at_home_after_all_keeps_its_order_and_needs_no_other_cell() {
    let world = World::start().await;
    let receiver = Receiver::start().await;
    ordered_endpoint(&world.pair.cell, &receiver.url("/hook")).await;
    world.move_to("home").await;
    let producers = Producers::start(&world.pair.home);
    for _ in 0..3 {
        let before = receiver.count();
        receiver.wait_for(before + 20).await;
        let id = world.begin("a").await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        let (status, cancelled) = world
            .api
            .call(Method::DELETE, &format!("/moves/{id}"), None)
            .await;
        assert_eq!(status, StatusCode::ACCEPTED, "{cancelled}");
        assert_eq!(world.ended(&id).await["state"], "cancelled");
    }
    let committed = producers.end().await;
    receiver.wait_for(committed.len()).await;
    assert_eq!(check(&receiver, &committed), 0, "came twice");
}
