//! `/metrics` and the log: what is told is what happened, and what the docs and the files of `deploy/` say of it is true.

use std::collections::{BTreeMap, BTreeSet};

use postrider_dashboard::grpc::v1::{EmitRequest, Event, emitter_client::EmitterClient};
use reqwest::Method;
use serde_json::{Value, json};
use tonic::{Request, transport::Channel};

use crate::support::{ADMIN_API_KEY, Answer, Database, Postrider, Receiver, until};

/// A name with its labels and its kind.
type Family = (String, BTreeSet<String>, String);

async fn scrape(program: &Postrider) -> String {
    let request = crate::support::http_client()
        .build()
        .expect("a client")
        .get(program.url("/metrics"))
        .bearer_auth(ADMIN_API_KEY);
    let response = request.send().await.expect("an answer");
    response.text().await.expect("a body")
}

fn families(text: &str) -> BTreeSet<Family> {
    let mut kinds = BTreeMap::new();
    let mut helped = BTreeSet::new();
    let mut labels: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a kind");
            kinds.insert(name.to_owned(), kind.to_owned());
        } else if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, means) = rest.split_once(' ').expect("words");
            assert!(means.len() > 10 || means.starts_with('1'), "{line}");
            helped.insert(name.to_owned());
        } else {
            let (series, value) = line.rsplit_once(' ').expect("a value");
            value.parse::<f64>().expect("a number");
            let (name, inside) = series.split_once('{').unwrap_or((series, ""));
            let family = kinds
                .keys()
                .filter(|family| {
                    let rest = name.strip_prefix(family.as_str());
                    rest.is_some_and(|rest| ["", "_bucket", "_sum", "_count"].contains(&rest))
                })
                .max_by_key(|family| family.len())
                .unwrap_or_else(|| panic!("a series without TYPE: {line}"));
            let names = inside
                .trim_end_matches('}')
                .split(',')
                .filter_map(|one| one.split_once('='));
            let names = names.map(|(name, _)| name.to_owned()).filter(|name| name != "le");
            labels.entry(family.clone()).or_default().extend(names);
        }
    }
    let told: BTreeSet<String> = kinds.keys().cloned().collect();
    assert_eq!(told, helped, "each has a line of HELP");
    kinds
        .into_iter()
        .map(|(name, kind)| {
            let labels = labels.remove(&name).unwrap_or_default();
            (name, labels, kind)
        })
        .collect()
}

/// The rows of the table in docs/operations.md that these roles tell.
fn documented(roles: &[&str]) -> BTreeSet<Family> {
    let text = include_str!("../../docs/operations.md");
    let mut found = BTreeSet::new();
    let is_row = |line: &&str| line.starts_with("| `postrider_") || line.starts_with("| `process_");
    for line in text.lines().filter(is_row) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, name, kind, who, ..] = cells[..] else {
            panic!("a short row: {line}");
        };
        let name = name.trim_matches('`').trim_end_matches('}');
        let (name, labels) = name.split_once('{').unwrap_or((name, ""));
        let labels = labels
            .split(',')
            .filter(|label| !label.is_empty())
            .map(str::to_owned);
        if who.split(' ').any(|role| roles.contains(&role)) {
            found.insert((name.to_owned(), labels.collect(), kind.to_owned()));
        }
    }
    assert!(found.len() > 5, "the table is found");
    found
}

#[tokio::test]
async fn the_docs_have_each_figure_that_a_role_tells_and_no_other() {
    let database = Database::fresh().await;
    let whole = Postrider::start(&database).await;
    let dispatcher = Postrider::on_database("dispatcher", &database).start().await;
    let dashboard = Postrider::on_database("dashboard", &database).start().await;
    for (program, roles) in [
        (&whole, &["D", "A"][..]),
        (&dispatcher, &["D"]),
        (&dashboard, &["A"]),
    ] {
        let expected = documented(roles);
        // They come with the first look at the tables.
        let text = until("the tables were looked at", || async {
            let text = scrape(program).await;
            ["postrider_events_stored_total", "postrider_table_bytes"]
                .iter()
                .all(|name| text.contains(name))
                .then_some(text)
        })
        .await;
        let told = families(&text);
        let missing: Vec<_> = told.difference(&expected).collect();
        // There is one for each cell, and here is none.
        let of_cells = |family: &&Family| family.0 == "postrider_cell_up";
        let untrue: Vec<_> = expected.difference(&told).filter(|one| !of_cells(one)).collect();
        assert!(
            missing.is_empty() && untrue.is_empty(),
            "of {roles:?}: not in the docs {missing:?}, only in the docs {untrue:?}"
        );
    }
}

