//! Finding things: the search box, suggestions, filters in the reader's own time.

use reqwest::{Method, StatusCode};
use serde_json::json;

use crate::{
    event_pages::customer,
    support::{Browser, Database, Person, Postrider, Receiver, until},
};

#[tokio::test]
async fn ids_lead_to_their_pages_and_names_to_grouped_results_of_the_own_tenant_only() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let more = json!({ "description": "Warehouse in Oslo" });
    let endpoint = api.acme(&receiver.url("/stock"), more).await;
    for (tenant, name) in [("globex", "Globex Oslo"), ("initech", "Initech")] {
        let body = json!({ "name": name });
        api.call(Method::PUT, &format!("/tenants/{tenant}"), Some(body))
            .await;
    }
    for tenant in ["acme", "globex"] {
        api.emit(
            tenant,
            json!({ "id": "evt_both", "type": "invoice.paid", "data": {} }),
        )
        .await;
    }
    let (_, event) = api
        .emit(
            "acme",
            json!({ "id": "order-1", "type": "invoice.paid", "data": {} }),
        )
        .await;
    assert_eq!(event["id"], "order-1");
    let delivered = api.wait_for_state("acme", "delivered", 2).await;
    let delivery = delivered[0]["id"].as_str().expect("an id");

    let mut person = Person::signed_in(&program).await;
    let mut own = customer(&program, "acme").await;
    let mut foreign = customer(&program, "globex").await;
    for (text, page) in [
        (delivery, "/deliveries/dlv_"),
        (&endpoint.id, "/endpoints/ep_"),
        (" order-1 ", "/events/evt_"),
    ] {
        let address = format!("/search?q={text}");
        for reader in [&mut person, &mut own] {
            let seen = reader.visit_whole(&address).await;
            assert!(seen.location.starts_with(page), "{text}: {}", seen.location);
        }
        let (status, page) = foreign.visit(&address).await;
        assert_eq!(status, StatusCode::OK);
        assert!(page.contains("No results") && !page.contains("stock"), "{page}");
    }
    let seen = person.visit_whole("/search?q=initech").await;
    assert_eq!(seen.location, "/tenants/initech");

    // The description of an endpoint and the name of a tenant.
    let (_, page) = person.visit("/search?q=OSLO").await;
    for part in [
        "aria-label=\"Endpoints\"",
        "/stock",
        "aria-label=\"Tenants\"",
        "/tenants/globex",
    ] {
        assert!(page.contains(part), "no {part} in {page}");
    }
    assert!(!page.contains("initech"), "{page}");
    let (_, page) = own.visit("/search?q=oslo").await;
    assert!(page.contains("/stock") && !page.contains("globex"), "{page}");
    let (_, page) = foreign.visit("/search?q=oslo").await;
    assert!(page.contains("No results"), "{page}");
    // Two tenants have it.
    let (_, page) = person.visit("/search?q=evt_both").await;
    assert_eq!(page.matches("href=\"/events/evt_").count(), 2, "{page}");
    assert!(
        own.visit_whole("/search?q=evt_both")
            .await
            .status
            .is_redirection()
    );

    for n in 0..11 {
        api.endpoint("acme", &receiver.url(&format!("/many/{n}")), json!({}))
            .await;
    }
    let (_, page) = own.visit("/search?q=/many/").await;
    assert!(
        page.contains("More results match") && page.matches("<li>").count() == 10,
        "{page}"
    );
    let (_, list) = own.visit("/search/suggestions?q=/many/1").await;
    assert!(
        list.contains("data-summary=\"2 results\"") && !list.contains("<main"),
        "{list}"
    );

    let long = "x".repeat(2_049);
    for path in ["/search", "/search/suggestions", "/search/tenants"] {
        let (status, _) = person.visit(&format!("{path}?q={long}")).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{path}");
    }
    for path in ["/deliveries", "/events", "/endpoints"] {
        let (_, page) = person.visit(&format!("{path}?tenant=GLOB")).await;
        assert!(
            page.contains(&format!("href=\"{path}?tenant=globex\"")),
            "{path}: {page}"
        );
    }
    let (_, options) = person.visit("/search/tenants?q=glob").await;
    assert!(options.contains("value=\"globex\">Globex Oslo<"), "{options}");
    assert!(!options.contains("initech"), "{options}");
}

const CONTROL: char = '\u{E009}';
const DOWN: char = '\u{E015}';
const ESCAPE: char = '\u{E00C}';
const ENTER: char = '\u{E007}';

