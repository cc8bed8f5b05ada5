//! The log: to standard error, as text for people or as JSON for programs.

use tracing_subscriber::{EnvFilter, fmt, prelude::*};

use crate::settings::Values;

/// Notices of the database. A background worker that is stopped during a commit causes a harmless one about a missing
/// transaction.
const NOTICES: &str = "sqlx::postgres::notice";

pub(crate) fn start(settings: &Values) {
    let filter = EnvFilter::new(filter_of(&settings.log_filter));
    let lines = fmt::layer().with_writer(std::io::stderr);
    let registry = tracing_subscriber::registry().with(filter);
    if settings.log_as_json {
        registry.with(lines.json().flatten_event(true)).init();
    } else {
        let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr());
        registry.with(lines.with_ansi(ansi)).init();
    }
}

/// Notices are logged only if the filter mentions them.
fn filter_of(filter: &str) -> String {
    match filter.contains("sqlx") {
        true => filter.to_owned(),
        false => format!("{filter},{NOTICES}=error"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_of_the_database_are_logged_only_on_request() {
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
