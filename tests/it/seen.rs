//! What people see of the pages in a real browser: numbers that agree, reasons, results of buttons, forms, and what they may not do.

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::{Answer, Browser, Database, Person, Postrider, Receiver, text_of, until};

/// The numbers of a page by their labels.
const FIGURES: &str = "return Object.fromEntries([...document.querySelectorAll('.figure')].map((one) =>
    [one.querySelector('.label').textContent, one.querySelector('strong').innerText.trim()]))";
const ROWS: &str = "return document.querySelectorAll('main tbody tr').length";

async fn figure(browser: &Browser, label: &str) -> String {
    browser.script(FIGURES).await[label]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

#[tokio::test]
async fn numbers_on_the_pages_agree_with_each_other() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let once = json!({ "retry_schedule": ["0s"] });
    let endpoint = api.acme(&receiver.url("/hook"), once).await;
    let event = json!({ "type": "invoice.paid", "data": {} });
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    // Nothing waits, and nothing is said to.
    assert_eq!(figure(&browser, "Pending").await, "0");

    // Three arrive and one does not: a quarter has failed, not all of the minutes with a failure.
    receiver.script([
        Answer::Status(204),
        Answer::Status(401),
        Answer::Status(204),
        Answer::Status(204),
    ]);
    for _ in 0..4 {
        api.emit("acme", event.clone()).await;
    }
    api.wait_for_state("acme", "delivered", 3).await;
    browser.read("of 4 attempts").await;
    browser.read("25.0%").await;
    assert_eq!(figure(&browser, "Success rate, 1h").await, "75.0%");

    let page = program.url(&format!("/endpoints/{}", endpoint.id));
    browser.open(&page).await;
    browser.see("h1 .state.active").await;
    browser.press("Pause").await;
    browser.read("Endpoint paused.").await;
    for _ in 0..5 {
        api.emit("acme", event.clone()).await;
    }
    browser.read("On hold").await;
    until("what is on hold is counted by itself", || async {
        (figure(&browser, "On hold").await == "5").then_some(())
    })
    .await;
    browser.open(&program.url("/")).await;
    assert_eq!(figure(&browser, "Pending").await, "5");
    browser.click("a.figure[href$='state=pending']").await;
    browser.see("main tbody tr").await;
    assert_eq!(browser.script(ROWS).await, json!(5), "as many as were counted");

    // An endpoint that only fails is not shown as active.
    receiver.answer(Answer::Status(401));
    browser.open(&page).await;
    browser.press("Resume").await;
    browser.see("h1 .state.late, h1 .state.open").await;
    let green = "return document.querySelector('h1 .state.active') === null";
    assert_eq!(browser.script(green).await, json!(true));
    browser.close().await;
}

#[tokio::test]
async fn a_button_pressed_too_late_says_that_nothing_was_done() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    receiver.answer(Answer::Status(500));
    let later = json!({ "retry_schedule": ["0s", "1h", "1h"] });
    api.acme(&receiver.url("/hook"), later).await;
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let id = until("it failed once", || async {
        let found = api.deliveries("acme", "").await;
        let found = found.first().filter(|one| one["attempt_count"] == 1)?;
        found["id"].as_str().map(str::to_owned)
    })
    .await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.open(&program.url(&format!("/deliveries/{id}"))).await;
    browser.read("Attempt 1").await;
    // Nobody looks at it while it is attempted again.
    browser.hide(true).await;
    api.call(
        Method::POST,
        &format!("/tenants/acme/deliveries/{id}/replay"),
        None,
    )
    .await;
    receiver.wait_for(2).await;
    until("the attempt is recorded", || async {
        (api.deliveries("acme", "").await[0]["attempt_count"] == 2).then_some(())
    })
    .await;
    browser.press("Send now").await;
    browser
        .read("Nothing was queued: it was attempted in the meantime.")
        .await;
    assert_eq!(receiver.count(), 2, "nothing was sent");

    // It dies while the page is open: the button that appears discards what the page shows.
    let endpoint = api.get("/tenants/acme/endpoints").await["data"][0]["id"].clone();
    let path = format!("/tenants/acme/endpoints/{}", endpoint.as_str().expect("an id"));
    let once = json!({ "retry_schedule": ["0s"] });
    api.call(Method::PATCH, &path, Some(once)).await;
    let path = format!("/tenants/acme/deliveries/{id}/replay");
    api.call(Method::POST, &path, None).await;
    browser.see(".state.dead").await;
    browser.press("Discard…").await;
    browser.see("dialog#discard:modal").await;
    browser.press("Discard").await;
    browser.read("Dead letter discarded.").await;
    browser.close().await;
}

