//! The ceiling: the dispatcher's HTTP client, signing and sending the same bodies without a database, in its own process
//! like a dispatcher.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, ensure};
use bytes::Bytes;
use postrider_dispatcher::{
    guard::Guard,
    http::{
        client::{HttpSender, Request},
        headers::RequestHeaders,
    },
};
use postrider_proto::signature::{Secret, SignatureFormat, sign};

use crate::{BODY_DATA, NETWORK};

/// Prints how many attempts succeeded.
pub(super) async fn run(url: &str, concurrency: usize, seconds: u64) -> anyhow::Result<()> {
    let guard = Guard {
        allow_networks: vec![NETWORK.parse()?],
        allow_http: true,
        ..Guard::default()
    };
    let sender = HttpSender::new(guard, concurrency)?;
    let url: Arc<url::Url> = Arc::new(url.parse().context("invalid sink URL")?);
    let body = format!(
        r#"{{"id":"evt_01a1e2c3654778c4b6f0d0ac35589b02","type":"bench.ran","created_at":"2026-05-28T10:00:00.000Z","api_version":"2026-01-15","data":{BODY_DATA}}}"#
    );
    let body = Bytes::from(body);
    let secret = Secret::from_random(&[7; 32]);
    let sent = Arc::new(AtomicU64::new(0));
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..concurrency {
        let (sender, url, body, secret, sent) = (
            sender.clone(),
            url.clone(),
            body.clone(),
            secret.clone(),
            sent.clone(),
        );
        tasks.spawn(async move {
            while Instant::now() < end {
                let t = SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .map_or(0, |now| now.as_secs() as i64);
                let id = "evt_01a1e2c3654778c4b6f0d0ac35589b02";
                let signature = sign(SignatureFormat::TV1, id, t, &body, std::slice::from_ref(&secret));
                let headers = RequestHeaders {
                    event_id: id,
                    unix_seconds: t,
                    signature: Some(&signature),
                    ..RequestHeaders::default()
                };
                let request = Request {
                    url: &url,
                    headers: headers.build(),
                    body: body.clone(),
                    timeout: Duration::from_secs(10),
                    tls: None,
                    permission: None,
                };
                if sender
                    .send(request)
                    .await
                    .is_ok_and(|outcome| outcome.is_success())
                {
                    sent.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    }
    tasks.join_all().await;
    let sent = sent.load(Ordering::Relaxed);
    ensure!(sent > 0, "no request reached the sink");
    println!("{sent}");
    Ok(())
}
