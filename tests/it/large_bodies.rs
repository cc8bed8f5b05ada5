//! Large bodies: the memory for them is shared out, so that neither a backlog of them nor receivers that take none stop anybody
//! else. And the half of the wire for slow endpoints is shared out likewise.

use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::json;

use crate::support::{Answer, Fleet, Receiver};

/// What a busy machine may add to a delivery that nothing holds up.
const PROMPT: Duration = Duration::from_secs(2);

/// Emits events of so many bytes, each in a transaction of its own.
async fn emit_large(fleet: &Fleet, tenant: &str, r#type: &str, bytes: usize, count: usize) {
    let mut producer = fleet.database().connect().await;
    for _ in 0..count {
        sqlx::query("select postrider.emit($1, $2, json_build_object('x', repeat('a', $3))::text)")
            .bind(tenant)
            .bind(r#type)
            .bind(bytes as i32)
            .execute(&mut producer)
            .await
            .expect("emitted");
    }
}

async fn emit_small(fleet: &Fleet, tenant: &str, r#type: &str) {
    emit_large(fleet, tenant, r#type, 1, 1).await;
}

/// Each event arrives promptly.
async fn assert_prompt(fleet: &Fleet, healthy: &Receiver, r#type: &str, bytes: usize, count: usize) {
    let before = healthy.count();
    for number in 0..count {
        let emitted = Instant::now();
        emit_large(fleet, "globex", r#type, bytes, 1).await;
        healthy.wait_for(before + number + 1).await;
        let took = emitted.elapsed();
        assert!(took < PROMPT, "event {number} of {bytes} bytes took {took:?}");
    }
}

/// A tenant whose endpoint answers at once, and has answered.
async fn healthy(fleet: &Fleet) -> Receiver {
    let receiver = Receiver::start().await;
    fleet.api().tenant("globex").await;
    fleet.api().event_type("globex.happened").await;
    let more = json!({ "types": ["globex.happened"] });
    fleet.api().endpoint("globex", &receiver.url("/hook"), more).await;
    emit_small(fleet, "globex", "globex.happened").await;
    receiver.wait_for(1).await;
    receiver
}

#[tokio::test]
async fn a_backlog_of_large_events_is_delivered_whole_while_others_go_on() {
    const EVENTS: usize = 400;
    let mut fleet = Fleet::start(1).await;
    let (large, healthy) = (Receiver::start().await, healthy(&fleet).await);
    let endpoint = fleet
        .endpoint(&large.url("/hook"), json!({ "concurrency": 1024 }))
        .await;
    emit_small(&fleet, "acme", "invoice.paid").await;
    large.wait_for(1).await;
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    let switch = |on: bool| json!({ "enabled": on });
    fleet.api().call(Method::PATCH, &path, Some(switch(false))).await;
    emit_large(&fleet, "acme", "invoice.paid", 250 * 1024, EVENTS).await;
    fleet.api().call(Method::PATCH, &path, Some(switch(true))).await;
    assert_prompt(&fleet, &healthy, "globex.happened", 1, 10).await;
    large.wait_for(1 + EVENTS).await;
    assert_prompt(&fleet, &healthy, "globex.happened", 200 * 1024, 3).await;
    let began = Instant::now();
    let id = fleet.ids()[0];
    fleet.stop(id).await;
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[tokio::test]
async fn receivers_that_fall_silent_with_large_bodies_hold_up_no_healthy_one() {
    const HANGING: usize = 60;
    let fleet = Fleet::start(1).await;
    let (hanging, healthy) = (Receiver::start().await, healthy(&fleet).await);
    let urls = (0..HANGING).map(|number| hanging.url(&format!("/{number}")));
    let settings = json!({ "timeout_ms": 20_000 });
    fleet.endpoints_for("much.waits", urls.collect(), settings).await;
    let greedy = json!({ "timeout_ms": 20_000, "concurrency": 1024 });
    fleet
        .endpoint_for("much.waits", &hanging.url("/greedy"), greedy)
        .await;
    emit_small(&fleet, "acme", "much.waits").await;
    hanging.wait_for(HANGING + 1).await;
    hanging.answer(Answer::Hold);
    emit_large(&fleet, "acme", "much.waits", 64 * 1024, 40).await;
    hanging.wait_in_flight(HANGING).await;
    assert_prompt(&fleet, &healthy, "globex.happened", 1, 10).await;
    assert_prompt(&fleet, &healthy, "globex.happened", 64 * 1024, 10).await;
    assert!(hanging.in_flight() >= HANGING, "they hung all the while");
}

#[tokio::test]
async fn endpoints_that_answer_after_a_minute_do_not_take_the_slow_half_from_others() {
    const SLOW: usize = 20;
    let fleet = Fleet::start(1).await;
    let (hanging, slow) = (Receiver::start().await, Receiver::start().await);
    slow.answer(Answer::After(Duration::from_millis(1_200), 204));
    fleet.api().tenant("globex").await;
    fleet.api().event_type("globex.happened").await;
    for number in 0..SLOW {
        let more = json!({ "types": ["globex.happened"] });
        let url = slow.url(&format!("/{number}"));
        fleet.api().endpoint("globex", &url, more).await;
    }
    emit_small(&fleet, "globex", "globex.happened").await;
    slow.wait_for(SLOW).await;
    for number in 0..2 {
        let more = json!({ "timeout_ms": 60_000, "concurrency": 1024 });
        let url = hanging.url(&format!("/{number}"));
        fleet.endpoint_for("much.waits", &url, more).await;
    }
    emit_small(&fleet, "acme", "much.waits").await;
    hanging.wait_for(2).await;
    hanging.answer(Answer::Hold);
    fleet.emit("much.waits", "e", 3_000).await;
    hanging
        .wait_until("they hold all they get", |receiver| receiver.in_flight() > 600)
        .await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    for round in 1..=5 {
        let emitted = Instant::now();
        emit_small(&fleet, "globex", "globex.happened").await;
        slow.wait_for(SLOW * (round + 1)).await;
        let took = emitted.elapsed();
        assert!(
            took < Duration::from_millis(1_200) + PROMPT,
            "round {round} took {took:?}"
        );
    }
}
