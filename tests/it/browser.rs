//! The pages in a real browser, as a person uses them.

use fantoccini::Locator;
use reqwest::Method;
use serde_json::json;

use crate::support::{Answer, Browser, Crawl, Database, Postrider, Receiver, World, until};

#[tokio::test]
async fn a_person_finds_a_dead_letter_reads_why_and_watches_its_replay_arrive() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(500));
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({ "retry_schedule": ["0s"] }))
        .await;
    api.emit(
        "acme",
        json!({ "id": "evt_lost", "type": "invoice.paid", "data": {} }),
    )
    .await;
    let dead = api.wait_for_state("acme", "dead", 1).await;

    let browser = Browser::start().await;
    browser.open(&program.url("/dead-letters")).await;
    assert!(
        browser.address().await.contains("/sign-in"),
        "nothing for a stranger"
    );
    browser.sign_in(&program).await;
    browser.press("Dead letters").await;
    browser.read("500 Internal Server Error").await;
    let id = dead[0]["id"].as_str().expect("an id");
    browser.open(&program.url(&format!("/deliveries/{id}"))).await;
    browser.read("500").await;

    receiver.answer(Answer::Status(204));
    browser.click("form[action$='/replay'] button").await;
    receiver.wait_for(2).await;
    api.wait_for_state("acme", "delivered", 1).await;
    browser.open(&program.url(&format!("/deliveries/{id}"))).await;
    browser.see(".state.delivered").await;
    browser.read("204").await;
    browser.close().await;
}

#[tokio::test]
async fn both_secrets_are_seen_to_sign_while_one_is_rotated() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    let rotate = format!("/tenants/acme/endpoints/{}/secret/rotate", endpoint.id);
    api.call(Method::POST, &rotate, Some(json!({ "overlap_seconds": 3600 })))
        .await;
    api.emit("acme", json!({ "type": "invoice.paid", "data": { "amount": 1 } }))
        .await;
    let delivered = api.wait_for_state("acme", "delivered", 1).await;
    let sent = receiver.wait_for(1).await;

    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.press("Signature debugger").await;
    browser
        .fill(
            "input[name=delivery]",
            delivered[0]["id"].as_str().expect("an id"),
        )
        .await;
    browser.press("Inspect").await;
    browser.see(".state.current").await;
    browser.see(".state.retiring").await;
    for signature in sent[0].header("webhook-signature").split(',').skip(1) {
        browser.read(signature.trim_start_matches("v1=")).await;
    }
    let shown = browser
        .script("return document.querySelector('#signed').textContent")
        .await;
    let signed = format!(
        "{}.{}",
        sent[0].signed_at(),
        String::from_utf8_lossy(&sent[0].body)
    );
    assert_eq!(shown, json!(signed), "the very bytes");
    browser.close().await;
}

#[tokio::test]
async fn a_customer_who_comes_by_a_link_sees_only_their_own() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let world = World::make(&program).await;
    let api = program.api();
    let (_, link) = api.call(Method::POST, "/tenants/acme/portal-links", None).await;

    let browser = Browser::start().await;
    browser.open(link["url"].as_str().expect("a url")).await;
    assert!(
        !browser.address().await.contains("token"),
        "gone from the address"
    );
    browser.see("nav.menu").await;
    let mut crawl = Crawl::from(&world.customer_pages());
    while let Some(page) = crawl.next() {
        browser.open(&program.url(&page)).await;
        let words = browser.words().await;
        assert!(!words.contains("globex"), "{page}: {words}");
        assert!(
            browser.client.find(Locator::Css("nav.menu")).await.is_ok(),
            "{page}: {words}"
        );
        crawl.learn(browser.links().await);
    }
    for page in world.foreign_pages() {
        browser.open(&program.url(&page)).await;
        // A form says so at its field.
        if page.starts_with("/signatures") {
            browser.see("[aria-invalid=true]").await;
            assert!(!browser.words().await.contains("globex"), "{page}");
        } else {
            browser.read("404").await;
        }
    }
    browser.press("Back to overview").await;
    browser.press("Sign out").await;
    browser.see("input[name=password]").await;
    assert!(browser.address().await.contains("/sign-in"));
    browser.close().await;
}

