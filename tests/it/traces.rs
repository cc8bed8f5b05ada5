//! Traces: emit, wait and attempt are spans of the producer's trace, a real collector gets them by OTLP, and the receiver is
//! told where it is.

use std::net::SocketAddr;

use postrider_dashboard::grpc::v1::{EmitRequest, Event, emitter_client::EmitterClient};
use reqwest::Method;
use serde_json::{Value, json};
use tonic::{Request, transport::Channel};

use crate::support::{ADMIN_API_KEY, Answer, Database, Postrider, Receiver, until};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const SPAN: &str = "b7ad6b7169203331";
const STATE: &str = "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE";

/// A receiver that takes OTLP/JSON, and answers as a collector does.
struct Collector(Receiver);

impl Collector {
    async fn start() -> Self {
        let receiver = Receiver::start().await;
        receiver.answer(Answer::Body(200, "{}".to_owned()));
        Self(receiver)
    }

    fn url(&self) -> String {
        self.0.url("")
    }

    /// Every span so far, each with the resource it came from.
    fn spans(&self) -> Vec<Value> {
        let mut spans = Vec::new();
        for request in self.0.received() {
            assert_eq!(
                (request.method.as_str(), request.path.as_str()),
                ("POST", "/v1/traces")
            );
            assert_eq!(request.header("content-type"), "application/json");
            let body: Value = serde_json::from_slice(&request.body).expect("JSON");
            for resource in body["resourceSpans"].as_array().expect("resources") {
                let named = &resource["resource"]["attributes"][0];
                assert_eq!(
                    (&named["key"], &named["value"]["stringValue"]),
                    (&json!("service.name"), &json!("postrider"))
                );
                for scope in resource["scopeSpans"].as_array().expect("scopes") {
                    spans.extend(scope["spans"].as_array().expect("spans").iter().cloned());
                }
            }
        }
        spans
    }

    async fn wait_for(&self, trace: &str, name: &str, count: usize) -> Vec<Value> {
        until(&format!("{count} spans {name} of {trace}"), || async {
            let found: Vec<Value> = self
                .spans()
                .into_iter()
                .filter(|span| span["traceId"] == trace && span["name"] == name)
                .collect();
            (found.len() >= count).then_some(found)
        })
        .await
    }
}

fn attribute<'v>(span: &'v Value, key: &str) -> &'v Value {
    let found = span["attributes"]
        .as_array()
        .expect("attributes")
        .iter()
        .find(|one| one["key"] == key)
        .unwrap_or_else(|| panic!("no {key} in {span}"));
    found["value"]
        .as_object()
        .expect("a value")
        .values()
        .next()
        .expect("one")
}

fn lasts(span: &Value) -> bool {
    let at = |field: &str| -> u64 {
        let text = span[field].as_str().expect("a text");
        text.parse().expect("nanoseconds")
    };
    at("startTimeUnixNano") > 1_600_000_000_000_000_000 && at("startTimeUnixNano") <= at("endTimeUnixNano")
}

async fn emit(program: &Postrider, traceparent: Option<&str>, body: &Value) -> Value {
    let mut request = crate::support::http_client()
        .build()
        .expect("a client")
        .request(Method::POST, program.url("/v1/tenants/acme/events"))
        .bearer_auth(ADMIN_API_KEY)
        .header("content-type", "application/json")
        .body(body.to_string());
    if let Some(traceparent) = traceparent {
        request = request
            .header("traceparent", traceparent)
            .header("tracestate", STATE);
    }
    let answer = request.send().await.expect("an answer");
    assert!(answer.status().is_success(), "{}", answer.status());
    serde_json::from_str(&answer.text().await.expect("a body")).expect("JSON")
}

