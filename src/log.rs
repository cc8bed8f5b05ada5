//! Where the log goes: standard error, as lines for people or as JSON for machines.

use tracing_subscriber::{EnvFilter, fmt, prelude::*};

use crate::settings::Log;

pub(crate) fn start(log: &Log) {
    let filter = EnvFilter::new(&log.filter);
    let lines = fmt::layer().with_writer(std::io::stderr);
    let registry = tracing_subscriber::registry().with(filter);
    if log.json {
        registry.with(lines.json().flatten_event(true)).init();
    } else {
        let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr());
        registry.with(lines.with_ansi(ansi)).init();
    }
}
