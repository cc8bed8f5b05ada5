//! `postrider doctor`: each fault has a verdict and advice, the exit status is that of the worst, and a bundle has no secrets.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use postrider_dispatcher::diagnosis;
use serde_json::{Value, json};

use crate::{
    statements::root,
    support::{ADMIN_API_KEY, ADMIN_PASSWORD, Database, Launch, MASTER_KEY, Postrider, Receiver},
};

fn doctor(role: &'static str, database: &Database) -> Launch {
    Postrider::on_database(role, database)
}

/// The report and the exit status.
fn report(database: &Database) -> (Value, Option<i32>) {
    let output = doctor("doctor --json", database).output();
    let told = String::from_utf8_lossy(&output.stdout);
    let report = serde_json::from_str(&told);
    let report =
        report.unwrap_or_else(|error| panic!("{error}: {told} {}", String::from_utf8_lossy(&output.stderr)));
    (report, output.status.code())
}

fn finding<'r>(report: &'r Value, check: &str) -> &'r Value {
    let checks = report["checks"].as_array().expect("a list");
    let found = checks.iter().find(|one| one["check"] == check);
    found.unwrap_or_else(|| panic!("no {check} in {report}"))
}

#[tokio::test]
async fn the_inventory_is_what_the_migrations_make() {
    let database = Database::empty().await;
    let pool = sqlx::PgPool::connect_with(database.options())
        .await
        .expect("connected");
    postrider_dispatcher::schema::migrate(&pool)
        .await
        .expect("migrated");
    let lines = diagnosis::inventory(&mut database.connect().await)
        .await
        .expect("listed");
    let text = lines.join("\n") + "\n";
    let path = root().join("migrations/inventory.txt");
    if fs::read_to_string(&path).unwrap_or_default() != text {
        fs::write(&path, text).expect("written");
        panic!("migrations/inventory.txt was out of date and was written again: commit it");
    }
}

#[tokio::test]
async fn a_sound_installation_has_no_error() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    let (report, status) = report(&database);
    for check in [
        "database.version",
        "database.durability",
        "database.clock",
        "database.transactions",
        "database.replication",
        "database.rights",
        "schema.version",
        "schema.drift",
        "secrets.master_key",
        "work.leases",
        "work.partitions",
        "work.stuck",
        "work.retries",
        "egress.names",
        "egress.connections",
        "machine.files",
    ] {
        assert_eq!(finding(&report, check)["verdict"], "ok", "{report}");
    }
    let worst = report["worst"].as_str().expect("a verdict");
    assert_ne!(worst, "error", "{report}");
    assert_eq!(status, Some(if worst == "ok" { 0 } else { 3 }));
    assert_eq!(receiver.count(), 0, "nothing is sent");
}

#[tokio::test]
async fn drift_is_found_and_named() {
    let database = Database::fresh().await;
    database.execute("drop index postrider.queue_keys").await;
    let (told, status) = report(&database);
    let drift = finding(&told, "schema.drift");
    assert_eq!((&drift["verdict"], status), (&json!("error"), Some(1)));
    assert!(
        drift["found"]
            .as_str()
            .expect("text")
            .contains("index queue_keys: CREATE INDEX"),
        "{drift}"
    );
    assert!(drift["advice"].is_string());

    let database = Database::fresh().await;
    database
        .execute(
            "alter table postrider.traces rename to traces_away;
             create table postrider.notes (id int);
             alter table postrider.queue disable trigger queue_wake;
             create or replace function postrider.uuid_time(id uuid) returns timestamptz language sql immutable
                 as 'select timestamptz ''epoch'''",
        )
        .await;
    let (told, _) = report(&database);
    let drift = finding(&told, "schema.drift")["found"]
        .as_str()
        .expect("text")
        .to_owned();
    assert!(
        drift.contains("column traces.context") && drift.contains("trigger queue_wake on queue"),
        "{drift}"
    );
    let version = finding(&told, "schema.version");
    assert!(
        version["found"]
            .as_str()
            .expect("text")
            .contains("functions event_ids"),
        "{version}"
    );
}

#[tokio::test]
async fn faults_of_the_work_have_their_verdicts() {
    let database = Database::fresh().await;
    let (told, status) = report(&database);
    assert_eq!(
        finding(&told, "work.leases")["verdict"],
        "error",
        "no dispatcher runs"
    );
    assert_eq!(status, Some(1));

    let program = Postrider::start(&database).await;
    program.api().tenant("acme").await;
    let stop = Some(json!({ "stopped": true, "reason": "maintenance" }));
    program.api().call(reqwest::Method::PUT, "/sending", stop).await;
    let (told, status) = report(&database);
    let sending = finding(&told, "work.sending");
    assert_eq!(
        (&sending["verdict"], status),
        (&json!("warning"), Some(3)),
        "{told}"
    );
    assert_eq!(sending["found"], "stopped: maintenance");
    let output = doctor("doctor", &database)
        .set(
            "POSTRIDER_MASTER_KEY",
            "ICEiIyQlJicoKSorLC0uLzAxMjM0NTY3ODk6Ozw9Pj8=",
        )
        .output();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(told.contains("warning secrets.master_key"), "{told}");
    assert!(told.contains("→"), "{told}");
}

#[tokio::test]
async fn a_database_that_can_not_be_reached_is_a_finding() {
    let database = Database::fresh().await;
    let nowhere = "postgresql://nobody@127.0.0.1:1/none";
    let output = doctor("doctor --json", &database)
        .set("POSTRIDER_DATABASE_URL", nowhere)
        .output();
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(finding(&report, "database.connection")["verdict"], "error");
    assert_eq!(output.status.code(), Some(1));
}

fn read_private(path: &Path) -> String {
    let mode = fs::metadata(path).expect("a file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    fs::read_to_string(path).expect("text")
}

#[tokio::test]
async fn a_support_bundle_contains_no_secret_and_nothing_of_a_tenant() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let endpoint = program
        .api()
        .acme(&receiver.url("/hook-of-acme"), json!({}))
        .await;
    let event = json!({ "id": "evt_private", "type": "invoice.paid", "data": { "name": "Ada Lovelace" } });
    program.api().emit("acme", event).await;
    receiver.wait_for(1).await;
    let folder = tempfile::tempdir().expect("a folder");
    let launch = || {
        doctor("doctor --bundle bundle.json", &database)
            .set("POSTRIDER_EGRESS_PROXY", "http://user:hunter2@127.0.0.1:3128")
    };
    let output = launch().output_in(folder.path());
    assert!(matches!(output.status.code(), Some(0 | 3)), "{output:?}");
    let bundle = read_private(&folder.path().join("bundle.json"));
    let parsed: Value = serde_json::from_str(&bundle).expect("JSON");
    assert_eq!(parsed["settings"]["POSTRIDER_MASTER_KEY"], "[set]");
    assert_eq!(parsed["settings"]["POSTRIDER_EGRESS_PROXY"], "[set]");
    for (name, fact) in parsed["database"].as_object().expect("facts") {
        assert!(fact["error"].is_null(), "{name}: {fact}");
    }
    for secret in [
        MASTER_KEY,
        ADMIN_API_KEY,
        ADMIN_PASSWORD,
        &endpoint.secret,
        "hunter2",
        "hook-of-acme",
        "acme",
        "Lovelace",
        "evt_private",
        "invoice.paid",
    ] {
        assert!(!bundle.contains(secret), "{secret}");
    }
    let again = launch().output_in(folder.path());
    assert_eq!(again.status.code(), Some(1));
    let told = String::from_utf8_lossy(&again.stderr);
    assert!(told.contains("cannot create the support bundle"), "{told}");
}
