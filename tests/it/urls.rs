//! One URL, three readers: the guard that judges it, the client that calls it, and Node, which follows the standard by
//! another hand. Where we take a URL, all of them must see the same host and port: two that differ are a way around the
//! guard.

use http::Uri;
use postrider_dispatcher::guard::Guard;
use serde_json::Value;

use crate::support::node_on_urls;

const HOSTS: &[&str] = &[
    "93.184.216.34",
    "example.com",
    "EXAMPLE.Com",
    "example.com.",
    "example.com..",
    ".example.com",
    "a..b.com",
    "a.b.c.d.example.com",
    "ex%61mple.com",
    "ex%2561mple.com",
    "example%2ecom",
    "example%00.com",
    "example%20.com",
    "example%2f.com",
    "example%40evil.com",
    "example%3a80.com",
    "example%23.com",
    "example.com%0d%0ahost:evil",
    "-a.com",
    "a-.com",
    "a_b.example.com",
    "a--b.example.com",
    "ab--c.example.com",
    "localhost",
    "x.localhost",
    // Numbers, and what looks like them.
    "127.0.0.1",
    "127.1",
    "127.0.0.1.",
    "2130706433",
    "0x7f000001",
    "0X7F.1",
    "0x7f.0x0.0x0.0x1",
    "0x",
    "0x.0x.0x.0x",
    "0177.0.0.1",
    "017700000001",
    "08.1.1.1",
    "0.0.0.0",
    "0",
    "256.1.1.1",
    "1.2.3",
    "1.2.3.4.5",
    "1.2.3.4x",
    "4294967295",
    "4294967296",
    "99999999999999999999",
    "1.0x",
    "a.0x7f",
    "a.1",
    "foo.127.0.0.1",
    "%31%32%37.0.0.1",
    "%30x7f.1",
    "１２７.０.０.１",
    "①②⑦.⓪.⓪.①",
    "127。0。0。1",
    "127．0．0．1",
    "127.0.0.１",
    "٣.example.com",
    // IPv6.
    "[::1]",
    "[0:0:0:0:0:0:0:1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::127.0.0.1]",
    "[64:ff9b::a9fe:a9fe]",
    "[2002:7f00:1::]",
    "[2606:2800:220:1:248:1893:25c8:1946]",
    "[2606:2800:0220:0001:0248:1893:25C8:1946]",
    "[2606:2800:220:1:248:1893:93.184.216.34]",
    "[fe80::1%25eth0]",
    "[fe80::1%eth0]",
    "[::1",
    "::1",
    "[[::1]]",
    "[::1].example.com",
    "[1:2:3:4:5:6:7:8:9]",
    "[::1::]",
    "[::ffff:0177.0.0.1]",
    "[::ffff:1.2.3]",
    "[v1.x]",
    // What Unicode folds into something else.
    "ⓛocalhost",
    "loc\u{ad}alhost",
    "exam\u{200b}ple.com",
    "exam\u{2060}ple.com",
    "ex\u{ff41}mple.com",
    "example\u{3002}com",
    "example\u{ff0e}com",
    "example\u{ff61}com",
    "example.com\u{ff0f}evil.com",
    "example.com\u{ff03}evil.com",
    "example.com\u{ff20}evil.com",
    "example.com\u{ff1a}80",
    "\u{2100}.example.com",
    "example.c\u{2105}.com",
    "a\u{2024}b.com",
    "bücher.example.com",
    "BÜCHER.example.com",
    "b\u{75}\u{308}cher.example.com",
    "xn--bcher-kva.example.com",
    "XN--BCHER-KVA.example.com",
    "xn--example-.org",
    "xn--a.example.com",
    "xn--.example.com",
    "xn--55qx5d8y0buji4b870u.example.com",
    "faß.example.com",
    "FASS.example.com",
    "ς.example.com",
    "σ.example.com",
    "İ.example.com",
    "ı.example.com",
    "K.example.com",
    "☃.example.com",
    "🚚.example.com",
    "\u{200d}.example.com",
    "עברית.example.com",
    "a\u{5d0}.example.com",
    "\u{202e}moc.elpmaxe",
    "\u{fffd}.example.com",
    // Characters that end a host for some.
    "exam ple.com",
    "exam\tple.com",
    "exam\nple.com",
    "exam\0ple.com",
    "exam\u{7f}ple.com",
    "exam<ple.com",
    "exam>ple.com",
    "exam^ple.com",
    "exam|ple.com",
    "exam`ple.com",
    "exam{ple}.com",
    "exam\"ple.com",
    "exam'ple.com",
    "exam!ple.com",
    "exam$ple.com",
    "exam&ple.com",
    "exam*ple.com",
    "exam+ple.com",
    "exam,ple.com",
    "exam;ple.com",
    "exam=ple.com",
    "exam~ple.com",
    "exam(ple).com",
];

