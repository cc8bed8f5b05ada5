//! Where requests may go: the real guard, fully on, in a network of the test's own. What is called the internet in there
//! lies on its loopback, and decoys stand where nothing may ever knock.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::support::{
    ADMIN_API_KEY, ADMIN_PASSWORD, Answer, DataFolder, Launch, MASTER_KEY, NameServer, Postrider, Receiver,
    Reply, database_inside, run_inside, until,
};

const PUBLIC: &str = "93.184.216.34";
const PUBLIC_V6: &str = "2606:2800:220:1:248:1893:25c8:1946";

/// Where an attacker would like to get.
const DECOYS: [&str; 7] = [
    "127.0.0.1:80",
    "127.0.0.1:3128",
    "10.0.0.1:80",
    "169.254.169.254:80",
    "100.100.100.200:80",
    "[::1]:80",
    "[fd00:ec2::254]:80",
];

#[tokio::test]
async fn whatever_the_dns_says_only_public_addresses_are_called() {
    let addresses = &[
        "93.184.216.34/32",
        "2606:2800:220:1:248:1893:25c8:1946/128",
        "10.0.0.1/32",
        "169.254.169.254/32",
        "100.100.100.200/32",
        "fd00:ec2::254/128",
    ];
    run_inside("egress::inside", addresses).await;
}

/// Counts who knocks.
struct Decoy(Arc<AtomicUsize>);

impl Decoy {
    async fn at(address: &str) -> Self {
        let listener = TcpListener::bind(address).await.expect(address);
        let knocks = Arc::new(AtomicUsize::new(0));
        let counted = knocks.clone();
        tokio::spawn(async move {
            while listener.accept().await.is_ok() {
                counted.fetch_add(1, Ordering::SeqCst);
            }
        });
        Self(knocks)
    }
}

/// Everything is as in production, and the environment has a proxy that nobody configured (A34).
async fn start(data: &DataFolder) -> Postrider {
    let mut launch = Launch::new("up")
        .set("POSTRIDER_DATABASE_URL", database_inside())
        .set("POSTRIDER_DATA_DIR", data.path().display())
        .set("POSTRIDER_LISTEN", "127.0.0.1:0")
        .set("POSTRIDER_MASTER_KEY", MASTER_KEY)
        .set("POSTRIDER_ADMIN_API_KEY", ADMIN_API_KEY)
        .set("POSTRIDER_ADMIN_PASSWORD", ADMIN_PASSWORD)
        .set("POSTRIDER_RETRY_JITTER", "0")
        .set("POSTRIDER_ALLOW_HTTP", "true");
    for name in [
        "HTTP_PROXY",
        "http_proxy",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "all_proxy",
    ] {
        launch = launch.set(name, "http://127.0.0.1:3128");
    }
    launch.start().await
}

/// How a name ends up, by what its delivery says: `delivered`, or the reason it is dead.
const ENDS: [(&str, &str); 17] = [
    ("good.example.com", "delivered"),
    ("six.example.com", "delivered"),
    ("both.example.com", "delivered"),
    ("alias.example.com", "delivered"),
    (PUBLIC, "delivered"),
    ("[2606:2800:220:1:248:1893:25c8:1946]", "delivered"),
    ("169.254.169.254.nip.io", "refused_address"),
    ("mixed.example.com", "refused_address"),
    ("families.example.com", "refused_address"),
    ("mapped.example.com", "refused_address"),
    ("nat64.example.com", "refused_address"),
    ("nowhere.example.com", "refused_address"),
    ("inward.example.com", "refused_address"),
    ("thousand.example.com", "refused_address"),
    ("broken.example.com", "exhausted"),
    ("absent.example.com", "exhausted"),
    ("silent.example.com", "exhausted"),
];

