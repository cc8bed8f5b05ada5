//! A private Postgres for `up`, the tests and the benchmark, so that nothing has to be set up first.
//! Invariant: nothing outside its own directory is touched: no system service, no TCP port, no other cluster.
//!
//! `programs.rs` finds the server, `account.rs` decides which account runs it and `home.rs` where; `cluster.rs` creates, starts
//! and stops it, `process.rs` recognises our own server, `watch.rs` restarts it when it exits.

mod account;
mod cluster;
mod home;
mod process;
mod programs;
mod watch;

use std::{io, path::PathBuf};

pub use account::Account;
pub use cluster::Cluster;
pub use home::Home;
pub use programs::Programs;
pub use watch::keep_running;

#[derive(Debug, thiserror::Error)]
pub enum EmbeddedError {
    #[error(
        "no PostgreSQL server of version 14 or newer was found on this machine. `make run` installs one; \
         or set POSTRIDER_DATABASE_URL to use a database of your own"
    )]
    NoServer,
    #[error(
        "the data in {directory} belongs to PostgreSQL {found}, but no server of that version is installed: \
         install it, or move the directory away to start with an empty one"
    )]
    OtherVersion { directory: PathBuf, found: String },
    #[error("PostgreSQL does not run as root, and /etc/passwd has no other account to run it")]
    NoAccount,
    #[error("`{program}` failed: {output}")]
    Program { program: String, output: String },
    #[error("{path}: {error}")]
    File { path: PathBuf, error: io::Error },
    #[error("the directory {0} already exists and belongs to someone else")]
    Foreign(PathBuf),
    #[error(
        "{data_dir} points to the database in {cluster}, which belongs to {owner}: a copy of a data directory has no \
         database of its own. Delete pg-home in the copy to start it with an empty one. If {data_dir} has replaced {owner}, \
         delete {note}"
    )]
    OfAnother {
        data_dir: PathBuf,
        cluster: PathBuf,
        owner: PathBuf,
        note: PathBuf,
    },
    #[error("the embedded database server keeps exiting: see postgres.log next to its data")]
    KeepsExiting,
    #[error("another process is using the database in {0}: stop it first")]
    InUse(PathBuf),
    #[error("the embedded database failed: {0}")]
    Database(#[from] sqlx::Error),
}

impl EmbeddedError {
    fn at(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |error| Self::File { path, error }
    }
}