/// What stands around the host. `{}` is its place.
const FORMS: &[&str] = &[
    "https://{}/",
    "http://{}/hook?a=b",
    "HTTPS://{}",
    "https://{}:443/",
    "https://{}:80/",
    "http://{}:80/",
    "https://{}:8443/x?y=z",
    "https://{}:08443/",
    "https://{}:/",
    "https://{}:0/",
    "https://{}:65536/",
    "https://{}:4294967739/",
    "https://{}:-1/",
    "https://{}:+1/",
    "https://{}:0x50/",
    "https://{}:８０/",
    "https://{}:80:443/",
    "https://user@{}/",
    "https://user:word@{}/",
    "https://@{}/",
    "https://:@{}/",
    "https://93.184.216.34@{}/",
    "https://{}@93.184.216.34/",
    "https://{}:80@93.184.216.34/",
    "https://{}\\@93.184.216.34/",
    "https://{}\\.93.184.216.34/",
    "https://{}/@93.184.216.34/",
    "https://{}?@93.184.216.34/",
    "https://{}#@93.184.216.34/",
    "https://{};@93.184.216.34/",
    "https://93.184.216.34#@{}/",
    "https://93.184.216.34?@{}/",
    "https://93.184.216.34/@{}/",
    "https://93.184.216.34\\@{}/",
    "https://93.184.216.34%2f@{}/",
    "https://93.184.216.34:80\\@{}/",
    "https:{}/",
    "https:/{}/",
    "https:///{}/",
    "https:\\\\{}\\",
    "https:/\\{}/",
    "https:////{}/",
    "//{}/",
    "{}",
    "https//{}/",
    " https://{}/",
    "https://{}/ ",
    "ht\ttps://{}/",
    "https:\n//{}/",
    "https://\t{}/",
    "https://{}/a/../../b/%2e%2e/c",
    "https://{}/\u{e9}?\u{e9}",
    "https://{}/a b?c d",
    "https://{}?x",
    "https://{}/%00",
    "ftp://{}/",
    "gopher://{}/",
    "file://{}/",
    "javascript://{}/",
    "wss://{}/",
    "http+unix://{}/",
    "blob:https://{}/",
];

fn spellings() -> Vec<String> {
    let of = |host: &&str| {
        FORMS
            .iter()
            .map(|form| form.replace("{}", host))
            .collect::<Vec<_>>()
    };
    HOSTS.iter().flat_map(of).collect()
}

/// As Node sees it: whether it is plain, the host, the port.
fn seen_by_node(url: &Value) -> Option<(String, String, u16)> {
    let text = |name: &str| url[name].as_str();
    let (protocol, port) = (text("protocol")?, text("port")?);
    let usual = if protocol == "https:" { 443 } else { 80 };
    let port = if port.is_empty() {
        usual
    } else {
        port.parse().ok()?
    };
    assert_eq!(text("extra"), Some(""), "a name, a password or a fragment: {url}");
    Some((
        protocol.trim_end_matches(':').to_owned(),
        text("hostname")?.to_owned(),
        port,
    ))
}

/// As the client sees it that makes the connection.
fn seen_by_client(url: &str) -> Option<(String, String, u16)> {
    let uri: Uri = url.parse().ok()?;
    let scheme = uri.scheme_str()?.to_owned();
    let usual = if scheme == "https" { 443 } else { 80 };
    let authority = uri.authority()?;
    assert!(!authority.as_str().contains('@'), "{url}");
    Some((scheme, uri.host()?.to_owned(), uri.port_u16().unwrap_or(usual)))
}

#[test]
fn where_a_url_is_taken_the_guard_the_client_and_node_see_the_same_host_and_port() {
    let closed = Guard {
        allow_http: true,
        ..Guard::default()
    };
    // With every network open, hosts that are numbers are taken too, and can be compared.
    let opened = Guard {
        allow_networks: ["0.0.0.0/0", "::/0"]
            .map(|net| net.parse().expect("a network"))
            .to_vec(),
        ..closed.clone()
    };
    let texts = spellings();
    let node = node_on_urls(&texts);
    assert_eq!(node.len(), texts.len());
    let mut wrong = Vec::new();
    let mut taken = [0, 0];
    for (text, node) in texts.iter().zip(&node) {
        for (guard, taken) in [&closed, &opened].into_iter().zip(&mut taken) {
            let Ok(url) = guard.check_url(text) else { continue };
            *taken += 1;
            let judged = (
                url.scheme().to_owned(),
                url.host_str().unwrap_or_default().to_owned(),
                url.port_or_known_default().unwrap_or_default(),
            );
            let (called, other) = (seen_by_client(url.as_str()), seen_by_node(node));
            if called.as_ref() != Some(&judged) || other.as_ref() != Some(&judged) {
                wrong.push(format!(
                    "{text:?}: judged {judged:?}, called {called:?}, Node {other:?}"
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {}: {wrong:#?}", wrong.len(), texts.len());
    println!("{} spellings, {taken:?} taken", texts.len());
    assert!(
        texts.len() > 5_000 && taken[0] > 200 && taken[1] > taken[0] + 200,
        "{taken:?}"
    );
}
