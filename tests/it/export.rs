//! Deliveries and dead letters as streams, and dead letters in numbers.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{Answer, Database, Postrider, Receiver};

#[tokio::test]
async fn deliveries_stream_as_ndjson_and_csv_and_dead_letters_are_counted_by_group() {
    const COUNT: usize = 1_300;
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    let emit = format!(
        "select postrider.emit('acme', 'invoice.paid', '{{}}', 'e' || n) from generate_series(1, {COUNT}) n"
    );
    receiver.answer(Answer::Status(410));
    database.execute(&emit).await;
    database.drained().await;

    let (status, text) = api
        .send_bytes(Method::GET, "/tenants/acme/deliveries?format=ndjson", Vec::new())
        .await;
    assert_eq!(status, StatusCode::OK);
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("a JSON line"))
        .collect();
    assert_eq!(lines.len(), COUNT);
    let page = api.get("/tenants/acme/deliveries?limit=2").await;
    assert_eq!(
        json!(lines[..2]),
        page["data"],
        "in the order and the form of the list"
    );

    let path = "/tenants/acme/deliveries?state=dead&format=csv";
    let (_, text) = api.send_bytes(Method::GET, path, Vec::new()).await;
    let mut rows = text.split("\r\n");
    assert!(
        rows.next()
            .is_some_and(|head| head.starts_with("id,event,type,endpoint,state,reason"))
    );
    let rows: Vec<&str> = rows.filter(|row| !row.is_empty()).collect();
    assert_eq!(rows.len(), COUNT);
    assert!(
        rows.iter()
            .all(|row| row.contains(",invoice.paid,") && row.contains(",dead,gone,"))
    );
    let none = "/tenants/acme/deliveries?state=pending&format=csv";
    assert_eq!(
        api.send_bytes(Method::GET, none, Vec::new())
            .await
            .1
            .lines()
            .count(),
        1
    );
    let wrong = "/tenants/acme/deliveries?format=xml";
    assert_eq!(
        api.call(Method::GET, wrong, None).await.0,
        StatusCode::BAD_REQUEST
    );

    let groups = api.get("/tenants/acme/dead-letters").await;
    let group = &groups["data"][0];
    assert_eq!(groups["data"].as_array().map(Vec::len), Some(1), "{groups}");
    assert_eq!(
        (&group["endpoint"], &group["count"]),
        (&json!(endpoint.id), &json!(COUNT)),
        "{group}"
    );
    assert_eq!(
        (&group["type"], &group["reason"]),
        (&json!("invoice.paid"), &json!("gone")),
        "{group}"
    );
}
