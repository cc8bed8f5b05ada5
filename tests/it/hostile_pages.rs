//! Pages with whatever customers and receivers put into them: it is text there, and nothing else.

use reqwest::{StatusCode, redirect::Policy};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{
    access::{Things, all_routes},
    support::{Database, Person, Postrider},
};

const SCRIPT: &str = "<script>alert(1)</script>";
const IMAGE: &str = "<img src=x onerror=alert(2)>";
const BREAKOUT: &str = "\"'><svg onload=alert(3)>";

/// Answers 500 with a page of its own.
async fn hostile_receiver() -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        let body = format!("{SCRIPT}{IMAGE}{BREAKOUT}");
        let answer = format!(
            "HTTP/1.1 500 {SCRIPT}\r\nX-Own: {IMAGE}\r\nContent-Type: text/html\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).await;
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    format!("http://{address}/\"'>{SCRIPT}?a=\"'>{SCRIPT}")
}

async fn world() -> (Database, Postrider, Things) {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.call(
        reqwest::Method::PUT,
        "/tenants/acme",
        Some(json!({ "name": SCRIPT })),
    )
    .await;
    let schemas =
        json!({ "description": SCRIPT, "schemas": { "2026-01-15": { "type": "object", "title": IMAGE } } });
    api.call(reqwest::Method::PUT, "/event-types/invoice.paid", Some(schemas))
        .await;
    let more = json!({ "description": format!("{SCRIPT}{IMAGE}{BREAKOUT}"), "retry_schedule": ["0s"] });
    let made = api.endpoint("acme", &hostile_receiver().await, more).await;
    let data = json!({ "a": SCRIPT, (IMAGE): BREAKOUT });
    let event = json!({ "id": "evt_acme", "type": "invoice.paid", "data": data, "ordering_key": BREAKOUT });
    let (status, answer) = api.emit("acme", event).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{answer}");
    let dead = api.wait_for_state("acme", "dead", 1).await;
    let things = Things {
        tenant: "acme",
        endpoint: made.id,
        event: "evt_acme".to_owned(),
        delivery: dead[0]["id"].as_str().expect("an id").to_owned(),
        key: "key_0000000000000000".to_owned(),
        tenant_key: String::new(),
        replay: "rpl_0000000000000000".to_owned(),
    };
    (database, program, things)
}

#[tokio::test]
async fn d1_to_d4_and_d9_every_page_shows_hostile_text_as_text_and_may_not_be_framed() {
    let (_database, program, things) = world().await;
    let cookie = Person::signed_in(&program).await.cookie();
    let client = crate::support::http_client()
        .redirect(Policy::none())
        .build()
        .expect("a client");
    let mut pages = 0;
    let mut shown = 0;
    for route in all_routes()
        .iter()
        .filter(|route| route.method == "GET" && !route.path.starts_with("/v1/"))
    {
        let path = things.path(route, "acme");
        for query in [
            "",
            "?tenant=acme",
            "?tenant=%3Cscript%3Ealert(1)%3C/script%3E&state=%22%3E%3Csvg%20onload=alert(3)%3E",
        ] {
            let url = program.url(&format!("{path}{query}"));
            let answer = client
                .get(url)
                .header("cookie", &cookie)
                .send()
                .await
                .expect("an answer");
            let (status, headers) = (answer.status(), answer.headers().clone());
            assert!(!status.is_server_error(), "{path}{query}: {status}");
            let header = |name: &str| {
                headers
                    .get(name)
                    .and_then(|value| value.to_str().ok())
                    .unwrap_or_default()
            };
            let policy = header("content-security-policy");
            for rule in [
                "default-src 'none'",
                "frame-ancestors 'none'",
                "base-uri 'none'",
                "form-action 'self'",
            ] {
                assert!(policy.contains(rule), "{path}: {policy}");
            }
            assert!(!policy.contains("unsafe"), "{path}: {policy}");
            assert_eq!(header("x-content-type-options"), "nosniff", "{path}");
            assert_eq!(header("x-frame-options"), "DENY", "{path}");
            assert_eq!(header("referrer-policy"), "no-referrer", "{path}");
            if !header("content-type").starts_with("text/html") {
                continue;
            }
            let html = answer.text().await.expect("a page").to_lowercase();
            pages += 1;
            shown += usize::from(html.contains("alert(1)"));
            for raw in ["<script>alert", "<img src=x", "<svg onload", "onerror=alert(2)>"] {
                assert!(!html.contains(raw), "{path}{query} has {raw}: {html}");
            }
            // No address of a customer is a link, and no script stands in the page itself.
            assert!(
                !html.contains("href=\"http") && !html.contains("href=\"javascript"),
                "{path}: {html}"
            );
            assert!(!html.contains("<script>"), "{path}: {html}");
        }
    }
    assert!(
        pages >= 9 && shown >= 3,
        "{pages} pages, {shown} with hostile text in them"
    );
}