#[tokio::test]
async fn emit_and_attempts_are_spans_of_the_producers_trace_and_the_receiver_is_told() {
    let (database, collector) = (Database::fresh().await, Collector::start().await);
    let mut program = Postrider::start_with(
        &database,
        &[
            ("POSTRIDER_OTLP_ENDPOINT", &collector.url()),
            (
                "POSTRIDER_OTLP_HEADERS",
                "x-team=hooks, authorization=Bearer abc==",
            ),
            ("POSTRIDER_RETRY_SCHEDULE", "0s,100ms"),
        ],
    )
    .await;
    let receiver = Receiver::start().await;
    // The first attempt fails.
    receiver.script([Answer::Status(503)]);
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    let producer = format!("00-{TRACE}-{SPAN}-01");
    let event = json!({ "type": "invoice.paid", "data": {} });
    let emitted = emit(&program, Some(&producer), &event).await;

    let requests = receiver.wait_for(2).await;
    let told: Vec<&str> = requests.iter().map(|one| one.header("traceparent")).collect();
    for one in &requests {
        assert_eq!(one.header("tracestate"), STATE);
    }
    let attempts = collector.wait_for(TRACE, "attempt", 2).await;
    let waits = collector.wait_for(TRACE, "wait", 1).await;
    let emits = collector.wait_for(TRACE, "emit", 1).await;
    assert_eq!((emits.len(), waits.len(), attempts.len()), (1, 1, 2));
    assert_eq!(emits[0]["parentSpanId"], SPAN);
    assert_eq!(waits[0]["parentSpanId"], emits[0]["spanId"]);
    for (attempt, told) in attempts.iter().zip(&told) {
        assert_eq!(attempt["parentSpanId"], waits[0]["spanId"]);
        let id = attempt["spanId"].as_str().expect("an id");
        assert_eq!(*told, format!("00-{TRACE}-{id}-01"));
        assert_eq!(attribute(attempt, "messaging.message.id"), &emitted["id"]);
        assert_eq!(attribute(attempt, "server.address"), "127.0.0.1");
    }
    assert_eq!(attribute(&attempts[0], "http.response.status_code"), "503");
    assert_eq!(attempts[0]["status"]["code"], 2);
    assert_eq!(attribute(&attempts[1], "postrider.attempt"), "2");
    assert!(attempts[1].get("status").is_none(), "{}", attempts[1]);
    assert_eq!(attribute(&emits[0], "messaging.message.id"), &emitted["id"]);
    assert!(emits.iter().chain(&waits).chain(&attempts).all(lasts));
    let sent = &collector.0.received()[0];
    assert_eq!(
        (sent.header("x-team"), sent.header("authorization")),
        ("hooks", "Bearer abc==")
    );

    // What was told just before a stop is sent all the same.
    emit(&program, Some(&producer), &event).await;
    receiver.wait_for(3).await;
    program.api().wait_for_state("acme", "delivered", 2).await;
    assert!(program.stop().await.success());
    let last = collector.wait_for(TRACE, "attempt", 3).await;
    assert_eq!(last.len(), 3);
}

#[tokio::test]
async fn what_a_producer_does_not_sample_is_passed_on_and_not_sent() {
    let (database, collector) = (Database::fresh().await, Collector::start().await);
    let program = Postrider::start_with(&database, &[("POSTRIDER_OTLP_ENDPOINT", &collector.url())]).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    let event = json!({ "type": "invoice.paid", "data": {} });
    emit(&program, Some(&format!("00-{TRACE}-{SPAN}-00")), &event).await;
    let told = receiver.wait_for(1).await[0].header("traceparent").to_owned();
    assert!(
        told.starts_with(&format!("00-{TRACE}-")) && told.ends_with("-00"),
        "{told}"
    );
    assert!(!told.contains(SPAN), "the attempt has an id of its own: {told}");
    // One that is not of the form is as none: the emit begins a trace, which is sent after the others.
    emit(&program, Some("00-nonsense"), &event).await;
    let told = receiver.wait_for(2).await[1].header("traceparent").to_owned();
    let parts: Vec<&str> = told.split('-').collect();
    assert_eq!((parts[0], parts[3]), ("00", "01"));
    collector.wait_for(parts[1], "emit", 1).await;
    collector.wait_for(parts[1], "attempt", 1).await;
    assert!(
        collector.spans().iter().all(|span| span["traceId"] != TRACE),
        "nothing of an unsampled trace is told"
    );
}

