//! One throwaway cluster for the whole run, and a fresh database for each test, copied from a migrated template.
//! Durability is as Postgres ships it, so that what is proven here holds elsewhere.

use std::{
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use postrider_dispatcher::{partitions, schema};
use postrider_embedded::{Account, Cluster, Home, Programs};
use rustix::process::{Pid, Signal, kill_process};
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool, postgres::PgConnectOptions};

use super::until;

const TEMPLATE: &str = "migrated";
/// Every test has a few processes with a pool each, and some hold hundreds of transactions open.
const SETTINGS: &str = "max_connections = 1000\n";

struct Shared {
    cluster: Cluster,
    /// Reads from a pipe that closes when this process ends, in whichever way.
    _watcher: Child,
}

static SHARED: OnceLock<Arc<Shared>> = OnceLock::new();
static NUMBER: AtomicU32 = AtomicU32::new(0);

pub(crate) struct Database {
    name: String,
    server: Arc<Shared>,
}

impl Database {
    /// With the schema as it is today.
    pub(crate) async fn fresh() -> Self {
        Self::copy_of(shared(), TEMPLATE).await
    }

    /// On a server of its own, for a test that does something to the server.
    pub(crate) async fn on_private_server() -> Self {
        Self::on_private_server_in(std::env::temp_dir(), "").await
    }

    /// The same, below this folder and with these lines of configuration.
    pub(crate) async fn on_private_server_in(folder: PathBuf, settings: &'static str) -> Self {
        let server = tokio::task::spawn_blocking(move || start(&folder, settings)).await;
        Self::copy_of(Arc::new(server.expect("a server")), TEMPLATE).await
    }

    /// Without our schema.
    pub(crate) async fn empty() -> Self {
        Self::copy_of(shared(), "template0").await
    }

    /// Without our schema, on a cluster made just now.
    pub(crate) async fn empty_on_a_new_cluster() -> Self {
        let server = tokio::task::spawn_blocking(|| start(&std::env::temp_dir(), "")).await;
        Self::copy_of(Arc::new(server.expect("a server")), "template0").await
    }

    /// Without our schema, and without an encoding: it takes any bytes for text.
    pub(crate) async fn empty_in_ascii() -> Self {
        let options = "template0 encoding 'SQL_ASCII' locale 'C'";
        Self::copy_of(shared(), options).await
    }

