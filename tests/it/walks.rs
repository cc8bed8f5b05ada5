//! Three people at work, in a real browser: a developer who sets an installation up, a customer in the portal, an admin who
//! rotates a secret. And every dialog on the way, as axe-core sees it.

use std::process::Command;

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::{Answer, Browser, Crawl, Database, Postrider, Received, Receiver, World, until};

fn decide_by(secret: &str) -> impl Fn(&Received) -> Answer + Send + 'static {
    let secret = secret.to_owned();
    move |request| {
        let is_signed = request.headers.contains_key("webhook-signature");
        let is_right = is_signed && request.verify(&secret).is_ok();
        Answer::Status(if is_right { 204 } else { 401 })
    }
}

async fn text(browser: &Browser, css: &str) -> String {
    let element = browser.see(css).await;
    element.text().await.expect("text").trim().to_owned()
}

/// Pastes the command of the page into a shell.
async fn run_in_shell(command: String, key: String) -> String {
    let run = move || {
        let mut shell = Command::new("sh");
        shell.args(["-c", &command]).env("POSTRIDER_API_KEY", key);
        shell.env("no_proxy", "127.0.0.1").output().expect("sh")
    };
    let output = tokio::task::spawn_blocking(run).await.expect("ran");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[tokio::test]
async fn a_developer_goes_from_an_empty_installation_to_a_verified_event_by_the_checklist() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.read("0 of 5 done").await;

    browser.press("Create tenant").await;
    browser.press("New tenant").await;
    browser.fill("#tenant-id", "acme").await;
    browser.press("Create tenant").await;
    browser.read("Tenant created.").await;

    browser.press("Overview").await;
    browser.read("1 of 5 done").await;
    browser.press("New event type").await;
    browser.fill("#name", "invoice.paid").await;
    browser.fill("#description", "An invoice was paid in full").await;
    let schema = r#"{"type":"object","required":["amount"],"properties":{"amount":{"type":"integer"}}}"#;
    browser.fill("#schema", schema).await;
    browser.press("Review").await;
    browser
        .read("The first version: there is nothing to break.")
        .await;
    browser.press("Publish version").await;
    browser.read("Version published.").await;

    browser.press("Overview").await;
    browser.read("2 of 5 done").await;
    browser.press("Add endpoint").await;
    let tenant = "return document.querySelector('#tenant').value";
    assert_eq!(browser.script(tenant).await, json!("acme"), "filled in");
    browser.fill("#url", &receiver.url("/hook")).await;
    browser.press("Add endpoint").await;
    browser.press("Reveal secret").await;
    let secret = text(&browser, "#secret-1").await;
    receiver.decide(decide_by(&secret));

    browser.press("API keys").await;
    browser.press("New key").await;
    browser.fill("#key-name", "shop").await;
    browser.press("Create key").await;
    let key = text(&browser, "#new-key").await;
    browser.press("Overview").await;
    browser.read("3 of 5 done").await;
    let command = text(&browser, "#first-event").await;
    // Lost if the page is loaded again.
    browser.script("window.here = true").await;
    let told = run_in_shell(command, key).await;
    let sent = receiver.wait_for(1).await;
    assert_eq!(sent[0].field("type"), "invoice.paid", "{told}");
    browser.read("4 of 5 done").await;
    assert_eq!(
        browser.script("return window.here").await,
        json!(true),
        "the list ticks itself"
    );

    browser.press("Run probe").await;
    browser.press("Run probe…").await;
    browser.press("Run probe").await;
    browser.read("The receiver passed").await;
    browser.press("Overview").await;
    browser.read("Deliveries per second").await;
    let words = browser.words().await;
    assert!(
        !words.contains("Get started"),
        "everything is done, so the list is gone: {words}"
    );
    browser.close().await;
}

