//! `postrider listen`: events on a machine that the server can't reach.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{ADMIN_API_KEY, Answer, Database, Postrider, Receiver, RunningTool, tool, until};

async fn emit(program: &Postrider, id: &str, type_name: &str) {
    let event = json!({"type": type_name, "data": {"note": "ü", "n": 1.0}, "id": id});
    let (status, answer) = program.api().emit("acme", event).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{answer}");
}

#[tokio::test]
async fn events_are_forwarded_with_the_bytes_and_signatures_that_receivers_verify() {
    let database = Database::fresh().await;
    // The receiver is on loopback, which this server may not call.
    let program = Postrider::start_with(&database, &[("POSTRIDER_ALLOW_NETWORKS", "10.9.9.0/24")]).await;
    program.api().tenant("acme").await;
    program.api().event_type("invoice.paid").await;
    program.api().event_type("other.thing").await;
    let receiver = Receiver::start().await;
    receiver.script([Answer::Status(204), Answer::Status(500)]);
    let url = receiver.url("/hook");
    let arguments = ["listen", "--forward-to", &url, "--types", "invoice.*", "--json"];
    let mut listening = RunningTool::start(&program, &arguments, &[]);
    let greeting = listening.json_line().await;
    let listener = &greeting["listener"];

    emit(&program, "e0", "other.thing").await;
    emit(&program, "e1", "invoice.paid").await;
    let first = listening.json_line().await;
    assert_eq!(
        (&first["event"], &first["status"], &first["type"]),
        (&json!("e1"), &json!(204), &json!("invoice.paid"))
    );
    let got = receiver.wait_for(1).await.remove(0);
    got.verify(listener["secret"].as_str().expect("a secret"))
        .expect("a good signature");
    assert_eq!((got.event_id(), got.path.as_str()), ("e1", "/hook"));
    assert!(got.header("user-agent").starts_with("Postrider/"));
    let stored: String = database
        .text("select convert_from(body, 'UTF8') from postrider.events where chosen_id = 'e1'")
        .await;
    assert_eq!(got.body, stored.as_bytes());

    // What the receiver makes of it is shown, and nothing is tried again.
    emit(&program, "e2", "invoice.paid").await;
    assert_eq!(listening.json_line().await["status"], 500);
    database.drained().await;
    assert_eq!(
        program.api().get("/tenants/acme/endpoints").await["data"],
        json!([])
    );
    assert_eq!(database.count("select count(*) from postrider.attempts").await, 0);

    assert_eq!(listening.stop().await, 0);
    assert_eq!(
        database.count("select count(*) from postrider.listeners").await,
        0
    );
    emit(&program, "e3", "invoice.paid").await;
    assert_eq!(database.count("select count(*) from postrider.queue").await, 0);
    assert_eq!(receiver.count(), 2);
}

#[tokio::test]
async fn a_listener_that_died_ends_and_its_number_is_bounded() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    program.api().tenant("acme").await;
    program.api().event_type("invoice.paid").await;
    let mut listening = RunningTool::start(
        &program,
        &["listen", "--forward-to", "http://127.0.0.1:1/", "--json"],
        &[("POSTRIDER_ENDPOINT_SECRET", "whsec_of_my_own_receiver_01234")],
    );
    let greeting = listening.json_line().await;
    assert_eq!(greeting["listener"]["secret"], "whsec_of_my_own_receiver_01234");
    emit(&program, "e1", "invoice.paid").await;
    let nobody = listening.json_line().await;
    assert!(
        nobody["status"] == Value::Null
            && nobody["error"]
                .as_str()
                .is_some_and(|e| e.contains("cannot connect to"))
    );
    listening.kill().await;
    emit(&program, "e2", "invoice.paid").await;

    // Time passes.
    let path = "/tenants/acme/listeners";
    until("the stream has ended", || async {
        database
            .execute("update postrider.listeners set expires_at = clock_timestamp() - interval '1 second'")
            .await;
        let (status, _) = program.api().call(Method::POST, path, None).await;
        assert_eq!(status, StatusCode::CREATED);
        (database.count("select count(*) from postrider.queue").await == 0).then_some(())
    })
    .await;
    // Only what is alive counts.
    for _ in 0..12 {
        program.api().call(Method::POST, path, None).await;
    }
    let (status, problem) = program.api().call(Method::POST, path, None).await;
    assert_eq!(status, StatusCode::CONFLICT, "{problem}");
    let (status, _) = program
        .api()
        .call(
            Method::GET,
            "/tenants/acme/listeners/lis_000000000000000000000000/requests",
            None,
        )
        .await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    for wrong in [
        json!({"types": []}),
        json!({"secret": "short"}),
        json!({"url": "http://a"}),
    ] {
        let (status, _) = program.api().call(Method::POST, path, Some(wrong)).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    }
}

