//! The producers in `examples/`: in every language the event is there if and only if the business change is.

use std::{path::Path, process::Command};

use serde_json::json;
use sqlx::Row;

use crate::support::{Database, Postrider, Receiver, node, python};

fn example(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("examples/producers")
        .join(path)
}

/// Runs it, and answers what it printed last.
fn run(mut command: Command, database: &Database, invoice: &str, roll_back: bool) -> String {
    command
        .env("DATABASE_URL", database.url())
        .env("TENANT", "acme")
        .env("INVOICE", invoice);
    if roll_back {
        command.env("ROLL_BACK", "1");
    }
    let output = command.output().expect("the example starts");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{told}");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    printed.lines().last().unwrap_or_default().trim().to_owned()
}

fn rust() -> Command {
    let programs = Path::new(env!("CARGO_BIN_EXE_postrider"))
        .parent()
        .expect("a folder");
    Command::new(programs.join("examples/pay"))
}

fn in_python() -> Command {
    let mut command = Command::new(python());
    command.arg(example("python/pay.py"));
    command
}

fn in_node() -> Command {
    let mut command = Command::new(node());
    command
        .arg(example("node/pay.cjs"))
        .env("NODE_PATH", node().with_file_name("node_modules"));
    command
}

fn psql(invoice: &str) -> Command {
    let mut command = Command::new("sh");
    let script = format!(
        "exec psql \"$DATABASE_URL\" -qtA -v ON_ERROR_STOP=1 -v tenant=\"$TENANT\" -v invoice={invoice} -f \"$0\""
    );
    command.arg("-c").arg(script).arg(example("sql/pay.sql"));
    command
}

#[tokio::test]
async fn each_language_emits_inside_its_own_transaction() {
    let database = Database::fresh().await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    let mut connection = database.connect().await;
    sqlx::raw_sql(
        "create table invoices (id text primary key, paid boolean not null);
         insert into invoices select name || n, false
         from unnest(array['sql', 'python', 'node', 'rust']) name, generate_series(1, 2) n",
    )
    .execute(&mut connection)
    .await
    .expect("made");
    assert_eq!(run(psql("sql1"), &database, "sql1", false), "sql1:paid");
    for (name, command) in [
        ("python", in_python as fn() -> Command),
        ("node", in_node),
        ("rust", rust),
    ] {
        let (paid, given_up) = (format!("{name}1"), format!("{name}2"));
        run(command(), &database, &given_up, true);
        assert_eq!(run(command(), &database, &paid, false), format!("{paid}:paid"));
        // Once more: the same id with the same content is the same event.
        assert_eq!(run(command(), &database, &paid, false), format!("{paid}:paid"));
    }
    let received = receiver.wait_for(4).await;
    let mut ids: Vec<&str> = received.iter().map(|request| request.event_id()).collect();
    ids.sort_unstable();
    assert_eq!(ids, ["node1:paid", "python1:paid", "rust1:paid", "sql1:paid"]);
    let paid: Vec<String> = sqlx::query("select id from invoices where paid order by id")
        .fetch_all(&mut connection)
        .await
        .expect("read")
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(paid, ["node1", "python1", "rust1", "sql1"]);
    let events: i64 = sqlx::query_scalar("select count(*) from postrider.events")
        .fetch_one(&mut connection)
        .await
        .expect("counted");
    assert_eq!(events, 4);
}