#[test]
fn alerts_and_dashboards_use_only_figures_that_there_are() {
    let known: BTreeSet<String> = documented(&["D", "A", "opt-in"])
        .into_iter()
        .map(|row| row.0)
        .collect();
    let files = [
        include_str!("../../deploy/prometheus/alerts.yaml"),
        include_str!("../../deploy/prometheus/alerts_test.yaml"),
        include_str!("../../deploy/prometheus/outages_test.yaml"),
        include_str!("../../deploy/prometheus/slo.yaml"),
        include_str!("../../deploy/prometheus/slo_test.yaml"),
        include_str!("../../deploy/grafana/postrider.json"),
        include_str!("../../deploy/kubernetes/components/autoscaling/dispatcher.yaml"),
    ];
    let mut used = BTreeSet::new();
    for file in files {
        for (at, _) in file.match_indices("postrider_") {
            let before = file[..at].chars().next_back().unwrap_or(' ');
            let rest = &file[at..];
            let end = rest
                .find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
                .unwrap_or(rest.len());
            if !before.is_ascii_alphanumeric() && before != '/' && before != '-' {
                used.insert(rest[..end].to_owned());
            }
        }
    }
    for name in &used {
        let family = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|suffix| name.strip_suffix(suffix))
            .unwrap_or(name);
        assert!(
            known.contains(family) || known.contains(name),
            "{name} is used, but nothing tells it"
        );
    }
    // Whoever adds a figure thinks of who looks at it.
    let shown = include_str!("../../deploy/grafana/postrider.json");
    let unseen: Vec<&String> = known
        .iter()
        .filter(|name| !shown.contains(name.as_str()))
        .collect();
    assert!(unseen.is_empty(), "not in the dashboard: {unseen:?}");
}

/// The sum over the series with all of these parts.
fn value(text: &str, name: &str, labels: &[&str]) -> f64 {
    text.lines()
        .filter(|line| {
            let rest = line.strip_prefix(name);
            rest.is_some_and(|rest| rest.starts_with([' ', '{']))
        })
        .filter(|line| labels.iter().all(|label| line.contains(label)))
        .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
        .sum()
}

async fn emit_over_grpc(program: &Postrider) {
    let address = until("the address of gRPC is told", || async {
        program.log_lines().iter().find_map(|line| {
            let line: Value = serde_json::from_str(line).ok()?;
            (line["service"] == "grpc").then(|| line["address"].as_str().map(str::to_owned))?
        })
    })
    .await;
    let channel = Channel::from_shared(format!("http://{address}"))
        .expect("a URL")
        .connect()
        .await
        .expect("connected");
    let mut client = EmitterClient::new(channel);
    let mut request = Request::new(EmitRequest {
        tenant: "acme".to_owned(),
        event: Some(Event {
            r#type: "invoice.paid".to_owned(),
            data: "{}".to_owned(),
            ..Event::default()
        }),
    });
    let key = format!("Bearer {ADMIN_API_KEY}").parse().expect("a value");
    request.metadata_mut().insert("authorization", key);
    client.emit(request).await.expect("emitted");
}

