//! The command line: one subcommand for each thing the program does.
//! Invariant: whatever goes wrong at the start is told in a sentence, never as a panic or a backtrace.

use std::{panic, process::ExitCode};

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand};
use tokio::{
    runtime,
    signal::unix::{SignalKind, signal},
};
use tokio_util::sync::CancellationToken;

use crate::{
    bench::{self, BenchFlags},
    commands::{self, Tool},
    log, master_key, metrics, roles, seed,
    settings::{Environment, Flags, Settings, reference},
    up,
    verify::{self, VerifyArguments},
};

/// The exit status of a start that was refused because of a setting or an argument.
const EXIT_USAGE: u8 = 2;

/// Outbound webhook delivery from your own Postgres.
#[derive(Parser)]
#[command(name = "postrider", version, arg_required_else_help = true)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Everything in one process: dispatcher, API and dashboard, with a private Postgres when no database URL is set
    Up(Box<Flags>),
    /// Sends what is due; any number of these share the work
    Dispatcher(Box<Flags>),
    /// Serves the API and the dashboard
    Dashboard(Box<Flags>),
    /// Brings the database's schema up to date
    Migrate {
        #[command(flatten)]
        flags: Box<Flags>,
        /// Only the emit function and a small outbox, in a producer's own database; POSTRIDER_SOURCES relays from it
        #[arg(long)]
        outbox_only: bool,
    },
    /// Encrypts what is stored with the first key of POSTRIDER_MASTER_KEY, while everything runs
    RotateMasterKey {
        #[command(flatten)]
        flags: Box<Flags>,
        /// Even though roles that run lack the key: they will not be able to read what is stored
        #[arg(long)]
        force: bool,
    },
    /// Checks the signature of a captured request, and says in words what is wrong with it
    Verify(VerifyArguments),
    #[command(flatten)]
    Tool(Tool),
    /// Prints the HTTP API's description: OpenAPI 3.1
    Openapi {
        /// As it always does
        #[arg(long)]
        json: bool,
    },
    /// Prints every setting with its default and what it means
    Settings {
        /// Write JSON, for programs
        #[arg(long)]
        json: bool,
    },
    /// Measures deliveries beside the bare HTTP client, on a database of its own
    Bench(BenchFlags),
    /// Fills a database with a made-up past, to see how the pages do at size
    #[command(hide = true)]
    Seed {
        #[command(flatten)]
        flags: Box<Flags>,
        #[arg(long, default_value_t = 1_000_000)]
        attempts: i64,
    },
    #[command(hide = true)]
    BenchSink,
    #[command(hide = true)]
    BenchCeiling {
        url: String,
        concurrency: usize,
        seconds: u64,
    },
}

/// What runs until it is told to stop, or until it is done.
enum Role {
    Up,
    Dispatcher,
    Dashboard,
    Migrate,
    MigrateOutbox,
    RotateMasterKey { force: bool },
    Seed(i64),
}

pub fn run() -> ExitCode {
    postrider_dispatcher::tls::install_provider();
    let command = CommandLine::parse().command;
    if matches!(
        command,
        Command::Verify(_) | Command::Tool(_) | Command::Openapi { .. } | Command::Settings { .. }
    ) {
        end_without_a_reader();
    }
    let (flags, role) = match command {
        Command::Up(flags) => (flags, Role::Up),
        Command::Dispatcher(flags) => (flags, Role::Dispatcher),
        Command::Dashboard(flags) => (flags, Role::Dashboard),
        Command::Migrate {
            flags,
            outbox_only: false,
        } => (flags, Role::Migrate),
        Command::Migrate {
            flags,
            outbox_only: true,
        } => (flags, Role::MigrateOutbox),
        Command::RotateMasterKey { flags, force } => (flags, Role::RotateMasterKey { force }),
        Command::Seed { flags, attempts } => (flags, Role::Seed(attempts)),
        Command::Verify(arguments) => {
            return match verify::run(&arguments, &Environment::of_process()) {
                Ok(status) => status,
                Err(error) if arguments.json => {
                    eprintln!("{}", commands::told_as_problem(&error));
                    ExitCode::from(EXIT_USAGE)
                }
                Err(error) => refuse(EXIT_USAGE, &in_one_line(&error)),
            };
        }
        Command::Tool(tool) => {
            let environment = Environment::of_process();
            return match start_runtime() {
                Ok(runtime) => runtime.block_on(commands::run(tool, &environment)),
                Err(error) => refuse(1, &in_one_line(&error)),
            };
        }
        Command::Openapi { json: _ } => {
            print!("{}", postrider_dashboard::openapi_document());
            return ExitCode::SUCCESS;
        }
        Command::Settings { json } => {
            match json {
                true => println!("{}", reference::document()),
                false => print!("{}", reference::markdown()),
            }
            return ExitCode::SUCCESS;
        }
        Command::Bench(flags) => return finish(on_runtime(bench::run(flags))),
        Command::BenchSink => return finish(on_runtime(bench::sink())),
        Command::BenchCeiling {
            url,
            concurrency,
            seconds,
        } => {
            return finish(on_runtime(bench::ceiling(&url, concurrency, seconds)));
        }
    };
    let settings = match Settings::read(&flags, &Environment::of_process()) {
        Ok(settings) => settings,
        Err(error) => return refuse(EXIT_USAGE, &error.to_string()),
    };
    log::start(&settings.log);
    for name in &settings.unknown {
        tracing::warn!(setting = name, "this variable is no setting of Postrider");
    }
    finish(on_runtime(async {
        metrics::start()?;
        tokio::spawn(metrics::keep_tidy());
        let stop = stop_on_signal()?;
        match role {
            Role::Up => up::up(settings, stop).await,
            Role::Dispatcher => roles::dispatcher(settings, stop).await,
            Role::Dashboard => roles::dashboard(settings, stop).await,
            Role::Migrate => roles::migrate(settings).await,
            Role::MigrateOutbox => roles::migrate_outbox(settings).await,
            Role::RotateMasterKey { force } => master_key::rotate(settings, force, stop).await,
            Role::Seed(attempts) => seed::run(settings, attempts).await,
        }
    }))
}

