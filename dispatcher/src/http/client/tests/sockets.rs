//! Every socket is counted: none leaks, and no idle connection keeps another from being opened.

use std::net::TcpListener as StdListener;

use super::*;

const FEW: usize = 4;
/// The permits of [`Connections`] for this many attempts.
const PERMITS: usize = FEW + 1;

fn few() -> HttpSender {
    HttpSender::new(guard(), FEW).expect("a sender")
}

/// Sockets are closed by separate tasks, a moment after their attempt.
async fn all_given_back(sender: &HttpSender, kept: usize) {
    let mut counts = sender.connections.counts();
    for _ in 0..200 {
        counts = sender.connections.counts();
        if counts == (kept, PERMITS - kept) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{counts:?} kept and free, expected {kept} and {}", PERMITS - kept);
}

/// Accepts nothing, so that new connections hang once its backlog is full.
fn unresponsive() -> (StdListener, SocketAddr) {
    let listener = StdListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    (listener, address)
}

async fn at_once(sender: &HttpSender, url: &str, count: usize) -> Vec<Outcome> {
    let mut running = tokio::task::JoinSet::new();
    for _ in 0..count {
        let (sender, url) = (sender.clone(), url.to_owned());
        running.spawn(async move { post(&sender, &url, None).await });
    }
    running.join_all().await
}

#[tokio::test]
async fn nothing_is_left_of_attempts_that_were_given_up() {
    let (_listener, address) = unresponsive();
    let (sender, url) = (few(), format!("http://{address}/hook"));
    for outcome in at_once(&sender, &url, FEW).await {
        assert_eq!(failure(outcome).0, OutcomeKind::TimedOut);
    }
    all_given_back(&sender, 0).await;
}

#[tokio::test]
async fn connections_that_are_kept_give_way_to_those_that_are_needed() {
    let sender = few();
    for _ in 0..3 * PERMITS {
        let answer = "HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n";
        let address = answering(answer).await;
        let outcome = post(&sender, &format!("http://{address}/hook"), None).await;
        assert!(outcome.is_success(), "{outcome:?}");
        let (kept, free) = sender.connections.counts();
        assert!(kept <= PERMITS && free <= PERMITS, "{kept} kept");
    }
    all_given_back(&sender, PERMITS).await;
}

#[tokio::test]
async fn more_requests_than_permits_go_one_after_the_other() {
    let answer = "HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n";
    let mut running = tokio::task::JoinSet::new();
    let sender = few();
    for _ in 0..5 * PERMITS {
        // A separate receiver for each: none can reuse a connection of another.
        let (sender, address) = (sender.clone(), answering(answer).await);
        running.spawn(async move { post(&sender, &format!("http://{address}/hook"), None).await });
    }
    for outcome in running.join_all().await {
        assert!(outcome.is_success(), "{outcome:?}");
    }
}

#[tokio::test]
async fn a_connection_is_used_again_when_its_answer_was_read_to_the_end() {
    let accepted = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let address = listen({
        let accepted = accepted.clone();
        move |mut stream| {
            accepted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            async move {
                loop {
                    if read_request(&mut stream).await.is_empty() {
                        return;
                    }
                    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
                    let _ = stream.write_all(answer).await;
                }
            }
        }
    })
    .await;
    let (sender, url) = (few(), format!("http://{address}/hook"));
    for _ in 0..10 {
        assert!(post(&sender, &url, None).await.is_success());
        all_given_back(&sender, 1).await;
    }
    assert_eq!(accepted.load(std::sync::atomic::Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_receiver_that_answers_early_and_takes_no_more_holds_no_socket() {
    let address = listen(|mut stream| async move {
        let _ = stream
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            .await;
        stream
    })
    .await;
    let sender = few();
    let url = Url::parse(&format!("http://{address}/hook")).expect("a URL");
    for _ in 0..2 * PERMITS {
        let request = Request {
            url: &url,
            headers: headers(),
            // More than the system buffers for a connection.
            body: Bytes::from(vec![b'x'; 32 * 1024 * 1024]),
            timeout: LIMIT,
            tls: None,
            permission: None,
        };
        let sent = tokio::time::timeout(LIMIT * 10, sender.send(request)).await;
        assert!(sent.is_ok_and(|outcome| outcome.is_ok()));
    }
    all_given_back(&sender, 0).await;
}

#[tokio::test]
async fn addresses_are_tried_one_after_the_other_when_there_are_no_sockets_to_spare() {
    let (_listener, unresponsive) = unresponsive();
    let reached = listen(|stream| async move { stream }).await;
    // The backlog of the first is full.
    let _filled: Vec<_> = (0..2)
        .map(|_| std::net::TcpStream::connect_timeout(&unresponsive, Duration::from_millis(50)))
        .collect();
    let sender = few();
    let connector = sender.connector(None).expect("settings");
    let _extra = sender.connections.extra_permit().expect("the only one");
    let began = Instant::now();
    let connected = connector.first_to_connect(vec![unresponsive, reached]).await;
    assert!(connected.is_ok());
    assert!(began.elapsed() < Duration::from_secs(5));
}
