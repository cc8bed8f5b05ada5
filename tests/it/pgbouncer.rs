//! Through PgBouncer, of the version that the system has: producers in transaction mode, and the dashboard in the mode that
//! this version allows.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, Stdio},
};

use postrider::embedded::Account;
use reqwest::Method;
use serde_json::json;
use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};
use tempfile::TempDir;

use crate::support::{Database, Postrider, Receiver, until};

const PORT: u16 = 6432;
const SERVERS: usize = 2;
const CLIENTS: usize = 12;
const EVENTS: usize = 10;

struct PgBouncer {
    folder: TempDir,
    process: Child,
}

fn program() -> &'static str {
    match Path::new("/usr/sbin/pgbouncer").exists() {
        true => "/usr/sbin/pgbouncer",
        false => "pgbouncer",
    }
}

/// Major and minor.
fn version() -> (u32, u32) {
    let output = Command::new(program())
        .arg("--version")
        .output()
        .expect("pgbouncer is installed: sh deploy/install.sh pgbouncer");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let word = text.split_whitespace().nth(1).expect("a version").to_owned();
    let mut parts = word.split('.').map(|part| part.parse().expect("a number"));
    (parts.next().expect("a major"), parts.next().expect("a minor"))
}

fn keeps_prepared_statements() -> bool {
    version() >= (1, 21)
}

impl PgBouncer {
    async fn start(database: &Database, mode: &str) -> Self {
        let folder = TempDir::new().expect("a folder");
        let path = folder.path();
        // It runs as the account that runs the server: as root it refuses to.
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).expect("open to it");
        fs::write(path.join("users.txt"), "\"postrider\" \"\"\n").expect("written");
        let server = database.socket();
        let prepared = match keeps_prepared_statements() {
            true => "max_prepared_statements = 200\n",
            false => "",
        };
        // A session holds its server for as long as it lasts.
        let servers = if mode == "session" { 40 } else { SERVERS };
        let settings = format!(
            "[databases]\n* = host={} port=5432\n[pgbouncer]\nlisten_addr =\nlisten_port = {PORT}\n\
             unix_socket_dir = {}\nauth_type = trust\nauth_file = {}\npool_mode = {mode}\n\
             default_pool_size = {servers}\nmax_client_conn = 200\nlogfile = {}\n\
             ignore_startup_parameters = extra_float_digits\n{prepared}",
            server.parent().expect("a folder").display(),
            path.display(),
            path.join("users.txt").display(),
            path.join("log").display(),
        );
        fs::write(path.join("pgbouncer.ini"), settings).expect("written");
        let account = Account::for_server().expect("an account");
        // It reads until the pipe closes, which it does when this process ends, in whichever way.
        let script = "\"$0\" pgbouncer.ini & cat > /dev/null; kill -KILL $!; wait";
        let process = account
            .command("/bin/sh".as_ref(), path)
            .args(["-c", script, program()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("pgbouncer starts");
        let started = Self { folder, process };
        until("pgbouncer listens", || async {
            PgConnection::connect_with(&started.options(database))
                .await
                .ok()
                .map(|_| ())
        })
        .await;
        started
    }

    fn options(&self, database: &Database) -> PgConnectOptions {
        PgConnectOptions::new_without_pgpass()
            .socket(self.folder.path())
            .port(PORT)
            .username("postrider")
            .database(database.name())
    }

    fn url(&self, database: &Database) -> String {
        let folder = self.folder.path().display();
        let name = database.name();
        format!("postgresql://postrider@localhost:{PORT}/{name}?host={folder}")
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
        if std::thread::panicking() {
            eprintln!(
                "{}",
                fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
            );
        }
    }
}

#[tokio::test]
async fn producers_emit_through_transaction_mode() {
    let database = Database::fresh().await;
    let bouncer = PgBouncer::start(&database, "transaction").await;
    let program = Postrider::start(&database).await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    let mut clients = Vec::new();
    for client in 0..CLIENTS {
        let options = bouncer.options(&database);
        clients.push(tokio::spawn(async move {
            let mut connection = PgConnection::connect_with(&options).await.expect("connected");
            for number in 0..EVENTS {
                let text = format!(
                    "begin; select postrider.emit('acme', 'invoice.paid', '{{}}', 'c{client}-{number}', null, 'k{client}'); \
                     commit"
                );
                sqlx::raw_sql(sqlx::AssertSqlSafe(text))
                    .execute(&mut connection)
                    .await
                    .expect("emitted");
            }
        }));
    }
    for client in clients {
        client.await.expect("ended");
    }
    let events = CLIENTS * EVENTS;
    receiver.wait_for(events).await;
    program.api().wait_for_state("acme", "delivered", events).await;
}

#[tokio::test]
async fn a_dashboard_works_through_it_or_says_why_not() {
    let database = Database::fresh().await;
    let launch = |bouncer: &PgBouncer| {
        Postrider::on_database("dashboard", &database)
            .set("POSTRIDER_DATABASE_URL", bouncer.url(&database))
            .set("POSTRIDER_DATABASE_URL_DIRECT", database.url())
    };
    let transactions = PgBouncer::start(&database, "transaction").await;
    let sessions = PgBouncer::start(&database, "session").await;
    let bouncer = match keeps_prepared_statements() {
        true => &transactions,
        false => {
            let output = launch(&transactions).output();
            let told = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{told}");
            assert!(told.contains("PgBouncer 1.21"), "{told}");
            &sessions
        }
    };
    let dashboard = launch(bouncer).start().await;
    let _dispatcher = Postrider::on_database("dispatcher", &database).start().await;
    let receiver = Receiver::start().await;
    let api = dashboard.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    let mut requests = Vec::new();
    for number in 0..CLIENTS * EVENTS {
        let api = dashboard.api();
        requests.push(tokio::spawn(async move {
            let event = json!({ "type": "invoice.paid", "id": format!("e{number}"), "data": {} });
            let (status, told) = api.emit("acme", event).await;
            assert!(status.is_success(), "{told}");
            api.get("/tenants/acme/events?limit=5").await;
        }));
    }
    for request in requests {
        request.await.expect("ended");
    }
    let delivered = api.wait_for_state("acme", "delivered", CLIENTS * EVENTS).await;
    let id = delivered[0]["id"].as_str().expect("an id");
    let (status, told) = api
        .call(
            Method::POST,
            &format!("/tenants/acme/deliveries/{id}/replay"),
            None,
        )
        .await;
    assert!(status.is_success(), "{told}");
    receiver.wait_for(CLIENTS * EVENTS + 1).await;
}