#[tokio::test]
async fn support_reads_why_an_endpoint_did_not_get_an_event() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/gets"), json!({})).await;
    api.event_type("order.created").await;
    for (path, more) in [
        ("/orders", json!({ "types": ["order.*"] })),
        ("/rich", json!({ "filter": { "/amount": { "gte": 100 } } })),
    ] {
        api.endpoint("acme", &receiver.url(path), more).await;
    }
    api.tenant("globex").await;
    let event = json!({ "id": "evt_nobody", "type": "invoice.paid", "data": { "amount": 5 } });
    api.emit("globex", event.clone()).await;
    let mut own = event;
    own["id"] = json!("evt_some");
    api.emit("acme", own).await;
    api.wait_for_state("acme", "delivered", 1).await;
    database.drained().await;
    api.endpoint("acme", &receiver.url("/late"), json!({})).await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.press("Events").await;
    browser.read("evt_nobody").await;
    browser.read("evt_some").await;
    let row = "return [...document.querySelectorAll('main tbody tr')]
        .find((row) => row.innerText.includes('evt_some')).querySelector('a').click()";
    browser.script(row).await;
    for reason in [
        "Not subscribed to invoice.paid. Subscribed to: order.*.",
        "must be at least 100, but is 5.",
        "Created later, at",
    ] {
        browser.read(reason).await;
    }
    browser
        .open(&program.url("/events?tenant=globex&deliveries=none"))
        .await;
    browser.read("evt_nobody").await;
    browser.close().await;
}

#[tokio::test]
async fn a_list_is_filtered_by_what_failed_exported_and_its_ids_are_copied() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.decide(|request| Answer::Status(if request.path == "/missing" { 404 } else { 503 }));
    let api = program.api();
    let once = json!({ "retry_schedule": ["0s"] });
    api.acme(&receiver.url("/missing"), once.clone()).await;
    api.endpoint("acme", &receiver.url("/broken"), once).await;
    api.emit(
        "acme",
        json!({ "id": "evt_1", "type": "invoice.paid", "data": {} }),
    )
    .await;
    api.wait_for_state("acme", "dead", 2).await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.open(&program.url("/deliveries")).await;
    // In the first row, without opening anything.
    browser.fill("input[name=event]", "evt_1").await;
    browser.click("select[name=failure] option[value='4xx']").await;
    browser
        .see("select[name=failure] option[value='4xx'][selected]")
        .await;
    browser.read("/missing").await;
    assert_eq!(browser.script(ROWS).await, json!(1));
    assert!(browser.address().await.contains("event=evt_1"));
    let export =
        "return fetch(document.querySelector('a[href*=\"format=csv\"]').href).then((one) => one.text())";
    let csv = browser.script(export).await;
    let lines = csv.as_str().expect("a file").trim().lines().count();
    assert_eq!(lines, 2, "a heading and what is listed: {csv}");
    browser.click("main tbody [data-copy]").await;
    let copied =
        "return [...document.querySelectorAll('[data-copy]')].some((one) => one.innerText === 'Copied')
        || getSelection().toString() === 'evt_1'";
    until("the id is copied, or selected", || async {
        (browser.script(copied).await == json!(true)).then_some(())
    })
    .await;
    browser.close().await;
}

