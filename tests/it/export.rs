//! Deliveries and dead letters as streams, and dead letters in numbers.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::support::{ADMIN_API_KEY, Answer, Database, Postrider, Receiver, until};

#[tokio::test]
async fn deliveries_stream_as_ndjson_and_csv_and_dead_letters_are_counted_by_group() {
    const COUNT: usize = 1_300;
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    let emit = format!(
        "select postrider.emit('acme', 'invoice.paid', '{{}}', 'e' || n) from generate_series(1, {COUNT}) n"
    );
    receiver.answer(Answer::Status(410));
    database.execute(&emit).await;
    database.drained().await;

    let (status, text) = api
        .send_bytes(Method::GET, "/tenants/acme/deliveries?format=ndjson", Vec::new())
        .await;
    assert_eq!(status, StatusCode::OK);
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("a JSON line"))
        .collect();
    assert_eq!(lines.len(), COUNT);
    let page = api.get("/tenants/acme/deliveries?limit=2").await;
    assert_eq!(
        json!(lines[..2]),
        page["data"],
        "in the order and the form of the list"
    );

    let path = "/tenants/acme/deliveries?state=dead&format=csv";
    let (_, text) = api.send_bytes(Method::GET, path, Vec::new()).await;
    let mut rows = text.split("\r\n");
    assert!(
        rows.next()
            .is_some_and(|head| head.starts_with("id,event,type,endpoint,state,reason"))
    );
    let rows: Vec<&str> = rows.filter(|row| !row.is_empty()).collect();
    assert_eq!(rows.len(), COUNT);
    assert!(
        rows.iter()
            .all(|row| row.contains(",invoice.paid,") && row.contains(",dead,gone,"))
    );
    let none = "/tenants/acme/deliveries?state=pending&format=csv";
    assert_eq!(
        api.send_bytes(Method::GET, none, Vec::new())
            .await
            .1
            .lines()
            .count(),
        1
    );
    let wrong = "/tenants/acme/deliveries?format=xml";
    assert_eq!(
        api.call(Method::GET, wrong, None).await.0,
        StatusCode::BAD_REQUEST
    );

    for (path, count) in [
        ("/tenants/acme/deliveries?format=ndjson&limit=7", 7),
        ("/tenants/acme/deliveries?format=ndjson&limit=700", 700),
        ("/tenants/acme/dead-letters?format=ndjson", COUNT),
        ("/tenants/acme/dead-letters?format=ndjson&limit=3", 3),
        (
            "/tenants/acme/dead-letters?format=ndjson&reason=gone&type=invoice.paid&limit=2",
            2,
        ),
        ("/tenants/acme/dead-letters?format=ndjson&reason=exhausted", 0),
        ("/tenants/acme/dead-letters?format=ndjson&type=invoice.sent", 0),
        ("/tenants/acme/dead-letters?format=ndjson&endpoint=ep_none", 0),
        (
            "/tenants/acme/dead-letters?format=ndjson&until=2026-01-01T00:00:00Z",
            0,
        ),
        (
            "/tenants/acme/dead-letters?format=ndjson&since=2026-01-01T00:00:00Z&limit=4",
            4,
        ),
    ] {
        let (status, text) = api.send_bytes(Method::GET, path, Vec::new()).await;
        assert_eq!(status, StatusCode::OK, "{path}");
        assert_eq!(text.lines().count(), count, "{path}");
        assert!(
            text.lines().all(|line| line.contains(r#""state":"dead""#)),
            "{path}"
        );
    }
    let path = "/tenants/acme/dead-letters?format=csv&limit=5";
    let (_, text) = api.send_bytes(Method::GET, path, Vec::new()).await;
    assert_eq!(text.lines().count(), 1 + 5, "{text}");

    let groups = api.get("/tenants/acme/dead-letters").await;
    let group = &groups["data"][0];
    assert_eq!(groups["data"].as_array().map(Vec::len), Some(1), "{groups}");
    assert_eq!(
        (&group["endpoint"], &group["count"]),
        (&json!(endpoint.id), &json!(COUNT)),
        "{group}"
    );
    assert_eq!(
        (&group["type"], &group["reason"]),
        (&json!("invoice.paid"), &json!("gone")),
        "{group}"
    );
}

#[tokio::test]
async fn d5_an_export_is_a_file_and_never_a_page() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    program.api().tenant("acme").await;
    for (list, name) in [("deliveries", "deliveries"), ("dead-letters", "dead-letters")] {
        for (format, kind) in [
            ("csv", "text/csv; charset=utf-8"),
            ("ndjson", "application/x-ndjson"),
        ] {
            let path = format!("/v1/tenants/acme/{list}?format={format}");
            let request = crate::support::http_client()
                .build()
                .expect("a client")
                .get(program.url(&path))
                .bearer_auth(ADMIN_API_KEY);
            let answer = request.send().await.expect("an answer");
            let header = |name: &str| answer.headers()[name].to_str().expect("plain").to_owned();
            assert_eq!(answer.status(), StatusCode::OK, "{path}");
            assert_eq!(header("content-type"), kind, "{path}");
            let file = format!("attachment; filename=\"{name}.{format}\"");
            assert_eq!(header("content-disposition"), file, "{path}");
            assert_eq!(header("x-content-type-options"), "nosniff", "{path}");
        }
    }
}

