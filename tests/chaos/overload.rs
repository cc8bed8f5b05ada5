//! More than can be delivered, more than the database can take, and a database that does not answer: emits stay fast, the
//! backlog lies on disk, and whoever has to wait is told so in time.

use std::time::{Duration, Instant};

use reqwest::StatusCode;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};

use crate::{
    installation::Installation,
    proxy::Mode,
    runs,
    support::{ADMIN_API_KEY, Answer, Database, Postrider, Receiver},
};

/// The longest a request is answered after, whatever happens: the limit of the API and a little.
const ANSWERED_BY: Duration = Duration::from_secs(23);

fn resident_mb(process: &Postrider) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.pid())).expect("a process");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .expect("its memory");
    let kilobytes: f64 = line
        .trim()
        .trim_end_matches(" kB")
        .trim()
        .parse()
        .expect("a number");
    kilobytes / 1024.0
}

fn median(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times[times.len() / 2]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backlog_grows_on_disk_and_not_in_memory_and_drains_in_order_while_emits_stay_fast() {
    let _alone = runs::alone().await;
    let seconds = runs::number("POSTRIDER_OVERLOAD_SECONDS", 3);
    let database = Database::on_private_server().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    // One at a time and 20 ms each: fifty a second at the most.
    receiver.answer(Answer::After(Duration::from_millis(20), 204));
    let endpoint = program
        .api()
        .acme(&receiver.url("/slow"), json!({ "concurrency": 1 }))
        .await;
    let mut producer = database.connect().await;
    let (mut times, mut emitted) = (Vec::new(), 0_i32);
    let mut memory = Vec::new();
    let (began, mut tick) = (Instant::now(), tokio::time::interval(Duration::from_millis(10)));
    while began.elapsed() < Duration::from_secs(seconds) {
        tick.tick().await;
        let start = Instant::now();
        sqlx::query(
            "select postrider.emit('acme', 'invoice.paid', '{}', 'e' || n) from generate_series($1, $2) n",
        )
        .bind(emitted + 1)
        .bind(emitted + 10)
        .execute(&mut producer)
        .await
        .expect("emitted");
        times.push(start.elapsed());
        emitted += 10;
        if times.len() % 20 == 0 {
            memory.push(resident_mb(&program));
        }
    }
    let waiting = database.count("select count(*) from postrider.queue").await;
    assert!(
        waiting as f64 > 0.8 * f64::from(emitted),
        "{waiting} of {emitted} wait: more than can be delivered"
    );
    let fifth = times.len() / 5;
    let (early, late) = (median(&times[..fifth]), median(&times[times.len() - fifth..]));
    let (small, large) = (
        memory[memory.len() / 5],
        memory.last().copied().unwrap_or_default(),
    );
    println!(
        "overload: {emitted} emitted, {waiting} wait; ten emits take {early:?} at first and {late:?} at last; {small:.1} MB, then {large:.1} MB"
    );
    assert!(
        late < early * 2 + Duration::from_millis(5),
        "{early:?}, then {late:?}"
    );
    assert!(large < small + 16.0, "{small} MB, then {large} MB");

    receiver.answer(Answer::Status(204));
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    let (status, _) = program
        .api()
        .call(
            reqwest::Method::PATCH,
            &path,
            Some(json!({ "rate_per_second": null })),
        )
        .await;
    assert!(status.is_success());
    // Minutes of it take minutes to send: each thousand in its time.
    let began = Instant::now();
    while receiver.count() < emitted as usize {
        let next = (receiver.count() + 1_000).min(emitted as usize);
        receiver
            .wait_until("the backlog", |receiver| receiver.count() >= next)
            .await;
    }
    println!("sent in {:.1} s, one at a time", began.elapsed().as_secs_f64());
    database.drained().await;
    let numbers: Vec<i32> = receiver
        .received()
        .iter()
        .map(|request| request.event_id()[1..].parse().expect("a number"))
        .collect();
    assert_eq!(numbers.len(), emitted as usize, "each once");
    assert!(
        numbers.is_sorted(),
        "one at a time, and the one that was due first goes first"
    );
}

/// The status, whether it says when to try again, and how long it took.
async fn emit_over_http(base: String, id: String) -> (StatusCode, bool, Duration) {
    let client = crate::support::http_client().build().expect("a client");
    let began = Instant::now();
    let body: Value = json!({ "type": "user.new", "id": id, "data": { "mark": id } });
    let answer = client
        .post(format!("{base}/v1/tenants/acme/events"))
        .bearer_auth(ADMIN_API_KEY)
        .header("content-type", "application/json")
        .body(body.to_string())
        .timeout(ANSWERED_BY)
        .send()
        .await
        .expect("an answer in time");
    let again = answer.headers().contains_key("retry-after");
    (answer.status(), again, began.elapsed())
}

async fn emit_several(base: &str, prefix: &str) -> Vec<(StatusCode, bool, Duration)> {
    let mut asked = tokio::task::JoinSet::new();
    for number in 0..20 {
        asked.spawn(emit_over_http(base.to_owned(), format!("{prefix}-{number}")));
    }
    asked.join_all().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_does_not_answer_or_has_no_connection_left_is_told_as_503_in_time() {
    let _alone = runs::alone().await;
    let it = Installation::start_with(
        None,
        "max_connections = 120\nsuperuser_reserved_connections = 3\n",
    )
    .await;
    let bases = it.addresses.read().expect("not poisoned").clone();
    let stored = "select count(*) from postrider.event_ids where id like 'asked-%'";

    // Of one API nothing gets through to the database. Meanwhile, for the other:
    it.apis[0].proxy.set(Mode::Frozen);
    let frozen = tokio::spawn({
        let base = bases[0].clone();
        async move { emit_several(&base, "asked-frozen").await }
    });
    // Every connection that the server has is taken, those of the API among them.
    let mut taken = Vec::new();
    let options = it.database.options();
    let theirs = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'postrider dashboard'";
    while let Ok(connection) = PgConnection::connect_with(&options).await {
        taken.push(connection);
    }
    let last = taken.last_mut().expect("at least one was free");
    sqlx::raw_sql(theirs).execute(last).await.expect("terminated");
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(1) {
        if let Ok(connection) = PgConnection::connect_with(&options).await {
            taken.push(connection);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let answers = emit_several(&bases[1], "asked-exhausted").await;
    let refused = answers
        .iter()
        .filter(|(status, ..)| *status == StatusCode::SERVICE_UNAVAILABLE);
    println!(
        "exhausted: {} of {} are told to try again",
        refused.count(),
        answers.len()
    );
    for (status, again, took) in &answers {
        assert!(status.is_success() || (*status == StatusCode::SERVICE_UNAVAILABLE && *again));
        assert!(*took < ANSWERED_BY, "{took:?}");
    }
    drop(taken);
    let answers = frozen.await.expect("answered");
    it.apis[0].proxy.set(Mode::Pass);
    for (status, again, took) in &answers {
        assert_eq!((*status, *again), (StatusCode::SERVICE_UNAVAILABLE, true));
        assert!(*took < ANSWERED_BY, "{took:?}");
    }

    // Both are well again by themselves, nothing is half done, and the same requests go through.
    for (base, prefix) in bases.iter().zip(["asked-frozen", "asked-exhausted"]) {
        let healed = Instant::now();
        loop {
            let answers = emit_several(base, prefix).await;
            if answers.iter().all(|(status, ..)| status.is_success()) {
                break;
            }
            assert!(healed.elapsed() < ANSWERED_BY, "{answers:?}");
        }
    }
    it.drained(Duration::from_secs(30)).await.expect("drained");
    assert_eq!(it.database.count(stored).await, 40, "each once");
    let torn = "select count(*) from postrider.event_ids i
                where not exists (select from postrider.events e where e.id = i.event_id)";
    assert_eq!(it.database.count(torn).await, 0, "no id without its event");
}
