//! `postrider doctor`: each fault has a verdict and advice, the exit status is that of the worst, and a bundle has no secrets.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use postrider_dispatcher::{
    diagnosis,
    schema::{self, FunctionFile, SchemaSet},
};
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};

use crate::{
    statements::root,
    support::{ADMIN_API_KEY, ADMIN_PASSWORD, Database, Launch, MASTER_KEY, Postrider, Receiver, Replica},
};

fn doctor(role: &'static str, database: &Database) -> Launch {
    Postrider::on_database(role, database)
}

/// The report and the exit status.
fn report(database: &Database) -> (Value, Option<i32>) {
    report_of(&doctor("doctor --json", database))
}

fn report_of(launch: &Launch) -> (Value, Option<i32>) {
    let output = launch.output();
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

fn assert_sound_schema(report: &Value) {
    for check in ["schema.version", "schema.drift"] {
        let found = finding(report, check);
        assert_eq!(found["verdict"], "ok", "{found}");
    }
}

#[tokio::test]
async fn the_schema_is_judged_alike_for_every_role_and_search_path() {
    let database = Database::fresh().await;
    let role = format!("owner_{}", database.name());
    database
        .execute_as_superuser(&format!(
            "create role {role} superuser login; alter role {role} set search_path = public, postrider"
        ))
        .await;
    for role in ["postrider", "postgres", &role] {
        let as_role =
            |command| doctor(command, &database).set("POSTRIDER_DATABASE_URL", database.url_as(role));
        assert_sound_schema(&report_of(&as_role("doctor --json")).0);
        let migrated = as_role("migrate --check").output();
        assert_eq!(migrated.status.code(), Some(0), "{role}: {migrated:?}");
    }
}

/// As the first release recorded it: functions alone, named as the role that migrated would.
async fn record_old_hash(db: &mut PgConnection, file: &FunctionFile) {
    let created = file.sql.split("create or replace function postrider.").skip(1);
    let names: Vec<&str> = created.filter_map(|text| text.split('(').next()).collect();
    sqlx::query(
        "update postrider.function_versions set installed = (
             select md5(coalesce(string_agg(f.text, '' order by f.text), ''))
             from pg_proc p cross join lateral pg_get_functiondef(p.oid) f (text)
             where p.pronamespace = 'postrider'::regnamespace and p.proname = any($1))
         where file = $2",
    )
    .bind(names)
    .bind(file.name)
    .execute(db)
    .await
    .expect("recorded");
}

#[tokio::test]
async fn hashes_recorded_by_an_earlier_release_are_no_drift_and_are_replaced_once() {
    let database = Database::fresh().await;
    let pool = sqlx::PgPool::connect_with(database.options())
        .await
        .expect("connected");
    for search_path in ["set search_path = postrider, public", "set search_path = public"] {
        let mut db = database.connect().await;
        sqlx::query(search_path).execute(&mut db).await.expect("set");
        for file in SchemaSet::main().functions {
            record_old_hash(&mut db, &file).await;
        }
        assert_sound_schema(&report(&database).0);

        // A trigger that was disabled before is repaired nonetheless.
        database
            .execute("alter table postrider.queue disable trigger queue_wake")
            .await;
        schema::migrate(&pool).await.expect("migrated");
        assert_sound_schema(&report(&database).0);
        let old = "select count(*) from postrider.function_versions where installed not like '2:%'";
        assert_eq!(database.count(old).await, 0);
        let applied = "select max(applied_at)::text from postrider.function_versions";
        let before = database.text(applied).await;
        schema::migrate(&pool).await.expect("nothing to do");
        assert_eq!(database.text(applied).await, before);
    }
}

#[tokio::test]
async fn a_trigger_that_was_tampered_with_is_found_and_migrate_repairs_it() {
    let database = Database::fresh().await;
    for change in [
        "alter table postrider.queue disable trigger queue_wake",
        "alter table postrider.queue enable replica trigger queue_wake",
        "drop trigger queue_wake on postrider.queue",
        "create or replace trigger queue_wake after delete on postrider.queue
             for each statement execute function postrider.wake()",
    ] {
        database.execute(change).await;
        let (told, status) = report(&database);
        let drift = finding(&told, "schema.drift");
        assert_eq!(
            (&drift["verdict"], status),
            (&json!("error"), Some(1)),
            "{change}: {drift}"
        );
        let found = drift["found"].as_str().expect("text");
        assert!(
            found.contains("trigger queue_wake on queue: CREATE TRIGGER"),
            "{change}: {found}"
        );
        let advice = drift["advice"].as_str().expect("text");
        assert!(advice.contains("Run `postrider migrate`"), "{advice}");

        let checked = doctor("migrate --check", &database).output();
        let told = String::from_utf8_lossy(&checked.stdout).into_owned();
        assert!(told.contains("functions changes"), "{change}: {checked:?}");
        let migrated = doctor("migrate", &database).output();
        assert!(migrated.status.success(), "{change}: {migrated:?}");
        assert_sound_schema(&report(&database).0);
    }
}

