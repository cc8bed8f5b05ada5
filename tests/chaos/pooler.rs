//! PgBouncer in transaction mode, with a proxy between it and the server: an API behind it meets the errors that a pooler
//! makes up for a server that it lost.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Command, Stdio},
};

use postrider_embedded::Account;
use tempfile::TempDir;

use crate::{
    proxy::Proxy,
    support::{Database, until},
};

const PORT: u16 = 6432;
const SERVERS: usize = 20;
/// A server that takes longer is given up, whatever it did.
const QUERY_TIMEOUT_S: u32 = 4;

pub(crate) struct Pooler {
    folder: TempDir,
    process: Child,
}

fn program() -> &'static str {
    match Path::new("/usr/sbin/pgbouncer").exists() {
        true => "/usr/sbin/pgbouncer",
        false => "pgbouncer",
    }
}

impl Pooler {
    /// None where it is not installed.
    pub(crate) async fn start(server: &Proxy) -> Option<Self> {
        let version = Command::new(program())
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        if !version.is_ok_and(|status| status.success()) {
            return None;
        }
        let folder = TempDir::new().expect("a folder");
        let path = folder.path();
        // It runs as the account that runs the server: as root it refuses to.
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).expect("open to it");
        fs::write(path.join("users.txt"), "\"postrider\" \"\"\n").expect("written");
        let settings = format!(
            "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr =\nlisten_port = {PORT}\n\
             unix_socket_dir = {}\nauth_type = trust\nauth_file = {}\npool_mode = transaction\n\
             default_pool_size = {SERVERS}\nmax_client_conn = 200\nlogfile = {}\n\
             ignore_startup_parameters = extra_float_digits\nquery_timeout = {QUERY_TIMEOUT_S}\n\
             query_wait_timeout = 8\nserver_login_retry = 1\nserver_connect_timeout = 3\n",
            server.address().port(),
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
        let socket = path.join(format!(".s.PGSQL.{PORT}"));
        until("pgbouncer listens", || async { socket.exists().then_some(()) }).await;
        Some(Self { folder, process })
    }

    pub(crate) fn url(&self, database: &Database) -> String {
        let folder = self.folder.path().display();
        let name = database.name();
        format!("postgresql://postrider@localhost:{PORT}/{name}?host={folder}&sslmode=disable")
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}
