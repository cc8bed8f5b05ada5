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
    const SHOWN: &str = "The admin API key, shown this once: ";
    let database = Database::fresh().await;
    let mut dashboard = Postrider::on_database("dashboard", &database)
        .set("POSTRIDER_ADMIN_API_KEY", "")
        .set("POSTRIDER_ADMIN_PASSWORD", "")
        .start()
        .await;
    let printed = until("the key is shown", || async {
        let printed = dashboard.printed();
        printed
            .contains("The password of the login `admin`")
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