/// Whoever reads what a tool writes may stop before its end, as `head` does. That is no fault to tell of: the tool ends as
/// others do.
fn end_without_a_reader() {
    const LIKE_SIGPIPE: i32 = 141;
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        let told = panic.payload().downcast_ref::<String>();
        if told
            .is_some_and(|text| text.starts_with("failed printing to stdout") && text.contains("Broken pipe"))
        {
            std::process::exit(LIKE_SIGPIPE);
        }
        usual(panic);
    }));
}

fn on_runtime(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    start_runtime()?.block_on(work)
}

fn start_runtime() -> anyhow::Result<runtime::Runtime> {
    let runtime = runtime::Builder::new_multi_thread().enable_all().build();
    runtime.context("the runtime could not be started")
}

/// What there is to complete.
pub(crate) fn command() -> clap::Command {
    CommandLine::command()
}

fn finish(done: anyhow::Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<crate::settings::SettingError>() => refuse(EXIT_USAGE, &error.to_string()),
        Err(error) => refuse(1, &in_one_line(&error)),
    }
}

/// With its causes. Many errors say their cause themselves: it is not said again.
fn in_one_line(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |told, cause| {
        let cause = cause.to_string();
        match told.is_empty() {
            true => cause,
            false if told.contains(&cause) => told,
            false => format!("{told}: {cause}"),
        }
    })
}

fn refuse(status: u8, sentence: &str) -> ExitCode {
    eprintln!("postrider: {sentence}");
    ExitCode::from(status)
}

/// SIGTERM and SIGINT both ask for a clean stop. A second one ends the process at once: a stop that hangs must not
/// need a `kill -9` from another terminal.
fn stop_on_signal() -> std::io::Result<CancellationToken> {
    let stop = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let told = stop.clone();
    tokio::spawn(async move {
        for first in [true, false] {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if first {
                tracing::info!("stopping");
                told.cancel();
            } else {
                std::process::exit(1);
            }
        }
    });
    Ok(stop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_arguments_have_one_name() {
        CommandLine::command().debug_assert();
    }

    /// What runs by itself, and what says its figures in another way.
    const NOT_TOOLS: [&str; 7] = [
        "up",
        "dispatcher",
        "dashboard",
        "migrate",
        "rotate-master-key",
        "bench",
        "help",
    ];

    fn without_json(command: &clap::Command, path: &str, found: &mut Vec<String>) {
        let path = format!("{path} {}", command.get_name());
        let mut has_parts = false;
        for part in command.get_subcommands().filter(|part| !part.is_hide_set()) {
            has_parts = true;
            if !NOT_TOOLS.contains(&part.get_name()) {
                without_json(part, &path, found);
            }
        }
        if !has_parts && !command.get_arguments().any(|one| one.get_id() == "json") {
            found.push(path);
        }
    }

    #[test]
    fn every_tool_takes_json() {
        let mut found = Vec::new();
        without_json(&command(), "", &mut found);
        assert!(found.is_empty(), "{found:?}");
    }
}
