//! The first start, the second, and the one after a `kill -9`: on an embedded database, with nothing set up before.

use std::os::unix::fs::PermissionsExt;

use serde_json::Value;

use crate::support::{Api, DataFolder, Postrider, until};

fn kept(data: &DataFolder, name: &str) -> String {
    let path = data.path().join(name);
    let mode = std::fs::metadata(&path).expect("there").permissions().mode();
    assert_eq!(mode & 0o077, 0, "{name} is private");
    std::fs::read_to_string(path).expect("readable").trim().to_owned()
}

fn api(program: &Postrider, data: &DataFolder) -> Api {
    program.api_with_key(&kept(data, "admin-api-key"))
}

async fn wait_for_banner(program: &Postrider) -> String {
    until("the banner is printed", || async {
        let printed = program.printed();
        printed.contains("Press Ctrl-C to stop").then_some(printed)
    })
    .await
}

fn ids(deliveries: &[Value]) -> Vec<&str> {
    deliveries
        .iter()
        .filter_map(|delivery| delivery["id"].as_str())
        .collect()
}

#[tokio::test]
async fn the_first_start_explains_itself_and_later_ones_find_its_data() {
    let data = DataFolder::new();
    let mut program = Postrider::embedded(&data).start().await;
    let banner = wait_for_banner(&program).await;
    for secret in ["admin-api-key", "admin-password"] {
        assert!(
            banner.contains(&kept(&data, secret)),
            "{secret} is shown the first time"
        );
    }
    for line in [program.url(""), "curl -sS".to_owned(), "psql -h ".to_owned()] {
        assert!(banner.contains(&line), "{line} is in the banner");
    }
    let delivered = api(&program, &data).wait_for_state("demo", "delivered", 1).await;
    let dead = api(&program, &data).wait_for_state("demo", "dead", 1).await;
    assert_eq!((delivered.len(), dead.len()), (1, 1));

    assert!(program.stop().await.success(), "a clean stop");
    assert!(data.server_pid().is_none(), "the server does not outlive it");

    program.restart().await;
    let banner = wait_for_banner(&program).await;
    assert!(
        !banner.contains(&kept(&data, "admin-api-key")),
        "the key is not shown again"
    );
    let again = api(&program, &data).wait_for_state("demo", "delivered", 1).await;
    assert_eq!(ids(&again), ids(&delivered), "the demo is made once");

    // The server goes on running; the next start takes it over.
    program.kill();
    assert!(data.server_pid().is_some());
    program.restart().await;
    wait_for_banner(&program).await;
    let again = api(&program, &data).wait_for_state("demo", "delivered", 1).await;
    assert_eq!(ids(&again), ids(&delivered));
    assert!(program.stop().await.success());
}

#[tokio::test]
async fn the_printed_commands_run_as_they_stand() {
    let data = DataFolder::new();
    let mut program = Postrider::embedded(&data).start().await;
    let banner = wait_for_banner(&program).await;
    let api = api(&program, &data);
    api.wait_for_state("demo", "delivered", 1).await;
    for (first, count) in [("curl ", 2), ("psql ", 3)] {
        let command: Vec<&str> = banner
            .lines()
            .skip_while(|line| !line.trim_start().starts_with(first))
            .take_while(|line| !line.trim().is_empty())
            .collect();
        let output = std::process::Command::new("sh")
            .args(["-c", &command.join("\n")])
            .output()
            .expect("sh");
        assert!(
            output.status.success(),
            "{command:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        // The receiver has another port than at its making: it must still be found there.
        api.wait_for_state("demo", "delivered", count).await;
    }
    assert!(program.stop().await.success());
}

#[tokio::test]
async fn a_second_program_on_the_same_data_is_told_to_go_elsewhere() {
    let data = DataFolder::new();
    let mut program = Postrider::embedded(&data).start().await;
    let output = Postrider::embedded(&data).output();
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("another `postrider up` is running"), "{told}");
    assert!(program.stop().await.success());
}
