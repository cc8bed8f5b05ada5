//! A Patroni cluster on loopback, from the files in deploy/patroni as they are: three nodes, etcd on each, HAProxy. What an
//! operator fills in, addresses and passwords, are variables here too.

use std::{
    collections::HashMap,
    fs::{self, File},
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Mutex,
    time::Duration,
};

use postrider_embedded::{Account, Programs};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use sqlx::{Connection, PgConnection, postgres::PgConnectOptions};

use crate::installation::http_client;

pub(crate) const NODES: [&str; 3] = ["a", "b", "c"];
const FILES: &str = "deploy/patroni";
const SCOPE: &str = "postrider";
const PASSWORD: &str = "of-the-tests";
const PROGRAMS: [&str; 4] = ["patroni", "patronictl", "etcd", "haproxy"];
const FORMED_BY: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(100);
/// A member that is frozen takes connections and says nothing.
const ANSWER_MAX: Duration = Duration::from_secs(1);

/// The programs that are not installed.
pub(crate) fn missing_programs() -> Vec<&'static str> {
    let is_missing = |name: &&str| find(name).is_none();
    PROGRAMS.into_iter().filter(is_missing).collect()
}

/// On Debian haproxy is not in the PATH of users who are not root.
fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/usr/bin".into()])
        .map(|folder| folder.join(name))
        .find(|program| program.exists())
}

pub(crate) struct Node {
    pub(crate) name: &'static str,
    pub(crate) port: u16,
    rest: u16,
    folder: PathBuf,
    settings: Vec<(&'static str, String)>,
    patroni: Mutex<Option<Child>>,
    etcd: Child,
}

pub(crate) struct Patroni {
    folder: PathBuf,
    account: Account,
    pub(crate) nodes: Vec<Node>,
    pub(crate) primary_port: u16,
    haproxy: Child,
    _watcher: Child,
}

/// Ports that nobody else on this machine has.
fn ports<const COUNT: usize>() -> [u16; COUNT] {
    let listeners: Vec<TcpListener> = (0..COUNT)
        .map(|_| TcpListener::bind("127.0.0.1:0").expect("a port"))
        .collect();
    std::array::from_fn(|n| listeners[n].local_addr().expect("bound").port())
}

fn at(port: u16) -> String {
    format!("127.0.0.1:{port}")
}

impl Patroni {
    /// With an empty database of ours, whose owner is `postrider`.
    pub(crate) async fn start() -> Self {
        let account = Account::for_server().expect("an account");
        let name = format!("postrider-patroni-{}", uuid::Uuid::new_v4().simple());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir(&folder).expect("a folder");
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).expect("permitted");
        let watcher = watch(account, &folder);
        for file in ["patroni.yml", "haproxy.cfg"] {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(FILES).join(file);
            fs::copy(source, folder.join(file)).expect(file);
        }
        let [
            a,
            b,
            c,
            rest_a,
            rest_b,
            rest_c,
            peer_a,
            peer_b,
            peer_c,
            etcd_a,
            etcd_b,
            etcd_c,
            primary,
            standbys,
        ] = ports::<14>();
        let (rests, etcds) = ([rest_a, rest_b, rest_c], [etcd_a, etcd_b, etcd_c]);
        let peers = [peer_a, peer_b, peer_c].map(|port| format!("http://{}", at(port)));
        let nodes: Vec<Node> = NODES
            .into_iter()
            .enumerate()
            .map(|(n, name)| {
                let below = folder.join(name);
                fs::create_dir(&below).expect("a folder");
                fs::set_permissions(&below, fs::Permissions::from_mode(0o777)).expect("permitted");
                let port = [a, b, c][n];
                Node {
                    name,
                    port,
                    rest: rests[n],
                    settings: node_settings(name, &below, port, rests[n], &etcds),
                    patroni: Mutex::default(),
                    etcd: start_etcd(account, &folder, n, &peers, etcds[n]),
                    folder: below,
                }
            })
            .collect();
        let haproxy = start_haproxy(account, &folder, &nodes, primary, standbys);
        let cluster = Self {
            folder,
            account,
            nodes,
            primary_port: primary,
            haproxy,
            _watcher: watcher,
        };
        for node in &cluster.nodes {
            cluster.start_patroni(node);
        }
        cluster.whole().await;
        cluster.make_database().await;
        cluster
    }

