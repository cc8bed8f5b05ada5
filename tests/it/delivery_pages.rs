//! Finding a delivery by what is known of it, and reading why it failed.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::event_pages::customer;
use crate::support::{ADMIN_API_KEY, Answer, Browser, Database, Person, Postrider, Receiver, until};

#[tokio::test]
async fn deliveries_are_found_by_each_filter_and_by_pages() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api
        .acme(&receiver.url("/hook"), json!({ "retry_schedule": ["0s"] }))
        .await;
    for n in 0..60 {
        api.emit(
            "acme",
            json!({ "id": format!("evt_ok_{n}"), "type": "invoice.paid", "data": {} }),
        )
        .await;
    }
    api.wait_for_state("acme", "delivered", 60).await;
    receiver.answer(Answer::Status(502));
    api.emit(
        "acme",
        json!({ "id": "evt_bad", "type": "invoice.paid", "data": {} }),
    )
    .await;
    let dead = api.wait_for_state("acme", "dead", 1).await;

    let mut person = Person::signed_in(&program).await;
    let id = &endpoint.id;
    for (query, finds) in [
        ("status_code=502", true),
        ("status_code=204", false),
        ("event=evt_bad", true),
        ("event=evt_ok_1", false),
        ("type=invoice.paid&state=dead", true),
        ("type=no.such", false),
        (&*format!("endpoint={id}&state=dead"), true),
        ("endpoint=ep_000000000000000000000000", false),
        ("within=15m", true),
        ("until=2020-01-01T00:00", false),
        ("tenant=nobody", false),
    ] {
        let (status, page) = person.visit(&format!("/deliveries?{query}")).await;
        assert_eq!(status, StatusCode::OK, "{query}");
        assert_eq!(page.contains(">evt_bad<"), finds, "{query}: {page}");
    }
    assert_eq!(
        person.visit("/deliveries?status_code=x").await.0,
        StatusCode::UNPROCESSABLE_ENTITY
    );
    assert_eq!(
        person.visit("/deliveries?since=tomorrow").await.0,
        StatusCode::UNPROCESSABLE_ENTITY
    );

    let (_, first) = person.visit("/deliveries?type=invoice.paid").await;
    let next = first.split("next\" href=\"").nth(1).expect("another page");
    let next = next.split('"').next().unwrap_or_default().replace("&#38;", "&");
    assert!(next.contains("type=invoice.paid"), "the filter stays: {next}");
    let (_, second) = person.visit(&next).await;
    assert!(
        second.contains(">evt_ok_0<") && !second.contains(">evt_bad<"),
        "{second}"
    );

    let path = format!("/deliveries/{}", dead[0]["id"].as_str().expect("an id"));
    let (_, page) = person.visit(&path).await;
    for part in [
        "502 Bad Gateway",
        "Webhook-Signature",
        "curl -sS -i -X POST",
        "The only attempt failed",
    ] {
        assert!(page.contains(part), "no {part} in {page}");
    }
    let event = page.split("href=\"/events/").nth(1).expect("a link to the event");
    let event = event.split('"').next().unwrap_or_default().to_owned();
    let (status, page) = person.visit(&format!("/events/{event}")).await;
    assert_eq!(status, StatusCode::OK);
    for part in ["evt_bad", "2026-01-15", "/hook", "&#34;data&#34;: {}", &event] {
        assert!(page.contains(part), "no {part} in {page}");
    }
    let (status, page) = person.visit("/events/evt_bad").await;
    assert_eq!(status, StatusCode::OK, "found by the id that was chosen, too");
    assert!(page.contains(&event), "{page}");
    assert_eq!(person.visit("/events/evt_none").await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn deliveries_are_found_by_kind_of_failure_and_number_of_attempts_and_exported() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.decide(|request| {
        Answer::Status(match request.path.split('?').next() {
            Some("/missing") => 404,
            Some("/broken") => 503,
            _ => 204,
        })
    });
    let api = program.api();
    let once = json!({ "retry_schedule": ["0s"] });
    api.acme(&receiver.url("/fine"), once.clone()).await;
    let missing = api
        .endpoint("acme", &receiver.url("/missing"), once.clone())
        .await;
    let thrice = json!({ "retry_schedule": ["0s", "10ms", "10ms"] });
    api.endpoint("acme", &receiver.url("/broken"), thrice).await;
    let plain = receiver.url("/plain").replace("http://", "https://");
    api.endpoint("acme", &plain, once).await;
    api.endpoint(
        "acme",
        &receiver.url("/missing?later"),
        json!({ "retry_schedule": ["0s", "1h"] }),
    )
    .await;
    api.tenant("globex").await;
    api.emit(
        "acme",
        json!({ "id": "evt_1", "type": "invoice.paid", "data": {} }),
    )
    .await;
    api.wait_for_state("acme", "delivered", 1).await;
    api.wait_for_state("acme", "dead", 3).await;
    until("one waits for its retry", || async {
        (database.count("select count(*) from postrider.retries").await == 1).then_some(())
    })
    .await;

    let mut person = Person::signed_in(&program).await;
    let paths = [
        "/fine\"",
        "/missing\"",
        "/broken\"",
        "/plain\"",
        "/missing?later\"",
    ];
    for (query, found) in [
        ("failure=4xx", [false, true, false, false, true]),
        ("failure=4xx&state=pending", [false, false, false, false, true]),
        ("failure=5xx", [false, false, true, false, false]),
        ("failure=tls", [false, false, false, true, false]),
        ("failure=dns", [false; 5]),
        ("failure=any&tenant=acme", [false, true, true, true, true]),
        ("failure=any&state=delivered", [false; 5]),
        ("attempts=2", [false, false, true, false, false]),
        ("attempts=1", [true; 5]),
        ("failure=any&tenant=globex", [false; 5]),
    ] {
        let (status, page) = person.visit(&format!("/deliveries?{query}")).await;
        assert_eq!(status, StatusCode::OK, "{query}");
        assert_eq!(paths.map(|path| page.contains(path)), found, "{query}: {page}");
    }
    for bad in ["failure=tsl", "attempts=0", "attempts=x"] {
        let (status, page) = person.visit(&format!("/deliveries?{bad}")).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{bad}");
        assert!(page.contains("aria-invalid"), "{bad}: {page}");
    }
    let (_, page) = person.visit("/deliveries?failure=any").await;
    for (format, lines) in [("csv", 5), ("ndjson", 4)] {
        let address = format!("/deliveries/export?failure=any&format={format}");
        assert!(page.contains(&address.replace('&', "&#38;")), "{page}");
        let (status, file) = person.visit(&address).await;
        assert_eq!((status, file.lines().count()), (StatusCode::OK, lines), "{file}");
    }
    let cookie = person.cookie();
    until("what the charts count leads to deliveries", || async {
        let mut person = Person::with_cookie(&program, &cookie);
        let (_, overview) = person.visit("/").await;
        let (_, page) = person.visit(&format!("/endpoints/{}", missing.id)).await;
        let links = [
            overview.contains("href=\"/deliveries?attempted_since="),
            overview.contains("&amp;failure=any&amp;attempted_since="),
            page.contains(&format!(
                "/deliveries?endpoint={}&amp;failure=4xx&amp;attempted_since=",
                missing.id
            )),
            page.contains(&format!(
                "/deliveries?endpoint={}&amp;attempted_since=",
                missing.id
            )),
        ];
        (links == [true; 4]).then_some(())
    })
    .await;
    assert_eq!(
        person.visit("/deliveries/export?format=xml").await.0,
        StatusCode::BAD_REQUEST
    );
    let mut customer = customer(&program, "globex").await;
    let (_, file) = customer
        .visit("/deliveries/export?format=ndjson&tenant=acme")
        .await;
    assert_eq!(file, "", "nothing of another tenant");
    let (_, page) = customer.visit("/deliveries?failure=any&tenant=acme").await;
    assert!(!page.contains("/missing"), "{page}");
}