#[tokio::test]
async fn sql_batches_and_grpc_have_their_traces_too() {
    let (database, collector) = (Database::fresh().await, Collector::start().await);
    let program = Postrider::start_with(
        &database,
        &[
            (
                "POSTRIDER_OTLP_ENDPOINT",
                &format!("{}/v1/traces", collector.url()),
            ),
            ("POSTRIDER_GRPC_LISTEN", "127.0.0.1:0"),
        ],
    )
    .await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;

    // Plain SQL: a trace whose id is the event's.
    let id = database
        .text("select postrider.emit('acme', 'invoice.paid', '{}')")
        .await;
    let trace = id.strip_prefix("evt_").expect("an id that was made").to_owned();
    let told = receiver.wait_for(1).await[0].header("traceparent").to_owned();
    assert!(told.starts_with(&format!("00-{trace}-")), "{told}");
    let root = collector.wait_for(&trace, "wait", 1).await;
    assert!(root[0].get("parentSpanId").is_none(), "{}", root[0]);
    assert_eq!(
        collector.wait_for(&trace, "attempt", 1).await[0]["parentSpanId"],
        root[0]["spanId"]
    );

    // SQL that carries the producer's.
    let emit_with_parent = format!(
        "select postrider.emit('acme', 'invoice.paid', '{{}}', ordering_key => 'k', traceparent => '00-{TRACE}-{SPAN}-01')"
    );
    database.execute(&emit_with_parent).await;
    let waits = collector.wait_for(TRACE, "wait", 1).await;
    assert_eq!(waits[0]["parentSpanId"], SPAN);
    collector.wait_for(TRACE, "attempt", 1).await;

    let emit_with_state = |state: &str| {
        format!(
            "select postrider.emit('acme', 'invoice.paid', '{{}}', traceparent => '00-{TRACE}-{SPAN}-01', \
             tracestate => '{state}')"
        )
    };
    database.execute(&emit_with_state(STATE)).await;
    assert_eq!(receiver.wait_for(3).await[2].header("tracestate"), STATE);
    // What is not of the form is left out, and the trace goes on.
    for (number, state) in ["nonsense", &"x".repeat(600), "a=1\u{e9}"].iter().enumerate() {
        database.execute(&emit_with_state(state)).await;
        let received = &receiver.wait_for(4 + number).await[3 + number];
        assert!(received.headers.get("tracestate").is_none());
        assert!(received.header("traceparent").contains(TRACE));
    }

    // A batch is one emit.
    let batch_trace = TRACE.replace("0af7", "1af7");
    let events: Vec<Value> = (0..3)
        .map(|_| json!({ "type": "invoice.paid", "data": {} }))
        .collect();
    let answer = crate::support::http_client()
        .build()
        .expect("a client")
        .post(program.url("/v1/tenants/acme/events/batch"))
        .bearer_auth(ADMIN_API_KEY)
        .header("content-type", "application/json")
        .header("traceparent", format!("00-{batch_trace}-{SPAN}-01"))
        .header("tracestate", "a=1")
        .header("tracestate", "b=2")
        .body(json!({ "events": events }).to_string())
        .send()
        .await
        .expect("an answer");
    assert_eq!(answer.status().as_u16(), 202);
    collector.wait_for(&batch_trace, "attempt", 3).await;
    let received = receiver.received();
    let of_batch = received
        .iter()
        .filter(|one| one.header("traceparent").contains(&batch_trace));
    assert!(of_batch.clone().count() >= 3);
    for one in of_batch {
        assert_eq!(one.header("tracestate"), "a=1,b=2");
    }
    let emits = collector.wait_for(&batch_trace, "emit", 1).await;
    assert_eq!(emits.len(), 1);
    assert_eq!(attribute(&emits[0], "messaging.batch.message_count"), "3");

    // gRPC has it in its metadata.
    let grpc_trace = TRACE.replace("0af7", "2af7");
    emit_over_grpc(&program, &format!("00-{grpc_trace}-{SPAN}-01")).await;
    let emits = collector.wait_for(&grpc_trace, "emit", 1).await;
    assert_eq!(attribute(&emits[0], "postrider.source"), "grpc");
    collector.wait_for(&grpc_trace, "attempt", 1).await;
    let received = receiver.received();
    let of_grpc = received
        .iter()
        .find(|one| one.header("traceparent").contains(&grpc_trace))
        .expect("it arrived");
    assert_eq!(of_grpc.header("tracestate"), STATE);
}

