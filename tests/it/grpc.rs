//! Emitting over gRPC: the same keys, rules and refusals as over HTTP, and reflection for tools.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use bytes::Bytes;
use postrider_dashboard::grpc::v1::{EmitBatchRequest, EmitRequest, Event, emitter_client::EmitterClient};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::{Instant, timeout},
};
use tonic::{
    Code, Request, Status,
    client::GrpcService,
    transport::{Channel, Endpoint},
};

use crate::support::{ADMIN_API_KEY, Database, Postrider, Receiver, until};

async fn start(database: &Database) -> (Postrider, EmitterClient<Channel>, Channel) {
    let (program, address) = listen(database).await;
    let channel = endpoint(address).connect().await.expect("connected");
    (program, EmitterClient::new(channel.clone()), channel)
}

fn endpoint(address: SocketAddr) -> Endpoint {
    Channel::from_shared(format!("http://{address}")).expect("a URL")
}

async fn listen(database: &Database) -> (Postrider, SocketAddr) {
    let program = Postrider::start_with(database, &[("POSTRIDER_GRPC_LISTEN", "127.0.0.1:0")]).await;
    let address = until("the address of gRPC is told", || async {
        program.log_lines().iter().find_map(|line| {
            let line: Value = serde_json::from_str(line).ok()?;
            let is_ours = line["service"] == "grpc";
            is_ours.then(|| line["address"].as_str()?.parse::<SocketAddr>().ok())?
        })
    })
    .await;
    (program, address)
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

/// A message with its length before it.
fn framed(message: &[u8]) -> Bytes {
    let mut frame = vec![0];
    frame.extend((message.len() as u32).to_be_bytes());
    frame.extend(message);
    frame.into()
}

fn raw_request(method: &str, body: tonic::body::Body) -> http::Request<tonic::body::Body> {
    http::Request::post(format!("http://postrider/postrider.v1.Emitter/{method}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(body)
        .expect("a request")
}

fn bearer() -> http::HeaderValue {
    format!("Bearer {ADMIN_API_KEY}").parse().expect("a value")
}

/// What no client library lets its caller send: bytes as they stand, in one frame.
async fn send_raw(channel: &Channel, method: &str, message: Vec<u8>) -> Status {
    use http_body_util::{BodyExt, Full};
    let body = Full::new(framed(&message)).map_err(|never| match never {});
    let mut request = raw_request(method, tonic::body::Body::new(body));
    request.headers_mut().insert("authorization", bearer());
    answer_to(channel, request).await.0
}

/// The status, and the answer's bytes where there are any.
async fn answer_to(channel: &Channel, request: http::Request<tonic::body::Body>) -> (Status, Bytes) {
    use http_body_util::BodyExt;
    let mut channel = channel.clone();
    std::future::poll_fn(|context| GrpcService::<tonic::body::Body>::poll_ready(&mut channel, context))
        .await
        .expect("ready");
    let answer = GrpcService::call(&mut channel, request).await.expect("an answer");
    let (head, body) = answer.into_parts();
    let body = body.collect().await.ok();
    let trailers = body.as_ref().and_then(|body| body.trailers().cloned());
    let status = Status::from_header_map(&head.headers)
        .or_else(|| Status::from_header_map(&trailers?))
        .expect("a status");
    (status, body.map(|body| body.to_bytes()).unwrap_or_default())
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

/// A body that never ends, and of which nothing comes but this.
fn endless(first: Bytes) -> tonic::body::Body {
    use http_body_util::StreamBody;
    use tokio_stream::StreamExt;
    let frames = tokio_stream::once(first).map(|bytes| Ok::<_, Status>(hyper::body::Frame::data(bytes)));
    tonic::body::Body::new(StreamBody::new(frames.chain(tokio_stream::pending())))
}

#[tokio::test]
async fn a_stranger_is_refused_before_a_message_is_read() {
    let database = Database::fresh().await;
    let (_program, _, channel) = start(&database).await;
    for method in ["Emit", "EmitBatch", "EmitStream"] {
        for key in [None, Some("Bearer wrong")] {
            let mut request = raw_request(method, endless(Bytes::from_static(&[0, 0, 64, 0, 0, 1, 2, 3])));
            if let Some(key) = key {
                let value = key.parse().expect("a value");
                request.headers_mut().insert("authorization", value);
            }
            let answered = timeout(Duration::from_secs(5), answer_to(&channel, request)).await;
            let (status, _) = answered.expect("it does not wait for the message");
            assert_eq!(status.code(), Code::Unauthenticated, "{method} {status:?}");
            assert_eq!(problem(&status)["status"], 401, "{status:?}");
        }
    }
}

/// Waits until the server has closed the connection.
async fn closed(stream: &mut TcpStream) {
    let mut bytes = [0; 1024];
    while stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {}
}

#[tokio::test]
async fn a_connection_that_says_nothing_is_closed() {
    let database = Database::fresh().await;
    let (_program, address) = listen(&database).await;
    let mut silent = TcpStream::connect(address).await.expect("connected");
    let mut half = TcpStream::connect(address).await.expect("connected");
    half.write_all(b"PRI * HTTP/2.0").await.expect("written");
    let both = async { tokio::join!(closed(&mut silent), closed(&mut half)) };
    timeout(Duration::from_secs(20), both)
        .await
        .expect("both are closed");
}

#[tokio::test]
async fn one_address_does_not_take_every_connection() {
    let database = Database::fresh().await;
    let (_program, address) = listen(&database).await;
    // As browsers and probes do, and then nothing: the preface and empty settings.
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let mut kept = Vec::new();
    let mut refused = 0;
    for _ in 0..600 {
        let mut stream = TcpStream::connect(address).await.expect("connected");
        let mut byte = [0];
        let answered = async {
            stream.write_all(preface).await?;
            stream.read(&mut byte).await
        };
        match answered.await {
            Ok(1) => kept.push(stream),
            _ => refused += 1,
        }
    }
    assert!(refused > 0, "{} are open", kept.len());
    let elsewhere = endpoint(address).local_address(Some(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2))));
    let channel = elsewhere.connect().await.expect("another address gets in");
    let status = EmitterClient::new(channel)
        .emit(with_key(emit(None, "{}"), ADMIN_API_KEY))
        .await
        .expect_err("there is no tenant");
    assert_eq!(status.code(), Code::NotFound, "{status}");
    let socket = TcpSocket::new_v4().expect("a socket");
    socket
        .bind("127.0.0.3:0".parse().expect("an address"))
        .expect("bound");
    drop(socket.connect(address).await.expect("connected"));
}

#[tokio::test]
async fn small_events_faster_than_they_are_stored_are_taken_whole_and_again_by_their_ids() {
    use http_body_util::StreamBody;
    use prost::Message;
    use tokio_stream::StreamExt;
    const EVENTS: usize = 8_000;
    let database = Database::fresh().await;
    let (program, mut client, channel) = start(&database).await;
    program.api().tenant("acme").await;
    program.api().event_type("invoice.paid").await;
    for round in 0..2 {
        // Each event in a frame of its own, as client libraries send what they are given one by one.
        let frames = (0..EVENTS).map(|n| emit(Some(&format!("e{n}")), r#"{"x":"aaaa"}"#).encode_to_vec());
        let frames = tokio_stream::iter(frames.map(|message| framed(&message)).collect::<Vec<_>>());
        let frames = frames.map(|bytes| Ok::<_, Status>(hyper::body::Frame::data(bytes)));
        let mut request = raw_request("EmitStream", tonic::body::Body::new(StreamBody::new(frames)));
        request.headers_mut().insert("authorization", bearer());
        let streaming = answer_to(&channel, request);
        let beside = async {
            let id = format!("beside{round}");
            client.emit(with_key(emit(Some(&id), "{}"), ADMIN_API_KEY)).await
        };
        let ((status, answer), beside) = tokio::join!(streaming, beside);
        assert_eq!(status.code(), Code::Ok, "round {round}: {status:?}");
        beside.expect("another call of the channel is not disturbed");
        // The field `emitted`, which is the first.
        let emitted = postrider_dashboard::grpc::v1::EmitStreamResponse::decode(answer.slice(5..));
        let emitted = emitted.expect("an answer");
        assert_eq!((emitted.emitted, emitted.refused.len()), (EVENTS as u64, 0));
    }
    let stored = database.count("select count(*) from postrider.events").await;
    assert_eq!(stored, EVENTS as i64 + 2);
}

#[tokio::test]
async fn a_deadline_that_passes_here_is_told_as_one() {
    use http_body_util::{BodyExt, Full};
    use prost::Message;
    let database = Database::fresh().await;
    let (program, address) = listen(&database).await;
    program.api().tenant("acme").await;
    program.api().event_type("invoice.paid").await;
    let mut holding = database.connect().await;
    for statement in [
        "begin",
        "select postrider.emit('acme', 'invoice.paid', '{}', ordering_key => 'k')",
    ] {
        sqlx::query(statement).execute(&mut holding).await.expect("held");
    }
    let mut held = emit(None, "{}");
    held.event.as_mut().expect("an event").ordering_key = Some("k".to_owned());
    let body = Full::new(framed(&held.encode_to_vec())).map_err(|never| match never {});
    let mut request = raw_request("Emit", tonic::body::Body::new(body));
    request.headers_mut().insert("authorization", bearer());
    let limit = "400m".parse().expect("a value");
    request.headers_mut().insert("grpc-timeout", limit);
    // A client that keeps no time itself.
    let stream = TcpStream::connect(address).await.expect("connected");
    let io = hyper_util::rt::TokioIo::new(stream);
    let client = hyper::client::conn::http2::handshake(hyper_util::rt::TokioExecutor::new(), io).await;
    let (mut client, connection) = client.expect("HTTP/2");
    tokio::spawn(connection);
    let began = Instant::now();
    let answer = client.send_request(request).await.expect("an answer");
    let status = Status::from_header_map(answer.headers()).expect("a status");
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_stream_with_too_many_refusals_ends_with_a_problem() {
    let database = Database::fresh().await;
    let (program, mut client, _) = start(&database).await;
    program.api().tenant("acme").await;
    program.api().event_type("invoice.paid").await;
    let events: Vec<EmitRequest> = (0..1_100).map(|_| emit(None, "[]")).collect();
    let refused = client
        .emit_stream(with_key(tokio_stream::iter(events), ADMIN_API_KEY))
        .await
        .expect_err("too many");
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
    assert_eq!(problem(&refused)["status"], 422, "{refused:?}");
}

#[tokio::test]
async fn an_emit_beyond_the_quota_is_rejected_with_the_time_to_wait() {
    let database = Database::fresh().await;
    let (program, mut client, _) = start(&database).await;
    program.api().tenant("acme").await;
    program.api().event_type("invoice.paid").await;
    let quota = Some(json!({ "stored_bytes": 1 }));
    let (status, told) = program
        .api()
        .call(Method::PUT, "/tenants/acme/quotas", quota)
        .await;
    assert!(status.is_success(), "{told}");
    let refused = client
        .emit(with_key(emit(Some("one"), "{}"), ADMIN_API_KEY))
        .await
        .expect_err("beyond the quota");
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert_eq!(
        problem(&refused)["type"],
        "urn:postrider:problem:storage-quota-exceeded"
    );
    let wait = refused.metadata().get("retry-after").expect("a time");
    assert_eq!(wait, "3600");
}