#[tokio::test]
async fn hostile_strings_run_no_script_and_make_no_link_on_any_page() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let world = World::hostile(&program).await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    let mut crawl = Crawl::from(&world.pages());
    while let Some(page) = crawl.next() {
        browser.open(&program.url(&page)).await;
        crawl.learn(browser.links().await);
        let found = browser
            .script(
                "return [window.hacked === undefined, document.querySelectorAll('img[src=x], svg[onload], iframe').length, \
                 [...document.links].filter((link) => link.protocol === 'javascript:').length, \
                 [...document.links].filter((link) => link.origin !== location.origin).length]",
            )
            .await;
        assert_eq!(found, json!([true, 0, 0, 0]), "{page}");
    }
    browser.close().await;
}

#[tokio::test]
async fn axe_finds_nothing_on_any_page_in_light_and_dark() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let world = World::make(&program).await;
    let browser = Browser::start().await;
    let mut found = Vec::new();
    let strangers = ["/sign-in", "/docs", "/portal?token=used"].map(str::to_owned);
    for start in [strangers.to_vec(), world.pages()] {
        if start.len() > strangers.len() {
            browser.sign_in(&program).await;
        }
        let mut crawl = Crawl::from(&start);
        while let Some(page) = crawl.next() {
            browser.open(&program.url(&page)).await;
            crawl.learn(browser.links().await);
            for (scheme, rules) in [("light", "all"), ("dark", "color-contrast")] {
                browser.scheme(scheme).await;
                for violation in browser.violations(rules).await {
                    found.push(format!("{page} ({scheme}): {violation}"));
                }
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n\n"));
    browser.close().await;
}

#[tokio::test]
async fn a_secret_is_rotated_by_hand_and_both_are_in_force() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser
        .open(&program.url(&format!("/endpoints/{}/secrets", endpoint.id)))
        .await;
    browser.press("Rotate secret…").await;
    browser.press("Rotate secret").await;
    browser.see(".state.retiring").await;
    browser.see(".state.current").await;
    browser.press("Reveal secret").await;
    browser.read(&endpoint.secret).await;

    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let sent = receiver.wait_for(1).await;
    assert!(
        sent[0].verify(&endpoint.secret).is_ok(),
        "the old one signs still"
    );
    let header = sent[0].header("webhook-signature");
    assert_eq!(header.matches("v1=").count(), 2, "{header}");
    browser.close().await;
}

#[tokio::test]
async fn a_leaked_secret_is_revoked_and_the_page_says_that_only_the_new_one_signs() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser
        .open(&program.url(&format!("/endpoints/{}/secrets", endpoint.id)))
        .await;
    browser.press("Rotate secret…").await;
    browser.click("#overlap option[value='0']").await;
    browser.press("Rotate secret").await;
    browser.read("Requests are signed with the new secret only").await;
    let words = browser.words().await;
    assert!(!words.contains("signed with both secrets until"), "{words}");
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let sent = receiver.wait_for(1).await;
    assert!(sent[0].verify(&endpoint.secret).is_err(), "the old one is void");
    browser.close().await;
}

#[tokio::test]
async fn many_dead_letters_are_replayed_at_once_and_the_bar_is_seen_to_fill() {
    const DEAD: usize = 12;
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(500));
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({ "retry_schedule": ["0s"] }))
        .await;
    for number in 0..DEAD {
        api.emit(
            "acme",
            json!({ "type": "invoice.paid", "data": { "number": number } }),
        )
        .await;
    }
    api.wait_for_state("acme", "dead", DEAD).await;

    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.press("Dead letters").await;
    browser.click("input[name=group]").await;
    browser.press("Preview replay").await;
    browser.read(&format!("{DEAD} deliveries will be replayed")).await;
    // Held until the page has been seen: the first ones are on the wire, the bar has not filled.
    receiver.answer(Answer::Hold);
    browser.press(&format!("Replay {DEAD} deliveries")).await;
    receiver.wait_in_flight(1).await;
    browser.see("progress").await;
    browser.read("running").await;
    // Lost when the page is loaded again.
    browser.script("window.here = true").await;
    browser.see("form[action$='/cancel']").await;
    receiver.release();
    browser.read("100%").await;
    until("what is over can't be cancelled", || async {
        let gone = "return document.querySelector(\"form[action$='/cancel']\") === null";
        (browser.script(gone).await == json!(true)).then_some(())
    })
    .await;
    assert_eq!(
        browser.script("return window.here").await,
        json!(true),
        "the bar fills by itself"
    );
    api.wait_for_state("acme", "delivered", DEAD).await;
    until("the page says that it is done", || async {
        browser.open(&program.url("/replays")).await;
        browser.words().await.contains("done").then_some(())
    })
    .await;
    browser.close().await;
}