/// Endpoint, type, reason and count of each group.
fn groups(page: &Value) -> Vec<(String, String, String, i64)> {
    let text = |group: &Value, name: &str| group[name].as_str().unwrap_or_default().to_owned();
    page["data"]
        .as_array()
        .unwrap_or_else(|| panic!("{page}"))
        .iter()
        .map(|group| {
            let count = group["count"].as_i64().unwrap_or_default();
            (
                text(group, "endpoint"),
                text(group, "type"),
                text(group, "reason"),
                count,
            )
        })
        .collect()
}

#[tokio::test]
async fn dead_letters_are_counted_by_what_is_asked_for_and_page_by_page() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let gone = api.acme(&receiver.url("/gone"), json!({})).await;
    api.event_type("invoice.sent").await;
    let failing = json!({ "retry_schedule": ["0s"] });
    let failing = api.endpoint("acme", &receiver.url("/failing"), failing).await;
    receiver.decide(|request| Answer::Status(if request.path == "/gone" { 410 } else { 500 }));
    for (kind, count) in [("paid", 3), ("sent", 2)] {
        let emit = format!(
            "select postrider.emit('acme', 'invoice.{kind}', '{{}}') from generate_series(1, {count})"
        );
        database.execute(&emit).await;
    }
    database.drained().await;
    let group = |endpoint: &str, kind: &str, reason: &str, count: i64| {
        (
            endpoint.to_owned(),
            format!("invoice.{kind}"),
            reason.to_owned(),
            count,
        )
    };
    let all = [
        group(&gone.id, "paid", "gone", 3),
        group(&failing.id, "paid", "exhausted", 3),
        group(&gone.id, "sent", "gone", 2),
        group(&failing.id, "sent", "exhausted", 2),
    ];
    let mut seen = Vec::new();
    let mut path = "/tenants/acme/dead-letters?limit=1".to_owned();
    loop {
        let page = api.get(&path).await;
        seen.extend(groups(&page));
        match page["next_cursor"].as_str() {
            Some(cursor) => path = format!("/tenants/acme/dead-letters?limit=1&cursor={cursor}"),
            None => break,
        }
    }
    assert_eq!(seen, all);
    for (query, expected) in [
        (format!("endpoint={}", gone.id), vec![&all[0], &all[2]]),
        ("reason=exhausted&type=invoice.sent".to_owned(), vec![&all[3]]),
        ("failure=500".to_owned(), vec![&all[1], &all[3]]),
        ("failure=timed_out".to_owned(), vec![]),
        ("type=invoice.none".to_owned(), vec![]),
        ("endpoint=ep_none".to_owned(), vec![]),
        (
            "since=2026-01-01T00:00:00Z&reason=gone".to_owned(),
            vec![&all[0], &all[2]],
        ),
        ("until=2026-01-01T00:00:00Z".to_owned(), vec![]),
    ] {
        let page = api.get(&format!("/tenants/acme/dead-letters?{query}")).await;
        assert_eq!(groups(&page).iter().collect::<Vec<_>>(), expected, "{query}");
    }
    for wrong in [
        "colour=red",
        "reason=bored",
        "failure=99",
        "limit=0",
        "since=yesterday",
        "cursor=x",
        "type=A",
    ] {
        let path = format!("/tenants/acme/dead-letters?{wrong}");
        let (status, problem) = api.call(Method::GET, &path, None).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{wrong}: {problem}");
    }
}

/// In KiB.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("our own child");
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().nth(1));
    number.and_then(|number| number.parse().ok()).expect("a number")
}

