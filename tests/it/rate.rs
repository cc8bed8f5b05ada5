//! The rate of an endpoint: never above it, not far below it, and nobody else's business.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::{Fleet, Receiver};

#[tokio::test]
async fn an_endpoint_gets_its_rate_and_no_more_and_another_is_not_slowed() {
    const RATE: usize = 20;
    const EVENTS: usize = 60;
    let fleet = Fleet::start(1).await;
    let (limited, free) = (Receiver::start().await, Receiver::start().await);
    fleet
        .endpoint(&limited.url("/hook"), json!({ "rate_per_second": RATE }))
        .await;
    fleet.endpoint(&free.url("/hook"), json!({})).await;
    let emitted = Instant::now();
    fleet.emit("invoice.paid", "e", EVENTS).await;
    free.wait_for(EVENTS).await;
    let unlimited = emitted.elapsed();
    let came = limited.wait_for(EVENTS).await;
    fleet.database().drained().await;
    assert_eq!((limited.count(), free.count()), (EVENTS, EVENTS), "none twice");

    let took = came[EVENTS - 1].at - came[0].at;
    let right = Duration::from_secs_f64((EVENTS - 1) as f64 / RATE as f64);
    assert!(took + Duration::from_millis(150) > right, "too fast: {took:?}");
    assert!(took < right + Duration::from_millis(1_500), "too slow: {took:?}");
    assert!(unlimited < took / 2, "the other took {unlimited:?}");
    // One is the burst at this rate; one more for what was delayed on its way.
    for (first, request) in came.iter().enumerate() {
        let within = came[first..]
            .iter()
            .take_while(|later| later.at - request.at < Duration::from_secs(1));
        let count = within.count();
        assert!(count <= RATE + 2, "{count} in the second from request {first}");
    }
}
