//! What the system was asked for: every `connect` of a dispatcher and a dashboard, as strace saw it, while they are given
//! endpoints that lead where nothing may go. The guard is fully on, in a network of the test's own.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    path::Path,
};

use reqwest::Method;
use serde_json::json;
use sqlx::Connection;

use crate::support::{
    ADMIN_API_KEY, ADMIN_PASSWORD, Answer, Launch, MASTER_KEY, NameServer, Receiver, Reply, database_inside,
    run_inside, until,
};

const PUBLIC: &str = "93.184.216.34";
const PUBLIC_V6: &str = "2606:2800:220:1:248:1893:25c8:1946";
const NAME_SERVER: &str = "127.0.0.1:53";

/// Hosts, with or without a port, that got into the table around the check. Each is another way to write a place that
/// must not be called.
const FORBIDDEN: &[&str] = &[
    // As they are.
    "127.0.0.1",
    "127.8.8.8:8080",
    "0.0.0.0",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.0.1",
    "169.254.169.254",
    "100.100.100.200",
    "192.0.0.192",
    "198.18.0.1",
    "192.88.99.1",
    "203.0.113.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "168.63.129.16",
    // Decimal, hexadecimal, octal, in fewer parts.
    "2130706433",
    "2852039166",
    "0x7f000001",
    "0xA9FEA9FE",
    "0x7f.1",
    "0177.0.0.1",
    "017700000001",
    "0251.0376.0251.0376",
    "127.1",
    "10.1",
    "169.254.43518",
    "0",
    "127.0.0.1.",
    "%31%32%37.0.0.1",
    "１２７.０.０.１",
    "①②⑦.⓪.⓪.①",
    "127。0。0。1",
    // IPv6.
    "[::1]",
    "[::]",
    "[fe80::1]",
    "[fec0::1]",
    "[fd00:ec2::254]",
    "[ff02::1]",
    "[5f00::1]",
    "[100::1]",
    "[2001:db8::1]",
    // IPv4 inside of it: mapped, compatible, translated, NAT64 and its local prefix, 6to4, Teredo.
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::ffff:0.0.0.0]",
    "[::ffff:a9fe:a9fe]",
    "[::127.0.0.1]",
    "[::a9fe:a9fe]",
    "[::ffff:0:127.0.0.1]",
    "[64:ff9b::7f00:1]",
    "[64:ff9b::a9fe:a9fe]",
    "[64:ff9b:1::a9fe:a9fe]",
    "[2002:7f00:1::]",
    "[2002:a9fe:a9fe::1]",
    "[2001:0:4136:e378:8000:63bf:3fff:fdd2]",
    // Names that are known without a name server, and ports that speak something else.
    "localhost",
    "LOCALHOST.",
    "ⓛocalhost",
    "x.localhost",
    "metadata.google.internal",
    "93.184.216.34:22",
    "93.184.216.34:6379",
    "good.example.com:5432",
    "user:password@93.184.216.34",
];

/// Names that lead there.
const INWARD: [&str; 9] = [
    "four.example.com",
    "six.example.com",
    "mapped.example.com",
    "nat64.example.com",
    "sixtofour.example.com",
    "mixed.example.com",
    "families.example.com",
    "alias.example.com",
    "169.254.169.254.nip.io",
];

#[tokio::test]
async fn no_connection_to_a_forbidden_address_is_even_asked_for() {
    let addresses = &["93.184.216.34/32", "2606:2800:220:1:248:1893:25c8:1946/128"];
    run_inside("witness::inside", addresses).await;
}

/// The same without a namespace, where there may be none: every way to write an address, with a listener on loopback that
/// must hear nothing. Names, which need a name server that lies, are left to the test above.
#[tokio::test]
async fn no_form_of_a_forbidden_address_is_called_where_there_is_no_namespace() {
    let database = crate::support::Database::fresh().await;
    let decoy = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let port = decoy.local_addr().expect("an address").port();
    let knocked = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = knocked.clone();
    tokio::spawn(async move {
        while decoy.accept().await.is_ok() {
            counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        }
    });
    let data = crate::support::DataFolder::new();
    let program = crate::support::Postrider::on_database("up", &database)
        .unset("POSTRIDER_ALLOW_NETWORKS")
        .set("POSTRIDER_DATA_DIR", data.path().display())
        .start()
        .await;
    let api = program.api();
    api.tenant("acme").await;
    api.event_type("invoice.paid").await;
    let named = |host: &&str| !host.contains("example.com");
    let mut count = 0;
    for host in FORBIDDEN.iter().filter(|host| named(host)) {
        let more = json!({ "retry_schedule": ["0s"], "timeout_ms": 5_000 });
        let made = api.endpoint("acme", "http://93.184.216.34/", more).await;
        let url = match host.rsplit_once(':') {
            Some((_, port)) if port.parse::<u16>().is_ok() => format!("http://{host}/"),
            _ => format!("http://{host}:{port}/"),
        };
        sqlx::query("update postrider.endpoints set url = $1 where public_id = $2")
            .bind(&url)
            .bind(&made.id)
            .execute(&mut database.connect().await)
            .await
            .expect("smuggled in");
        count += 1;
    }
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let ended = api.wait_for_state("acme", "dead", count).await;
    for delivery in ended {
        assert_eq!(delivery["reason"], "refused_address", "{delivery}");
    }
    assert_eq!(knocked.load(std::sync::atomic::Ordering::SeqCst), 0);
}