#[tokio::test]
async fn a_person_searches_from_any_page_with_the_keyboard_alone() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let first = api.acme(&receiver.url("/stock/1"), json!({})).await;
    api.endpoint("acme", &receiver.url("/stock/2"), json!({})).await;

    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    for page in ["/replays", "/account"] {
        browser.open(&program.url(page)).await;
        browser.type_keys(&format!("{CONTROL}k")).await;
        browser.type_keys("STOCK").await;
        browser.see(".found:not([hidden]) a").await;
        assert_eq!(browser.violations("all").await, Vec::<String>::new(), "{page}");
        browser.type_keys(&ESCAPE.to_string()).await;
        let closed = "return document.querySelector('.found').hidden && document.activeElement.name === 'q'";
        assert_eq!(browser.script(closed).await, json!(true));
    }
    browser.type_keys(&format!("{CONTROL}k")).await;
    browser.type_keys("stock").await;
    browser.see(".found:not([hidden]) a").await;
    // The newest is the first.
    browser.type_keys(&DOWN.to_string()).await;
    browser.type_keys(&DOWN.to_string()).await;
    browser.type_keys(&ENTER.to_string()).await;
    until("the endpoint is shown", || async {
        browser.address().await.ends_with(&first.id).then_some(())
    })
    .await;
    browser.open(&program.url("/replays")).await;
    browser.type_keys(&format!("{CONTROL}k")).await;
    browser.type_keys(&format!("{}{ENTER}", first.id)).await;
    until("an id leads to its page", || async {
        browser.address().await.ends_with(&first.id).then_some(())
    })
    .await;
    browser.close().await;
}

#[tokio::test]
async fn filters_by_time_are_in_the_readers_own_zone_and_tenants_are_suggested() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    api.tenant("globex").await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.time_zone("Asia/Kolkata").await;
    for page in ["/deliveries", "/events", "/audit"] {
        browser
            .open(&program.url(&format!("{page}?since=2026-05-28T10:00:00Z")))
            .await;
        let value = browser
            .script("return document.querySelector('[name=since]').value")
            .await;
        assert!(
            value.as_str().expect("a time").starts_with("2026-05-28T15:30"),
            "{page}: {value}"
        );
        let zone = browser
            .script("return document.querySelector('[data-zone]').textContent")
            .await;
        assert_ne!(zone, json!("UTC"), "{page}");
        browser
            .script("document.querySelector('[name=since]').value = '2026-05-28T16:00'")
            .await;
        browser.click("form.filters button:not([type])").await;
        until("the filter is applied", || async {
            browser
                .address()
                .await
                .contains("since=2026-05-28T10%3A30%3A00")
                .then_some(())
        })
        .await;
    }
    browser.open(&program.url("/deliveries")).await;
    browser.fill("[name=tenant]", "glo").await;
    until("the tenant is suggested", || async {
        let found = browser
            .script("return [...document.querySelector('#tenants').options].map((one) => one.value)")
            .await;
        (found == json!(["globex"])).then_some(())
    })
    .await;
    browser.close().await;
}

/// Looking for an event in every tenant takes a lookup for each: not after every pause in typing.
#[tokio::test]
async fn among_many_tenants_an_event_is_looked_for_everywhere_only_when_enter_is_pressed() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    api.emit(
        "acme",
        json!({ "id": "order-7", "type": "invoice.paid", "data": {} }),
    )
    .await;
    api.wait_for_state("acme", "delivered", 1).await;
    let generated = database
        .text("select 'evt_' || replace(event_id::text, '-', '') from postrider.attempts")
        .await;
    let mut person = Person::signed_in(&program).await;
    let (_, list) = person.visit("/search/suggestions?q=order-7").await;
    assert!(
        list.contains(&generated),
        "few tenants are searched at once: {list}"
    );
    database
        .execute("insert into postrider.tenants (slug) select 'many-' || n from generate_series(1, 600) n")
        .await;
    // The new ones are read first.
    database
        .execute("update postrider.tenants set name = 'Acme' where slug = 'acme'")
        .await;

    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.open(&program.url("/replays")).await;
    browser.type_keys(&format!("{CONTROL}k")).await;
    browser.type_keys("order-7").await;
    browser.see(".found:not([hidden]) .results").await;
    browser
        .read("Press Enter to look for an event with this ID in all tenants.")
        .await;
    assert_eq!(browser.violations("all").await, Vec::<String>::new());
    browser.type_keys(&ENTER.to_string()).await;
    until("the event is shown", || async {
        browser.address().await.ends_with(&generated).then_some(())
    })
    .await;
    browser.close().await;

    // A generated id is found by the index of attempts, among any number of tenants.
    let (_, list) = person.visit(&format!("/search/suggestions?q={generated}")).await;
    assert!(
        list.contains(&format!("href=\"/events/{generated}\"")) && !list.contains("Press Enter"),
        "{list}"
    );
}
