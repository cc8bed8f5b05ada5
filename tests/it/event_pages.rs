//! Events as pages: every event, and why each endpoint did or did not get it.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{Answer, Api, Database, Endpoint, Person, Postrider, Receiver, until};

async fn change(api: &Api, endpoint: &Endpoint, settings: Value) {
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    let (status, changed) = api.call(Method::PATCH, &path, Some(settings)).await;
    assert_eq!(status, StatusCode::OK, "{changed}");
}

/// The rest of the row with this endpoint, as text.
fn row_of<'p>(page: &'p str, url: &str) -> &'p str {
    let row = page.split("<tr>").find(|row| row.contains(url));
    let row = row.unwrap_or_else(|| panic!("no {url} in {page}"));
    row.split("</tr>").next().unwrap_or_default()
}

pub(crate) async fn customer<'p>(program: &'p Postrider, tenant: &str) -> Person<'p> {
    let path = format!("/tenants/{tenant}/portal-links");
    let (_, made) = program.api().call(Method::POST, &path, None).await;
    let url = url::Url::parse(made["url"].as_str().expect("a url")).expect("a url");
    let mut customer = Person::new(program);
    let entered = customer
        .visit(&format!("{}?{}", url.path(), url.query().expect("a token")))
        .await;
    assert!(entered.0.is_redirection());
    customer
}

#[tokio::test]
async fn the_page_of_an_event_says_why_each_endpoint_did_or_did_not_get_it() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.decide(|request| Answer::Status(if request.path == "/gone" { 410 } else { 204 }));
    let api = program.api();
    api.tenant("acme").await;
    api.event_type("order.created").await;
    let any = json!({ "type": "object" });
    let versions = json!({ "schemas": { "2026-01-15": any, "2026-06-01": any } });
    api.call(Method::PUT, "/event-types/invoice.paid", Some(versions))
        .await;
    let make = async |path: &str, more: Value| api.endpoint("acme", &receiver.url(path), more).await;
    make("/gets", json!({})).await;
    let orders = make("/orders", json!({ "types": ["order.*"] })).await;
    make("/pinned", json!({ "versions": { "invoice.paid": "2026-01-15" } })).await;
    make("/rich", json!({ "filter": { "/amount": { "gte": 100 } } })).await;
    let paused = make("/paused", json!({})).await;
    change(&api, &paused, json!({ "enabled": false })).await;
    let gone = make("/gone", json!({ "types": ["order.created"] })).await;
    api.emit("acme", json!({ "type": "order.created", "data": {} }))
        .await;
    until("it was disabled", || async {
        let seen = api.get(&format!("/tenants/acme/endpoints/{}", gone.id)).await;
        (seen["state"] == "disabled").then_some(())
    })
    .await;
    let event = json!({ "id": "evt_why", "type": "invoice.paid", "data": { "amount": 5 } });
    api.emit("acme", event).await;
    until("it was delivered, and dropped by the filter", || async {
        let waiting =
            "select count(*) from postrider.queue q join postrider.endpoints e on e.id = q.endpoint_id
                       where e.state <> 'paused'";
        (database.count(waiting).await == 0).then_some(())
    })
    .await;
    make("/late", json!({})).await;
    change(&api, &orders, json!({ "types": ["*"] })).await;
    change(&api, &gone, json!({ "enabled": true, "types": ["*"] })).await;

    let mut person = Person::signed_in(&program).await;
    for mut reader in [person, customer(&program, "acme").await] {
        let (status, page) = reader.visit("/events/evt_why").await;
        assert_eq!(status, StatusCode::OK);
        for (path, reason) in [
            ("/gets", "delivered"),
            ("/paused", "On hold until the endpoint is resumed"),
            (
                "/orders",
                "Not subscribed to invoice.paid. Subscribed to: order.*.",
            ),
            ("/orders", "Its settings have changed since."),
            (
                "/pinned",
                "Pinned to version 2026-01-15 of invoice.paid. The event has version 2026-06-01.",
            ),
            ("/rich", "must be at least 100, but is 5."),
            ("/gone", "Disabled at that time, since <time"),
            ("/gone", "because it returned 410."),
            ("/late", "Created later, at <time"),
        ] {
            let row = row_of(&page, &receiver.url(path));
            assert!(row.contains(reason), "{path}: {row}");
        }
        assert!(!page.contains("although its settings match"), "{page}");
    }
    person = Person::signed_in(&program).await;
    let (_, page) = person.visit("/deliveries?event=evt_why&state=dead").await;
    assert!(page.contains("href=\"/events?event=evt_why\""), "{page}");
}

