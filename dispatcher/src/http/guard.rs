//! Where requests may be sent. Checked when a URL is saved and again when the socket is opened: a name that resolved
//! to a public address yesterday may resolve to a private one today, and the operator's settings may have changed.
//! Invariant: an address is connected to only after `Guard::check` allowed that very address and port.

mod public;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use ipnet::IpNet;
use postrider_proto::limits::URL_BYTES_MAX;
use url::{Host, Url};

pub use public::is_public;

use crate::http::proxy::Proxy;

/// The operator's rules for where requests may go, and by which route. Tenants can't change them.
#[derive(Debug, Clone, Default)]
pub struct Guard {
    pub allow_networks: Vec<IpNet>,
    pub deny_networks: Vec<IpNet>,
    /// `None` is the default list.
    pub deny_ports: Option<Vec<u16>>,
    pub allow_http: bool,
    /// Addresses Postrider itself listens on.
    pub own_addresses: Vec<SocketAddr>,
    /// Names Postrider is known by, each with its port.
    pub own_names: Vec<(String, u16)>,
    pub egress_proxy: Option<Proxy>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("invalid URL: {0}")]
    NotAUrl(String),
    #[error("the URL is too long: at most {URL_BYTES_MAX} bytes")]
    TooLong,
    #[error("the scheme must be https{}", if *.http_too { " or http" } else { "" })]
    Scheme { http_too: bool },
    #[error("the URL must not contain a user name or password: use a custom header")]
    Userinfo,
    #[error("the URL must not have a fragment (#…)")]
    Fragment,
    #[error("the host name `{0}` is not allowed")]
    HostName(String),
    #[error("the host name `{0}` is not allowed: use 127.0.0.1 instead")]
    Localhost(String),
    #[error("port {0} is not allowed")]
    Port(u16),
    #[error("the address {0} is not on the public internet")]
    Address(IpAddr),
    #[error("the address {0} is in a network denied by the operator")]
    ClosedNetwork(IpAddr),
    #[error("{0} is Postrider itself")]
    Ourselves(String),
}

