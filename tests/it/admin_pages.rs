//! The pages for tenants, keys, the audit log and the system, as an admin uses them without a browser.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{Database, Form, Person, Postrider, Receiver, text_of};

#[tokio::test]
async fn an_admin_makes_a_tenant_and_a_key_that_is_shown_once_and_revokes_it() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let mut admin = Person::signed_in(&program).await;
    let (status, page) = admin
        .post("/tenants", &[("id", "acme"), ("name", "Acme & Sons")])
        .await;
    assert!(status.is_redirection(), "{page}");
    let (_, page) = admin.visit("/tenants?q=SONS").await;
    assert!(page.contains("Acme &#38; Sons"), "{page}");
    let (status, _) = admin
        .post("/tenants", &[("id", "acme"), ("name", "another")])
        .await;
    assert_eq!(
        status,
        StatusCode::CONFLICT,
        "a new one does not change an old one"
    );
    let (status, _) = admin.post("/tenants", &[("id", "no spaces"), ("name", "")]).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);

    let fields = [("role", "tenant"), ("tenant", "acme"), ("name", "their program")];
    let (status, page) = admin.post_and_follow("/api-keys", &fields).await;
    assert_eq!(status, StatusCode::OK, "{page}");
    let key = text_of(&page, "new-key");
    let theirs = program.api_with_key(&key);
    theirs.get("/tenants/acme").await;
    let (_, page) = admin.visit("/api-keys").await;
    assert!(
        page.contains("their program") && !page.contains(&key),
        "it is shown once"
    );

    assert!(
        admin
            .submit(&Form::find(&page, "/revoke"))
            .await
            .0
            .is_redirection()
    );
    let (status, _) = theirs.call(Method::GET, "/tenants/acme", None).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED);

    let (_, page) = admin.visit("/tenants/acme").await;
    let mut form = Form::find(&page, "/tenants/acme/delete").fill("confirm", "other");
    assert_eq!(admin.submit(&form).await.0, StatusCode::UNPROCESSABLE_ENTITY);
    form = form.fill("confirm", "acme");
    assert!(admin.submit(&form).await.0.is_redirection());
    assert_eq!(admin.visit("/tenants/acme").await.0, StatusCode::NOT_FOUND);

    let (_, page) = admin.visit("/audit?actor=person:admin").await;
    for done in [
        "tenant.put",
        "api_key.created",
        "api_key.revoked",
        "tenant.deleted",
        "person.signed_in",
    ] {
        assert!(page.contains(&format!("<code>{done}<")), "{done}: {page}");
    }
    assert!(!page.contains(&key));
    assert!(
        !admin
            .visit("/audit?actor=person:nobody")
            .await
            .1
            .contains("<code>tenant.put")
    );
}

#[tokio::test]
async fn the_system_page_tells_of_dispatchers_shards_and_days() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let mut admin = Person::signed_in(&program).await;
    let (status, page) = admin.visit("/system").await;
    assert_eq!(status, StatusCode::OK);
    assert!(
        page.contains("64 of 64 shards have an owner") && page.contains("0–63"),
        "{page}"
    );
    assert!(
        page.contains("Partitions for the next 14 days already exist"),
        "{page}"
    );
}

#[tokio::test]
async fn the_catalogue_shows_fields_differences_and_an_example() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    let schema = |extra: serde_json::Value| json!({ "type": "object", "required": ["amount"], "properties": { "amount": { "type": "integer", "minimum": 7 }, "more": extra } });
    let body = json!({ "description": "Somebody has paid", "schemas": {
        "2026-01-15": schema(json!({ "type": "string" })), "2026-06-01": schema(json!({ "type": "integer" })) } });
    api.call(Method::PUT, "/event-types/invoice.paid", Some(body))
        .await;
    let mut admin = Person::signed_in(&program).await;
    let (_, page) = admin.visit("/event-types").await;
    assert!(
        page.contains("invoice.paid") && page.contains("Somebody has paid"),
        "{page}"
    );
    let (_, page) = admin.visit("/event-types/invoice.paid").await;
    for words in [
        "at least 7",
        "&#34;amount&#34;: 7",
        "may no longer be string",
        "2026-06-01",
    ] {
        assert!(page.contains(words), "{words}: {page}");
    }
    let (_, page) = admin.visit("/event-types/invoice.paid?version=2026-01-15").await;
    assert!(!page.contains("may no longer be"), "the first has none before it");
    for missing in [
        "/event-types/nothing",
        "/event-types/invoice.paid?version=1",
        "/event-types/UPPER",
    ] {
        assert_eq!(admin.visit(missing).await.0, StatusCode::NOT_FOUND, "{missing}");
    }
}