async fn emit_over_grpc(program: &Postrider, traceparent: &str) {
    let address = until("the address of gRPC is told", || async {
        program.log_lines().iter().find_map(|line| {
            let line: Value = serde_json::from_str(line).ok()?;
            let is_ours = line["service"] == "grpc";
            is_ours.then(|| line["address"].as_str()?.parse::<SocketAddr>().ok())?
        })
    })
    .await;
    let channel = Channel::from_shared(format!("http://{address}")).expect("a URL");
    let mut client = EmitterClient::new(channel.connect().await.expect("connected"));
    let mut request = Request::new(EmitRequest {
        tenant: "acme".to_owned(),
        event: Some(Event {
            r#type: "invoice.paid".to_owned(),
            data: "{}".to_owned(),
            ..Event::default()
        }),
    });
    for (name, value) in [
        ("authorization", format!("Bearer {ADMIN_API_KEY}")),
        ("traceparent", traceparent.to_owned()),
        ("tracestate", STATE.to_owned()),
    ] {
        request
            .metadata_mut()
            .insert(name, value.parse().expect("a value"));
    }
    client.emit(request).await.expect("emitted");
}

#[tokio::test]
async fn a_collector_that_refuses_costs_spans_and_nothing_else() {
    let (database, collector) = (Database::fresh().await, Collector::start().await);
    collector.0.answer(Answer::Status(400));
    let program = Postrider::start_with(&database, &[("POSTRIDER_OTLP_ENDPOINT", &collector.url())]).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    emit(&program, None, &json!({ "type": "invoice.paid", "data": {} })).await;
    program.api().wait_for_state("acme", "delivered", 1).await;
    until("the spans are given up and counted", || async {
        let answer = crate::support::http_client()
            .build()
            .expect("a client")
            .get(program.url("/metrics"))
            .bearer_auth(ADMIN_API_KEY);
        let text = answer.send().await.ok()?.text().await.ok()?;
        text.lines()
            .find_map(|line| line.strip_prefix("postrider_spans_total{result=\"dropped\"} "))
            .and_then(|count| count.parse::<u32>().ok())
            .filter(|count| *count == 3)
    })
    .await;
}

#[tokio::test]
async fn without_a_collector_nothing_is_passed_on_or_stored() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    let event = json!({ "type": "invoice.paid", "data": {} });
    emit(&program, Some(&format!("00-{TRACE}-{SPAN}-01")), &event).await;
    let received = receiver.wait_for(1).await;
    assert!(received[0].headers.get("traceparent").is_none());
    assert!(received[0].headers.get("tracestate").is_none());
    assert_eq!(database.count("select count(*) from postrider.traces").await, 0);
}

/// The headers for the collector hold its token: they must go nowhere else.
#[tokio::test]
async fn a_collector_s_redirect_is_not_followed() {
    let (database, collector) = (Database::fresh().await, Collector::start().await);
    let elsewhere = Collector::start().await;
    collector
        .0
        .answer(Answer::Redirect(format!("{}/v1/traces", elsewhere.url())));
    let settings = [
        ("POSTRIDER_OTLP_ENDPOINT", collector.url()),
        ("POSTRIDER_OTLP_HEADERS", "x-token=of-the-collector".to_owned()),
    ];
    let settings = settings.each_ref().map(|(name, value)| (*name, value.as_str()));
    let program = Postrider::start_with(&database, &settings).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    emit(&program, None, &json!({ "type": "invoice.paid", "data": {} })).await;
    collector.0.wait_for(1).await;
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    assert!(elsewhere.0.received().is_empty(), "it was sent on");
}
