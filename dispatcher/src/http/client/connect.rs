//! From a URL's host to a connection: resolve, check every address, connect to a checked one, through the proxy if
//! there is one, and perform the TLS handshake.
//! Invariant: no socket is opened to an address and port that `Guard::check` has not allowed a moment before.

use std::{
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::Arc,
    time::{Duration, Instant},
};

use postrider_proto::Timing;
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{net::TcpStream, sync::OwnedSemaphorePermit, task::JoinSet};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_util::either::Either;
use url::Host;

use super::{
    dns::{NameError, Names},
    pool::{Connection, Connections, Receiver},
};
use crate::http::{
    guard::{Guard, Refusal},
    proxy::TunnelError,
};

/// Addresses of a name that are tried.
const ADDRESSES_TRIED_MAX: usize = 6;
/// Delay before the next address is tried in parallel with one that does not respond.
const STAGGER: Duration = Duration::from_millis(250);
/// How many of these delays an address has to itself while no socket is available for a second one.
const STAGGERS_MAX: u32 = 4;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("{0}")]
    Tcp(io::Error),
    #[error(transparent)]
    Tunnel(#[from] TunnelError),
    #[error("{0}")]
    Tls(io::Error),
    #[error("{0}")]
    Http(hyper::Error),
    /// A local fault, not the receiver's.
    #[error("open file limit reached: {0}")]
    OutOfFiles(io::Error),
}

/// What became of a try to reach a receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    Reached,
    Unresolved,
    NotAllowed,
    Failed,
}

/// Everything needed to open a connection.
pub(super) struct Connector<'s> {
    pub(super) guard: &'s Guard,
    pub(super) names: &'s Names,
    pub(super) connections: &'s Connections,
    pub(super) tls: Arc<ClientConfig>,
}

/// A socket with its permit, which outlives it.
pub(super) struct Socket {
    stream: TcpStream,
    /// Of the receiver, also behind a proxy.
    address: SocketAddr,
    permit: OwnedSemaphorePermit,
}

impl Connector<'_> {
    pub(super) async fn connect(
        &self,
        receiver: &Receiver,
        timing: &mut Timing,
    ) -> Result<Connection, ConnectError> {
        let wire = self.open(receiver, timing).await?;
        Connection::over(wire).await.map_err(ConnectError::Http)
    }

    /// Each phase is noted when it ends, also if it failed.
    async fn open(&self, receiver: &Receiver, timing: &mut Timing) -> Result<Wire, ConnectError> {
        let host = receiver.host.trim_start_matches('[').trim_end_matches(']');
        let began = Instant::now();
        let addresses = self.checked_addresses(host, receiver.port).await;
        timing.dns = host.parse::<IpAddr>().is_err().then(|| began.elapsed());
        let addresses = addresses?;
        timing.address = addresses.first().copied();
        let began = Instant::now();
        let socket = match &self.guard.egress_proxy {
            None => self.first_to_connect(addresses).await.map_err(tcp_error),
            Some(_) => self.through_proxy(&addresses).await,
        };
        timing.connect = Some(began.elapsed());
        let Socket {
            stream,
            address,
            permit,
        } = socket?;
        timing.address = Some(address);
        if !receiver.https {
            return Ok(Wire {
                stream: Either::Left(stream),
                address,
                certificate: None,
                permit,
            });
        }
        let not_a_name = |_| ConnectError::Refused(Refusal::HostName(host.to_owned()));
        let name = host.strip_suffix('.').unwrap_or(host).to_owned();
        let name = ServerName::try_from(name).map_err(not_a_name)?;
        let began = Instant::now();
        let stream = TlsConnector::from(self.tls.clone()).connect(name, stream).await;
        timing.tls = Some(began.elapsed());
        let stream = stream.map_err(ConnectError::Tls)?;
        let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        let certificate = shown.map(|der| Arc::from(der.as_ref()));
        Ok(Wire {
            stream: Either::Right(stream),
            address,
            certificate,
            permit,
        })
    }

    /// Looks a host up, and opens and closes a connection.
    pub(super) async fn reach(&self, host: &str, port: u16, connects: bool) -> Reach {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let addresses = match self.checked_addresses(host, port).await {
            Ok(addresses) => addresses,
            Err(ConnectError::Name(_)) => return Reach::Unresolved,
            Err(_) => return Reach::NotAllowed,
        };
        let socket = match &self.guard.egress_proxy {
            _ if !connects => return Reach::Reached,
            None => self.first_to_connect(addresses).await.map_err(tcp_error),
            Some(_) => self.through_proxy(&addresses).await,
        };
        match socket {
            Ok(_) => Reach::Reached,
            Err(_) => Reach::Failed,
        }
    }

    /// Addresses that may be connected to. If one address of a name is forbidden, all are: a DNS response that mixes
    /// them is no honest mistake.
    async fn checked_addresses(&self, host: &str, port: u16) -> Result<Vec<SocketAddr>, ConnectError> {
        let found = match host.parse::<IpAddr>() {
            Ok(literal) => Arc::from([literal]),
            Err(_) => self.names.addresses(host).await?,
        };
        for ip in found.iter() {
            self.guard.check(*ip, port)?;
            if self.guard.is_ours(*ip, port, is_this_machine) {
                return Err(Refusal::Ourselves(SocketAddr::new(*ip, port).to_string()).into());
            }
        }
        let addresses = interleaved(&found).take(ADDRESSES_TRIED_MAX);
        Ok(addresses.map(|ip| SocketAddr::new(ip, port)).collect())
    }

    async fn through_proxy(&self, addresses: &[SocketAddr]) -> Result<Socket, ConnectError> {
        let mut failed = None;
        let Some(proxy) = &self.guard.egress_proxy else {
            return Err(TunnelError::Proxy("is not set".to_owned()).into());
        };
        let unreachable = |why: String| TunnelError::Proxy(format!("is unreachable: {why}"));
        // Chosen by the operator: it may be anywhere.
        let found = match &proxy.host {
            Host::Domain(name) => {
                let found = self.names.addresses(name).await;
                found.map_err(|error| unreachable(error.to_string()))?
            }
            Host::Ipv4(ip) => Arc::from([IpAddr::V4(*ip)]),
            Host::Ipv6(ip) => Arc::from([IpAddr::V6(*ip)]),
        };
        let of_proxy: Vec<SocketAddr> = interleaved(&found)
            .take(ADDRESSES_TRIED_MAX)
            .map(|ip| SocketAddr::new(ip, proxy.port))
            .collect();
        for address in addresses {
            let mut socket = match self.first_to_connect(of_proxy.clone()).await {
                Ok(socket) => socket,
                Err(error) if is_out_of_files(&error) => return Err(ConnectError::OutOfFiles(error)),
                Err(error) => return Err(unreachable(super::error_text::of_io(&error)).into()),
            };
            match proxy.tunnel(&mut socket.stream, *address).await {
                Ok(()) => {
                    let address = *address;
                    return Ok(Socket { address, ..socket });
                }
                Err(error @ TunnelError::Proxy(_)) => return Err(error.into()),
                Err(error @ (TunnelError::Endpoint(_) | TunnelError::Forbidden(_))) => failed = Some(error),
            }
        }
        Err(failed
            .unwrap_or(TunnelError::Proxy("was not used".to_owned()))
            .into())
    }

    /// Connects to the first address that accepts; the next is tried when one fails or does not respond for a moment.
    /// In parallel only while sockets are available, otherwise instead of the previous one.
    pub(super) async fn first_to_connect(&self, addresses: Vec<SocketAddr>) -> io::Result<Socket> {
        let mut waiting = addresses.into_iter();
        let mut tries = JoinSet::new();
        let mut failed = io::Error::from(io::ErrorKind::AddrNotAvailable);
        let mut permit = self.connections.permit().await;
        let mut without_permit = 0;
        loop {
            if waiting.len() > 0 {
                permit = permit.or_else(|| self.connections.extra_permit());
            }
            if permit.is_some()
                && let Some(address) = waiting.next()
                && let Some(permit) = permit.take()
            {
                without_permit = 0;
                tries.spawn(connect(address, permit));
            } else if waiting.len() > 0 {
                without_permit += 1;
            }
            if without_permit > STAGGERS_MAX {
                tries.shutdown().await;
                permit = self.connections.permit().await;
                without_permit = 0;
                continue;
            }
            if tries.is_empty() && waiting.len() == 0 {
                return Err(failed);
            }
            tokio::select! {
                Some(ended) = tries.join_next() => match ended {
                    Ok(Ok(socket)) => return Ok(socket),
                    Ok(Err((error, own))) => {
                        failed = error;
                        permit = Some(own);
                    }
                    Err(_) => permit = self.connections.permit().await,
                },
                () = tokio::time::sleep(STAGGER), if waiting.len() > 0 => {}
            }
        }
    }
}

