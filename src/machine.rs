//! What this machine allows a dispatcher: how many sockets, and under which name it is known.

use postrider_dispatcher::Settings;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Files that are not sends: database connections, listeners, the API's clients, the log.
const FILES_KEPT_BACK: u64 = 256;

/// Each attempt on the wire needs a socket. Past the limit every send would fail, so fewer are begun at a time.
pub(crate) fn fit(settings: &mut Settings) {
    settings.name = format!(
        "{}:{}",
        rustix::system::uname().nodename().to_string_lossy(),
        std::process::id()
    );
    let limit = getrlimit(Resource::Nofile);
    // The soft limit is low by tradition; up to the hard one a process may raise it by itself.
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    let files = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    let Some(files) = files else { return };
    // A quarter more sockets than attempts: connections kept open, and addresses of a host tried beside each other.
    let sockets = files.saturating_sub(FILES_KEPT_BACK);
    let sends = usize::try_from((sockets / 5 * 4).max(1)).unwrap_or(usize::MAX);
    if sends < settings.max_in_flight {
        tracing::warn!(
            files,
            "at most {sends} attempts at a time: the limit of open files allows no more"
        );
        settings.max_in_flight = sends;
    }
}
