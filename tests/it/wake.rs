//! How dispatchers learn of commits: by notifications while it is quiet, by polling under load, and never not at all.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use sqlx::{AssertSqlSafe, PgConnection};

use crate::support::{Database, Fleet, Receiver, until};

const HOLDERS: &str = "select count(*) from pg_locks l join pg_database d on d.oid = l.database
    where d.datname = current_database() and l.locktype = 'advisory' and l.mode = 'ExclusiveLock' and l.granted
      and (l.classid::bigint << 32) + l.objid::bigint = postrider.wake_lock()";
/// The holder checks twice a second. One that does not belongs to a process that is stopped.
const LIVELY: &str = " and exists (select from pg_stat_activity a
    where a.pid = l.pid and a.state_change > clock_timestamp() - interval '3 seconds')";

async fn is_notified(database: &Database) -> bool {
    database.count(HOLDERS).await == 1
}

async fn quiet(database: &Database) {
    let lively = format!("{HOLDERS}{LIVELY}");
    until("a dispatcher holds the wake lock", || async {
        (database.count(&lively).await == 1).then_some(())
    })
    .await;
}

async fn emit(connection: &mut PgConnection, id: &str) {
    let statement = format!("select postrider.emit('acme', 'invoice.paid', '{{}}', '{id}')");
    sqlx::query(AssertSqlSafe(statement))
        .execute(connection)
        .await
        .expect("emitted");
}

async fn fleet(dispatchers: usize) -> (Fleet, Receiver) {
    let fleet = Fleet::start(dispatchers).await;
    let receiver = Receiver::start().await;
    for path in ["/a", "/b", "/c", "/d"] {
        fleet.endpoint(&receiver.url(path), json!({})).await;
    }
    quiet(fleet.database()).await;
    (fleet, receiver)
}

#[tokio::test]
async fn a_commit_on_a_quiet_system_is_sent_at_once_and_wakes_every_dispatcher() {
    let (fleet, receiver) = fleet(2).await;
    let mut connection = fleet.database().connect().await;
    let mut latencies = Vec::new();
    for number in 0..40 {
        let started = Instant::now();
        emit(&mut connection, &format!("evt-{number}")).await;
        receiver.wait_for((number + 1) * 4).await;
        latencies.push(started.elapsed());
    }
    latencies.sort();
    // Without notifications the safety check alone would find them, every two seconds.
    assert!(latencies[30] < Duration::from_millis(500), "{latencies:?}");
    assert!(is_notified(fleet.database()).await);
    fleet.assert_nothing_missed();
}

#[tokio::test]
async fn producers_do_not_notify_under_load_and_again_when_it_is_over() {
    let (fleet, receiver) = fleet(2).await;
    let database = fleet.database();
    let mut producers = tokio::task::JoinSet::new();
    for producer in 0..8 {
        let mut connection = database.connect().await;
        producers.spawn(async move {
            for number in 0..250 {
                emit(&mut connection, &format!("evt-{producer}-{number}")).await;
            }
        });
    }
    until("the wake lock is released", || async {
        (!is_notified(database).await).then_some(())
    })
    .await;
    producers.join_all().await;
    receiver.wait_for(8 * 250 * 4).await;
    database.drained().await;
    quiet(database).await;
    assert_eq!(receiver.received().len(), 8 * 250 * 4);
    fleet.assert_nothing_missed();
}

/// Notifications make commits wait for each other: the slower a commit, the fewer of them there are.
#[tokio::test]
async fn producers_that_wait_for_each_other_stop_notifying_however_few_they_are() {
    let (fleet, receiver) = fleet(2).await;
    let database = fleet.database();
    for setting in ["commit_delay = 20000", "commit_siblings = 0"] {
        let slow = format!("alter database {} set {setting}", database.name());
        database.execute_as_superuser(&slow).await;
    }
    let mut producers = tokio::task::JoinSet::new();
    for producer in 0..8 {
        let mut connection = database.connect().await;
        producers.spawn(async move {
            for number in 0..50 {
                emit(&mut connection, &format!("evt-{producer}-{number}")).await;
            }
        });
    }
    until("the wake lock is released", || async {
        (!is_notified(database).await).then_some(())
    })
    .await;
    assert!(!producers.is_empty());
    producers.join_all().await;
    receiver.wait_for(8 * 50 * 4).await;
    fleet.assert_nothing_missed();
}

#[tokio::test]
async fn commits_between_two_holders_are_not_overlooked() {
    let (mut fleet, receiver) = fleet(3).await;
    let mut connection = fleet.database().connect().await;
    for (number, id) in fleet.ids().into_iter().enumerate() {
        if number < 2 {
            // The holder, if this is the one, releases the lock and says so.
            fleet.stop(id).await;
        } else {
            fleet
                .database()
                .execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity
                     where query ilike '%hold_wake_lock%' and pid <> pg_backend_pid()",
                )
                .await;
        }
        let committed = Instant::now();
        emit(&mut connection, &format!("evt-{number}")).await;
        receiver.wait_for((number + 1) * 4).await;
        println!("{number}: {:?}", committed.elapsed());
        quiet(fleet.database()).await;
    }
    fleet.assert_nothing_missed();
}

#[tokio::test]
async fn nobody_relies_on_notifications_while_a_transaction_without_one_is_open() {
    let (fleet, receiver) = fleet(1).await;
    let database = fleet.database();
    // The holder loses its connection, and meanwhile an emit shares the lock.
    let mut late = database.connect().await;
    sqlx::raw_sql("begin").execute(&mut late).await.expect("begun");
    database
        .execute(
            "select pg_terminate_backend(pid) from pg_stat_activity
             where query ilike '%hold_wake_lock%' and pid <> pg_backend_pid()",
        )
        .await;
    emit(&mut late, "late").await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(!is_notified(database).await);
    let committed = Instant::now();
    sqlx::raw_sql("commit")
        .execute(&mut late)
        .await
        .expect("committed");
    receiver.wait_for(4).await;
    assert!(
        committed.elapsed() < Duration::from_secs(1),
        "{:?}",
        committed.elapsed()
    );
    quiet(database).await;
    fleet.assert_nothing_missed();
}

#[tokio::test]
async fn another_dispatcher_takes_the_lock_of_one_that_was_killed_or_stopped() {
    for signal in [Signal::KILL, Signal::STOP] {
        let (mut fleet, receiver) = fleet(2).await;
        let first = fleet.ids()[0];
        fleet.dispatcher(first).signal(signal);
        let mut connection = fleet.database().connect().await;
        for number in 0..5 {
            emit(&mut connection, &format!("evt-{number}")).await;
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        receiver.wait_for(20).await;
        quiet(fleet.database()).await;
        if signal == Signal::STOP {
            fleet.dispatcher(first).signal(Signal::CONT);
        }
        fleet.database().drained().await;
        fleet.assert_nothing_missed();
    }
}
