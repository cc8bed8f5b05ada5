//! What an operator does to a running system: restarts every process, migrates, takes a backup. Nothing is lost by it,
//! and nothing is sent twice that a backup did not make unknown. And what a network does: it forgets connections.

use std::{collections::HashMap, process::Stdio, sync::Arc, time::Duration};

use serde_json::json;
use sqlx::AssertSqlSafe;

use crate::{
    checker::judge,
    history::{History, Moment, Outcome},
    installation::{Installation, server_program},
    plan::{APIS, DISPATCHERS, Target},
    runs,
    support::{Postrider, until},
};

/// What is waited for at most when an owner goes: its lease.
const LEASE: Duration = Duration::from_secs(5);
const DRAIN_MAX: Duration = Duration::from_secs(30);

/// From the acknowledged commit to the first acceptance, of every delivery, ascending.
fn latencies(history: &History) -> Vec<Duration> {
    let mut accepted: HashMap<(&str, usize), Moment> = HashMap::new();
    for request in &history.requests {
        if request.status.is_some_and(|status| status / 100 == 2) {
            let first = accepted
                .entry((&request.mark, request.endpoint))
                .or_insert(request.ended);
            *first = (*first).min(request.ended);
        }
    }
    let committed: HashMap<&str, Moment> = history
        .transactions
        .iter()
        .flat_map(|t| t.events.iter().map(|event| (event.mark.as_str(), t.ended)))
        .collect();
    let mut latencies: Vec<Duration> = accepted
        .iter()
        .filter_map(|((mark, _), at)| committed.get(mark).map(|from| at.saturating_sub(*from)))
        .collect();
    latencies.sort_unstable();
    latencies
}

/// Runs this beside producers that never stop, drains, and hands out the history.
async fn under_load(it: &Arc<Installation>, work: impl Future<Output = ()>) -> History {
    let mut producers = runs::producers(it, Duration::from_millis(40));
    producers.persistent = true;
    let emitting = producers.start(5, 2, 3);
    tokio::time::sleep(Duration::from_millis(500)).await;
    work.await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    producers.stop.cancel();
    emitting.join_all().await;
    it.drained(DRAIN_MAX).await.expect("drained");
    it.history().await
}

/// SIGTERM, exit 0, and the same again, ready before the next one's turn.
async fn roll(it: &Installation, target: Target) {
    let slot = it.slot(target).expect("a process");
    let mut running = slot.running.lock().await;
    let mut process = running.take().expect("it runs");
    assert!(process.stop().await.success(), "{target:?} ends with status 0");
    slot.ended(process);
    it.start_in(target, slot, &mut running).await;
    let api = running.as_ref().expect("it runs").api();
    until("it is ready", || async { api.is_ready().await.then_some(()) }).await;
}

