//! One private cluster: created once, started, stopped, and recovered after a `kill -9`.
//! Invariant: a lock in the cluster's folder gives it to one process at a time, so that a server found running in it is left
//! over from an earlier run. No process is signalled before it is known to be that server.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::Write,
    os::unix::{ffi::OsStrExt, fs::OpenOptionsExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
};

use sqlx::{AssertSqlSafe, Connection, PgConnection, postgres::PgConnectOptions};

use super::{EmbeddedError, Home, Programs, process::works_in};

/// Only part of the socket's name: nothing listens on TCP.
const PORT: u16 = 5432;
const SUPERUSER: &str = "postgres";
/// The role that owns our database. Not a superuser.
const OWNER: &str = "postrider";
const START_STOP_SECONDS_MAX: u32 = 120;

/// Durability settings are Postgres's own.
const CONFIGURATION: &str = "\
listen_addresses = ''
unix_socket_permissions = 0700
max_connections = 100
shared_buffers = '256MB'
max_wal_size = '2GB'
log_line_prefix = '%m [%p] '
";

/// A running server. Dropping this does not stop it.
#[derive(Debug, Clone)]
pub struct Cluster {
    home: Home,
    programs: Programs,
    /// Held until the process exits.
    _lock: Arc<File>,
}

impl Cluster {
    /// Creates the cluster if needed, and starts it. `extra` lines are added to its configuration.
    pub fn start(home: Home, extra: &str) -> Result<Self, EmbeddedError> {
        let programs = Programs::for_data(&home.data())?;
        let lock = lock(&home)?.into();
        let cluster = Self {
            home,
            programs,
            _lock: lock,
        };
        if cluster.home.data().join("PG_VERSION").is_file() {
            cluster.stop_leftover()?;
        } else {
            cluster.initialise()?;
        }
        cluster.configure(extra)?;
        cluster.launch().map(|()| cluster)
    }

    /// With the existing configuration, after the server exited.
    pub(super) fn restart(&self) -> Result<(), EmbeddedError> {
        self.stop_leftover()?;
        self.launch()
    }

    fn launch(&self) -> Result<(), EmbeddedError> {
        let wait = START_STOP_SECONDS_MAX.to_string();
        let started = self.pg_ctl(&["start", "-w", "-s", "-t", &wait, "-l"], Some(&self.home.log()));
        if let Err(EmbeddedError::Program { program, output }) = started {
            let output = format!("{output}; see {}", self.home.log().display());
            return Err(EmbeddedError::Program { program, output });
        }
        started
    }

    /// Created under another name and renamed when complete: a crash leaves no partial cluster.
    fn initialise(&self) -> Result<(), EmbeddedError> {
        let new = self.home.folder.join("data.new");
        if new.exists() {
            fs::remove_dir_all(&new).map_err(EmbeddedError::at(&new))?;
        }
        let mut initdb = self.command_on("initdb", &new);
        initdb.args(["-U", SUPERUSER, "--encoding=UTF8", "--no-locale"]);
        initdb.args(["--auth-local=trust", "--auth-host=reject"]);
        run(initdb, "initdb")?;
        let main = new.join("postgresql.conf");
        fs::OpenOptions::new()
            .append(true)
            .open(&main)
            .and_then(|mut file| file.write_all(b"\ninclude 'postrider.conf'\n"))
            .map_err(EmbeddedError::at(&main))?;
        fs::rename(&new, self.home.data()).map_err(EmbeddedError::at(self.home.data()))
    }

    /// Written at every start: the path of the socket depends on the current path of the directory.
    fn configure(&self, extra: &str) -> Result<(), EmbeddedError> {
        let path = self.home.data().join("postrider.conf");
        let sockets = self.home.sockets.to_string_lossy().replace('\'', "''");
        let text = format!("{CONFIGURATION}port = {PORT}\nunix_socket_directories = '{sockets}'\n{extra}");
        // Readable by the server's account whatever our umask says. The folder itself is private.
        let readable = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        fs::write(&path, text)
            .and_then(|()| fs::set_permissions(&path, readable))
            .map_err(EmbeddedError::at(path))
    }

