//! A backup restored into another cluster, as docs/backup.md says: once where a superuser made everything, once where the
//! owner of the database did.

use std::process::Command;

use postrider_embedded::Programs;
use reqwest::{Method, StatusCode};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::support::{Database, Launch, Postrider, Receiver, tool, until};

/// Far more transactions than a new cluster has seen.
const TRANSACTIONS: usize = 50_000;
const EVENTS: usize = 20;

fn run_program(name: &str, arguments: &[&str]) {
    let beside = Programs::find(None).expect("a server").path(name);
    let program = if beside.is_file() { beside } else { name.into() };
    let output = Command::new(program).args(arguments).output().expect(name);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} {arguments:?}: {told}");
}

fn role_of(launch: &'static str, database: &Database, owner: &str) -> Launch {
    Postrider::on_database(launch, database).set("POSTRIDER_DATABASE_URL", database.url_as(owner))
}

fn migrate(database: &Database, owner: &str) {
    let output = role_of("migrate", database, owner).output();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
}

/// What runs with its owner's rights and belongs to a superuser.
async fn owned_by_a_superuser(database: &Database) -> i64 {
    database
        .count(
            "select count(*) from pg_proc p join pg_roles r on r.oid = p.proowner
             where p.pronamespace = 'postrider'::regnamespace and p.prosecdef and r.rolsuper",
        )
        .await
}

async fn producer_emits(database: &Database, id: &str) {
    database
        .execute_as_superuser(
            "do $$ begin create role a_producer login; exception when duplicate_object then end $$",
        )
        .await;
    let options = database.cluster().superuser_options().database(database.name());
    let mut superuser = PgConnection::connect_with(&options).await.expect("connected");
    for grant in [
        "grant usage on schema postrider to a_producer",
        "grant execute on function postrider.emit to a_producer",
        "grant execute on function postrider.emit_batch to a_producer",
    ] {
        sqlx::query(grant).execute(&mut superuser).await.expect(grant);
    }
    let mut producer = PgConnection::connect_with(&options.username("a_producer"))
        .await
        .expect("connected");
    for emit in [
        "select postrider.emit('acme', 'invoice.paid', '{}', '{id}', ordering_key => 'k',
             traceparent => '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01')",
        "select postrider.emit_batch('acme', array['invoice.paid'], array['{}'])",
    ] {
        let emit = emit.replace("{id}", id);
        sqlx::raw_sql(AssertSqlSafe(emit))
            .execute(&mut producer)
            .await
            .expect("emitted");
    }
    let refused = sqlx::query("select from postrider.events")
        .execute(&mut producer)
        .await;
    assert!(
        refused.is_err(),
        "a producer needs no right on a table and has none"
    );
}

async fn back_up_and_restore(owner: &'static str) {
    let source = Database::empty_on_a_new_cluster().await;
    migrate(&source, owner);
    assert_eq!(owned_by_a_superuser(&source).await, 0);
    let receiver = Receiver::start().await;
    let data = crate::support::DataFolder::new();
    let mut program = role_of("up", &source, owner)
        .set("POSTRIDER_DATA_DIR", data.path().display())
        .start()
        .await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    api.call(Method::PATCH, &path, Some(json!({ "enabled": false })))
        .await;
    api.tenant("gone").await;
    let burn = format!(
        "do $$ begin for n in 1..{TRANSACTIONS} loop perform pg_current_xact_id(); commit; end loop; end $$"
    );
    source.execute(&burn).await;
    for n in 0..EVENTS {
        let event = json!({ "id": format!("e{n}"), "type": "invoice.paid", "data": {} });
        assert_eq!(api.emit("acme", event).await.0, StatusCode::ACCEPTED);
    }
    producer_emits(&source, "by-sql").await;
    // An erasure that is under way as the backup is taken: a producer is in its way.
    let options = source.cluster().superuser_options().database(source.name());
    let mut late = PgConnection::connect_with(&options).await.expect("connected");
    sqlx::raw_sql("begin; select postrider.emit('gone', 'invoice.paid', '{}')")
        .execute(&mut late)
        .await
        .expect("emitted");
    let (status, _) = api.call(Method::DELETE, "/tenants/gone", None).await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    let erasure = api.get("/erasures").await["data"][0]["id"]
        .as_str()
        .expect("an id")
        .to_owned();

    let folder = tempfile::tempdir().expect("a folder");
    let dump = folder.path().join("postrider.dump").display().to_string();
    run_program("pg_dump", &["-Fc", "-d", &source.url_as(owner), "-f", &dump]);
    assert!(program.stop().await.success());
    drop(late);

    let target = Database::empty_on_a_new_cluster().await;
    // A role that was granted something is the operator's to make: it is not in the dump.
    target.execute_as_superuser("create role a_producer login").await;
    let url = target.url_as(owner);
    run_program(
        "pg_restore",
        &["--no-owner", "--exit-on-error", "-d", &url, &dump],
    );
    let foreign = "select count(*) from postrider.queue
                   where xid >= pg_snapshot_xmax(pg_current_snapshot())";
    assert!(
        count_of(&target, foreign).await > 0,
        "numbers of another cluster, from this one's future"
    );
    migrate(&target, owner);
    assert_eq!(owned_by_a_superuser(&target).await, 0, "after a restore");
    producer_emits(&target, "after-the-restore").await;
    let data = crate::support::DataFolder::new();
    let program = role_of("up", &target, owner)
        .set("POSTRIDER_DATA_DIR", data.path().display())
        .start()
        .await;
    let api = program.api();
    for table in [
        foreign,
        "select count(*) from postrider.endpoints where xid >= pg_snapshot_xmax(pg_current_snapshot())",
        "select count(*) from postrider.secrets where xid >= pg_snapshot_xmax(pg_current_snapshot())",
        "select count(*) from postrider.sending where xid >= pg_snapshot_xmax(pg_current_snapshot())",
    ] {
        assert_eq!(count_of(&target, table).await, 0, "{table}");
    }
    until("the erasure is over", || async {
        let erasure = api.get(&format!("/erasures/{erasure}")).await;
        (erasure["state"] == "done").then_some(())
    })
    .await;
    let (status, _) = api
        .call(Method::PATCH, &path, Some(json!({ "enabled": true })))
        .await;
    assert_eq!(status, StatusCode::OK, "applied by the dispatcher");
    assert_nothing_is_sent_until_confirmed(&program, &receiver).await;
    // Two by SQL before, two after.
    receiver.wait_for(EVENTS + 4).await;
    until("all are recorded", || async {
        let waiting = "select count(*) from postrider.queue";
        (count_of(&target, waiting).await == 0).then_some(())
    })
    .await;
    assert_eq!(receiver.count(), EVENTS + 4, "each is sent once");
}

