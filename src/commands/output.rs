//! What the tools write: coloured lines for people, JSON for programs. Colours go only to terminals that want them.

use std::{io::IsTerminal, process::ExitCode, time::Duration};

use anstyle::{AnsiColor, Style};
use indicatif::{ProgressBar, ProgressStyle};
use postrider_client::Error;
use serde::Serialize;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

pub(crate) const GOOD: Style = AnsiColor::Green.on_default();
pub(crate) const BAD: Style = AnsiColor::Red.on_default();
pub(crate) const WAIT: Style = AnsiColor::Yellow.on_default();
pub(crate) const SOFT: Style = Style::new().dimmed();
pub(crate) const STRONG: Style = Style::new().bold();

/// One object, as one line: what is written over and over stays readable for programs.
pub(crate) fn json_line(value: &impl Serialize) {
    match serde_json::to_string(value) {
        Ok(text) => println!("{text}"),
        Err(error) => eprintln!("postrider: the answer can't be written: {error}"),
    }
}

/// A status in its colour.
pub(crate) fn status_style(status: Option<i64>) -> Style {
    match status {
        Some(200..=299) => GOOD,
        Some(300..=499) => WAIT,
        _ => BAD,
    }
}

/// Waits for SIGINT or SIGTERM: both end what goes on by itself, with status 0.
pub(crate) async fn told_to_stop() {
    let Ok(mut terminate) = signal(SignalKind::terminate()) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
}

/// On stderr, and not at all where that is no terminal.
pub(crate) fn progress(total: u64, what: &'static str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(total).with_message(what);
    if let Ok(style) = ProgressStyle::with_template("{msg} {bar:30} {pos}/{len} {per_sec} {eta}") {
        bar.set_style(style);
    }
    bar
}

/// For work whose length is not known.
pub(crate) fn spinner(what: &'static str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new_spinner().with_message(what);
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// What went wrong and what helps; for programs as a problem (RFC 9457).
pub(crate) fn refuse(error: &anyhow::Error, json: bool) -> ExitCode {
    if error.is::<crate::settings::SettingError>() {
        eprintln!("postrider: {error}");
        return ExitCode::from(2);
    }
    let refused = error.downcast_ref::<Error>();
    if json {
        let problem = match refused.and_then(Error::problem) {
            Some(problem) => {
                let mut told = json!(problem);
                // What was being done, where the error has words for that.
                if error.chain().count() > 1 {
                    told["detail"] = json!(format!("{error}: {}", problem.detail));
                }
                told
            }
            None => told_as_problem(error),
        };
        eprintln!("{problem}");
        return ExitCode::FAILURE;
    }
    eprintln!("postrider: {error:#}");
    if let Some(hint) = refused.and_then(hint) {
        eprintln!("{hint}");
    }
    ExitCode::FAILURE
}

/// For programs, of what is no answer of the API.
pub(crate) fn told_as_problem(error: &anyhow::Error) -> serde_json::Value {
    json!({"type": "about:blank", "title": "It could not be done", "detail": format!("{error:#}")})
}

fn hint(error: &Error) -> Option<String> {
    match error {
        Error::Unreachable { .. } => {
            Some("Is Postrider running there? --url or POSTRIDER_URL says where it is.".to_owned())
        }
        Error::Unreadable { .. } => Some("Is that the address of Postrider's API? See --url.".to_owned()),
        Error::Refused(problem) => match problem.status {
            401 => Some("Set POSTRIDER_API_KEY to a key that is in force.".to_owned()),
            403 => Some("This needs a key of another role: see `Keys` in /docs.".to_owned()),
            429 => problem
                .retry_after_seconds
                .map(|seconds| format!("Try again in {seconds} seconds.")),
            _ => None,
        },
        Error::BadUrl(_) | Error::BadKey => None,
    }
}