#[tokio::test]
async fn the_commands_and_snippets_on_the_pages_verify_a_real_request() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let mut admin = Person::signed_in(&program).await;
    api.tenant("acme").await;
    api.event_type("invoice.paid").await;
    for format in ["t-v1", "standard"] {
        let endpoint = api
            .endpoint(
                "acme",
                &receiver.url(&format!("/{format}")),
                json!({ "signature": format, "types": ["invoice.*"] }),
            )
            .await;
        let before = receiver.count();
        api.emit(
            "acme",
            json!({ "type": "invoice.paid", "data": { "it's": "\"quoted\" $HOME `x`" } }),
        )
        .await;
        receiver
            .wait_until("this format", |receiver| {
                receiver
                    .received()
                    .iter()
                    .skip(before)
                    .any(|request| request.path == format!("/{format}"))
            })
            .await;
        let query = format!("state=delivered&endpoint={}", endpoint.id);
        let delivered = crate::support::until("delivered", || async {
            api.deliveries("acme", &query).await.into_iter().next()
        })
        .await;
        let sent = receiver.received();
        let sent = sent
            .iter()
            .rfind(|request| request.path == format!("/{format}"))
            .expect("sent");
        let id = delivered["id"].as_str().expect("an id");
        let (_, page) = admin.visit(&format!("/signatures?delivery={id}")).await;
        assert!(!page.contains(&endpoint.secret), "the secret is not on the page");
        for tool in ["openssl", "python"] {
            let command = text_of(&page, &format!("command-{tool}"));
            let command = command.replace("'whsec_…'", &format!("'{}'", endpoint.secret));
            let printed = shell(&command);
            let signature = printed.trim().rsplit(' ').next().unwrap_or_default().to_owned();
            assert!(
                !signature.is_empty() && sent.header("webhook-signature").contains(&signature),
                "{format} {tool}: {printed}"
            );
        }
        // The pasted request is judged, and whoever may not see the secret gets no signature out of it.
        let body = String::from_utf8_lossy(&sent.body).into_owned();
        let paste = |body: String| {
            [
                ("endpoint", endpoint.id.clone()),
                ("id", sent.event_id().to_owned()),
                ("timestamp", sent.header("webhook-timestamp").to_owned()),
                ("signature", sent.header("webhook-signature").to_owned()),
                ("body", body),
            ]
        };
        for (body, words) in [
            (
                body.clone(),
                "The signature is valid and was made with the current secret",
            ),
            (body.replace("quoted", "changed"), "No signature matches"),
        ] {
            let fields = paste(body);
            let fields: Vec<(&str, &str)> = fields
                .iter()
                .map(|(name, value)| (*name, value.as_str()))
                .collect();
            let (status, page) = admin.post("/signatures", &fields).await;
            assert_eq!(status, StatusCode::OK);
            assert!(page.contains(words), "{words}: {page}");
        }
    }
    // The snippet of the page, with the sample of the page.
    let (_, page) = admin.visit("/verify?language=python").await;
    assert!(page.contains("standardwebhooks"), "the newest endpoint's format");
    let endpoint = api.get("/tenants/acme/endpoints").await["data"][0]["id"]
        .as_str()
        .expect("an id")
        .to_owned();
    let (_, page) = admin
        .visit(&format!("/verify?language=python&endpoint={endpoint}"))
        .await;
    let secret = api
        .get(&format!("/tenants/acme/endpoints/{endpoint}/secret"))
        .await["data"][0]["secret"]
        .clone();
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("snippet.py"), text_of(&page, "snippet")).expect("written");
    std::fs::write(folder.path().join("body"), text_of(&page, "sample-body")).expect("written");
    let check = format!(
        "import snippet; print(snippet.is_genuine('{}', open('body', 'rb').read(), {}))",
        text_of(&page, "sample-header"),
        text_of(&page, "sample-timestamp"),
    );
    let output = std::process::Command::new("python3")
        .args(["-c", &check])
        .current_dir(folder.path())
        .env("WEBHOOK_SECRET", secret.as_str().expect("a secret"))
        .output()
        .expect("python runs");
    assert_eq!(
        String::from_utf8_lossy(&output.stdout).trim(),
        "True",
        "{output:?}"
    );
}

fn shell(command: &str) -> String {
    let output = std::process::Command::new("sh")
        .args(["-c", command])
        .output()
        .expect("sh runs");
    assert!(output.status.success(), "{command}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[tokio::test]
async fn the_audit_log_says_what_was_changed_of_a_tenant() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    let put = async |body: Value| {
        let (status, answer) = api.call(Method::PUT, "/tenants/acme", Some(body)).await;
        assert!(status.is_success(), "{answer}");
        api.get("/audit").await["data"][0].clone()
    };
    let made = put(json!({ "name": "Acme" })).await;
    assert_eq!(made["action"], "tenant.put", "{made}");
    assert_eq!(
        made["detail"],
        json!({ "created": true, "name": "Acme" }),
        "{made}"
    );
    let changed = put(json!({ "name": "Acme", "all_operational_events": true })).await;
    assert_eq!(
        changed["detail"],
        json!({ "all_operational_events": true }),
        "{changed}"
    );
    let changed = put(json!({ "rotate_every_days": 30, "retention_days": 7 })).await;
    let expected = json!({
        "name": null, "all_operational_events": false, "rotate_every_days": 30, "retention_days": 7
    });
    assert_eq!(changed["detail"], expected, "{changed}");
    let same = put(json!({ "rotate_every_days": 30, "retention_days": 7 })).await;
    assert_eq!(same["detail"], json!({}), "{same}");
}
