//! The command line: one subcommand for each thing the program does.
//! Invariant: whatever goes wrong at the start is told in a sentence, never as a panic or a backtrace.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tokio::{
    runtime,
    signal::unix::{SignalKind, signal},
};
use tokio_util::sync::CancellationToken;

use crate::{
    log, master_key, roles,
    settings::{Environment, Flags, Settings},
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
    Migrate(Box<Flags>),
    /// Encrypts what is stored with the first key of POSTRIDER_MASTER_KEY, while everything runs
    RotateMasterKey(Box<Flags>),
    /// Checks the signature of a captured request, and says in words what is wrong with it
    Verify(VerifyArguments),
}

pub fn run() -> ExitCode {
    let command = CommandLine::parse().command;
    let flags = match &command {
        Command::Up(flags)
        | Command::Dispatcher(flags)
        | Command::Dashboard(flags)
        | Command::Migrate(flags)
        | Command::RotateMasterKey(flags) => flags,
        Command::Verify(arguments) => {
            return match verify::run(arguments, &Environment::of_process()) {
                Ok(status) => status,
                Err(error) => refuse(EXIT_USAGE, &format!("{error:#}")),
            };
        }
    };
    let settings = match Settings::read(flags, &Environment::of_process()) {
        Ok(settings) => settings,
        Err(error) => return refuse(EXIT_USAGE, &error.to_string()),
    };
    log::start(&settings.log);
    for name in &settings.unknown {
        tracing::warn!(setting = name, "this variable is no setting of Postrider");
    }
    let runtime = match runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return refuse(1, &format!("the runtime could not be started: {error}")),
    };
    let done = runtime.block_on(async {
        let stop = stop_on_signal()?;
        match command {
            Command::Up(_) => up::up(settings, stop).await,
            Command::Dispatcher(_) => roles::dispatcher(settings, stop).await,
            Command::Dashboard(_) => roles::dashboard(settings, stop).await,
            Command::Migrate(_) => roles::migrate(settings).await,
            Command::RotateMasterKey(_) => master_key::rotate(settings, stop).await,
            Command::Verify(_) => unreachable!("it needs no runtime and has ended"),
        }
    });
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
