//! Starts that are refused: with one sentence that says what is wrong, and without a trace left behind.

use crate::support::{DataFolder, Database, Postrider};

/// The last line of what was said, and the exit status.
fn refused(output: std::process::Output) -> (Option<i32>, String) {
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !told.contains("panicked") && !told.contains("backtrace"),
        "{told}"
    );
    (
        output.status.code(),
        told.lines().last().unwrap_or_default().to_owned(),
    )
}

#[test]
fn a_setting_that_can_t_be_read_stops_the_start_by_name() {
    let data = DataFolder::new();
    let untouched = data.path().join("never-made");
    for (name, value) in [
        ("POSTRIDER_RETRY_SCHEDULE", "0s,sometimes"),
        ("POSTRIDER_TIMEOUT", "ten seconds"),
        ("POSTRIDER_MASTER_KEY", "short"),
        ("POSTRIDER_DATABASE_URL", "not a url"),
        ("POSTRIDER_EGRESS_PROXY", "socks5://proxy.example:1080"),
    ] {
        let launch = Postrider::embedded(&data)
            .set("POSTRIDER_DATA_DIR", untouched.display())
            .set("POSTRIDER_LOG_FORMAT", "text")
            .set(name, value);
        let (status, sentence) = refused(launch.output());
        assert_eq!(status, Some(2), "{sentence}");
        assert!(sentence.starts_with(&format!("postrider: {name} ")), "{sentence}");
        assert!(!untouched.exists(), "nothing was begun");
    }
}

#[tokio::test]
async fn the_production_roles_need_a_database_a_master_key_and_a_schema() {
    let database = Database::fresh().await;
    let empty = Database::empty().await;
    for role in ["dispatcher", "dashboard"] {
        let launch = Postrider::on_database(role, &database);
        let (status, sentence) = refused(launch.clone().set("POSTRIDER_DATABASE_URL", "").output());
        assert_eq!(status, Some(2));
        assert!(
            sentence.contains("POSTRIDER_DATABASE_URL is not set"),
            "{sentence}"
        );
        let (status, sentence) = refused(launch.clone().set("POSTRIDER_MASTER_KEY", "").output());
        assert_eq!(status, Some(2));
        assert!(sentence.contains("POSTRIDER_MASTER_KEY is not set"), "{sentence}");
        let unmigrated = launch.set("POSTRIDER_DATABASE_URL", empty.url());
        let (status, sentence) = refused(unmigrated.output());
        assert_eq!(status, Some(1));
        assert!(sentence.contains("run `postrider migrate` first"), "{sentence}");
    }
}

#[tokio::test]
async fn a_taken_port_is_told_in_a_sentence() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("bound");
    let data = DataFolder::new();
    let (status, sentence) = refused(
        Postrider::embedded(&data)
            .set("POSTRIDER_LISTEN", address)
            .output(),
    );
    assert_eq!(status, Some(1));
    assert!(
        sentence.contains(&format!("{address} is already in use")),
        "{sentence}"
    );
}
