//! What depends on the machine: how many sockets a dispatcher may open, and its name.

use postrider_dispatcher::{Settings, diagnosis::Finding};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Files other than sends: database connections, listeners, the API's clients, the log.
const FILES_RESERVED: u64 = 256;

/// Whether the limit of open files allows the attempts that may be in flight.
pub(crate) fn examine_files(max_in_flight: usize) -> Finding {
    const CHECK: &str = "machine.files";
    let Some(files) = getrlimit(Resource::Nofile).maximum else {
        return Finding::ok(CHECK, "unlimited");
    };
    let needed = max_in_flight as u64 * 5 / 4 + FILES_RESERVED;
    match files >= needed {
        true => Finding::ok(CHECK, format!("{files} files may be open")),
        false => Finding::warning(
            CHECK,
            format!(
                "{files} files may be open, {needed} are needed for POSTRIDER_MAX_IN_FLIGHT = {max_in_flight}"
            ),
            "Raise the limit of open files (LimitNOFILE, ulimit -n), or lower POSTRIDER_MAX_IN_FLIGHT.",
        ),
    }
}

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