/// With a trace, a custom header and a replay, so that every header there is occurs.
#[tokio::test]
async fn the_request_headers_shown_are_those_that_the_receiver_got() {
    let (database, collector) = (Database::fresh().await, Receiver::start().await);
    collector.answer(Answer::Body(200, "{}".to_owned()));
    let otlp = collector.url("");
    let program = Postrider::start_with(&database, &[("POSTRIDER_OTLP_ENDPOINT", &otlp)]).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({ "headers": { "X-Token": "abc" } }))
        .await;
    let emitted = reqwest::Client::new()
        .post(program.url("/v1/tenants/acme/events"))
        .bearer_auth(ADMIN_API_KEY)
        .header("content-type", "application/json")
        .header(
            "traceparent",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        )
        .header("tracestate", "rojo=00f067aa0ba902b7")
        .body(json!({ "type": "invoice.paid", "data": {} }).to_string())
        .send()
        .await
        .expect("a response");
    assert!(emitted.status().is_success(), "{}", emitted.status());
    let delivered = api.wait_for_state("acme", "delivered", 1).await;
    let id = delivered[0]["id"].as_str().expect("an id");
    let path = format!("/tenants/acme/deliveries/{id}");
    let (status, _) = api.call(Method::POST, &format!("{path}/replay"), None).await;
    assert_eq!(status, StatusCode::ACCEPTED);
    let requests = receiver.wait_for(2).await;
    let attempts = until("both attempts are recorded", || async {
        let attempts = api.get(&path).await["attempts"].as_array().cloned();
        attempts.filter(|attempts| attempts.len() == 2)
    })
    .await;
    let (_, page) = Person::signed_in(&program)
        .await
        .visit(&format!("/deliveries/{id}"))
        .await;
    // The newest attempt is the first.
    for (request, attempt) in requests.iter().rev().zip(&attempts) {
        let shown = attempt["request_headers"].as_object().expect("headers");
        assert_eq!(
            shown.len(),
            request.headers.len() - 2,
            "{shown:?} {:?}",
            request.headers
        );
        for (name, sent) in &request.headers {
            let found = shown
                .iter()
                .find(|(shown, _)| name.as_str().eq_ignore_ascii_case(shown));
            match name.as_str() {
                "host" | "content-length" => assert!(found.is_none(), "{name}"),
                "x-token" => assert_eq!(found.expect("a header").1, "[hidden]"),
                _ => {
                    let (name, value) = found.unwrap_or_else(|| panic!("no {name} in {shown:?}"));
                    assert_eq!(value, sent.to_str().expect("plain"), "{name}");
                    let line = format!("{name}: {}", value.as_str().expect("text"));
                    assert!(page.contains(&line), "no {line} in {page}");
                }
            }
        }
    }
    for name in ["accept", "traceparent", "tracestate", "webhook-replay"] {
        assert!(requests[1].headers.contains_key(name), "{name}");
    }
}

