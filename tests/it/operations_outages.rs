//! Outages of the database: every role says why it is not ready, requests fail at once, the log tells it once, and all of it
//! ends by itself.

use std::time::{Duration, Instant};

use reqwest::Client;
use serde_json::{Value, json};
use sqlx::Connection;

use crate::support::{ADMIN_API_KEY, Database, Postrider, Receiver, http_client, until};

/// A request for a database that is away waits no longer than this, with a margin for a busy machine.
const FAILS_WITHIN: Duration = Duration::from_secs(4);

async fn ask(client: &Client, url: &str) -> (u16, String) {
    match client.get(url).send().await {
        Ok(answer) => (answer.status().as_u16(), answer.text().await.unwrap_or_default()),
        Err(error) => (0, error.to_string()),
    }
}

async fn until_unready(client: &Client, url: &str, reason: &str) {
    until(&format!("{url} names {reason}"), || async {
        let (status, text) = ask(client, url).await;
        (status == 503 && text.contains(reason)).then_some(())
    })
    .await;
}

async fn until_ready(client: &Client, url: &str) {
    until(&format!("{url} is ready again"), || async {
        (ask(client, url).await.0 == 200).then_some(())
    })
    .await;
}

async fn metrics(client: &Client, program: &Postrider) -> String {
    let request = client.get(program.url("/metrics")).bearer_auth(ADMIN_API_KEY);
    let answer = request.send().await.expect("an answer");
    answer.text().await.expect("a body")
}

/// The status, `Retry-After` and the body of an emit.
async fn emit(client: &Client, dashboard: &Postrider, path: &str) -> (u16, Option<String>, Value) {
    let event = json!({ "type": "invoice.paid", "data": {} });
    let body = match path {
        "events/batch" => json!({ "events": [event] }),
        _ => event,
    };
    let request = client
        .post(dashboard.url(&format!("/v1/tenants/acme/{path}")))
        .bearer_auth(ADMIN_API_KEY)
        .header("content-type", "application/json")
        .body(body.to_string());
    let answer = request.send().await.expect("an answer");
    let retry_after = answer.headers().get("retry-after");
    let retry_after = retry_after.map(|value| value.to_str().expect("text").to_owned());
    let status = answer.status().as_u16();
    let text = answer.text().await.expect("a body");
    (status, retry_after, serde_json::from_str(&text).expect("JSON"))
}

/// The value of a series without labels, or with these.
fn value(text: &str, series: &str) -> f64 {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {series} in {text}"))
        .parse()
        .expect("a number")
}

fn lines(program: &Postrider, level: &str) -> Vec<Value> {
    let lines = program.log_lines();
    let lines = lines
        .iter()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["level"] == level).collect()
}

/// One warning when it began, one line when it was over, and nothing else about it.
fn assert_told_once(program: &Postrider) {
    let warnings = [lines(program, "WARN"), lines(program, "ERROR")].concat();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let over = lines(program, "INFO");
    let over = over
        .iter()
        .filter(|line| line["message"] == "the database is available again");
    assert_eq!(over.count(), 1);
}

