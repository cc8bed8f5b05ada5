//! Through PgBouncer in transaction mode, of the version that the system has: producers and the dashboard.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, Stdio},
};

use postrider_embedded::Account;
use reqwest::{Method, StatusCode};
use serde_json::json;
use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};
use tempfile::TempDir;

use crate::{
    access::{Things, all_routes},
    connections::locks_are_released,
    support::{Database, Person, Postrider, Receiver, until},
};

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

fn can_keep_prepared_statements() -> bool {
    version() >= (1, 21)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Prepared {
    Kept,
    Forgotten,
}

impl PgBouncer {
    async fn start(database: &Database, prepared: Prepared) -> Self {
        Self::start_with(database, prepared, "").await
    }

    /// `more` is further lines of its settings.
    async fn start_with(database: &Database, prepared: Prepared, more: &str) -> Self {
        let folder = TempDir::new().expect("a folder");
        let path = folder.path();
        // It runs as the account that runs the server: as root it refuses to.
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).expect("open to it");
        fs::write(path.join("users.txt"), "\"postrider\" \"\"\n").expect("written");
        let server = database.socket();
        // An older one does not know the setting.
        let prepared = match (can_keep_prepared_statements(), prepared) {
            (true, Prepared::Kept) => "max_prepared_statements = 200\n",
            (true, Prepared::Forgotten) => "max_prepared_statements = 0\n",
            (false, _) => "",
        };
        let settings = format!(
            "[databases]\n* = host={} port=5432\n[pgbouncer]\nlisten_addr =\nlisten_port = {PORT}\n\
             unix_socket_dir = {}\nauth_type = trust\nauth_file = {}\npool_mode = transaction\n\
             default_pool_size = {SERVERS}\nmax_client_conn = 200\nlogfile = {}\n\
             ignore_startup_parameters = extra_float_digits\n{prepared}{more}",
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
    let bouncer = PgBouncer::start(&database, Prepared::Forgotten).await;
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

/// One that forgets prepared statements, as all before 1.21 do. The dashboard finds that out.
#[tokio::test]
async fn a_dashboard_works_through_transaction_mode() {
    let database = Database::fresh().await;
    let bouncer = PgBouncer::start(&database, Prepared::Forgotten).await;
    let dashboard = serve_through(&bouncer, &database).await;
    let told = dashboard.log_lines().join("\n");
    assert!(
        told.contains("each statement runs in its own transaction"),
        "{told}"
    );
    let _dispatcher = Postrider::on_database("dispatcher", &database).start().await;
    let receiver = Receiver::start().await;
    crowd(&dashboard, &receiver).await;
    look_at_everything(&dashboard, &receiver).await;
}

#[tokio::test]
async fn locks_of_a_dashboard_behind_it_that_stands_still_are_released() {
    let database = Database::fresh().await;
    let bouncer = PgBouncer::start(&database, Prepared::Forgotten).await;
    let dashboard = serve_through(&bouncer, &database).await;
    locks_are_released(&database, &dashboard).await;
}

/// One that keeps prepared statements but takes no settings for a session: they are set in each transaction.
#[tokio::test]
async fn a_dashboard_works_through_session_mode() {
    let database = Database::fresh().await;
    let more = "pool_mode = session\ndefault_pool_size = 40\n";
    let bouncer = PgBouncer::start_with(&database, Prepared::Forgotten, more).await;
    let dashboard = serve_through(&bouncer, &database).await;
    let told = dashboard.log_lines().join("\n");
    assert!(
        !told.contains("each statement runs in its own transaction"),
        "{told}"
    );
    let _dispatcher = Postrider::on_database("dispatcher", &database).start().await;
    let receiver = Receiver::start().await;
    crowd(&dashboard, &receiver).await;
}

#[tokio::test]
async fn a_newer_one_remembers_prepared_statements() {
    if !can_keep_prepared_statements() {
        return;
    }
    let database = Database::fresh().await;
    let bouncer = PgBouncer::start(&database, Prepared::Kept).await;
    let dashboard = serve_through(&bouncer, &database).await;
    let told = dashboard.log_lines().join("\n");
    assert!(
        !told.contains("each statement runs in its own transaction"),
        "{told}"
    );
    let _dispatcher = Postrider::on_database("dispatcher", &database).start().await;
    let receiver = Receiver::start().await;
    crowd(&dashboard, &receiver).await;
}

async fn serve_through(bouncer: &PgBouncer, database: &Database) -> Postrider {
    Postrider::on_database("dashboard", database)
        .set("POSTRIDER_DATABASE_URL", bouncer.url(database))
        .start()
        .await
}

/// Several clients at once, over fewer servers. Each reads what it has just written.
async fn crowd(dashboard: &Postrider, receiver: &Receiver) {
    let api = dashboard.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    let mut requests = Vec::new();
    for client in 0..CLIENTS {
        let api = dashboard.api();
        requests.push(tokio::spawn(async move {
            for number in client * EVENTS..(client + 1) * EVENTS {
                let id = format!("e{number}");
                let event = json!({ "type": "invoice.paid", "id": id, "data": {} });
                let (status, told) = match number % 3 {
                    0 => api.emit("acme", event).await,
                    1 => {
                        api.call(
                            Method::POST,
                            "/tenants/acme/events/batch",
                            Some(json!({ "events": [event] })),
                        )
                        .await
                    }
                    _ => {
                        let key = format!("once {number}");
                        let (status, _, told) = api.post_with_key("/tenants/acme/events", &key, event).await;
                        (status, told)
                    }
                };
                assert!(status.is_success(), "{told}");
                let found = api.get(&format!("/tenants/acme/events/{id}")).await;
                assert_eq!(found["id"], id.as_str());
                api.get("/tenants/acme/events?limit=5").await;
            }
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

/// Every read of the API, and every page.
async fn look_at_everything(dashboard: &Postrider, receiver: &Receiver) {
    let things = Things::of(&dashboard.api(), "other", &receiver.url("/other")).await;
    let mut person = Person::signed_in(dashboard).await;
    // What goes on for ever, and what needs a word of its own.
    let apart = |path: &str| path.starts_with("/live/") || path.ends_with("/requests") || path == "/portal";
    let reads = all_routes()
        .into_iter()
        .filter(|route| route.method == "GET" && !apart(route.path));
    let mut seen = 0;
    for route in reads {
        let path = things.path(&route, things.tenant);
        let status = match path.strip_prefix("/v1") {
            Some(path) => dashboard.api().call(Method::GET, path, None).await.0,
            None => person.visit(&path).await.0,
        };
        assert!(!status.is_server_error(), "{path}: {status}");
        seen += usize::from(status.is_success());
    }
    assert!(seen > 40, "{seen}");
}

/// The commit is done on the server, waits there for a standby that does not exist, and is given up by the pooler: nobody
/// can know then whether it was done.
#[tokio::test]
async fn a_commit_that_the_pooler_loses_makes_one_event_and_its_id_is_reported() {
    let database = Database::on_private_server().await;
    let bouncer = PgBouncer::start_with(&database, Prepared::Forgotten, "query_timeout = 2\n").await;
    let dashboard = serve_through(&bouncer, &database).await;
    let api = dashboard.api();
    api.acme("http://127.0.0.1:9/hook", json!({})).await;
    let stall = async |stalled: bool| {
        let names = if stalled { "'nobody'" } else { "''" };
        let change = format!("alter system set synchronous_standby_names = {names}");
        database.execute_as_superuser(&change).await;
        database.execute_as_superuser("select pg_reload_conf()").await;
        let expected = if stalled { "nobody" } else { "" };
        until("the setting is in force", || async {
            (database.text("show synchronous_standby_names").await == expected).then_some(())
        })
        .await;
    };
    let count = async |mark: &str| {
        let query =
            format!("select count(*) from postrider.events where convert_from(body, 'UTF8') like '%{mark}%'");
        database.count(&query).await
    };

    let single = json!({ "type": "invoice.paid", "data": { "mark": "single" } });
    let keyed = json!({ "type": "invoice.paid", "ordering_key": "k", "data": { "mark": "ordered" } });
    let batch = json!({ "events": [{ "type": "invoice.paid", "data": { "mark": "batched" } }] });
    for (mark, path, body) in [
        ("single", "/tenants/acme/events", single),
        ("ordered", "/tenants/acme/events", keyed),
        ("batched", "/tenants/acme/events/batch", batch),
    ] {
        stall(true).await;
        let (status, problem) = api.call(Method::POST, path, Some(body)).await;
        stall(false).await;
        assert_eq!(count(mark).await, 1, "{mark}: {problem}");
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{mark}: {problem}");
        assert_eq!(
            problem["type"], "urn:postrider:problem:outcome-unknown",
            "{problem}"
        );
        let id = problem["event_id"]
            .as_str()
            .expect("the id of the event")
            .to_owned();
        let (status, found) = api
            .call(Method::GET, &format!("/tenants/acme/events/{id}"), None)
            .await;
        assert_eq!(status, StatusCode::OK, "{mark}: {found}");
    }

    // The producer's own id makes it safe to send it again.
    stall(true).await;
    let own = json!({ "type": "invoice.paid", "id": "own", "data": { "mark": "owned" } });
    let (status, problem) = api.emit("acme", own.clone()).await;
    stall(false).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{problem}");
    assert_eq!(problem["type"], "urn:postrider:problem:busy", "{problem}");
    let (status, told) = api.emit("acme", own).await;
    assert_eq!(status, StatusCode::OK, "{told}");
    assert_eq!(count("owned").await, 1);
}
