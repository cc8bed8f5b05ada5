//! A failover of Postgres: the primary dies, a synchronous replica is promoted, and the same program goes on with it. Nothing
//! that was acknowledged is lost.

use std::{
    collections::HashSet,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};
use tempfile::TempDir;
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, UnixListener, UnixStream},
    sync::watch,
    task::JoinHandle,
};

use crate::support::{Api, Database, Postrider, Receiver, Replica, until};

const PASSWORD: &str = "hunter2";
/// After a standby was promoted, on a busy machine.
const FOUND_WITHIN: Duration = Duration::from_secs(12);

/// A socket that stays while the server behind it changes, as a virtual address does.
struct Address {
    folder: TempDir,
    server: watch::Sender<PathBuf>,
    task: JoinHandle<()>,
}

impl Address {
    fn of(server: PathBuf) -> Self {
        let folder = TempDir::new().expect("a folder");
        let listener = UnixListener::bind(folder.path().join(".s.PGSQL.5432")).expect("a socket");
        let (server, behind) = watch::channel(server);
        let task = tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let mut behind = behind.clone();
                behind.mark_unchanged();
                tokio::spawn(async move {
                    let socket = behind.borrow().clone();
                    let Ok(mut server) = UnixStream::connect(socket).await else {
                        return;
                    };
                    tokio::select! {
                        _ = copy_bidirectional(&mut client, &mut server) => {}
                        // Nobody stays with the old one.
                        _ = behind.changed() => {}
                    }
                });
            }
        });
        Self { folder, server, task }
    }

    fn url(&self, database: &Database) -> String {
        let folder = self.folder.path().display();
        format!(
            "postgresql://postrider@localhost/{}?host={folder}",
            database.name()
        )
    }

    fn options(&self, database: &Database) -> PgConnectOptions {
        PgConnectOptions::new_without_pgpass()
            .socket(self.folder.path())
            .username("postrider")
            .database(database.name())
    }
}

impl Drop for Address {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Emits one event after the other until told to stop, and answers with those that were acknowledged.
async fn emit_over_http(api: Api, stop: Arc<AtomicBool>) -> Vec<String> {
    let mut taken = Vec::new();
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) {
        number += 1;
        let id = format!("http-{number}");
        let event = json!({ "type": "invoice.paid", "id": id, "data": {} });
        if api.emit("acme", event).await.0.is_success() {
            taken.push(id);
        }
    }
    taken
}

async fn emit_by_sql(options: PgConnectOptions, stop: Arc<AtomicBool>) -> Vec<String> {
    let mut taken = Vec::new();
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) {
        let Ok(mut connection) = PgConnection::connect_with(&options).await else {
            continue;
        };
        while !stop.load(Ordering::Relaxed) {
            number += 1;
            let id = format!("sql-{number}");
            let emitted = sqlx::query("select postrider.emit('acme', 'invoice.paid', '{}', $1)")
                .bind(&id)
                .execute(&mut connection)
                .await;
            match emitted {
                Ok(_) => taken.push(id),
                Err(_) => break,
            }
        }
    }
    taken
}

#[tokio::test]
async fn nothing_acknowledged_is_lost_when_a_synchronous_replica_is_promoted() {
    let database = Database::on_private_server().await;
    database
        .execute("update postrider.sending set identity = postrider.database_identity()")
        .await;
    let replica = Replica::of(&database).await;
    let address = Address::of(database.socket());
    let program = Postrider::start_with(
        &database,
        &[
            ("POSTRIDER_DATABASE_URL", &address.url(&database)),
            ("POSTRIDER_RETRY_SCHEDULE", "0s,1s,1s,1s,1s,1s"),
        ],
    )
    .await;
    let receiver = Receiver::start().await;
    program.api().acme(&receiver.url("/hook"), json!({})).await;
    let stop = Arc::new(AtomicBool::new(false));
    let http = tokio::spawn(emit_over_http(program.api(), stop.clone()));
    let sql = tokio::spawn(emit_by_sql(address.options(&database), stop.clone()));
    receiver.wait_for(50).await;

    let primary = database.cluster().pid().expect("it runs");
    let primary = Pid::from_raw(i32::try_from(primary).expect("a pid")).expect("a pid");
    kill_process(primary, Signal::KILL).expect("killed");
    replica.promote().await;
    address.server.send_replace(replica.socket());

    let before = receiver.count();
    until("what is emitted now arrives", || async {
        (receiver.count() >= before + 50).then_some(())
    })
    .await;
    stop.store(true, Ordering::Relaxed);
    let mut taken = http.await.expect("ended");
    taken.extend(sql.await.expect("ended"));
    assert!(taken.len() >= 50, "{}", taken.len());
    until("everything acknowledged has arrived", || async {
        let arrived: HashSet<String> = receiver
            .received()
            .iter()
            .map(|one| one.event_id().to_owned())
            .collect();
        taken.iter().all(|id| arrived.contains(id)).then_some(())
    })
    .await;
    // The promoted standby is the same database: it is no restored copy, and nobody had to confirm it.
    until("the API has noticed the new primary", || async {
        program.api().is_ready().await.then_some(())
    })
    .await;
    let state = program.api().get("/sending").await;
    assert_eq!(
        (&state["stopped"], &state["restored"]),
        (&json!(false), &json!(false))
    );
    // And it is known where it was written down.
    let mut connection = PgConnection::connect_with(&address.options(&database))
        .await
        .expect("connected");
    let kept: Vec<String> = sqlx::query_scalar("select id from postrider.event_ids")
        .fetch_all(&mut connection)
        .await
        .expect("read");
    let kept: HashSet<&str> = kept.iter().map(String::as_str).collect();
    let lost: Vec<&String> = taken.iter().filter(|id| !kept.contains(id.as_str())).collect();
    assert!(lost.is_empty(), "{lost:?}");
}

