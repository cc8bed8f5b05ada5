//! A tenant that takes all it can get leaves the others their part of the API.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use reqwest::{Client, Method, Response, StatusCode};
use serde_json::{Value, json};
use sqlx::Connection;
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{interval, timeout},
};

use crate::support::{ADMIN_API_KEY, Api, Database, Person, Postrider, Receiver};

/// What a busy machine adds now and then to any request, and once in a while a group of emits that met a key which an open
/// transaction holds: 100 ms.
const NOISE: Duration = Duration::from_millis(250);
const RATIO_MAX: f64 = 1.5;

fn p99(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[(times.len() * 99).div_ceil(100) - 1]
}

fn assert_undisturbed(what: &str, alone: Vec<Duration>, beside: Vec<Duration>) {
    let (alone, beside) = (p99(alone), p99(beside));
    eprintln!("{what}: p99 {alone:?} alone, {beside:?} beside");
    assert!(
        beside <= alone.mul_f64(RATIO_MAX) + NOISE,
        "{what}: p99 {alone:?} alone, {beside:?} beside"
    );
}

/// Another tenant: it emits, reads and is authenticated by keys that are in the database.
#[derive(Clone)]
struct Healthy {
    producer: Api,
    reader: Api,
}

impl Healthy {
    async fn make(program: &Postrider) -> Self {
        let api = program.api();
        api.tenant("other").await;
        let key = async |body: Value| {
            let (status, made) = api.call(Method::POST, "/api-keys", Some(body)).await;
            assert_eq!(status, StatusCode::CREATED, "{made}");
            program.api_with_key(made["key"].as_str().expect("a key"))
        };
        Self {
            producer: key(json!({"role": "producer", "name": "p"})).await,
            reader: key(json!({"role": "tenant", "tenant": "other", "name": "t"})).await,
        }
    }

    /// How long each emit and each read took.
    async fn watch(&self, count: usize) -> (Vec<Duration>, Vec<Duration>) {
        let (mut emits, mut reads) = (Vec::new(), Vec::new());
        let mut pace = interval(Duration::from_millis(40));
        for n in 0..count {
            pace.tick().await;
            let began = Instant::now();
            let event = json!({"type": "invoice.paid", "data": {"n": n}});
            let (status, told) = self.producer.emit("other", event).await;
            assert_eq!(status, StatusCode::ACCEPTED, "{told}");
            emits.push(began.elapsed());
            let began = Instant::now();
            self.reader.get("/tenants/other/events?limit=5").await;
            reads.push(began.elapsed());
        }
        (emits, reads)
    }
}

fn client() -> Client {
    crate::support::http_client()
        .timeout(Duration::from_secs(30))
        .build()
        .expect("a client")
}

async fn post(client: &Client, url: &str, body: &Value) -> Response {
    client
        .post(url)
        .bearer_auth(ADMIN_API_KEY)
        .body(body.to_string())
        .send()
        .await
        .expect("an answer")
}

fn assert_put_off(answer: &Response) {
    let status = answer.status();
    assert!(
        matches!(
            status,
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS
        ),
        "{status}"
    );
    assert!(answer.headers().contains_key("retry-after"), "{status}");
}

#[tokio::test]
async fn an_open_transaction_that_holds_an_ordering_key_delays_no_other_tenant() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    let healthy = Healthy::make(&program).await;
    healthy.watch(10).await;
    let (emits_alone, reads_alone) = healthy.watch(200).await;

    let mut holder = database.connect().await;
    let mut transaction = holder.begin().await.expect("begun");
    sqlx::query("select postrider.emit('acme', 'invoice.paid', '{}', null, null, 'k')")
        .execute(&mut *transaction)
        .await
        .expect("emitted");
    let (over, mut is_over) = watch::channel(false);
    let bad = tokio::spawn({
        let (client, url) = (client(), program.url("/v1/tenants/acme/events"));
        async move {
            let mut requests = JoinSet::new();
            let mut pace = interval(Duration::from_millis(100));
            for n in 0.. {
                tokio::select! {
                    _ = pace.tick() => {}
                    _ = is_over.changed() => break,
                }
                let (client, url) = (client.clone(), url.clone());
                requests.spawn(async move {
                    let body = json!({"type": "invoice.paid", "ordering_key": "k", "data": {"n": n}});
                    let began = Instant::now();
                    let answer = post(&client, &url, &body).await;
                    (began.elapsed(), answer)
                });
            }
            requests.join_all().await
        }
    });
    let (emits, reads) = healthy.watch(300).await;
    over.send_replace(true);
    for (took, answer) in bad.await.expect("no panic") {
        assert_put_off(&answer);
        assert!(took < Duration::from_secs(8), "{took:?}");
    }
    transaction.rollback().await.expect("rolled back");
    let event = json!({"type": "invoice.paid", "ordering_key": "k", "data": {}});
    let (status, told) = program.api().emit("acme", event).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{told}");
    assert_undisturbed("emits", emits_alone, emits);
    assert_undisturbed("reads", reads_alone, reads);
}

