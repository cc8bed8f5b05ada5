//! The receiver of the benchmark: a minimal HTTP server, in its own process so that its CPU time is measured separately.
//! It reads the time of the emit from the event id, which is all it needs to measure a latency.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
};

/// Latencies kept per group: enough for a meaningful p99.
const LATENCIES_MAX: usize = 1_000_000;
/// The group of all replays.
pub(super) const REPLAYED: &str = "replayed";
const RESPONSE: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// What one group of endpoints received.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Received {
    pub(super) count: u64,
    /// Unix time of the latest arrival.
    pub(super) last_us: u64,
    pub(super) p50_ms: f64,
    pub(super) p95_ms: f64,
    pub(super) p99_ms: f64,
}

#[derive(Default)]
struct Group {
    count: u64,
    last_us: u64,
    latencies_us: Vec<u32>,
}

/// Thousands of connections begin at once. With a shorter queue the kernel drops some, and they are tried again a second
/// later: the last arrival would show that second.
const BACKLOG: u32 = 4_096;

type Groups = Arc<Mutex<BTreeMap<String, Group>>>;

pub(super) async fn run() -> anyhow::Result<()> {
    let listener = listen().context("the sink cannot listen")?;
    println!("{}", listener.local_addr()?.port());
    let groups = Groups::default();
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        tokio::spawn(serve(stream, groups.clone()));
    }
}

fn listen() -> std::io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
    socket.listen(BACKLOG)
}

async fn serve(mut stream: TcpStream, groups: Groups) {
    let mut buffer = Vec::with_capacity(4096);
    loop {
        let Some(request) = read_request(&mut stream, &mut buffer).await else {
            return;
        };
        let written = match request.path.as_str() {
            "/stats" => {
                let received = each(&groups, Group::received);
                respond_with_json(&mut stream, &received).await
            }
            // For frequent polls: does not sort the latencies.
            "/counts" => {
                let counts = each(&groups, |group| group.count);
                respond_with_json(&mut stream, &counts).await
            }
            "/reset" => {
                locked(&groups).clear();
                stream.write_all(RESPONSE).await
            }
            path => {
                note(&groups, path, request.emitted_us, request.replayed);
                match wait_of(path) {
                    Some(wait) => tokio::time::sleep(wait).await,
                    None => std::future::pending().await,
                }
                stream.write_all(RESPONSE).await
            }
        };
        if written.is_err() {
            return;
        }
    }
}

struct Request {
    path: String,
    emitted_us: Option<u64>,
    replayed: bool,
}

async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<Request> {
    let end = loop {
        if let Some(at) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
            break at + 4;
        }
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    };
    let head = std::str::from_utf8(&buffer[..end]).ok()?;
    let path = head.split(' ').nth(1)?.to_owned();
    let mut length = 0;
    let mut emitted_us = None;
    let mut replayed = false;
    for line in head.lines() {
        if let Some(value) = line.strip_prefix("content-length: ") {
            length = value.parse().ok()?;
        } else if let Some(value) = line
            .strip_prefix("webhook-id: evt_")
            .or_else(|| line.strip_prefix("webhook-id: own_"))
        {
            emitted_us = time_of(value);
        } else if line.starts_with("webhook-replay: ") {
            replayed = true;
        }
    }
    while buffer.len() < end + length {
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
    buffer.drain(..end + length);
    Some(Request {
        path,
        emitted_us,
        replayed,
    })
}

/// The microseconds in an event's id: 48 bits of milliseconds, and 12 bits that divide one.
fn time_of(hex: &str) -> Option<u64> {
    let head = u64::from_str_radix(hex.get(..16)?, 16).ok()?;
    Some((head >> 16) * 1000 + (head & 0xfff) * 1000 / 4096)
}

/// `/fast/GROUP`, `/slow/MILLISECONDS/GROUP`, `/hang/GROUP`.
fn wait_of(path: &str) -> Option<Duration> {
    let mut parts = path.split('/').skip(1);
    match parts.next()? {
        "hang" => None,
        "slow" => Some(Duration::from_millis(parts.next()?.parse().ok()?)),
        _ => Some(Duration::ZERO),
    }
}

/// Replays have their own group, because their events are old.
fn note(groups: &Groups, path: &str, emitted_us: Option<u64>, replayed: bool) {
    let now_us = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |now| now.as_micros() as u64);
    let name = path.rsplit('/').next().unwrap_or_default();
    let name = if replayed { REPLAYED } else { name };
    let mut groups = locked(groups);
    // An entry would allocate a name for each request.
    if !groups.contains_key(name) {
        groups.insert(name.to_owned(), Group::default());
    }
    let Some(group) = groups.get_mut(name) else { return };
    group.count += 1;
    group.last_us = now_us;
    if let Some(emitted_us) = emitted_us
        && group.latencies_us.len() < LATENCIES_MAX
    {
        group
            .latencies_us
            .push(now_us.saturating_sub(emitted_us).try_into().unwrap_or(u32::MAX));
    }
}

fn each<T>(groups: &Groups, of: impl Fn(&mut Group) -> T) -> BTreeMap<String, T> {
    let mut groups = locked(groups);
    groups
        .iter_mut()
        .map(|(name, group)| (name.clone(), of(group)))
        .collect()
}

async fn respond_with_json(stream: &mut TcpStream, body: &impl Serialize) -> std::io::Result<()> {
    let body = serde_json::to_string(body)?;
    let response = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    stream.write_all(response.as_bytes()).await
}

impl Group {
    fn received(&mut self) -> Received {
        self.latencies_us.sort_unstable();
        let at = |share: f64| {
            let index = (self.latencies_us.len() as f64 * share) as usize;
            self.latencies_us
                .get(index)
                .map_or(0.0, |us| f64::from(*us) / 1000.0)
        };
        Received {
            count: self.count,
            last_us: self.last_us,
            p50_ms: at(0.50),
            p95_ms: at(0.95),
            p99_ms: at(0.99),
        }
    }
}

fn locked(groups: &Groups) -> std::sync::MutexGuard<'_, BTreeMap<String, Group>> {
    groups.lock().unwrap_or_else(|e| e.into_inner())
}
