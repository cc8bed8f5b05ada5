//! A failover of Postgres: the primary dies, a synchronous replica is promoted, and the same program goes on with it. Nothing
//! that was acknowledged is lost.

use std::{
    collections::HashSet,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};
use tempfile::TempDir;
use tokio::{
    io::copy_bidirectional,
    net::{UnixListener, UnixStream},
    sync::watch,
    task::JoinHandle,
};

use crate::support::{Api, Database, Postrider, Receiver, Replica, until};

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
