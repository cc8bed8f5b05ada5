//! Forms in a browser: errors where they happened, nothing done twice by a reload, nothing changed without a question.

use fantoccini::{Locator, key::Key};
use reqwest::{Method, StatusCode};
use serde_json::json;

use crate::support::{Browser, Database, Person, Postrider, Receiver, text_of, until};

/// What a rejected form tells of its first error: the field with the focus, its value, whether it is marked, its message.
const FIRST_ERROR: &str = "
    const field = document.activeElement;
    const message = document.getElementById(field.getAttribute('aria-describedby') || '');
    return [field.name, field.value, field.getAttribute('aria-invalid'), message && message.textContent,
        document.querySelector('nav.menu') !== null, document.querySelector('dialog:modal') !== null]";

#[tokio::test]
async fn rejected_forms_keep_their_input_and_put_the_focus_on_the_first_error() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let endpoint = program.api().acme(&receiver.url("/hook"), json!({})).await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;

    browser.open(&program.url("/tenants")).await;
    browser.press("New tenant").await;
    browser.fill("#tenant-id", "acme").await;
    browser.fill("#tenant-name", "Another Acme").await;
    browser.press("Create tenant").await;
    browser.see("[aria-invalid]").await;
    let told = json!([
        "id",
        "acme",
        "true",
        "A tenant with the ID \"acme\" already exists.",
        true,
        true
    ]);
    assert_eq!(browser.script(FIRST_ERROR).await, told);
    let name = "return document.querySelector('#tenant-name').value";
    assert_eq!(browser.script(name).await, json!("Another Acme"));
    for scheme in ["light", "dark"] {
        browser.scheme(scheme).await;
        assert_eq!(browser.violations("all").await, Vec::<String>::new(), "{scheme}");
    }

    browser.open(&program.url("/tenants/acme")).await;
    browser.fill("#days", "often").await;
    browser.press("Save changes").await;
    browser.see("[aria-invalid]").await;
    let told = json!([
        "rotate_every_days",
        "often",
        "true",
        "The interval must be a whole number of days, not \"often\".",
        true,
        false
    ]);
    assert_eq!(browser.script(FIRST_ERROR).await, told);

    browser.open(&program.url("/api-keys")).await;
    browser.press("New key").await;
    browser.fill("#key-name", "billing").await;
    browser.fill("#key-tenant", "acme").await;
    browser.press("Create key").await;
    browser.see("[aria-invalid]").await;
    let told = browser.script(FIRST_ERROR).await;
    assert_eq!(
        (&told[0], &told[1], &told[5]),
        (&json!("tenant"), &json!("acme"), &json!(true))
    );

    browser
        .open(&program.url(&format!("/endpoints/{}", endpoint.id)))
        .await;
    browser.press("Send test event…").await;
    browser.fill("#test-type", "no.such.type").await;
    browser.press("Send test event").await;
    browser.see("[aria-invalid]").await;
    let told = browser.script(FIRST_ERROR).await;
    assert_eq!(
        (&told[0], &told[1], &told[5]),
        (&json!("type"), &json!("no.such.type"), &json!(true))
    );
    assert_eq!(receiver.count(), 0, "nothing was sent");

    // All at once: a field that can't be read, one that is not allowed and a tenant that does not exist.
    browser.open(&program.url("/endpoints/new")).await;
    browser.fill("#tenant", "nobody").await;
    browser.fill("#url", "https://user:password@example.com/").await;
    browser.fill("#timeout_ms", "soon").await;
    browser.press("Add endpoint").await;
    browser.see("[aria-invalid]").await;
    let marked = "return [...document.querySelectorAll('[aria-invalid]')].map((field) => field.name)";
    assert_eq!(
        browser.script(marked).await,
        json!(["tenant", "url", "timeout_ms"])
    );
    assert_eq!(
        browser.script("return document.activeElement.name").await,
        json!("tenant")
    );

    browser
        .open(&program.url("/deliveries?status_code=abc&tenant=acme"))
        .await;
    let told = browser.script(FIRST_ERROR).await;
    assert_eq!(told[1], json!("abc"), "{told}");
    browser.open(&program.url("/signatures")).await;
    browser.fill("#endpoint", "ep_wrong").await;
    browser.fill("#signature", "t=1,v1=00").await;
    browser.fill("#body", "a pasted body").await;
    browser.press("Check signature").await;
    browser.see("[aria-invalid]").await;
    let body = "return document.querySelector('#body').value";
    assert_eq!(
        browser.script(body).await,
        json!("a pasted body"),
        "it is not lost"
    );
    browser.close().await;
}