#[tokio::test]
async fn the_figures_tell_what_happened() {
    let database = Database::fresh().await;
    let program = Postrider::start_with(&database, &[("POSTRIDER_GRPC_LISTEN", "127.0.0.1:0")]).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    // Refuses what it gets, once.
    let broken = Receiver::start().await;
    broken.answer(Answer::Status(500));
    let once = json!({ "retry_schedule": ["0s"] });
    api.endpoint("acme", &broken.url("/hook"), once).await;
    // So that what is stored from here on is counted: the first look takes what is there for given.
    until("the tables were looked at", || async {
        scrape(&program)
            .await
            .contains("postrider_events_stored_total")
            .then_some(())
    })
    .await;

    let event = |id: &str, data: Value| json!({ "type": "invoice.paid", "id": id, "data": data });
    for (id, data, status) in [
        ("one", json!({}), 202),
        ("one", json!({}), 200),
        ("one", json!({"other": 1}), 409),
        ("two", json!({}), 202),
    ] {
        let (answered, told) = api.emit("acme", event(id, data)).await;
        assert_eq!(answered.as_u16(), status, "{told}");
    }
    let batch = json!({ "events": [event("three", json!({})), event("four", json!({}))] });
    let (status, told) = api
        .call(Method::POST, "/tenants/acme/events/batch", Some(batch))
        .await;
    assert_eq!(status.as_u16(), 202, "{told}");
    for _ in 0..2 {
        let body = event("five", json!({}));
        api.post_with_key("/tenants/acme/events", "key", body).await;
    }
    emit_over_grpc(&program).await;
    database
        .execute("select postrider.emit('acme', 'invoice.paid', '{}')")
        .await;

    let events = 7.0;
    receiver.wait_for(events as usize).await;
    api.wait_for_state("acme", "dead", events as usize).await;
    let told = until("everything is counted", || async {
        let text = scrape(&program).await;
        let settled = value(&text, "postrider_dead_letters_total", &["exhausted"]) == events
            && value(&text, "postrider_events_stored_total", &[]) >= events
            && value(&text, "postrider_in_flight", &[]) == 0.0;
        settled.then_some(text)
    })
    .await;
    for (name, labels, expected) in [
        ("postrider_events_emitted_total", &["http"][..], 5.0),
        ("postrider_events_emitted_total", &["grpc"], 1.0),
        ("postrider_events_stored_total", &[], 7.0),
        ("postrider_deliveries_queued_total", &[], 14.0),
        ("postrider_duplicates_total", &["event_id", "same"], 1.0),
        ("postrider_duplicates_total", &["event_id", "conflict"], 1.0),
        ("postrider_duplicates_total", &["idempotency_key", "same"], 1.0),
        (
            "postrider_duplicates_total",
            &["idempotency_key", "conflict"],
            0.0,
        ),
        ("postrider_attempts_total", &["accepted"], events),
        ("postrider_attempts_total", &["refused"], events),
        ("postrider_first_attempt_delay_seconds_count", &[], 2.0 * events),
        ("postrider_attempt_seconds_count", &[], 2.0 * events),
        ("postrider_delivery_seconds_count", &[], events),
        ("postrider_shards_owned", &[], 64.0),
        ("postrider_tail_missed_total", &[], 0.0),
        ("postrider_grpc_calls_total", &["\"emit\"", "ok"], 1.0),
        ("postrider_http_requests_total", &["emit", "4xx"], 1.0),
        ("postrider_http_requests_total", &["emit", "2xx"], 6.0),
    ] {
        assert_eq!(value(&told, name, labels), expected, "{name} {labels:?}\n{told}");
    }
    assert!(value(&told, "postrider_lease_renewals_total", &["renewed"]) >= 1.0);
    assert!(value(&told, "postrider_pool_connections", &[]) >= 2.0);
    assert!(value(&told, "postrider_emit_events_sum", &[]) >= 7.0);
    assert_eq!(value(&told, "postrider_build_info", &[]), 1.0);
    assert!(
        value(&told, "postrider_table_bytes", &["\"events\""]) > 8192.0,
        "{told}"
    );
    assert!(value(&told, "process_resident_memory_bytes", &[]) > 1e6, "{told}");
    assert!(
        value(&told, "process_open_fds", &[]) < value(&told, "process_max_fds", &[]),
        "{told}"
    );
    assert!(value(&told, "process_start_time_seconds", &[]) > 1.6e9, "{told}");
}

