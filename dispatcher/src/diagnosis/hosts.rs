//! The hosts of a database URL that names several.

use super::Finding;
use crate::connector::HostState;

/// Names of hosts stay out of a support bundle.
pub(super) fn finding(hosts: &[HostState]) -> Finding {
    const CHECK: &str = "database.hosts";
    let found: Vec<&str> = hosts.iter().map(|host| host.found.as_str()).collect();
    let found = found.join("; ");
    let responding = hosts.iter().filter(|host| host.responds).count();
    let primaries = hosts
        .iter()
        .filter(|host| host.accepts_writes && !host.is_one_of_several_ways)
        .count();
    let finding = if primaries > 1 {
        let advice =
            "Two servers accept writes: find out which is the old primary and stop it. docs/failover.md.";
        Finding::error(CHECK, found, advice)
    } else if responding < hosts.len() {
        let advice = "Bring the host back, or remove it from POSTRIDER_DATABASE_URL: docs/failover.md.";
        Finding::warning(CHECK, found, advice)
    } else {
        Finding::ok(CHECK, found)
    };
    finding.in_bundles(format!(
        "{responding} of {} hosts respond, {primaries} accept writes",
        hosts.len()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnosis::Verdict;

    fn host(responds: bool, accepts_writes: bool) -> HostState {
        HostState {
            found: "a:5432".to_owned(),
            responds,
            accepts_writes,
            is_one_of_several_ways: false,
        }
    }

    #[test]
    fn two_primaries_are_an_error_and_a_missing_host_is_a_warning() {
        for (hosts, expected) in [
            ([host(true, true), host(true, false)], Verdict::Ok),
            ([host(true, true), host(false, false)], Verdict::Warning),
            ([host(true, true), host(true, true)], Verdict::Error),
        ] {
            let finding = finding(&hosts);
            assert_eq!(finding.verdict, expected, "{}", finding.found);
            assert!(!finding.for_bundle().found.contains("a:5432"));
        }
    }
}