#[tokio::test]
async fn a_read_only_database_makes_every_role_unready_and_emits_fail_until_it_is_over() {
    let database = Database::fresh().await;
    let dashboard = Postrider::on_database("dashboard", &database)
        .set("POSTRIDER_METRICS_LISTEN", "127.0.0.1:0")
        .start()
        .await;
    let dispatcher = Postrider::on_database("dispatcher", &database).start().await;
    let receiver = Receiver::start().await;
    dashboard.api().acme(&receiver.url("/hook"), json!({})).await;
    let client = http_client()
        .timeout(Duration::from_secs(30))
        .build()
        .expect("a client");
    let (status, _, told) = emit(&client, &dashboard, "events").await;
    assert_eq!(status, 202, "{told}");
    receiver.wait_for(1).await;

    // As a demoted primary: sessions are cut, and new ones can only read.
    let name = database.name();
    database
        .execute_as_superuser(&format!(
            "alter database {name} set default_transaction_read_only = on"
        ))
        .await;
    database
        .execute_as_superuser(&format!(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'"
        ))
        .await;
    let reason = "the database is read-only";
    let ready = [
        dashboard.url("/readyz"),
        dashboard.health_url("/readyz").await,
        dispatcher.url("/readyz"),
    ];
    for url in &ready {
        until_unready(&client, url, reason).await;
        let answer = client.get(url).send().await.expect("an answer");
        assert_eq!(answer.headers()["retry-after"], "1", "{url}");
    }
    until_unready(&client, &ready[2], "no valid lease").await;
    for path in ["events", "events/batch"] {
        let (status, retry_after, told) = emit(&client, &dashboard, path).await;
        assert_eq!(
            (status, retry_after.as_deref()),
            (503, Some("1")),
            "{path}: {told}"
        );
        assert_eq!(told["type"], "urn:postrider:problem:busy", "{path}: {told}");
    }
    let (_, figures) = ask(&client, &dispatcher.url("/metrics")).await;
    assert_eq!(value(&figures, "postrider_database_up"), 1.0);
    assert_eq!(value(&figures, "postrider_database_writable"), 0.0);

    // Sessions that were opened meanwhile stay read-only for as long as they are kept.
    database
        .execute_as_superuser(&format!(
            "alter database {name} reset default_transaction_read_only"
        ))
        .await;
    for url in &ready {
        until_ready(&client, url).await;
    }
    for _ in 0..20 {
        let (status, _, told) = emit(&client, &dashboard, "events").await;
        assert_eq!(status, 202, "{told}");
    }
    receiver.wait_for(21).await;
    assert_told_once(&dashboard);
    assert_told_once(&dispatcher);
}

#[tokio::test]
async fn a_database_that_is_away_is_waited_for_at_the_start_and_told_once_when_it_goes() {
    let database = Database::on_private_server().await;
    database.stop_server().await;
    let spawn = |role| Postrider::on_database(role, &database).spawn();
    let mut dashboard = spawn("dashboard").await.expect("it tells its address");
    let mut dispatcher = spawn("dispatcher").await.expect("it tells its address");
    let client = http_client()
        .timeout(Duration::from_secs(30))
        .build()
        .expect("a client");
    for one in [&dashboard, &dispatcher] {
        assert_eq!(ask(&client, &one.url("/healthz")).await.0, 200, "alive");
        until_unready(&client, &one.url("/readyz"), "the database does not respond").await;
    }
    let (status, retry_after, told) = emit(&client, &dashboard, "events").await;
    assert_eq!((status, retry_after.as_deref()), (503, Some("1")), "{told}");
    assert!(dashboard.is_running() && dispatcher.is_running());

    assert!(database.start_server().await);
    for one in [&dashboard, &dispatcher] {
        until_ready(&client, &one.url("/readyz")).await;
        assert_told_once(one);
    }
    let receiver = Receiver::start().await;
    dashboard.api().acme(&receiver.url("/hook"), json!({})).await;
    let (status, _, told) = emit(&client, &dashboard, "events").await;
    assert_eq!(status, 202, "{told}");
    receiver.wait_for(1).await;

    database.stop_server().await;
    let began = Instant::now();
    for path in ["events", "events/batch"] {
        let asked = Instant::now();
        let (status, retry_after, told) = emit(&client, &dashboard, path).await;
        assert_eq!(
            (status, retry_after.as_deref()),
            (503, Some("1")),
            "{path}: {told}"
        );
        assert!(
            asked.elapsed() < FAILS_WITHIN,
            "{path} took {:?}",
            asked.elapsed()
        );
    }
    until("the dispatcher has no lease", || async {
        let (_, text) = ask(&client, &dispatcher.url("/metrics")).await;
        (value(&text, "postrider_lease_valid") == 0.0).then_some(())
    })
    .await;
    let figures = until("the queue has not been read for a while", || async {
        let (_, text) = ask(&client, &dispatcher.url("/metrics")).await;
        let late = value(&text, "postrider_oldest_due_seconds{held_by=\"dispatcher\"}");
        (late > 5.0).then_some(text)
    })
    .await;
    assert!(
        began.elapsed() > Duration::from_secs(4),
        "not before the lease is over"
    );
    for series in [
        "postrider_database_up",
        "postrider_database_writable",
        "postrider_ready{role=\"dispatcher\"}",
        "postrider_shards_owned",
    ] {
        assert_eq!(value(&figures, series), 0.0, "{series}");
    }
    // What nobody knows now has no series.
    for one in [&dispatcher, &dashboard] {
        until("old values are gone", || async {
            let text = metrics(&client, one).await;
            let gone = [
                "sending_stopped",
                "tenants_paused",
                "table_rows",
                "clock_offset_seconds",
            ];
            (!gone
                .iter()
                .any(|name| text.contains(&format!("postrider_{name}"))))
            .then_some(())
        })
        .await;
    }
    assert!(database.start_server().await);
    for one in [&mut dashboard, &mut dispatcher] {
        until_ready(&client, &one.url("/readyz")).await;
        let began = [lines(one, "WARN"), lines(one, "ERROR")].concat();
        assert_eq!(began.len(), 2, "one for each outage: {began:?}");
    }
    let (status, _, told) = emit(&client, &dashboard, "events").await;
    assert_eq!(status, 202, "{told}");
    receiver.wait_for(2).await;
}

