//! Libraries that nobody here wrote, as judges of our signatures: Stripe's and Standard Webhooks' for Python and Node,
//! Standard Webhooks' for Rust, and Node's own ed25519.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use data_encoding::BASE64;
use serde_json::json;

use super::receiver::Received;

/// A request, a secret or public key, and whether the one must verify with the other.
pub(crate) struct Case<'a> {
    pub(crate) request: &'a Received,
    pub(crate) format: &'static str,
    pub(crate) secret: &'a str,
    pub(crate) valid: bool,
}

/// Asks every judge about every case, and tells how many answers were given. They must be the ones expected.
pub(crate) fn judge(cases: &[Case<'_>]) -> usize {
    let mut lines = String::new();
    for (number, case) in cases.iter().enumerate() {
        let request = case.request;
        let line = json!({
            "name": format!("{} ({number})", request.event_id()),
            "format": case.format,
            "id": request.event_id(),
            "timestamp": request.header("webhook-timestamp"),
            "signature": request.header("webhook-signature"),
            "body": BASE64.encode(&request.body),
            "secret": case.secret,
            "valid": case.valid,
        });
        lines.push_str(&format!("{line}\n"));
    }
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), lines).expect("written");
    let mut answers = judged(Command::new(python()).arg(script("verify.py")).arg(file.path()));
    answers += judged(
        Command::new(node())
            .env("NODE_PATH", node_path())
            .arg(script("verify.cjs"))
            .arg(file.path()),
    );
    for case in cases.iter().filter(|case| case.format == "standard") {
        let webhook = standardwebhooks::Webhook::new(case.secret).expect("a secret");
        let verified = webhook.verify(&case.request.body, &case.request.headers);
        assert_eq!(verified.is_ok(), case.valid, "rust: {verified:?}");
        answers += 1;
    }
    answers
}

/// What Node makes of each of these URLs: null for none.
pub(crate) fn node_on_urls(texts: &[String]) -> Vec<serde_json::Value> {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), json!(texts).to_string()).expect("written");
    let mut command = Command::new(node());
    let output = command.arg(script("urls.cjs")).arg(file.path()).output();
    let output = output.expect("Node runs");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    serde_json::from_slice(&output.stdout).expect("an array")
}

fn judged(command: &mut Command) -> usize {
    let output = command.output().expect("the judge runs");
    let told = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(!told.contains("disagrees"), "{told}");
    let last = told.lines().last().and_then(|line| line.strip_prefix("judged "));
    last.and_then(|count| count.parse().ok()).expect("a count")
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/judges")
        .join(name)
}

/// The Python that has the libraries, with a Go beside it: `make test` says where it is.
pub(crate) fn python() -> PathBuf {
    installed("POSTRIDER_TEST_PYTHON")
}

/// The program itself: what the Python package puts beside Python is a script that would outlive its end.
pub(crate) fn node() -> PathBuf {
    node_path().with_file_name("node")
}

fn node_path() -> PathBuf {
    installed("POSTRIDER_TEST_NODE_PATH")
}

fn installed(name: &str) -> PathBuf {
    std::env::var_os(name)
        .map(PathBuf::from)
        .unwrap_or_else(|| panic!("{name} is not set: `make test` installs the libraries and sets it"))
}
