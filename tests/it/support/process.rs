//! The program as a process: started with settings, asked for its address, killed, frozen, stopped.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::{Api, Database, PATIENCE, until};

pub(crate) const ADMIN_PASSWORD: &str = "correct horse battery";
pub(crate) const ADMIN_API_KEY: &str = "prk_of_the_tests_0123456789";
pub(crate) const MASTER_KEY: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const LOG_LINES_SHOWN: usize = 80;
const STOP_WAIT: Duration = Duration::from_secs(30);

/// The program under test: the one built with the tests, or another build of it, for a measurement.
fn program() -> String {
    std::env::var("POSTRIDER_TEST_PROGRAM").unwrap_or_else(|_| env!("CARGO_BIN_EXE_postrider").to_owned())
}

/// What to start and with which settings. Nothing of the tester's own environment gets through.
#[derive(Clone)]
pub(crate) struct Launch {
    role: &'static str,
    settings: BTreeMap<String, String>,
    /// A program that is given ours to run.
    wrapper: Vec<String>,
}

impl Launch {
    pub(crate) fn new(role: &'static str) -> Self {
        let launch = Self {
            role,
            settings: BTreeMap::new(),
            wrapper: Vec::new(),
        };
        launch.set("POSTRIDER_LOG_FORMAT", "json")
    }

    /// Under another program, which must become ours: the process that is signalled and waited for is its own.
    pub(crate) fn under(mut self, wrapper: &[&str]) -> Self {
        self.wrapper = wrapper.iter().map(ToString::to_string).collect();
        self
    }

    pub(crate) fn set(mut self, name: &str, value: impl ToString) -> Self {
        self.settings.insert(name.to_owned(), value.to_string());
        self
    }

    pub(crate) fn unset(mut self, name: &str) -> Self {
        self.settings.remove(name);
        self
    }

    /// For a start that ends by itself, or is ended.
    pub(crate) fn child(&self) -> Child {
        self.command().spawn().expect("the program starts")
    }

    fn command(&self) -> Command {
        let mut words = self.wrapper.clone();
        words.push(program());
        words.extend(self.role.split(' ').map(ToOwned::to_owned));
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).env_clear();
        for inherited in ["PATH", "HOME", "TMPDIR"] {
            command.envs(std::env::var_os(inherited).map(|value| (inherited, value)));
        }
        command
            .envs(&self.settings)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// For a start that is expected to end by itself.
    pub(crate) fn output(&self) -> Output {
        self.command().output().expect("the program starts")
    }

    /// The same, in this folder.
    pub(crate) fn output_in(&self, folder: &Path) -> Output {
        self.command()
            .current_dir(folder)
            .output()
            .expect("the program starts")
    }

    pub(crate) async fn start(self) -> Postrider {
        let started = self.spawn().await.expect("the program told no address");
        let api = started.api();
        until("the program is ready", || async {
            api.is_ready().await.then_some(())
        })
        .await;
        started
    }

    /// Without waiting until it is ready; none when it ended instead of telling its address.
    pub(crate) async fn spawn(self) -> Option<Postrider> {
        let mut child = self.command().spawn().expect("the program starts");
        let stderr = child.stderr.take().expect("piped");
        let stdout = child.stdout.take().expect("piped");
        let log = Arc::new(Mutex::new(Vec::new()));
        let printed = Arc::new(Mutex::new(String::new()));
        let (found, address) = mpsc::channel();
        let kept = log.clone();
        let service = if self.role == "dispatcher" {
            "health"
        } else {
            "api"
        };
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if let Some(address) = announced(&line, service) {
                    let _ = found.send(address);
                }
                kept.lock().expect("not poisoned").push(line);
            }
        });
        let kept = printed.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let mut text = kept.lock().expect("not poisoned");
                text.push_str(&line);
                text.push('\n');
            }
        });
        let mut started = Postrider {
            launch: self,
            child,
            address: SocketAddr::from(([0, 0, 0, 0], 0)),
            log,
            printed,
            _data: None,
        };
        let told = tokio::task::spawn_blocking(move || address.recv_timeout(PATIENCE)).await;
        started.address = told.ok()?.ok()?;
        Some(started)
    }
}

/// The line by which a program that was given port 0 tells what it got.
fn announced(line: &str, service: &str) -> Option<SocketAddr> {
    let line: serde_json::Value = serde_json::from_str(line).ok()?;
    let ours = line["message"] == "listening" && line["service"] == service;
    ours.then(|| line["address"].as_str()?.parse().ok()).flatten()
}

pub(crate) struct Postrider {
    launch: Launch,
    child: Child,
    address: SocketAddr,
    log: Arc<Mutex<Vec<String>>>,
    printed: Arc<Mutex<String>>,
    _data: Option<DataFolder>,
}

impl Postrider {
    /// Everything in one process on this database.
    pub(crate) async fn start(database: &Database) -> Self {
        Self::start_with(database, &[]).await
    }

