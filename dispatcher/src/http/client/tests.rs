//! Misbehaving receivers on loopback, and the outcome of an attempt to each.

mod hostile;
mod proxied;
mod sockets;
mod tls;

use std::{net::SocketAddr, sync::Arc};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Mutex,
};

use super::*;
use crate::{http::headers::RequestHeaders, ownership::lease::Lease};

/// Timeout of each attempt in these tests.
const LIMIT: Duration = Duration::from_millis(400);

/// Concurrent requests.
const AT_ONCE: usize = 64;

fn headers() -> HeaderMap {
    let headers = RequestHeaders {
        event_id: "evt_1",
        unix_seconds: 1_700_000_000,
        signature: Some("t=1,v1=ab"),
        ..RequestHeaders::default()
    };
    headers.build()
}

/// The real guard with loopback allowed.
fn guard() -> Guard {
    Guard {
        allow_networks: vec!["127.0.0.0/8".parse().expect("a network")],
        allow_http: true,
        ..Guard::default()
    }
}

fn sender() -> HttpSender {
    HttpSender::new(guard(), AT_ONCE).expect("a sender")
}

/// A listener that passes each connection to the script. Its return value is kept, so connections it holds stay open.
async fn listen<F, T>(script: impl Fn(TcpStream) -> F + Send + 'static) -> SocketAddr
where
    F: Future<Output = T> + Send + 'static,
    T: Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let held = Arc::new(Mutex::new(Vec::new()));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (ended, held) = (script(stream), held.clone());
            tokio::spawn(async move {
                let kept = ended.await;
                held.lock().await.push(kept);
            });
        }
    });
    address
}

/// Reads the request, to the end of its two-byte body.
async fn read_request(stream: &mut (impl AsyncReadExt + Unpin)) -> String {
    let mut text = Vec::new();
    while !text.ends_with(b"\r\n\r\n{}") {
        match stream.read_u8().await {
            Ok(byte) => text.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8(text).expect("an ASCII request")
}

/// Reads the request and responds with exactly these bytes; the connection stays open.
async fn answering(bytes: impl AsRef<[u8]> + Clone + Send + Sync + 'static) -> SocketAddr {
    listen(move |mut stream| {
        let bytes = bytes.clone();
        async move {
            read_request(&mut stream).await;
            let _ = stream.write_all(bytes.as_ref()).await;
            stream
        }
    })
    .await
}

async fn post(sender: &HttpSender, url: &str, tls: Option<&TlsSettings>) -> Outcome {
    post_under(None, sender, url, tls).await
}

async fn post_under(
    permission: Option<SendPermission>,
    sender: &HttpSender,
    url: &str,
    tls: Option<&TlsSettings>,
) -> Outcome {
    let url = Url::parse(url).expect("a URL");
    let request = Request {
        url: &url,
        headers: headers(),
        body: Bytes::from_static(b"{}"),
        timeout: LIMIT,
        tls,
        permission,
    };
    // The timeout holds whatever the receiver does, with some margin for a busy machine.
    tokio::time::timeout(LIMIT * 10, sender.send(request))
        .await
        .expect("every attempt ends by its time limit")
        .expect("no fault of our own")
}

async fn post_to(address: SocketAddr) -> Outcome {
    post(&sender(), &format!("http://{address}/hook"), None).await
}

/// The kind and text of an attempt without a response.
fn failure(outcome: Outcome) -> (OutcomeKind, String) {
    match outcome {
        Outcome::Unreachable { kind, error } => (kind, error),
        other => panic!("it was answered: {other:?}"),
    }
}

#[tokio::test]
async fn nothing_goes_out_once_the_lease_is_over_and_the_next_request_does() {
    let (seen, mut bytes) = tokio::sync::mpsc::unbounded_channel();
    let address = listen(move |mut stream| {
        let seen = seen.clone();
        async move {
            let mut all = Vec::new();
            let mut buffer = [0; 1024];
            while let Ok(count @ 1..) = stream.read(&mut buffer).await {
                all.extend_from_slice(&buffer[..count]);
                if all.ends_with(b"{}") {
                    let _ = stream
                        .write_all(b"HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n")
                        .await;
                    break;
                }
            }
            let _ = seen.send(all);
            stream
        }
    })
    .await;
    let (sender, url) = (sender(), format!("http://{address}/hook"));
    // The process slept through the end of the term the request was started under, and has a new one.
    let (lease, now) = (Lease::new(), Instant::now());
    let over = lease.under(lease.extend_at(now, now).expect("a term"));
    let next = lease.extend_at(now, now + Duration::from_secs(60));
    let valid = lease.under(next.expect("the next"));
    let outcome = post_under(Some(over), &sender, &url, None).await;
    assert!(!outcome.is_success(), "{outcome:?}");
    assert_eq!(bytes.recv().await.expect("a connection"), b"", "not a byte");
    assert!(post_under(Some(valid), &sender, &url, None).await.is_success());
    assert!(!bytes.recv().await.expect("a connection").is_empty());
}
