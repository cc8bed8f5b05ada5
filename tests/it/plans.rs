//! The plans of the hot path. The planner takes a table that was empty at the last vacuum for an empty one, where every index
//! costs the same, and keeps that plan while the table fills: whatever it believes, each statement must walk only what it
//! asks for.

use std::collections::{BTreeMap, BTreeSet};

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::{Answer, Database, Postrider, Receiver};

const SETTINGS: &str = "session_preload_libraries = 'auto_explain'
auto_explain.log_min_duration = 0
auto_explain.log_settings = on
auto_explain.log_nested_statements = on
auto_explain.log_format = json
";

/// What grows with what waits and with what was sent.
fn is_large(table: &str) -> bool {
    ["queue", "retries", "dead_letters", "event_ids"].contains(&table)
        || ["events_", "attempts_"]
            .iter()
            .any(|start| table.starts_with(start))
}

/// Every node of a plan that reads a table.
fn scans<'a>(plan: &'a Value, found: &mut Vec<&'a Value>) {
    let is_scan = plan["Node Type"]
        .as_str()
        .is_some_and(|node| node.ends_with("Scan"));
    if is_scan && plan["Relation Name"].as_str().is_some_and(is_large) {
        found.push(plan);
    }
    for below in plan["Plans"].as_array().into_iter().flatten() {
        scans(below, found);
    }
}

/// The plans that the server wrote down: after `plan:`, each line indented.
fn plans(log: &str) -> Vec<Value> {
    log.split(" plan:\n")
        .skip(1)
        .map(|rest| {
            let lines: Vec<&str> = rest.lines().take_while(|line| line.starts_with('\t')).collect();
            serde_json::from_str(&lines.join("\n")).expect("a plan")
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn on_tables_that_were_empty_each_statement_walks_only_what_it_asks_for() {
    let database = Database::on_private_server_in(std::env::temp_dir(), SETTINGS).await;
    // Pages that hold nothing: of a table without pages the planner thinks better.
    for statement in [
        "insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id)
         select n, gen_random_uuid(), 0, 1, 1 from generate_series(1, 1000) n",
        "insert into postrider.retries (endpoint_id, event_id, tenant_id, type_id, attempt, step, due_at)
         select n, gen_random_uuid(), 1, 1, 1, 1, now() from generate_series(1, 1000) n",
        "delete from postrider.queue",
        "delete from postrider.retries",
        "vacuum (analyze, truncate off)",
    ] {
        database.execute(statement).await;
    }
    let program = Postrider::start(&database).await;
    let api = program.api();
    let receiver = Receiver::start().await;
    receiver.decide(|request| match request.path.as_str() {
        "/broken" => Answer::Status(500),
        _ => Answer::Status(204),
    });
    api.tenant("acme").await;
    api.event_type("invoice.paid").await;
    api.event_type("invoice.failed").await;
    let paid = json!(["invoice.paid"]);
    api.endpoint("acme", &receiver.url("/fine"), json!({ "types": paid }))
        .await;
    let ordered = json!({ "types": paid, "ordered": true });
    api.endpoint("acme", &receiver.url("/ordered"), ordered).await;
    let broken = json!({ "types": ["invoice.failed"], "retry_schedule": ["10ms", "10ms"] });
    api.endpoint("acme", &receiver.url("/broken"), broken).await;
    for number in 0..20 {
        let event =
            json!({ "type": "invoice.paid", "data": {}, "ordering_key": format!("key-{}", number % 3) });
        api.emit("acme", event).await;
        api.emit("acme", json!({ "type": "invoice.failed", "data": {} }))
            .await;
    }
    // An id that is taken.
    for _ in 0..2 {
        api.emit(
            "acme",
            json!({ "type": "invoice.paid", "data": {}, "id": "once" }),
        )
        .await;
    }
    // More than a lane holds, so that it is filled again.
    database
        .execute("select postrider.emit('acme', 'invoice.paid', '{}') from generate_series(1, 2000)")
        .await;
    let dead = api.wait_for_state("acme", "dead", 20).await;
    for delivery in &dead[..5] {
        let id = delivery["id"].as_str().expect("an id");
        let path = format!("/tenants/acme/deliveries/{id}/replay");
        let (status, body) = api.call(Method::POST, &path, None).await;
        assert!(status.is_success(), "{body}");
    }
    database.drained().await;

    let first_columns: BTreeMap<String, String> = database
        .text(
            "select string_agg(i.indexrelid::regclass::text || ' ' || a.attname, ',') from pg_index i
             join pg_attribute a on a.attrelid = i.indexrelid and a.attnum = 1",
        )
        .await
        .split(',')
        .filter_map(|pair| pair.split_once(' '))
        .map(|(index, column)| {
            (
                index.trim_start_matches("postrider.").to_owned(),
                column.to_owned(),
            )
        })
        .collect();
    let mut read: BTreeSet<String> = BTreeSet::new();
    let mut wrong = BTreeSet::new();
    let log = std::fs::read_to_string(database.cluster().home().log()).expect("the log of the server");
    for plan in plans(&log) {
        // The sessions of the hot path.
        if plan["Settings"]["plan_cache_mode"] != "force_generic_plan" {
            continue;
        }
        let query = plan["Query Text"].as_str().expect("a text");
        let mut found = Vec::new();
        scans(&plan["Plan"], &mut found);
        for scan in found {
            let index = scan["Index Name"].as_str().unwrap_or_default();
            let condition = scan["Index Cond"].as_str().unwrap_or_default();
            read.insert(query.to_owned());
            let starts = first_columns.get(index).is_some_and(|column| {
                condition
                    .split(|c: char| !c.is_alphanumeric() && c != '_')
                    .any(|word| word == column)
            });
            if !starts {
                wrong.insert(format!("{query}\n{scan:#}"));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{}",
        wrong.into_iter().collect::<Vec<_>>().join("\n\n")
    );
    // The tail, a refill, what is due, the heads of keys, both ways to record, and an id that is taken.
    for part in [
        "and q.xid < r.high",
        "q.event_id > r.floor",
        "order by q.due_at limit r.n",
        "order by q.sequence limit 1",
        "q.attempt = 0\n",
        "from_queue as (",
        "from postrider.event_ids i",
    ] {
        assert!(
            read.iter().any(|query| query.contains(part)),
            "no statement has {part:?}"
        );
    }
}
