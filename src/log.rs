//! The log: to standard error, as text for people or as JSON for programs.

use std::{sync::OnceLock, time::Duration};

use postrider_dashboard::Pool;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::{EnvFilter, Registry, fmt, prelude::*, reload};

use crate::settings::Values;

/// How often the filter that operators can change is read.
const LOOK_EVERY: Duration = Duration::from_secs(5);
const LOOK_TIME_MAX: Duration = Duration::from_secs(5);

/// The filter in use, and the one from the settings.
static FILTER: OnceLock<(reload::Handle<EnvFilter, Registry>, String)> = OnceLock::new();

/// Notices of the database. A background worker that is stopped during a commit causes a harmless one about a missing
/// transaction.
const NOTICES: &str = "sqlx::postgres::notice";

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

/// What is wrong with a filter.
pub(crate) fn check_filter(filter: &str) -> Result<(), String> {
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
