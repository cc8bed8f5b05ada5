//! Dispatchers share the work by leases: they come, leave, die and freeze, and nobody else notices.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use uuid::Uuid;

use crate::support::{Answer, Database, Endpoint, Fleet, Postrider, Receiver, repeated, times, until};

/// One lease, and a second to notice; the rest is for a busy machine.
const TAKEOVER: Duration = Duration::from_secs(7);
const SLACK: Duration = Duration::from_millis(1_500);

#[tokio::test]
async fn a_new_dispatcher_gets_its_share_and_one_that_is_killed_loses_it_within_a_lease_and_a_second() {
    let mut fleet = Fleet::start(1).await;
    let first = fleet.ids()[0];
    fleet.balanced().await;
    assert_eq!(fleet.shares().await, [(first, 64)].into());
    let joined = Instant::now();
    fleet.add().await;
    let third = fleet.add().await;
    fleet.balanced().await;
    // Nothing is on the wire: the shares move as fast as dispatchers look at the table.
    assert!(joined.elapsed() < TAKEOVER, "{:?}", joined.elapsed());

    let receiver = Receiver::start().await;
    for number in 0..12 {
        let url = receiver.url(&format!("/{number}"));
        fleet.endpoint(&url, json!({})).await;
    }
    let killed = Instant::now();
    fleet.kill(third);
    fleet.emit("invoice.paid", "e", 20).await;
    receiver.wait_for(12 * 20).await;
    let took = killed.elapsed();
    assert!(took < TAKEOVER + SLACK, "its deliveries went on after {took:?}");
    assert!(took > Duration::from_secs(4), "a lease is respected: {took:?}");
    fleet.balanced().await;
    fleet.database().drained().await;
    assert_eq!(repeated(&receiver.received()), [], "it had nothing on the wire");
    fleet.assert_nothing_missed();
}

#[tokio::test]
async fn a_dispatcher_that_is_stopped_under_load_hands_over_at_once_and_nothing_comes_twice() {
    const EVENTS: usize = 200;
    const ENDPOINTS: usize = 12;
    let mut fleet = Fleet::start(2).await;
    fleet.balanced().await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::After(Duration::from_millis(20), 204));
    for number in 0..ENDPOINTS {
        let url = receiver.url(&format!("/{number}"));
        fleet.endpoint(&url, json!({ "concurrency": 2 })).await;
    }
    fleet.emit("invoice.paid", "e", EVENTS).await;
    receiver.wait_for(ENDPOINTS * EVENTS / 10).await;
    let (stopped, left) = (fleet.ids()[0], fleet.ids()[1]);
    let asked = Instant::now();
    fleet.stop(stopped).await;
    assert_eq!(
        fleet.shares().await.get(&stopped),
        None,
        "it owns nothing any more"
    );
    assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
    fleet.balanced().await;
    assert_eq!(fleet.shares().await, [(left, 64)].into());
    assert!(asked.elapsed() < Duration::from_secs(4), "{:?}", asked.elapsed());
    receiver.wait_for(ENDPOINTS * EVENTS).await;
    fleet.database().drained().await;
    let came = receiver.received();
    assert_eq!(repeated(&came), [], "none twice");
    assert_eq!(times(&came).len(), ENDPOINTS * EVENTS);
    fleet.assert_nothing_missed();
}