#[tokio::test]
async fn an_emit_that_finds_the_disk_full_is_known_to_be_rolled_back() {
    let database = Database::fresh().await;
    let dashboard = Postrider::on_database("dashboard", &database).start().await;
    dashboard.api().acme("http://127.0.0.1:9/hook", json!({})).await;
    let client = http_client().build().expect("a client");
    database
        .execute(
            "create function public.full_disk() returns trigger language plpgsql as $$ begin
                 raise exception using errcode = '53100', message = 'could not extend file: No space left on device';
             end $$;
             create trigger full_disk before insert on postrider.events for each row
                 execute function public.full_disk()",
        )
        .await;
    for path in ["events", "events/batch"] {
        let (status, retry_after, told) = emit(&client, &dashboard, path).await;
        assert_eq!(
            (status, retry_after.as_deref()),
            (503, Some("1")),
            "{path}: {told}"
        );
        assert_eq!(told["type"], "urn:postrider:problem:busy", "{path}: {told}");
    }
    let told = [lines(&dashboard, "WARN"), lines(&dashboard, "ERROR")].concat();
    let is_named = |line: &Value| {
        line["error"]
            .as_str()
            .is_some_and(|text| text.contains("No space left"))
    };
    assert!(told.len() == 2 && told.iter().all(is_named), "{told:?}");
    database
        .execute("drop trigger full_disk on postrider.events")
        .await;
    let (status, _, told) = emit(&client, &dashboard, "events").await;
    assert_eq!(status, 202, "{told}");
    assert_eq!(database.count("select count(*) from postrider.events").await, 1);
}

#[tokio::test]
async fn a_dispatcher_that_may_not_read_the_queue_is_not_ready_and_says_so_once() {
    let database = Database::fresh().await;
    let dispatcher = Postrider::on_database("dispatcher", &database).start().await;
    let client = http_client().build().expect("a client");
    let url = dispatcher.url("/readyz");
    database
        .execute("revoke select on postrider.queue from postrider")
        .await;
    until_unready(&client, &url, "the queue was last read").await;
    let warnings = lines(&dispatcher, "WARN");
    for what in [
        "reading the queue failed",
        "searching for pending deliveries failed",
    ] {
        let is_it = |line: &&Value| line["message"].as_str().is_some_and(|text| text.contains(what));
        assert_eq!(warnings.iter().filter(is_it).count(), 1, "{warnings:?}");
    }
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    database
        .execute("grant select on postrider.queue to postrider")
        .await;
    until_ready(&client, &url).await;
    until("the log says so", || async {
        let told = lines(&dispatcher, "INFO");
        let is_over = |line: &Value| line["message"] == "the queue can be read again";
        told.iter().any(is_over).then_some(())
    })
    .await;
}

