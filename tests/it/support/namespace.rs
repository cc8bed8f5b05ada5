//! A network of a test's own: what is called the internet in there is this machine's loopback, so that the real guard
//! can be tried, and taken out, without a packet leaving.

use std::{path::Path, process::Command};

use super::{Database, skip};

/// Set where namespaces are known to work, as `.ci/run` does: then not being able to make one is a failure.
const REQUIRED: &str = "POSTRIDER_TEST_REQUIRE_NAMESPACES";
type Way = &'static [&'static str];

/// The database of a test that runs inside, which sockets in the file system lead to.
const DATABASE: &str = "POSTRIDER_TEST_DATABASE_INSIDE";

/// Makes the namespace, gives its loopback these addresses, and runs the test of this name in it.
pub(crate) async fn run_inside(test: &'static str, addresses: &'static [&'static str]) {
    let Some(way) = how_to_unshare() else {
        assert!(
            std::env::var_os(REQUIRED).is_none_or(|value| value.is_empty()),
            "THE ADDRESS GUARD IS NOT TESTED HERE: no network namespace can be made, and {REQUIRED} is set. Run the tests as \
             root, or where unprivileged user namespaces are allowed; `unshare` and `ip` must be installed."
        );
        return skip(
            test,
            "no network namespace can be made: run the tests as root, or where unprivileged user namespaces are allowed",
        );
    };
    let database = Database::fresh().await;
    let (url, folder) = (database.url(), tempfile::tempdir().expect("a folder"));
    let ended = tokio::task::spawn_blocking(move || enter(way, test, addresses, &url, folder.path())).await;
    let output = ended.expect("waited for");
    let told = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (printed, complaints) = (told(&output.stdout), told(&output.stderr));
    assert!(
        output.status.success() && printed.contains("1 passed"),
        "{test} inside the namespace: {printed}\n{complaints}"
    );
}

fn enter(way: Way, test: &str, addresses: &[&str], url: &str, folder: &Path) -> std::process::Output {
    let servers = folder.join("resolv.conf");
    std::fs::write(&servers, "nameserver 127.0.0.1\n").expect("written");
    let script = "set -e
        ip link set lo up
        servers=$1; shift
        while [ \"$1\" != -- ]; do ip address add \"$1\" dev lo; shift; done
        mount --bind \"$servers\" /etc/resolv.conf
        shift
        exec \"$@\"";
    Command::new("unshare")
        .args(way)
        .args(["sh", "-c", script, "sh"])
        .arg(&servers)
        .args(addresses)
        .arg("--")
        .arg(std::env::current_exe().expect("this program"))
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(DATABASE, url)
        .output()
        .expect("unshare runs")
}

/// As root, or as anybody where the system lets them.
fn how_to_unshare() -> Option<Way> {
    const WAYS: [Way; 2] = [&["--net", "--mount"], &["--net", "--mount", "--map-root-user"]];
    let works = |way: &Way| {
        let tried = Command::new("unshare").args(*way).arg("true").output();
        tried.is_ok_and(|output| output.status.success())
    };
    WAYS.into_iter().find(works)
}

/// The database, for a test that is run inside.
pub(crate) fn database_inside() -> String {
    std::env::var(DATABASE).expect("this test runs only inside the namespace that another test makes")
}