impl Guard {
    /// Rules applied when an endpoint is saved. The name is resolved only when something is sent.
    pub fn check_url(&self, text: &str) -> Result<Url, Refusal> {
        if text.len() > URL_BYTES_MAX {
            return Err(Refusal::TooLong);
        }
        // The parser silently drops tabs and line breaks and trims spaces: the stored URL must be what was entered.
        if text.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(Refusal::NotAUrl(
                "it contains whitespace or control characters".to_owned(),
            ));
        }
        let url = Url::parse(text).map_err(|e| Refusal::NotAUrl(e.to_string()))?;
        // The scheme first: for others the parser does not normalise the host.
        self.check_scheme(&url)?;
        if !text
            .to_ascii_lowercase()
            .starts_with(&format!("{}://", url.scheme()))
        {
            return Err(Refusal::NotAUrl(
                "it must be absolute, like https://host/path".to_owned(),
            ));
        }
        // This parser treats a backslash as a slash; others do not and would see another host.
        if text.contains('\\') {
            return Err(Refusal::NotAUrl("it contains a backslash".to_owned()));
        }
        self.check_target(&url)?;
        Ok(url)
    }

    /// Everything that can be checked without DNS. Repeated before each request: the rules may have changed since the
    /// URL was saved.
    pub fn check_target(&self, url: &Url) -> Result<(), Refusal> {
        self.check_scheme(url)?;
        if !url.username().is_empty() || url.password().is_some() {
            return Err(Refusal::Userinfo);
        }
        if url.fragment().is_some() {
            return Err(Refusal::Fragment);
        }
        let port = url.port_or_known_default().unwrap_or(0);
        match url.host() {
            None => Err(Refusal::NotAUrl("it has no host".to_owned())),
            Some(Host::Domain(name)) => self.check_name(name, port),
            Some(Host::Ipv4(ip)) => self.check(ip.into(), port),
            Some(Host::Ipv6(ip)) => self.check(ip.into(), port),
        }
    }

    fn check_scheme(&self, url: &Url) -> Result<(), Refusal> {
        match url.scheme() {
            "https" => Ok(()),
            "http" if self.allow_http => Ok(()),
            _ => Err(Refusal::Scheme {
                http_too: self.allow_http,
            }),
        }
    }

    fn check_name(&self, name: &str, port: u16) -> Result<(), Refusal> {
        let known = name.strip_suffix('.').unwrap_or(name);
        if known.eq_ignore_ascii_case("localhost") && self.is_opened(Ipv4Addr::LOCALHOST.into()) {
            return Err(Refusal::Localhost(name.to_owned()));
        }
        if !is_public_name(name) {
            return Err(Refusal::HostName(name.to_owned()));
        }
        if self
            .own_names
            .iter()
            .any(|(own, own_port)| own.eq_ignore_ascii_case(known) && *own_port == port)
        {
            return Err(Refusal::Ourselves(known.to_owned()));
        }
        // With opened networks the name's addresses decide.
        if port != 0 && !self.allow_networks.is_empty() {
            return Ok(());
        }
        self.check_port(port)
    }

    /// For an address that is about to be connected to. `connect.rs` separately checks whether it is one of this
    /// machine's own.
    pub fn check(&self, ip: IpAddr, port: u16) -> Result<(), Refusal> {
        let reached = public::reached(ip);
        if self.deny_networks.iter().any(|net| net.contains(&reached)) {
            return Err(Refusal::ClosedNetwork(ip));
        }
        let opened = self.is_opened(ip);
        if !opened && !is_public(ip) {
            return Err(Refusal::Address(ip));
        }
        if self.is_ours(ip, port, |ip| ip.is_loopback() || ip.is_unspecified()) {
            return Err(Refusal::Ourselves(SocketAddr::new(ip, port).to_string()));
        }
        if port != 0 && opened {
            return Ok(());
        }
        self.check_port(port)
    }

    pub fn allows(&self, ip: IpAddr) -> bool {
        let reached = public::reached(ip);
        let denied = self.deny_networks.iter().any(|net| net.contains(&reached));
        !denied && (is_public(ip) || self.is_opened(ip))
    }

    /// Whether one of our own listeners would respond. `is_local`: whether an address is this machine's.
    pub(crate) fn is_ours(&self, ip: IpAddr, port: u16, is_local: impl Fn(IpAddr) -> bool) -> bool {
        let ip = public::reached(ip);
        let mut at_port = self.own_addresses.iter().filter(|own| own.port() == port);
        at_port.any(|own| {
            let listens_at = own.ip().to_canonical();
            listens_at == ip || listens_at.is_unspecified() && is_local(ip) || ip.is_unspecified()
        })
    }

    fn is_opened(&self, ip: IpAddr) -> bool {
        let reached = public::reached(ip);
        self.allow_networks
            .iter()
            .any(|net| net.contains(&reached) || net.contains(&ip))
    }

    fn check_port(&self, port: u16) -> Result<(), Refusal> {
        let denied = match &self.deny_ports {
            Some(ports) => ports.contains(&port),
            None => DENIED_PORTS.contains(&port),
        };
        if port == 0 || denied {
            Err(Refusal::Port(port))
        } else {
            Ok(())
        }
    }
}

/// A name with a dot that could exist in the public DNS.
fn is_public_name(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    let labels_fit = name.split('.').all(|label| {
        !label.is_empty()
            && label.len() <= 63
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    });
    let last = name.rsplit('.').next().unwrap_or_default();
    const PRIVATE: [&str; 8] = [
        "localhost",
        "local",
        "internal",
        "lan",
        "home",
        "corp",
        "intranet",
        "localdomain",
    ];
    labels_fit
        && name.len() <= 253
        && name.contains('.')
        && !PRIVATE.contains(&last)
        && name != "home.arpa"
        && !name.ends_with(".home.arpa")
}