#[tokio::test]
async fn a_failed_delivery_leads_to_its_neighbours_and_to_the_rest_of_what_was_cut() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Body(401, "x".repeat(5_000)));
    let api = program.api();
    let once = json!({ "retry_schedule": ["0s"] });
    api.acme(&receiver.url("/hook"), once).await;
    for id in ["evt_1", "evt_2"] {
        let event = json!({ "id": id, "type": "invoice.paid", "data": { "long": "y".repeat(40_000) } });
        api.emit("acme", event).await;
    }
    let dead = api.wait_for_state("acme", "dead", 2).await;
    let newest = dead
        .iter()
        .find(|one| one["event"] == "evt_2")
        .expect("it is dead");
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    let page = format!("/deliveries/{}", newest["id"].as_str().expect("an id"));
    browser.open(&program.url(&page)).await;
    for part in [
        "Check that it verifies signatures",
        "1 other delivery of this endpoint failed the same way since",
        "Only its first 4 KiB are stored.",
        "Only the first 16 KiB are shown.",
    ] {
        browser.read(part).await;
    }
    let whole = "return fetch(document.querySelector('a[href$=\"/body\"]').href).then((one) => one.text())";
    let whole = browser.script(whole).await;
    assert!(whole.as_str().is_some_and(|text| text.len() > 40_000));
    browser.press("← Previous").await;
    browser.read("evt_1").await;
    browser.press("Next →").await;
    browser.read("evt_2").await;
    browser.press("Debug signature").await;
    browser.see("#signed").await;
    browser.close().await;
}

#[tokio::test]
async fn a_failing_endpoint_says_when_it_will_be_disabled_and_a_replay_is_resumed_at_another_rate() {
    const COUNT: usize = 40;
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let settings = json!({ "types": ["invoice.*"], "retry_schedule": ["0s"], "rate_per_second": 70 });
    let endpoint = api.acme(&receiver.url("/hook"), settings).await;
    receiver.answer(Answer::Status(401));
    for _ in 0..COUNT {
        api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
            .await;
    }
    api.wait_for_state("acme", "dead", COUNT).await;
    receiver.answer(Answer::Status(204));
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser
        .open(&program.url(&format!("/endpoints/{}", endpoint.id)))
        .await;
    for part in [
        "every request gets 401 Unauthorized",
        "40 events not delivered.",
        "The endpoint will be disabled after",
        "70 requests per second",
        "invoice.*",
    ] {
        browser.read(part).await;
    }
    browser.press("Replay 40").await;
    browser.fill("input[name=rate_per_second]", "5").await;
    browser.press("Replay 40 deliveries").await;
    browser.read("Replay started.").await;
    browser.press("Cancel replay").await;
    browser.read("Replay cancelled.").await;
    browser.read("Not sent").await;
    browser.press("Resume replay").await;
    browser.read("Replay resumed.").await;
    browser.fill("input[name=rate_per_second]", "1000").await;
    browser.press("Change rate").await;
    browser.read("Rate changed.").await;
    browser.see(".state.done").await;
    until("all are delivered", || async {
        (figure(&browser, "Delivered").await == COUNT.to_string()).then_some(())
    })
    .await;
    browser.press("View its deliveries").await;
    browser.see(".state.delivered").await;
    browser.close().await;
}

#[tokio::test]
async fn the_form_of_an_endpoint_asks_about_unknown_types_and_has_schedule_certificates_and_alert() {
    let database = Database::fresh().await;
    let program = Postrider::start_with(&database, &[("POSTRIDER_RETRY_SCHEDULE", "0s,2s,90m")]).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    let page = program.url(&format!("/endpoints/{}/settings", endpoint.id));
    browser.open(&page).await;
    browser.see("#retry_schedule[placeholder='0s, 2s, 90m']").await;
    browser.click("[data-pattern='*']").await;
    browser.fill("textarea[name=types]", "typo.event").await;
    browser.fill("#tls_ca", "no PEM").await;
    browser.press("Save changes").await;
    browser.see("#tls_ca[aria-invalid]").await;
    browser.read("No event type matches `typo.event`.").await;
    let kept = browser
        .script("return document.querySelector('#tls_ca').value")
        .await;
    assert_eq!(kept, json!("no PEM"), "the input is kept");
    let focused = "return document.activeElement.matches('[aria-invalid], [aria-invalid] *')";
    assert_eq!(browser.script(focused).await, json!(true));
    let ca = rcgen::generate_simple_self_signed(vec!["example.com".to_owned()]).expect("a certificate");
    let ca = serde_json::to_string(&ca.cert.pem()).expect("a text");
    browser
        .script(&format!("document.querySelector('#tls_ca').value = {ca}"))
        .await;
    browser.click("input[name=allow_unmatched]").await;
    browser.press("Save changes").await;
    browser.read("Saved.").await;
    let stored = api.get(&format!("/tenants/acme/endpoints/{}", endpoint.id)).await;
    assert_eq!(stored["types"], json!(["typo.event"]));
    let fingerprint = stored["tls"]["ca_certificates"][0]
        .as_str()
        .expect("a fingerprint");
    browser.read(fingerprint).await;
    browser.fill("#dead_letters", "25").await;
    browser.press("Save alert").await;
    browser.read("nobody receives this alert").await;
    browser.close().await;
}

