//! The bulkhead: what one endpoint may have in flight, and that no endpoint holds up another.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use serde_json::json;

use crate::support::{Answer, Database, Fleet, Received, Receiver, most_at_once, times};

/// What a busy machine may add to a delivery that nothing holds up.
const PROMPT: Duration = Duration::from_secs(2);

fn by_path(requests: &[Received]) -> BTreeMap<&str, Vec<&Received>> {
    let mut paths: BTreeMap<&str, Vec<&Received>> = BTreeMap::new();
    for request in requests {
        paths.entry(&request.path).or_default().push(request);
    }
    paths
}

#[tokio::test]
async fn an_endpoint_stays_within_its_bulkhead_while_dispatchers_come_and_go() {
    const CONCURRENCY: usize = 4;
    const ENDPOINTS: usize = 8;
    const EVENTS: usize = 450;
    let mut fleet = Fleet::start(1).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::After(Duration::from_millis(100), 204));
    for number in 0..ENDPOINTS {
        fleet
            .endpoint(
                &receiver.url(&format!("/{number}")),
                json!({ "concurrency": CONCURRENCY }),
            )
            .await;
    }
    fleet.emit("invoice.paid", "e", EVENTS).await;
    receiver.wait_for(ENDPOINTS * 10).await;
    fleet.add().await;
    let killed = fleet.add().await;
    fleet.balanced().await;
    let stopped = fleet.ids()[0];
    fleet.stop(stopped).await;
    fleet.balanced().await;
    fleet.kill(killed);
    fleet.add().await;
    fleet.balanced().await;
    let went_on = receiver.count();
    assert!(
        went_on < ENDPOINTS * EVENTS,
        "the load lasted to the end: {went_on}"
    );

    receiver
        .wait_until("every delivery", |receiver| {
            receiver.count() >= ENDPOINTS * EVENTS && times(&receiver.received()).len() == ENDPOINTS * EVENTS
        })
        .await;
    fleet.database().drained().await;
    let came = receiver.received();
    for (path, requests) in by_path(&came) {
        let most = most_at_once(requests);
        assert!(most <= CONCURRENCY, "{most} in flight at {path}");
    }
    let repeats = came.len() - ENDPOINTS * EVENTS;
    assert!(
        repeats <= ENDPOINTS * CONCURRENCY,
        "{repeats} more than were on the wire of the one that was killed"
    );
    fleet.assert_nothing_missed();
}

#[tokio::test]
async fn an_endpoint_that_hangs_with_thousands_waiting_delays_no_other() {
    const WAITING: usize = 5_000;
    let fleet = Fleet::start(1).await;
    let (hanging, healthy) = (Receiver::start().await, Receiver::start().await);
    hanging.answer(Answer::Hold);
    fleet
        .endpoint_for("much.waits", &hanging.url("/hook"), json!({}))
        .await;
    fleet
        .endpoint_for("little.waits", &healthy.url("/hook"), json!({}))
        .await;
    fleet.emit("much.waits", "e", WAITING).await;
    hanging.wait_in_flight(2).await;
    for number in 0..50 {
        let emitted = Instant::now();
        fleet.emit("little.waits", &format!("h{number}"), 1).await;
        let came = healthy.wait_for(number + 1).await;
        let took = came[number].at - emitted;
        assert!(took < PROMPT, "{took:?}");
    }
    assert!(hanging.in_flight() > 0, "it hung all the while");
}

