//! The exact tail: whatever transactions do, each committed delivery is sent once and no other one is.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::support::{Answer, Database, Fleet, Receiver, repeated, times};

/// Well under the time after which a sweep would make up for what the tail missed.
const BEFORE_THE_SWEEP: Duration = Duration::from_secs(40);

async fn run(connection: &mut PgConnection, statements: &str) {
    sqlx::raw_sql(AssertSqlSafe(statements))
        .execute(connection)
        .await
        .unwrap_or_else(|error| panic!("{statements}: {error}"));
}

fn emit(id: &str) -> String {
    format!("select postrider.emit('acme', 'invoice.paid', '{{}}', '{id}');")
}

/// One producer's transactions, of every kind in turn. Answers the ids of what was committed.
async fn produce(
    database: &Database,
    producer: usize,
    transactions: usize,
    can_prepare: bool,
) -> BTreeSet<String> {
    let mut connection = database.connect().await;
    let mut late: Option<(PgConnection, usize)> = None;
    let mut committed = BTreeSet::new();
    for number in 0..transactions {
        let id = |what: &str| format!("p{producer}-{number}-{what}");
        let name = format!("{}-{producer}-{number}", database.name());
        let (kept, lost) = (id("kept"), id("lost"));
        let statements = match number % 8 {
            0 => format!("begin; {} commit;", emit(&kept)),
            1 => format!("begin; {} rollback;", emit(&lost)),
            2 => format!(
                "begin; savepoint a; {} savepoint b; {} rollback to savepoint b; release savepoint a; commit;",
                emit(&kept),
                emit(&lost)
            ),
            3 => format!("select produce('{kept}', '{lost}');"),
            4 | 5 if !can_prepare => emit(&kept),
            4 => format!(
                "begin; savepoint a; {} release savepoint a; prepare transaction '{name}'; commit prepared '{name}';",
                emit(&kept)
            ),
            5 => format!(
                "begin; {} prepare transaction '{name}'; rollback prepared '{name}';",
                emit(&lost)
            ),
            6 => {
                // Begun now, committed after several of the others.
                let mut other = database.connect().await;
                run(&mut other, &format!("begin; {}", emit(&kept))).await;
                if let Some((mut earlier, _)) = late.replace((other, number)) {
                    run(&mut earlier, "commit").await;
                }
                committed.insert(kept);
                continue;
            }
            _ => format!(
                "begin; savepoint a; {} rollback to savepoint a; {} commit;",
                emit(&lost),
                emit(&kept)
            ),
        };
        // One at a time: several in one message would be one transaction.
        for statement in statements.split_inclusive(';') {
            run(&mut connection, statement).await;
        }
        if number % 8 != 1 && (number % 8 != 5 || !can_prepare) {
            committed.insert(kept);
        }
    }
    if let Some((mut last, _)) = late {
        run(&mut last, "commit").await;
    }
    committed
}

/// A block with a handler is a subtransaction of its own.
const PRODUCE: &str = "
    create function produce(kept text, lost text) returns void language plpgsql as $$
    begin
        begin
            perform postrider.emit('acme', 'invoice.paid', '{}', lost);
            raise exception 'no';
        exception when raise_exception then
            perform postrider.emit('acme', 'invoice.paid', '{}', kept);
        end;
    end $$";

#[tokio::test]
async fn every_committed_delivery_arrives_once_whatever_its_transaction_did() {
    every_commit_arrives_once(Database::fresh().await, 300, false).await;
}

/// Where transactions can be prepared, dispatchers are not notified of commits: a prepared transaction can't notify.
#[tokio::test]
async fn every_committed_delivery_arrives_once_where_transactions_can_be_prepared() {
    let settings = "max_connections = 200\nmax_prepared_transactions = 50\n";
    let database = Database::on_private_server_in(std::env::temp_dir(), settings).await;
    every_commit_arrives_once(database, 0, true).await;
}

