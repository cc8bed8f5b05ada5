//! Hostile receivers, case by case.

use std::io::Write;

use postrider_proto::{Timing, limits::RESPONSE_KEPT_BYTES_MAX};

use super::*;

const TIMED_OUT: (OutcomeKind, &str) = (OutcomeKind::TimedOut, "no response within 400 ms");
const NOT_HTTP: (OutcomeKind, &str) = (OutcomeKind::InvalidResponse, "the response is not HTTP/1.1");
const TOO_LARGE: (OutcomeKind, &str) = (OutcomeKind::InvalidResponse, "the response headers are too large");
const CLOSED: (OutcomeKind, &str) = (
    OutcomeKind::InvalidResponse,
    "the connection was closed before a response was received",
);

async fn fails_with(address: SocketAddr, (kind, words): (OutcomeKind, &str), row: &str) {
    assert_eq!(failure(post_to(address).await), (kind, words.to_owned()), "{row}");
}

fn accepted(outcome: &Outcome) -> &postrider_proto::Response {
    match outcome {
        Outcome::Accepted {
            status: 200,
            response,
        } => response,
        other => panic!("not accepted: {other:?}"),
    }
}

#[tokio::test]
async fn b1_a_receiver_that_never_answers_is_given_up_at_the_time_limit() {
    let silent = listen(|stream| async move { stream }).await;
    fails_with(silent, TIMED_OUT, "never answers").await;
}