#[tokio::test]
async fn an_export_of_any_length_takes_no_more_memory_than_a_short_one() {
    const COUNT: usize = 50_000;
    // The stream is several times as long.
    const GROWTH_KIB_MAX: u64 = 32 * 1024;
    const ERROR_BYTES: usize = 3_000;
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    let endpoint = api.acme("http://127.0.0.1:9/hook", json!({})).await;
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    api.call(Method::PATCH, &path, Some(json!({ "enabled": false })))
        .await;
    let dead = format!(
        "select count(postrider.emit('acme', 'invoice.paid', '{{}}')) from generate_series(1, {COUNT});
         insert into postrider.attempts (event_id, endpoint_id, number, tenant_id, type_id, started_at, duration_ms,
             outcome, error, final)
         select event_id, endpoint_id, 1, tenant_id, type_id, clock_timestamp(), 1, 0, repeat('x', {ERROR_BYTES}), 'dead'
         from postrider.queue;
         insert into postrider.dead_letters (endpoint_id, event_id, tenant_id, type_id, reason, failure, attempt)
         select endpoint_id, event_id, tenant_id, type_id, 'exhausted', 4, 1 from postrider.queue;
         delete from postrider.queue;
         analyze postrider.events, postrider.attempts, postrider.dead_letters"
    );
    database.execute(&dead).await;
    let path = "/tenants/acme/dead-letters?format=";
    // What a short one takes is there from now on.
    let short = api.stream(&format!("{path}ndjson&limit=1000")).await;
    short.bytes().await.expect("read");
    let before = resident(program.pid());
    for (format, lines) in [("ndjson", COUNT), ("csv", COUNT + 1)] {
        let mut answer = api.stream(&format!("{path}{format}")).await;
        let (mut read, mut ends, mut most) = (0, 0, 0);
        while let Some(chunk) = answer.chunk().await.expect("whole") {
            read += chunk.len();
            ends += chunk.iter().filter(|byte| **byte == b'\n').count();
            most = most.max(resident(program.pid()));
        }
        assert_eq!(ends, lines, "{format}");
        assert!(read > COUNT * ERROR_BYTES, "{format}: {read}");
        let growth = most.saturating_sub(before);
        assert!(
            growth < GROWTH_KIB_MAX,
            "{format}: {growth} KiB more for {read} bytes"
        );
    }
}

/// Holds back every statement that reads attempts.
async fn hold_attempts(database: &Database) -> sqlx::PgConnection {
    let mut connection = database.connect().await;
    let lock = "begin; lock table postrider.attempts in access exclusive mode";
    sqlx::raw_sql(lock)
        .execute(&mut connection)
        .await
        .expect("locked");
    connection
}

#[tokio::test]
async fn an_export_whose_client_has_gone_stops() {
    // Twenty pages of which nothing matches, so that nothing is sent.
    const COUNT: usize = 40_000;
    // More statements than one page takes.
    const STATEMENTS: usize = 8;
    // As many as a tenant may have at once.
    const EXPORTS: usize = 2;
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    let endpoint = api.acme("http://127.0.0.1:9/hook", json!({})).await;
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    api.call(Method::PATCH, &path, Some(json!({ "enabled": false })))
        .await;
    let delivered = format!(
        "select count(postrider.emit('acme', 'invoice.paid', '{{}}')) from generate_series(1, {COUNT});
         insert into postrider.attempts (event_id, endpoint_id, number, tenant_id, type_id, started_at, duration_ms,
             outcome, status, final)
         select event_id, endpoint_id, 1, tenant_id, type_id, clock_timestamp(), 1, 1, 200, 'delivered'
         from postrider.queue;
         delete from postrider.queue;
         analyze postrider.events, postrider.attempts"
    );
    database.execute(&delivered).await;
    let export = "/tenants/acme/deliveries?format=ndjson&state=delivered&status_code=299";
    let mut holder = hold_attempts(&database).await;
    for _ in 0..EXPORTS {
        let answer = api.stream(export).await;
        assert_eq!(answer.status(), StatusCode::OK);
        drop(answer);
    }
    // One statement of each export after the other gets through between two locks.
    for _ in 0..STATEMENTS {
        let next = hold_attempts(&database);
        let waits = "select count(*) from pg_locks
            where relation = 'postrider.attempts'::regclass and mode = 'AccessExclusiveLock' and not granted";
        let pass = async {
            until("the next lock is waited for", || async {
                (database.count(waits).await == 1).then_some(())
            })
            .await;
            drop(holder);
        };
        (holder, ()) = tokio::join!(next, pass);
    }
    // While nothing can be read, the share is free again: nobody waits to read on.
    let again = until("another export is admitted", || async {
        let answer = api.stream(export).await;
        (answer.status() == StatusCode::OK).then_some(answer)
    })
    .await;
    drop(again);
    drop(holder);
}
