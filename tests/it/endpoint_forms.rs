//! The form of an endpoint: types from the catalogue, a filter that is tested before it is saved, what applies to empty
//! fields, certificates and the alert.

use reqwest::{Method, StatusCode};
use serde_json::json;

use crate::support::{Browser, Database, Form, Person, Postrider, Receiver, text_of};

#[tokio::test]
async fn event_types_are_found_by_search_and_picked_one_by_one_or_as_a_group() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    for name in ["invoice.paid", "invoice.sent", "order.created", "ping"] {
        api.event_type(name).await;
    }
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.open(&program.url("/endpoints/new?tenant=acme")).await;
    browser.fill("#url", "https://example.com/hook").await;
    let disabled =
        "return [...document.querySelectorAll('[data-pattern]:disabled')].map((box) => box.dataset.pattern)";
    let all = json!([
        "ping",
        "invoice.*",
        "invoice.paid",
        "invoice.sent",
        "order.*",
        "order.created"
    ]);
    assert_eq!(
        browser.script(disabled).await,
        all,
        "all but the operational ones"
    );
    browser.click("[data-pattern='*']").await;
    assert_eq!(browser.script(disabled).await, json!([]));

    browser.fill("[data-search]", "ORDER").await;
    let seen =
        "return [...document.querySelectorAll('[data-pattern]')].filter((box) => box.checkVisibility())
        .map((box) => box.dataset.pattern)";
    assert_eq!(browser.script(seen).await, json!(["order.*", "order.created"]));
    browser.click("[data-pattern='order.created']").await;
    browser.fill("[data-search]", "nothing like it").await;
    browser.read("No matching event types.").await;
    browser.fill("[data-search]", "invoice").await;
    browser.click("[data-pattern='invoice.*']").await;
    let included = json!(["invoice.paid", "invoice.sent"]);
    assert_eq!(browser.script(disabled).await, included);
    for (scheme, rules) in [("light", "all"), ("dark", "color-contrast")] {
        browser.scheme(scheme).await;
        assert_eq!(browser.violations(rules).await, Vec::<String>::new(), "{scheme}");
    }
    browser.press("Add endpoint").await;
    browser.read("Endpoint added.").await;
    let added = api.get("/tenants/acme/endpoints").await["data"][0].clone();
    assert_eq!(added["types"], json!(["invoice.*", "order.created"]), "{added}");

    let id = added["id"].as_str().expect("an id");
    browser
        .open(&program.url(&format!("/endpoints/{id}/settings")))
        .await;
    let checked =
        "return [...document.querySelectorAll('[data-pattern]:checked')].map((box) => box.dataset.pattern)";
    assert_eq!(
        browser.script(checked).await,
        json!(["invoice.*", "order.created"])
    );
    browser.close().await;
}

#[tokio::test]
async fn a_type_that_does_not_exist_has_to_be_confirmed() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    let mut person = Person::signed_in(&program).await;
    let url = receiver.url("/added");
    let fields = [
        ("tenant", "acme"),
        ("url", url.as_str()),
        ("types", "invoice.* typo.event"),
    ];
    let (status, page) = person.post("/endpoints", &fields).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(page.contains("No event type matches `typo.event`."), "{page}");
    assert!(
        page.contains("name=\"allow_unmatched\""),
        "it can be confirmed: {page}"
    );

    let settings = format!("/endpoints/{}/settings", endpoint.id);
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    let fields = [("url", url.as_str()), ("types", "typo.*")];
    let (status, page) = person.post(&settings, &fields).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{page}");
    assert_eq!(api.get(&path).await["types"], json!(["*"]), "not saved");
    let confirmed = [fields[0], fields[1], ("allow_unmatched", "on")];
    let (status, page) = person.post(&settings, &confirmed).await;
    assert!(status.is_redirection(), "{page}");
    // What it has already is no reason to reject another change.
    let again = [fields[0], fields[1], ("description", "changed")];
    assert!(person.post(&settings, &again).await.0.is_redirection());
    let stored = api.get(&path).await;
    assert_eq!(
        (&stored["types"], &stored["description"]),
        (&json!(["typo.*"]), &json!("changed"))
    );

    let (status, page) = person.post(&settings, &[("url", url.as_str())]).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "no type at all");
    assert!(page.contains("Event types must have 1 to 100 entries"), "{page}");
}