async fn every_commit_arrives_once(database: Database, open_elsewhere: usize, can_prepare: bool) {
    let mut fleet = Fleet::start_on(database, 2, &[]).await;
    let receiver = Receiver::start().await;
    let paths = ["/a", "/b", "/c"];
    for path in paths {
        fleet.endpoint(&receiver.url(path), json!({})).await;
    }
    fleet.database().execute(PRODUCE).await;
    // Open in another database of the server: they stand in every snapshot.
    let elsewhere = Database::empty().await;
    let mut open = Vec::new();
    for _ in 0..open_elsewhere {
        let mut connection = elsewhere.connect().await;
        run(&mut connection, "begin; select pg_current_xact_id();").await;
        open.push(connection);
    }

    let started = Instant::now();
    let database = fleet.database();
    let produced = tokio::join!(
        produce(database, 0, 64, can_prepare),
        produce(database, 1, 64, can_prepare),
        produce(database, 2, 64, can_prepare),
        produce(database, 3, 64, can_prepare),
        produce(database, 4, 64, can_prepare),
        produce(database, 5, 64, can_prepare),
    );
    let committed: BTreeSet<String> = [
        produced.0, produced.1, produced.2, produced.3, produced.4, produced.5,
    ]
    .into_iter()
    .flatten()
    .collect();
    let expected = paths
        .iter()
        .flat_map(|path| committed.iter().map(|id| (path.to_string(), id.clone())));
    let expected: BTreeSet<(String, String)> = expected.collect();
    receiver.wait_for(expected.len()).await;
    fleet.database().drained().await;
    assert!(started.elapsed() < BEFORE_THE_SWEEP, "{:?}", started.elapsed());
    let came = receiver.received();
    assert_eq!(repeated(&came), [], "none twice");
    assert_eq!(times(&came).into_keys().collect::<BTreeSet<_>>(), expected);
    fleet.assert_nothing_missed();
    for id in fleet.ids() {
        assert!(fleet.dispatcher(id).is_running());
    }
    for connection in open {
        connection.close().await.expect("closed");
    }
}

#[tokio::test]
async fn commits_that_come_late_reach_a_lane_that_is_spilled() {
    // The lane of an endpoint with this bulkhead remembers 64 deliveries.
    const CONCURRENCY: usize = 4;
    const LATE: [usize; 4] = [1, 30, 100, 300];
    const PROMPT: usize = 600;
    let fleet = Fleet::start(1).await;
    let receiver = Receiver::start().await;
    receiver.script((0..200).map(|_| Answer::Status(204)));
    receiver.answer(Answer::Hold);
    fleet
        .endpoint(&receiver.url("/hook"), json!({ "concurrency": CONCURRENCY }))
        .await;
    let started = Instant::now();
    let mut late = Vec::new();
    for (number, count) in LATE.into_iter().enumerate() {
        let mut connection = fleet.database().connect().await;
        run(&mut connection, "begin").await;
        let emits = format!(
            "select postrider.emit('acme', 'invoice.paid', '{{}}', 'late{number}-' || n) from generate_series(1, {count}) n"
        );
        run(&mut connection, &emits).await;
        late.push(connection);
    }
    fleet.emit("invoice.paid", "prompt", PROMPT).await;
    // The lane has sent 200, holds what its memory takes, and the rest is on disk.
    receiver.wait_in_flight(CONCURRENCY).await;
    receiver.wait_for(200 + CONCURRENCY).await;
    for (number, mut connection) in late.into_iter().enumerate() {
        if number == 2 {
            receiver.release();
        }
        run(&mut connection, "commit").await;
    }
    let all = PROMPT + LATE.iter().sum::<usize>();
    receiver.wait_for(all).await;
    fleet.database().drained().await;
    assert!(started.elapsed() < BEFORE_THE_SWEEP, "{:?}", started.elapsed());
    let came = receiver.received();
    assert_eq!(repeated(&came), [], "none twice");
    assert_eq!(times(&came).len(), all);
    fleet.assert_nothing_missed();
}

#[tokio::test]
async fn one_transaction_with_thousands_of_events_arrives_once_at_one_endpoint_and_at_many() {
    const FOR_ONE: usize = 3_000;
    const FOR_MANY: usize = 150;
    const MANY: usize = 20;
    let fleet = Fleet::start(2).await;
    let receiver = Receiver::start().await;
    fleet
        .endpoint_for("one.big", &receiver.url("/one"), json!({ "concurrency": 64 }))
        .await;
    for number in 0..MANY {
        fleet
            .endpoint_for("many.small", &receiver.url(&format!("/many/{number}")), json!({}))
            .await;
    }
    let started = Instant::now();
    let mut producer = fleet.database().connect().await;
    let emits = format!(
        "begin;
         select postrider.emit('acme', 'many.small', '{{}}', 'a' || n) from generate_series(1, {FOR_MANY} / 2) n;
         select postrider.emit('acme', 'one.big', '{{}}', 'b' || n) from generate_series(1, {FOR_ONE}) n;
         select postrider.emit('acme', 'many.small', '{{}}', 'c' || n) from generate_series(1, {FOR_MANY} / 2) n;
         commit;"
    );
    run(&mut producer, &emits).await;
    let all = FOR_ONE + FOR_MANY * MANY;
    receiver.wait_for(all).await;
    fleet.database().drained().await;
    assert!(started.elapsed() < BEFORE_THE_SWEEP, "{:?}", started.elapsed());
    let came = receiver.received();
    assert_eq!(repeated(&came), [], "none twice");
    assert_eq!(times(&came).len(), all);
    fleet.assert_nothing_missed();
}

