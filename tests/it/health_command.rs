//! `postrider health`, as a container's health check runs it.

use crate::support::{Database, Postrider, tool, tool_with};

#[tokio::test]
async fn the_health_command_tells_whether_a_process_is_ready() {
    let database = Database::fresh().await;
    let mut program = Postrider::on_database("dashboard", &database).start().await;
    let url = program.url("");
    let address = url.trim_start_matches("http://").to_owned();

    let ready = tool(&program, &["health", "--url", &url]).await;
    assert!(ready.status == 0 && ready.out.contains("ready"), "{ready:?}");
    // As in a container: the address is in the settings.
    for variable in ["POSTRIDER_LISTEN", "POSTRIDER_METRICS_LISTEN"] {
        let ready = tool_with(&program, &["health"], &[(variable, &address)]).await;
        assert_eq!(ready.status, 0, "{variable}: {ready:?}");
    }
    let alive = tool(&program, &["health", "--live", "--json", "--url", &url]).await;
    let told = alive.json();
    assert!(
        alive.status == 0 && told["ok"] == true && told["status"] == 200,
        "{alive:?}"
    );

    let wrong = tool(&program, &["health", "--url", &format!("{url}/no-such")]).await;
    assert!(wrong.status == 1 && wrong.err.contains("not ready"), "{wrong:?}");
    let malformed = tool_with(&program, &["health"], &[("POSTRIDER_LISTEN", "here")]).await;
    assert!(
        malformed.status == 2 && malformed.err.contains("POSTRIDER_LISTEN"),
        "{malformed:?}"
    );

    program.stop().await;
    let gone = tool(&program, &["health", "--wait", "1", "--url", &url]).await;
    assert!(gone.status == 1 && gone.err.contains("no response"), "{gone:?}");
    let gone = tool(&program, &["health", "--json", "--url", &url]).await;
    assert!(gone.status == 1 && gone.json()["ok"] == false, "{gone:?}");
}
