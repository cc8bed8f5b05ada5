//! Restarts that nobody notices: a process that is told to stop says so and serves on for a moment, and a client that reads
//! `/readyz` loses no request.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use reqwest::{Client, StatusCode};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::support::{ADMIN_API_KEY, Database, Postrider, Receiver, http_client, until};

/// Emits in a second, of both clients together.
const RATE: u32 = 100;

/// A client as a load balancer is one: it asks each dashboard whether it is ready, and sends only to those that are.
#[derive(Clone, Default)]
struct Balancer(Arc<Mutex<Vec<Target>>>);

struct Target {
    url: String,
    is_ready: bool,
}

impl Balancer {
    fn set(&self, place: usize, url: String) {
        let mut targets = self.0.lock().expect("not poisoned");
        let target = Target { url, is_ready: false };
        match targets.get_mut(place) {
            Some(old) => *old = target,
            None => targets.push(target),
        }
    }

    fn urls(&self) -> Vec<String> {
        let targets = self.0.lock().expect("not poisoned");
        targets.iter().map(|target| target.url.clone()).collect()
    }

    /// Each ready one in turn.
    fn pick(&self, turn: usize) -> Option<String> {
        let targets = self.0.lock().expect("not poisoned");
        let ready: Vec<&Target> = targets.iter().filter(|target| target.is_ready).collect();
        (!ready.is_empty()).then(|| ready[turn % ready.len()].url.clone())
    }

