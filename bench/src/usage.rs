//! CPU time and memory of a process, from the kernel's accounting.

use std::{fs, time::Duration};

/// The kernel's clock ticks per second; fixed at 100 for programs on Linux.
const TICKS_PER_SECOND: f64 = 100.0;

/// CPU time of a process and of its children that have exited.
pub(super) fn cpu(pid: u32) -> Duration {
    let ticks: u64 = stat_fields(pid).map_or(0, |fields| {
        // utime, stime, cutime and cstime are the 14th to 17th fields; two are before the list begins.
        fields
            .get(11..15)
            .unwrap_or_default()
            .iter()
            .filter_map(|field| field.parse::<u64>().ok())
            .sum()
    });
    Duration::from_secs_f64(ticks as f64 / TICKS_PER_SECOND)
}

/// Of a process and its running children: a Postgres server consists of many.
pub(super) fn cpu_of_tree(pid: u32) -> Duration {
    cpu(pid) + children(pid).into_iter().map(cpu).sum::<Duration>()
}

fn children(pid: u32) -> Vec<u32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|child| {
            stat_fields(*child)
                .is_some_and(|fields| fields.get(1).is_some_and(|parent| *parent == pid.to_string()))
        })
        .collect()
}

/// The fields after the name, which may itself contain spaces.
fn stat_fields(pid: u32) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    Some(rest.split(' ').map(str::to_owned).collect())
}

/// Peak memory of the process, in megabytes.
pub(super) fn peak_memory_mb(pid: u32) -> f64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes: f64 = line
        .and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse().ok())
        .unwrap_or(0.0);
    kilobytes / 1024.0
}
