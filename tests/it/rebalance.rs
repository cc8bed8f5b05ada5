//! Endpoints that get their first events while shards move between dispatchers.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::{Fleet, Receiver, until};

#[tokio::test]
async fn no_endpoint_is_deaf_after_its_shard_was_lost_and_gained_while_it_got_its_first_event() {
    const ROUNDS: usize = 5;
    let mut fleet = Fleet::start(1).await;
    let receiver = Receiver::start().await;
    fleet.balanced().await;
    let mut made = 0;
    for _ in 0..ROUNDS {
        let (joined, other) = (Instant::now(), fleet.add().await);
        // First events come all the time, also just as a shard changes hands.
        while joined.elapsed() < Duration::from_secs(3) {
            let kind = format!("first.e{made}");
            let url = receiver.url(&format!("/{made}"));
            fleet.endpoint_for(&kind, &url, json!({})).await;
            fleet.emit(&kind, &format!("first-{made}"), 1).await;
            made += 1;
        }
        fleet.stop(other).await;
        fleet.balanced().await;
    }
    receiver.wait_for(made).await;
    let before = receiver.count();
    for number in 0..made {
        fleet
            .emit(&format!("first.e{number}"), &format!("second-{number}"), 1)
            .await;
    }
    until("each endpoint has heard of its second event", || async {
        (receiver.count() >= before + made).then_some(())
    })
    .await;
    fleet.assert_nothing_missed();
}
