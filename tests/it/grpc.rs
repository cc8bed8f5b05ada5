//! Emitting over gRPC: the same keys, rules and refusals as over HTTP, and reflection for tools.

use std::net::SocketAddr;

use bytes::Bytes;
use postrider_dashboard::grpc::v1::{EmitBatchRequest, EmitRequest, Event, emitter_client::EmitterClient};
use reqwest::Method;
use serde_json::{Value, json};
use tonic::{Code, Request, Status, client::GrpcService, transport::Channel};

use crate::support::{ADMIN_API_KEY, Database, Postrider, Receiver, until};

async fn start(database: &Database) -> (Postrider, EmitterClient<Channel>, Channel) {
    let program = Postrider::start_with(database, &[("POSTRIDER_GRPC_LISTEN", "127.0.0.1:0")]).await;
    let address = until("the address of gRPC is told", || async {
        program.log_lines().iter().find_map(|line| {
            let line: Value = serde_json::from_str(line).ok()?;
            let is_ours = line["service"] == "grpc";
            is_ours.then(|| line["address"].as_str()?.parse::<SocketAddr>().ok())?
        })
    })
    .await;
    let channel = Channel::from_shared(format!("http://{address}"))
        .expect("a URL")
        .connect()
        .await
        .expect("connected");
    (program, EmitterClient::new(channel.clone()), channel)
}

fn event(id: Option<&str>, data: &str) -> Event {
    Event {
        r#type: "invoice.paid".to_owned(),
        data: data.to_owned(),
        id: id.map(str::to_owned),
        ..Event::default()
    }
}

fn emit(id: Option<&str>, data: &str) -> EmitRequest {
    EmitRequest {
        tenant: "acme".to_owned(),
        event: Some(event(id, data)),
    }
}

fn with_key<T>(message: T, key: &str) -> Request<T> {
    let mut request = Request::new(message);
    let value = format!("Bearer {key}").parse().expect("a value");
    request.metadata_mut().insert("authorization", value);
    request
}

fn problem(status: &Status) -> Value {
    let told = status
        .metadata()
        .get_bin("postrider-problem-bin")
        .expect("a problem");
    serde_json::from_slice(&told.to_bytes().expect("bytes")).expect("JSON")
}

#[tokio::test]
async fn events_emitted_over_grpc_arrive_with_their_bytes() {
    let database = Database::fresh().await;
    let (program, mut client, _) = start(&database).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    let data = r#"{ "b":1.0,"a":"\u0000" }"#;
    let emitted = client
        .emit(with_key(emit(Some("one"), data), ADMIN_API_KEY))
        .await
        .expect("emitted")
        .into_inner()
        .event
        .expect("an event");
    assert_eq!((emitted.id.as_str(), emitted.duplicate), ("one", false));
    assert!(
        receiver.wait_for(1).await[0]
            .body
            .ends_with(format!(",\"data\":{data}}}").as_bytes())
    );
    let again = client
        .emit(with_key(emit(Some("one"), data), ADMIN_API_KEY))
        .await;
    assert!(
        again
            .expect("emitted")
            .into_inner()
            .event
            .expect("an event")
            .duplicate
    );

    let batch = EmitBatchRequest {
        tenant: "acme".to_owned(),
        events: (0..100).map(|n| event(Some(&format!("b{n}")), "{}")).collect(),
    };
    let answer = client
        .emit_batch(with_key(batch, ADMIN_API_KEY))
        .await
        .expect("emitted");
    assert_eq!(answer.into_inner().events.len(), 100);

    let events: Vec<EmitRequest> = (0..300)
        .map(|n| match n % 100 {
            7 => emit(None, "[]"),
            _ => emit(Some(&format!("s{n}")), "{}"),
        })
        .collect();
    let stream = tokio_stream::iter(events);
    let answer = client
        .emit_stream(with_key(stream, ADMIN_API_KEY))
        .await
        .expect("taken");
    let answer = answer.into_inner();
    assert_eq!(answer.emitted, 297);
    let refused: Vec<(u64, u32)> = answer.refused.iter().map(|r| (r.index, r.status)).collect();
    assert_eq!(refused, [(7, 422), (107, 422), (207, 422)]);
    receiver.wait_for(1 + 100 + 297).await;
}

