//! Where the log goes: standard error, as lines for people or as JSON for machines.

use tracing_subscriber::{EnvFilter, fmt, prelude::*};

use crate::settings::Log;

/// What the database remarks on. A background worker that is stopped in the middle of a commit has it remark that there
/// is no transaction, which is no fault of anybody's.
const REMARKS: &str = "sqlx::postgres::notice";

pub(crate) fn start(log: &Log) {
    let filter = EnvFilter::new(filter_of(&log.filter));
    let lines = fmt::layer().with_writer(std::io::stderr);
    let registry = tracing_subscriber::registry().with(filter);
    if log.json {
        registry.with(lines.json().flatten_event(true)).init();
    } else {
        let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr());
        registry.with(lines.with_ansi(ansi)).init();
    }
}

/// Remarks are logged for those who ask for them.
fn filter_of(asked: &str) -> String {
    match asked.contains("sqlx") {
        true => asked.to_owned(),
        false => format!("{asked},{REMARKS}=error"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remarks_of_the_database_are_logged_only_when_asked_for() {
        for (asked, kept) in [
            ("info", "info,sqlx::postgres::notice=error"),
            ("debug,sqlx=info", "debug,sqlx=info"),
            ("sqlx::postgres::notice=info", "sqlx::postgres::notice=info"),
        ] {
            assert_eq!(filter_of(asked), kept);
            assert!(EnvFilter::try_new(filter_of(asked)).is_ok(), "{asked}");
        }
    }
}
