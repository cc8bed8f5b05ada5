//! Which endpoint fails, without a browser: the API across tenants, the health of one endpoint, and the tool.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{Answer, Api, Database, Postrider, Receiver, tool, until};

/// As many consecutive failures as open a circuit.
const FAILURES_TO_OPEN: usize = 10;

fn ids(list: &Value) -> Vec<&str> {
    let entries = list["data"].as_array().expect("a list");
    entries
        .iter()
        .map(|one| one["id"].as_str().expect("an id"))
        .collect()
}

async fn emit(api: &Api, tenant: &str, count: usize) {
    for _ in 0..count {
        let (status, told) = api
            .emit(tenant, json!({ "type": "invoice.paid", "data": {} }))
            .await;
        assert!(status.is_success(), "{told}");
    }
}

/// The endpoint with this id, once the list has it.
async fn listed(api: &Api, query: &str, id: &str) -> Value {
    until(&format!("{id} is listed by {query}"), || async {
        let list = api.get(&format!("/endpoints?{query}")).await;
        let entries = list["data"].as_array().expect("a list").clone();
        entries.into_iter().find(|one| one["id"] == id)
    })
    .await
}

#[tokio::test]
async fn failing_endpoints_of_all_tenants_are_found_with_the_reason() {
    let database = Database::fresh().await;
    let program = Postrider::start_with(&database, &[("POSTRIDER_RETRY_SCHEDULE", "0s,1h")]).await;
    let (api, good, broken) = (program.api(), Receiver::start().await, Receiver::start().await);
    broken.answer(Answer::Status(503));
    api.event_type("invoice.paid").await;
    for tenant in ["acme", "umbrella", "quiet"] {
        api.tenant(tenant).await;
    }
    let fine = api.endpoint("acme", &good.url("/hook"), json!({})).await.id;
    let failing = api.endpoint("acme", &broken.url("/a"), json!({})).await.id;
    let open = api
        .endpoint("umbrella", &broken.url("/b"), json!({ "concurrency": 1 }))
        .await
        .id;
    let paused = api.endpoint("quiet", &good.url("/c"), json!({})).await.id;
    let path = format!("/tenants/quiet/endpoints/{paused}");
    api.call(Method::PATCH, &path, Some(json!({ "enabled": false })))
        .await;
    emit(&api, "acme", 2).await;
    emit(&api, "umbrella", FAILURES_TO_OPEN).await;
    good.wait_for(2).await;

    let found = until("both failures are counted", || async {
        let list = api.get("/endpoints?health=failing").await;
        let failed: i64 = list["data"]
            .as_array()
            .expect("a list")
            .iter()
            .filter_map(|one| one["last_hour"]["failed"].as_i64())
            .sum();
        (failed == 2 + FAILURES_TO_OPEN as i64).then_some(list)
    })
    .await;
    assert_eq!(ids(&found), [&failing, &open], "in order of creation: {found}");
    let first = &found["data"][0];
    assert_eq!(
        (&first["tenant"], &first["state"]),
        (&json!("acme"), &json!("active")),
        "{first}"
    );
    assert_eq!(first["health"]["status"], "failing", "{first}");
    assert!(
        first["health"]["failing_since"].is_string() && first["health"]["disabled_after"].is_string(),
        "{first}"
    );
    assert_eq!(
        first["last_hour"],
        json!({ "delivered": 0, "failed": 2, "failures": { "5xx": 2 } })
    );

    listed(&api, "circuit=open", &open).await;
    let list = api.get("/endpoints?circuit=open").await;
    assert_eq!(ids(&list), [&open], "{list}");
    let list = api.get("/endpoints?sort=failures").await;
    assert_eq!(ids(&list), [&open, &failing], "the most failures first: {list}");
    for (query, expected) in [
        ("health=healthy", vec![&fine]),
        ("health=paused", vec![&paused]),
        ("health=disabled", vec![]),
        ("health=failing&tenant=umbrella", vec![&open]),
        ("tenant=nobody", vec![]),
        ("", vec![&fine, &failing, &open, &paused]),
    ] {
        let list = api.get(&format!("/endpoints?{query}")).await;
        assert_eq!(ids(&list), expected, "{query}");
    }

    let one = api.get(&format!("/tenants/umbrella/endpoints/{open}")).await;
    assert_eq!(
        (&one["health"]["status"], &one["health"]["circuit"]),
        (&json!("failing"), &json!("open")),
        "{one}"
    );
    let list = api.get("/tenants/acme/endpoints").await;
    let health: Vec<&Value> = list["data"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|one| &one["health"]["status"])
        .collect();
    assert_eq!(health, [&json!("healthy"), &json!("failing")], "{list}");

    let said = tool(&program, &["endpoints", "health"]).await;
    assert_eq!(said.status, 0, "{said:?}");
    assert!(
        said.out.contains(&format!("acme {failing} failing since ")) && said.out.contains("2 5xx"),
        "{said:?}"
    );
    assert!(
        said.out.contains("circuit open") && !said.out.contains(&fine),
        "{said:?}"
    );
    let said = tool(
        &program,
        &["endpoints", "health", "top", "--limit", "1", "--json"],
    )
    .await;
    assert_eq!(said.json()["id"], json!(open), "{said:?}");
    let said = tool(&program, &["endpoints", "health", "ill"]).await;
    assert_eq!(said.status, 2, "{said:?}");

    // It works again.
    broken.answer(Answer::Status(200));
    emit(&api, "acme", 1).await;
    listed(&api, "health=healthy", &failing).await;
}

