//! Reads from a streaming replica: what may be old comes from there, what must not be does not, and nobody notices when it
//! falls behind or dies.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{ADMIN_API_KEY, Database, Person, Postrider, Receiver, Replica, until};

/// What came back, and whether the replica said it.
struct Read {
    status: StatusCode,
    body: Value,
    from_replica: bool,
}

async fn read(program: &Postrider, path: &str, key: &str, cache_control: &str) -> Read {
    let request = crate::support::http_client()
        .build()
        .expect("a client")
        .get(program.url(&format!("/v1{path}")))
        .bearer_auth(key)
        .header("cache-control", cache_control);
    let answer = request.send().await.expect("an answer");
    Read {
        status: answer.status(),
        from_replica: is_from_replica(&answer),
        body: answer.json().await.unwrap_or_default(),
    }
}

async fn read_old(program: &Postrider, path: &str) -> Read {
    read(program, path, ADMIN_API_KEY, "max-stale").await
}

fn is_from_replica(answer: &reqwest::Response) -> bool {
    answer
        .headers()
        .get("postrider-read")
        .is_some_and(|from| from == "replica")
}

async fn follows(program: &Postrider) {
    until("it is read from", || async {
        read_old(program, "/tenants").await.from_replica.then_some(())
    })
    .await;
}

#[tokio::test]
async fn what_may_be_old_is_read_from_a_replica_while_it_follows() {
    let database = Database::on_private_server().await;
    let replica = Replica::of(&database).await;
    // It may fall behind without holding anybody up.
    for statement in [
        "alter system set synchronous_standby_names = ''",
        "select pg_reload_conf()",
    ] {
        database.execute_as_superuser(statement).await;
    }
    let url = replica.url(&database);
    let program = Postrider::start_with(&database, &[("POSTRIDER_DATABASE_URL_READ", &url)]).await;
    let api = program.api();
    let receiver = Receiver::start().await;
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    api.emit(
        "acme",
        json!({ "type": "invoice.paid", "id": "first", "data": {} }),
    )
    .await;
    api.wait_for_state("acme", "delivered", 1).await;
    follows(&program).await;

    // A caller that says nothing reads what was just written.
    assert!(
        !read(&program, "/tenants", ADMIN_API_KEY, "no-cache")
            .await
            .from_replica
    );

    // Every page that is read from it opens there. The cookie is that of a session alone.
    let session = Person::signed_in(&program).await.cookie();
    let session = session
        .split("; ")
        .find(|part| part.starts_with("postrider_session"))
        .expect("a session")
        .to_owned();
    let page = format!("/endpoints/{}", endpoint.id);
    for path in [
        "/deliveries",
        "/events/first",
        "/endpoints",
        "/endpoints/rotations",
        &page,
        "/dead-letters",
        "/replays",
        "/event-types",
        "/event-types/invoice.paid",
        "/tenants",
        "/tenants/acme",
        "/audit",
    ] {
        until(path, || async {
            let answer = Person::with_cookie(&program, &session).open(path).await;
            assert_eq!(answer.status(), StatusCode::OK, "{path}");
            is_from_replica(&answer).then_some(())
        })
        .await;
    }

    // Whoever changes something sees it, however far the replica is behind.
    replica.hold_back().await;
    let mut person = Person::with_cookie(&program, &session);
    let (status, _) = person.post(&format!("{page}/pause"), &[]).await;
    assert!(status.is_redirection(), "{status}");
    let answer = person.open(&page).await;
    assert!(!is_from_replica(&answer));
    assert!(answer.text().await.expect("a page").contains("Resume"));

    // A key that is revoked is refused at once.
    let body = json!({ "role": "tenant", "tenant": "acme", "name": "t" });
    let (_, key) = api.call(Method::POST, "/api-keys", Some(body)).await;
    let word = key["key"].as_str().expect("a key");
    let path = "/tenants/acme/deliveries";
    assert_eq!(
        read(&program, path, word, "max-stale").await.status,
        StatusCode::OK
    );
    let revoke = format!("/api-keys/{}", key["id"].as_str().expect("an id"));
    assert!(api.call(Method::DELETE, &revoke, None).await.0.is_success());
    let refused = read(&program, path, word, "max-stale").await;
    assert_eq!(refused.status, StatusCode::UNAUTHORIZED);

    // What it has not got yet is found on the primary.
    api.emit(
        "acme",
        json!({ "type": "invoice.paid", "id": "second", "data": {} }),
    )
    .await;
    let found = read_old(&program, "/tenants/acme/events/second").await;
    assert_eq!((found.status, found.from_replica), (StatusCode::OK, false));

    // It is no longer asked when it is far behind.
    until("it is not read from", || async {
        let events = read_old(&program, "/tenants/acme/events").await;
        let known = events.body["data"]
            .as_array()
            .is_some_and(|data| data.iter().any(|event| event["id"] == "second"));
        (!events.from_replica && known).then_some(())
    })
    .await;
    replica.go_on().await;
    follows(&program).await;

    // And nobody is refused because it dies.
    replica.kill();
    until("it is given up", || async {
        let events = read_old(&program, "/tenants/acme/events").await;
        assert_eq!(events.status, StatusCode::OK, "{}", events.body);
        (!events.from_replica).then_some(())
    })
    .await;
    for _ in 0..20 {
        assert_eq!(read_old(&program, "/tenants").await.status, StatusCode::OK);
    }
}

#[tokio::test]
async fn a_dashboard_starts_without_its_replica() {
    let database = Database::fresh().await;
    let nowhere = "postgresql://postrider@127.0.0.1:1/none";
    let program = Postrider::start_with(&database, &[("POSTRIDER_DATABASE_URL_READ", nowhere)]).await;
    program.api().tenant("acme").await;
    let tenants = read_old(&program, "/tenants").await;
    assert_eq!((tenants.status, tenants.from_replica), (StatusCode::OK, false));
}
