//! A delivery's life: attempts at the scheduled times, death, replay, and signatures that others' libraries accept.

use std::{process::Command, time::Duration};

use reqwest::{Method, StatusCode};
use serde_json::json;

use crate::support::{Answer, Database, Postrider, Receiver, python, until};

/// What a busy machine may add to a wait.
const SLACK: Duration = Duration::from_millis(900);

fn event() -> serde_json::Value {
    json!({ "type": "invoice.paid", "data": { "object": "invoice", "id": "inv_1" } })
}

#[tokio::test]
async fn a_broken_endpoint_is_tried_on_schedule_and_a_replay_after_it_is_mended_delivers_the_same_bytes() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(500));
    let api = program.api();
    let schedule = json!({ "retry_schedule": ["0s", "500ms", "1500ms"] });
    let endpoint = api.acme(&receiver.url("/hook"), schedule).await;
    let (status, emitted) = api.emit("acme", event()).await;
    assert_eq!(status, StatusCode::ACCEPTED);

    let dead = api.wait_for_state("acme", "dead", 1).await;
    let attempts = receiver.received();
    assert_eq!(attempts.len(), 3, "as many attempts as the schedule has waits");
    for (pair, wait) in attempts.windows(2).zip([500, 1500].map(Duration::from_millis)) {
        let gap = pair[1].at - pair[0].at;
        assert!(gap >= wait && gap < wait + SLACK, "{gap:?} instead of {wait:?}");
    }
    let delivery = dead[0]["id"].as_str().expect("an id");
    let seen = api.get(&format!("/tenants/acme/deliveries/{delivery}")).await;
    assert_eq!(seen["reason"], "exhausted", "{seen}");
    assert_eq!(seen["attempts"].as_array().map(Vec::len), Some(3), "{seen}");

    receiver.answer(Answer::Status(204));
    // A fresh `t` is seen only in another second.
    let last = attempts[2].signed_at();
    crate::support::until("the clock shows another second", || async {
        (chrono::Utc::now().timestamp() > last).then_some(())
    })
    .await;
    let replay = format!("/tenants/acme/deliveries/{delivery}/replay");
    assert_eq!(
        api.call(Method::POST, &replay, None).await.0,
        StatusCode::ACCEPTED
    );
    let replayed = &receiver.wait_for(4).await[3];
    assert_eq!(replayed.body, attempts[0].body);
    assert_eq!(replayed.event_id(), emitted["id"].as_str().expect("an id"));
    assert!(replayed.signed_at() > last);
    assert_eq!(replayed.header("webhook-replay"), delivery);
    assert_eq!(replayed.verify(&endpoint.secret), Ok(()));
    api.wait_for_state("acme", "delivered", 1).await;
    assert!(api.deliveries("acme", "state=dead").await.is_empty());
}

#[tokio::test]
async fn a_redirect_is_a_failure_and_is_not_followed() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Redirect(receiver.url("/elsewhere")));
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({ "retry_schedule": ["0s"] }))
        .await;
    api.emit("acme", event()).await;
    api.wait_for_state("acme", "dead", 1).await;
    let paths: Vec<String> = receiver.received().into_iter().map(|r| r.path).collect();
    assert_eq!(paths, ["/hook"]);
}

#[tokio::test]
async fn a_connection_that_is_hung_up_is_one_attempt_and_is_not_silently_resent() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(
        &receiver.url("/hook"),
        json!({ "retry_schedule": ["0s", "100ms"] }),
    )
    .await;
    // The first leaves a connection that is kept open; the second is cut off on it.
    api.emit("acme", event()).await;
    api.wait_for_state("acme", "delivered", 1).await;
    receiver.script([Answer::HangUp, Answer::HangUp]);
    api.emit("acme", event()).await;
    let dead = api.wait_for_state("acme", "dead", 1).await;
    let id = dead[0]["id"].as_str().expect("an id");
    let seen = api.get(&format!("/tenants/acme/deliveries/{id}")).await;
    assert_eq!(seen["attempts"].as_array().map(Vec::len), Some(2), "{seen}");
    assert_eq!(receiver.received().len(), 3);
}