async fn connect(
    address: SocketAddr,
    permit: OwnedSemaphorePermit,
) -> Result<Socket, (io::Error, OwnedSemaphorePermit)> {
    let connected = async {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    };
    match connected.await {
        Ok(stream) => Ok(Socket {
            stream,
            address,
            permit,
        }),
        Err(error) => Err((error, permit)),
    }
}

fn tcp_error(error: io::Error) -> ConnectError {
    if is_out_of_files(&error) {
        ConnectError::OutOfFiles(error)
    } else {
        ConnectError::Tcp(error)
    }
}

/// File limit of this process (EMFILE) or of the machine (ENFILE).
fn is_out_of_files(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(23 | 24))
}

/// Alternates address families, so that a family without connectivity costs one try.
fn interleaved(found: &[IpAddr]) -> impl Iterator<Item = IpAddr> + '_ {
    let mut sixes = found.iter().copied().filter(IpAddr::is_ipv6);
    let mut fours = found.iter().copied().filter(IpAddr::is_ipv4);
    (0..found.len() * 2).filter_map(move |turn| match turn % 2 {
        0 => sixes.next(),
        _ => fours.next(),
    })
}

/// Whether an address belongs to this machine. Connecting a datagram socket sends nothing: the system only chooses
/// the source address, which for a local destination is the destination itself.
fn is_this_machine(ip: IpAddr) -> bool {
    if ip.is_loopback() || ip.is_unspecified() {
        return true;
    }
    let any: SocketAddr = match ip {
        IpAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
        IpAddr::V6(_) => ([0_u16; 8], 0).into(),
    };
    let source = || {
        let socket = UdpSocket::bind(any)?;
        socket.connect((ip, 9))?;
        socket.local_addr()
    };
    source().is_ok_and(|source: SocketAddr| source.ip() == ip)
}

/// The server's certificate in DER.
pub(super) type PeerCertificate = Arc<[u8]>;

/// A connection, plain or TLS, with its permit, which outlives it.
pub(super) struct Wire {
    pub(super) stream: Either<TcpStream, TlsStream<TcpStream>>,
    pub(super) address: SocketAddr,
    pub(super) certificate: Option<PeerCertificate>,
    pub(super) permit: OwnedSemaphorePermit,
}