    async fn copy_of(server: Arc<Shared>, template: &str) -> Self {
        let name = format!("test_{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let create = format!("create database {name} template {template} owner postrider");
        run(&server.cluster, &create).await;
        Self { name, server }
    }

    /// Another one on the same server, with the schema as it is today.
    pub(crate) async fn beside(&self) -> Self {
        Self::copy_of(self.server.clone(), TEMPLATE).await
    }

    /// A copy of it on the same server. Nobody may be connected to it.
    pub(crate) async fn copy(&self) -> Self {
        Self::copy_of(self.server.clone(), &self.name).await
    }

    /// In this database rather than in the server's own one.
    pub(crate) async fn execute_here_as_superuser(&self, statement: &str) {
        let options = self.server.cluster.superuser_options().database(&self.name);
        let mut connection = PgConnection::connect_with(&options).await.expect("connected");
        sqlx::raw_sql(AssertSqlSafe(statement))
            .execute(&mut connection)
            .await
            .expect(statement);
        connection.close().await.expect("closed");
    }

    /// Pulls the server's plug and starts it again: what was not on disk is lost, every session is cut off.
    pub(crate) async fn crash_server(&self) {
        let mut restart = self.server.cluster.command("pg_ctl");
        restart.args(["restart", "-w", "-s", "-m", "immediate", "-l"]);
        restart.arg(self.server.cluster.home().log());
        restart.stdout(Stdio::null()).stderr(Stdio::null());
        let ended = tokio::task::spawn_blocking(move || restart.status()).await;
        assert!(ended.expect("waited for").expect("pg_ctl starts").success());
    }

    /// Stops the server and leaves it stopped.
    pub(crate) async fn stop_server(&self) {
        let mut stop = self.server.cluster.command("pg_ctl");
        stop.args(["stop", "-w", "-s", "-m", "fast"]);
        stop.stdout(Stdio::null()).stderr(Stdio::null());
        let ended = tokio::task::spawn_blocking(move || stop.status()).await;
        assert!(ended.expect("waited for").expect("pg_ctl starts").success());
    }

    /// Starts a server that went down by itself; one that runs is left alone.
    pub(crate) async fn start_server(&self) -> bool {
        let mut start = self.server.cluster.command("pg_ctl");
        start.args(["start", "-w", "-s", "-l"]);
        start.arg(self.server.cluster.home().log());
        start.stdout(Stdio::null()).stderr(Stdio::null());
        let ended = tokio::task::spawn_blocking(move || start.status()).await;
        ended.expect("waited for").expect("pg_ctl starts").success()
    }

    /// The socket that the server listens on.
    pub(crate) fn socket(&self) -> PathBuf {
        self.server.cluster.home().sockets().join(".s.PGSQL.5432")
    }

    /// A program of the server's, such as `pg_dump`, to be given arguments.
    pub(crate) fn cluster(&self) -> &Cluster {
        &self.server.cluster
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) async fn execute(&self, statement: &str) {
        let mut connection = self.connect().await;
        sqlx::raw_sql(AssertSqlSafe(statement))
            .execute(&mut connection)
            .await
            .expect(statement);
    }

    pub(crate) async fn execute_as_superuser(&self, statement: &str) {
        run(&self.server.cluster, statement).await;
    }

    /// The one number that this asks for.
    pub(crate) async fn count(&self, query: &str) -> i64 {
        let mut connection = self.connect().await;
        sqlx::query_scalar(AssertSqlSafe(query))
            .fetch_one(&mut connection)
            .await
            .expect(query)
    }

    pub(crate) async fn text(&self, query: &str) -> String {
        let mut connection = self.connect().await;
        sqlx::query_scalar(AssertSqlSafe(query))
            .fetch_one(&mut connection)
            .await
            .expect(query)
    }

    /// Waits until nothing waits to be sent or to be tried again.
    pub(crate) async fn drained(&self) {
        let waiting =
            "select (select count(*) from postrider.queue) + (select count(*) from postrider.retries)";
        until("nothing waits", || async {
            (self.count(waiting).await == 0).then_some(())
        })
        .await;
    }

    /// As the owner of the schema, which is not a superuser.
    pub(crate) fn options(&self) -> PgConnectOptions {
        self.server.cluster.options().database(&self.name)
    }

    pub(crate) fn url(&self) -> String {
        self.url_as("postrider")
    }

    /// As another role; `postgres` is the superuser.
    pub(crate) fn url_as(&self, role: &str) -> String {
        let folder = self.server.cluster.home().sockets().display();
        format!("postgresql://{role}@localhost/{}?host={folder}", self.name)
    }

    pub(crate) async fn connect(&self) -> PgConnection {
        PgConnection::connect_with(&self.options())
            .await
            .expect("connected")
    }

    /// A login that may use the schema and call `emit`, and nothing else.
    pub(crate) async fn producer(&self) -> PgConnection {
        let role = format!("producer_{}", self.name);
        run(&self.server.cluster, &format!("create role {role} login")).await;
        let mut owner = self.connect().await;
        for grant in [
            format!("grant usage on schema postrider to {role}"),
            format!("grant execute on function postrider.emit to {role}"),
        ] {
            sqlx::raw_sql(AssertSqlSafe(grant))
                .execute(&mut owner)
                .await
                .expect("granted");
        }
        PgConnection::connect_with(&self.options().username(&role))
            .await
            .expect("connected")
    }
}

/// Statements that only a superuser may run.
async fn run(cluster: &Cluster, statement: &str) {
    let options = cluster.superuser_options();
    let mut connection = PgConnection::connect_with(&options).await.expect("connected");
    sqlx::raw_sql(AssertSqlSafe(statement))
        .execute(&mut connection)
        .await
        .expect(statement);
}

fn shared() -> Arc<Shared> {
    // On a thread of its own: a test's own runtime is busy waiting for this.
    let start = || {
        let started = std::thread::spawn(|| start(&std::env::temp_dir(), ""));
        Arc::new(started.join().expect("the test cluster starts"))
    };
    SHARED.get_or_init(start).clone()
}

fn start(below: &Path, settings: &str) -> Shared {
    let account = Account::for_server().expect("an account for the server");
    let folder = below.join(format!("postrider-it-{}", uuid::Uuid::new_v4().simple()));
    let home = Home::at(folder.clone(), account).expect("a home for the cluster");
    let watcher = watch(account, &folder);

    let cluster = Cluster::start(home, &format!("{SETTINGS}{settings}")).expect("the test cluster starts");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        cluster.make_database().await.expect("the owner is made");
        run(&cluster, &format!("create database {TEMPLATE} owner postrider")).await;
        let pool = PgPool::connect_with(cluster.options().database(TEMPLATE))
            .await
            .expect("connected");
        schema::migrate(&pool).await.expect("migrated");
        // Copies of it are not taken for restored ones.
        sqlx::query("update postrider.sending set identity = null")
            .execute(&pool)
            .await
            .expect("forgotten");
        let retention = postrider_dispatcher::Settings::default().retention;
        partitions::make_ahead(&pool, retention)
            .await
            .expect("partitions made");
        // A template can be copied only while nobody is connected to it.
        pool.close().await;
    });
    Shared {
        cluster,
        _watcher: watcher,
    }
}