    async fn make_database(&self) {
        for statement in [
            format!("create role {SCOPE} login password '{PASSWORD}'"),
            format!("create database {SCOPE} owner {SCOPE}"),
        ] {
            let options = self
                .options(self.primary_port)
                .username("postgres")
                .database("postgres");
            let mut connection = PgConnection::connect_with(&options).await.expect("connected");
            let made = sqlx::raw_sql(sqlx::AssertSqlSafe(statement))
                .execute(&mut connection)
                .await;
            made.expect("made");
        }
    }

    /// As the owner of the schema, to one node or through HAProxy.
    pub(crate) fn options(&self, port: u16) -> PgConnectOptions {
        PgConnectOptions::new_without_pgpass()
            .host("127.0.0.1")
            .port(port)
            .username(SCOPE)
            .password(PASSWORD)
            .database(SCOPE)
            .ssl_mode(sqlx::postgres::PgSslMode::Disable)
    }

    /// All nodes in this order, as libpq has it.
    pub(crate) fn url(&self, order: [usize; 3]) -> String {
        let hosts = order.map(|n| at(self.nodes[n].port)).join(",");
        let more = "target_session_attrs=read-write&sslmode=disable";
        format!("postgresql://{SCOPE}:{PASSWORD}@{hosts}/{SCOPE}?{more}")
    }

    pub(crate) fn url_of_haproxy(&self) -> String {
        let address = at(self.primary_port);
        format!("postgresql://{SCOPE}:{PASSWORD}@{address}/{SCOPE}?sslmode=disable")
    }

    pub(crate) fn start_patroni(&self, node: &Node) {
        let mut command = self.command("patroni", &node.folder);
        command.arg(self.folder.join("patroni.yml"));
        command.envs(node.settings.iter().map(|(name, value)| (name, value)));
        let child = run(command, &node.folder, "patroni");
        *node.patroni.lock().expect("not poisoned") = Some(child);
    }

    fn command(&self, program: &str, folder: &Path) -> Command {
        let program = find(program).expect("installed");
        self.account.command(&program, folder)
    }

    /// The node that calls itself the leader, asked of each.
    pub(crate) async fn leader(&self) -> Option<usize> {
        for (n, node) in self.nodes.iter().enumerate() {
            let asked = http_client()
                .get(format!("http://{}/primary", at(node.rest)))
                .timeout(ANSWER_MAX);
            if asked
                .send()
                .await
                .is_ok_and(|answer| answer.status().is_success())
            {
                return Some(n);
            }
        }
        None
    }

    /// A leader, a synchronous standby and another one, all of which run on one timeline.
    async fn is_whole(&self) -> Option<usize> {
        let leader = self.leader().await?;
        let url = format!("http://{}/cluster", at(self.nodes[leader].rest));
        let answer = http_client().get(url).timeout(ANSWER_MAX).send().await.ok()?;
        let found: Value = serde_json::from_str(&answer.text().await.ok()?).ok()?;
        let members = found["members"].as_array()?;
        let mut roles: HashMap<&str, usize> = HashMap::new();
        for member in members {
            let state = member["state"].as_str()?;
            let runs = matches!(state, "running" | "streaming");
            let same = member["timeline"] == members[0]["timeline"];
            (runs && same).then_some(())?;
            *roles.entry(member["role"].as_str()?).or_default() += 1;
        }
        let expected = [("leader", 1), ("sync_standby", 1), ("replica", 1)];
        expected
            .iter()
            .all(|(role, count)| roles.get(role) == Some(count))
            .then_some(leader)
    }