#[tokio::test]
async fn an_endpoint_that_hangs_is_told_apart_from_a_dispatcher_that_is_full() {
    let database = Database::fresh().await;
    let program = Postrider::start_with(&database, &[("POSTRIDER_MAX_IN_FLIGHT", "8")]).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Hold);
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({ "concurrency": 1 }))
        .await;
    for _ in 0..3 {
        let (status, told) = api
            .emit("acme", json!({ "type": "invoice.paid", "data": {} }))
            .await;
        assert!(status.is_success(), "{told}");
    }
    receiver.wait_for(1).await;
    let text = until("two wait for their endpoint", || async {
        let text = scrape(&program).await;
        let waits = value(&text, "postrider_deliveries_waiting", &[]) == 2.0
            && value(&text, "postrider_oldest_due_seconds", &["endpoint"]) > 0.0;
        waits.then_some(text)
    })
    .await;
    assert_eq!(value(&text, "postrider_in_flight", &[]), 1.0, "{text}");
    assert_eq!(value(&text, "postrider_bulkheads_full", &[]), 1.0, "{text}");
    assert_eq!(
        value(&text, "postrider_oldest_due_seconds", &["dispatcher"]),
        0.0,
        "{text}"
    );

    // Eight places and more endpoints than that: what is over waits for the dispatcher.
    for number in 0..12 {
        let url = receiver.url(&format!("/more/{number}"));
        api.endpoint("acme", &url, json!({ "concurrency": 1 })).await;
    }
    let (status, told) = api
        .emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    assert!(status.is_success(), "{told}");
    until("some wait for the dispatcher", || async {
        let text = scrape(&program).await;
        (value(&text, "postrider_oldest_due_seconds", &["dispatcher"]) > 0.0).then_some(())
    })
    .await;
    receiver.release();
    receiver.wait_for(3 + 13).await;
    until("nothing waits any more", || async {
        let text = scrape(&program).await;
        let left = value(&text, "postrider_oldest_due_seconds", &[])
            + value(&text, "postrider_deliveries_waiting", &[])
            + value(&text, "postrider_in_flight", &[]);
        (left == 0.0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_failed_attempt_is_one_line_of_the_log() {
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(503));
    for (filter, expected) in [
        ("info", &[3][..]),
        ("info,postrider_dispatcher::deliver::attempt=debug", &[1, 2, 3]),
    ] {
        let database = Database::fresh().await;
        let program = Postrider::start_with(
            &database,
            &[
                ("POSTRIDER_LOG", filter),
                ("POSTRIDER_RETRY_SCHEDULE", "0s,50ms,50ms"),
            ],
        )
        .await;
        let endpoint = program.api().acme(&receiver.url("/hook"), json!({})).await;
        let event = json!({ "type": "invoice.paid", "data": {} });
        let (status, emitted) = program.api().emit("acme", event).await;
        assert!(status.is_success(), "{emitted}");
        let dead = program.api().wait_for_state("acme", "dead", 1).await;
        let of_it = || -> Vec<Value> {
            program
                .log_lines()
                .iter()
                .filter_map(|line| serde_json::from_str::<Value>(line).ok())
                .filter(|line| line["event"] == emitted["id"])
                .collect()
        };
        let lines = until("the last one is told", || async {
            let lines = of_it();
            lines.iter().any(|line| line["attempt"] == 3).then_some(lines)
        })
        .await;
        let attempts: Vec<u64> = lines.iter().filter_map(|line| line["attempt"].as_u64()).collect();
        assert_eq!(attempts, expected, "{lines:?}");
        for line in &lines {
            assert_eq!(line["delivery"], dead[0]["id"], "{line}");
            assert_eq!(
                (&line["tenant"], &line["endpoint"]),
                (&json!("acme"), &json!(endpoint.id)),
                "{line}"
            );
            assert_eq!(
                (&line["outcome"], &line["status"]),
                (&json!("refused"), &json!(503)),
                "{line}"
            );
        }
    }
}

/// The endpoints of the opt-in metric, most failures first.
async fn top_failing(program: &Postrider) -> Vec<(String, f64)> {
    let text = scrape(program).await;
    let lines = text
        .lines()
        .filter_map(|line| line.strip_prefix("postrider_top_failing_attempts{"));
    lines
        .map(|line| {
            let (labels, value) = line.rsplit_once("} ").expect("a value");
            let endpoint = labels
                .split("endpoint=\"")
                .nth(1)
                .expect("an endpoint")
                .trim_end_matches('"');
            assert!(labels.starts_with("tenant=\"acme\","), "{line}");
            (endpoint.to_owned(), value.parse().expect("a number"))
        })
        .collect()
}

#[tokio::test]
async fn the_top_failing_endpoints_are_a_bounded_metric_that_an_operator_turns_on() {
    let database = Database::fresh().await;
    let settings = [
        ("POSTRIDER_METRICS_TOP_ENDPOINTS", "2"),
        ("POSTRIDER_RETRY_SCHEDULE", "0s"),
    ];
    let program = Postrider::start_with(&database, &settings).await;
    let (api, receiver) = (program.api(), Receiver::start().await);
    receiver.answer(Answer::Status(500));
    api.tenant("acme").await;
    let mut endpoints = Vec::new();
    for number in 1..=3 {
        let name = format!("type.t{number}");
        api.event_type(&name).await;
        let url = receiver.url(&format!("/{number}"));
        endpoints.push(api.endpoint("acme", &url, json!({ "types": [name] })).await.id);
        for _ in 0..number {
            api.emit("acme", json!({ "type": name, "data": {} })).await;
        }
    }
    api.wait_for_state("acme", "dead", 6).await;
    let pair = |number: usize| (endpoints[number - 1].clone(), number as f64);
    until("the two with the most are there", || async {
        (top_failing(&program).await == [pair(3), pair(2)]).then_some(())
    })
    .await;
    let path = format!("/tenants/acme/endpoints/{}", endpoints[2]);
    api.call(Method::DELETE, &path, None).await;
    until("one that is gone has no series any more", || async {
        (top_failing(&program).await == [pair(2), pair(1)]).then_some(())
    })
    .await;
    let other = Postrider::start(&database).await;
    assert!(top_failing(&other).await.is_empty(), "off by default");
}
