//! The log: to standard error, as text for people or as JSON for programs.

use std::{sync::OnceLock, time::Duration};

use postrider_dashboard::Pool;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt, prelude::*, reload};

use crate::settings::Values;

/// How often the filter that operators can change is read.
const LOOK_EVERY: Duration = Duration::from_secs(5);
const LOOK_TIME_MAX: Duration = Duration::from_secs(5);

/// The filter in use, and the one from the settings.
static FILTER: OnceLock<(reload::Handle<EnvFilter, Registry>, String)> = OnceLock::new();

/// Libraries that log what Postrider handles and logs itself, with the level they are limited to unless the filter
/// mentions them: every failed poll of a job queue, every connection that a pool lost or was long in opening, every slow
/// statement, and notices of the database, such as the harmless one about a missing transaction when a background worker is
/// stopped during a commit.
const QUIET: [(&str, &str); 5] = [
    ("apalis", "off"),
    ("sqlx_core::pool", "off"),
    ("sqlx::pool", "error"),
    ("sqlx::query", "error"),
    ("sqlx::postgres::notice", "error"),
];

pub(crate) fn start(settings: &Values) {
    let (filter, handle) = reload::Layer::new(EnvFilter::new(filter_of(&settings.log_filter)));
    let _ = FILTER.set((handle, settings.log_filter.clone()));
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

/// What is wrong with a filter.
pub(crate) fn check_filter(filter: &str) -> Result<(), String> {
    if filter.chars().any(char::is_control) {
        return Err("must be a log filter on one line, without control characters".to_owned());
    }
    // Without any directive nothing would be logged. `off` says that.
    if filter.split(',').all(|directive| directive.trim().is_empty()) {
        return Err(
            "must be a log filter like info or postrider_dispatcher=debug, or off for no log".to_owned(),
        );
    }
    match EnvFilter::try_new(filter) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!(
            "must be a log filter like info or postrider_dispatcher=debug ({error})"
        )),
    }
}

/// Applies the filter in the database where there is one, and the setting where there is none, until stopped.
pub(crate) async fn follow(pool: Pool, stop: CancellationToken) {
    let Some((handle, setting)) = FILTER.get() else {
        return stop.cancelled().await;
    };
    let mut current: Option<String> = None;
    loop {
        let read = sqlx::query_scalar::<_, Option<String>>("select filter from postrider.log_filter")
            .fetch_one(&pool);
        if let Ok(Ok(wanted)) = timeout(LOOK_TIME_MAX, read).await
            && wanted != current
        {
            let filter: &str = wanted.as_deref().unwrap_or(setting);
            if let Ok(parsed) = EnvFilter::try_new(filter_of(filter))
                && handle.reload(parsed).is_ok()
            {
                tracing::warn!(filter, "the log filter was changed");
            }
            current = wanted;
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            () = stop.cancelled() => return,
        }
    }
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
                "info,apalis=off,sqlx_core::pool=off,sqlx::pool=error,sqlx::query=error,sqlx::postgres::notice=error",
            ),
            (
                "info,postrider_dispatcher::deliver::attempt=debug",
                "info,postrider_dispatcher::deliver::attempt=debug,apalis=off,sqlx_core::pool=off,sqlx::pool=error,\
                 sqlx::query=error,sqlx::postgres::notice=error",
            ),
            ("debug,sqlx=info", "debug,sqlx=info,apalis=off"),
            (
                "apalis_core=debug,sqlx::postgres::notice=info",
                "apalis_core=debug,sqlx::postgres::notice=info,sqlx_core::pool=off,sqlx::pool=error,sqlx::query=error",
            ),
            (
                "info,sqlx::query=warn,sqlx::pool::acquire=warn",
                "info,sqlx::query=warn,sqlx::pool::acquire=warn,apalis=off,sqlx_core::pool=off,sqlx::postgres::notice=error",
            ),
            ("off", "off"),
        ] {
            assert_eq!(filter_of(asked), kept);
            assert!(EnvFilter::try_new(filter_of(asked)).is_ok(), "{asked}");
        }
    }

    #[test]
    fn a_filter_that_would_silence_the_log_by_mistake_is_rejected() {
        for bad in [
            "",
            " ",
            ",",
            "info\n",
            "info\n,warn",
            "\tinfo",
            "info\u{7f}",
            "info=loud=5",
        ] {
            assert!(check_filter(bad).is_err(), "{bad:?}");
        }
        for good in ["off", "info", "warn,postrider_dispatcher=debug", "info,"] {
            assert_eq!(check_filter(good), Ok(()), "{good:?}");
        }
    }
}