/// More accepted deliveries than a page looks through, made newer than all that is there.
const MANY_ACCEPTED: &str = "
    insert into postrider.attempts (event_id, endpoint_id, number, tenant_id, type_id, started_at, duration_ms, outcome,
        status, final)
    select (lpad(to_hex((extract(epoch from clock_timestamp()) * 1000)::bigint + 1000), 12, '0')
            || '70008000' || lpad(to_hex(n), 12, '0'))::uuid,
        a.endpoint_id, 1, a.tenant_id, a.type_id, clock_timestamp(), 1, a.outcome, 204, 'delivered'
    from (select * from postrider.attempts where status = 404 limit 1) a, generate_series(1, 12000) n";

#[tokio::test]
async fn a_rare_answer_is_found_however_much_was_accepted_since_and_a_long_search_says_how_far_it_came() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    receiver.answer(Answer::Status(404));
    api.acme(&receiver.url("/dies"), json!({ "retry_schedule": ["0s"] }))
        .await;
    api.endpoint(
        "acme",
        &receiver.url("/waits"),
        json!({ "retry_schedule": ["0s", "1h"] }),
    )
    .await;
    api.emit(
        "acme",
        json!({ "id": "evt_rare", "type": "invoice.paid", "data": {} }),
    )
    .await;
    api.wait_for_state("acme", "dead", 1).await;
    until("the other was tried once", || async {
        let tried = "select count(*) from postrider.retries";
        (database.count(tried).await == 1).then_some(())
    })
    .await;
    let schema = json!({ "type": "object" });
    let body = json!({ "schemas": { "2026-01-15": schema } });
    api.call(Method::PUT, "/event-types/invoice.void", Some(body))
        .await;
    database.execute(MANY_ACCEPTED).await;

    let mut person = Person::signed_in(&program).await;
    for (query, dies, waits) in [
        ("status_code=404", true, true),
        ("status_code=404&tenant=acme", true, true),
        ("status_code=404&state=dead", true, false),
        ("status_code=404&state=pending", false, true),
        ("status_code=404&state=delivered", false, false),
        ("status_code=404&type=invoice.paid", true, true),
        ("status_code=404&type=invoice.void", false, false),
        ("status_code=403", false, false),
        ("state=dead", true, false),
        ("state=pending", false, true),
    ] {
        let (_, page) = person.visit(&format!("/deliveries?{query}")).await;
        assert_eq!(page.contains("/dies"), dies, "{query}: {page}");
        assert_eq!(page.contains("/waits"), waits, "{query}: {page}");
    }

    let (_, page) = person.visit("/deliveries?status_code=202").await;
    assert!(
        page.contains("No matches so far") && page.contains("back to <time"),
        "{page}"
    );
    let mut page = page;
    let mut pages = 1;
    while let Some(next) = page.split("next\" href=\"").nth(1) {
        let next = next.split('"').next().unwrap_or_default().replace("&#38;", "&");
        page = person.visit(&next).await.1;
        pages += 1;
        assert!(pages < 20, "a search comes to an end");
    }
    assert!(page.contains("No matches") && pages > 1, "{page}");
}