#[tokio::test]
async fn d7_names_that_would_change_what_a_line_says_are_refused() {
    let (_database, program, things) = world().await;
    let api = program.api();
    let endpoint = format!("/tenants/acme/endpoints/{}", things.endpoint);
    for bad in [
        "a\u{0}b",
        "\u{1b}[31mred",
        "safe\u{202e}gpj.exe",
        "a\u{2066}b",
        "a\u{7f}",
        "a\u{85}b",
    ] {
        for (method, path, body) in [
            (
                reqwest::Method::PATCH,
                endpoint.as_str(),
                json!({ "description": bad }),
            ),
            (reqwest::Method::PUT, "/tenants/acme", json!({ "name": bad })),
            (
                reqwest::Method::POST,
                "/api-keys",
                json!({ "role": "producer", "name": bad }),
            ),
        ] {
            let (status, problem) = api.call(method, path, Some(body)).await;
            assert_eq!(
                status,
                StatusCode::UNPROCESSABLE_ENTITY,
                "{path} {bad:?}: {problem}"
            );
        }
    }
    let fine = json!({ "description": "Zwei\nZeilen,\tein Tab, עברית und 🚚" });
    assert_eq!(
        api.call(reqwest::Method::PATCH, &endpoint, Some(fine)).await.0,
        StatusCode::OK
    );
    for line in program.log_lines() {
        assert!(!line.chars().any(|c| c.is_control()), "{line:?}");
    }
}

/// Every comma would be a line of its own, and each line indented by the depth.
#[tokio::test]
async fn nested_json_does_not_become_a_page_of_many_megabytes() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    let receiver = hostile_receiver().await;
    api.acme(&receiver, json!({ "retry_schedule": ["0s"] })).await;
    let (open, close) = ("[".repeat(120), "]".repeat(120));
    let data = format!("{{\"a\":{open}{}1{close}}}", "1,".repeat(127_000));
    let event = format!("{{\"id\":\"evt_deep\",\"type\":\"invoice.paid\",\"data\":{data}}}");
    let (status, answer) = api
        .send(reqwest::Method::POST, "/tenants/acme/events", Some(event))
        .await;
    assert_eq!(status, StatusCode::ACCEPTED, "{answer}");
    let dead = api.wait_for_state("acme", "dead", 1).await;
    let delivery = dead[0]["id"].as_str().expect("an id");
    let mut person = Person::signed_in(&program).await;
    for path in ["/events/evt_deep".to_owned(), format!("/deliveries/{delivery}")] {
        let (status, page) = person.visit(&path).await;
        assert_eq!(status, StatusCode::OK);
        assert!(page.len() < 100_000, "{path} has {} bytes", page.len());
        assert!(page.contains("Only the first"), "what was left out is told");
        assert!(page.contains("Download the whole body"), "{path}");
    }
    let (status, body) = person.visit("/events/evt_deep/body").await;
    assert_eq!(status, StatusCode::OK);
    assert!(body.contains(&"1,".repeat(127_000)), "the body, whole");
}
