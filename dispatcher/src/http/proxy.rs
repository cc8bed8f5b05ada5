//! The operator's egress proxy, asked for a tunnel (`CONNECT`) to an address the guard has checked.
//! Invariant: the proxy is given an address and never a name, so that a different DNS response can't redirect it, and
//! a fault of the proxy is distinguished from one of the endpoint.

use std::{fmt, net::SocketAddr, str::FromStr};

use data_encoding::BASE64;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use url::{Host, Url};

/// Limit of the proxy's response to `CONNECT`.
const HEAD_BYTES_MAX: usize = 8 * 1024;

#[derive(Clone, PartialEq, Eq)]
pub struct Proxy {
    pub(crate) host: Host<String>,
    pub(crate) port: u16,
    /// The value of `Proxy-Authorization`.
    authorization: Option<String>,
}

/// Without the password.
impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Proxy({}:{})", self.host, self.port)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a proxy URL like http://proxy.example.com:3128")]
pub struct ProxyError;

impl FromStr for Proxy {
    type Err = ProxyError;

    /// `http://host:port`, with `user:password@` before the host if the proxy requires it.
    fn from_str(text: &str) -> Result<Self, ProxyError> {
        let url = Url::parse(text).map_err(|_| ProxyError)?;
        let bare =
            url.scheme() == "http" && url.path() == "/" && url.query().is_none() && url.fragment().is_none();
        if !bare {
            return Err(ProxyError);
        }
        let decoded = |text: &str| percent_decoded(text).ok_or(ProxyError);
        let authorization = match (url.username(), url.password()) {
            ("", None) => None,
            (user, password) => {
                let pair = format!("{}:{}", decoded(user)?, decoded(password.unwrap_or_default())?);
                Some(format!("Basic {}", BASE64.encode(pair.as_bytes())))
            }
        };
        Ok(Self {
            host: url.host().ok_or(ProxyError)?.to_owned(),
            port: url.port_or_known_default().ok_or(ProxyError)?,
            authorization,
        })
    }
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    let mut out = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => {
                let digits = [bytes.next()?, bytes.next()?];
                u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
            }
            other => other,
        });
    }
    String::from_utf8(out).ok()
}

/// Why there is no tunnel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TunnelError {
    /// The fault of the proxy, or of its configuration.
    #[error("the egress proxy {0}")]
    Proxy(String),
    /// The proxy works but could not connect to the endpoint.
    #[error("the egress proxy could not connect to the endpoint: it responded {0}")]
    Endpoint(u16),
    /// The proxy works but its rules do not allow this destination.
    #[error("the egress proxy does not allow connections to the endpoint: it responded {0}")]
    Forbidden(u16),
}

impl Proxy {
    /// Requests a tunnel on a connection to the proxy. Everything received afterwards is the endpoint's.
    pub(crate) async fn tunnel(&self, stream: &mut TcpStream, to: SocketAddr) -> Result<(), TunnelError> {
        let broken = |error: std::io::Error| TunnelError::Proxy(format!("broke off: {error}"));
        let authorization = match &self.authorization {
            Some(value) => format!("Proxy-Authorization: {value}\r\n"),
            None => String::new(),
        };
        let request = format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n{authorization}\r\n");
        stream.write_all(request.as_bytes()).await.map_err(broken)?;
        match read_status(stream).await? {
            200..=299 => Ok(()),
            status @ (502..=504) => Err(TunnelError::Endpoint(status)),
            407 => Err(TunnelError::Proxy("rejected the credentials (407)".to_owned())),
            // The proxy is overloaded.
            status @ (408 | 429) => Err(TunnelError::Proxy(format!("refused with {status}"))),
            status @ 400..=499 => Err(TunnelError::Forbidden(status)),
            status => Err(TunnelError::Proxy(format!("refused with {status}"))),
        }
    }
}

/// Reads to the end of the head and no further: the next byte is the endpoint's.
async fn read_status(stream: &mut TcpStream) -> Result<u16, TunnelError> {
    let mut head = Vec::with_capacity(256);
    while !head.ends_with(b"\r\n\r\n") {
        let byte = stream.read_u8().await;
        head.push(byte.map_err(|_| TunnelError::Proxy("closed the connection".to_owned()))?);
        if head.len() > HEAD_BYTES_MAX {
            return Err(TunnelError::Proxy("sent an incomplete response".to_owned()));
        }
    }
    let status = head.strip_prefix(b"HTTP/1.").and_then(|rest| {
        let word = rest.split(|byte| *byte == b' ').nth(1)?.get(..3)?;
        std::str::from_utf8(word).ok()?.parse().ok()
    });
    status.ok_or_else(|| TunnelError::Proxy("does not speak HTTP".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_is_read_from_its_url_and_hides_its_password() {
        let proxy: Proxy = "http://us%40er:p%3Aw@proxy.example.com:3128"
            .parse()
            .expect("a proxy");
        assert_eq!(
            (proxy.host.to_string().as_str(), proxy.port),
            ("proxy.example.com", 3128)
        );
        assert_eq!(proxy.authorization.as_deref(), Some("Basic dXNAZXI6cDp3"));
        assert!(!format!("{proxy:?}").contains("dXN"));
        assert_eq!("http://10.0.0.1".parse::<Proxy>().expect("a proxy").port, 80);
        for bad in [
            "",
            "proxy:3128",
            "https://proxy:1",
            "socks5://proxy:1",
            "http://proxy/x",
            "http://proxy?x",
            "http://",
        ] {
            assert_eq!(bad.parse::<Proxy>(), Err(ProxyError), "{bad}");
        }
    }
}