async fn name_server() -> NameServer {
    let turns = |second: &str| Reply::Turns(vec![Reply::addresses([PUBLIC]), Reply::addresses([second])]);
    NameServer::start([
        ("good.example.com", Reply::addresses([PUBLIC, PUBLIC_V6])),
        ("four.example.com", Reply::addresses(["127.0.0.1"])),
        ("six.example.com", Reply::addresses(["::1"])),
        ("mapped.example.com", Reply::addresses(["::ffff:10.0.0.1"])),
        ("nat64.example.com", Reply::addresses(["64:ff9b::a9fe:a9fe"])),
        ("sixtofour.example.com", Reply::addresses(["2002:7f00:1::"])),
        ("mixed.example.com", Reply::addresses([PUBLIC, "10.0.0.1"])),
        ("families.example.com", Reply::addresses([PUBLIC, "::1"])),
        (
            "alias.example.com",
            Reply::Alias("metadata.google.internal", vec![[169, 254, 169, 254].into()]),
        ),
        ("169.254.169.254.nip.io", Reply::addresses(["169.254.169.254"])),
        (
            "crowd.example.com",
            Reply::Addresses((0..300).map(crowd).collect()),
        ),
        // Public to the first question, private to every other: whoever asks again before the connection is caught.
        ("rebinds.example.com", turns("127.0.0.1")),
        ("rebinds-later.example.com", turns("10.0.0.1")),
    ])
    .await
}

/// Nobody is there.
fn crowd(n: u16) -> IpAddr {
    IpAddr::from([93, 184, (n / 256) as u8, (n % 256) as u8])
}

/// A role as in production, watched from its first instruction.
fn watched(role: &'static str, log: &Path) -> Launch {
    let listen = match role {
        "dispatcher" => "POSTRIDER_METRICS_LISTEN",
        _ => "POSTRIDER_LISTEN",
    };
    let log = log.to_str().expect("plain");
    Launch::new(role)
        .under(&["strace", "-D", "-f", "-qq", "-e", "trace=connect", "-o", log])
        .set("POSTRIDER_DATABASE_URL", database_inside())
        .set(listen, "127.0.0.1:0")
        .set("POSTRIDER_MASTER_KEY", MASTER_KEY)
        .set("POSTRIDER_ADMIN_API_KEY", ADMIN_API_KEY)
        .set("POSTRIDER_ADMIN_PASSWORD", ADMIN_PASSWORD)
        .set("POSTRIDER_RETRY_JITTER", "0")
        .set("POSTRIDER_ALLOW_HTTP", "true")
}

/// Where a process wanted to go. Sockets in the file system have no port.
fn connects(log: &Path) -> Vec<SocketAddr> {
    let text = std::fs::read_to_string(log).expect("strace wrote its log");
    let read = |line: &str| {
        let port = line.split_once("htons(")?.1.split_once(')')?.0;
        let text = line
            .split_once("inet_addr(\"")
            .or(line.split_once("inet_pton(AF_INET6, \""))?;
        let address = text.1.split_once('"')?.0;
        Some(SocketAddr::new(address.parse().ok()?, port.parse().ok()?))
    };
    let of_network = |line: &&str| line.contains("connect(") && line.contains("sa_family=AF_INET");
    text.lines()
        .filter(of_network)
        .map(|line| read(line).unwrap_or_else(|| panic!("not understood: {line}")))
        .collect()
}

