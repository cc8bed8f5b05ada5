//! The log: to standard error, as text for people or as JSON for programs.

use tracing::level_filters::LevelFilter;
use tracing_subscriber::{EnvFilter, Layer, fmt, prelude::*};

use crate::settings::Values;

/// Libraries that log what Postrider handles and logs itself, with the level they are limited to unless the filter
/// mentions them: every failed poll of a job queue, every connection that a pool lost, and notices of the database, such
/// as the harmless one about a missing transaction when a background worker is stopped during a commit.
const QUIET: [(&str, &str); 3] = [
    ("apalis", "off"),
    ("sqlx_core::pool", "error"),
    ("sqlx::postgres::notice", "error"),
];

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

/// The last line of a program that failed. Not subject to the filter, and possible before the log is started.
pub(crate) fn fatal(as_json: bool, message: &str) {
    if !as_json {
        return eprintln!("postrider: {message}");
    }
    let lines = fmt::layer()
        .with_writer(std::io::stderr)
        .json()
        .flatten_event(true);
    let registry = tracing_subscriber::registry().with(lines.with_filter(LevelFilter::ERROR));
    tracing::subscriber::with_default(registry, || tracing::error!("{message}"));
}

fn filter_of(filter: &str) -> String {
    let mut all = filter.to_owned();
    for (target, level) in QUIET {
        if filter.trim() != "off" && !mentions(filter, target) {
            all.push_str(&format!(",{target}={level}"));
        }
    }
    all
}

/// Whether a directive of the filter is about this target: it is about all whose names begin with it.
fn mentions(filter: &str, target: &str) -> bool {
    let directives = filter.split(',').filter_map(|one| one.split(['=', '[']).next());
    let named = directives.map(str::trim).filter(|name| !name.is_empty());
    named
        .filter(|name| name.parse::<LevelFilter>().is_err())
        .any(|name| target.starts_with(name) || name.starts_with(target))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_quiet_unless_the_filter_mentions_them() {
        for (asked, kept) in [
            (
                "info",
                "info,apalis=off,sqlx_core::pool=error,sqlx::postgres::notice=error",
            ),
            (
                "info,postrider_dispatcher::deliver::attempt=debug",
                "info,postrider_dispatcher::deliver::attempt=debug,apalis=off,sqlx_core::pool=error,sqlx::postgres::notice=error",
            ),
            ("debug,sqlx=info", "debug,sqlx=info,apalis=off"),
            (
                "apalis_core=debug,sqlx::postgres::notice=info",
                "apalis_core=debug,sqlx::postgres::notice=info,sqlx_core::pool=error",
            ),
            ("off", "off"),
        ] {
            assert_eq!(filter_of(asked), kept);
            assert!(EnvFilter::try_new(filter_of(asked)).is_ok(), "{asked}");
        }
    }
}
