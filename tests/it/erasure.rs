//! Deleting a tenant removes what is stored of it, all of it, and nothing of anybody else's.

use reqwest::{Method, StatusCode};
use serde_json::json;

use crate::support::{Database, Postrider, Receiver, until};

#[tokio::test]
async fn a_deleted_tenant_s_data_goes_also_what_a_producer_commits_late() {
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(
        &receiver.url("/hook"),
        json!({ "description": "theirs", "headers": { "x-token": "t" } }),
    )
    .await;
    api.tenant("other").await;
    api.endpoint("other", &receiver.url("/other"), json!({})).await;
    for tenant in ["acme", "other"] {
        let emit = format!(
            "select postrider.emit('{tenant}', 'invoice.paid', '{{}}', 'e' || n, ordering_key => 'k')
             from generate_series(1, 300) n"
        );
        database.execute(&emit).await;
    }
    receiver.wait_for(600).await;
    database.drained().await;
    let mut late = database.connect().await;
    for statement in [
        "begin",
        "select postrider.emit('acme', 'invoice.paid', '{}', 'late')",
    ] {
        sqlx::raw_sql(sqlx::AssertSqlSafe(statement))
            .execute(&mut late)
            .await
            .expect(statement);
    }

    let (status, _) = api.call(Method::DELETE, "/tenants/acme", None).await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    let erasure = api.get("/erasures").await["data"][0].clone();
    assert_eq!(
        (&erasure["tenant"], &erasure["total"]),
        (&json!("acme"), &json!(300)),
        "{erasure}"
    );
    let path = format!("/erasures/{}", erasure["id"].as_str().expect("an id"));
    until("what was committed is gone", || async {
        (api.get(&path).await["done"] == 300).then_some(())
    })
    .await;
    // Another process takes the job up.
    program.kill();
    program.restart().await;
    let api = program.api();
    assert_eq!(
        api.get(&path).await["state"],
        "running",
        "a producer may still commit"
    );
    sqlx::raw_sql("commit")
        .execute(&mut late)
        .await
        .expect("committed");
    let erasure = until("it is over", || async {
        let erasure = api.get(&path).await;
        (erasure["state"] == "done").then_some(erasure)
    })
    .await;
    assert_eq!(erasure["done"], erasure["total"], "{erasure}");

    for (table, left) in [
        ("events", 300),
        ("attempts", 300),
        ("event_ids", 300),
        ("ordering_keys", 1),
        ("secrets", 1),
        ("queue", 0),
    ] {
        let count = database
            .count(&format!("select count(*) from postrider.{table}"))
            .await;
        assert_eq!(count, left, "{table}: only the other tenant's");
    }
    let named = "select count(*) from postrider.endpoints where url like '%/hook' or description is not null or headers is not null";
    assert_eq!(database.count(named).await, 0);
    assert_eq!(
        api.call(Method::GET, "/erasures/era_000000000000000000000000", None)
            .await
            .0,
        StatusCode::NOT_FOUND
    );
    api.tenant("acme").await;
    assert!(
        api.deliveries("acme", "").await.is_empty(),
        "the name is free again"
    );
}