/// A copy may run next to its original: it sends nothing by itself.
async fn assert_nothing_is_sent_until_confirmed(program: &Postrider, receiver: &Receiver) {
    let api = program.api();
    let state = api.get("/sending").await;
    assert_eq!(
        (&state["stopped"], &state["restored"]),
        (&json!(true), &json!(true))
    );
    let resume = json!({ "stopped": false });
    let (status, problem) = api.call(Method::PUT, "/sending", Some(resume)).await;
    assert_eq!(status, StatusCode::CONFLICT, "{problem}");
    let status = tool(program, &["sending", "status"]).await;
    assert!(status.out.contains("restored copy"), "{status:?}");
    let refused = tool(program, &["sending", "resume"]).await;
    assert_eq!(refused.status, 1, "{refused:?}");
    let warned = program.log_lines();
    assert!(warned.iter().any(|line| line.contains("is a restored copy")));
    assert_eq!(receiver.count(), 0);
    let resumed = tool(program, &["sending", "resume", "--confirm-restored"]).await;
    assert_eq!(resumed.status, 0, "{resumed:?}");
    assert_eq!(api.get("/sending").await["stopped"], false);
}

async fn count_of(database: &Database, query: &'static str) -> i64 {
    let options = database.cluster().superuser_options().database(database.name());
    let mut connection = PgConnection::connect_with(&options).await.expect("connected");
    sqlx::query_scalar(query)
        .fetch_one(&mut connection)
        .await
        .expect(query)
}

#[tokio::test]
async fn a_backup_of_a_superuser_s_schema_is_restored_into_a_new_cluster() {
    back_up_and_restore("postgres").await;
}

#[tokio::test]
async fn a_backup_of_a_plain_owner_s_schema_is_restored_into_a_new_cluster() {
    back_up_and_restore("postrider").await;
}

/// Whose numbers are from the future of this cluster is found out at the start, whatever way they came here.
#[tokio::test]
async fn numbers_of_transactions_that_another_cluster_gave_out_are_replaced_at_the_start() {
    let database = Database::fresh().await;
    let mut program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    let endpoint = api.acme(&receiver.url("/hook"), json!({})).await;
    let path = format!("/tenants/acme/endpoints/{}", endpoint.id);
    api.call(Method::PATCH, &path, Some(json!({ "enabled": false })))
        .await;
    for _ in 0..3 {
        api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
            .await;
    }
    api.tenant("gone").await;
    api.call(Method::DELETE, "/tenants/gone", None).await;
    assert!(program.stop().await.success());
    database
        .execute(
            "update postrider.queue set xid = '900000000000';
             alter table postrider.endpoints disable trigger endpoints_stamp;
             alter table postrider.secrets disable trigger secrets_stamp;
             update postrider.endpoints set xid = '900000000000';
             update postrider.secrets set xid = '900000000000';
             alter table postrider.endpoints enable trigger endpoints_stamp;
             alter table postrider.secrets enable trigger secrets_stamp;
             update postrider.erasures set xid = '900000000000', barrier = '900000000000', ended_at = null;
             update apalis.jobs set status = 'Pending', lock_by = null, lock_at = null, done_at = null, attempts = 0
             where job_type = 'postrider.requested'",
        )
        .await;
    program.restart().await;
    for table in ["queue", "endpoints", "secrets"] {
        let foreign = format!("select count(*) from postrider.{table} where xid >= '900000000000'");
        assert_eq!(database.count(&foreign).await, 0, "{table}");
    }
    let api = program.api();
    until("the erasure is over", || async {
        (api.get("/erasures").await["data"][0]["state"] == "done").then_some(())
    })
    .await;
    api.call(Method::PATCH, &path, Some(json!({ "enabled": true })))
        .await;
    receiver.wait_for(3).await;
    database.drained().await;
    assert_eq!(receiver.count(), 3);
}