#[tokio::test]
async fn a_filter_is_tested_on_recent_events_of_the_own_tenant_and_nothing_is_saved() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    api.event_type("order.created").await;
    api.tenant("globex").await;
    for (tenant, id, name, amount) in [
        ("acme", "evt_small", "invoice.paid", 5),
        ("acme", "evt_large", "invoice.paid", 5_000),
        ("acme", "evt_order", "order.created", 5_000),
        ("globex", "evt_foreign", "invoice.paid", 5_000),
        // A producer's id is unique within its tenant only.
        ("globex", "evt_large", "invoice.paid", 7),
    ] {
        let event = json!({ "id": id, "type": name, "data": { "amount": amount } });
        let (status, told) = api.emit(tenant, event).await;
        assert!(status.is_success(), "{told}");
    }
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    let settings = format!("/endpoints/{}/settings", endpoint.id);
    browser.open(&program.url(&settings)).await;
    browser.click("[data-pattern='*']").await;
    browser.click("[data-pattern='invoice.paid']").await;
    browser.fill("#filter", r#"{"/amount": {"gte": 1000}}"#).await;
    browser.press("Test filter on recent events").await;
    browser
        .read("1 of the latest 2 events of these types would be sent.")
        .await;
    let rows = "return [...document.querySelectorAll('#filter-test + .wide tbody tr')]
        .map((row) => [row.cells[0].textContent, row.cells[3].textContent])";
    let told = json!([["evt_large", "sent"], ["evt_small", "not sent"]]);
    assert_eq!(browser.script(rows).await, told);
    for (scheme, rules) in [("light", "all"), ("dark", "color-contrast")] {
        browser.scheme(scheme).await;
        assert_eq!(browser.violations(rules).await, Vec::<String>::new(), "{scheme}");
    }
    // The link leads to the event of this tenant, not to the newest one with the same id.
    let link = "return document.querySelector('#filter-test + .wide tbody a').getAttribute('href')";
    let link = browser.script(link).await;
    let mut person = Person::signed_in(&program).await;
    let (status, page) = person.visit(link.as_str().expect("a link")).await;
    assert_eq!(status, StatusCode::OK, "{page}");
    assert!(
        page.contains("/tenants/acme\"") && page.contains("5000"),
        "{page}"
    );
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    let stored = api.get(&path).await;
    assert_eq!(
        (&stored["filter"], &stored["types"]),
        (&json!(null), &json!(["*"]))
    );
    // The input is still there, and Enter saves it.
    let url = browser.see("#url").await;
    url.send_keys("\u{E007}").await.expect("Enter");
    browser.read("Saved.").await;
    let stored = api.get(&path).await;
    assert_eq!(stored["filter"], json!({ "/amount": { "gte": 1000 } }));
    browser.close().await;

    let (_, link) = api.call(Method::POST, "/tenants/acme/portal-links", None).await;
    let link = url::Url::parse(link["url"].as_str().expect("a link")).expect("a URL");
    let mut customer = Person::new(&program);
    let way_in = format!("{}?{}", link.path(), link.query().expect("a token"));
    assert!(customer.visit(&way_in).await.0.is_redirection());
    // A customer's endpoint is of their own tenant, whatever the form says.
    let fields = [("tenant", "globex"), ("types", "*"), ("test_filter", "on")];
    let (status, page) = customer.post("/endpoints", &fields).await;
    assert_eq!(status, StatusCode::OK);
    assert!(page.contains("All of the latest 3 events"), "{page}");
    assert!(
        page.contains("evt_small") && !page.contains("evt_foreign"),
        "{page}"
    );
    let bad = [("types", "*"), ("filter", "{"), ("test_filter", "on")];
    let (status, page) = customer.post("/endpoints", &bad).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(page.contains("is not valid JSON"), "{page}");
    let none = [
        ("types", "order.created"),
        ("versions", "order.created = v9"),
        ("test_filter", "on"),
    ];
    let (_, page) = customer.post("/endpoints", &none).await;
    assert!(page.contains("There is nothing to test with"), "{page}");
}

#[tokio::test]
async fn the_form_has_the_schedule_in_force_certificates_and_the_alert() {
    let database = Database::fresh().await;
    let program = Postrider::start_with(&database, &[("POSTRIDER_RETRY_SCHEDULE", "0s,2s,90m")]).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    let (page, path) = (
        format!("/endpoints/{}/settings", endpoint.id),
        format!("/tenants/acme/endpoints/{}", endpoint.id),
    );
    let mut person = Person::signed_in(&program).await;
    let (_, shown) = person.visit(&page).await;
    assert!(shown.contains("placeholder=\"0s, 2s, 90m\""), "{shown}");

    let url = receiver.url("/hook");
    let wrong = [("url", url.as_str()), ("types", "*"), ("tls_ca", "no PEM")];
    let (status, shown) = person.post(&page, &wrong).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(
        shown.contains("id=\"tls/ca_certificates-error\"") && text_of(&shown, "tls_ca") == "no PEM",
        "{shown}"
    );
    let ca = rcgen::generate_simple_self_signed(vec!["example.com".to_owned()]).expect("a certificate");
    let ca = ca.cert.pem();
    let own = [("url", url.as_str()), ("types", "*"), ("tls_ca", ca.as_str())];
    let (status, shown) = person.post(&page, &own).await;
    assert!(status.is_redirection(), "{shown}");
    let stored = api.get(&path).await;
    let fingerprint = stored["tls"]["ca_certificates"][0]
        .as_str()
        .expect("a fingerprint");
    let (_, shown) = person.visit(&page).await;
    assert!(shown.contains(fingerprint) && !shown.contains("MII"), "{shown}");
    // Left empty they are kept; removed when asked for.
    let kept = [("url", url.as_str()), ("types", "*")];
    assert!(person.post(&page, &kept).await.0.is_redirection());
    assert!(api.get(&path).await["tls"].is_object());
    let removed = [kept[0], kept[1], ("drop_tls", "on")];
    assert!(person.post(&page, &removed).await.0.is_redirection());
    assert_eq!(api.get(&path).await["tls"], json!(null));

    let (_, shown) = person.visit(&page).await;
    let form = |threshold: &str| Form::find(&shown, "/alert").fill("dead_letters", threshold);
    let (status, rejected) = person.submit(&form("many")).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(
        rejected.contains("The number of dead letters must be a whole number") && rejected.contains("many"),
        "{rejected}"
    );
    let (status, saved) = person.submit_and_follow(&form("25")).await;
    assert_eq!(status, StatusCode::OK);
    assert!(saved.contains("Alert saved."), "{saved}");
    assert_eq!(api.get(&format!("{path}/alert")).await["dead_letters"], 25);
    let unheard = "so nobody receives this alert";
    assert!(saved.contains(unheard), "{saved}");
    let types = json!({ "types": ["postrider.alert.*"] });
    api.endpoint("acme", &receiver.url("/alerts"), types).await;
    let (_, heard) = person.visit(&page).await;
    assert!(!heard.contains(unheard), "{heard}");
    assert!(person.submit(&form("")).await.0.is_redirection());
    let (status, _) = api.call(Method::GET, &format!("{path}/alert"), None).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}