/// More retries than one page examines, all of another kind and newer than the one that is asked for.
const MANY_WAITING: &str = "
    with new as (
        insert into postrider.events (id, tenant_id, type_id, schema_id, body)
        select postrider.uuid_at(clock_timestamp() + n * interval '1 ms'), tenant_id, type_id, schema_id, body
        from (select * from postrider.events limit 1) v, generate_series(1, 2500) n
        returning id, tenant_id, type_id),
    waiting as (
        insert into postrider.retries (endpoint_id, event_id, tenant_id, type_id, attempt, step, due_at)
        select e.id, new.id, new.tenant_id, new.type_id, 1, 1, clock_timestamp() + interval '1 hour'
        from new, postrider.endpoints e)
    insert into postrider.attempts (event_id, endpoint_id, number, tenant_id, type_id, started_at, duration_ms, outcome, status)
    select new.id, e.id, 1, new.tenant_id, new.type_id, clock_timestamp(), 1, 2, 503 from new, postrider.endpoints e";

#[tokio::test]
async fn a_kind_of_failure_that_only_lookups_tell_is_searched_for_and_found_further_back() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::HangUp);
    let api = program.api();
    let later = json!({ "retry_schedule": ["0s", "1h"] });
    api.acme(&receiver.url("/hook"), later).await;
    let event = json!({ "id": "evt_rare", "type": "invoice.paid", "data": {} });
    api.emit("acme", event).await;
    until("it was tried once", || async {
        let tried = "select count(*) from postrider.retries";
        (database.count(tried).await == 1).then_some(())
    })
    .await;
    database.execute(MANY_WAITING).await;
    let mut person = Person::signed_in(&program).await;
    let (_, page) = person.visit("/deliveries?failure=5xx").await;
    assert!(page.contains("/hook"), "{page}");
    let mut found = 0;
    for class in ["connection", "invalid_response"] {
        let (_, mut page) = person.visit(&format!("/deliveries?failure={class}")).await;
        assert!(page.contains("No matches so far"), "{page}");
        while let Some(next) = page.split("next\" href=\"").nth(1) {
            let next = next.split('"').next().unwrap_or_default().replace("&#38;", "&");
            page = person.visit(&next).await.1;
        }
        found += page.matches("title=\"evt_rare\"").count();
    }
    assert_eq!(found, 1, "in one of them, however far back");
}