#[tokio::test]
#[ignore = "run inside a namespace by the test above"]
async fn inside() {
    let folder = tempfile::tempdir().expect("a folder");
    let logs = ["dashboard", "dispatcher"].map(|role| folder.path().join(role));
    let _names = name_server().await;
    let four = Receiver::start_at(&format!("{PUBLIC}:80")).await;
    let _six = Receiver::start_at(&format!("[{PUBLIC_V6}]:80")).await;
    four.decide(|request| match request.path.as_str() {
        "/later" => Answer::StatusAnd(500, "connection", "close".to_owned()),
        _ => Answer::Status(204),
    });
    let mut dashboard = watched("dashboard", &logs[0]).start().await;
    let api = dashboard.api();
    api.tenant("acme").await;
    api.event_type("invoice.paid").await;

    let forbidden = FORBIDDEN.iter().chain(&INWARD);
    let forbidden = forbidden.map(|host| (format!("http://{host}/"), "refused_address", ["0s"].as_slice()));
    let right = ["good.example.com", PUBLIC, &format!("[{PUBLIC_V6}]")]
        .map(|host| (format!("http://{host}/"), "delivered", ["0s"].as_slice()));
    // A name may have hundreds of addresses: few are tried.
    let crowded = [(
        "http://crowd.example.com/".to_owned(),
        "exhausted",
        ["0s"].as_slice(),
    )];
    let rebinding = [
        (
            "http://rebinds.example.com/".to_owned(),
            "delivered",
            ["0s"].as_slice(),
        ),
        (
            "http://rebinds-later.example.com/later".to_owned(),
            "refused_address",
            ["0s", "0s"].as_slice(),
        ),
    ];
    let mut database = sqlx::PgConnection::connect(&database_inside())
        .await
        .expect("connected");
    let mut endpoints = BTreeMap::new();
    for (url, end, waits) in forbidden.chain(right).chain(crowded).chain(rebinding) {
        let more = json!({ "retry_schedule": waits, "timeout_ms": 5_000 });
        let made = api.endpoint("acme", "http://good.example.com/", more).await;
        sqlx::query("update postrider.endpoints set url = $1 where public_id = $2")
            .bind(&url)
            .bind(&made.id)
            .execute(&mut database)
            .await
            .expect("smuggled in");
        endpoints.insert(made.id, (url, end));
    }
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let mut dispatcher = watched("dispatcher", &logs[1]).start().await;
    let deliveries = until("every delivery has ended", || async {
        let all = api.deliveries("acme", "limit=1000").await;
        let ended = all.iter().all(|delivery| delivery["state"] != "pending");
        (ended && all.len() == endpoints.len()).then_some(all)
    })
    .await;
    let mut wrong = Vec::new();
    for delivery in &deliveries {
        let (url, end) = &endpoints[delivery["endpoint"].as_str().expect("an endpoint")];
        let ended = delivery["reason"].as_str().or(delivery["state"].as_str());
        if ended != Some(*end) {
            wrong.push(format!("{url} ended as {ended:?}"));
        }
    }
    // The button for a test event is a second way out.
    for (id, (url, end)) in &endpoints {
        if *end == "refused_address" && !url.contains("rebinds") {
            let path = format!("/tenants/acme/endpoints/{id}/test");
            let (status, told) = api.call(Method::POST, &path, None).await;
            let refused = status == 422 || told["outcome"] == "forbidden_address";
            if !refused {
                wrong.push(format!("a test event to {url}: {status} {told}"));
            }
        }
    }
    assert!(dispatcher.stop().await.success());
    assert!(dashboard.stop().await.success());

    let asked_for: Vec<SocketAddr> = logs.iter().flat_map(|log| connects(log)).collect();
    let allowed = [
        format!("{PUBLIC}:80"),
        format!("[{PUBLIC_V6}]:80"),
        NAME_SERVER.to_owned(),
    ]
    .map(|text| text.parse::<SocketAddr>().expect("an address"));
    let crowd: BTreeSet<IpAddr> = (0..300).map(crowd).collect();
    let tried = asked_for.iter().filter(|place| crowd.contains(&place.ip()));
    let tried = tried.collect::<BTreeSet<_>>().len();
    let elsewhere: Vec<_> = asked_for
        .iter()
        .filter(|place| !allowed.contains(place) && !crowd.contains(&place.ip()))
        .collect();
    assert!(
        elsewhere.is_empty(),
        "connections were asked for: {elsewhere:?}; {wrong:#?}"
    );
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(
        (1..=6).contains(&tried),
        "{tried} addresses of one name were tried"
    );
    // The witness was awake.
    for place in &allowed[..2] {
        assert!(
            asked_for.contains(place),
            "{place} was called and not seen: {asked_for:?}"
        );
    }
}
