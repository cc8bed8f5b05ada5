//! Emitting over gRPC: the same keys, rules and refusals as over HTTP, and reflection for tools.

use std::net::SocketAddr;

use postrider_dashboard::grpc::v1::{EmitBatchRequest, EmitRequest, Event, emitter_client::EmitterClient};
use reqwest::Method;
use serde_json::{Value, json};
use tonic::{Code, Request, Status, transport::Channel};

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

#[tokio::test]
async fn tools_learn_the_service_by_reflection() {
    use tonic_reflection::pb::v1::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };
    let database = Database::fresh().await;
    let (_program, _, channel) = start(&database).await;
    let asked = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut answers = ServerReflectionClient::new(channel)
        .server_reflection_info(tokio_stream::iter([asked]))
        .await
        .expect("an answer")
        .into_inner();
    let answer = answers.message().await.expect("read").expect("one");
    let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else {
        panic!("{answer:?}");
    };
    assert!(
        list.service.iter().any(|one| one.name == "postrider.v1.Emitter"),
        "{list:?}"
    );
}
