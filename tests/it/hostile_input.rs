//! What callers may send to the API by mistake or by intent: each gets a clear refusal, nothing gets a 5xx.

use reqwest::{Body, Client, Method, StatusCode};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{ADMIN_API_KEY, Database, Postrider, Receiver};

const EVENTS: &str = "/v1/tenants/acme/events";
const ENDPOINTS: &str = "/v1/tenants/acme/endpoints";

struct World {
    _database: Database,
    program: Postrider,
    receiver: Receiver,
    client: Client,
    endpoint: String,
}

impl World {
    async fn new() -> Self {
        let database = Database::fresh().await;
        let program = Postrider::start(&database).await;
        let receiver = Receiver::start().await;
        let made = program.api().acme(&receiver.url("/hook"), json!({})).await;
        Self {
            _database: database,
            program,
            receiver,
            client: crate::support::http_client().build().expect("a client"),
            endpoint: format!("{ENDPOINTS}/{}", made.id),
        }
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Body>,
    ) -> (StatusCode, String) {
        let mut request = self
            .client
            .request(method, self.program.url(path))
            .bearer_auth(ADMIN_API_KEY);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let answer = request.body(body).send().await.expect("an answer");
        let status = answer.status();
        let kind = answer.headers().get("content-type").cloned();
        let text = answer.text().await.expect("a body");
        if status.is_client_error() {
            assert_eq!(
                kind.as_ref().map(|kind| kind.as_bytes()),
                Some(b"application/problem+json".as_slice())
            );
            let problem: Value = serde_json::from_str(&text).expect("a problem");
            assert!(
                problem["detail"].as_str().is_some_and(|words| !words.is_empty()),
                "{problem}"
            );
        }
        (status, text)
    }

    async fn refuses(&self, what: &str, method: Method, path: &str, body: impl Into<Body>, expected: &[u16]) {
        let (status, text) = self.send(method, path, &[], body).await;
        let shown: String = text.chars().take(300).collect();
        assert!(expected.contains(&status.as_u16()), "{what}: {status} {shown}");
    }

    async fn refuses_header(&self, name: &str, value: &str) {
        let headers = json!({ "headers": { name: value } });
        let mut new = headers.clone();
        new["url"] = self.receiver.url("/x").into();
        let what = format!("{name:?}: {value:?}");
        self.refuses(&what, Method::POST, ENDPOINTS, new.to_string(), &[422])
            .await;
        self.refuses(&what, Method::PATCH, &self.endpoint, headers.to_string(), &[422])
            .await;
    }
}