#[tokio::test]
async fn filters_and_the_form_that_recovers_an_endpoint_show_their_errors_in_place() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/plain"), json!({})).await;
    // A URL that is pasted whole is found, however long it is.
    let long = receiver.url(&format!("/long?token={}", "x".repeat(600)));
    api.endpoint("acme", &long, json!({})).await;
    let mut person = Person::signed_in(&program).await;
    let pasted: String = url::form_urlencoded::byte_serialize(long.as_bytes()).collect();
    for path in [format!("/endpoints?text={pasted}"), format!("/search?q={pasted}")] {
        let (status, page) = person.visit(&path).await;
        assert_eq!(status, StatusCode::OK, "{page}");
        assert!(
            page.contains("/long?token=") && !page.contains("/plain"),
            "{page}"
        );
    }

    // A character that turns the text around.
    for (path, field) in [
        ("/endpoints?text=%E2%80%AEabc", "text"),
        ("/endpoints?state=green", "state"),
        ("/tenants?q=%E2%80%AEabc", "q"),
        (
            "/dead-letters/preview?endpoint=ep_nobody&kind=missing&since=2026-01-01T00:00",
            "endpoint",
        ),
    ] {
        let (status, page) = person.visit(path).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{path}: {page}");
        let invalid = format!("aria-invalid=\"true\" aria-describedby=\"{field}-error\" autofocus");
        for part in [
            &*invalid,
            &format!("id=\"{field}-error\""),
            "aria-label=\"Main menu\"",
        ] {
            assert!(page.contains(part), "no {part} on {path}: {page}");
        }
    }
    let path = "/dead-letters/preview?endpoint=ep_nobody&kind=missing&since=2026-01-01T00:00";
    let (_, page) = person.visit(path).await;
    for part in [
        "There is no endpoint &#34;ep_nobody&#34;.",
        "value=\"ep_nobody\"",
        "value=\"missing\" selected",
        "value=\"2026-01-01T00:00\"",
        " open>",
    ] {
        assert!(page.contains(part), "no {part}: {page}");
    }
}

#[tokio::test]
async fn a_filter_is_chosen_with_the_arrow_keys_and_applied_with_enter() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.open(&program.url("/deliveries")).await;
    browser
        .script("document.querySelector('select[name=state]').focus()")
        .await;
    let chosen = "return [document.activeElement.name, document.activeElement.value, location.search]";
    for state in ["pending", "delivered", "dead"] {
        browser.type_keys(&Key::Down.to_string()).await;
        assert_eq!(browser.script(chosen).await, json!(["state", state, ""]));
    }
    browser.type_keys(&Key::Enter.to_string()).await;
    browser.see("option[value=dead][selected]").await;
    assert!(browser.address().await.contains("state=dead"));
    browser.click("select[name=state] option[value=pending]").await;
    browser.see("option[value=pending][selected]").await;
    browser.close().await;
}

#[tokio::test]
async fn reloading_a_result_creates_nothing_and_shows_it_no_more() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.open(&program.url("/api-keys")).await;
    browser.press("New key").await;
    browser.fill("#key-name", "billing-service").await;
    browser.press("Create key").await;
    browser.see("#new-key").await;
    let key = browser
        .script("return document.querySelector('#new-key').textContent")
        .await;
    let key = key.as_str().expect("a key").to_owned();
    assert!(key.starts_with("prk_"), "{key}");
    for _ in 0..2 {
        browser.client.refresh().await.expect("a page");
        browser.read("billing-service").await;
        assert!(!browser.words().await.contains(&key), "shown once");
    }
    let made = "select count(*) from postrider.api_keys where name = 'billing-service'";
    assert_eq!(database.count(made).await, 1);
    let kept = database
        .count("select count(*) from postrider.form_results")
        .await;
    assert_eq!(kept, 0, "the key is not kept");

    // Another session does not get the result, and neither does another page.
    let mut admin = Person::signed_in(&program).await;
    let (_, page) = admin
        .post_and_follow("/people", &[("login", "ada"), ("role", "operator")])
        .await;
    assert!(!text_of(&page, "new-password").is_empty());
    admin.post("/people/ada/password", &[]).await;
    let id = database
        .text("select public_id from postrider.form_results")
        .await;
    let mut other = Person::signed_in(&program).await;
    let (_, page) = other.visit(&format!("/people?result={id}")).await;
    assert!(!page.contains("new-password"), "{page}");
    let (_, page) = admin.visit(&format!("/people?result={id}")).await;
    assert!(page.contains("new-password"), "{page}");
    browser.close().await;
}