#[tokio::test]
async fn a_customer_adds_an_endpoint_in_the_portal_finds_why_it_fails_and_replays() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    for name in ["invoice.paid", "invoice.sent", "order.created"] {
        api.event_type(name).await;
    }
    api.tenant("acme").await;
    api.tenant("globex").await;
    api.endpoint("globex", &receiver.url("/globex"), json!({})).await;
    let (_, link) = api.call(Method::POST, "/tenants/acme/portal-links", None).await;
    let browser = Browser::start().await;
    browser.open(link["url"].as_str().expect("a url")).await;
    let words = browser.words().await;
    assert!(!words.contains("Get started"), "the team sets up: {words}");

    browser.press("Endpoints").await;
    browser.press("Add endpoint").await;
    browser.fill("#url", &receiver.url("/acme")).await;
    browser.click("[data-pattern='*']").await;
    browser.click("[data-pattern='invoice.*']").await;
    browser.fill("#retry_schedule", "0s").await;
    browser.press("Add endpoint").await;
    browser.press("Reveal secret").await;
    let secret = text(&browser, "#secret-1").await;

    receiver.answer(Answer::Body(500, "the ledger is locked".to_owned()));
    api.emit("acme", json!({ "type": "order.created", "data": {} }))
        .await;
    api.emit(
        "acme",
        json!({ "id": "evt_lost", "type": "invoice.paid", "data": {} }),
    )
    .await;
    let dead = api.wait_for_state("acme", "dead", 1).await;
    assert_eq!(dead[0]["event"], "evt_lost", "of the chosen types only: {dead:?}");
    browser.press("Dead letters").await;
    browser.read("All attempts failed").await;
    let delivery = format!("/deliveries/{}", dead[0]["id"].as_str().expect("an id"));
    browser.open(&program.url(&delivery)).await;
    browser.read("the ledger is locked").await;

    receiver.decide(decide_by(&secret));
    browser.click("form[action$='/replay'] button").await;
    browser.see(".state.delivered").await;
    let words = browser.words().await;
    for foreign in ["globex", "Tenants", "Audit log"] {
        assert!(!words.contains(foreign), "{foreign}: {words}");
    }
    browser.close().await;
}

#[tokio::test]
async fn an_admin_rotates_a_secret_while_the_receiver_moves_over_and_finds_it_in_the_audit_log() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    receiver.decide(decide_by(&endpoint.secret));
    let event = || json!({ "type": "invoice.paid", "data": {} });
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.press("Endpoints").await;
    browser.click("main td a").await;
    browser.press("Secrets").await;
    browser.press("Rotate secret…").await;
    for (scheme, rules) in [("light", "all"), ("dark", "color-contrast")] {
        browser.scheme(scheme).await;
        assert_eq!(browser.violations(rules).await, Vec::<String>::new(), "{scheme}");
    }
    browser.press("Rotate secret").await;
    browser.see(".state.retiring").await;
    browser.press("Reveal secret").await;
    let new = text(&browser, "#secret-1").await;
    assert_ne!(new, endpoint.secret);

    // The receiver still has the old one, then it has the new one: nothing fails.
    api.emit("acme", event()).await;
    api.wait_for_state("acme", "delivered", 1).await;
    receiver.decide(decide_by(&new));
    api.emit("acme", event()).await;
    api.wait_for_state("acme", "delivered", 2).await;

    browser.press("Audit log").await;
    browser.read("secret.rotated").await;
    browser.read("secret.revealed").await;
    browser.read("person:admin").await;
    let words = browser.words().await;
    assert!(
        !words.contains(&new) && !words.contains(&endpoint.secret),
        "no secret in it: {words}"
    );
    browser.close().await;
}

#[tokio::test]
async fn axe_finds_nothing_with_any_dialog_open_in_light_and_dark() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let world = World::make(&program).await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    let (mut found, mut opened) = (Vec::new(), Vec::new());
    let mut crawl = Crawl::from(&world.pages());
    while let Some(page) = crawl.next() {
        browser.open(&program.url(&page)).await;
        crawl.learn(browser.links().await);
        // A live page has dialogs for states that it does not show yet.
        let dialogs =
            "const opener = (id) => document.querySelector(`[popovertarget='${id}']:not(dialog *)`);
            return [...document.querySelectorAll('dialog[popover]')].map((one) => one.id).filter(opener)";
        let dialogs: Vec<String> = match browser.script(dialogs).await {
            Value::Array(ids) => ids
                .iter()
                .filter_map(|id| Some(id.as_str()?.to_owned()))
                .collect(),
            other => panic!("{other}"),
        };
        for id in dialogs {
            // The same dialog on another page of the endpoint, or of another delivery, is the same.
            if ["test", "probe", "recover", "discard"].contains(&id.as_str()) && opened.contains(&id) {
                continue;
            }
            browser
                .click(&format!("[popovertarget='{id}']:not(dialog *)"))
                .await;
            browser.see(&format!("dialog#{id}:modal")).await;
            for (scheme, rules) in [("light", "all"), ("dark", "color-contrast")] {
                browser.scheme(scheme).await;
                let violations = browser.violations(rules).await;
                found.extend(
                    violations
                        .iter()
                        .map(|one| format!("{page}#{id} ({scheme}): {one}")),
                );
            }
            browser
                .script(&format!("document.getElementById('{id}').close()"))
                .await;
            until("the dialog is closed", || async {
                let open = "return document.querySelector('dialog:modal') !== null";
                (browser.script(open).await == json!(false)).then_some(())
            })
            .await;
            opened.push(id);
        }
    }
    assert!(opened.len() >= 9, "{opened:?}");
    assert!(opened.contains(&"discard".to_owned()), "{opened:?}");
    assert!(found.is_empty(), "{}", found.join("\n\n"));
    browser.close().await;
}