    /// Waits until nothing is left to be repaired; answers with the leader.
    pub(crate) async fn whole(&self) -> usize {
        let asked = async {
            loop {
                if let Some(leader) = self.is_whole().await {
                    return leader;
                }
                tokio::time::sleep(POLL * 2).await;
            }
        };
        match tokio::time::timeout(FORMED_BY, asked).await {
            Ok(leader) => leader,
            Err(_) => panic!(
                "the cluster is not whole after {FORMED_BY:?}: {}",
                self.save_logs().display()
            ),
        }
    }

    /// Waits until a node other than this accepts writes.
    pub(crate) async fn another_than(&self, old: usize) -> usize {
        let asked = async {
            loop {
                for n in (0..NODES.len()).filter(|n| *n != old) {
                    if self.accepts_writes(n).await {
                        return n;
                    }
                }
                tokio::time::sleep(POLL).await;
            }
        };
        match tokio::time::timeout(FORMED_BY, asked).await {
            Ok(leader) => leader,
            Err(_) => panic!(
                "no other primary after {FORMED_BY:?}: {}",
                self.save_logs().display()
            ),
        }
    }

    async fn accepts_writes(&self, n: usize) -> bool {
        let options = self.options(self.nodes[n].port);
        let asked = async {
            let mut connection = PgConnection::connect_with(&options).await?;
            let in_recovery: bool = sqlx::query_scalar("select pg_is_in_recovery()")
                .fetch_one(&mut connection)
                .await?;
            connection.close().await?;
            Ok::<_, sqlx::Error>(!in_recovery)
        };
        matches!(tokio::time::timeout(ANSWER_MAX, asked).await, Ok(Ok(true)))
    }

    /// `patronictl switchover`: returns when it has been done.
    pub(crate) async fn switch_over(&self, leader: usize) {
        let node = &self.nodes[leader];
        let mut command = self.command("patronictl", &node.folder);
        command.arg("-c").arg(self.folder.join("patroni.yml"));
        command.args(["switchover", SCOPE, "--leader", node.name, "--force"]);
        command.envs(node.settings.iter().map(|(name, value)| (name, value)));
        let output = tokio::task::spawn_blocking(move || command.output()).await;
        let output = output.expect("ended").expect("patronictl starts");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(said.contains("Successfully switched over"), "{said}");
    }

    /// What Patroni and Postgres say; requests to Patroni that were given up are left out.
    pub(crate) fn logs(&self) -> String {
        let lines = |node: &Node| {
            let text = fs::read_to_string(node.folder.join("patroni.log")).unwrap_or_default();
            let of_patroni = |line: &&str| line.starts_with("20");
            let lines: Vec<&str> = text.lines().filter(of_patroni).collect();
            format!("node {}:\n{}\n", node.name, lines.join("\n"))
        };
        self.nodes.iter().map(lines).collect()
    }

    /// For whoever wants to know why.
    fn save_logs(&self) -> PathBuf {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("patroni.txt");
        fs::write(&file, self.logs()).expect("written");
        file
    }

    /// etcd on all nodes.
    pub(crate) fn signal_etcd(&self, signal: Signal) {
        for node in &self.nodes {
            let _ = kill_process(Pid::from_child(&node.etcd), signal);
        }
    }
}

impl Node {
    fn postmaster(&self) -> Option<Pid> {
        let file = fs::read_to_string(self.folder.join("data/postmaster.pid")).ok()?;
        Pid::from_raw(file.lines().next()?.trim().parse().ok()?)
    }

    /// `kill -9` of the postmaster: its processes end with it.
    pub(crate) fn kill_postgres(&self) {
        let pid = self.postmaster().expect("it runs");
        kill_process(pid, Signal::KILL).expect("killed");
    }

