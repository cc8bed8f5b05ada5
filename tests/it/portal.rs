//! What a customer sees who came by a portal link: their own tenant, and nothing else.

use std::time::Duration;

use reqwest::{Method, Response, StatusCode};
use serde_json::json;
use tokio::time::timeout;

use crate::support::{Database, Form, Person, Postrider, Receiver, text_of, until};

async fn link(program: &Postrider, tenant: &str) -> String {
    let (status, made) = program
        .api()
        .call(Method::POST, &format!("/tenants/{tenant}/portal-links"), None)
        .await;
    assert_eq!(status, StatusCode::CREATED, "{made}");
    assert!(made["expires_at"].is_string(), "{made}");
    made["url"].as_str().expect("a url").to_owned()
}

fn path_of(url: &str) -> String {
    let url = url::Url::parse(url).expect("a url");
    format!("{}?{}", url.path(), url.query().expect("a token"))
}

#[tokio::test]
async fn a_portal_link_works_once_and_shows_only_the_own_tenant() {
    let database = Database::fresh().await;
    let program = Postrider::start_with(&database, &[("POSTRIDER_LOG", "debug")]).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/acme"), json!({})).await;
    api.tenant("globex").await;
    api.endpoint("globex", &receiver.url("/globex"), json!({})).await;
    for (tenant, id) in [("acme", "evt_acme"), ("globex", "evt_globex")] {
        api.emit(tenant, json!({ "id": id, "type": "invoice.paid", "data": {} }))
            .await;
    }
    let own = api.wait_for_state("acme", "delivered", 1).await;
    let foreign = api.wait_for_state("globex", "delivered", 1).await;
    let page_of =
        |delivery: &serde_json::Value| format!("/deliveries/{}", delivery["id"].as_str().expect("an id"));

    let path = path_of(&link(&program, "acme").await);
    let mut customer = Person::new(&program);
    let (status, _) = customer.look_ahead(&path).await;
    assert_eq!(status, StatusCode::NO_CONTENT, "looking ahead does not use it up");
    let entered = customer.visit_whole(&path).await;
    assert!(entered.status.is_redirection());
    assert!(!entered.location.contains("token"), "{}", entered.location);
    assert_eq!(entered.referrer_policy, "no-referrer");

    let (status, page) = customer.visit("/deliveries").await;
    assert_eq!(status, StatusCode::OK);
    assert!(
        page.contains("evt_acme") && !page.contains("evt_globex"),
        "{page}"
    );
    assert!(
        !customer
            .visit("/deliveries?tenant=globex")
            .await
            .1
            .contains("evt_globex"),
        "a filter does not widen what is seen"
    );
    assert_eq!(customer.visit(&page_of(&own[0])).await.0, StatusCode::OK);
    assert_eq!(
        customer.visit(&page_of(&foreign[0])).await.0,
        StatusCode::NOT_FOUND
    );
    let replay = format!("{}/replay", page_of(&foreign[0]));
    assert_eq!(customer.post(&replay, &[]).await.0, StatusCode::NOT_FOUND);
    for team in ["/people", "/account"] {
        assert_eq!(customer.visit(team).await.0, StatusCode::NOT_FOUND, "{team}");
    }

    let mut second = Person::new(&program);
    assert_eq!(second.visit(&path).await.0, StatusCode::GONE, "it works once");
    let again = customer.visit_whole(&path).await;
    assert!(
        again.status.is_redirection() && again.location == "/",
        "the browser that it let in is inside: {}",
        again.status
    );
    let mut other = Person::new(&program);
    let another = path_of(&link(&program, "acme").await);
    assert!(other.visit(&another).await.0.is_redirection());
    assert_eq!(
        other.visit(&path).await.0,
        StatusCode::GONE,
        "a session of another link is not enough"
    );
    let token = path.split('=').nth(1).expect("a token");
    for line in program.log_lines() {
        assert!(!line.contains(token), "the token is in the log: {line}");
    }

    api.call(Method::DELETE, "/tenants/acme", None).await;
    assert!(
        customer.visit("/deliveries").await.0.is_redirection(),
        "the session ends with the tenant"
    );
}

#[tokio::test]
async fn an_old_link_and_a_forged_one_open_nothing() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    program.api().tenant("acme").await;
    let path = path_of(&link(&program, "acme").await);
    database
        .execute("update postrider.portal_links set expires_at = clock_timestamp() - interval '1 s'")
        .await;
    let mut customer = Person::new(&program);
    assert_eq!(customer.visit(&path).await.0, StatusCode::GONE);
    let forged = format!("/portal?token={}", "A".repeat(43));
    assert_eq!(customer.visit(&forged).await.0, StatusCode::GONE);
    assert_eq!(customer.visit("/portal?token=x").await.0, StatusCode::GONE);
    assert!(customer.visit("/deliveries").await.0.is_redirection());
    let kept = database
        .count("select count(*) from postrider.portal_links where octet_length(token_hash) <> 32")
        .await;
    assert_eq!(kept, 0);
    let (status, _) = program
        .api()
        .call(Method::POST, "/tenants/nobody/portal-links", None)
        .await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    let (status, _) = program
        .api()
        .call(
            Method::POST,
            "/tenants/acme/portal-links",
            Some(json!({"forever": true})),
        )
        .await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
}