/// What a starting process waits for when it has just found the database writable, and which roles get there.
const STEPS: [(&str, &[&str]); 2] = [
    (
        "lock table postrider.schema_migrations",
        &["dashboard", "dispatcher"],
    ),
    (
        "select pg_advisory_xact_lock(hashtext('postrider.restored'))",
        &["dispatcher"],
    ),
];

#[tokio::test]
async fn a_database_that_turns_read_only_in_the_middle_of_a_start_is_waited_for() {
    let database = Database::fresh().await;
    let name = database.name();
    let client = http_client()
        .timeout(Duration::from_secs(30))
        .build()
        .expect("a client");
    for (step, roles) in STEPS {
        let mut holder = database.connect().await;
        let mut lock = holder.begin().await.expect("begun");
        sqlx::raw_sql(step).execute(&mut *lock).await.expect("locked");
        let mut started = Vec::new();
        for role in roles {
            let spawned = Postrider::on_database(role, &database).spawn();
            started.push(spawned.await.expect("it tells its address"));
        }
        let blocked = format!(
            "select count(*) from pg_stat_activity where datname = '{name}' and wait_event_type = 'Lock'"
        );
        until("each is in the middle of its start", || async {
            (database.count(&blocked).await == roles.len() as i64).then_some(())
        })
        .await;
        let read_only = format!("alter database {name} set default_transaction_read_only = on");
        database.execute_as_superuser(&read_only).await;
        let own = "select pg_backend_pid()";
        let own: i32 = sqlx::query_scalar(own)
            .fetch_one(&mut *lock)
            .await
            .expect("a pid");
        let cut = format!(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}' and pid <> {own}"
        );
        database.execute_as_superuser(&cut).await;
        lock.rollback().await.expect("released");
        for one in &mut started {
            until_unready(&client, &one.url("/readyz"), "the database is read-only").await;
            assert!(one.is_running(), "{:?}", one.log_lines());
        }
        let writable = format!("alter database {name} reset default_transaction_read_only");
        database.execute_as_superuser(&writable).await;
        for one in &mut started {
            until_ready(&client, &one.url("/readyz")).await;
            assert_told_once(one);
            assert!(one.stop().await.success());
        }
    }
}

#[tokio::test]
async fn a_dispatcher_without_a_lease_is_not_ready_and_owns_nothing() {
    let database = Database::fresh().await;
    let dispatcher = Postrider::on_database("dispatcher", &database).start().await;
    let client = http_client()
        .timeout(Duration::from_secs(30))
        .build()
        .expect("a client");
    let metrics = dispatcher.url("/metrics");
    until("it owns every shard", || async {
        let (_, text) = ask(&client, &metrics).await;
        (value(&text, "postrider_shards_owned") == 64.0).then_some(())
    })
    .await;
    let mut other = database.connect().await;
    let mut lock = other.begin().await.expect("begun");
    sqlx::raw_sql("lock table postrider.dispatchers")
        .execute(&mut *lock)
        .await
        .expect("locked");
    until_unready(&client, &dispatcher.url("/readyz"), "no valid lease").await;
    let (_, text) = ask(&client, &metrics).await;
    assert_eq!(value(&text, "postrider_shards_owned"), 0.0);
    assert_eq!(value(&text, "postrider_lease_valid"), 0.0);
    assert_eq!(value(&text, "postrider_database_up"), 1.0);
    lock.rollback().await.expect("released");
    until_ready(&client, &dispatcher.url("/readyz")).await;
    until("it owns every shard again", || async {
        let (_, text) = ask(&client, &metrics).await;
        (value(&text, "postrider_shards_owned") == 64.0).then_some(())
    })
    .await;
}
