//! Not a test: makes the pictures of the pages that are in docs/screenshots/. `make screenshots` runs it.

use std::path::Path;

use reqwest::Method;

use crate::support::{Browser, Database, Postrider, World};

/// The pages that are also shown as a phone has them.
const ON_A_PHONE: [&str; 6] = [
    "overview",
    "deliveries",
    "delivery-dead",
    "dead-letters",
    "endpoint-one",
    "portal-verify",
];

#[tokio::test]
#[ignore = "writes into docs/screenshots: `make screenshots` runs it"]
async fn every_page_has_its_picture() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/screenshots");
    std::fs::create_dir_all(&folder).expect("a folder");
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let world = World::busy(&program, &database).await;
    let browser = Browser::start().await;
    browser.open(&program.url("/sign-in")).await;
    take(&browser, &folder, "sign-in").await;
    browser.sign_in(&program).await;
    for (name, page) in world.named_pages() {
        browser.open(&program.url(&page)).await;
        take(&browser, &folder, &name).await;
    }
    browser.open(&program.url(&world.delivery_page())).await;
    browser.press("View event").await;
    take(&browser, &folder, "event").await;
    let replays = program.api().get("/tenants/globex/replays").await;
    let replay = replays["data"][0]["id"].as_str().expect("a replay");
    browser.open(&program.url(&format!("/replays/{replay}"))).await;
    take(&browser, &folder, "replay").await;
    browser.open(&program.url("/dead-letters")).await;
    browser.click("input[name=group]").await;
    browser.press("Preview replay").await;
    take(&browser, &folder, "replay-preview").await;
    let (_, link) = program
        .api()
        .call(Method::POST, "/tenants/acme/portal-links", None)
        .await;
    browser.open(link["url"].as_str().expect("a url")).await;
    for (name, page) in [
        ("portal-overview", "/"),
        ("portal-verify", "/verify"),
        ("portal-endpoints", "/endpoints"),
        ("portal-event-types", "/event-types"),
        ("portal-dead-letters", "/dead-letters"),
    ] {
        browser.open(&program.url(page)).await;
        take(&browser, &folder, name).await;
    }
    browser.close().await;
}

/// Light and dark on a desk, and some on a phone.
async fn take(browser: &Browser, folder: &Path, name: &str) {
    for scheme in ["dark", "light"] {
        browser.scheme(scheme).await;
        browser
            .picture(&folder.join(format!("{name}-{scheme}.png")))
            .await;
    }
    if ON_A_PHONE.contains(&name) {
        browser.resize(390, 844).await;
        // Loaded again: the menu scrolls to the page when it is loaded.
        let address = browser.address().await;
        browser.open(&address).await;
        browser.picture(&folder.join(format!("{name}-phone.png"))).await;
        browser.resize(1280, 900).await;
    }
}
