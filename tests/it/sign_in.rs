//! Signing in and out in a browser: the way back, and what was and was not done.

use serde_json::json;

use crate::support::{ADMIN_PASSWORD, Browser, Database, Person, Postrider, Receiver, text_of};

async fn sign_in(browser: &Browser, login: &str, password: &str) {
    browser.fill("input[name=login]", login).await;
    browser.fill("input[name=password]", password).await;
    browser.click("main button").await;
}

#[tokio::test]
async fn a_shared_address_opens_after_signing_in_and_leads_nowhere_else() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let browser = Browser::start().await;
    let shared = program.url("/deliveries?state=dead&tenant=acme");
    browser.open(&shared).await;
    sign_in(&browser, "admin", "not the password").await;
    browser.read("Incorrect login or password.").await;
    let kept = "return [document.querySelector('[name=login]').value, document.activeElement.name]";
    assert_eq!(browser.script(kept).await, json!(["admin", "password"]));
    sign_in(&browser, "admin", ADMIN_PASSWORD).await;
    browser.see("nav.menu").await;
    assert_eq!(browser.address().await, shared);
    browser.close().await;

    for elsewhere in ["//evil.example/", "https://evil.example/", "/%5Cevil.example/"] {
        let mut person = Person::new(&program);
        let (_, page) = person.visit(&format!("/sign-in?next={elsewhere}")).await;
        assert!(!page.contains("evil.example"), "{elsewhere}: {page}");
    }
}

#[tokio::test]
async fn a_session_that_ended_says_what_was_not_done_and_leaving_says_what_was() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let endpoint = program.api().acme(&receiver.url("/hook"), json!({})).await;
    let mut admin = Person::signed_in(&program).await;
    let (_, page) = admin
        .post_and_follow("/people", &[("login", "ada"), ("role", "operator")])
        .await;
    let password = text_of(&page, "new-password");

    let browser = Browser::start().await;
    browser
        .open(&program.url(&format!("/endpoints/{}", endpoint.id)))
        .await;
    sign_in(&browser, "ada", &password).await;
    browser.see("form[action$='/pause']").await;
    database.execute("delete from postrider.sessions").await;
    browser.press("Pause").await;
    browser.read("your last action was not carried out").await;
    let state = database.text("select state::text from postrider.endpoints").await;
    assert_eq!(state, "active");
    assert_eq!(browser.violations("all").await, Vec::<String>::new());

    sign_in(&browser, "ada", &password).await;
    browser.see("nav.menu").await;
    browser.open(&program.url("/account")).await;
    browser.fill("#current", "not it").await;
    browser.fill("#new", "a good long password").await;
    browser.press("Change password").await;
    browser.read("Current password is incorrect.").await;
    assert_eq!(
        browser.script("return document.activeElement.id").await,
        json!("current")
    );
    browser.fill("#current", &password).await;
    browser.fill("#new", "a good long password").await;
    browser.press("Change password").await;
    browser.read("Your password was changed").await;

    sign_in(&browser, "ada", "a good long password").await;
    browser.see("nav.menu").await;
    browser.open(&program.url("/account")).await;
    browser.press("Sign out everywhere").await;
    browser.read("You are signed out everywhere").await;
    browser.close().await;
}