#[tokio::test]
async fn a_server_that_stops_does_not_wait_for_those_who_listen() {
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    program.api().tenant("acme").await;
    let mut listening = RunningTool::start(
        &program,
        &["listen", "--forward-to", "http://127.0.0.1:1/", "--json"],
        &[],
    );
    listening.json_line().await;
    until("the listener is held", || async {
        let held = database
            .count("select count(*) from postrider.listeners where holder is not null")
            .await;
        (held == 1).then_some(())
    })
    .await;
    assert!(program.stop().await.success());
    let unsettled = tool(&program, &["events", "tail", "--no-follow", "--tenant", "acme"]).await;
    assert_eq!(unsettled.status, 1);
}

/// What a connection to a listener's stream has read when it is closed, or when `enough` is there.
async fn read_stream(stream: &mut tokio::net::TcpStream, enough: &str) -> String {
    let mut read = Vec::new();
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(1..) = stream
        .read(&mut buffer)
        .await
        .inspect(|n| read.extend_from_slice(&buffer[..*n]))
    {
        if String::from_utf8_lossy(&read).contains(enough) {
            break;
        }
    }
    String::from_utf8_lossy(&read).into_owned()
}

#[tokio::test]
async fn no_event_is_lost_when_the_server_stops_while_a_reader_is_slow() {
    const EVENTS: usize = 60;
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    program.api().tenant("acme").await;
    program.api().event_type("invoice.paid").await;
    let path = "/tenants/acme/listeners";
    let (status, listener) = program.api().call(Method::POST, path, None).await;
    assert_eq!(status, StatusCode::CREATED, "{listener}");
    let emitted = format!(
        "select postrider.emit('acme', 'invoice.paid', json_build_object('x', repeat('x', 200000))::text, 'event-' || n || '-')
         from generate_series(1, {EVENTS}) n"
    );
    database.execute(&emitted).await;
    let id = listener["id"].as_str().expect("an id").to_owned();
    let mut read = String::new();
    for round in 0..2 {
        let address = program.url("").replace("http://", "");
        let mut stream = tokio::net::TcpStream::connect(address.trim_end_matches('/'))
            .await
            .expect("connected");
        let head = format!(
            "GET /v1/tenants/acme/listeners/{id}/requests HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ADMIN_API_KEY}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.expect("asked");
        if round == 0 {
            // Nothing is read until the server can't write any more, but not for so long that it gives the reader up.
            stream.readable().await.expect("the first of them is there");
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            let (_, rest) = tokio::join!(program.stop(), read_stream(&mut stream, "no such text"));
            read += &rest;
            program.restart().await;
        } else {
            read += &read_stream(&mut stream, &format!("event-{EVENTS}-")).await;
        }
    }
    let lost: Vec<usize> = (1..=EVENTS)
        .filter(|n| !read.contains(&format!("event-{n}-")))
        .collect();
    assert!(lost.is_empty(), "lost {lost:?}");
}

#[tokio::test]
async fn one_tenant_does_not_take_every_listener_s_stream() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    let mut paths = Vec::new();
    for tenant in ["acme", "globex"] {
        api.tenant(tenant).await;
        let (status, made) = api
            .call(Method::POST, &format!("/tenants/{tenant}/listeners"), None)
            .await;
        assert_eq!(status, StatusCode::CREATED, "{made}");
        let id = made["id"].as_str().expect("an id");
        paths.push(format!("/tenants/{tenant}/listeners/{id}/requests"));
    }
    let mut held = Vec::new();
    for _ in 0..64 {
        held.push(api.stream(&paths[0]).await);
    }
    let refused = held.last().expect("one").status();
    assert_eq!(refused, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(api.stream(&paths[1]).await.status(), StatusCode::OK);
}