fn event(data: &str) -> String {
    format!(r#"{{"type":"invoice.paid","data":{data}}}"#)
}

#[tokio::test]
async fn c1_to_c5_odd_json_is_kept_byte_for_byte_or_refused() {
    let world = World::new().await;
    let mut sent = 0;
    for (what, data) in [
        ("a NUL, escaped", r#"{"a":"\u0000"}"#),
        ("a key twice", r#"{"a":1,"a":2}"#),
        ("1.0 and spaces", "{ \"a\" : 1.0 }"),
        (
            "a very long number",
            r#"{"a":123456789012345678901234567890123456789012345678901234567890}"#,
        ),
        ("an empty key", r#"{"":""}"#),
    ] {
        let (status, text) = world.send(Method::POST, EVENTS, &[], event(data)).await;
        assert_eq!(status, StatusCode::ACCEPTED, "{what}: {text}");
        sent += 1;
        let received = world.receiver.wait_for(sent).await;
        let tail = format!(r#","data":{data}}}"#);
        assert!(received[sent - 1].body.ends_with(tail.as_bytes()), "{what}");
    }
    for (what, data) in [
        ("half a surrogate pair", r#"{"a":"\ud800"}"#.to_owned()),
        ("a number out of range", r#"{"a":1e131072}"#.to_owned()),
        ("100,000 brackets", "[".repeat(100_000)),
        (
            "100,000 brackets that close",
            format!("{{\"a\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000)),
        ),
        (
            "129 levels",
            format!("{{\"a\":{}{}}}", "[".repeat(129), "]".repeat(129)),
        ),
        ("a raw NUL", "{\"a\":\"\0\"}".to_owned()),
        ("a raw line end in a text", "{\"a\":\"\n\"}".to_owned()),
        ("NaN", r#"{"a":NaN}"#.to_owned()),
        ("a comment", "{} // x".to_owned()),
    ] {
        world
            .refuses(what, Method::POST, EVENTS, event(&data), &[400])
            .await;
    }
    world
        .refuses(
            "invalid UTF-8",
            Method::POST,
            EVENTS,
            b"{\"type\":\"invoice.paid\",\"data\":{\"a\":\"\xc3\x28\"}}".to_vec(),
            &[400],
        )
        .await;
}

#[tokio::test]
async fn c6_to_c8_too_much_is_refused_while_it_comes_in_and_packed_bodies_at_once() {
    let world = World::new().await;
    // Chunked, with no length, 40 MB: more than is ever read.
    let chunks = tokio_stream::iter((0..40).map(|_| Ok::<_, std::io::Error>(vec![b' '; 1_000_000])));
    let sent = world
        .client
        .post(world.program.url(EVENTS))
        .bearer_auth(ADMIN_API_KEY)
        .body(Body::wrap_stream(chunks))
        .send()
        .await;
    // The answer may come while we still write; then the connection is closed under us.
    if let Ok(answer) = sent {
        assert_eq!(answer.status(), StatusCode::PAYLOAD_TOO_LARGE);
    }
    for path in [EVENTS, ENDPOINTS, "/v1/api-keys", "/v1/tenants/acme/events/batch"] {
        let large = format!(r#"{{"x":"{}"}}"#, "y".repeat(5_000_000));
        world.refuses(path, Method::POST, path, large, &[413]).await;
    }
    for encoding in ["gzip", "br", "zstd", "deflate", "gzip, identity"] {
        for path in [EVENTS, ENDPOINTS] {
            let (status, text) = world
                .send(Method::POST, path, &[("content-encoding", encoding)], "{}")
                .await;
            assert_eq!(
                status,
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "{encoding} {path}: {text}"
            );
        }
    }
    let (status, _) = world.send(Method::POST, EVENTS, &[], event("{}")).await;
    assert_eq!(status, StatusCode::ACCEPTED, "and goes on");
}

#[tokio::test]
async fn c9_an_idempotency_key_must_be_short_visible_ascii() {
    let world = World::new().await;
    let long = "a".repeat(12_000);
    for key in ["", " ", long.as_str(), "a\tb"] {
        let (status, text) = world
            .send(Method::POST, EVENTS, &[("idempotency-key", key)], event("{}"))
            .await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{key:.10}: {text}");
    }
}

#[tokio::test]
async fn c12_header_values_that_would_change_the_request_are_refused_when_made_and_when_changed() {
    let world = World::new().await;
    for (name, value) in [
        ("X-A", "b\r\nHost: evil"),
        ("X-A", "b\nc"),
        ("X-A", "b\r"),
        ("X-A", "\u{0}"),
        ("X-A", "é"),
        ("X-A", " b"),
        ("X-A\r\nY", "b"),
        ("X A", "b"),
        ("", "b"),
        ("X-Long", &"a".repeat(2_000)),
    ] {
        world.refuses_header(name, value).await;
    }
}

#[tokio::test]
async fn c13_headers_that_are_ours_are_refused_when_made_and_when_changed() {
    let world = World::new().await;
    for (name, value) in [
        ("Host", "evil"),
        ("host", "evil"),
        ("Content-Length", "1"),
        ("Content-Type", "text/plain"),
        ("Content-Encoding", "gzip"),
        ("Transfer-Encoding", "chunked"),
        ("Connection", "close"),
        ("Keep-Alive", "x"),
        ("TE", "x"),
        ("Trailer", "x"),
        ("Upgrade", "x"),
        ("Expect", "100-continue"),
        ("Proxy-Authorization", "x"),
        ("Proxy-Connection", "x"),
        ("Webhook-Signature", "t=1,v1=x"),
        ("webhook-id", "x"),
        ("Webhook-Anything", "x"),
    ] {
        world.refuses_header(name, value).await;
    }
    let many: Value = (0..21)
        .map(|n| (format!("X-{n}"), Value::from("a")))
        .collect::<serde_json::Map<_, _>>()
        .into();
    world
        .refuses(
            "21",
            Method::PATCH,
            &world.endpoint,
            json!({ "headers": many }).to_string(),
            &[422],
        )
        .await;
    let good = json!({ "headers": { "Authorization": "Bearer x", "X-Own": "y z" } });
    let (status, text) = world
        .send(Method::PATCH, &world.endpoint, &[], good.to_string())
        .await;
    assert_eq!(status, StatusCode::OK, "{text}");
    assert!(!text.contains("Bearer x"), "values are not shown: {text}");
    world.send(Method::POST, EVENTS, &[], event("{}")).await;
    let received = world.receiver.wait_for(1).await;
    assert_eq!(
        (received[0].header("authorization"), received[0].header("x-own")),
        ("Bearer x", "y z")
    );
}

#[tokio::test]
async fn e7_a_new_host_gets_neither_the_old_one_s_headers_nor_its_answers() {
    let world = World::new().await;
    let with = json!({ "headers": { "Authorization": "Bearer of-the-old-host" } });
    world
        .send(Method::PATCH, &world.endpoint, &[], with.to_string())
        .await;
    let elsewhere = Receiver::start().await;
    let (status, text) = world
        .send(
            Method::PATCH,
            &world.endpoint,
            &[],
            json!({ "url": elsewhere.url("/x") }).to_string(),
        )
        .await;
    assert_eq!(status, StatusCode::OK, "{text}");
    world.send(Method::POST, EVENTS, &[], event("{}")).await;
    let received = elsewhere.wait_for(1).await;
    assert!(
        received[0].headers.get("authorization").is_none(),
        "{:?}",
        received[0].headers
    );
}

#[tokio::test]
async fn c14_a_tenant_in_the_body_is_no_tenant() {
    let world = World::new().await;
    for field in ["tenant", "tenant_id", "allow_private"] {
        let body = format!(r#"{{"type":"invoice.paid","data":{{}},"{field}":"globex"}}"#);
        world.refuses(field, Method::POST, EVENTS, body, &[422]).await;
        let body = json!({ "url": world.receiver.url("/x"), (field): true });
        world
            .refuses(field, Method::POST, ENDPOINTS, body.to_string(), &[422])
            .await;
        world
            .refuses(
                field,
                Method::PATCH,
                &world.endpoint,
                json!({ (field): true }).to_string(),
                &[422],
            )
            .await;
    }
}

#[tokio::test]
async fn c15_names_that_are_none_are_refused_wherever_they_stand() {
    let world = World::new().await;
    let long = "a".repeat(10_000);
    for bad in [
        long.as_str(),
        "a\u{0}",
        "a\u{7}b",
        "../etc",
        "a b",
        "",
        "a..b",
        "A.B",
        "é",
        "postrider.mine",
    ] {
        let body = json!({ "type": bad, "data": {} }).to_string();
        world.refuses(bad, Method::POST, EVENTS, body, &[400, 422]).await;
        let encoded: String = url::form_urlencoded::byte_serialize(bad.as_bytes()).collect();
        let path = format!("/v1/event-types/{}", encoded.replace('+', "%20"));
        let schemas = json!({ "schemas": { "2026-01-15": { "type": "object" } } }).to_string();
        world
            .refuses(bad, Method::PUT, &path, schemas, &[400, 404, 405, 414, 422])
            .await;
    }
    for bad in ["%2e%2e", "%00", "%ff", "a%2Fb", "-a", "a%20b", long.as_str()] {
        let path = format!("/v1/tenants/{bad}");
        world
            .refuses(bad, Method::PUT, &path, "{}", &[400, 404, 405, 414, 422])
            .await;
    }
}

#[tokio::test]
async fn c16_c18_pages_cursors_and_times_that_are_none_are_refused() {
    let world = World::new().await;
    let deliveries = "/v1/tenants/acme/deliveries";
    for query in [
        "limit=1000000000",
        "limit=0",
        "limit=-1",
        "limit=1e3",
        "limit=99999999999999999999999",
        "cursor=forged",
        "cursor=%00",
        "cursor=AAAAAAAAAAAAAAAAAAAAAAAAAAAA",
        "since=infinity",
        "since=-infinity",
        "since=292277-01-01T00:00:00Z",
        "since=%2B292277-01-01T00:00:00Z",
        "until=0000-00-00T00:00:00Z",
        "until=Mon,%2028%20May%202026%2010:00:00%20GMT",
        "until=2026-13-45T99:99:99Z",
        "state=nonsense",
        "status_code=9999",
        "type=../x",
        "unknown=1",
        "%00=1",
        "state=dead&state=dead",
    ] {
        world
            .refuses(query, Method::GET, &format!("{deliveries}?{query}"), "", &[400])
            .await;
    }
    for list in [
        EVENTS,
        ENDPOINTS,
        "/v1/tenants",
        "/v1/event-types",
        "/v1/api-keys",
        "/v1/audit",
    ] {
        for query in [
            "limit=0",
            "limit=1001",
            "cursor=forged!",
            "limit=1&limit=2",
            "cursor=%FF",
        ] {
            world
                .refuses(list, Method::GET, &format!("{list}?{query}"), "", &[400])
                .await;
        }
    }
    let long = "a".repeat(50_000);
    world
        .refuses(
            "a long cursor",
            Method::GET,
            &format!("{EVENTS}?cursor={long}"),
            "",
            &[400, 414, 431],
        )
        .await;
}

#[tokio::test]
async fn a44_a_public_endpoint_can_t_be_turned_inward() {
    let database = Database::fresh().await;
    let program = Postrider::start_with(&database, &[("POSTRIDER_ALLOW_NETWORKS", "")]).await;
    let api = program.api();
    let made = api.acme("https://example.com/hook", json!({})).await;
    let path = format!("/tenants/acme/endpoints/{}", made.id);
    for (url, reason) in [
        ("https://127.0.0.1/", "is not on the public internet"),
        (
            "https://[::ffff:169.254.169.254]/",
            "is not on the public internet",
        ),
        ("https://0x7f.1/", "is not on the public internet"),
        ("https://localhost/", "the host name"),
        ("https://u:p@example.com/", "user name or password"),
        ("https://example.com/#x", "fragment"),
        ("ftp://example.com/", "the scheme must be https"),
        ("javascript:alert(1)", "the scheme must be https"),
        ("https://example.com:5432/", "port 5432 is not allowed"),
        ("https://a..b.com/", "the host name"),
        ("https://exam\u{ad}ple.com:0/", "port 0 is not allowed"),
    ] {
        let (status, problem) = api.call(Method::PATCH, &path, Some(json!({ "url": url }))).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{url}: {problem}");
        assert_eq!(problem["errors"][0]["pointer"], "/url");
        assert!(
            problem["detail"]
                .as_str()
                .is_some_and(|words| words.contains(reason)),
            "{url}: {problem}"
        );
        let new = Some(json!({ "url": url }));
        let (status, _) = api.call(Method::POST, "/tenants/acme/endpoints", new).await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{url}");
    }
    assert_eq!(api.get(&path).await["url"], "https://example.com/hook");
}

#[tokio::test]
async fn b12_an_answer_that_is_no_text_is_stored_and_shown() {
    let world = World::new().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).await;
            let _ = stream
                .write_all(
                    b"HTTP/1.1 500 \xff\xfe\r\nX-Odd: \xff\r\nContent-Length: 7\r\n\r\na\0\xff\xed\xa0\x80b",
                )
                .await;
        }
    });
    let api = world.program.api();
    let more = json!({ "retry_schedule": ["0s"], "types": ["invoice.odd"] });
    api.event_type("invoice.odd").await;
    api.endpoint("acme", &format!("http://{address}/"), more).await;
    api.emit("acme", json!({ "type": "invoice.odd", "data": {} }))
        .await;
    let dead = api.wait_for_state("acme", "dead", 1).await;
    let id = dead[0]["id"].as_str().expect("an id");
    let shown = api.get(&format!("/tenants/acme/deliveries/{id}")).await;
    let attempts = shown["attempts"].as_array().expect("attempts");
    assert_eq!(attempts.len(), 1, "stored at once, not tried for ever: {shown}");
    assert!(
        attempts[0]["response_body"]
            .as_str()
            .is_some_and(|body| body.starts_with("a\0\u{fffd}")),
        "{shown}"
    );
}

#[tokio::test]
async fn what_the_description_does_not_have_is_refused() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let api = program.api();
    api.acme("http://127.0.0.1:9/hook", json!({})).await;
    for tls in [json!([]), json!([null, null]), json!("x")] {
        let body = json!({ "url": "https://127.0.0.1:9/hook", "tls": tls });
        let (status, problem) = api
            .call(Method::POST, "/tenants/acme/endpoints", Some(body))
            .await;
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
        assert_eq!(problem["errors"][0]["pointer"], "/tls", "{problem}");
    }
    let event = json!({ "type": "invoice.paid", "data": {} });
    for (method, path, body) in [
        (
            Method::POST,
            "/tenants/acme/events?dry_run=true",
            Some(event.clone()),
        ),
        (Method::GET, "/tenants/acme?full=1", None),
        (Method::DELETE, "/tenants/acme?force", None),
    ] {
        let (status, problem) = api.call(method, path, body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path}: {problem}");
        let detail = problem["detail"].as_str().expect("a sentence");
        assert!(detail.contains("This operation has none"), "{problem}");
    }
    let client = crate::support::http_client().build().expect("a client");
    let emit = || {
        client
            .post(program.url("/v1/tenants/acme/events"))
            .bearer_auth(crate::support::ADMIN_API_KEY)
            .body(event.to_string())
    };
    let status = async |request: reqwest::RequestBuilder| request.send().await.expect("an answer").status();
    for kind in ["text/plain", "application/json; charset=iso-8859-1"] {
        let answered = status(emit().header("content-type", kind)).await;
        assert_eq!(answered, StatusCode::UNSUPPORTED_MEDIA_TYPE, "{kind}");
    }
    assert_eq!(
        status(emit().header("authorization", "Bearer other")).await,
        StatusCode::BAD_REQUEST
    );
    assert_eq!(status(emit()).await, StatusCode::ACCEPTED);
}

/// Half a body, and then nothing: what comes back, until the connection is closed.
async fn send_half(program: &Postrider, head: &str) -> String {
    let address = program.url("").replace("http://", "");
    let mut stream = tokio::net::TcpStream::connect(address.trim_end_matches('/'))
        .await
        .expect("connected");
    stream.write_all(head.as_bytes()).await.expect("written");
    stream.write_all(b"{\"type\"").await.expect("written");
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(
        std::time::Duration::from_secs(40),
        stream.read_to_end(&mut answer),
    )
    .await;
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn a_body_that_does_not_come_is_the_client_s_fault_and_no_error_of_ours() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    program.api().tenant("acme").await;
    let head = |path: &str, kind: &str, more: &str| {
        format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ADMIN_API_KEY}\r\n\
             Content-Type: {kind}\r\nContent-Length: 100\r\n{more}\r\n"
        )
    };
    let (emit, keyed, form) = (
        head("/v1/tenants/acme/events", "application/json", ""),
        head(
            "/v1/tenants/acme/endpoints",
            "application/json",
            "Idempotency-Key: a\r\n",
        ),
        head("/sign-in", "application/x-www-form-urlencoded", ""),
    );
    let (emit, keyed, form) = tokio::join!(
        send_half(&program, &emit),
        send_half(&program, &keyed),
        send_half(&program, &form)
    );
    for answer in [&emit, &keyed] {
        assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
        assert!(
            answer.contains("urn:postrider:problem:request-timeout"),
            "{answer}"
        );
    }
    assert!(form.starts_with("HTTP/1.1 408 "), "{form}");
    for line in program.log_lines() {
        assert!(!line.contains("\"ERROR\""), "{line}");
    }
}
