//! The egress proxy: what is requested of it, and whose fault a failure is.

use super::*;

type Asked = Arc<std::sync::Mutex<Vec<String>>>;

/// A proxy that records requests and responds with this text; with 200 it tunnels everything.
async fn proxy(answer: &'static str) -> (SocketAddr, Asked) {
    let asked = Asked::default();
    let book = asked.clone();
    let address = listen(move |mut stream| {
        let book = book.clone();
        async move {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap_or(b'\n'));
            }
            let head = String::from_utf8(head).expect("ASCII");
            let to = head.split(' ').nth(1).expect("a target").to_owned();
            book.lock().expect("not poisoned").push(head);
            let _ = stream.write_all(answer.as_bytes()).await;
            if answer.contains(" 200 ") {
                let mut onward = TcpStream::connect(to).await.expect("connected");
                let _ = tokio::io::copy_bidirectional(&mut stream, &mut onward).await;
            }
        }
    })
    .await;
    (address, asked)
}

fn sender_by(proxy: &str) -> HttpSender {
    let mut guard = guard();
    guard.egress_proxy = Some(proxy.parse().expect("a proxy"));
    HttpSender::new(guard, AT_ONCE).expect("a sender")
}

#[tokio::test]
async fn requests_go_through_the_proxy_which_is_given_an_address_and_the_credentials() {
    let (proxy, asked) = proxy("HTTP/1.1 200 OK\r\nVia: x\r\n\r\n").await;
    let endpoint = answering("HTTP/1.1 204 No Content\r\n\r\n").await;
    let sender = sender_by(&format!("http://user:pass@{proxy}"));
    let outcome = post(&sender, &format!("http://{endpoint}/hook"), None).await;
    assert_eq!(outcome.status(), Some(204));
    let asked = asked.lock().expect("not poisoned").clone();
    let expected = format!(
        "CONNECT {endpoint} HTTP/1.1\r\nHost: {endpoint}\r\nProxy-Authorization: Basic dXNlcjpwYXNz\r\n\r\n"
    );
    assert_eq!(asked, [expected]);
}

#[tokio::test]
async fn the_guard_is_asked_before_the_proxy() {
    let (proxy, asked) = proxy("HTTP/1.1 200 OK\r\n\r\n").await;
    let sender = sender_by(&format!("http://{proxy}"));
    for target in [
        "http://10.0.0.1/",
        "http://169.254.169.254/",
        "http://[::1]:8080/",
        "http://[fd00::1]/",
    ] {
        let outcome = post(&sender, target, None).await;
        assert!(
            matches!(outcome, Outcome::Forbidden { .. }),
            "{target}: {outcome:?}"
        );
    }
    assert!(asked.lock().expect("not poisoned").is_empty());
}

#[tokio::test]
async fn a_fault_of_the_proxy_is_told_apart_from_one_of_the_endpoint() {
    let endpoint = answering("HTTP/1.1 204 No Content\r\n\r\n").await;
    for (answer, kind, words) in [
        (
            "HTTP/1.1 407 Proxy Authentication Required\r\n\r\n",
            OutcomeKind::ProxyFailed,
            "the egress proxy rejected the credentials (407)",
        ),
        (
            "HTTP/1.1 403 Forbidden\r\n\r\n",
            OutcomeKind::ConnectionFailed,
            "the egress proxy does not allow connections to the endpoint: it responded 403",
        ),
        (
            "HTTP/1.1 429 Too Many Requests\r\n\r\n",
            OutcomeKind::ProxyFailed,
            "the egress proxy refused with 429",
        ),
        (
            "HTTP/1.1 500 Internal Server Error\r\n\r\n",
            OutcomeKind::ProxyFailed,
            "the egress proxy refused with 500",
        ),
        (
            "nonsense\r\n\r\n",
            OutcomeKind::ProxyFailed,
            "the egress proxy does not speak HTTP",
        ),
        (
            "",
            OutcomeKind::ProxyFailed,
            "the egress proxy closed the connection",
        ),
        (
            "HTTP/1.1 502 Bad Gateway\r\n\r\n",
            OutcomeKind::ConnectionFailed,
            "the egress proxy could not connect to the endpoint: it responded 502",
        ),
    ] {
        let (proxy, _) = proxy(answer).await;
        let sender = sender_by(&format!("http://{proxy}"));
        let outcome = post(&sender, &format!("http://{endpoint}/"), None).await;
        assert_eq!(failure(outcome), (kind, words.to_owned()), "{answer}");
    }
    let gone = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let nobody = gone.local_addr().expect("bound");
    drop(gone);
    let outcome = post(
        &sender_by(&format!("http://{nobody}")),
        &format!("http://{endpoint}/"),
        None,
    )
    .await;
    let words = "the egress proxy is unreachable: connection refused".to_owned();
    assert_eq!(failure(outcome), (OutcomeKind::ProxyFailed, words));
}
