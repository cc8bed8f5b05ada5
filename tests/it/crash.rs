//! `kill -9` in the middle: nothing is lost, and only what was on the wire may come twice.

use std::collections::BTreeMap;

use reqwest::{Method, StatusCode};
use serde_json::json;

use crate::support::{Answer, Database, Postrider, Receiver, until};

const EVENTS: usize = 1_000;
const DELIVERED_BEFORE: usize = 300;
const CONCURRENCY: usize = 16;

#[tokio::test]
async fn after_a_kill_every_event_arrives_and_only_those_in_flight_twice() {
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.script((0..DELIVERED_BEFORE).map(|_| Answer::Status(204)));
    receiver.answer(Answer::Hold);
    program
        .api()
        .acme(&receiver.url("/hook"), json!({ "concurrency": CONCURRENCY }))
        .await;
    let mut producer = database.connect().await;
    sqlx::query(
        "select postrider.emit('acme', 'invoice.paid', '{}', 'e' || n) from generate_series(1, $1) n",
    )
    .bind(EVENTS as i32)
    .execute(&mut producer)
    .await
    .expect("emitted");

    // The bulkhead is full of requests that hang, everything before them is recorded, the rest waits.
    receiver.wait_for(DELIVERED_BEFORE + CONCURRENCY).await;
    let recorded = "select count(*) from postrider.attempts where final = 'delivered'";
    until("what was answered is recorded", || async {
        let mut connection = database.connect().await;
        let count: i64 = sqlx::query_scalar(recorded)
            .fetch_one(&mut connection)
            .await
            .expect("counted");
        (count as usize == DELIVERED_BEFORE).then_some(())
    })
    .await;
    program.kill();
    receiver.release();
    program.restart().await;

    program.api().wait_for_state("acme", "delivered", EVENTS).await;
    let mut times: BTreeMap<String, usize> = BTreeMap::new();
    for request in receiver.received() {
        *times.entry(request.event_id().to_owned()).or_default() += 1;
    }
    assert_eq!(times.len(), EVENTS, "nothing is lost");
    let twice = times.values().filter(|count| **count > 1).count();
    assert!(twice <= CONCURRENCY, "{twice} came more than once");
    assert!(times.values().all(|count| *count <= 2));
}

#[tokio::test]
async fn a_clean_stop_finishes_what_is_on_the_wire_and_the_next_start_sends_the_rest_once() {
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    let mut producer = database.connect().await;
    sqlx::query(
        "select postrider.emit('acme', 'invoice.paid', '{}', 'e' || n) from generate_series(1, 500) n",
    )
    .execute(&mut producer)
    .await
    .expect("emitted");
    receiver.wait_for(50).await;
    assert!(program.stop().await.success(), "exit status 0");
    program.restart().await;
    program.api().wait_for_state("acme", "delivered", 500).await;
    assert_eq!(receiver.received().len(), 500, "none twice");
}

#[tokio::test]
async fn a_database_that_lets_nobody_in_is_for_the_client_to_try_again_and_the_api_is_well_once_it_does() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    let name = database.name();
    let sessions = format!("select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'");
    let allow = |allowed: bool| format!("alter database {name} allow_connections {allowed}");
    database.execute_as_superuser(&allow(false)).await;
    database.execute_as_superuser(&sessions).await;
    let (status, body) = api.call(Method::GET, "/tenants", None).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{body}");
    database.execute_as_superuser(&allow(true)).await;
    until("the API answers again", || async {
        let (status, _) = api.call(Method::GET, "/tenants", None).await;
        status.is_success().then_some(())
    })
    .await;
}
