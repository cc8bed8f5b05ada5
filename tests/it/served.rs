//! How pages and assets are served: compressed, kept by browsers, and readable on a phone.

use reqwest::{Client, Method, Response, StatusCode, header};
use serde_json::json;

use crate::support::{Answer, Browser, Crawl, Database, Person, Postrider, Receiver};

async fn get(client: &Client, url: &str, name: header::HeaderName, value: &str) -> Response {
    client
        .get(url)
        .header(name, value)
        .send()
        .await
        .expect("an answer")
}

fn header_of<'a>(response: &'a Response, name: &str) -> &'a str {
    let value = response.headers().get(name).and_then(|value| value.to_str().ok());
    value.unwrap_or_default()
}

#[tokio::test]
async fn text_is_compressed_and_live_updates_are_not() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let client = crate::support::http_client().build().expect("a client");
    let admin = Person::signed_in(&program).await;
    for encoding in ["br", "gzip"] {
        for path in ["/docs", "/openapi.json", "/assets/style.css", "/assets/app.js"] {
            let answer = get(&client, &program.url(path), header::ACCEPT_ENCODING, encoding).await;
            assert_eq!(header_of(&answer, "content-encoding"), encoding, "{path}");
            assert!(header_of(&answer, "vary").contains("accept-encoding"), "{path}");
        }
    }
    let plain = get(&client, &program.url("/docs"), header::ACCEPT, "*/*").await;
    assert_eq!(header_of(&plain, "content-encoding"), "");
    let stream = client
        .get(program.url("/live/overview"))
        .header(header::ACCEPT_ENCODING, "br, gzip")
        .header(header::COOKIE, admin.cookie())
        .send()
        .await
        .expect("a stream");
    assert_eq!(stream.status(), StatusCode::OK);
    assert_eq!(header_of(&stream, "content-encoding"), "");
}

/// Compressed pages must not reveal the token of their forms by their length.
#[tokio::test]
async fn the_token_of_forms_differs_on_each_page() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let mut admin = Person::signed_in(&program).await;
    let mut token = async || {
        let (_, page) = admin.visit("/account").await;
        let rest = page.split("name=\"csrf\" value=\"").nth(1).expect("a token");
        rest.split('"').next().expect("its end").to_owned()
    };
    assert_ne!(token().await, token().await);
}

#[tokio::test]
async fn assets_are_kept_for_good_under_an_address_with_their_version() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let client = crate::support::http_client().build().expect("a client");
    let (_, page) = Person::new(&program).visit("/sign-in").await;
    let mut found = 0;
    for part in page.split('"').filter(|part| part.starts_with("/assets/")) {
        let answer = client.get(program.url(part)).send().await.expect("an answer");
        assert_eq!(answer.status(), StatusCode::OK, "{part}");
        assert!(
            header_of(&answer, "cache-control").contains("immutable"),
            "{part}"
        );
        let tag = header_of(&answer, "etag").to_owned();
        let again = get(&client, &program.url(part), header::IF_NONE_MATCH, &tag).await;
        assert_eq!(again.status(), StatusCode::NOT_MODIFIED, "{part}");
        let bare = part.split('?').next().expect("a path");
        let answer = client.get(program.url(bare)).send().await.expect("an answer");
        assert!(
            !header_of(&answer, "cache-control").contains("immutable"),
            "{bare}"
        );
        found += 1;
    }
    assert!(found >= 3, "{page}");
    let icon = client
        .get(program.url("/favicon.ico"))
        .send()
        .await
        .expect("an answer");
    assert_eq!(
        (icon.status(), header_of(&icon, "content-type")),
        (StatusCode::OK, "image/svg+xml")
    );
}

#[tokio::test]
async fn a_long_url_is_short_in_its_heading_and_the_phone_menu_shows_the_page() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let url = receiver.url(&format!("/{}/end", "a".repeat(1_900)));
    let endpoint = program.api().acme(&url, json!({})).await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser
        .open(&program.url(&format!("/endpoints/{}", endpoint.id)))
        .await;
    let heading = "const h1 = document.querySelector('h1');
        return [h1.firstChild.textContent.trim().length <= 80, h1.title.length > 1900, h1.innerText.includes('/end')]";
    assert_eq!(browser.script(heading).await, json!([true, true, true]));

    browser.resize(390, 844).await;
    for path in ["/people", "/api-keys", "/audit", "/"] {
        browser.open(&program.url(path)).await;
        let shown = "const box = document.querySelector('.menu [aria-current]').getBoundingClientRect();
            return box.left >= 0 && box.right <= window.innerWidth && window.scrollY === 0";
        assert_eq!(browser.script(shown).await, json!(true), "{path}");
    }
    browser.close().await;
}

#[tokio::test]
async fn no_page_is_wider_than_its_window_however_long_the_names_on_it_are() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(500));
    let api = program.api();
    let name = format!("{}.paid", "long_name_".repeat(12));
    api.event_type(&name).await;
    let url = receiver.url(&format!("/{}", "a".repeat(1_900)));
    let more = json!({ "description": "D".repeat(1_000), "retry_schedule": ["0s"] });
    api.acme(&url, more).await;
    let event = json!({ "id": "e".repeat(128), "type": name, "ordering_key": "k".repeat(100),
        "data": { "long": "x".repeat(5_000) } });
    let (status, told) = api.emit("acme", event).await;
    assert!(status.is_success(), "{told}");
    api.wait_for_state("acme", "dead", 1).await;
    let key = json!({ "role": "producer", "name": "n".repeat(128) });
    api.call(Method::POST, "/api-keys", Some(key)).await;
    let slug = "t".repeat(64);
    let tenant = json!({ "name": "N".repeat(300) });
    api.call(Method::PUT, &format!("/tenants/{slug}"), Some(tenant))
        .await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    let (mut wide, mut pages) = (Vec::new(), 0);
    let mut crawl = Crawl::from(&["/".to_owned(), format!("/tenants/{slug}")]);
    while let Some(page) = crawl.next() {
        pages += 1;
        for width in [360, 1024] {
            browser.resize(width, 800).await;
            browser.open(&program.url(&page)).await;
            let excess = "return document.documentElement.scrollWidth - document.documentElement.clientWidth";
            let excess = browser.script(excess).await;
            if excess != json!(0) {
                wide.push(format!("{page} at {width}: {excess}"));
            }
        }
        let mut links = browser.links().await;
        // A file.
        links.retain(|link| !link.ends_with("/body"));
        crawl.learn(links);
    }
    assert!(pages > 20, "{pages}");
    assert!(wide.is_empty(), "{}", wide.join("\n"));
    browser.close().await;
}