#[tokio::test]
async fn a_page_looks_at_a_bounded_number_of_endpoints_and_continues_from_there() {
    let database = Database::fresh().await;
    let program = Postrider::on_database("dashboard", &database).start().await;
    let api = program.api();
    api.tenant("acme").await;
    database
        .execute(
            "insert into postrider.endpoints (tenant_id, public_id, shard, url, state)
             select (select id from postrider.tenants where slug = 'acme'), 'ep_' || n, n % 64, 'https://example.com/' || n,
                    case when n > 5998 then 'disabled'::postrider.endpoint_state else 'active' end
             from generate_series(1, 6000) n",
        )
        .await;
    let first = api.get("/endpoints?health=disabled").await;
    assert_eq!(ids(&first), [""; 0]);
    let cursor = first["next_cursor"].as_str().expect("there is more");
    let second = api
        .get(&format!("/endpoints?health=disabled&limit=1&cursor={cursor}"))
        .await;
    assert_eq!(ids(&second), ["ep_5999"]);
    let cursor = second["next_cursor"].as_str().expect("there is more");
    let last = api
        .get(&format!("/endpoints?health=disabled&limit=1&cursor={cursor}"))
        .await;
    assert_eq!(ids(&last), ["ep_6000"]);
    assert_eq!(last["next_cursor"], Value::Null);
}

#[tokio::test]
async fn bad_filters_are_named_and_other_keys_see_nothing_of_other_tenants() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    for (query, word) in [
        ("health=ill", "healthy, failing, paused, disabled"),
        ("circuit=half", "closed, open"),
        ("sort=name", "created, failures"),
        ("sort=failures&cursor=MQ", "cursor"),
        ("limit=0", "limit"),
        ("state=active", "state"),
    ] {
        let (status, problem) = api.call(Method::GET, &format!("/endpoints?{query}"), None).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{query}: {problem}");
        let detail = problem["detail"].as_str().unwrap_or_default();
        assert!(detail.contains(word), "{query}: {problem}");
    }
    for role in [
        json!({ "role": "tenant", "tenant": "acme", "name": "t" }),
        json!({ "role": "producer", "name": "p" }),
    ] {
        let (_, made) = api.call(Method::POST, "/api-keys", Some(role)).await;
        let other = program.api_with_key(made["key"].as_str().expect("a key"));
        let (status, problem) = other.call(Method::GET, "/endpoints", None).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{problem}");
    }
}