#[tokio::test]
async fn what_customers_supply_is_text_on_every_page() {
    const HOSTILE: &str = "<script>alert(1)</script>";
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Body(400, format!("{HOSTILE}\r\n")));
    let api = program.api();
    let endpoint = api
        .acme(
            &receiver.url("/hook?x='\"><script>alert(1)</script>"),
            json!({ "retry_schedule": ["0s"], "description": HOSTILE }),
        )
        .await;
    api.emit(
        "acme",
        json!({ "id": "evt_bad", "type": "invoice.paid", "data": { "text": HOSTILE } }),
    )
    .await;
    let dead = api.wait_for_state("acme", "dead", 1).await;
    let delivery = dead[0]["id"].as_str().expect("an id");
    let mut person = Person::signed_in(&program).await;
    let (_, page) = person.visit(&format!("/deliveries/{delivery}")).await;
    let event = page.split("href=\"/events/").nth(1).expect("a link");
    let event = event.split('"').next().unwrap_or_default().to_owned();
    for path in [
        "/".to_owned(),
        "/deliveries".to_owned(),
        format!("/deliveries?type={HOSTILE}&tenant={HOSTILE}"),
        format!("/deliveries/{delivery}"),
        format!("/events/{event}"),
        "/endpoints".to_owned(),
        format!("/endpoints/{}", endpoint.id),
        format!("/endpoints/{}/settings", endpoint.id),
        format!("/endpoints/{}/secrets", endpoint.id),
        "/endpoints/rotations".to_owned(),
    ] {
        let (_, page) = person.visit(&path).await;
        assert!(!page.contains("<script>"), "{path}: {page}");
        assert!(!page.contains("javascript:"), "{path}");
    }
}

#[tokio::test]
async fn a_failed_delivery_says_what_to_do_how_many_failed_alike_and_what_was_cut() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({ "retry_schedule": ["0s"] }))
        .await;
    let other = json!({ "retry_schedule": ["0s"] });
    api.tenant("globex").await;
    api.endpoint("globex", &receiver.url("/other"), other).await;
    receiver.answer(Answer::Body(401, "x".repeat(5_000)));
    let long = "y".repeat(40_000);
    for (tenant, id) in [
        ("acme", "evt_1"),
        ("globex", "evt_other"),
        ("acme", "evt_2"),
        ("acme", "evt_3"),
    ] {
        let event = json!({ "id": id, "type": "invoice.paid", "data": { "long": long } });
        api.emit(tenant, event).await;
    }
    let dead = api.wait_for_state("acme", "dead", 3).await;
    api.wait_for_state("globex", "dead", 1).await;
    let id = |event: &str| {
        let found = dead.iter().find(|one| one["event"] == event).expect("it is dead");
        found["id"].as_str().expect("an id").to_owned()
    };
    let mut person = Person::signed_in(&program).await;
    let (_, page) = person.visit(&format!("/deliveries/{}", id("evt_2"))).await;
    for part in [
        "Check that it verifies signatures",
        "2 other deliveries of this endpoint failed the same way since",
        &format!("/signatures?delivery={}", id("evt_2")),
        &format!("href=\"/deliveries/{}\"", id("evt_1")),
        &format!("href=\"/deliveries/{}\"", id("evt_3")),
        "Only its first 4 KiB are stored",
        "Only the first 16 KiB are shown",
        "--data-binary @body.json",
    ] {
        assert!(page.contains(part), "no {part} in {page}");
    }
    assert!(page.len() < 80_000, "{} bytes", page.len());
    let body = page.split("/events/").find(|rest| rest.contains("/body\""));
    let body = body.and_then(|rest| rest.split('"').next()).expect("a download");
    let (status, bytes) = person.visit(&format!("/events/{body}")).await;
    assert_eq!(status, StatusCode::OK);
    let sent = receiver.received();
    let sent = sent.iter().find(|request| request.event_id() == "evt_2");
    assert_eq!(
        bytes.as_bytes(),
        sent.expect("it was sent").body,
        "the exact bytes"
    );
    let (_, page) = person.visit(&format!("/deliveries/{}", id("evt_1"))).await;
    assert!(!page.contains("Previous</a>") && page.contains("Next"), "{page}");
    let attempt = api
        .get(&format!("/tenants/acme/deliveries/{}", id("evt_1")))
        .await;
    assert_eq!(attempt["attempts"][0]["response_body_cut"], true, "{attempt}");
    let timing = &attempt["attempts"][0]["timing"];
    let address = timing["address"].as_str().expect("an address");
    assert!(receiver.url("").contains(address), "{timing}");
    assert!(timing["first_byte_ms"].is_i64(), "{timing}");
    assert!(page.contains(&format!("· address {address} ·")) && page.contains("first byte "));
}

