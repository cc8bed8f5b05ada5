//! Filters: an endpoint gets what it asked for, and a filter that means nothing is refused.

use reqwest::{Method, StatusCode};
use serde_json::json;

use crate::support::{Database, Postrider, Receiver, until};

#[tokio::test]
async fn only_events_that_the_filter_wants_arrive_and_the_others_leave_nothing_waiting() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let wanting = Receiver::start().await;
    let taking_all = Receiver::start().await;
    let api = program.api();
    let filter = json!({"/amount": {"gte": 100}, "not": {"/currency": {"in": ["USD", "GBP"]}}});
    let endpoint = api
        .acme(
            &wanting.url("/hook"),
            json!({ "filter": filter, "ordered": true }),
        )
        .await;
    api.endpoint("acme", &taking_all.url("/hook"), json!({})).await;
    let seen = api.get(&format!("/tenants/acme/endpoints/{}", endpoint.id)).await;
    assert_eq!(seen["filter"], filter);
    for n in 0..40 {
        let currency = if n % 2 == 0 { "EUR" } else { "USD" };
        let event = json!({"type": "invoice.paid", "id": format!("e{n}"), "ordering_key": "k",
                           "data": {"amount": n * 5, "currency": currency}});
        assert_eq!(api.emit("acme", event).await.0, StatusCode::ACCEPTED);
    }
    let wanted: Vec<String> = (20..40).step_by(2).map(|n| format!("e{n}")).collect();
    taking_all.wait_for(40).await;
    wanting.wait_for(wanted.len()).await;
    let waiting = "select count(*) from postrider.queue";
    until("nothing waits", || async {
        let mut connection = database.connect().await;
        let count: i64 = sqlx::query_scalar(waiting)
            .fetch_one(&mut connection)
            .await
            .expect("counted");
        (count == 0).then_some(())
    })
    .await;
    let received: Vec<String> = wanting
        .received()
        .iter()
        .map(|request| request.event_id().to_owned())
        .collect();
    assert_eq!(received, wanted);
    let list = api
        .deliveries("acme", &format!("endpoint={}&limit=100", endpoint.id))
        .await;
    assert_eq!(list.len(), wanted.len());

    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    let (status, changed) = api
        .call(Method::PATCH, &path, Some(json!({ "filter": null })))
        .await;
    assert_eq!(status, StatusCode::OK, "{changed}");
    api.emit("acme", json!({"type": "invoice.paid", "data": {}}))
        .await;
    wanting.wait_for(wanted.len() + 1).await;
}

#[tokio::test]
async fn a_filter_that_means_nothing_is_refused_where_it_is_wrong() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    for (bad, pointer) in [
        (json!({"amount": {"eq": 1}}), "/filter/amount"),
        (json!({"/amount": {"like": 1}}), "/filter/~1amount/like"),
        (json!({"or": []}), "/filter/or"),
        (json!([]), "/filter"),
        (json!("x"), "/filter"),
    ] {
        let body = json!({"url": receiver.url("/hook"), "filter": bad});
        for (method, path) in [
            (Method::POST, "/tenants/acme/endpoints".to_owned()),
            (Method::PATCH, format!("/tenants/acme/endpoints/{}", endpoint.id)),
        ] {
            let (status, problem) = api.call(method, &path, Some(body.clone())).await;
            assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{bad}: {problem}");
            assert_eq!(problem["errors"][0]["pointer"], pointer, "{problem}");
        }
    }
    for nonsense in ["**", "a.*.b", "*.a", "Invoice.Paid", "invoice.", ""] {
        let body = json!({"url": receiver.url("/hook"), "types": [nonsense]});
        let (status, _) = api
            .call(Method::POST, "/tenants/acme/endpoints", Some(body))
            .await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{nonsense}");
    }
}