#[tokio::test]
async fn dry_runs_of_one_tenant_delay_no_other() {
    const EVENTS: i32 = 200_000;
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let endpoint = program.api().acme(&receiver.url("/hook"), json!({})).await;
    let healthy = Healthy::make(&program).await;
    database
        .execute(&format!(
            "insert into postrider.events (id, tenant_id, type_id, schema_id, body)
             select postrider.uuid_at(clock_timestamp()), s.tenant, s.type_id, s.id, '{{}}'
             from generate_series(1, {EVENTS}),
                  (select s.id, s.type_id, t.id as tenant from postrider.schemas s, postrider.tenants t
                   where t.slug = 'acme' and s.type_id = (select id from postrider.event_types where name = 'invoice.paid')) s"
        ))
        .await;
    healthy.watch(10).await;
    let (emits_alone, reads_alone) = healthy.watch(200).await;

    let (over, is_over) = watch::channel(false);
    let body = Arc::new(json!({"kind": "missing", "endpoint": endpoint.id, "dry_run": true}));
    let mut bad = JoinSet::new();
    for _ in 0..24 {
        let (client, url) = (client(), program.url("/v1/tenants/acme/replays"));
        let (body, is_over) = (body.clone(), is_over.clone());
        bad.spawn(async move {
            let mut counted = 0;
            while !*is_over.borrow() {
                let began = Instant::now();
                let answer = post(&client, &url, &body).await;
                match answer.status() {
                    StatusCode::OK => counted += 1,
                    _ => {
                        assert_put_off(&answer);
                        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
                    }
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
            counted
        });
    }
    let (emits, reads) = healthy.watch(300).await;
    over.send_replace(true);
    let counted: usize = bad.join_all().await.into_iter().sum();
    assert!(counted > 0, "some of them are done");
    assert_undisturbed("emits", emits_alone, emits);
    assert_undisturbed("reads", reads_alone, reads);
}

/// What waits for a table that is locked is given up by the server too, and holds no more than one tenant's share.
#[tokio::test]
async fn requests_over_a_tenant_s_share_are_put_off_and_statements_end_in_the_server() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    let healthy = Healthy::make(&program).await;
    let mut holder = database.connect().await;
    let mut transaction = holder.begin().await.expect("begun");
    sqlx::query("lock table postrider.endpoints in access exclusive mode")
        .execute(&mut *transaction)
        .await
        .expect("locked");

    let locked = Instant::now();
    let url = program.url("/v1/tenants/acme/endpoints");
    let mut requests = JoinSet::new();
    for n in 0..40 {
        let (client, url) = (client(), url.clone());
        requests.spawn(async move {
            let asked = client.get(url).bearer_auth(ADMIN_API_KEY).send();
            // Some do not wait for the answer: what they asked for must not go on for them.
            match n % 4 {
                0 => {
                    let _ = timeout(Duration::from_millis(500), asked).await;
                    None
                }
                _ => Some((Instant::now(), asked.await.expect("an answer"), Instant::now())),
            }
        });
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    for _ in 0..20 {
        let read = timeout(
            Duration::from_secs(2),
            healthy.reader.get("/tenants/other/events"),
        );
        read.await.expect("another tenant reads");
    }
    let waiting = || async {
        database
            .count(
                "select count(*) from pg_stat_activity
                 where datname = current_database() and application_name like 'postrider dash%' and wait_event_type = 'Lock'",
            )
            .await
    };
    assert!(waiting().await <= 8, "{} wait", waiting().await);
    let mut quickly = 0;
    while let Some(ended) = requests.join_next().await {
        let Some((began, answer, ended)) = ended.expect("no panic") else {
            continue;
        };
        assert_put_off(&answer);
        let took = ended - began;
        assert!(took < Duration::from_secs(18), "{took:?}");
        quickly += usize::from(took < Duration::from_secs(4));
    }
    assert!(quickly >= 20, "{quickly} were put off at once");
    // Those that ask again and again, for the metrics, begin again; none goes on.
    let overdue = || async {
        database
            .count(
                "select count(*) from pg_stat_activity
                 where datname = current_database() and application_name like 'postrider dash%'
                   and wait_event_type = 'Lock' and query_start < clock_timestamp() - interval '12 seconds'",
            )
            .await
    };
    tokio::time::sleep_until((locked + Duration::from_secs(16)).into()).await;
    assert_eq!(overdue().await, 0, "no statement is left waiting");
    transaction.rollback().await.expect("rolled back");
    program.api().get("/tenants/acme/endpoints").await;
}

/// People who came by a portal link count as their tenant.
#[tokio::test]
async fn a_portal_has_no_more_than_its_tenant_s_share() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    let healthy = Healthy::make(&program).await;
    let (_, link) = api
        .call(Method::POST, "/tenants/acme/portal-links", Some(json!({})))
        .await;
    let link = link["url"].as_str().expect("a link").to_owned();
    let path = &link[link.find("/portal").expect("a path")..];
    let mut customer = Person::new(&program);
    customer.visit(path).await;
    let cookie = customer.cookie();

    let mut holder = database.connect().await;
    let mut transaction = holder.begin().await.expect("begun");
    sqlx::query("lock table postrider.endpoints in access exclusive mode")
        .execute(&mut *transaction)
        .await
        .expect("locked");
    let mut requests = JoinSet::new();
    for _ in 0..30 {
        let asked = client()
            .get(program.url("/endpoints"))
            .header("cookie", &cookie)
            .send();
        requests.spawn(async move { asked.await.expect("an answer").status() });
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    for _ in 0..20 {
        let read = timeout(
            Duration::from_secs(2),
            healthy.reader.get("/tenants/other/events"),
        );
        read.await.expect("another tenant reads");
    }
    let answers = requests.join_all().await;
    let refused = answers
        .iter()
        .filter(|status| **status == StatusCode::TOO_MANY_REQUESTS);
    assert!(refused.count() >= 20, "{answers:?}");
    transaction.rollback().await.expect("rolled back");
}
