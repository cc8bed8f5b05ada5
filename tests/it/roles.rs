//! The production roles: processes of their own on one database.

use serde_json::json;

use crate::support::{Database, Postrider, Receiver, until};

#[tokio::test]
async fn roles_in_processes_of_their_own_share_one_database() {
    let database = Database::fresh().await;
    let dashboard = Postrider::on_database("dashboard", &database).start().await;
    let mut dispatcher = Postrider::on_database("dispatcher", &database).start().await;
    let receiver = Receiver::start().await;
    let api = dashboard.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    api.emit("acme", json!({ "type": "invoice.paid", "data": {} }))
        .await;
    api.wait_for_state("acme", "delivered", 1).await;
    assert!(dispatcher.stop().await.success());
}

#[tokio::test]
async fn a_dashboard_without_a_key_makes_one_and_shows_it_once() {
    const SHOWN: &str = "Admin API key (shown only once): ";
    let database = Database::fresh().await;
    let mut dashboard = Postrider::on_database("dashboard", &database)
        .set("POSTRIDER_ADMIN_API_KEY", "")
        .set("POSTRIDER_ADMIN_PASSWORD", "")
        .start()
        .await;
    let printed = until("the key is shown", || async {
        let printed = dashboard.printed();
        printed
            .contains("Password of the login `admin`")
            .then_some(printed)
    })
    .await;
    let key = printed
        .lines()
        .find_map(|line| line.strip_prefix(SHOWN))
        .expect("a key");
    dashboard.api_with_key(key).get("/tenants").await;
    assert!(dashboard.stop().await.success());

    dashboard.restart().await;
    assert_eq!(dashboard.printed(), "", "nothing is shown the second time");
    dashboard.api_with_key(key).get("/tenants").await;
}

#[tokio::test]
async fn migrate_brings_an_empty_database_up_to_date_and_may_run_again() {
    let database = Database::empty().await;
    for _ in 0..2 {
        let output = Postrider::on_database("migrate", &database).output();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let dashboard = Postrider::on_database("dashboard", &database).start().await;
    dashboard.api().get("/tenants").await;
}

/// The rights that docs/operations.md asks for: schemas and extensions may be made in the database, which is another's.
#[tokio::test]
async fn migrate_needs_no_more_than_the_right_to_create_in_the_database_and_leaves_public_alone() {
    let database = Database::empty().await;
    let role = format!("migrator_{}", database.name());
    let name = database.name();
    database
        .execute_as_superuser(&format!("create role {role} login"))
        .await;
    let migrate = Postrider::on_database("migrate", &database)
        .set("POSTRIDER_DATABASE_URL", database.url_as(&role))
        .set("POSTRIDER_LOG_FORMAT", "text");
    let output = migrate.output();
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let right = format!("grant create on database \"{name}\" to \"{role}\"");
    assert_eq!(told.matches(&right).count(), 1, "{told}");
    assert!(told.matches("permission denied").count() <= 1, "{told}");

    database
        .execute_as_superuser(&format!("grant create on database {name} to {role}"))
        .await;
    for _ in 0..2 {
        let output = migrate.output();
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{told}");
    }
    let in_public = "select (select count(*) from pg_class where relnamespace = 'public'::regnamespace)
        + (select count(*) from pg_proc where pronamespace = 'public'::regnamespace)
        + (select count(*) from pg_type where typnamespace = 'public'::regnamespace)
        + (select count(*) from pg_extension where extnamespace = 'public'::regnamespace)";
    assert_eq!(database.count(in_public).await, 0, "nothing is made in public");
    // Background work is carried by it too.
    let data = crate::support::DataFolder::new();
    let mut program = Postrider::on_database("up", &database)
        .set("POSTRIDER_DATABASE_URL", database.url_as(&role))
        .set("POSTRIDER_DATA_DIR", data.path().display())
        .start()
        .await;
    let done = format!(
        "select count(*) from pg_class c where c.relname = 'jobs' and has_table_privilege('{role}', c.oid, 'select')"
    );
    assert_eq!(database.count(&done).await, 1);
    database
        .execute_as_superuser(&format!("grant {role} to postrider"))
        .await;
    until("the duties of this hour are done", || async {
        let done = "select count(*) from apalis.jobs where status = 'Done'";
        (database.count(done).await >= 5).then_some(())
    })
    .await;
    assert!(program.stop().await.success());
}
