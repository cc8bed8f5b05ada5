//! CPU, memory, files and threads of this process, under the names that every Prometheus client uses. Read from `/proc` on
//! scrape; on systems without it there are none.

use std::{
    fmt::Write,
    fs,
    sync::OnceLock,
    time::{SystemTime, UNIX_EPOCH},
};

use rustix::process::{Resource, getrlimit};

/// The kernel's clock ticks per second; fixed at 100 for programs on Linux.
const TICKS_PER_SECOND: f64 = 100.0;
const BYTES_PER_KIB: f64 = 1024.0;

/// Seconds since 1970.
static STARTED_AT: OnceLock<f64> = OnceLock::new();

/// Notes the start time. Call early.
#[expect(
    clippy::disallowed_methods,
    reason = "a metric about this machine, compared with its own clock"
)]
pub(crate) fn start() {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let _ = STARTED_AT.set(now.as_secs_f64());
}

/// In the Prometheus text format. The exporter's counters are whole numbers, and CPU seconds are not.
pub(crate) fn text() -> String {
    let (Ok(status), Ok(stat)) = (
        fs::read_to_string("/proc/self/status"),
        fs::read_to_string("/proc/self/stat"),
    ) else {
        return String::new();
    };
    let mut text = String::new();
    for (name, kind, help, value) in [
        (
            "cpu_seconds_total",
            "counter",
            "User and system CPU time of this process",
            cpu_seconds(&stat),
        ),
        (
            "resident_memory_bytes",
            "gauge",
            "Memory of this process that is in RAM",
            kibibytes(&status, "VmRSS:"),
        ),
        (
            "virtual_memory_bytes",
            "gauge",
            "Address space of this process",
            kibibytes(&status, "VmSize:"),
        ),
        (
            "threads",
            "gauge",
            "Threads of this process",
            field(&status, "Threads:"),
        ),
        (
            "open_fds",
            "gauge",
            "Open files and sockets of this process",
            open_files(),
        ),
        (
            "max_fds",
            "gauge",
            "Limit of open files and sockets of this process",
            files_max(),
        ),
        (
            "start_time_seconds",
            "gauge",
            "When this process started, in seconds since 1970",
            STARTED_AT.get().copied(),
        ),
    ] {
        if let Some(value) = value {
            let _ = writeln!(
                text,
                "# HELP process_{name} {help}\n# TYPE process_{name} {kind}\nprocess_{name} {value}"
            );
        }
    }
    text
}

/// The 14th and 15th field; the second is the name, which may contain anything.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let (_, rest) = stat.rsplit_once(") ")?;
    let ticks = rest.split(' ').skip(11).take(2);
    let ticks: Option<Vec<f64>> = ticks.map(|field| field.parse().ok()).collect();
    ticks.map(|ticks| ticks.iter().sum::<f64>() / TICKS_PER_SECOND)
}

fn field(status: &str, name: &str) -> Option<f64> {
    let rest = status.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

fn kibibytes(status: &str, name: &str) -> Option<f64> {
    field(status, name).map(|kibibytes| kibibytes * BYTES_PER_KIB)
}

/// Without the one that counts them.
fn open_files() -> Option<f64> {
    let entries = fs::read_dir("/proc/self/fd").ok()?;
    Some(entries.count().saturating_sub(1) as f64)
}

/// None if there is no limit.
fn files_max() -> Option<f64> {
    getrlimit(Resource::Nofile).current.map(|files| files as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_whatever_the_program_is_called() {
        let stat = "7 (a) b) c) S 1 7 7 0 -1 4194560 5 0 0 0 150 50 0 0 20 0 9 0 100";
        assert_eq!(cpu_seconds(stat), Some(2.0));
        let status = "Name:\tpostrider\nVmSize:\t  2048 kB\nVmRSS:\t 1024 kB\nThreads:\t9\n";
        assert_eq!(kibibytes(status, "VmRSS:"), Some(1_048_576.0));
        assert_eq!(field(status, "Threads:"), Some(9.0));
        assert_eq!(field(status, "Nothing:"), None);
    }
}