#[tokio::test]
async fn an_endpoint_never_has_more_in_flight_than_its_bulkhead() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Hold);
    let api = program.api();
    let held = api
        .acme(&receiver.url("/hook"), json!({ "concurrency": 3 }))
        .await;
    // A healthy neighbour shows that the dispatcher has gone on meanwhile.
    let neighbour = Receiver::start().await;
    api.endpoint("acme", &neighbour.url("/hook"), json!({})).await;
    for _ in 0..12 {
        api.emit("acme", event()).await;
    }
    neighbour.wait_for(12).await;
    receiver.wait_in_flight(2).await;
    receiver.release();
    receiver.wait_for(12).await;
    api.wait_for_state("acme", "delivered", 24).await;
    let of_held = format!("state=delivered&endpoint={}", held.id);
    assert_eq!(api.deliveries("acme", &of_held).await.len(), 12);
    assert!(receiver.in_flight_max() <= 3, "{}", receiver.in_flight_max());
}

#[tokio::test]
async fn stripe_s_own_library_accepts_the_signature_and_refuses_a_changed_body() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let endpoint = program.api().acme(&receiver.url("/hook"), json!({})).await;
    let data = json!({ "name": "żółć 🚚", "amount": 1.5 });
    program
        .api()
        .emit("acme", json!({ "type": "invoice.paid", "data": data }))
        .await;
    let request = receiver.wait_for(1).await.remove(0);
    assert_eq!(request.verify(&endpoint.secret), Ok(()));
    let folder = tempfile::tempdir().expect("a folder");
    let body = folder.path().join("body");
    let verify = |bytes: &[u8], secret: &str| {
        std::fs::write(&body, bytes).expect("written");
        let script = "import stripe, sys
body = open(sys.argv[1], 'rb').read().decode('utf-8')
stripe.WebhookSignature.verify_header(body, sys.argv[2], sys.argv[3], tolerance=300)";
        let mut command = Command::new(python());
        command
            .args(["-c", script])
            .arg(&body)
            .args([request.header("webhook-signature"), secret]);
        command.output().expect("python runs")
    };
    let told = verify(&request.body, &endpoint.secret);
    assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
    let changed = [request.body.as_ref(), b" "].concat();
    for (bytes, secret) in [
        (changed.as_slice(), endpoint.secret.as_str()),
        (request.body.as_ref(), "whsec_other"),
    ] {
        let told = verify(bytes, secret);
        assert!(String::from_utf8_lossy(&told.stderr).contains("SignatureVerificationError"));
    }
}

#[tokio::test]
async fn a_filter_by_status_passes_over_what_got_no_answer() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}/", closed.local_addr().expect("an address"));
    drop(closed);
    api.acme(&url, json!({ "retry_schedule": ["0s"] })).await;
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    api.wait_for_state("acme", "dead", 1).await;
    assert!(api.deliveries("acme", "status_code=500").await.is_empty());
    assert_eq!(api.deliveries("acme", "state=dead").await.len(), 1);
}

#[tokio::test]
async fn a_result_does_not_take_away_the_row_of_a_later_attempt() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Hold);
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({ "concurrency": 1 }))
        .await;
    api.emit("acme", json!({ "id": "e1", "type": "invoice.paid", "data": {} }))
        .await;
    receiver.wait_for(1).await;
    // As if that attempt had been recorded without anybody's hearing of it, and the delivery replayed since.
    database
        .execute("update postrider.queue set attempt = 1, xid = pg_current_xact_id()")
        .await;
    receiver.release();
    receiver.wait_for(2).await;
    database.drained().await;
    let numbers = "select string_agg(number || ' ' || coalesce(final::text, ''), ',' order by number) from postrider.attempts";
    assert_eq!(database.text(numbers).await, "2 delivered");
}

#[tokio::test]
async fn what_waits_for_a_deleted_endpoint_is_dropped_also_when_that_fails_at_first() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    let endpoint = api.acme("http://127.0.0.1:9/hook", json!({})).await;
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    api.call(Method::PATCH, &path, Some(json!({ "enabled": false })))
        .await;
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    database
        .execute(
            "create function public.refuse() returns trigger language plpgsql as
                $$ begin raise exception 'not now'; end $$;
             create trigger refuse before delete on postrider.queue for each row execute function public.refuse()",
        )
        .await;
    let (status, _) = api.call(Method::DELETE, &path, None).await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    until("it was tried", || async {
        let told = "removing rows of a deleted endpoint failed";
        program
            .log_lines()
            .iter()
            .any(|line| line.contains(told))
            .then_some(())
    })
    .await;
    database.execute("drop trigger refuse on postrider.queue").await;
    database.drained().await;
}

#[tokio::test]
async fn an_endpoint_at_localhost_is_refused_with_the_address_to_write_instead() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    let body = json!({ "url": "http://localhost:3000/hook" });
    let (status, problem) = api
        .call(Method::POST, "/tenants/acme/endpoints", Some(body))
        .await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
    assert!(problem.to_string().contains("use 127.0.0.1 instead"), "{problem}");
}