#[tokio::test]
async fn every_event_is_listed_and_those_without_a_delivery_are_found() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({ "types": ["invoice.paid"] }))
        .await;
    api.event_type("invoice.void").await;
    api.tenant("globex").await;
    for n in 0..60 {
        let event = json!({ "id": format!("evt_ok_{n}"), "type": "invoice.paid", "data": {} });
        api.emit("acme", event).await;
    }
    api.emit(
        "acme",
        json!({ "id": "evt_void", "type": "invoice.void", "data": {} }),
    )
    .await;
    api.emit(
        "globex",
        json!({ "id": "evt_alone", "type": "invoice.paid", "data": {} }),
    )
    .await;
    api.wait_for_state("acme", "delivered", 60).await;

    let mut person = Person::signed_in(&program).await;
    for (query, ok, void, alone) in [
        ("", true, true, true),
        ("tenant=acme", true, true, false),
        ("tenant=globex", false, false, true),
        ("deliveries=none", false, true, true),
        ("deliveries=none&tenant=acme", false, true, false),
        ("type=invoice.void", false, true, false),
        ("type=no.such", false, false, false),
        ("event=evt_alone", false, false, true),
        ("event=evt_alone&tenant=acme", false, false, false),
        ("within=15m", true, true, true),
        ("until=2020-01-01T00:00", false, false, false),
        ("tenant=nobody", false, false, false),
    ] {
        let (status, page) = person.visit(&format!("/events?{query}")).await;
        assert_eq!(status, StatusCode::OK, "{query}");
        let found = ["evt_ok_59", "evt_void", "evt_alone"].map(|id| page.contains(&format!(">{id}<")));
        assert_eq!(found, [ok, void, alone], "{query}: {page}");
    }
    for bad in ["deliveries=some", "since=tomorrow", "type=A%20B"] {
        let (status, page) = person.visit(&format!("/events?{bad}")).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{bad}");
        assert!(page.contains("aria-invalid"), "{bad}: {page}");
    }
    assert_eq!(person.visit("/events?cursor=x").await.0, StatusCode::BAD_REQUEST);

    // In pages, each event once.
    let mut seen = Vec::new();
    let mut address = "/events".to_owned();
    for _ in 0..10 {
        let (_, page) = person.visit(&address).await;
        let rows = page.split("<code>evt_").skip(1);
        seen.extend(rows.map(|row| row.split('<').next().unwrap_or_default().to_owned()));
        let Some(next) = page.split("next\" href=\"").nth(1) else {
            break;
        };
        address = next.split('"').next().unwrap_or_default().replace("&#38;", "&");
    }
    let mut expected: Vec<String> = (0..60).map(|n| format!("ok_{n}")).collect();
    expected.extend(["void".to_owned(), "alone".to_owned()]);
    expected.reverse();
    assert_eq!(seen, expected);

    let mut customer = customer(&program, "globex").await;
    for (query, alone) in [("", true), ("tenant=acme", true), ("event=evt_void", false)] {
        let (_, page) = customer.visit(&format!("/events?{query}")).await;
        assert_eq!(page.contains(">evt_alone<"), alone, "{query}: {page}");
        assert!(
            !page.contains("evt_void<") && !page.contains("evt_ok"),
            "{query}: {page}"
        );
    }
    assert_eq!(customer.visit("/events/evt_void").await.0, StatusCode::NOT_FOUND);
}