#[tokio::test]
async fn refusals_are_those_of_http() {
    let database = Database::fresh().await;
    let (program, mut client, _) = start(&database).await;
    let api = program.api();
    api.tenant("acme").await;
    let schema = json!({"schemas": {"v1": {"properties": {"n": {"type": "integer"}}}}});
    api.call(Method::PUT, "/event-types/invoice.paid", Some(schema))
        .await;
    let (_, tenant_key) = api
        .call(
            Method::POST,
            "/api-keys",
            Some(json!({"role": "tenant", "tenant": "acme", "name": "t"})),
        )
        .await;
    let tenant_key = tenant_key["key"].as_str().expect("a key").to_owned();
    let stranger = EmitRequest {
        tenant: "nobody".to_owned(),
        ..emit(None, "{}")
    };
    client
        .emit(with_key(emit(Some("used"), "{}"), ADMIN_API_KEY))
        .await
        .expect("emitted");
    for (request, key, code) in [
        (emit(None, "{}"), "wrong", Code::Unauthenticated),
        (emit(None, "{}"), tenant_key.as_str(), Code::PermissionDenied),
        (stranger, ADMIN_API_KEY, Code::NotFound),
        (emit(None, "{"), ADMIN_API_KEY, Code::InvalidArgument),
        (emit(None, r#"{"n":1e400}"#), ADMIN_API_KEY, Code::InvalidArgument),
        (emit(Some("with.dot"), "{}"), ADMIN_API_KEY, Code::InvalidArgument),
        (
            emit(Some("used"), r#"{"n":2}"#),
            ADMIN_API_KEY,
            Code::AlreadyExists,
        ),
        (EmitRequest::default(), ADMIN_API_KEY, Code::InvalidArgument),
    ] {
        let refused = client.emit(with_key(request, key)).await.expect_err("refused");
        assert_eq!(refused.code(), code, "{refused}");
    }
    let refused = client
        .emit(with_key(emit(None, r#"{"n":"x"}"#), ADMIN_API_KEY))
        .await
        .expect_err("refused");
    assert_eq!(problem(&refused)["errors"][0]["pointer"], "/data/n", "{refused}");

    let batch = EmitBatchRequest {
        tenant: "acme".to_owned(),
        events: vec![event(Some("good"), "{}"), event(None, r#"{"n":"x"}"#)],
    };
    let refused = client
        .emit_batch(with_key(batch, ADMIN_API_KEY))
        .await
        .expect_err("refused");
    assert_eq!(problem(&refused)["errors"][0]["pointer"], "/events/1/data/n");
    let list = api.get("/tenants/acme/events").await;
    assert_eq!(list["data"].as_array().map(Vec::len), Some(1), "{list}");
}

/// What no client library lets its caller send: bytes as they stand, in one frame.
async fn send_raw(channel: &Channel, method: &str, message: Vec<u8>) -> Status {
    use http_body_util::{BodyExt, Full};
    let mut frame = vec![0];
    frame.extend((message.len() as u32).to_be_bytes());
    frame.extend(message);
    let body = Full::new(Bytes::from(frame)).map_err(|never| match never {});
    let request = http::Request::post(format!("http://postrider/postrider.v1.Emitter/{method}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("authorization", format!("Bearer {ADMIN_API_KEY}"))
        .body(tonic::body::Body::new(body))
        .expect("a request");
    let mut channel = channel.clone();
    std::future::poll_fn(|context| GrpcService::<tonic::body::Body>::poll_ready(&mut channel, context))
        .await
        .expect("ready");
    let answer = GrpcService::call(&mut channel, request).await.expect("an answer");
    let (head, body) = answer.into_parts();
    let trailers = body
        .collect()
        .await
        .ok()
        .and_then(|body| body.trailers().cloned());
    Status::from_header_map(&head.headers)
        .or_else(|| Status::from_header_map(&trailers?))
        .expect("a status")
}

/// A field of a message: its number, how long it is, and what stands in it.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut message = vec![number << 3 | 2];
    let mut length = bytes.len();
    while length > 127 {
        message.push((length % 128 + 128) as u8);
        length /= 128;
    }
    message.push(length as u8);
    message.extend(bytes);
    message
}

#[tokio::test]
async fn messages_that_can_t_be_read_or_are_too_large_are_refused_like_everything_else() {
    let database = Database::fresh().await;
    let (program, mut client, channel) = start(&database).await;
    program.api().tenant("acme").await;
    program.api().event_type("invoice.paid").await;
    let data = field(2, b"{\"a\":\"\xff\"}");
    let inner = [field(1, b"invoice.paid"), data].concat();
    let request = [field(1, b"acme"), field(2, &inner)].concat();
    for method in ["Emit", "EmitBatch", "EmitStream"] {
        let refused = send_raw(&channel, method, request.clone()).await;
        assert_eq!(refused.code(), Code::InvalidArgument, "{method} {refused:?}");
        let told = problem(&refused);
        assert_eq!(told["status"], 400, "{told}");
        assert!(told["detail"].to_string().contains("UTF-8"), "{told}");

        let refused = send_raw(&channel, method, field(1, &vec![b'a'; 5 * 1024 * 1024])).await;
        assert_eq!(refused.code(), Code::InvalidArgument, "{method} {refused:?}");
        assert_eq!(problem(&refused)["status"], 413, "{refused:?}");
    }
    // A message of 10 MB, through a client.
    let large = EmitBatchRequest {
        tenant: "acme".to_owned(),
        events: vec![event(None, &format!("{{\"a\":\"{}\"}}", "x".repeat(10_000_000)))],
    };
    let refused = client
        .emit_batch(with_key(large, ADMIN_API_KEY))
        .await
        .expect_err("refused");
    assert_eq!(problem(&refused)["status"], 413, "{refused:?}");
    assert_eq!(program.api().get("/tenants/acme/events").await["data"], json!([]));
}

macro_rules! services_by_reflection {
    ($version:ident, $channel:expr) => {{
        use tonic_reflection::pb::$version::{
            ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
            server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
        };
        let asked = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::ListServices(String::new())),
        };
        let mut answers = ServerReflectionClient::new($channel)
            .server_reflection_info(tokio_stream::iter([asked]))
            .await
            .expect("an answer")
            .into_inner();
        let answer = answers.message().await.expect("read").expect("one");
        let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else {
            panic!("{answer:?}");
        };
        let names: Vec<String> = list.service.into_iter().map(|one| one.name).collect();
        names
    }};
}

#[tokio::test]
async fn tools_old_and_new_learn_the_service_by_reflection() {
    let database = Database::fresh().await;
    let (_program, _, channel) = start(&database).await;
    for names in [
        services_by_reflection!(v1, channel.clone()),
        services_by_reflection!(v1alpha, channel),
    ] {
        assert!(
            names.iter().any(|name| name == "postrider.v1.Emitter"),
            "{names:?}"
        );
    }
}