/// As libpq has it: a host that takes connections and never says a word, the primary and its standby.
struct Hosts {
    url: String,
    _silent: TcpListener,
}

impl Hosts {
    async fn of(database: &Database, replica: &Replica) -> Self {
        let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = silent.local_addr().expect("bound").port();
        let [primary, standby] = [database.socket(), replica.socket()]
            .map(|socket| socket.parent().expect("a folder").display().to_string());
        let (name, hosts) = (database.name(), format!("127.0.0.1,{primary},{standby}"));
        let url = format!(
            "postgresql://postrider:{PASSWORD}@/{name}?host={hosts}&port={port},5432,5432&target_session_attrs=read-write"
        );
        Self { url, _silent: silent }
    }
}

fn kill_primary(database: &Database) {
    let primary = database.cluster().pid().expect("it runs");
    let primary = Pid::from_raw(i32::try_from(primary).expect("a pid")).expect("a pid");
    kill_process(primary, Signal::KILL).expect("killed");
}

#[tokio::test]
async fn every_role_finds_the_new_primary_among_its_hosts_and_does_not_return_to_the_old_one() {
    let database = Database::on_private_server().await;
    database
        .execute_as_superuser("create database source owner postrider")
        .await;
    let replica = Replica::of(&database).await;
    let hosts = Hosts::of(&database, &replica).await;
    let source = hosts.url.replace(database.name(), "source");
    let outbox =
        Postrider::on_database("migrate --outbox-only", &database).set("POSTRIDER_DATABASE_URL", &source);
    assert!(outbox.output().status.success());
    let settings = [
        ("POSTRIDER_DATABASE_URL", hosts.url.as_str()),
        // Another list: its pools are switched by themselves.
        (
            "POSTRIDER_DATABASE_URL_DIRECT",
            &format!("{}&connect_timeout=1", hosts.url),
        ),
        ("POSTRIDER_SOURCES", &source),
        ("POSTRIDER_RETRY_SCHEDULE", "0s,1s,1s,1s,1s,1s"),
        ("POSTRIDER_LOG", "debug"),
    ];
    let program = Postrider::start_with(&database, &settings).await;
    let receiver = Receiver::start().await;
    let api = program.api();
    api.acme(&receiver.url("/hook"), json!({})).await;
    let emit = async |id: &str| {
        let event = json!({ "type": "invoice.paid", "id": id, "data": {} });
        api.emit("acme", event).await.0.is_success()
    };
    assert!(emit("before").await);
    receiver.wait_for(1).await;

    kill_primary(&database);
    replica.promote().await;
    let promoted = Instant::now();
    until("an emit over HTTP is accepted", || async {
        emit("after").await.then_some(())
    })
    .await;
    receiver.wait_for(2).await;
    let took = promoted.elapsed();
    assert!(took < FOUND_WITHIN, "deliveries went on after {took:?}");
    let relayed = "select postrider.emit('acme', 'invoice.paid', '{}', 'relayed')";
    replica.execute("source", relayed).await;
    receiver.wait_for(3).await;

    // The old primary comes back and accepts writes: it does not know that it was replaced.
    until("it starts: the last of its processes has ended", || async {
        database.start_server().await.then_some(())
    })
    .await;
    let end_sessions = "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()
                        and usename = 'postrider'";
    for round in 0..3 {
        replica.execute(database.name(), end_sessions).await;
        let id = format!("again-{round}");
        until("an emit is accepted", || async { emit(&id).await.then_some(()) }).await;
        receiver.wait_for(4 + round).await;
    }
    let asked = "select count(*) from pg_stat_activity where application_name like 'postrider%'";
    assert_eq!(
        database.count(asked).await,
        0,
        "nobody is connected to the old primary"
    );
    let told = Postrider::on_database("doctor", &database)
        .set("POSTRIDER_DATABASE_URL", &hosts.url)
        .output();
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    assert!(told.contains("Two servers accept writes"), "{told}");
    let logged = program.log_lines().join("\n");
    assert!(
        logged.contains("connecting to another host of the database"),
        "{logged}"
    );
    assert!(!logged.contains(PASSWORD) && !told.contains(PASSWORD), "{logged}");
}

#[tokio::test]
async fn hosts_of_which_none_accepts_writes_are_named_and_waited_for() {
    let database = Database::on_private_server().await;
    let replica = Replica::of(&database).await;
    let folder = replica.socket().parent().expect("a folder").display().to_string();
    let url = format!(
        "postgresql://postrider:{PASSWORD}@/{}?host={folder},127.0.0.1&port=5432,1&target_session_attrs=read-write",
        database.name()
    );
    let refused = Postrider::on_database("migrate", &database)
        .set("POSTRIDER_DATABASE_URL", &url)
        .output();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1));
    for expected in ["no host is read-write", "a standby", "127.0.0.1:1: "] {
        assert!(said.contains(expected), "{said}");
    }
    assert!(!said.contains(PASSWORD), "{said}");
    let dashboard = Postrider::on_database("dashboard", &database).set("POSTRIDER_DATABASE_URL", &url);
    let dashboard = dashboard.spawn().await.expect("it waits");
    kill_primary(&database);
    replica.promote().await;
    until("the dashboard is ready", || async {
        dashboard.api().is_ready().await.then_some(())
    })
    .await;
}
