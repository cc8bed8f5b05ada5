//! What the tools write: coloured lines for people, JSON for programs. Colours go only to terminals that support them.

use std::{io::IsTerminal, process::ExitCode, time::Duration};

use anstyle::{AnsiColor, Style};
use indicatif::{ProgressBar, ProgressStyle};
use postrider_client::Error;
use serde::Serialize;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::{reach::Failure, settings::SettingError};

const EXIT_USAGE: u8 = 2;

pub(crate) const GOOD: Style = AnsiColor::Green.on_default();
pub(crate) const BAD: Style = AnsiColor::Red.on_default();
pub(crate) const WARNING: Style = AnsiColor::Yellow.on_default();
pub(crate) const SOFT: Style = Style::new().dimmed();
pub(crate) const STRONG: Style = Style::new().bold();

/// One object per line, so that a stream of them can be parsed.
pub(crate) fn json_line(value: &impl Serialize) {
    match serde_json::to_string(value) {
        Ok(text) => println!("{text}"),
        Err(error) => eprintln!("postrider: cannot write the result as JSON: {error}"),
    }
}

/// As JSON, or for people.
pub(crate) fn show(json: bool, value: &impl Serialize, for_people: impl FnOnce()) {
    match json {
        true => json_line(value),
        false => for_people(),
    }
}

pub(crate) fn status_style(status: Option<i64>) -> Style {
    match status {
        Some(200..=299) => GOOD,
        Some(300..=499) => WARNING,
        _ => BAD,
    }
}

/// SIGINT and SIGTERM both end a long-running tool, with status 0.
pub(crate) async fn stop_signal() {
    let Ok(mut terminate) = signal(SignalKind::terminate()) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
}

/// On stderr, and only if that is a terminal.
pub(crate) fn progress(total: u64, message: &'static str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(total).with_message(message);
    if let Ok(style) = ProgressStyle::with_template("{msg} {bar:30} {pos}/{len} {per_sec} {eta}") {
        bar.set_style(style);
    }
    bar
}

/// For work of unknown length.
pub(crate) fn spinner(message: &'static str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new_spinner().with_message(message);
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// The error with a hint, or for programs a problem document (RFC 9457).
pub(crate) fn report(failure: &Failure) -> ExitCode {
    let Failure { error, json, usage } = failure;
    let is_setting = error.is::<SettingError>();
    let refused = error.downcast_ref::<Error>();
    if *json && !is_setting {
        eprintln!("{}", problem_document(error, refused));
    } else {
        eprintln!("postrider: {error:#}");
        if let Some(hint) = refused.and_then(hint) {
            eprintln!("{hint}");
        }
    }
    match is_setting || *usage {
        true => ExitCode::from(EXIT_USAGE),
        false => ExitCode::FAILURE,
    }
}

fn problem_document(error: &anyhow::Error, refused: Option<&Error>) -> serde_json::Value {
    let Some(problem) = refused.and_then(Error::problem) else {
        return json!({"type": "about:blank", "title": "Command failed", "detail": format!("{error:#}")});
    };
    let mut document = json!(problem);
    // What was being done, where the error has context.
    if error.chain().count() > 1 {
        document["detail"] = json!(format!("{error}: {}", problem.detail));
    }
    document
}

fn hint(error: &Error) -> Option<String> {
    match error {
        Error::Unreachable { .. } => {
            Some("Is Postrider running there? Set its address with --url or POSTRIDER_URL.".to_owned())
        }
        Error::Unreadable { .. } => Some("Is this the address of Postrider's API? See --url.".to_owned()),
        Error::Refused(problem) => match problem.status {
            401 => Some("Set POSTRIDER_API_KEY to an active key.".to_owned()),
            403 => Some("This requires a key with another role: see Keys in /docs.".to_owned()),
            429 => problem
                .retry_after_seconds
                .map(|seconds| format!("Try again in {seconds} seconds.")),
            _ => None,
        },
        Error::BadUrl(_) | Error::BadKey => None,
    }
}