    /// With it goes the server that it has started, if it has not been restarted since.
    pub(crate) fn kill_patroni(&self) {
        let child = self.patroni.lock().expect("not poisoned").take();
        if let Some(mut child) = child {
            signal_family(Pid::from_child(&child), Signal::KILL);
            let _ = child.wait();
        }
    }

    /// Postgres with all its sessions.
    pub(crate) fn signal_postgres(&self, signal: Signal) {
        if let Some(postmaster) = self.postmaster() {
            signal_family(postmaster, signal);
        }
    }

    pub(crate) fn signal_patroni(&self, signal: Signal) {
        if let Some(child) = self.patroni.lock().expect("not poisoned").as_ref() {
            signal_family(Pid::from_child(child), signal);
        }
    }
}

/// The parent first, so that one that is stopped has no new children; those of one that is killed are looked up before.
fn signal_family(first: Pid, signal: Signal) {
    let mut all = family(first);
    let _ = kill_process(first, signal);
    all.extend(family(first));
    for pid in all {
        let _ = kill_process(pid, signal);
    }
}

/// This process and all below it.
fn family(first: Pid) -> Vec<Pid> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for entry in fs::read_dir("/proc").expect("processes").flatten() {
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let Some((before, after)) = stat
            .split_once('(')
            .zip(stat.rsplit_once(')'))
            .map(|(b, a)| (b.0, a.1))
        else {
            continue;
        };
        let parent = after.split_whitespace().nth(1).and_then(|text| text.parse().ok());
        if let (Ok(pid), Some(parent)) = (before.trim().parse(), parent) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut found = vec![first.as_raw_nonzero().get()];
    let mut seen = 0;
    while let Some(pid) = found.get(seen) {
        found.extend(children.remove(pid).unwrap_or_default());
        seen += 1;
    }
    found.into_iter().filter_map(Pid::from_raw).collect()
}

fn run(mut command: Command, folder: &Path, name: &str) -> Child {
    let log = File::options()
        .create(true)
        .append(true)
        .open(folder.join(format!("{name}.log")))
        .expect("a log");
    let same = log.try_clone().expect("a log");
    let child = command.stdout(log).stderr(same).spawn().expect(name);
    // Whoever cleans up finds it here.
    fs::write(folder.join(format!("{name}.pid")), child.id().to_string()).expect("written");
    child
}

/// Before 3.0.3, Patroni overwrites the leader key of another through the API of etcd 3, when it wakes after its own has
/// expired. Through that of etcd 2 it compares.
fn has_safe_etcd3() -> bool {
    let output = Command::new(find("patroni").expect("installed"))
        .arg("--version")
        .output();
    let text = String::from_utf8_lossy(&output.expect("it says").stdout).into_owned();
    let version: Vec<u32> = text
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|part| part.parse().ok())
        .collect();
    version >= vec![3, 0, 3]
}

fn etcd_hosts() -> &'static str {
    match has_safe_etcd3() {
        true => "PATRONI_ETCD3_HOSTS",
        false => "PATRONI_ETCD_HOSTS",
    }
}

fn node_settings(
    name: &str,
    folder: &Path,
    port: u16,
    rest: u16,
    etcds: &[u16; 3],
) -> Vec<(&'static str, String)> {
    let programs = Programs::find(None).expect("a server");
    let bin = programs.path("postgres");
    vec![
        ("PATRONI_NAME", name.to_owned()),
        ("PATRONI_RESTAPI_LISTEN", at(rest)),
        ("PATRONI_RESTAPI_CONNECT_ADDRESS", at(rest)),
        ("PATRONI_POSTGRESQL_LISTEN", at(port)),
        ("PATRONI_POSTGRESQL_CONNECT_ADDRESS", at(port)),
        (
            "PATRONI_POSTGRESQL_DATA_DIR",
            folder.join("data").display().to_string(),
        ),
        (
            "PATRONI_POSTGRESQL_BIN_DIR",
            bin.parent().expect("a folder").display().to_string(),
        ),
        (
            "PATRONI_POSTGRESQL_PGPASS",
            folder.join("pgpass").display().to_string(),
        ),
        (etcd_hosts(), etcds.map(at).join(",")),
        ("PATRONI_SUPERUSER_PASSWORD", PASSWORD.to_owned()),
        ("PATRONI_REPLICATION_PASSWORD", PASSWORD.to_owned()),
        ("PATRONI_REWIND_PASSWORD", PASSWORD.to_owned()),
        ("PATRONI_RESTAPI_USERNAME", "patroni".to_owned()),
        ("PATRONI_RESTAPI_PASSWORD", PASSWORD.to_owned()),
        // Python programs want to know how text is encoded.
        ("LC_ALL", "C.UTF-8".to_owned()),
    ]
}

