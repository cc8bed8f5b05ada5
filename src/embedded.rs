//! A private Postgres for `up`, so that nothing has to be set up first.
//! Invariant: nothing outside its own directory is touched: no system service, no TCP port, no other cluster.
//!
//! Next: `programs.rs` finds the server, `account.rs` says who runs it, `home.rs` where, `cluster.rs` makes, starts and stops it,
//! `process.rs` tells our server from others, `watch.rs` starts it again when it has ended.

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
        "the data in {directory} was made by PostgreSQL {found}, and no server of that version is installed: \
         install it, or move the directory away to start afresh"
    )]
    OtherVersion { directory: PathBuf, found: String },
    #[error("PostgreSQL does not run as root, and no other account to run it as was found in /etc/passwd")]
    NoAccount,
    #[error("`{program}` failed: {told}")]
    Program { program: String, told: String },
    #[error("{path}: {error}")]
    File { path: PathBuf, error: io::Error },
    #[error("the directory {0} is there already and belongs to somebody else")]
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
    #[error("the embedded database server ends again and again: its log is postgres.log beside its data")]
    Ended,
    #[error("another process runs the database in {0}: stop it first")]
    InUse(PathBuf),
    #[error("the embedded database did not answer: {0}")]
    Database(#[from] sqlx::Error),
}

impl EmbeddedError {
    fn at(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |error| Self::File { path, error }
    }
}
