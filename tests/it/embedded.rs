//! The embedded database server: it is watched, nobody else's server is touched, and a copied data directory is not taken
//! for the original.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::support::{Api, DataFolder, Database, Launch, Postrider, until};

fn api(program: &Postrider, data: &Path) -> Api {
    let key = fs::read_to_string(data.join("admin-api-key")).expect("a key");
    program.api_with_key(key.trim())
}

async fn emits(api: &Api) {
    let event =
        json!({ "type": "demo.invoice.paid", "data": { "object": "invoice", "id": "inv_1", "amount": 1 } });
    until("an emit is taken", || async {
        let (status, _) = api.emit("demo", event.clone()).await;
        status.is_success().then_some(())
    })
    .await;
}

async fn wait_for_banner(program: &Postrider) {
    until("the banner is printed", || async {
        program.printed().contains("Press Ctrl-C to stop").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_server_that_is_killed_is_started_again() {
    let data = DataFolder::new();
    let mut program = Postrider::embedded(&data).start().await;
    wait_for_banner(&program).await;
    let api = api(&program, data.path());
    for _ in 0..2 {
        let server = data.server_pid().expect("it runs");
        kill_process(server, Signal::KILL).expect("killed");
        until("another server runs", || async {
            (data.server_pid().is_some_and(|pid| pid != server) && api.is_ready().await).then_some(())
        })
        .await;
        emits(&api).await;
    }
    let log = program.log_lines().join("\n");
    assert!(log.contains("the embedded database server exited"), "{log}");
    assert!(program.stop().await.success());
    assert!(data.server_pid().is_none(), "it does not outlive a clean stop");
}

#[tokio::test]
async fn a_server_that_does_not_come_back_ends_the_program() {
    let data = DataFolder::new();
    let mut program = Postrider::embedded(&data).start().await;
    wait_for_banner(&program).await;
    let configuration = data.path().join("pg/data/postgresql.conf");
    let mut text = fs::read_to_string(&configuration).expect("readable");
    text.push_str("\nno_such_setting = on\n");
    fs::write(&configuration, text).expect("written");
    kill_process(data.server_pid().expect("it runs"), Signal::KILL).expect("killed");
    let ended = until("the program ends", || async {
        (!Path::new(&format!("/proc/{}/exe", program.pid())).exists()).then_some(())
    });
    ended.await;
    assert_eq!(program.ended().await.code(), Some(1));
    let log = program.log_lines().join("\n");
    assert!(log.contains("the embedded database"), "{log}");
}

/// What a power cut leaves behind, and a number that was given to another process since.
fn leave_behind(data: &DataFolder, pid: u32) {
    let file = data.path().join("pg/data/postmaster.pid");
    let folder = data.path().join("pg/data");
    let text = format!(
        "{pid}\n{}\n1700000000\n5432\n\n\n  123  456\nready\n",
        folder.display()
    );
    fs::write(&file, text).expect("written");
    let owner = fs::metadata(&folder).expect("there");
    use std::os::unix::fs::MetadataExt;
    std::os::unix::fs::chown(&file, Some(owner.uid()), Some(owner.gid())).expect("given");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("private");
}

#[tokio::test]
async fn the_server_of_somebody_else_is_left_alone_whatever_number_was_left_behind() {
    let other = Database::on_private_server().await;
    let data = DataFolder::new();
    let mut program = Postrider::embedded(&data).start().await;
    wait_for_banner(&program).await;
    assert!(program.stop().await.success());
    let foreign = other.cluster().pid().expect("it runs");
    leave_behind(&data, foreign);
    program.restart().await;
    wait_for_banner(&program).await;
    assert_eq!(other.count("select count(*)").await, 1, "the other server runs");
    assert_eq!(other.cluster().pid(), Some(foreign), "and is the same");
    assert!(program.stop().await.success());
    assert_eq!(other.count("select count(*)").await, 1);
}

#[tokio::test]
async fn a_zombie_called_postgres_does_not_keep_it_from_starting() {
    let data = DataFolder::new();
    let mut program = Postrider::embedded(&data).start().await;
    wait_for_banner(&program).await;
    assert!(program.stop().await.success());
    let folder = tempfile::tempdir().expect("a folder");
    let called = folder.path().join("postgres");
    fs::copy("/bin/sleep", &called).expect("copied");
    let mut zombie = Command::new(&called)
        .arg("1000")
        .current_dir(data.path().join("pg/data"))
        .spawn()
        .expect("started");
    kill_process(Pid::from_child(&zombie), Signal::KILL).expect("killed");
    until("it is a zombie", || async {
        let state = fs::read_to_string(format!("/proc/{}/stat", zombie.id())).ok()?;
        state.contains(") Z ").then_some(())
    })
    .await;
    leave_behind(&data, zombie.id());
    program.restart().await;
    wait_for_banner(&program).await;
    assert!(program.stop().await.success());
    zombie.wait().expect("ended");
}

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp")
        .arg("-a")
        .arg(from)
        .arg(to)
        .output()
        .expect("cp");
    let told = String::from_utf8_lossy(&copied.stderr);
    assert!(to.join("master-key").is_file(), "{told}");
}

fn on_directory(data: &Path) -> Launch {
    Launch::new("up")
        .set("POSTRIDER_LISTEN", "127.0.0.1:0")
        .set("POSTRIDER_DATA_DIR", data.display())
}

/// The cluster lies elsewhere, as it does when root's server can't enter the data directory. The copy points there too.
#[tokio::test]
async fn a_copy_of_a_data_directory_that_points_to_its_database_is_refused() {
    let (data, place) = (DataFolder::new(), DataFolder::new());
    let cluster = place.path().join("cluster");
    fs::write(data.path().join("pg-home"), format!("{}\n", cluster.display())).expect("written");
    let mut program = Postrider::embedded(&data).start().await;
    wait_for_banner(&program).await;
    let copies = DataFolder::new();
    let copied = copies.path().join("copy");
    copy(data.path(), &copied);
    let refuses = || {
        let output = on_directory(&copied).under(&["timeout", "60"]).output();
        assert_eq!(output.status.code(), Some(1));
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        let original = fs::canonicalize(data.path()).expect("there");
        assert!(
            told.contains(&original.display().to_string()) && told.contains("belongs to"),
            "{told}"
        );
    };
    refuses();
    emits(&api(&program, data.path())).await;
    assert!(program.stop().await.success());
    refuses();
    // Not the directory's name counts: it may be moved.
    let moved = copies.path().join("moved");
    fs::rename(data.path(), &moved).expect("moved");
    let mut program = on_directory(&moved).start().await;
    wait_for_banner(&program).await;
    // Two directories on one cluster never run at once, whatever is written about whose it is.
    fs::remove_file(cluster.join("data-dir")).expect("removed");
    let output = on_directory(&copied).under(&["timeout", "60"]).output();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{told}");
    emits(&api(&program, &moved)).await;
    assert!(program.stop().await.success());
    fs::create_dir_all(data.path()).expect("back for its removal");
}

/// The copy has a database of its own, and the number of the original's server in it.
#[tokio::test]
async fn a_copy_of_a_running_data_directory_leaves_the_original_s_server_alone() {
    let data = DataFolder::new();
    let mut program = Postrider::embedded(&data).start().await;
    wait_for_banner(&program).await;
    let original = data.server_pid().expect("it runs");
    let copies = DataFolder::new();
    let copied = copies.path().join("copy");
    copy(data.path(), &copied);
    let mut other = on_directory(&copied).start().await;
    wait_for_banner(&other).await;
    assert_eq!(
        data.server_pid(),
        Some(original),
        "the original's server is the same"
    );
    emits(&api(&program, data.path())).await;
    assert!(other.stop().await.success());
    emits(&api(&program, data.path())).await;
    assert!(program.stop().await.success());
}