#[tokio::test]
async fn an_endpoint_that_hangs_does_not_keep_a_stopped_dispatcher_from_handing_over_the_others() {
    let mut fleet = Fleet::start(2).await;
    fleet.balanced().await;
    let (hanging, healthy) = (Receiver::start().await, Receiver::start().await);
    hanging.answer(Answer::Hold);
    let held = fleet
        .endpoint_for("much.waits", &hanging.url("/hook"), json!({}))
        .await;
    let owner = fleet.owner_of(&held).await;
    // Healthy endpoints of the same dispatcher.
    let mut beside = Vec::new();
    for number in 0.. {
        if beside.len() == 3 {
            break;
        }
        let r#type = format!("little.waits{number}");
        let url = healthy.url("/hook");
        let endpoint = fleet.endpoint_for(&r#type, &url, json!({})).await;
        let shard_differs = fleet
            .database()
            .count(&format!(
                "select count(distinct shard) from postrider.endpoints where public_id in ('{}', '{}')",
                held.id, endpoint.id
            ))
            .await
            == 2;
        if shard_differs && fleet.owner_of(&endpoint).await == owner {
            beside.push(r#type);
        }
    }
    fleet.emit("much.waits", "h", 2).await;
    hanging.wait_in_flight(2).await;
    let asked = Instant::now();
    fleet.dispatcher(owner).signal(Signal::TERM);
    for (number, r#type) in beside.iter().enumerate() {
        fleet.emit(r#type, &format!("b{number}"), 1).await;
    }
    healthy.wait_for(beside.len()).await;
    assert!(asked.elapsed() < Duration::from_secs(4), "{:?}", asked.elapsed());
    hanging.release();
    assert!(fleet.dispatcher(owner).ended().await.success(), "exit status 0");
    fleet.database().drained().await;
    assert_eq!(
        (hanging.count(), healthy.count()),
        (2, beside.len()),
        "none twice"
    );
}

const DELIVERED: &str = "select count(*) from postrider.attempts where final = 'delivered'";

/// Freezes an endpoint's owner and waits until somebody else owns it.
async fn freeze_past_the_lease(fleet: &mut Fleet, endpoint: &Endpoint) -> Uuid {
    let frozen = fleet.owner_of(endpoint).await;
    fleet.dispatcher(frozen).signal(Signal::STOP);
    wait_for_takeover(fleet, endpoint, frozen).await;
    frozen
}

async fn wait_for_takeover(fleet: &Fleet, endpoint: &Endpoint, frozen: Uuid) {
    until("another takes over", || async {
        (fleet.owner_of(endpoint).await != frozen).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_dispatcher_that_wakes_up_after_its_lease_sends_nothing_more_and_joins_again() {
    const EVENTS: usize = 800;
    const CONCURRENCY: usize = 8;
    let mut fleet = Fleet::start(2).await;
    fleet.balanced().await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::After(Duration::from_millis(20), 204));
    let settings = json!({ "concurrency": CONCURRENCY });
    let endpoint = fleet.endpoint(&receiver.url("/hook"), settings).await;
    fleet.emit("invoice.paid", "e", EVENTS).await;
    receiver.wait_for(100).await;
    let frozen = fleet.owner_of(&endpoint).await;
    fleet.dispatcher(frozen).signal(Signal::STOP);
    // What it had on the wire, and answers that it had not recorded yet.
    // A request may still be on its way to the receiver: it has stopped when nothing has come for a while.
    until("the frozen one is silent", || async {
        let ended = receiver.received().last().and_then(|request| request.ended);
        ended
            .filter(|at| at.elapsed() > Duration::from_secs(1) && receiver.in_flight() == 0)
            .map(|_| ())
    })
    .await;
    let unrecorded = receiver.count() - fleet.database().count(DELIVERED).await as usize;
    wait_for_takeover(&fleet, &endpoint, frozen).await;
    // The new owner is in the middle of what the frozen one has in its memory.
    let went_on = receiver.count();
    receiver.wait_for(went_on + 20).await;
    fleet.dispatcher(frozen).signal(Signal::CONT);
    fleet.balanced().await;
    receiver
        .wait_until("every event", |receiver| {
            receiver.count() >= EVENTS && times(&receiver.received()).len() == EVENTS
        })
        .await;
    fleet.database().drained().await;
    let more = receiver.count() - EVENTS;
    assert!(
        more <= unrecorded,
        "{more} came again, {unrecorded} were not recorded"
    );
    assert_eq!(fleet.database().count(DELIVERED).await as usize, EVENTS);
    fleet.assert_nothing_missed();
}

#[tokio::test]
async fn an_answer_that_a_frozen_dispatcher_hears_too_late_changes_nothing() {
    let mut fleet = Fleet::start(2).await;
    fleet.balanced().await;
    let receiver = Receiver::start().await;
    // The first two are held, and are told that the endpoint is gone. What the new owner sends is accepted.
    receiver.script([Answer::HoldThen(410), Answer::HoldThen(410)]);
    let endpoint = fleet.endpoint(&receiver.url("/hook"), json!({})).await;
    fleet.emit("invoice.paid", "e", 2).await;
    receiver.wait_in_flight(2).await;
    let frozen = freeze_past_the_lease(&mut fleet, &endpoint).await;
    receiver.wait_for(4).await;
    fleet.database().drained().await;
    receiver.release();
    fleet.dispatcher(frozen).signal(Signal::CONT);
    fleet.balanced().await;
    // It works again: what is emitted from here on is delivered by both.
    fleet.emit("invoice.paid", "after", 2).await;
    receiver.wait_for(6).await;
    fleet.database().drained().await;
    let shown = fleet
        .api()
        .get(&format!("/tenants/acme/endpoints/{}", endpoint.id))
        .await;
    assert_eq!(shown["state"], "active", "{shown}");
    let attempts = "select count(*) from postrider.attempts where final = 'delivered' and number = 1";
    assert_eq!(fleet.database().count(attempts).await, 4);
    assert_eq!(
        fleet
            .database()
            .count("select count(*) from postrider.attempts")
            .await,
        4
    );
}

#[tokio::test]
async fn shards_of_an_owner_that_is_just_renewing_its_lease_are_not_taken() {
    let database = Database::fresh().await;
    database
        .execute(
            "insert into postrider.dispatchers (id, name, expires_at)
             values ('00000000-0000-0000-0000-000000000001', 'asleep', clock_timestamp() - interval '1 minute');
             update postrider.shards set owner = '00000000-0000-0000-0000-000000000001', epoch = 1",
        )
        .await;
    // It wakes: its renewal is not committed yet.
    let mut owner = database.connect().await;
    sqlx::raw_sql(
        "begin; update postrider.dispatchers set expires_at = clock_timestamp() + interval '1 minute' where name = 'asleep'",
    )
    .execute(&mut owner)
    .await
    .expect("renewed");
    let fleet = Fleet::start_on(database, 1, &[]).await;
    // Longer than a lease of silence, after which the other one takes what is free.
    tokio::time::sleep(Duration::from_secs(9)).await;
    let taken = "select count(*) from postrider.shards where epoch > 1";
    assert_eq!(fleet.database().count(taken).await, 0, "while it renews");
    sqlx::raw_sql("commit")
        .execute(&mut owner)
        .await
        .expect("committed");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(fleet.database().count(taken).await, 0, "it has renewed");
    let asleep = "update postrider.dispatchers set expires_at = clock_timestamp() - interval '1 minute' where name = 'asleep'";
    fleet.database().execute(asleep).await;
    fleet.balanced().await;
}

#[tokio::test]
async fn a_dispatcher_whose_duty_another_one_schedules_at_the_same_moment_goes_on_without_a_warning() {
    let database = Database::fresh().await;
    let mut other = database.connect().await;
    // As another node that has not committed yet. Also for the next hour, in case it begins now.
    sqlx::raw_sql(
        "begin;
         insert into apalis.jobs (id, job_type, job, status, attempts, max_attempts, run_at, idempotency_key)
         select 'other-' || n, 'postrider.scheduled', '\"RotateSecrets\"', 'Done', 1, 3, now(),
                'RotateSecrets-' || (floor(extract(epoch from clock_timestamp()) / 3600)::bigint + n) * 3600
         from generate_series(0, 1) n",
    )
    .execute(&mut other)
    .await
    .expect("inserted");
    let pid: i32 = sqlx::query_scalar("select pg_backend_pid()")
        .fetch_one(&mut other)
        .await
        .expect("a pid");
    let program = Postrider::on_database("dispatcher", &database).start().await;
    until("the dispatcher waits for the other one", || async {
        let waiting =
            format!("select count(*) from pg_locks where not granted and {pid} = any(pg_blocking_pids(pid))");
        (database.count(&waiting).await > 0).then_some(())
    })
    .await;
    sqlx::raw_sql("commit")
        .execute(&mut other)
        .await
        .expect("committed");
    until("the last duty is scheduled", || async {
        let last = "select count(*) from apalis.jobs where idempotency_key like 'DropOld-%'";
        (database.count(last).await > 0).then_some(())
    })
    .await;
    let lines = program.log_lines();
    assert!(
        !lines
            .iter()
            .any(|line| line.contains("WARN") || line.contains("duplicate key")),
        "{lines:?}"
    );
}
