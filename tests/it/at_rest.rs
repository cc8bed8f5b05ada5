//! What lies in the database and in the logs: no secret in clear, and nothing that another master key opens.

use std::process::Command;

use data_encoding::{BASE64, HEXLOWER};
use postrider_embedded::Programs;
use reqwest::{Method, StatusCode};
use serde_json::json;

use crate::support::{
    ADMIN_API_KEY, ADMIN_PASSWORD, DataFolder, Database, MASTER_KEY, Person, Postrider, Receiver, until,
};

const OTHER_KEY: &str = "ICEiIyQlJicoKSorLC0uLzAxMjM0NTY3ODk6Ozw9Pj8=";
const TOKEN: &str = "canary-token-of-a-custom-header";
const SECRET: &str = "whsec_Y2FuYXJ5LXNlY3JldC1vZi1hbi1lbmRwb2ludC0=";

/// The whole database as `pg_dump` writes it.
fn dump(database: &Database) -> String {
    let beside = Programs::find(None).expect("a server").path("pg_dump");
    let program = if beside.is_file() {
        beside
    } else {
        "pg_dump".into()
    };
    let output = Command::new(program)
        .args(["--inserts", &database.url()])
        .output()
        .expect("pg_dump runs");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Signs in and answers the session's token.
async fn sign_in(program: &Postrider) -> String {
    let client = crate::support::http_client()
        .redirect(reqwest::redirect::Policy::none())
        .build()
        .expect("a client");
    let set = |answer: &reqwest::Response| {
        let cookie = answer.headers()["set-cookie"].to_str().expect("plain");
        cookie.split(';').next().expect("a cookie").to_owned()
    };
    let page = client.get(program.url("/sign-in")).send().await.expect("a page");
    let cookie = set(&page);
    let csrf = cookie.split_once('=').expect("a value").1;
    let mut form = url::form_urlencoded::Serializer::new(String::new());
    form.extend_pairs([("csrf", csrf), ("login", "admin"), ("password", ADMIN_PASSWORD)]);
    let answer = client
        .post(program.url("/sign-in"))
        .header("content-type", "application/x-www-form-urlencoded")
        .header("origin", program.url(""))
        .header("cookie", &cookie)
        .body(form.finish())
        .send()
        .await
        .expect("an answer");
    assert_eq!(answer.status(), StatusCode::SEE_OTHER);
    set(&answer).split_once('=').expect("a value").1.to_owned()
}

#[tokio::test]
async fn neither_a_dump_nor_the_log_has_a_secret_a_key_a_password_or_a_session_in_it() {
    let database = Database::fresh().await;
    let program = Postrider::start_with(&database, &[("POSTRIDER_LOG", "debug")]).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let more = json!({ "secret": SECRET, "headers": { "X-Token": TOKEN } });
    let endpoint = api.acme(&receiver.url("/hook"), more).await;
    let pair = json!({ "url": receiver.url("/pair"), "signature": "standard-ed25519" });
    let (status, pair) = api
        .call(Method::POST, "/tenants/acme/endpoints", Some(pair))
        .await;
    assert_eq!(status, StatusCode::CREATED);
    let rotated = format!("/tenants/acme/endpoints/{}/secret/rotate", endpoint.id);
    let (_, rotated) = api.call(Method::POST, &rotated, None).await;
    let key = json!({ "role": "tenant", "tenant": "acme", "name": "canary" });
    let (_, key) = api.call(Method::POST, "/api-keys", Some(key)).await;
    let key = key["key"].as_str().expect("a key").to_owned();
    program
        .api_with_key(&key)
        .get(&format!("/tenants/acme/endpoints/{}/secret", endpoint.id))
        .await;
    let session = sign_in(&program).await;
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let request = receiver
        .wait_for(2)
        .await
        .into_iter()
        .find(|request| request.path == "/hook")
        .expect("one of two");
    assert_eq!(request.header("x-token"), TOKEN);
    assert_eq!(request.verify(SECRET), Ok(()));
    // Refused, with secrets in what was sent.
    let bad = json!({ "url": "nowhere", "secret": SECRET, "headers": { "X-Token": TOKEN } });
    let (_, problem) = api.call(Method::POST, "/tenants/acme/endpoints", Some(bad)).await;
    api.wait_for_state("acme", "delivered", 2).await;

    let dump = dump(&database);
    let public = pair["public_key"].as_str().expect("a key");
    for there in ["canary", &request.path[1..], endpoint.id.as_str(), public] {
        assert!(dump.contains(there), "{there} is in the dump, as it should");
    }
    let log = program.log_lines().join("\n");
    assert!(log.contains("DEBUG"), "the log is a full one");
    let rotated = rotated["data"][0]["secret"].as_str().expect("a secret");
    for secret in [
        SECRET,
        rotated,
        TOKEN,
        &key,
        ADMIN_API_KEY,
        ADMIN_PASSWORD,
        MASTER_KEY,
        &session,
        "whsk_",
    ] {
        let bytes = secret.as_bytes();
        let inner = BASE64.decode(secret.trim_start_matches("whsec_").as_bytes());
        let mut forms = vec![secret.to_owned(), HEXLOWER.encode(bytes), BASE64.encode(bytes)];
        forms.extend(inner.map(|inner| HEXLOWER.encode(&inner)));
        for form in forms {
            assert!(!dump.contains(&form), "{secret} is in the dump as {form}");
            assert!(!log.contains(&form), "{secret} is in the log as {form}");
            assert!(!problem.to_string().contains(&form), "{secret} is in {problem}");
        }
    }
}

/// How many sealed values are encrypted with another key than the first of all.
async fn key_names(database: &Database) -> Vec<Vec<u8>> {
    sqlx::query_scalar(
        "select distinct substr(sealed, 1, 4) from (
            select ciphertext as sealed from postrider.secrets
            union all select headers from postrider.endpoints where headers is not null
            union all select sealed from postrider.form_results) all_sealed",
    )
    .fetch_all(&mut database.connect().await)
    .await
    .expect("read")
}

