//! File descriptors are shared out as well: a receiver that lets connections hang costs nobody else theirs.

use std::time::{Duration, Instant};

use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufStream},
    net::{TcpSocket, TcpStream},
};

use crate::support::{Database, Postrider, Receiver};

/// Connections that are served; every other one hangs.
const SERVED: usize = 8;

async fn grudging() -> String {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(([127, 0, 0, 1], 0).into()).expect("a port");
    let listener = socket.listen(1).expect("a short backlog");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        for _ in 0..SERVED {
            if let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream));
            }
        }
        std::future::pending::<()>().await;
        drop(listener);
    });
    format!("http://{address}/hook")
}

/// Answers 204 to each request of a connection.
async fn serve(stream: TcpStream) -> std::io::Result<()> {
    let mut stream = BufStream::new(stream);
    loop {
        let (mut line, mut length) = (String::new(), 0);
        while line != "\r\n" {
            line.clear();
            if stream.read_line(&mut line).await? == 0 {
                return Ok(());
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap_or(0);
            }
        }
        stream.read_exact(&mut vec![0; length]).await?;
        stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await?;
        stream.flush().await?;
    }
}

fn open_files(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

#[tokio::test]
async fn a_receiver_that_lets_new_connections_hang_takes_no_files_from_others() {
    const FILES: usize = 700;
    let database = Database::fresh().await;
    let limit = format!("--nofile={FILES}:{FILES}");
    let program = Postrider::on_database("up", &database)
        .under(&["prlimit", &limit])
        .start()
        .await;
    let api = program.api();
    let healthy = Receiver::start().await;
    for tenant in ["acme", "globex"] {
        api.tenant(tenant).await;
        api.event_type(&format!("{tenant}.happened")).await;
    }
    let greedy = json!({ "types": ["acme.happened"], "concurrency": 256 });
    api.endpoint("acme", &grudging().await, greedy).await;
    for number in 0..5 {
        let more = json!({ "types": ["globex.happened"] });
        api.endpoint("globex", &healthy.url(&format!("/{number}")), more)
            .await;
    }
    database
        .execute("select postrider.emit('acme', 'acme.happened', '{}') from generate_series(1, 20000)")
        .await;
    let (began, mut most, mut emitted) = (Instant::now(), 0, 0);
    while began.elapsed() < Duration::from_secs(8) {
        let sent = Instant::now();
        database
            .execute("select postrider.emit('globex', 'globex.happened', '{}')")
            .await;
        emitted += 1;
        healthy.wait_for(5 * emitted).await;
        assert!(sent.elapsed() < Duration::from_secs(2), "{:?}", sent.elapsed());
        most = most.max(open_files(program.pid()));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(most < FILES - 50, "{most} of {FILES} files were open");
    let failed =
        "select count(*) from postrider.attempts a join postrider.endpoints e on e.id = a.endpoint_id
         join postrider.tenants t on t.id = e.tenant_id where t.slug = 'globex' and a.outcome <> 1";
    assert_eq!(
        database.count(failed).await,
        0,
        "no attempt of another tenant failed"
    );
    let complaints: Vec<String> = program
        .log_lines()
        .into_iter()
        .filter(|line| line.contains("Too many open files"))
        .collect();
    assert_eq!(complaints, Vec::<String>::new());
}
