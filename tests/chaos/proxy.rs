//! Stands between a process and the database, and does what networks do: cuts connections, freezes them, loses replies.

use std::{net::SocketAddr, path::PathBuf};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream, UnixStream},
    sync::watch,
    task::JoinHandle,
};

const CHUNK_BYTES: usize = 16 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Pass,
    /// Nothing gets through in either direction, and nobody is told.
    Frozen,
    /// What is asked arrives; what is answered does not.
    Deaf,
}

#[derive(Debug, Clone, Copy)]
enum Direction {
    ToServer,
    ToClient,
}

pub(crate) struct Proxy {
    address: SocketAddr,
    mode: watch::Sender<Mode>,
    cuts: watch::Sender<u64>,
    silences: watch::Sender<u64>,
    accepting: JoinHandle<()>,
}

impl Proxy {
    /// A port on loopback that leads to the server's socket.
    pub(crate) async fn start(socket: PathBuf) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let (mode, cuts) = (watch::Sender::new(Mode::Pass), watch::Sender::new(0));
        let silences = watch::Sender::new(0);
        let accepting = accept(listener, socket, mode.clone(), cuts.clone(), silences.clone());
        let accepting = tokio::spawn(accepting);
        Self {
            address,
            mode,
            cuts,
            silences,
            accepting,
        }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// Every connection there is falls silent for ever, as when a firewall forgets it. New ones can be made at once.
    pub(crate) fn silence(&self) {
        self.silences.send_modify(|silences| *silences += 1);
    }

    /// Ends every connection there is. New ones can be made at once.
    pub(crate) fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(
    listener: TcpListener,
    socket: PathBuf,
    mode: watch::Sender<Mode>,
    cuts: watch::Sender<u64>,
    silences: watch::Sender<u64>,
) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let Ok((client, _)) = listener.accept().await else {
            continue;
        };
        let (socket, mode, mut cuts) = (socket.clone(), mode.subscribe(), cuts.subscribe());
        let silences = silences.subscribe();
        connections.spawn(async move {
            tokio::select! {
                () = forward(client, socket, mode, silences) => {}
                _ = cuts.changed() => {}
            }
        });
        while connections.try_join_next().is_some() {}
    }
}

/// Ends when one side does. A server that is not there is a connection that is closed at once.
async fn forward(
    client: TcpStream,
    socket: PathBuf,
    mode: watch::Receiver<Mode>,
    mut silences: watch::Receiver<u64>,
) {
    let _ = client.set_nodelay(true);
    let Ok(server) = UnixStream::connect(socket).await else {
        return;
    };
    let (mut client, mut server) = (client, server);
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    tokio::select! {
        () = copy(from_client, to_server, Direction::ToServer, mode.clone()) => {}
        () = copy(from_server, to_client, Direction::ToClient, mode) => {}
        // Both sockets stay open.
        _ = silences.changed() => std::future::pending().await,
    }
}

async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    direction: Direction,
    mut mode: watch::Receiver<Mode>,
) {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let Ok(read @ 1..) = from.read(&mut chunk).await else {
            return;
        };
        let Ok(now) = mode
            .wait_for(|mode| *mode != Mode::Frozen)
            .await
            .map(|mode| *mode)
        else {
            return;
        };
        let lost = matches!((now, direction), (Mode::Deaf, Direction::ToClient));
        if !lost && to.write_all(&chunk[..read]).await.is_err() {
            return;
        }
    }
}