#[tokio::test]
async fn an_attempt_shows_its_time_and_a_failed_one_where_it_went() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let schedule = json!({ "retry_schedule": ["0s", "10ms"] });
    api.acme(&receiver.url("/hook"), schedule).await;
    receiver.script([Answer::Status(500), Answer::Status(204)]);
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let delivered = api.wait_for_state("acme", "delivered", 1).await;
    let browser = Browser::start().await;
    browser.sign_in(&program).await;
    let page = format!("/deliveries/{}", delivered[0]["id"].as_str().expect("an id"));
    browser.open(&program.url(&page)).await;
    let told = "return [...document.querySelectorAll('.timeline li[data-key]')].map((one) => one.innerText)";
    let told = browser.script(told).await;
    let lines: Vec<&str> = told
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(Value::as_str)
        .collect();
    let line = |summary: &str| {
        let found = lines.iter().find(|line| line.contains(summary));
        *found.unwrap_or_else(|| panic!("no {summary} in {lines:?}"))
    };
    let (failed, succeeded) = (line("500 Internal Server Error"), line("204 No Content"));
    for part in ["Total ", "address 127.0.0.1:", "connect ", "first byte "] {
        assert!(failed.contains(part), "no {part} in {failed}");
    }
    for part in [
        "Total ",
        "address and phases are recorded for failed attempts only",
    ] {
        assert!(succeeded.contains(part), "no {part} in {succeeded}");
    }
    browser.close().await;
}

#[tokio::test]
async fn an_attempt_that_found_no_receiver_claims_no_request() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let once = json!({ "retry_schedule": ["0s"] });
    // The receiver does not speak TLS, and nobody listens at the other address.
    let tls = receiver.url("/plain").replace("http://", "https://");
    api.acme(&tls, once.clone()).await;
    api.endpoint("acme", "http://127.0.0.1:1/nobody", once).await;
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let mut person = Person::signed_in(&program).await;
    for one in api.wait_for_state("acme", "dead", 2).await {
        let id = one["id"].as_str().expect("an id");
        let whole = api.get(&format!("/tenants/acme/deliveries/{id}")).await;
        assert_eq!(whole["attempts"][0]["request_headers"], json!({}), "{whole}");
        let (_, page) = person.visit(&format!("/deliveries/{id}")).await;
        assert!(page.contains("no request was sent"), "{page}");
        for claim in ["Request headers", "Debug signature"] {
            assert!(!page.contains(claim), "{claim}: {page}");
        }
    }
    assert_eq!(receiver.count(), 0);
}
