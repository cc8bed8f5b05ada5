//! The command line: one subcommand for each thing the program does.
//! Invariant: whatever goes wrong at the start is told in a sentence, never as a panic or a backtrace.

use std::process::ExitCode;

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
    Openapi,
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
    let (flags, role) = match CommandLine::parse().command {
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
                Err(error) => refuse(EXIT_USAGE, &format!("{error:#}")),
            };
        }
        Command::Tool(tool) => {
            let environment = Environment::of_process();
            return match start_runtime() {
                Ok(runtime) => runtime.block_on(commands::run(tool, &environment)),
                Err(error) => refuse(1, &format!("{error:#}")),
            };
        }
        Command::Openapi => {
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
        Err(error) => refuse(1, &format!("{error:#}")),
    }
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
}