/// Ends sessions of the dispatchers whose latest statement is like this, and says how many.
async fn cut_off(database: &Database, statement: &str) -> i64 {
    database
        .count(&format!(
            "select count(pg_terminate_backend(pid)) from pg_stat_activity
             where datname = current_database() and application_name = 'postrider dispatcher'
               and query like '{statement}'"
        ))
        .await
}

#[tokio::test]
async fn a_reader_that_loses_its_connection_misses_nothing_and_repeats_nothing() {
    const ROUNDS: usize = 6;
    const EVENTS: usize = 200;
    let fleet = Fleet::start(2).await;
    let receiver = Receiver::start().await;
    for path in ["/a", "/b", "/c", "/d"] {
        fleet
            .endpoint(&receiver.url(path), json!({ "concurrency": 8 }))
            .await;
    }
    let started = Instant::now();
    let mut late = fleet.database().connect().await;
    for round in 0..ROUNDS {
        run(&mut late, &format!("begin; {}", emit(&format!("late-{round}")))).await;
        fleet.emit("invoice.paid", &format!("r{round}"), EVENTS).await;
        let cut = async { while cut_off(fleet.database(), "%pg_current_snapshot()::text%").await == 0 {} };
        tokio::time::timeout(crate::support::PATIENCE, cut)
            .await
            .expect("a reader was cut off");
        run(&mut late, "commit").await;
    }
    let all = ROUNDS * (EVENTS + 1) * 4;
    receiver.wait_for(all).await;
    fleet.database().drained().await;
    assert!(started.elapsed() < BEFORE_THE_SWEEP, "{:?}", started.elapsed());
    let came = receiver.received();
    assert_eq!(repeated(&came), [], "none twice");
    assert_eq!(times(&came).len(), all);
    fleet.assert_nothing_missed();
}

#[tokio::test]
async fn dispatchers_that_lose_every_connection_lose_no_delivery_and_repeat_none() {
    const ROUNDS: usize = 6;
    const EVENTS: usize = 300;
    let mut fleet = Fleet::start(2).await;
    let receiver = Receiver::start().await;
    for path in ["/a", "/b", "/c"] {
        fleet.endpoint(&receiver.url(path), json!({})).await;
    }
    let started = Instant::now();
    for round in 0..ROUNDS {
        fleet.emit("invoice.paid", &format!("r{round}"), EVENTS).await;
        receiver.wait_for(round * EVENTS * 3 + EVENTS / 2).await;
        assert!(cut_off(fleet.database(), "%").await > 0);
    }
    let all = ROUNDS * EVENTS * 3;
    receiver.wait_for(all).await;
    fleet.database().drained().await;
    assert!(started.elapsed() < BEFORE_THE_SWEEP, "{:?}", started.elapsed());
    let came = receiver.received();
    assert_eq!(repeated(&came), [], "none twice");
    assert_eq!(times(&came).len(), all);
    fleet.assert_nothing_missed();
    for id in fleet.ids() {
        assert!(fleet.dispatcher(id).is_running());
    }
}

#[tokio::test]
async fn a_crash_of_postgres_loses_no_acknowledged_event_and_the_dispatcher_goes_on() {
    const EVENTS: usize = 400;
    const CONCURRENCY: usize = 8;
    let mut fleet = Fleet::start_on(Database::on_private_server().await, 1, &[]).await;
    let receiver = Receiver::start().await;
    fleet
        .endpoint(&receiver.url("/hook"), json!({ "concurrency": CONCURRENCY }))
        .await;
    let started = Instant::now();
    let options = fleet.database().options();
    // An id of one's own makes it safe to try again when it is not known whether the commit was done.
    let producer = tokio::spawn(async move {
        let mut connection = None;
        for number in 0..EVENTS {
            loop {
                let emitted = async {
                    if connection.is_none() {
                        connection = Some(PgConnection::connect_with(&options).await?);
                    }
                    let connection = connection.as_mut().expect("just made");
                    let statement = emit(&format!("e{number}"));
                    sqlx::raw_sql(AssertSqlSafe(statement)).execute(connection).await
                };
                match emitted.await {
                    Ok(_) => break,
                    Err(_) => connection = None,
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    });
    for part in [4, 2] {
        receiver.wait_for(EVENTS / part).await;
        fleet.database().crash_server().await;
    }
    producer.await.expect("produced");
    receiver
        .wait_until("every event", |receiver| {
            times(&receiver.received()).len() == EVENTS
        })
        .await;
    fleet.database().drained().await;
    assert!(started.elapsed() < BEFORE_THE_SWEEP, "{:?}", started.elapsed());
    let came = receiver.received();
    assert_eq!(repeated(&came), [], "the lease held, so that none comes twice");
    let delivered = "select count(*) from postrider.attempts where final = 'delivered'";
    assert_eq!(fleet.database().count(delivered).await as usize, EVENTS);
    fleet.assert_nothing_missed();
    let id = fleet.ids()[0];
    assert!(fleet.dispatcher(id).is_running());
}