#[tokio::test]
async fn the_master_key_is_changed_while_everything_runs() {
    let database = Database::fresh().await;
    let both = format!("{MASTER_KEY},{OTHER_KEY}");
    let program = Postrider::start_with(&database, &[("POSTRIDER_MASTER_KEY", &both)]).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api
        .acme(&receiver.url("/hook"), json!({ "headers": { "X-Token": TOKEN } }))
        .await;
    // More than one batch.
    sqlx::query(
        "insert into postrider.secrets (endpoint_id, ciphertext, retires_at)
         select endpoint_id, ciphertext, clock_timestamp() from postrider.secrets, generate_series(1, 1200)",
    )
    .execute(&mut database.connect().await)
    .await
    .expect("inserted");
    // Not shown yet.
    let mut admin = Person::signed_in(&program).await;
    admin
        .post("/people", &[("login", "ada"), ("role", "operator")])
        .await;
    let before = key_names(&database).await;
    assert_eq!(before.len(), 1);

    let change = Postrider::on_database("rotate-master-key", &database)
        .set("POSTRIDER_MASTER_KEY", format!("{OTHER_KEY},{MASTER_KEY}"));
    let output = change.output();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(told.contains("secrets: 500 of 1201"), "{told}");
    assert!(
        told.contains("1203 values encrypted with the first key"),
        "{told}"
    );
    let after = key_names(&database).await;
    assert_eq!(after.len(), 1);
    assert_ne!(after, before);
    let again = String::from_utf8_lossy(&change.output().stdout).into_owned();
    assert!(again.contains("0 values"), "{again}");

    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let request = receiver.wait_for(1).await.remove(0);
    assert_eq!(request.verify(&endpoint.secret), Ok(()));
    assert_eq!(request.header("x-token"), TOKEN);
    let result = database
        .text("select public_id from postrider.form_results")
        .await;
    let (_, page) = admin.visit(&format!("/people?result={result}")).await;
    assert!(page.contains("new-password"), "{page}");

    Postrider::on_database("dashboard", &database)
        .set("POSTRIDER_MASTER_KEY", OTHER_KEY)
        .start()
        .await;
}

