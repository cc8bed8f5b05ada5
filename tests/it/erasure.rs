//! Deleting a tenant removes what is stored of it, all of it, and nothing of anybody else's.

use std::time::Duration;

use postrider_dispatcher::erasure;
use postrider_proto::TenantId;
use reqwest::{Method, StatusCode};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::support::{Api, Database, Person, Postrider, Receiver, until};

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

async fn run(connection: &mut PgConnection, statements: &[&'static str]) {
    for statement in statements {
        sqlx::raw_sql(AssertSqlSafe(*statement))
            .execute(&mut *connection)
            .await
            .expect(statement);
    }
}

async fn erasure_of_acme(api: &Api) -> String {
    let erasure = until("an erasure has begun", || async {
        let erasures = api.get("/erasures").await;
        erasures["data"][0]["id"].as_str().map(str::to_owned)
    })
    .await;
    format!("/erasures/{erasure}")
}

async fn wait_until_done(api: &Api, path: &str) {
    until("the erasure is over", || async {
        (api.get(path).await["state"] == "done").then_some(())
    })
    .await;
}

const LEFT: &str = "select (select count(*) from postrider.events e join postrider.tenants t on t.id = e.tenant_id
                            where t.deleted_at is not null)
                         + (select count(*) from postrider.event_ids i join postrider.tenants t on t.id = i.tenant_id
                            where t.deleted_at is not null)";

/// Its snapshot still shows the tenant: it may wait as long as it likes, and emits nothing.
#[tokio::test]
async fn a_transaction_that_began_before_the_tenant_was_deleted_can_not_emit_for_it_afterwards() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.acme("http://127.0.0.1:9/hook", json!({})).await;
    api.tenant("other").await;
    let emits = [
        "select postrider.emit('acme', 'invoice.paid', '{}', 'late')",
        "select postrider.emit('acme', 'invoice.paid', '{}')",
        "select postrider.emit_batch('acme', array['invoice.paid', 'invoice.paid'], array['{}', '{}'])",
        "select postrider.emit('acme', 'invoice.paid', '{}',
            traceparent => '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01')",
    ];
    let mut producers = Vec::new();
    for level in ["repeatable read", "serializable"] {
        for emit in emits {
            let mut producer = database.connect().await;
            let begin = format!("begin isolation level {level}; select count(*) from postrider.tenants");
            sqlx::raw_sql(AssertSqlSafe(begin))
                .execute(&mut producer)
                .await
                .expect("begun");
            producers.push((producer, level, emit));
        }
    }
    let mut bystander = database.connect().await;
    run(
        &mut bystander,
        &["begin isolation level repeatable read", "select 1"],
    )
    .await;
    let (status, _) = api.call(Method::DELETE, "/tenants/acme", None).await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    wait_until_done(&api, &erasure_of_acme(&api).await).await;

    for (mut producer, level, emit) in producers {
        let refused = sqlx::raw_sql(AssertSqlSafe(emit)).execute(&mut producer).await;
        let code = refused
            .err()
            .and_then(|error| error.into_database_error()?.code().map(String::from));
        assert_eq!(code.as_deref(), Some("40001"), "{level}: {emit}");
    }
    assert_eq!(database.count(LEFT).await, 0, "nothing came late");
    // Others are not in its way, and it holds nothing that others wait for.
    run(
        &mut bystander,
        &["select postrider.emit('other', 'invoice.paid', '{}', 'fine')"],
    )
    .await;
    let (status, _) = api
        .call(Method::PUT, "/tenants/other", Some(json!({ "name": "Other" })))
        .await;
    assert_eq!(status, StatusCode::OK, "an open producer locks no tenant");
    run(&mut bystander, &["commit"]).await;
}

/// The deletion has its transaction number before the producer, and commits after the producer has read the tenant.
#[tokio::test]
async fn an_erasure_waits_for_a_producer_that_began_while_the_deletion_was_under_way() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.acme("http://127.0.0.1:9/hook", json!({})).await;
    let mut lock = database.connect().await;
    run(
        &mut lock,
        &["begin", "select from postrider.endpoints for update"],
    )
    .await;
    let deleting = tokio::spawn({
        let api = program.api();
        async move { api.call(Method::DELETE, "/tenants/acme", None).await.0 }
    });
    until("the deletion waits for an endpoint", || async {
        let waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'
                       and datname = current_database()";
        (database.count(waiting).await > 0).then_some(())
    })
    .await;
    let mut late = database.connect().await;
    run(
        &mut late,
        &[
            "begin",
            "select postrider.emit('acme', 'invoice.paid', '{}', 'late')",
        ],
    )
    .await;
    run(&mut lock, &["rollback"]).await;
    assert_eq!(deleting.await.expect("no panic"), StatusCode::NO_CONTENT);
    let path = erasure_of_acme(&api).await;
    // A few passes of the job, each of which may not believe that it is over.
    for _ in 0..40 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(
            api.get(&path).await["state"],
            "running",
            "a producer may still commit"
        );
    }
    run(&mut late, &["commit"]).await;
    wait_until_done(&api, &path).await;
    assert_eq!(database.count(LEFT).await, 0, "nothing came late");
}

#[tokio::test]
async fn a_tenant_of_any_size_can_be_deleted_and_all_of_it_is_counted() {
    const EVENTS: i64 = 600_000;
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    program.api().acme("http://127.0.0.1:9/hook", json!({})).await;
    assert!(program.stop().await.success());
    let many = format!(
        "insert into postrider.events (id, tenant_id, type_id, schema_id, body)
         select postrider.uuid_at(clock_timestamp()), t.id, y.id, s.id, ''
         from generate_series(1, {EVENTS}), postrider.tenants t, postrider.event_types y, postrider.schemas s
         where t.slug = 'acme' and y.name = 'invoice.paid' and s.type_id = y.id"
    );
    database.execute(&many).await;
    let tenant: TenantId = sqlx::query_scalar("select id from postrider.tenants where slug = 'acme'")
        .fetch_one(&mut database.connect().await)
        .await
        .expect("a tenant");
    let mut connection = database.connect().await;
    let mut transaction = connection.begin().await.expect("begun");
    sqlx::query("update postrider.tenants set deleted_at = clock_timestamp() where slug = 'acme'")
        .execute(&mut *transaction)
        .await
        .expect("deleted");
    erasure::begin(&mut transaction, tenant, "era_000000000000000000000007", "a test")
        .await
        .expect("it begins");
    transaction.commit().await.expect("committed");
    // A request has ten seconds, whatever the tenant has: it counts a bounded number of events and leaves the rest.
    let (total, counted): (i64, bool) = sqlx::query_as("select total, counted from postrider.erasures")
        .fetch_one(&mut connection)
        .await
        .expect("an erasure");
    assert!(
        !counted && total < EVENTS / 10,
        "{total} events were counted in the request"
    );
    program.restart().await;
    let api = program.api();
    let counted = until("it is counted", || async {
        let erasure = api.get("/erasures/era_000000000000000000000007").await;
        (erasure["total"] == EVENTS).then_some(erasure)
    })
    .await;
    assert_eq!(counted["state"], "running", "{counted}");
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