    pub(crate) async fn start_with(database: &Database, settings: &[(&str, &str)]) -> Self {
        let data = DataFolder::new();
        let mut launch = Self::on_database("up", database).set("POSTRIDER_DATA_DIR", data.path().display());
        for (name, value) in settings {
            launch = launch.set(name, value);
        }
        let mut started = launch.start().await;
        started._data = Some(data);
        started
    }

    /// One role on this database, with the settings that every process of one installation shares.
    pub(crate) fn on_database(role: &'static str, database: &Database) -> Launch {
        let address = if role == "dispatcher" {
            "POSTRIDER_METRICS_LISTEN"
        } else {
            "POSTRIDER_LISTEN"
        };
        Launch::new(role)
            .set("POSTRIDER_DATABASE_URL", database.url())
            .set(address, "127.0.0.1:0")
            .set("POSTRIDER_MASTER_KEY", MASTER_KEY)
            .set("POSTRIDER_ADMIN_API_KEY", ADMIN_API_KEY)
            .set("POSTRIDER_ADMIN_PASSWORD", ADMIN_PASSWORD)
            .set("POSTRIDER_ALLOW_NETWORKS", "127.0.0.0/8")
            .set("POSTRIDER_ALLOW_HTTP", "true")
            .set("POSTRIDER_RETRY_JITTER", "0")
            // Most tests have nobody who would notice.
            .set("POSTRIDER_DRAIN_DELAY", "0s")
    }

    /// On the embedded database, as `make run` does.
    pub(crate) fn embedded(data: &DataFolder) -> Launch {
        Launch::new("up")
            .set("POSTRIDER_LISTEN", "127.0.0.1:0")
            .set("POSTRIDER_DATA_DIR", data.path().display())
    }

    pub(crate) fn api(&self) -> Api {
        self.api_with_key(ADMIN_API_KEY)
    }

    pub(crate) fn api_with_key(&self, key: &str) -> Api {
        Api::new(format!("http://{}", self.address), key)
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// A URL of its metrics listener, where one is set beside the API's.
    pub(crate) async fn health_url(&self, path: &str) -> String {
        let address = until("the address of the metrics listener is told", || async {
            self.log_lines().iter().find_map(|line| announced(line, "health"))
        })
        .await;
        format!("http://{address}{path}")
    }

    /// What it has told the person at the terminal.
    pub(crate) fn printed(&self) -> String {
        self.printed.lock().expect("not poisoned").clone()
    }

    pub(crate) fn log_lines(&self) -> Vec<String> {
        self.log.lock().expect("not poisoned").clone()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("our own child").is_none()
    }

    /// SIGSTOP freezes it, SIGCONT lets it go on.
    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("the process is there");
    }

    /// No time to clean up: as a crash of the machine would have it.
    pub(crate) fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.child.wait().expect("ended");
    }

    /// SIGTERM, and how it ended.
    pub(crate) async fn stop(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.ended().await
    }

    pub(crate) async fn ended(&mut self) -> ExitStatus {
        let ended = async {
            loop {
                if let Some(status) = self.child.try_wait().expect("our own child") {
                    return status;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(STOP_WAIT, ended)
            .await
            .expect("it stops in time")
    }

    /// The same again, after it has ended.
    pub(crate) async fn restart(&mut self) {
        let data = self._data.take();
        *self = self.launch.clone().start().await;
        self._data = data;
    }

    /// The same at the address that it had, for clients that wait for it there.
    pub(crate) async fn restart_in_place(&mut self) {
        self.launch = self.launch.clone().set("POSTRIDER_LISTEN", self.address);
        self.restart().await;
    }
}

impl Drop for Postrider {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = self.log_lines();
            for line in log.iter().skip(log.len().saturating_sub(LOG_LINES_SHOWN)) {
                eprintln!("{} | {line}", self.launch.role);
            }
        }
    }
}

/// A data directory. An embedded server that a failed test left running in it is stopped with it.
pub(crate) struct DataFolder(TempDir);

impl DataFolder {
    pub(crate) fn new() -> Self {
        let folder = tempfile::Builder::new()
            .prefix("postrider-data-")
            // Open to the account that runs the server when the tests run as root.
            .permissions(std::fs::Permissions::from_mode(0o755))
            .tempdir()
            .expect("a folder");
        Self(folder)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn server_pid(&self) -> Option<Pid> {
        let file: PathBuf = self.path().join("pg/data/postmaster.pid");
        let text = std::fs::read_to_string(file).ok()?;
        Pid::from_raw(text.lines().next()?.trim().parse().ok()?)
    }
}

impl Drop for DataFolder {
    fn drop(&mut self) {
        if let Some(pid) = self.server_pid() {
            let _ = kill_process(pid, Signal::QUIT);
        }
    }
}