#[tokio::test]
async fn a_wrong_master_key_stops_every_role_and_a_value_that_does_not_open_is_told() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    program.api().acme("http://127.0.0.1:9/hook", json!({})).await;
    drop(program);
    let folder = tempfile::tempdir().expect("a folder");
    for role in ["up", "dispatcher", "dashboard"] {
        let output = Postrider::on_database(role, &database)
            .set("POSTRIDER_DATA_DIR", folder.path().display())
            .set("POSTRIDER_MASTER_KEY", OTHER_KEY)
            .output();
        assert_eq!(output.status.code(), Some(1), "{role}");
        let told = String::from_utf8_lossy(&output.stderr);
        let last = told.lines().last().unwrap_or_default();
        assert!(
            last.contains("POSTRIDER_MASTER_KEY is not the key that the stored secrets are encrypted with"),
            "{role}: {told}"
        );
    }
    let output = Postrider::on_database("rotate-master-key --force", &database)
        .set("POSTRIDER_MASTER_KEY", OTHER_KEY)
        .output();
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(
        told.contains("1 of the stored secrets open with none of the keys"),
        "{told}"
    );
    Postrider::start(&database).await;
}

#[tokio::test]
async fn a_new_master_key_that_a_running_role_lacks_is_refused_unless_forced() {
    let database = Database::fresh().await;
    let mut dashboard = Postrider::on_database("dashboard", &database).start().await;
    dashboard.api().acme("http://127.0.0.1:9/hook", json!({})).await;
    let before = key_names(&database).await;
    let both = format!("{OTHER_KEY},{MASTER_KEY}");
    let change = |role| Postrider::on_database(role, &database).set("POSTRIDER_MASTER_KEY", &both);
    let output = change("rotate-master-key").output();
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let named = format!("dashboard (process {} at", dashboard.pid());
    assert!(
        told.contains(&named) && told.contains("Nothing was changed"),
        "{told}"
    );
    assert_eq!(key_names(&database).await, before);

    let forced = change("rotate-master-key --force").output();
    assert!(
        forced.status.success(),
        "{}",
        String::from_utf8_lossy(&forced.stderr)
    );
    assert_ne!(key_names(&database).await, before);
    assert!(dashboard.stop().await.success());
    let holders = "select count(*) from postrider.key_holders";
    assert_eq!(database.count(holders).await, 0, "who stops says so");
}

/// Nothing is encrypted yet, so that nothing stored can tell which key is right: the roles that run can.
#[tokio::test]
async fn a_role_with_another_master_key_does_not_start_beside_one_that_runs() {
    let database = Database::fresh().await;
    let mut dashboard = Postrider::on_database("dashboard", &database).start().await;
    let folder = tempfile::tempdir().expect("a folder");
    for role in ["dispatcher", "dashboard", "up"] {
        let output = Postrider::on_database(role, &database)
            .set("POSTRIDER_DATA_DIR", folder.path().display())
            .set("POSTRIDER_MASTER_KEY", OTHER_KEY)
            .under(&["timeout", "30"])
            .output();
        assert_eq!(output.status.code(), Some(1), "{role}");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        let named = format!("dashboard (process {} at", dashboard.pid());
        assert!(
            told.contains("POSTRIDER_MASTER_KEY") && told.contains(&named),
            "{role}: {told}"
        );
    }
    // Both keys, as in the middle of a change: nobody is locked out.
    let both = format!("{MASTER_KEY},{OTHER_KEY}");
    let mut dispatcher = Postrider::on_database("dispatcher", &database)
        .set("POSTRIDER_MASTER_KEY", both)
        .start()
        .await;
    assert!(dispatcher.stop().await.success());
    assert!(dashboard.stop().await.success());
    // Nobody else runs, and nothing is stored: any key will do.
    let mut dispatcher = Postrider::on_database("dispatcher", &database)
        .set("POSTRIDER_MASTER_KEY", OTHER_KEY)
        .start()
        .await;
    assert!(dispatcher.stop().await.success());
}