async fn name_server() -> NameServer {
    let mut thousand: Vec<_> = (0..999_u32)
        .map(|n| std::net::Ipv4Addr::from(0x5db8_0000 + n).into())
        .collect();
    thousand.push([10, 0, 0, 1].into());
    NameServer::start([
        ("good.example.com", Reply::addresses([PUBLIC])),
        ("six.example.com", Reply::addresses([PUBLIC_V6])),
        ("both.example.com", Reply::addresses([PUBLIC, PUBLIC_V6])),
        (
            "alias.example.com",
            Reply::Alias("target.example.net", vec![PUBLIC.parse().expect("an address")]),
        ),
        // A28.
        ("169.254.169.254.nip.io", Reply::addresses(["169.254.169.254"])),
        // A30.
        ("mixed.example.com", Reply::addresses([PUBLIC, "10.0.0.1"])),
        ("families.example.com", Reply::addresses([PUBLIC, "::1"])),
        // A31, and what else an answer can hold.
        ("mapped.example.com", Reply::addresses(["::ffff:10.0.0.1"])),
        ("nat64.example.com", Reply::addresses(["64:ff9b::a00:1"])),
        ("nowhere.example.com", Reply::addresses(["0.0.0.0"])),
        (
            "inward.example.com",
            Reply::Alias("metadata.google.internal", vec![[169, 254, 169, 254].into()]),
        ),
        ("thousand.example.com", Reply::Addresses(thousand)),
        ("broken.example.com", Reply::Failure),
        ("silent.example.com", Reply::Silence),
        // A29: by the time of the second attempt the name points inside.
        (
            "rebound.example.com",
            Reply::Turns(vec![Reply::addresses([PUBLIC]), Reply::addresses(["127.0.0.1"])]),
        ),
        // A32, A33.
        ("redirect.example.com", Reply::addresses([PUBLIC])),
    ])
    .await
}

#[tokio::test]
#[ignore = "run inside a namespace by the test above"]
async fn inside() {
    let mut decoys = BTreeMap::new();
    for address in DECOYS {
        decoys.insert(address, Decoy::at(address).await);
    }
    let _names = name_server().await;
    let four = Receiver::start_at(&format!("{PUBLIC}:80")).await;
    let six = Receiver::start_at(&format!("[{PUBLIC_V6}]:80")).await;
    four.decide(|request| match request.path.as_str() {
        "/rebound" => Answer::StatusAnd(500, "connection", "close".to_owned()),
        "/redirect" => Answer::Redirect("http://169.254.169.254/latest/meta-data/".to_owned()),
        _ => Answer::Status(204),
    });
    let data = DataFolder::new();
    let program = start(&data).await;
    let api = program.api();
    api.tenant("acme").await;
    api.event_type("invoice.paid").await;

    let mut endpoints = BTreeMap::new();
    let names = ENDS.into_iter().chain([
        ("rebound.example.com", "refused_address"),
        ("redirect.example.com", "exhausted"),
    ]);
    for (name, end) in names {
        let path = name.split('.').next().unwrap_or_default();
        let waits = if name.starts_with("rebound") {
            vec!["0s", "1s"]
        } else {
            vec!["0s"]
        };
        let more = json!({ "retry_schedule": waits, "timeout_ms": 3_000 });
        let made = api.endpoint("acme", &format!("http://{name}/{path}"), more).await;
        endpoints.insert(made.id, (name, end));
    }
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    api.wait_for_state("acme", "delivered", 6).await;
    let waiting = api.deliveries("acme", "state=pending").await;
    let silent = |delivery: &Value| {
        endpoints[delivery["endpoint"].as_str().expect("an endpoint")].0 == "silent.example.com"
    };
    assert!(
        waiting.iter().any(silent),
        "a name server that is silent for one name holds up no other"
    );

    let deliveries = until("every delivery has ended", || async {
        let all = api.deliveries("acme", "limit=100").await;
        let ended = all.iter().all(|delivery| delivery["state"] != "pending");
        (ended && all.len() == endpoints.len()).then_some(all)
    })
    .await;
    let mut words = BTreeMap::new();
    for delivery in deliveries {
        let (name, end) = endpoints[delivery["endpoint"].as_str().expect("an endpoint")];
        let ended = match &delivery["reason"] {
            Value::String(reason) => reason.as_str(),
            _ => delivery["state"].as_str().expect("a state"),
        };
        let id = delivery["id"].as_str().expect("an id");
        let whole = api.get(&format!("/tenants/acme/deliveries/{id}")).await;
        assert_eq!(ended, end, "{name}: {whole:#}");
        let error = whole["attempts"]
            .as_array()
            .and_then(|all| all.last())
            .map(|last| &last["error"]);
        words.insert(name, error.and_then(Value::as_str).unwrap_or_default().to_owned());
    }
    let knocked: Vec<_> = decoys
        .iter()
        .filter(|(_, decoy)| decoy.0.load(Ordering::SeqCst) > 0)
        .map(|(address, _)| address)
        .collect();
    assert!(knocked.is_empty(), "{knocked:?}");
    assert_eq!(
        four.received()
            .iter()
            .filter(|request| request.path == "/rebound")
            .count(),
        1
    );
    assert!(six.count() >= 2, "both families are used");

    for (name, told) in [
        (
            "169.254.169.254.nip.io",
            "the address 169.254.169.254 is not on the public internet",
        ),
        (
            "mixed.example.com",
            "the address 10.0.0.1 is not on the public internet",
        ),
        (
            "absent.example.com",
            "DNS lookup failed for absent.example.com: no such name",
        ),
        (
            "broken.example.com",
            "DNS lookup failed for broken.example.com: the name servers did not respond",
        ),
        ("silent.example.com", "no connection within 3 s"),
    ] {
        assert_eq!(words[name], told);
    }
}