#[tokio::test]
async fn keys_and_the_audit_log_are_read_by_an_admin_and_others_see_text_instead_of_forms() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api
        .acme(&receiver.url("/hook"), json!({ "timeout_ms": 4321 }))
        .await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.open(&program.url("/api-keys")).await;
    browser.press("New key").await;
    browser.fill("dialog input[name=name]", "short-lived").await;
    browser
        .click("dialog select[name=expires_in_days] option[value='30']")
        .await;
    browser.press("Create key").await;
    let key = browser.see("#new-key").await.text().await.expect("a key");
    browser.open(&program.url("/api-keys")).await;
    let shown = browser.words().await;
    assert!(
        shown.contains(&format!("{}…", &key[..8])) && !shown.contains(&key),
        "{shown}"
    );
    let cells = "return [...document.querySelectorAll('main tbody td')].map((cell) => [cell.dataset.label, cell.innerText])";
    let cells = browser.script(cells).await;
    let cell = |label: &str| {
        let found = cells
            .as_array()
            .expect("cells")
            .iter()
            .find(|cell| cell[0] == label);
        found.map(|cell| cell[1].clone()).unwrap_or(Value::Null)
    };
    assert_eq!(cell("Last used"), json!("never"));
    assert_ne!(cell("Expires"), json!("never"));

    let page = format!("/endpoints/{}/settings", endpoint.id);
    browser.open(&program.url(&page)).await;
    browser.fill("#timeout_ms", "5000").await;
    browser.press("Save changes").await;
    browser.read("Saved.").await;
    browser.open(&program.url("/audit")).await;
    browser
        .click("select[name=action] option[value='endpoint.changed']")
        .await;
    browser.press("Apply").await;
    browser.read("4321 → 5000").await;
    browser.read("from 127.0.0.1").await;
    assert_eq!(browser.script(ROWS).await, json!(1), "only what was asked for");

    let mut admin = Person::signed_in(&program).await;
    let (_, made) = admin
        .post_and_follow("/people", &[("login", "op"), ("role", "operator")])
        .await;
    let password = text_of(&made, "new-password");
    browser.client.delete_all_cookies().await.expect("signed out");
    // The address is opened after signing in.
    browser.open(&program.url(&page)).await;
    browser.fill("input[name=login]", "op").await;
    browser.fill("input[name=password]", &password).await;
    browser.click("main button").await;
    browser.read("An admin can change them").await;
    browser.read("5000").await;
    let fields = "return document.querySelectorAll('main textarea, main input[name=url]').length";
    assert_eq!(browser.script(fields).await, json!(0));
    browser.close().await;
}

#[tokio::test]
async fn a_used_portal_link_opens_the_portal_again_in_the_same_browser_only() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    let (_, link) = api.call(Method::POST, "/tenants/acme/portal-links", None).await;
    let link = link["url"].as_str().expect("a url");
    let browser = Browser::start().await;
    for _ in 0..2 {
        browser.open(link).await;
        browser.see("nav.menu").await;
        let address = browser.address().await;
        assert!(!address.contains("token"), "{address}");
        browser.open(&program.url("/events")).await;
        browser.read("No events").await;
    }
    browser
        .client
        .delete_all_cookies()
        .await
        .expect("another browser");
    browser.open(link).await;
    browser.read("This link has expired or was already used").await;
    browser.close().await;
}