/// The Fetch standard's bad ports and the usual database ports.
const DENIED_PORTS: &[u16] = &[
    1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101, 102, 103, 104,
    109, 110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179, 389, 427, 465, 512, 513, 514, 515,
    526, 530, 531, 532, 540, 548, 554, 556, 563, 587, 601, 636, 989, 990, 993, 995, 1433, 1521, 1719, 1720,
    1723, 2049, 2379, 2380, 3306, 3659, 4045, 4190, 5060, 5061, 5432, 5984, 6000, 6379, 6432, 6566, 6665,
    6666, 6667, 6668, 6669, 6679, 6697, 7000, 7001, 9042, 9200, 9300, 10080, 11211, 27017, 27018, 28017,
];

#[cfg(test)]
mod tests {
    use super::*;

    fn open() -> Guard {
        Guard {
            allow_http: true,
            ..Guard::default()
        }
    }

    #[test]
    fn localhost_is_refused_with_a_hint_where_its_address_would_be_taken() {
        let closed = open().check_url("http://localhost:3000/hook");
        assert_eq!(closed, Err(Refusal::HostName("localhost".to_owned())));
        let mut guard = open();
        guard.allow_networks = vec!["127.0.0.0/8".parse().expect("a network")];
        for url in ["http://localhost:3000/hook", "http://LocalHost./"] {
            let told = guard.check_url(url).expect_err(url).to_string();
            assert!(told.ends_with("use 127.0.0.1 instead"), "{url}: {told}");
        }
        assert!(guard.check_url("http://127.0.0.1:3000/hook").is_ok());
    }

    #[test]
    fn public_urls_are_taken() {
        for good in [
            "https://example.com/hook",
            "http://example.com:8080/a?b=c",
            "https://93.184.216.34/",
            "https://[2606:2800:220:1:248:1893:25c8:1946]/",
            "https://xn--bcher-kva.example.com/",
        ] {
            assert!(open().check_url(good).is_ok(), "{good}");
        }
    }