#[tokio::test]
async fn every_error_in_a_browser_is_a_page_with_the_menu() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let endpoint = program.api().acme(&receiver.url("/hook"), json!({})).await;
    let browser = Browser::start().await;
    browser.open(&program.url("/nope")).await;
    browser.read("Not found").await;
    browser.sign_in(&program).await;
    let test = format!("/endpoints/{}/test", endpoint.id);
    for (path, words) in [
        ("/nope", "Not found"),
        ("/sign-out", "It belongs to a form"),
        (test.as_str(), "It belongs to a form"),
        ("/deliveries/dlv_nothing", "Not found"),
        ("/deliveries?cursor=forged", "Malformed request"),
        ("/signatures?attempt=x", "Malformed request"),
    ] {
        browser.open(&program.url(path)).await;
        browser.read(words).await;
        assert!(
            browser.client.find(Locator::Css("nav.menu")).await.is_ok(),
            "{path}: {}",
            browser.words().await
        );
    }
    assert_eq!(browser.violations("all").await, Vec::<String>::new());

    // Programs get the same problem as JSON.
    let (status, problem) = program.api().call(Method::GET, "/nope", None).await;
    assert_eq!((status, &problem["status"]), (StatusCode::NOT_FOUND, &json!(404)));
    browser.close().await;
}

#[tokio::test]
async fn a_role_changes_only_after_a_button_and_a_confirmation() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let mut admin = Person::signed_in(&program).await;
    admin
        .post("/people", &[("login", "rob"), ("role", "read-only")])
        .await;
    let role = async || {
        database
            .text("select role::text from postrider.people where login = 'rob'")
            .await
    };

    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    browser.open(&program.url("/people")).await;
    let choice = browser.see("select[name=role]").await;
    choice.send_keys(&Key::Up.to_string()).await.expect("a key");
    assert_eq!(
        choice.prop("value").await.expect("a value").as_deref(),
        Some("operator")
    );
    browser.press("Change role…").await;
    browser.see("#confirm:modal").await;
    browser
        .read("Change the role of rob from read-only to operator?")
        .await;
    assert_eq!(role().await, "read-only");

    // The focus stays in the dialog.
    for _ in 0..6 {
        let field = browser.client.active_element().await.expect("a focus");
        field.send_keys(&Key::Tab.to_string()).await.expect("a key");
        let inside = "return document.activeElement === document.body
            || document.querySelector('#confirm').contains(document.activeElement)";
        assert_eq!(browser.script(inside).await, json!(true));
    }
    assert_eq!(browser.violations("all").await, Vec::<String>::new());
    browser.click("#confirm button[value='']").await;
    assert_eq!(role().await, "read-only");
    browser.press("Change role…").await;
    browser.click("#confirm button[value=yes]").await;
    browser.read("Role updated.").await;
    assert_eq!(role().await, "operator");

    // Without a script the page asks.
    let (status, page) = admin.post("/people/rob/role", &[("role", "admin")]).await;
    assert_eq!(status, StatusCode::OK);
    assert!(page.contains("Change the role of rob?"), "{page}");
    assert_eq!(role().await, "operator");
    let confirmed = [("role", "admin"), ("confirmed", "yes")];
    assert!(
        admin
            .post("/people/rob/role", &confirmed)
            .await
            .0
            .is_redirection()
    );
    assert_eq!(role().await, "admin");
    browser.close().await;
}

#[tokio::test]
async fn who_may_not_save_sees_text_and_no_form() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let more = json!({ "types": ["invoice.*"], "timeout_ms": 4321 });
    let endpoint = program.api().acme(&receiver.url("/hook"), more).await;
    let mut admin = Person::signed_in(&program).await;
    let (_, page) = admin
        .post_and_follow("/people", &[("login", "op"), ("role", "operator")])
        .await;
    let password = text_of(&page, "new-password");
    let mut operator = Person::new(&program);
    assert!(operator.sign_in_as("op", &password).await.is_redirection());
    let path = format!("/endpoints/{}/settings", endpoint.id);
    let (_, page) = operator.visit(&path).await;
    assert!(
        page.contains("invoice.*") && page.contains("4321") && page.contains("An admin can change them"),
        "{page}"
    );
    assert!(
        !page.contains("<textarea") && !page.contains("name=\"url\""),
        "{page}"
    );
    assert!(admin.visit(&path).await.1.contains("<textarea"));
}