/// Ends the server below this folder, and removes it, when this process ends or the answer is dropped.
fn watch(account: Account, folder: &Path) -> Child {
    // A test binary has no end of its own to hook into, so a watcher outlives it: it reads until the pipe closes.
    let mut watcher = account.command("/bin/sh".as_ref(), folder);
    let script = "cat > /dev/null
        kill -QUIT \"$(head -n 1 data/postmaster.pid)\"
        while [ -e data/postmaster.pid ] && kill -0 \"$(head -n 1 data/postmaster.pid)\"; do sleep 0.1; done
        cd / && rm -rf \"$1\"";
    watcher.args(["-c", script, "sh"]).arg(folder);
    watcher
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    watcher.spawn().expect("sh starts")
}

/// A copy of the server that follows it by streaming replication, and is asked before each of its commits is told.
pub(crate) struct Replica {
    server: Shared,
}

impl Replica {
    pub(crate) async fn of(primary: &Database) -> Self {
        let sockets = primary.server.cluster.home().sockets().to_owned();
        let server = tokio::task::spawn_blocking(move || copy_and_follow(&sockets)).await;
        let server = server.expect("a replica");
        for statement in [
            "alter system set synchronous_standby_names = '*'",
            "select pg_reload_conf()",
        ] {
            run(&primary.server.cluster, statement).await;
        }
        let options = primary.server.cluster.superuser_options();
        until("the replica is synchronous", || async {
            let mut connection = PgConnection::connect_with(&options).await.ok()?;
            let state: String = sqlx::query_scalar("select sync_state from pg_stat_replication")
                .fetch_one(&mut connection)
                .await
                .ok()?;
            (state == "sync").then_some(())
        })
        .await;
        Self { server }
    }

    /// From here on it takes writes.
    pub(crate) async fn promote(&self) {
        let mut promote = self.server.cluster.command("pg_ctl");
        promote.args(["promote", "-w", "-s"]);
        promote.stdout(Stdio::null()).stderr(Stdio::null());
        let ended = tokio::task::spawn_blocking(move || promote.status()).await;
        assert!(ended.expect("waited for").expect("pg_ctl starts").success());
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.server.cluster.home().sockets().join(".s.PGSQL.5432")
    }

    /// The copy of this database.
    pub(crate) fn url(&self, database: &Database) -> String {
        let folder = self.server.cluster.home().sockets().display().to_string();
        format!(
            "postgresql://postrider@localhost/{}?host={folder}",
            database.name()
        )
    }

    /// In a database of this server, as the superuser.
    pub(crate) async fn execute(&self, database: &str, statement: &str) {
        let options = self.server.cluster.superuser_options().database(database);
        let mut connection = PgConnection::connect_with(&options).await.expect("connected");
        sqlx::raw_sql(AssertSqlSafe(statement))
            .execute(&mut connection)
            .await
            .expect(statement);
    }

    /// It takes what it is sent, and shows nothing of it.
    pub(crate) async fn hold_back(&self) {
        run(&self.server.cluster, "select pg_wal_replay_pause()").await;
    }

    pub(crate) async fn go_on(&self) {
        run(&self.server.cluster, "select pg_wal_replay_resume()").await;
    }

    pub(crate) fn kill(&self) {
        let pid = self.server.cluster.pid().expect("it runs");
        let pid = Pid::from_raw(i32::try_from(pid).expect("a pid")).expect("a pid");
        kill_process(pid, Signal::KILL).expect("killed");
    }
}

fn copy_and_follow(primary: &Path) -> Shared {
    let account = Account::for_server().expect("an account for the server");
    let folder = std::env::temp_dir().join(format!("postrider-it-{}", uuid::Uuid::new_v4().simple()));
    let home = Home::at(folder.clone(), account).expect("a home for the replica");
    let watcher = watch(account, &folder);
    let programs = Programs::find(None).expect("a server");
    let mut copy = account.command(&programs.path("pg_basebackup"), &folder);
    copy.args(["-R", "-X", "stream", "-c", "fast", "-U", "postgres", "-D"])
        .arg(folder.join("data"))
        .arg("-h")
        .arg(primary);
    let output = copy.output().expect("pg_basebackup starts");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let cluster = Cluster::start(home, SETTINGS).expect("the replica starts");
    Shared {
        cluster,
        _watcher: watcher,
    }
}