fn start_etcd(account: Account, folder: &Path, n: usize, peers: &[String; 3], client: u16) -> Child {
    let below = folder.join(NODES[n]);
    let client = format!("http://{}", at(client));
    let all: Vec<String> = NODES
        .iter()
        .zip(peers)
        .map(|(name, peer)| format!("{name}={peer}"))
        .collect();
    let mut command = account.command(&find("etcd").expect("installed"), &below);
    command
        .env("ETCD_NAME", NODES[n])
        .env("ETCD_DATA_DIR", below.join("etcd"))
        .env("ETCD_LISTEN_PEER_URLS", &peers[n])
        .env("ETCD_INITIAL_ADVERTISE_PEER_URLS", &peers[n])
        .env("ETCD_LISTEN_CLIENT_URLS", &client)
        .env("ETCD_ADVERTISE_CLIENT_URLS", &client)
        .env("ETCD_INITIAL_CLUSTER", all.join(","))
        .env("ETCD_INITIAL_CLUSTER_STATE", "new")
        .env("ETCD_INITIAL_CLUSTER_TOKEN", SCOPE)
        .env("ETCD_AUTO_COMPACTION_RETENTION", "1");
    if !has_safe_etcd3() {
        command.env("ETCD_ENABLE_V2", "true");
    }
    run(command, &below, "etcd")
}

fn start_haproxy(account: Account, folder: &Path, nodes: &[Node], primary: u16, standbys: u16) -> Child {
    let mut command = account.command(&find("haproxy").expect("installed"), folder);
    command.arg("-f").arg(folder.join("haproxy.cfg"));
    command
        .env("PRIMARY_LISTEN", at(primary))
        .env("STANDBY_LISTEN", at(standbys));
    for node in nodes {
        let name = node.name.to_uppercase();
        command
            .env(format!("NODE_{name}"), at(node.port))
            .env(format!("NODE_{name}_HOST"), "127.0.0.1")
            .env(format!("NODE_{name}_REST"), node.rest.to_string());
    }
    run(command, folder, "haproxy")
}

/// Ends everything below this folder, and removes it, when this process ends in whichever way.
fn watch(account: Account, folder: &Path) -> Child {
    let mut watcher = account.command("/bin/sh".as_ref(), folder);
    // Each of them works in this folder. Twice: Patroni may have started something meanwhile.
    let script = "cat > /dev/null
        cd /
        for round in 1 2; do
            for process in /proc/[0-9]*; do
                case $(readlink \"$process/cwd\") in \"$1\" | \"$1\"/*) kill -KILL \"${process#/proc/}\" ;; esac
            done
            sleep 0.5
        done
        rm -rf \"$1\"";
    watcher.args(["-c", script, "sh"]).arg(folder);
    watcher
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    watcher.spawn().expect("sh starts")
}

impl Drop for Patroni {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            node.kill_patroni();
            node.signal_postgres(Signal::KILL);
            let _ = node.etcd.kill();
            let _ = node.etcd.wait();
        }
        let _ = self.haproxy.kill();
        let _ = self.haproxy.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}
