//! The receivers in `examples/`: each refuses whatever was forged, and handles what is genuine exactly once.

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, mpsc},
};

use postrider_proto::signature::{Secret, SignatureFormat, sign};
use reqwest::Client;
use tempfile::TempDir;

use crate::support::{Database, PATIENCE, node, python, until};

const OLD_SECRET: &str = "whsec_b2xkLXNlY3JldC1vZi10aGUtcmVjZWl2ZXI=";
const SECRET: &str = "whsec_bmV3LXNlY3JldC1vZi10aGUtcmVjZWl2ZXI=";
const STRANGER: &str = "whsec_c2VjcmV0LW9mLWFub3RoZXItdGVuYW50LS0=";

struct Example {
    child: Child,
    url: String,
    told: Arc<Mutex<Vec<String>>>,
    client: Client,
    _folder: TempDir,
}

impl Example {
    async fn start(mut command: Command) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut child = command
            .env("PORT", "0")
            .env("WEBHOOK_SECRET", format!("{SECRET},{OLD_SECRET}"))
            .current_dir(folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the example starts");
        let stdout = child.stdout.take().expect("piped");
        let told = Arc::new(Mutex::new(Vec::new()));
        let (found, url) = mpsc::channel();
        let kept = told.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                match line.strip_prefix("listening on ") {
                    Some(url) => drop(found.send(url.to_owned())),
                    None => kept.lock().expect("not poisoned").push(line),
                }
            }
        });
        let url = tokio::task::spawn_blocking(move || url.recv_timeout(PATIENCE)).await;
        Self {
            child,
            url: url.expect("a thread").expect("the example tells its address"),
            told,
            // A connection for each request: one whose body was too large is closed by some while the next would use it.
            client: crate::support::http_client()
                .pool_max_idle_per_host(0)
                .build()
                .expect("a client"),
            _folder: folder,
        }
    }

    async fn post(&self, header: Option<&str>, body: &[u8]) -> u16 {
        let mut request = self.client.post(format!("{}/hook", self.url)).body(body.to_vec());
        if let Some(header) = header {
            request = request.header("webhook-signature", header);
        }
        request.send().await.expect("an answer").status().as_u16()
    }

    /// Sends what was signed now.
    async fn deliver(&self, body: &str) -> u16 {
        self.post(Some(&signed(SECRET, 0, body)), body.as_bytes()).await
    }

    async fn wait_for_lines(&self, count: usize) -> Vec<String> {
        until("the example has told what it did", || async {
            let told = self.told.lock().expect("not poisoned").clone();
            (told.len() >= count).then_some(told)
        })
        .await
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A header made by this secret, so many seconds from now.
fn signed(secret: &str, seconds: i64, body: &str) -> String {
    let t = chrono::Utc::now().timestamp() + seconds;
    let secrets = [Secret::new(secret)];
    sign(SignatureFormat::TV1, "", t, body.as_bytes(), &secrets)
}

fn event(id: &str, invoice: &str, sequence: Option<u32>) -> String {
    let sequence = sequence.map_or(String::new(), |n| format!(r#""sequence":{n},"#));
    format!(r#"{{"id":"{id}","type":"invoice.paid",{sequence}"data":{{"id":"{invoice}"}}}}"#)
}

async fn refuses_what_is_forged(example: &Example) {
    let body = event("evt_forged", "inv_1", None);
    let good = signed(SECRET, 0, &body);
    let (time, hex) = good.split_once(",v1=").expect("one signature");
    let time_changed = good.replace(time, &format!("t={}", chrono::Utc::now().timestamp() - 1));
    let stranger = signed(STRANGER, 0, &body);
    let long = format!("{time}{}", format!(",v1={hex}").repeat(11));
    for (what, header) in [
        ("a changed timestamp", time_changed.as_str()),
        ("a stale timestamp", &signed(SECRET, -302, &body)),
        ("a timestamp to come", &signed(SECRET, 600, &body)),
        ("another tenant's secret", &stranger),
        ("an empty secret", &signed("", 0, &body)),
        ("a truncated signature", &good[..good.len() - 1]),
        ("a longer signature", &format!("{good}0")),
        ("half a header", &good[..good.len() / 2]),
        ("no signature", time),
        ("an empty signature", &format!("{time},v1=")),
        ("an unknown scheme", &format!("{time},v0={hex}")),
        ("no time", &format!("v1={hex}")),
        ("two times", &format!("{time},{good}")),
        ("a negative time", &good.replace("t=", "t=-")),
        ("a time that is none", &format!("t=1e9,v1={hex}")),
        (
            "a time past all bounds",
            &format!("t=99999999999999999999,v1={hex}"),
        ),
        ("too many signatures", &long),
        ("garbage", ";;=,=,v1,t==%00"),
        ("an empty header", ""),
    ] {
        assert_eq!(example.post(Some(header), body.as_bytes()).await, 401, "{what}");
    }
    assert_eq!(example.post(None, body.as_bytes()).await, 401, "no header");
    let changed = body.replace("inv_1", "inv_2");
    assert_eq!(
        example.post(Some(&good), changed.as_bytes()).await,
        401,
        "a changed body"
    );
    let respaced = body.replace(',', ", ");
    assert_eq!(
        example.post(Some(&good), respaced.as_bytes()).await,
        401,
        "a body written anew"
    );
    assert_eq!(example.deliver("[]").await, 400, "genuine, but no event");
    // Refused by its length, before anybody works on it. Some close the connection while we still write.
    let large = " ".repeat(2 * 1024 * 1024);
    let header = signed(SECRET, 0, &large);
    let request = example.client.post(format!("{}/hook", example.url));
    let answer = request
        .header("webhook-signature", header)
        .body(large)
        .send()
        .await;
    if let Ok(answer) = answer {
        assert_eq!(answer.status(), 413, "a body that is too large");
    }
    assert!(example.wait_for_lines(0).await.is_empty(), "nothing was handled");
}

async fn handles_each_event_once(example: &Example) {
    let first = event("evt_1", "inv_1", Some(2));
    let copies = (0..10).map(|_| example.deliver(&first));
    for status in join_all(copies).await {
        assert_eq!(status, 204);
    }
    // Both signatures, the way it is during a rotation; the old one alone; then one that is late and one without order.
    let second = event("evt_2", "inv_1", Some(3));
    let both = format!(
        "{},v1={}",
        signed(STRANGER, 0, &second),
        signed(OLD_SECRET, 0, &second).split_once("v1=").expect("one").1
    );
    assert_eq!(example.post(Some(&both), second.as_bytes()).await, 204);
    let late = event("evt_0", "inv_1", Some(1));
    let header = signed(OLD_SECRET, -290, &late);
    assert_eq!(example.post(Some(&header), late.as_bytes()).await, 204);
    for id in ["evt_3", "evt_4"] {
        assert_eq!(example.deliver(&event(id, "inv_2", None)).await, 204);
    }
    let mut told = example.wait_for_lines(14).await;
    told.sort();
    let expected = ["handled evt_1", "handled evt_2", "handled evt_3", "handled evt_4"];
    let seen = vec!["seen before evt_1"; 9];
    assert_eq!(told, [expected.to_vec(), seen, vec!["stale evt_0"]].concat());
}

/// The requests go out at the same time.
async fn join_all<F: Future<Output = u16>>(requests: impl Iterator<Item = F>) -> Vec<u16> {
    let mut waiting: Vec<_> = requests.map(Box::pin).collect();
    let mut answers = Vec::new();
    std::future::poll_fn(|context| {
        waiting.retain_mut(|request| match request.as_mut().poll(context) {
            std::task::Poll::Ready(status) => {
                answers.push(status);
                false
            }
            std::task::Poll::Pending => true,
        });
        if waiting.is_empty() {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
    answers
}

async fn try_out(command: Command) {
    let example = Example::start(command).await;
    refuses_what_is_forged(&example).await;
    handles_each_event_once(&example).await;
}

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("examples/receivers")
        .join(name)
}

#[tokio::test]
async fn the_python_receiver_believes_only_what_is_genuine_and_handles_it_once() {
    let mut command = Command::new(python());
    command.arg(source("receiver.py"));
    try_out(command).await;
}

#[tokio::test]
async fn the_node_receiver_believes_only_what_is_genuine_and_handles_it_once() {
    let mut command = Command::new(node());
    command.arg(source("receiver.mjs"));
    try_out(command).await;
}

#[tokio::test]
async fn the_go_receiver_believes_only_what_is_genuine_and_handles_it_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("receiver");
    let python = python();
    // Beside the Python libraries, so that a second run has less to do.
    let cache = python
        .parent()
        .and_then(Path::parent)
        .expect("a folder")
        .join("go");
    let built = Command::new(python.with_file_name("go"))
        .args(["build", "-o"])
        .arg(&program)
        .arg(source("receiver.go"))
        .env("GOCACHE", cache.join("cache"))
        .env("GOPATH", cache)
        .env("GOTOOLCHAIN", "local")
        .env("CGO_ENABLED", "0")
        .output()
        .expect("go runs");
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    try_out(Command::new(program)).await;
}

#[tokio::test]
async fn the_rust_receiver_believes_only_what_is_genuine_and_handles_it_once() {
    let database = Database::empty().await;
    let tests = std::env::current_exe().expect("our own path");
    let folder = tests.parent().and_then(Path::parent).expect("a target folder");
    // `cargo test` has built it; when one test alone is run, nobody has.
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--example", "receiver"]);
    if folder.ends_with("release") {
        build.arg("--release");
    }
    assert!(build.status().expect("cargo runs").success());
    let mut command = Command::new(folder.join("examples/receiver"));
    command.env("WEBHOOK_DATABASE", database.url());
    try_out(command).await;
}
