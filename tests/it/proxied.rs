//! The operator's proxy, from the setting to the delivery page.

use std::sync::{Arc, Mutex};

use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use crate::support::{Database, Postrider, Receiver, until};

/// A proxy that lets everything through and writes down where to.
async fn proxy() -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = listener.local_addr().expect("an address").to_string();
    let asked: Arc<Mutex<Vec<String>>> = Arc::default();
    let book = asked.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let book = book.clone();
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await.expect("a head"));
                }
                let head = String::from_utf8(head).expect("ASCII");
                let target = head.split(' ').nth(1).expect("a target").to_owned();
                book.lock().expect("not poisoned").push(target.clone());
                let mut onward = TcpStream::connect(target).await.expect("connected");
                stream
                    .write_all(b"HTTP/1.1 200 OK\r\n\r\n")
                    .await
                    .expect("answered");
                let _ = tokio::io::copy_bidirectional(&mut stream, &mut onward).await;
            });
        }
    });
    (address, asked)
}

#[tokio::test]
async fn deliveries_go_through_the_operators_proxy_and_its_failures_are_not_the_endpoints() {
    let database = Database::fresh().await;
    let (address, asked) = proxy().await;
    let url = format!("http://{address}");
    let mut program = Postrider::start_with(&database, &[("POSTRIDER_EGRESS_PROXY", &url)]).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    receiver.wait_for(1).await;
    let target = receiver.url("/hook").replace("http://", "").replace("/hook", "");
    assert_eq!(*asked.lock().expect("not poisoned"), [target]);
    database.drained().await;
    program.stop().await;

    // Nobody listens there any more.
    let gone = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let url = format!("http://{}", gone.local_addr().expect("an address"));
    drop(gone);
    let program = Postrider::start_with(&database, &[("POSTRIDER_EGRESS_PROXY", &url)]).await;
    let api = program.api();
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let delivery = until("it is tried", || async {
        let waiting = api.deliveries("acme", "state=pending").await;
        waiting.into_iter().find(|one| one["attempt_count"] == 1)
    })
    .await;
    let path = format!(
        "/tenants/acme/deliveries/{}",
        delivery["id"].as_str().expect("an id")
    );
    let seen = api.get(&path).await;
    assert_eq!(seen["attempts"][0]["outcome"], "proxy_failed", "{seen}");
    assert!(
        seen["next_attempt_at"].is_string(),
        "it uses up no attempt of the schedule: {seen}"
    );
    assert_eq!(
        receiver.received().len(),
        1,
        "nothing goes past the proxy when it is down"
    );
}

/// A proxy that does not let anything through.
async fn refusing(answer: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await.unwrap_or(b'\n'));
                }
                let _ = stream.write_all(answer.as_bytes()).await;
            });
        }
    });
    url
}

#[tokio::test]
async fn a_destination_that_the_proxy_refuses_is_a_failure_of_the_delivery_and_ends_as_a_dead_letter() {
    let database = Database::fresh().await;
    let url = refusing("HTTP/1.1 403 Forbidden\r\n\r\n").await;
    let program = Postrider::start_with(&database, &[("POSTRIDER_EGRESS_PROXY", &url)]).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let schedule = json!({ "retry_schedule": ["0s", "100ms"] });
    api.acme(&receiver.url("/hook"), schedule).await;
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let dead = api.wait_for_state("acme", "dead", 1).await.remove(0);
    assert_eq!(
        (&dead["reason"], &dead["attempt_count"]),
        (&json!("exhausted"), &json!(2)),
        "{dead}"
    );
    let path = format!("/tenants/acme/deliveries/{}", dead["id"].as_str().expect("an id"));
    let seen = api.get(&path).await;
    assert_eq!(seen["attempts"][0]["outcome"], "connection_failed", "{seen}");
    let words = "the egress proxy does not allow connections to the endpoint: it responded 403";
    assert_eq!(seen["attempts"][0]["error"], words, "{seen}");
    assert_eq!(receiver.count(), 0);
}