#[tokio::test]
async fn e3_links_and_sessions_that_were_withdrawn_open_nothing() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    program.api().tenant("acme").await;
    let (used, unused) = (
        path_of(&link(&program, "acme").await),
        path_of(&link(&program, "acme").await),
    );
    let mut inside = Person::new(&program);
    assert!(inside.visit(&used).await.0.is_redirection());
    assert_eq!(inside.visit("/deliveries").await.0, StatusCode::OK);

    let mut admin = Person::signed_in(&program).await;
    let (status, page) = admin.post("/tenants/acme/end-sessions", &[]).await;
    assert!(
        status.is_redirection() || status == StatusCode::OK,
        "{status} {page}"
    );
    assert!(inside.visit("/deliveries").await.0.is_redirection(), "signed out");
    let mut late = Person::new(&program);
    assert_eq!(late.visit(&unused).await.0, StatusCode::GONE);
    assert_eq!(admin.visit("/deliveries").await.0, StatusCode::OK, "others stay");
}

const LIVE: &str = "/live/overview";

/// Reads a stream until the server ends it.
async fn ended(mut stream: Response) {
    while let Ok(Some(_)) = stream.chunk().await {}
}

async fn ends_soon(stream: Response, what: &str) {
    let soon = timeout(Duration::from_secs(15), ended(stream)).await;
    assert!(soon.is_ok(), "{what}");
}

async fn entered<'p>(program: &'p Postrider, tenant: &str) -> Person<'p> {
    let mut customer = Person::new(program);
    let path = path_of(&link(program, tenant).await);
    assert!(customer.visit(&path).await.0.is_redirection());
    customer
}

#[tokio::test]
async fn a_live_part_ends_with_its_session() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    program.api().tenant("acme").await;
    program.api().tenant("globex").await;
    let mut admin = Person::signed_in(&program).await;
    let (_, page) = admin
        .post_and_follow("/people", &[("login", "ada"), ("role", "read-only")])
        .await;
    let mut ada = Person::new(&program);
    let password = text_of(&page, "new-password");
    assert!(ada.sign_in_as("ada", &password).await.is_redirection());
    let mut leaving = Person::signed_in(&program).await;
    let mut withdrawn = entered(&program, "acme").await;
    let mut deleted = entered(&program, "globex").await;
    let mut stays = entered(&program, "acme").await;

    let (mut open, mut streams) = (Vec::new(), [&mut ada, &mut leaving, &mut withdrawn, &mut deleted]);
    for person in &mut streams {
        let stream = person.open(LIVE).await;
        assert_eq!(stream.status(), StatusCode::OK);
        open.push(stream);
    }
    let (_, page) = leaving.visit("/account").await;
    assert!(
        leaving
            .submit(&Form::find(&page, "/sign-out"))
            .await
            .0
            .is_redirection()
    );
    let (status, _) = admin.post("/people/ada/remove", &[]).await;
    assert!(status.is_redirection());
    admin.post("/tenants/acme/end-sessions", &[]).await;
    program.api().call(Method::DELETE, "/tenants/globex", None).await;
    for (stream, what) in open
        .into_iter()
        .zip(["removed", "signed out", "withdrawn", "deleted"])
    {
        ends_soon(stream, what).await;
    }
    assert!(stays.visit("/deliveries").await.0.is_redirection());
    let stream = admin.open(LIVE).await;
    let goes_on = timeout(Duration::from_secs(12), ended(stream)).await;
    assert!(goes_on.is_err(), "a session that is open keeps its stream");
}

#[tokio::test]
async fn one_customer_does_not_take_every_live_stream() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    program.api().tenant("acme").await;
    program.api().tenant("globex").await;
    let mut held = Vec::new();
    let mut in_one_session = 0;
    for session in 0..12 {
        let mut customer = entered(&program, "acme").await;
        for _ in 0..50 {
            let stream = customer.open(LIVE).await;
            if stream.status() == StatusCode::OK {
                held.push(stream);
                in_one_session += usize::from(session == 0);
            }
        }
    }
    assert!((4..50).contains(&in_one_session), "{in_one_session}");
    assert!((4..257).contains(&held.len()), "{}", held.len());
    for mut other in [
        entered(&program, "globex").await,
        Person::signed_in(&program).await,
    ] {
        for _ in 0..4 {
            let stream = other.open(LIVE).await;
            assert_eq!(stream.status(), StatusCode::OK, "others have theirs");
            held.push(stream);
        }
    }
    // A stream that is let go of makes room for another.
    held.clear();
    let cookie = entered(&program, "acme").await.cookie();
    until("a stream is free again", || async {
        let stream = Person::with_cookie(&program, &cookie).open(LIVE).await;
        (stream.status() == StatusCode::OK).then_some(())
    })
    .await;
}