/// The furthest day's partitions are gone, so that they are made again, under load and beside an open transaction.
async fn migrate(it: &Installation) {
    let furthest = "inhrelid::regclass::text like '%' || to_char(now() + interval '12 days', 'YYYYMMDD')";
    it.database
        .execute(&format!(
            "do $$ declare p regclass; begin
                 for p in select inhrelid::regclass from pg_inherits where {furthest}
                 loop execute format('drop table %s', p); end loop;
             end $$"
        ))
        .await;
    let mut open = it.database.connect().await;
    sqlx::raw_sql("begin; select postrider.emit('acme', 'user.new', '{}', 'open')")
        .execute(&mut open)
        .await
        .expect("emitted");
    let migrate = Postrider::on_database("migrate", &it.database);
    let output = tokio::task::spawn_blocking(move || migrate.output()).await;
    let output = output.expect("ran");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    sqlx::raw_sql("rollback")
        .execute(&mut open)
        .await
        .expect("rolled back");
    let partitions = format!("select count(*) from pg_inherits where {furthest}");
    assert!(
        it.database.count(&partitions).await >= 2,
        "the day's partitions are there again"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_migration_and_a_restart_of_every_process_fail_no_emit_lose_nothing_and_repeat_nothing() {
    /// Neither is noticed by a producer that writes SQL.
    const EMIT_MAX: Duration = Duration::from_secs(2);
    let _alone = runs::alone().await;
    let it = Installation::start(None).await;
    let rolled = async {
        migrate(&it).await;
        for number in 0..DISPATCHERS {
            roll(&it, Target::Dispatcher(number)).await;
        }
        for number in 0..APIS {
            roll(&it, Target::Api(number)).await;
        }
    };
    let history = under_load(&it, rolled).await;
    let judgement = judge(&history);
    let latencies = latencies(&history);
    let p99 = latencies[latencies.len() * 99 / 100];
    println!(
        "migration and rolling restart\n{judgement}p99 {p99:?} of {}",
        latencies.len()
    );
    assert!(judgement.violations.is_empty(), "{judgement}");
    assert_eq!(judgement.figures.repeats_explained, 0);
    assert_eq!(
        judgement.figures.unknown, 0,
        "every emit is known to be done when the client tries again"
    );
    assert!(p99 <= LEASE, "p99 {p99:?}");
    let by_sql = history
        .transactions
        .iter()
        .filter(|t| t.events[0].mark.starts_with('s'));
    let slowest = by_sql.map(|t| t.ended - t.began).max();
    assert!(
        slowest.is_some_and(|slowest| slowest < EMIT_MAX),
        "an emit took {slowest:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_taken_in_mid_traffic_restores_everything_that_was_open_then() {
    let _alone = runs::alone().await;
    let it = Installation::start(None).await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("backup");
    let taken = std::sync::OnceLock::new();
    let backup = async {
        // Something is open at the time of the backup, whatever else is: this endpoint takes nothing until later.
        let id = it.endpoints.lock().expect("not poisoned")[0].id.clone();
        let path = format!("/tenants/acme/endpoints/{id}");
        it.call("PATCH", &path, json!({ "enabled": false }))
            .await
            .expect("paused");
        tokio::time::sleep(Duration::from_millis(500)).await;
        taken.set(it.time.now()).expect("once");
        let mut dump = server_program(&it.database, "pg_dump");
        dump.args(["-Fc", "-U", "postrider", "-d", it.database.name(), "-h"]);
        dump.arg(it.database.cluster().home().sockets());
        dump.arg("-f").arg(&file).stdin(Stdio::null());
        let dumped = tokio::task::spawn_blocking(move || dump.status()).await;
        assert!(dumped.expect("ran").expect("pg_dump is there").success());
        it.resume(0).await;
    };
    let history = under_load(&it, backup).await;
    let judgement = judge(&history);
    assert!(judgement.violations.is_empty(), "{judgement}");

    // The old installation is gone; what comes now is the backup's.
    for slot in &it.dispatchers {
        let mut process = slot.running.lock().await.take().expect("it runs");
        assert!(process.stop().await.success());
    }
    let before = it.receivers.count();
    let restored = format!("{}_restored", it.database.name());
    it.database
        .execute_as_superuser(&format!("create database {restored} owner postrider"))
        .await;
    let mut restore = server_program(&it.database, "pg_restore");
    restore.args([
        "-U",
        "postrider",
        "--no-owner",
        "--exit-on-error",
        "-d",
        &restored,
        "-h",
    ]);
    restore
        .arg(it.database.cluster().home().sockets())
        .arg(&file)
        .stdin(Stdio::null());
    let done = tokio::task::spawn_blocking(move || restore.status()).await;
    assert!(done.expect("ran").expect("pg_restore is there").success());

    let url = it.database.url().replace(it.database.name(), &restored);
    let migrate = Postrider::on_database("migrate", &it.database).set("POSTRIDER_DATABASE_URL", &url);
    let output = tokio::task::spawn_blocking(move || migrate.output()).await;
    assert!(output.expect("ran").status.success());
    let mut connection = it.connect_to(&restored).await;
    // It was paused when the backup was taken, and so it is again.
    sqlx::raw_sql("update postrider.endpoints set state = 'active' where state = 'paused'")
        .execute(&mut connection)
        .await
        .expect("resumed");
    let open: Vec<(String, String)> = sqlx::query_as(
        "select convert_from(e.body, 'UTF8')::json -> 'data' ->> 'mark', p.public_id
         from (select event_id, endpoint_id from postrider.queue union all select event_id, endpoint_id from postrider.retries) d
         join postrider.events e on e.id = d.event_id join postrider.endpoints p on p.id = d.endpoint_id",
    )
    .fetch_all(&mut connection)
    .await
    .expect("read");
    assert!(!open.is_empty(), "something was open");
    let _dispatcher = Postrider::on_database("dispatcher", &it.database)
        .set("POSTRIDER_DATABASE_URL", &url)
        .start()
        .await;
    until("what was open is sent", || async {
        let left: i64 = sqlx::query_scalar(AssertSqlSafe(
            "select (select count(*) from postrider.queue) + (select count(*) from postrider.retries)",
        ))
        .fetch_one(&mut it.connect_to(&restored).await)
        .await
        .expect("counted");
        (left == 0).then_some(())
    })
    .await;

    let requests = it.receivers.requests();
    let places: HashMap<&str, usize> = history
        .endpoints
        .iter()
        .enumerate()
        .map(|(place, life)| (life.id.as_str(), place))
        .collect();
    let again: std::collections::HashSet<(&str, usize)> = requests[before..]
        .iter()
        .map(|request| (request.mark.as_str(), request.endpoint))
        .collect();
    for (mark, endpoint) in &open {
        assert!(
            again.contains(&(mark.as_str(), places[endpoint.as_str()])),
            "{mark} to {endpoint} was open"
        );
    }
    assert_eq!(again.len(), open.len(), "and nothing else is sent");
    let marks: Vec<String> = sqlx::query_scalar(
        "select convert_from(body, 'UTF8')::json -> 'data' ->> 'mark' from postrider.events",
    )
    .fetch_all(&mut connection)
    .await
    .expect("read");
    let marks: std::collections::HashSet<&str> = marks.iter().map(String::as_str).collect();
    let taken = *taken.get().expect("taken");
    let early = history
        .transactions
        .iter()
        .filter(|t| t.outcome == Outcome::Committed && t.ended < taken);
    let mut count = 0;
    for event in early.flat_map(|t| &t.events) {
        assert!(
            marks.contains(event.mark.as_str()),
            "{} was committed before",
            event.mark
        );
        count += 1;
    }
    println!(
        "backup: {count} events were committed before it, {} deliveries were open and were sent again",
        open.len()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_came_while_every_connection_was_forgotten_are_found_soon() {
    /// One statement of the reader times out; everything else notices sooner.
    const FOUND_MAX: Duration = Duration::from_secs(25);
    let _alone = runs::alone().await;
    let it = Installation::start(None).await;
    let producers = runs::producers(&it, Duration::ZERO);
    for tenant in ["acme", "beta"] {
        producers
            .emit_once(tenant, "user.new", format!("{tenant}-before"))
            .await;
    }
    it.drained(DRAIN_MAX).await.expect("every connection was used");
    // Connections that were unused for a while are checked before their next use.
    tokio::time::sleep(Duration::from_secs(3)).await;
    for number in 0..DISPATCHERS {
        it.proxy(Target::Dispatcher(number)).silence();
    }
    for tenant in ["acme", "beta"] {
        producers
            .emit_once(tenant, "user.new", format!("{tenant}-after"))
            .await;
    }
    let found = it.drained(FOUND_MAX).await;
    found.expect("an endpoint without anything known to do has a row that nobody was told of");
}