/// Loopback is opened, as on a developer's machine: Postrider itself is no endpoint all the same.
#[tokio::test]
async fn postrider_s_own_addresses_are_no_endpoints() {
    use crate::support::Database;
    let database = Database::fresh().await;
    let program = Postrider::start_with(
        &database,
        &[
            ("POSTRIDER_METRICS_LISTEN", "127.0.0.1:0"),
            ("POSTRIDER_GRPC_LISTEN", "127.0.0.1:0"),
            ("POSTRIDER_PUBLIC_URL", "https://hooks.example.com"),
        ],
    )
    .await;
    let api = program.api();
    let receiver = Receiver::start().await;
    let endpoint = api
        .acme(&receiver.url("/"), json!({ "retry_schedule": ["0s"] }))
        .await;
    let listening: Vec<SocketAddr> = program
        .log_lines()
        .iter()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|line| line["message"] == "listening")
        .map(|line| {
            line["address"]
                .as_str()
                .expect("an address")
                .parse()
                .expect("an address")
        })
        .collect();
    assert_eq!(listening.len(), 3, "API, metrics, gRPC: {listening:?}");
    let mut ours: Vec<String> = listening
        .iter()
        .map(|address| format!("http://{address}/"))
        .collect();
    ours.push(format!("http://[::ffff:127.0.0.1]:{}/", listening[0].port()));
    ours.push("https://hooks.example.com/v1".to_owned());
    for url in ours {
        let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
        for (method, path) in [
            (reqwest::Method::PATCH, path.as_str()),
            (reqwest::Method::POST, "/tenants/acme/endpoints"),
        ] {
            let (status, problem) = api.call(method, path, Some(json!({ "url": url }))).await;
            assert_eq!(status, 422, "{url}: {problem}");
            assert_eq!(problem["errors"][0]["pointer"], "/url");
            assert!(problem.to_string().contains("is Postrider itself"), "{problem}");
        }
    }
    // What got in before the rule, or around it, is refused when it is sent.
    let smuggled = format!("update postrider.endpoints set url = 'http://{}/'", listening[1]);
    database.execute(&smuggled).await;
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let dead = api.wait_for_state("acme", "dead", 1).await;
    assert_eq!(dead[0]["reason"], "refused_address", "{dead:?}");
}
