//! A name server that says what a test tells it to, also what no honest one would.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, UdpSocket},
    task::JoinSet,
};

const A: u16 = 1;
const CNAME: u16 = 5;
const AAAA: u16 = 28;
/// Of an answer by UDP; a longer one is asked for again by TCP.
const UDP_BYTES_MAX: usize = 512;

/// What is answered to a question for a name.
#[derive(Clone)]
pub(crate) enum Reply {
    /// These addresses, each family to whom asks for it.
    Addresses(Vec<IpAddr>),
    /// Another name, and that name's addresses in the same answer.
    Alias(&'static str, Vec<IpAddr>),
    /// One reply after the other, counted by family; the last one stays.
    Turns(Vec<Reply>),
    Failure,
    Silence,
}

impl Reply {
    pub(crate) fn addresses<const N: usize>(texts: [&str; N]) -> Self {
        Self::Addresses(texts.map(|text| text.parse().expect("an address")).to_vec())
    }
}

#[derive(Default)]
struct Book {
    replies: HashMap<String, Reply>,
    asked: HashMap<(String, u16), usize>,
}

/// Names that are not in the script do not exist. Nothing may be remembered: the TTL is 0.
pub(crate) struct NameServer {
    _serving: JoinSet<()>,
}

impl NameServer {
    pub(crate) async fn start<const N: usize>(script: [(&str, Reply); N]) -> Self {
        let replies = script.map(|(name, reply)| (name.to_owned(), reply)).into();
        let book = Arc::new(Mutex::new(Book {
            replies,
            asked: HashMap::new(),
        }));
        let datagrams = UdpSocket::bind("127.0.0.1:53").await.expect("the DNS port");
        let streams = TcpListener::bind("127.0.0.1:53").await.expect("the DNS port");
        let mut serving = JoinSet::new();
        let shared = book.clone();
        serving.spawn(async move {
            let mut buffer = [0; UDP_BYTES_MAX];
            while let Ok((length, from)) = datagrams.recv_from(&mut buffer).await {
                if let Some(mut answer) = answer(&shared, &buffer[..length]) {
                    if answer.len() > UDP_BYTES_MAX {
                        // "Truncated": the header and the question alone.
                        answer.truncate(length);
                        answer[2] |= 0x02;
                        answer[6..12].fill(0);
                    }
                    let _ = datagrams.send_to(&answer, from).await;
                }
            }
        });
        serving.spawn(async move {
            while let Ok((mut stream, _)) = streams.accept().await {
                let book = book.clone();
                tokio::spawn(async move {
                    while let Ok(length) = stream.read_u16().await {
                        let mut question = vec![0; length.into()];
                        if stream.read_exact(&mut question).await.is_err() {
                            return;
                        }
                        let Some(answer) = answer(&book, &question) else {
                            return;
                        };
                        let _ = stream.write_u16(answer.len() as u16).await;
                        let _ = stream.write_all(&answer).await;
                    }
                });
            }
        });
        Self { _serving: serving }
    }
}

/// None is silence.
fn answer(book: &Mutex<Book>, question: &[u8]) -> Option<Vec<u8>> {
    let (name, end) = read_name(question, 12)?;
    let kind = u16::from_be_bytes([*question.get(end)?, *question.get(end + 1)?]);
    let reply = {
        let mut book = book.lock().expect("not poisoned");
        let reply = book.replies.get(&name).cloned();
        let count = book.asked.entry((name, kind)).or_default();
        *count += 1;
        match reply {
            Some(Reply::Turns(turns)) => turns.get(*count - 1).or(turns.last()).cloned(),
            reply => reply,
        }
    };
    let mut message = question[..end + 4].to_vec();
    message[2] = 0x81;
    message[3] = 0x80;
    message[6..12].fill(0);
    let mut records = Vec::new();
    match reply {
        None => message[3] |= 3,
        Some(Reply::Failure) => message[3] |= 2,
        Some(Reply::Silence) => return None,
        Some(Reply::Addresses(found)) => records.extend(addresses(&[0xc0, 12], kind, &found)),
        Some(Reply::Alias(other, found)) => {
            let other = write_name(other);
            records.push(record(&[0xc0, 12], CNAME, &other));
            records.extend(addresses(&other, kind, &found));
        }
        Some(Reply::Turns(_)) => unreachable!("turns do not nest"),
    }
    message[6..8].copy_from_slice(&(records.len() as u16).to_be_bytes());
    message.extend(records.concat());
    Some(message)
}

fn addresses(owner: &[u8], kind: u16, found: &[IpAddr]) -> Vec<Vec<u8>> {
    let of_kind = |ip: &IpAddr| match (kind, ip) {
        (A, IpAddr::V4(v4)) => Some(record(owner, A, &v4.octets())),
        (AAAA, IpAddr::V6(v6)) => Some(record(owner, AAAA, &v6.octets())),
        _ => None,
    };
    found.iter().filter_map(of_kind).collect()
}

fn record(owner: &[u8], kind: u16, data: &[u8]) -> Vec<u8> {
    let mut bytes = owner.to_vec();
    bytes.extend(kind.to_be_bytes());
    bytes.extend([0, 1, 0, 0, 0, 0]);
    bytes.extend((data.len() as u16).to_be_bytes());
    bytes.extend(data);
    bytes
}

fn write_name(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in name.split('.') {
        bytes.push(label.len() as u8);
        bytes.extend(label.as_bytes());
    }
    bytes.push(0);
    bytes
}

/// The name in lower case, and where it ends.
fn read_name(message: &[u8], mut at: usize) -> Option<(String, usize)> {
    let mut labels = Vec::new();
    loop {
        let length = usize::from(*message.get(at)?);
        at += 1;
        if length == 0 {
            return Some((labels.join("."), at));
        }
        let label = message.get(at..at + length)?;
        labels.push(String::from_utf8_lossy(label).to_lowercase());
        at += length;
    }
}