#[tokio::test]
async fn b2_headers_that_drip_are_given_up_at_the_time_limit() {
    let dripping = listen(|mut stream| async move {
        read_request(&mut stream).await;
        for byte in b"HTTP/1.1 200 OK\r\nX-A: b\r\n".iter().cycle() {
            if stream.write_all(&[*byte]).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    fails_with(dripping, TIMED_OUT, "drips").await;
}

#[tokio::test]
async fn b3_a_body_that_drips_is_cut_at_the_time_limit_and_the_status_counts() {
    let dripping = listen(|mut stream| async move {
        read_request(&mut stream).await;
        let _ = stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            .await;
        while stream.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let outcome = post_to(dripping).await;
    let body = &accepted(&outcome).body;
    assert!(!body.is_empty() && body.len() < 1000, "{}", body.len());
}

#[tokio::test]
async fn b4_of_a_body_without_end_little_is_read_and_less_kept() {
    let written = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = written.clone();
    let endless = listen(move |mut stream| {
        let counted = counted.clone();
        async move {
            read_request(&mut stream).await;
            let _ = stream
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n")
                .await;
            let chunk = [b'x'; 16 * 1024];
            while stream.write_all(&chunk).await.is_ok() {
                counted.fetch_add(chunk.len(), std::sync::atomic::Ordering::Relaxed);
            }
        }
    })
    .await;
    let began = Instant::now();
    let outcome = post_to(endless).await;
    assert_eq!(
        accepted(&outcome).body.len(),
        RESPONSE_KEPT_BYTES_MAX + 1,
        "with the byte that says that it was cut"
    );
    assert!(
        began.elapsed() < LIMIT,
        "it ends at the cap, not at the time limit"
    );
    // Plus what the system's buffers accepted.
    let written = written.load(std::sync::atomic::Ordering::Relaxed);
    assert!(written < 16 * 1024 * 1024, "{written}");
}

#[tokio::test]
async fn b5_a_packed_answer_is_not_unpacked_and_none_is_asked_for() {
    let mut packed = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 20\r\n\r\n".to_vec();
    packed.extend_from_slice(b"\x1f\x8b\x08\0\0\0\0\0\0\x03\x03\0\0\0\0\0\0\0\0\0");
    let asked = Arc::new(std::sync::Mutex::new(String::new()));
    let heard = asked.clone();
    let bomb = listen(move |mut stream| {
        let (packed, heard) = (packed.clone(), heard.clone());
        async move {
            *heard.lock().expect("not poisoned") = read_request(&mut stream).await;
            let _ = stream.write_all(&packed).await;
            stream
        }
    })
    .await;
    let outcome = post_to(bomb).await;
    assert!(accepted(&outcome).body.starts_with(b"\x1f\x8b"));
    let request = asked.lock().expect("not poisoned").to_lowercase();
    assert!(!request.contains("accept-encoding"), "{request}");
}

#[tokio::test]
async fn b6_headers_that_are_too_large_or_too_many_fail_the_attempt() {
    let mut long = b"HTTP/1.1 200 OK\r\nX-Long: ".to_vec();
    long.resize(1024 * 1024, b'a');
    long.extend_from_slice(b"\r\n\r\n");
    fails_with(answering(long).await, TOO_LARGE, "one header of 1 MB").await;

    let mut many = b"HTTP/1.1 200 OK\r\n".to_vec();
    for n in 0..100_000 {
        write!(many, "X-{n}: a\r\n").expect("written");
    }
    many.extend_from_slice(b"\r\n");
    fails_with(answering(many).await, TOO_LARGE, "100,000 headers").await;

    let mut some = b"HTTP/1.1 200 OK\r\n".to_vec();
    for n in 0..101 {
        write!(some, "X-{n}: a\r\n").expect("written");
    }
    some.extend_from_slice(b"\r\n");
    fails_with(answering(some).await, TOO_LARGE, "101 headers").await;
}

#[tokio::test]
async fn b7_informational_answers_without_end_are_given_up_at_the_time_limit() {
    let informing = listen(|mut stream| async move {
        read_request(&mut stream).await;
        while stream
            .write_all(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")
            .await
            .is_ok()
        {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    fails_with(informing, TIMED_OUT, "1xx for ever").await;
}

#[tokio::test]
async fn b8_http_2_is_not_spoken() {
    let frames = answering(*b"\x00\x00\x12\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x64").await;
    fails_with(frames, NOT_HTTP, "HTTP/2 frames").await;
}

#[tokio::test]
async fn b11_broken_framing_after_the_status_changes_nothing_and_before_it_fails() {
    for broken in [
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
    ] {
        let broken_off = listen(move |mut stream| async move {
            read_request(&mut stream).await;
            let _ = stream.write_all(broken.as_bytes()).await;
        })
        .await;
        accepted(&post_to(broken_off).await);
    }
    for (answer, expected) in [
        ("", CLOSED),
        ("HTTP/1.1 200 OK\r\nContent-Len", CLOSED),
        ("garbage\r\n\r\n", NOT_HTTP),
        ("HTTP/1.1 abc OK\r\n\r\n", NOT_HTTP),
        ("HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", NOT_HTTP),
        ("HTTP/1.1 200 OK\r\nBad Header\0: x\r\n\r\n", NOT_HTTP),
    ] {
        let broken_off = listen(move |mut stream| async move {
            read_request(&mut stream).await;
            let _ = stream.write_all(answer.as_bytes()).await;
        })
        .await;
        fails_with(broken_off, expected, answer).await;
    }
}

#[tokio::test]
async fn b11_a_reset_is_told_as_one_and_after_the_status_changes_nothing() {
    let reset_after = |answer: &'static str| {
        listen(move |mut stream| async move {
            read_request(&mut stream).await;
            let _ = stream.write_all(answer.as_bytes()).await;
            let _ = stream.set_zero_linger();
        })
    };
    let reset = (OutcomeKind::InvalidResponse, "the connection was reset");
    fails_with(reset_after("").await, reset, "reset before an answer").await;
    let after_status = reset_after("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort").await;
    // The system decides whether the status is read before the reset; either way the outcome is clear.
    match post_to(after_status).await {
        Outcome::Accepted { status: 200, .. } => {}
        Outcome::Unreachable { error, .. } => assert_eq!(error, reset.1),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn b12_bytes_that_are_no_text_are_kept_as_they_came() {
    let bytes = b"HTTP/1.1 200 OK\r\nX-Odd: \xff\xfe\r\nContent-Length: 4\r\n\r\n\0\xff\xed\xa0";
    let outcome = post_to(answering(*bytes).await).await;
    let answer = accepted(&outcome);
    assert_eq!(answer.body, b"\0\xff\xed\xa0");
    assert!(answer.head.contains("x-odd: \u{fffd}"), "{}", answer.head);
}

/// The receiver closes an idle connection at the moment it is reused for the next request.
#[tokio::test(flavor = "current_thread")]
async fn b13_a_request_on_a_connection_that_is_closed_is_not_sent_again() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let bell = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}/hook", listener.local_addr().expect("bound"));
    let mut rings = TcpStream::connect(bell.local_addr().expect("bound"))
        .await
        .expect("connected");
    let (close, closing) = std::sync::mpsc::channel::<()>();
    let (tell, told) = std::sync::mpsc::channel();
    let server = std::thread::spawn(move || {
        use std::io::Read;
        let answer = |stream: &mut std::net::TcpStream| {
            let mut request = Vec::new();
            let mut byte = [0];
            while !request.ends_with(b"\r\n\r\n{}") && stream.read(&mut byte).is_ok_and(|n| n == 1) {
                request.push(byte[0]);
            }
            stream
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                .expect("answered");
        };
        let (mut bell, _) = bell.accept().expect("rung");
        let (mut first, _) = listener.accept().expect("called");
        answer(&mut first);
        closing.recv().expect("told to close");
        drop(first);
        bell.write_all(b"x").expect("rung");
        tell.send(()).expect("heard");
        // A resent request would arrive here and get a response.
        let (mut second, _) = listener.accept().expect("called or ended");
        answer(&mut second);
    });
    let sender = sender();
    assert_eq!(post(&sender, &url, None).await.status(), Some(200));
    // Until the connection is idle.
    tokio::time::sleep(Duration::from_millis(50)).await;
    // Nothing runs here while it is closed and the bell is rung: both are noticed at once, and this task goes on first.
    close.send(()).expect("heard");
    told.recv().expect("closed");
    rings.read_u8().await.expect("the bell");
    let outcome = post(&sender, &url, None).await;
    assert_eq!(failure(outcome).0, OutcomeKind::InvalidResponse);
    assert!(!server.is_finished(), "it was sent again");
    // Lets the server end.
    assert_eq!(post(&sender, &url, None).await.status(), Some(200));
    server.join().expect("ended");
}

/// The check at the socket does not rely on the one before it.
#[tokio::test]
async fn an_address_in_the_url_is_checked_where_the_socket_is_made_too() {
    let reached = listen(|stream| async move { panic!("it was called: {stream:?}") }).await;
    let guard = Guard {
        allow_http: true,
        ..Guard::default()
    };
    let connector = Connector {
        guard: &guard,
        names: &Names::new().expect("name servers"),
        connections: &Connections::new(AT_ONCE),
        tls: Trust::of_machine()
            .config(&TlsSettings::default())
            .expect("a configuration"),
    };
    let port = reached.port();
    for host in [
        "127.0.0.1",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
    ] {
        let receiver = Receiver {
            https: false,
            host: host.to_owned(),
            port,
            tls: None,
        };
        match connector.connect(&receiver, &mut Timing::default()).await {
            Err(error) => assert!(
                error.to_string().ends_with("is not on the public internet"),
                "{error}"
            ),
            Ok(_) => panic!("{host} was connected to"),
        }
    }
}

#[tokio::test]
async fn a_redirect_is_an_answer_like_any_other() {
    let decoy = listen(|stream| async move { panic!("a redirect was followed: {stream:?}") }).await;
    for status in [
        "301 Moved",
        "302 Found",
        "303 See",
        "307 Temporary",
        "308 Permanent",
    ] {
        let answer = format!("HTTP/1.1 {status}\r\nLocation: http://{decoy}/\r\nContent-Length: 0\r\n\r\n");
        let outcome = post_to(answering(answer).await).await;
        assert_eq!(
            outcome.status().map(|s| s.to_string()).as_deref(),
            status.get(..3),
            "{outcome:?}"
        );
        assert!(!outcome.is_success());
    }
}

#[tokio::test]
async fn what_nobody_listens_at_is_told_as_connection_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    drop(listener);
    let refused = (OutcomeKind::ConnectionFailed, "connection refused");
    fails_with(address, refused, "nobody listens").await;
}

#[tokio::test]
async fn a_hostile_receiver_costs_a_healthy_one_nothing() {
    let sender = sender();
    let silent = listen(|stream| async move { stream }).await;
    let healthy = answering("HTTP/1.1 204 No Content\r\n\r\n").await;
    let mut hanging = tokio::task::JoinSet::new();
    for _ in 0..200 {
        let sender = sender.clone();
        hanging.spawn(async move { post(&sender, &format!("http://{silent}/"), None).await });
    }
    let outcome = post(&sender, &format!("http://{healthy}/"), None).await;
    assert_eq!(outcome.status(), Some(204));
    assert!(hanging.try_join_next().is_none(), "the others still hang");
}

#[tokio::test]
async fn settings_that_changed_since_the_url_was_saved_are_heeded() {
    let reached = listen(|stream| async move { panic!("it was called: {stream:?}") }).await;
    let closed = |change: fn(&mut Guard)| {
        let mut guard = guard();
        change(&mut guard);
        HttpSender::new(guard, AT_ONCE).expect("a sender")
    };
    for (sender, url, words) in [
        (
            closed(|guard| guard.allow_networks.clear()),
            format!("http://{reached}/"),
            "is not on the public internet",
        ),
        (
            closed(|guard| guard.deny_networks = vec!["127.0.0.1/32".parse().expect("a network")]),
            format!("http://{reached}/"),
            "is in a network denied by the operator",
        ),
        (
            closed(|guard| guard.allow_http = false),
            format!("http://{reached}/"),
            "the scheme must be https",
        ),
        (
            closed(|guard| guard.allow_networks.clear()),
            format!("http://[::ffff:127.0.0.1]:{}/", reached.port()),
            "is not on the public internet",
        ),
    ] {
        match post(&sender, &url, None).await {
            Outcome::Forbidden { error } => assert!(error.ends_with(words), "{error}"),
            other => panic!("{url}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a39_our_own_listeners_are_not_called_under_any_of_their_addresses() {
    let reached = listen(|stream| async move { panic!("it was called: {stream:?}") }).await;
    let everywhere = SocketAddr::from(([0, 0, 0, 0], reached.port()));
    for own in [reached, everywhere] {
        let mut guard = guard();
        guard.own_addresses = vec![own];
        let sender = HttpSender::new(guard, AT_ONCE).expect("a sender");
        for host in ["127.0.0.1", "[::ffff:127.0.0.1]"] {
            let outcome = post(&sender, &format!("http://{host}:{}/", reached.port()), None).await;
            assert!(
                matches!(outcome, Outcome::Forbidden { .. }),
                "{own} {host}: {outcome:?}"
            );
        }
    }
}