#[tokio::test]
async fn a_changed_default_is_found() {
    let database = Database::fresh().await;
    database
        .execute("alter table postrider.function_versions alter column applied_at drop default")
        .await;
    let (told, _) = report(&database);
    let drift = finding(&told, "schema.drift");
    let expected =
        "column function_versions.applied_at timestamp with time zone not null default clock_timestamp()";
    assert!(
        drift["found"].as_str().expect("text").contains(expected),
        "{drift}"
    );
}

#[tokio::test]
async fn a_read_only_database_is_an_error() {
    let database = Database::fresh().await;
    let (told, _) = report(&database);
    assert_eq!(finding(&told, "database.writes")["verdict"], "ok", "{told}");
    let name = database.name();
    database
        .execute_as_superuser(&format!(
            "alter database {name} set default_transaction_read_only = on"
        ))
        .await;
    let (told, status) = report(&database);
    let writes = finding(&told, "database.writes");
    assert_eq!((&writes["verdict"], status), (&json!("error"), Some(1)));
    let found = writes["found"].as_str().expect("text");
    assert!(
        found.contains("read-only") && found.contains("set by: database"),
        "{found}"
    );
    let advice = writes["advice"].as_str().expect("text");
    assert!(advice.contains("reset default_transaction_read_only"), "{advice}");
    assert_sound_schema(&told);
}

#[tokio::test]
async fn a_standby_is_an_error() {
    let database = Database::on_private_server().await;
    let replica = Replica::of(&database).await;
    let standby = doctor("doctor --json", &database).set("POSTRIDER_DATABASE_URL", replica.url(&database));
    let (told, status) = report_of(&standby);
    let writes = finding(&told, "database.writes");
    assert_eq!((&writes["verdict"], status), (&json!("error"), Some(1)));
    assert!(
        writes["found"].as_str().expect("text").contains("standby"),
        "{writes}"
    );
    assert_sound_schema(&told);
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
    let stop = Some(json!({ "stopped": true, "reason": "Globex disputes its invoice" }));
    program.api().call(reqwest::Method::PUT, "/sending", stop).await;
    let foreign = database.options().application_name("shop of Initech");
    let mut foreign = PgConnection::connect_with(&foreign).await.expect("connected");
    let mut open = foreign.begin().await.expect("begun");
    sqlx::query("select 1").execute(&mut *open).await.expect("asked");
    let folder = tempfile::tempdir().expect("a folder");
    let launch = || {
        doctor("doctor --bundle bundle.json", &database)
            .set("POSTRIDER_EGRESS_PROXY", "http://user:hunter2@127.0.0.1:3128")
            .set("POSTRIDER_PUBLIC_URL", "https://hooks.umbrella.example")
    };
    let output = launch().output_in(folder.path());
    assert!(matches!(output.status.code(), Some(0 | 3)), "{output:?}");
    let bundle = read_private(&folder.path().join("bundle.json"));
    let parsed: Value = serde_json::from_str(&bundle).expect("JSON");
    assert_eq!(parsed["settings"]["POSTRIDER_MASTER_KEY"], "[set]");
    assert_eq!(parsed["settings"]["POSTRIDER_EGRESS_PROXY"], "[set]");
    assert_eq!(parsed["settings"]["POSTRIDER_PUBLIC_URL"], "[set]");
    assert_eq!(
        finding(&parsed, "work.sending")["found"],
        "stopped by an operator"
    );
    let sessions = parsed["database"]["sessions"].as_array().expect("a list");
    for application in ["other", "postrider dispatcher"] {
        assert!(
            sessions
                .iter()
                .any(|session| session["application"] == application),
            "{application}: {sessions:?}"
        );
    }
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
        "Globex",
        "Initech",
        "umbrella",
    ] {
        assert!(!bundle.contains(secret), "{secret}");
    }
    let again = launch().output_in(folder.path());
    assert_eq!(again.status.code(), Some(1));
    let told = String::from_utf8_lossy(&again.stderr);
    assert!(told.contains("cannot create the support bundle"), "{told}");
}