    /// What an attacker types in, by kind. A28 to A34 are about the DNS, redirects and proxies: `tests/it/egress.rs`.
    #[test]
    fn addresses_that_are_not_public_are_refused_however_they_are_spelled() {
        let long_label = format!("http://{}.com/", "a".repeat(64));
        let long = format!("http://example.com/{}", "a".repeat(100_000));
        let rows: &[(&str, &[&str])] = &[
            ("A1", &["http://127.0.0.1/", "http://127.8.8.8:8080/"]),
            ("A2", &["http://2130706433/", "http://0x7f000001/"]),
            ("A3", &["http://0177.0.0.1/", "http://017700000001/"]),
            ("A4", &["http://127.1/", "http://0x7f.1/", "http://127.0.0.1./"]),
            (
                "A5",
                &[
                    "http://１２７.０.０.１/",
                    "http://①②⑦.⓪.⓪.①/",
                    "http://127。0。0。1/",
                ],
            ),
            ("A6", &["http://%31%32%37.0.0.1/"]),
            (
                "A7",
                &["http://0/", "http://0.0.0.0/", "http://[::ffff:0.0.0.0]/"],
            ),
            (
                "A8",
                &[
                    "https:127.0.0.1/",
                    "https:\\\\127.0.0.1\\",
                    "ht\ttp://127.0.\n0.1/",
                    " https://example.com/",
                    "https://exa\tmple.com/",
                    "https:example.com/",
                    "https:/example.com/",
                ],
            ),
            (
                "A9",
                &[
                    "http://LOCALHOST/",
                    "http://ⓛocalhost/",
                    "http://loc\u{ad}alhost/",
                    "http://x.localhost/",
                ],
            ),
            ("A10", &["http://x.internal./", "http://localhost./"]),
            ("A11", &["http://[::1]/", "http://[::]/"]),
            ("A12", &["http://[[::1]]/", "http://[fe80::1%25eth0]/"]),
            ("A13", &["http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/"]),
            ("A14", &["http://[::127.0.0.1]/", "http://[::a9fe:a9fe]/"]),
            ("A15", &["http://[::ffff:0:127.0.0.1]/"]),
            ("A16", &["http://[64:ff9b::a9fe:a9fe]/"]),
            ("A17", &["http://[64:ff9b:1::a9fe:a9fe]/"]),
            ("A18", &["http://[2002:7f00:1::]/"]),
            ("A19", &["http://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/"]),
            ("A20", &["http://[fec0::1]/"]),
            (
                "A21",
                &[
                    "http://[fe80::1]/",
                    "http://[fd00:ec2::254]/",
                    "http://[ff02::1]/",
                    "http://[5f00::1]/",
                    "http://[100::1]/",
                ],
            ),
            (
                "A22",
                &["http://10.0.0.1/", "http://172.16.0.1/", "http://192.168.0.1/"],
            ),
            (
                "A23",
                &[
                    "http://169.254.169.254/",
                    "http://169.254.43518/",
                    "http://169.254.170.2/",
                ],
            ),
            ("A24", &["http://100.64.0.1/", "http://100.100.100.200/"]),
            (
                "A25",
                &[
                    "http://192.0.0.192/",
                    "http://198.18.0.1/",
                    "http://192.88.99.1/",
                    "http://203.0.113.1/",
                    "http://224.0.0.1/",
                    "http://240.0.0.1/",
                    "http://255.255.255.255/",
                ],
            ),
            ("A26", &["http://168.63.129.16/"]),
            (
                "A27",
                &[
                    "http://metadata.google.internal/",
                    "http://printer.local/",
                    "http://x.internal/",
                    "http://router.home.arpa/",
                ],
            ),
            (
                "A35",
                &[
                    "https://good.com@10.0.0.1/",
                    "https://u:p@example.com/",
                    "https://u@example.com/",
                ],
            ),
            (
                "A36",
                &[
                    "http://127.0.0.1\\@evil.com/",
                    "http://evil.com#@127.0.0.1/",
                    "http://evil.com\\.example.org/",
                    "https://example.com/#x",
                ],
            ),
            (
                "A37",
                &[
                    "file:///etc/passwd",
                    "ftp://example.com/",
                    "gopher://127.0.0.1/",
                    "data:text/plain,x",
                    "javascript:alert(1)",
                    "http+unix://x/",
                    "FTP://example.com/",
                ],
            ),
            (
                "A38",
                &[
                    "http://example.com:22/",
                    "http://example.com:25/",
                    "http://example.com:5432/",
                    "http://example.com:6379/",
                    "http://example.com:0/",
                    "http://example.com:65536/",
                ],
            ),
            ("A40", &["http://xn--example-.org/"]),
            (
                "A41",
                &[
                    "http://./",
                    "http://a..b.com/",
                    "http://intranet/",
                    "http://-a.com/",
                    "",
                    "example.com",
                ],
            ),
            ("A41", &[&long_label, &long]),
        ];
        let all = rows
            .iter()
            .flat_map(|(row, urls)| urls.iter().map(move |url| (row, url)));
        // All of them, so that a failure shows the full extent of the gap.
        let taken: Vec<String> = all
            .filter(|(_, url)| open().check_url(url).is_ok())
            .map(|(row, url)| format!("{row} {url:.100}"))
            .collect();
        assert!(taken.is_empty(), "{taken:#?}");
        assert_eq!(open().check_url(&long), Err(Refusal::TooLong));
    }

    #[test]
    fn plain_http_needs_the_operators_word() {
        let strict = Guard::default();
        assert_eq!(
            strict.check_url("http://example.com/"),
            Err(Refusal::Scheme { http_too: false })
        );
        assert!(strict.check_url("https://example.com/").is_ok());
    }

    #[test]
    fn opened_networks_are_allowed_with_any_port_and_denied_ones_never() {
        let mut guard = open();
        guard.allow_networks = vec!["127.0.0.0/8".parse().expect("a network")];
        assert!(guard.check_url("http://127.0.0.1:5432/").is_ok());
        assert!(guard.check_url("http://[::ffff:127.0.0.1]/").is_ok());
        assert!(guard.check_url("http://10.0.0.1/").is_err());
        guard.deny_networks = vec!["127.0.0.2/32".parse().expect("a network")];
        assert!(guard.check_url("http://127.0.0.2/").is_err());
        guard
            .deny_networks
            .push("93.184.216.0/24".parse().expect("a network"));
        assert!(guard.check_url("https://93.184.216.34/").is_err());
    }
}