#[tokio::test]
async fn a_change_of_the_master_key_that_is_killed_in_the_middle_goes_on_where_it_was() {
    const SECRETS: usize = 1_201;
    let database = Database::fresh().await;
    let both = format!("{MASTER_KEY},{OTHER_KEY}");
    let program = Postrider::start_with(&database, &[("POSTRIDER_MASTER_KEY", &both)]).await;
    let receiver = Receiver::start().await;
    let endpoint = program.api().acme(&receiver.url("/hook"), json!({})).await;
    let more = format!(
        "insert into postrider.secrets (endpoint_id, ciphertext, retires_at)
         select endpoint_id, ciphertext, clock_timestamp() from postrider.secrets, generate_series(2, {SECRETS})"
    );
    database.execute(&more).await;
    // The second batch has to wait for this row.
    let mut lock = database.connect().await;
    let row = "begin; select from postrider.secrets
               where id = (select id from postrider.secrets order by id offset 700 limit 1) for update";
    sqlx::raw_sql(row).execute(&mut lock).await.expect("locked");
    let change = Postrider::on_database("rotate-master-key", &database)
        .set("POSTRIDER_MASTER_KEY", format!("{OTHER_KEY},{MASTER_KEY}"));
    let mut killed = change.child();
    let names = "select count(distinct substr(ciphertext, 1, 4)) from postrider.secrets";
    until("the first batch is done", || async {
        (database.count(names).await == 2).then_some(())
    })
    .await;
    killed.kill().expect("killed");
    killed.wait().expect("ended");
    // As long as it waits the server does not notice: with the lock it would finish the batch.
    until("its session has ended", || async {
        let waits = "select count(*) filter (where pg_terminate_backend(pid)) from pg_stat_activity
                     where wait_event_type = 'Lock' and datname = current_database()";
        (database.count(waits).await == 0).then_some(())
    })
    .await;
    sqlx::raw_sql("rollback")
        .execute(&mut lock)
        .await
        .expect("let go");

    let output = change.output();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let left = SECRETS - 500;
    assert!(told.contains(&format!("secrets: 500 of {left}")), "{told}");
    assert!(told.contains(&format!("secrets: {left} of {left}")), "{told}");
    assert_eq!(database.count(names).await, 1);
    let api = program.api();
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    let request = receiver.wait_for(1).await.remove(0);
    assert_eq!(request.verify(&endpoint.secret), Ok(()));
}

#[tokio::test]
async fn a_lost_master_key_file_is_named_and_no_new_one_is_made() {
    let database = Database::fresh().await;
    let data = DataFolder::new();
    let launch = Postrider::on_database("up", &database)
        .unset("POSTRIDER_MASTER_KEY")
        .set("POSTRIDER_DATA_DIR", data.path().display());
    let mut program = launch.clone().start().await;
    program.api().acme("http://127.0.0.1:9/hook", json!({})).await;
    assert!(program.stop().await.success());
    let file = data.path().join("master-key");
    let key = std::fs::read_to_string(&file).expect("a key");
    std::fs::remove_file(&file).expect("removed");
    let output = launch.output();
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let named = std::fs::canonicalize(data.path())
        .expect("there")
        .join("master-key");
    assert!(
        told.contains(&format!("{} is missing", named.display())),
        "{told}"
    );
    assert!(!file.exists(), "no other key was made");
    std::fs::write(&file, key).expect("put back");
    launch.start().await;
}
