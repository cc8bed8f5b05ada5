//! What depends on the machine: how many sockets a dispatcher may open, and its name.

use postrider_dispatcher::Settings;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Files other than sends: database connections, listeners, the API's clients, the log.
const FILES_RESERVED: u64 = 256;

/// Each attempt in flight needs a socket. Beyond the limit every send would fail, so fewer run at a time.
pub(crate) fn fit(settings: &mut Settings) {
    settings.name = format!(
        "{}:{}",
        rustix::system::uname().nodename().to_string_lossy(),
        std::process::id()
    );
    let limit = getrlimit(Resource::Nofile);
    // The soft limit is low by tradition; a process may raise it up to the hard limit.
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    let files = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    let Some(files) = files else { return };
    // A quarter more sockets than attempts: idle connections, and several addresses of a host tried in parallel.
    let sockets = files.saturating_sub(FILES_RESERVED);
    let sends = usize::try_from((sockets / 5 * 4).max(1)).unwrap_or(usize::MAX);
    if sends < settings.max_in_flight {
        tracing::warn!(
            files,
            "POSTRIDER_MAX_IN_FLIGHT reduced to {sends} because of the open file limit"
        );
        settings.max_in_flight = sends;
    }
}