#[tokio::test]
async fn keys_show_their_start_their_last_use_and_their_end() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let mut admin = Person::signed_in(&program).await;
    let fields = [
        ("name", "short-lived"),
        ("role", "admin"),
        ("expires_in_days", "30"),
    ];
    let (_, page) = admin.post_and_follow("/api-keys", &fields).await;
    let key = text_of(&page, "new-key");
    let (_, page) = admin.visit("/api-keys").await;
    assert!(page.contains(&format!("{}…", &key[..8])), "{page}");
    assert!(!page.contains(&key[..12]), "no more than its start: {page}");
    let listed = async || {
        let keys = program.api().get("/api-keys").await;
        let keys = keys["data"].as_array().expect("a list").clone();
        keys.into_iter()
            .find(|one| one["name"] == "short-lived")
            .expect("listed")
    };
    let before = listed().await;
    assert_eq!(before["last_used_at"], json!(null));
    assert_eq!(before["prefix"], json!(key[..8]));
    assert!(before["expires_at"].is_string(), "{before}");

    let theirs = program.api_with_key(&key);
    theirs.get("/tenants").await;
    until("its use is noted", || async {
        listed().await["last_used_at"].is_string().then_some(())
    })
    .await;
    database
        .execute("update postrider.api_keys set expires_at = clock_timestamp() where name = 'short-lived'")
        .await;
    let (status, _) = theirs.call(Method::GET, "/tenants", None).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED, "it is over");
    assert!(admin.visit("/api-keys").await.1.contains("expired"));
    for bad in ["2020-01-01T00:00:00Z", "2999-01-01T00:00:00Z"] {
        let new = json!({ "role": "producer", "name": "x", "expires_at": bad });
        let (status, problem) = program.api().call(Method::POST, "/api-keys", Some(new)).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
        assert_eq!(problem["errors"][0]["pointer"], "/expires_at");
    }
}

#[tokio::test]
async fn the_audit_log_shows_before_and_after_who_from_where_and_only_what_is_asked_for() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    let change = json!({ "rate_per_second": 7, "headers": { "X-Token": "a-secret-token" } });
    api.call(Method::PATCH, &path, Some(change)).await;
    let entry = api.get("/audit?action=endpoint.changed").await["data"][0].clone();
    let expected = json!({
        "rate_per_second": { "before": null, "after": 7 },
        "headers": { "before": [], "after": ["X-Token"] },
    });
    assert_eq!(entry["changes"], expected, "{entry}");
    assert_eq!(entry["address"], "127.0.0.1", "{entry}");

    let mut admin = Person::signed_in(&program).await;
    let (_, page) = admin.visit("/audit?action=endpoint.changed").await;
    assert!(
        page.contains("rate per second <code>default</code> → <code>7</code>")
            && page.contains("from 127.0.0.1"),
        "{page}"
    );
    assert!(
        !page.contains("<code>tenant.put</code>") && !page.contains("a-secret-token"),
        "{page}"
    );
    for (query, finds) in [
        ("since=2020-01-01T00:00&until=2020-01-02T00:00", false),
        ("since=2020-01-01T00:00", true),
        ("tenant=acme&actor=key:admin", true),
        ("tenant=nobody", false),
    ] {
        let (_, page) = admin.visit(&format!("/audit?{query}")).await;
        assert_eq!(
            page.contains("<code>endpoint.changed</code>"),
            finds,
            "{query}: {page}"
        );
    }
    let (status, page) = admin.visit("/audit?since=yesterday&action=a.b").await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(
        page.contains("since-error") && page.contains("action-error"),
        "{page}"
    );
    for bad in ["action=nothing.done", "since=yesterday", "nothing=1"] {
        let (status, problem) = api.call(Method::GET, &format!("/audit?{bad}"), None).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{bad}: {problem}");
    }

    let (status, csv) = admin
        .visit("/audit/export?format=csv&action=endpoint.changed")
        .await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(csv.lines().count(), 2, "{csv}");
    assert!(
        csv.starts_with("at,actor,address,action") && csv.contains("rate_per_second"),
        "{csv}"
    );
    let (_, lines) = admin.visit("/audit/export?format=ndjson&tenant=acme").await;
    for line in lines.lines() {
        let entry: serde_json::Value = serde_json::from_str(line).expect("JSON");
        assert_eq!(entry["tenant"], "acme");
    }
    assert_eq!(
        admin.visit("/audit/export?format=xml").await.0,
        StatusCode::BAD_REQUEST
    );
}
