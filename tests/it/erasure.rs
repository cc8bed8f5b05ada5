//! Deleting a tenant removes what is stored of it, all of it, and nothing of anybody else's.

use reqwest::{Method, StatusCode};
use serde_json::json;

use crate::support::{Database, Person, Postrider, Receiver, until};

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
    // What a customer and their team leave behind beside deliveries.
    for tenant in ["acme", "other"] {
        let links = format!("/tenants/{tenant}/portal-links");
        let (_, _, link) = api.post_with_key(&links, "once", json!({})).await;
        let url = link["url"].as_str().expect("a link").to_owned();
        let at = url.find("/portal").expect("a path");
        Person::new(&program).visit(&url[at..]).await;
        api.call(Method::POST, &links, None).await;
        let key = json!({ "role": "tenant", "tenant": tenant, "name": format!("of {tenant}") });
        api.post_with_key("/api-keys", tenant, key).await;
        let event = json!({ "type": "invoice.paid", "data": { "whose": tenant } });
        api.post_with_key(&format!("/tenants/{tenant}/events"), "once", event)
            .await;
    }
    receiver.wait_for(602).await;
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
        (&json!("acme"), &json!(301)),
        "{erasure}"
    );
    let path = format!("/erasures/{}", erasure["id"].as_str().expect("an id"));
    until("what was committed is gone", || async {
        (api.get(&path).await["done"] == 301).then_some(())
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
        ("events", 301),
        ("attempts", 301),
        ("event_ids", 300),
        ("ordering_keys", 1),
        ("secrets", 1),
        ("queue", 0),
        ("idempotency", 3),
        ("portal_links", 1),
        ("sessions", 1),
        ("api_keys", 1),
    ] {
        let count = database
            .count(&format!("select count(*) from postrider.{table}"))
            .await;
        assert_eq!(count, left, "{table}: only the other tenant's");
    }
    for (table, query) in every_trace(&database).await {
        assert_eq!(
            database.count(&query).await,
            0,
            "{table} has something of the tenant"
        );
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

/// For each table how to find what is left of the tenant: by its number, by those of its endpoints, and by its name. What
/// stays by intent is not asked for: the tenant's id, its endpoints' numbers, the audit log, and the erasure itself.
async fn every_trace(database: &Database) -> Vec<(String, String)> {
    let columns: Vec<(String, String)> = sqlx::query_as(
        "select c.relname::text, a.attname::text
         from pg_class c join pg_attribute a on a.attrelid = c.oid
         where c.relnamespace = 'postrider'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
           and a.attnum > 0 and not a.attisdropped
           and c.relname not in ('tenants', 'endpoints', 'audit', 'erasures')",
    )
    .fetch_all(&mut database.connect().await)
    .await
    .expect("read");
    let tenant = "(select id from postrider.tenants where slug = 'acme' and deleted_at is not null)";
    let mut queries = Vec::new();
    for (table, column) in &columns {
        let found = match column.as_str() {
            "tenant_id" => format!("tenant_id in {tenant}"),
            "endpoint_id" => {
                format!("endpoint_id in (select id from postrider.endpoints where tenant_id in {tenant})")
            }
            _ => continue,
        };
        queries.push((
            table.clone(),
            format!("select count(*) from postrider.{table} where {found}"),
        ));
    }
    let tables: std::collections::BTreeSet<&String> = columns.iter().map(|(table, _)| table).collect();
    assert!(tables.len() > 20, "{tables:?}");
    for table in tables {
        let query = format!("select count(*) from postrider.{table} t where t::text like '%acme%'");
        queries.push((table.clone(), query));
    }
    queries
}