    /// After a `kill -9` of our process the server keeps running. It is stopped, so that it starts with the new configuration.
    fn stop_leftover(&self) -> Result<(), EmbeddedError> {
        if self.is_running() {
            tracing::info!("stopping the database server left over from a previous run");
            return self.stop();
        }
        // The pid may belong to another process by now, or to a zombie, and Postgres would refuse to start. In a copy of a
        // folder it is the pid of the original.
        let socket_lock = self.home.sockets.join(format!(".s.PGSQL.{PORT}.lock"));
        for left in [self.home.data().join("postmaster.pid"), socket_lock] {
            match fs::remove_file(&left) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(EmbeddedError::at(left)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether the process named in the cluster's pid file is its server.
    pub(super) fn is_running(&self) -> bool {
        self.pid()
            .is_some_and(|pid| works_in(self.home.account, pid, &self.home.data()))
    }

    /// Stops the server: sessions are closed, committed data is on disk. Succeeds if it is not running.
    pub fn stop(&self) -> Result<(), EmbeddedError> {
        if !self.is_running() {
            return Ok(());
        }
        let wait = START_STOP_SECONDS_MAX.to_string();
        self.pg_ctl(&["stop", "-w", "-s", "-m", "fast", "-t", &wait], None)
    }

    fn pg_ctl(&self, arguments: &[&str], path: Option<&Path>) -> Result<(), EmbeddedError> {
        let mut command = self.command("pg_ctl");
        command.args(arguments).args(path);
        run(command, "pg_ctl")
    }

    /// A server program on this cluster, as the account that runs it.
    pub fn command(&self, program: &str) -> Command {
        self.command_on(program, &self.home.data())
    }

    fn command_on(&self, program: &str, data: &Path) -> Command {
        let program = self.programs.path(program);
        let mut command = self.home.account.command(&program, &self.home.folder);
        command.arg("-D").arg(data);
        command
    }

    /// The server's main process, while it runs.
    pub fn pid(&self) -> Option<u32> {
        let file = fs::read_to_string(self.home.data().join("postmaster.pid")).ok()?;
        file.lines().next()?.trim().parse().ok()
    }

    pub fn home(&self) -> &Home {
        &self.home
    }

    /// Connects to our database as the role that owns it.
    pub fn options(&self) -> PgConnectOptions {
        PgConnectOptions::new_without_pgpass()
            .socket(&self.home.sockets)
            .port(PORT)
            .username(OWNER)
            .database(OWNER)
    }

    pub fn superuser_options(&self) -> PgConnectOptions {
        self.options().username(SUPERUSER).database("postgres")
    }

    /// How to call `psql`: on some systems it is not in PATH.
    #[expect(clippy::disallowed_methods, reason = "where the programs of Postgres are")]
    pub fn psql(&self) -> PathBuf {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let in_path = std::env::split_paths(&path).any(|folder| folder.join("psql").is_file());
        if in_path {
            PathBuf::from("psql")
        } else {
            self.programs.path("psql")
        }
    }

    /// The URL for other programs, including `psql`.
    pub fn url(&self) -> String {
        let mut folder = String::new();
        for byte in self.home.sockets.as_os_str().as_bytes() {
            match byte {
                b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'/' | b'-' | b'_' | b'.' | b'~' => {
                    folder.push(char::from(*byte));
                }
                other => folder.push_str(&format!("%{other:02X}")),
            }
        }
        format!("postgresql://{OWNER}@localhost/{OWNER}?host={folder}")
    }

    /// Creates the owner and its database if needed. Only this requires the superuser.
    pub async fn make_database(&self) -> Result<(), EmbeddedError> {
        let mut connection = PgConnection::connect_with(&self.superuser_options()).await?;
        for (exists, create) in [
            (
                "select exists (select from pg_roles where rolname = $1)",
                format!("create role {OWNER} login"),
            ),
            (
                "select exists (select from pg_database where datname = $1)",
                format!("create database {OWNER} owner {OWNER}"),
            ),
        ] {
            let exists = sqlx::query_scalar(exists).bind(OWNER);
            if !exists.fetch_one(&mut connection).await? {
                let create = sqlx::raw_sql(AssertSqlSafe(create));
                create.execute(&mut connection).await?;
            }
        }
        connection.close().await?;
        Ok(())
    }
}

fn run(mut command: Command, program: &str) -> Result<(), EmbeddedError> {
    // Output goes to a file instead of a pipe: the server would inherit the pipe and keep it open.
    let failed = |output: String| EmbeddedError::Program {
        program: program.to_owned(),
        output,
    };
    let mut file = tempfile::tempfile().map_err(|e| failed(e.to_string()))?;
    let copy = |file: &fs::File| file.try_clone().map_err(|e| failed(e.to_string()));
    command
        .stdout(Stdio::from(copy(&file)?))
        .stderr(Stdio::from(copy(&file)?));
    let status = command.status().map_err(|e| failed(e.to_string()))?;
    if status.success() {
        return Ok(());
    }
    let mut output = String::new();
    use std::io::{Read, Seek};
    let read = file.rewind().and_then(|()| file.read_to_string(&mut output));
    Err(failed(match read {
        Ok(_) => output.trim().replace('\n', "; "),
        Err(error) => error.to_string(),
    }))
}

/// In the cluster's folder, not in the data directory: two data directories may point to one cluster.
fn lock(home: &Home) -> Result<File, EmbeddedError> {
    let path = home.folder.join("lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&path)
        .map_err(EmbeddedError::at(&path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(EmbeddedError::InUse(home.folder.clone())),
        Err(TryLockError::Error(error)) => Err(EmbeddedError::at(path)(error)),
    }
}