    async fn watch(self, stop: Arc<AtomicBool>) {
        let client = http_client()
            .timeout(Duration::from_secs(2))
            .build()
            .expect("a client");
        while !stop.load(Ordering::Relaxed) {
            for url in self.urls() {
                let answer = client.get(format!("{url}/readyz")).send().await;
                let is_ready = answer.is_ok_and(|answer| answer.status() == StatusCode::OK);
                let mut targets = self.0.lock().expect("not poisoned");
                for target in targets.iter_mut().filter(|target| target.url == url) {
                    target.is_ready = is_ready;
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

/// What became of the emits.
#[derive(Clone, Default)]
struct Tally {
    accepted: Arc<Mutex<HashSet<String>>>,
    failed: Arc<Mutex<Vec<String>>>,
    asked: Arc<AtomicUsize>,
}

/// Emits at an even rate until it is stopped. No request is tried again.
async fn emit(client: Client, name: &'static str, balancer: Balancer, tally: Tally, stop: Arc<AtomicBool>) {
    let mut requests = JoinSet::new();
    let mut tick = tokio::time::interval(Duration::from_secs(2) / RATE);
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) {
        tick.tick().await;
        number += 1;
        let Some(url) = balancer.pick(number) else {
            tally
                .failed
                .lock()
                .expect("not poisoned")
                .push("nobody is ready".to_owned());
            continue;
        };
        tally.asked.fetch_add(1, Ordering::Relaxed);
        let (client, tally, id) = (client.clone(), tally.clone(), format!("{name}-{number}"));
        requests.spawn(async move {
            let request = client
                .post(format!("{url}/v1/tenants/acme/events"))
                .bearer_auth(ADMIN_API_KEY)
                .header("content-type", "application/json")
                .body(json!({ "type": "invoice.paid", "data": {}, "id": id }).to_string());
            let failure = match request.send().await {
                Ok(answer) if answer.status() == StatusCode::ACCEPTED => {
                    tally.accepted.lock().expect("not poisoned").insert(id);
                    return;
                }
                Ok(answer) => format!("{id}: {}", answer.status()),
                Err(error) => format!("{id}: {error:?}"),
            };
            tally.failed.lock().expect("not poisoned").push(failure);
        });
    }
    requests.join_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_of_every_role_at_100_emits_a_second_fails_no_request() {
    let database = Database::fresh().await;
    let dashboard = || Postrider::on_database("dashboard", &database).set("POSTRIDER_DRAIN_DELAY", "1500ms");
    let (first, second) = tokio::join!(dashboard().start(), dashboard().start());
    let dispatcher = || Postrider::on_database("dispatcher", &database).start();
    let (third, fourth) = tokio::join!(dispatcher(), dispatcher());
    let (mut dashboards, mut dispatchers) = ([first, second], [third, fourth]);
    let receiver = Receiver::start().await;
    dashboards[0].api().acme(&receiver.url("/hook"), json!({})).await;

    let (balancer, tally, stop) = (
        Balancer::default(),
        Tally::default(),
        Arc::new(AtomicBool::new(false)),
    );
    for (place, one) in dashboards.iter().enumerate() {
        balancer.set(place, one.url(""));
    }
    let watching = tokio::spawn(balancer.clone().watch(stop.clone()));
    until("the client knows who is ready", || async { balancer.pick(0) }).await;
    let mut clients = JoinSet::new();
    for (name, idle) in [("kept", 64), ("new", 0)] {
        let client = http_client()
            .pool_max_idle_per_host(idle)
            .timeout(Duration::from_secs(10));
        let client = client.build().expect("a client");
        clients.spawn(emit(client, name, balancer.clone(), tally.clone(), stop.clone()));
    }
    for (place, one) in dashboards.iter_mut().enumerate() {
        assert!(one.stop().await.success());
        one.restart().await;
        balancer.set(place, one.url(""));
        until("the client has noticed", || async {
            let targets = balancer.0.lock().expect("not poisoned");
            targets[place].is_ready.then_some(())
        })
        .await;
    }
    for one in &mut dispatchers {
        assert!(one.stop().await.success());
        one.restart().await;
    }
    stop.store(true, Ordering::Relaxed);
    clients.join_all().await;
    watching.await.expect("ended");

    let failed = tally.failed.lock().expect("not poisoned").clone();
    let asked = tally.asked.load(Ordering::Relaxed);
    assert!(
        failed.is_empty(),
        "{} of {asked} failed: {failed:?}",
        failed.len()
    );
    assert!(asked > 300, "only {asked} were asked for");
    database.drained().await;
    let accepted = tally.accepted.lock().expect("not poisoned").clone();
    let delivered: Vec<String> = receiver
        .wait_for(accepted.len())
        .await
        .iter()
        .map(|request| request.event_id().to_owned())
        .collect();
    let once: HashSet<String> = delivered.iter().cloned().collect();
    assert_eq!(once, accepted);
    assert_eq!(delivered.len(), accepted.len(), "nothing is sent twice");
}

#[tokio::test]
async fn a_stopping_dashboard_says_so_and_serves_on_while_a_hangup_changes_nothing() {
    let database = Database::fresh().await;
    let mut dashboard = Postrider::on_database("dashboard", &database)
        .set("POSTRIDER_METRICS_LISTEN", "127.0.0.1:0")
        .set("POSTRIDER_DRAIN_DELAY", "3s")
        .start()
        .await;
    let client = http_client().build().expect("a client");
    let health = dashboard.health_url("/readyz").await;
    let ask = async |url: &str| {
        let answer = client.get(url).send().await.expect("an answer");
        (answer.status().as_u16(), answer.text().await.expect("a body"))
    };
    assert_eq!(ask(&health).await, (200, "ready\n".to_owned()));

    dashboard.signal(Signal::HUP);
    until("the signal is told", || async {
        let lines = dashboard.log_lines();
        lines
            .iter()
            .any(|line| line.contains("SIGHUP ignored"))
            .then_some(())
    })
    .await;
    assert_eq!(ask(&health).await.0, 200);

    dashboard.signal(Signal::TERM);
    until("it says that it is stopping", || async {
        (ask(&health).await == (503, "stopping\n".to_owned())).then_some(())
    })
    .await;
    let (status, text) = ask(&dashboard.url("/readyz")).await;
    assert_eq!(status, 503);
    assert!(text.contains("Not ready: stopping."), "{text}");
    let request = client
        .get(dashboard.url("/v1/tenants"))
        .bearer_auth(ADMIN_API_KEY);
    let answer = request.send().await.expect("it still serves");
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(answer.headers()["connection"], "close");
    let (_, text) = ask(&dashboard.health_url("/metrics").await).await;
    assert!(text.contains("postrider_ready{role=\"dashboard\"} 0"), "{text}");
    assert!(dashboard.ended().await.success());
}

#[tokio::test]
async fn the_first_line_of_the_log_names_the_settings_and_the_last_one_the_end() {
    let database = Database::fresh().await;
    let mut dispatcher = Postrider::on_database("dispatcher", &database).start().await;
    assert!(dispatcher.stop().await.success());
    let lines: Vec<Value> = until("the log is complete", || async {
        let lines = dispatcher.log_lines();
        let lines: Vec<Value> = lines
            .iter()
            .map(|line| serde_json::from_str(line).expect("every line is JSON"))
            .collect();
        (lines.last()?["message"] == "stopped").then_some(lines)
    })
    .await;
    let first = &lines[0];
    assert_eq!(first["message"], "starting");
    assert_eq!(first["role"], "dispatcher");
    assert_eq!(first["version"], env!("CARGO_PKG_VERSION"));
    let settings = first["settings"].as_str().expect("settings");
    assert!(
        settings.contains("POSTRIDER_METRICS_LISTEN=127.0.0.1:0"),
        "{settings}"
    );
    assert!(settings.contains("POSTRIDER_MASTER_KEY=[hidden]"), "{settings}");
    assert!(!settings.contains(crate::support::MASTER_KEY), "{settings}");
    assert!(!settings.contains("postgresql://"), "{settings}");
}

#[tokio::test]
async fn a_fatal_error_is_a_line_of_json_where_the_log_is() {
    let database = Database::fresh().await;
    let cases = [
        (
            "POSTRIDER_TIMEOUT",
            "soon".to_owned(),
            2,
            "POSTRIDER_TIMEOUT is invalid",
        ),
        (
            "POSTRIDER_DATABASE_URL",
            database.url().replace(database.name(), "nowhere"),
            1,
            "cannot connect to the database",
        ),
    ];
    for (name, value, code, sentence) in cases {
        let launch = Postrider::on_database("dispatcher", &database).set(name, value);
        let output = launch.output();
        assert_eq!(output.status.code(), Some(code));
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        let last: Value = serde_json::from_str(told.lines().last().expect("a line")).expect("JSON");
        assert_eq!(last["level"], "ERROR", "{told}");
        assert!(
            last["message"]
                .as_str()
                .is_some_and(|text| text.contains(sentence)),
            "{told}"
        );
        let output = launch.set("POSTRIDER_LOG_FORMAT", "text").output();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        let last = told.lines().last().expect("a line");
        assert!(
            last.starts_with("postrider: ") && last.contains(sentence),
            "{told}"
        );
    }
}