#[tokio::test]
async fn hundreds_of_endpoints_that_hang_do_not_starve_a_healthy_one() {
    const HANGING: usize = 300;
    let settings = [("POSTRIDER_MAX_IN_FLIGHT", "64")];
    let fleet = Fleet::start_on(Database::fresh().await, 1, &settings).await;
    let (hanging, healthy) = (Receiver::start().await, Receiver::start().await);
    hanging.answer(Answer::Hold);
    fleet
        .endpoint_for("little.waits", &healthy.url("/hook"), json!({}))
        .await;
    fleet.emit("little.waits", "first", 1).await;
    healthy.wait_for(1).await;
    let urls = (0..HANGING).map(|number| hanging.url(&format!("/{number}")));
    let settings = json!({ "timeout_ms": 2_000 });
    fleet.endpoints_for("much.waits", urls.collect(), settings).await;
    fleet.emit("much.waits", "e", 10).await;
    hanging.wait_in_flight(32).await;
    for number in 1..40 {
        let emitted = Instant::now();
        fleet.emit("little.waits", &format!("h{number}"), 1).await;
        let came = healthy.wait_for(number + 1).await;
        let took = came[number].at - emitted;
        assert!(took < PROMPT, "{took:?}");
    }
    assert!(hanging.in_flight() > 16, "they hung all the while");
    assert!(
        hanging.in_flight_max() <= 48,
        "a quarter of the places is for others"
    );
    let endpoints: BTreeSet<String> = hanging.received().into_iter().map(|r| r.path).collect();
    assert!(endpoints.len() >= 16, "none of them has it all");
}

#[tokio::test]
async fn a_new_endpoint_is_not_starved_by_those_that_are_known_to_hang() {
    const HANGING: usize = 40;
    let settings = [("POSTRIDER_MAX_IN_FLIGHT", "64")];
    let fleet = Fleet::start_on(Database::fresh().await, 1, &settings).await;
    let (hanging, healthy) = (Receiver::start().await, Receiver::start().await);
    hanging.answer(Answer::Hold);
    let urls = (0..HANGING).map(|number| hanging.url(&format!("/{number}")));
    let settings = json!({ "timeout_ms": 500 });
    fleet.endpoints_for("much.waits", urls.collect(), settings).await;
    fleet.emit("much.waits", "e", 200).await;
    hanging
        .wait_until("each has timed out", |receiver| {
            let came = receiver.received();
            let ended = came.iter().filter(|request| request.ended.is_some());
            ended.map(|request| &request.path).collect::<BTreeSet<_>>().len() == HANGING
        })
        .await;
    let new = healthy.url("/hook");
    fleet.endpoint_for("little.waits", &new, json!({})).await;
    for number in 0..20 {
        let emitted = Instant::now();
        fleet.emit("little.waits", &format!("h{number}"), 1).await;
        let came = healthy.wait_for(number + 1).await;
        let took = came[number].at - emitted;
        assert!(took < PROMPT, "{took:?}");
    }
}

#[tokio::test]
async fn an_endpoint_that_begins_to_hang_with_a_large_bulkhead_does_not_starve_the_others() {
    let settings = [("POSTRIDER_MAX_IN_FLIGHT", "64")];
    let fleet = Fleet::start_on(Database::fresh().await, 1, &settings).await;
    let (hanging, healthy) = (Receiver::start().await, Receiver::start().await);
    hanging.script([Answer::Status(204)]);
    hanging.answer(Answer::Hold);
    fleet
        .endpoint_for(
            "much.waits",
            &hanging.url("/hook"),
            json!({ "concurrency": 1024 }),
        )
        .await;
    fleet
        .endpoint_for("little.waits", &healthy.url("/hook"), json!({}))
        .await;
    fleet.emit("much.waits", "much", 1).await;
    fleet.emit("little.waits", "little", 1).await;
    hanging.wait_for(1).await;
    healthy.wait_for(1).await;
    fleet.database().drained().await;
    fleet.emit("much.waits", "e", 1_000).await;
    hanging.wait_in_flight(16).await;
    for number in 1..30 {
        let emitted = Instant::now();
        fleet.emit("little.waits", &format!("h{number}"), 1).await;
        let came = healthy.wait_for(number + 1).await;
        let took = came[number].at - emitted;
        assert!(took < PROMPT, "{took:?}");
    }
}
