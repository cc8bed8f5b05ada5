//! The command line: the roles here, the tools of `postrider-cli`.
//! Invariant: an error at startup is reported as a sentence, never as a panic or a backtrace.

use std::{panic, process::ExitCode};

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand};
use postrider_cli::Tool;
use postrider_dispatcher::tls;
use tokio::{
    runtime::{self, Runtime},
    signal::unix::{SignalKind, signal},
};
use tokio_util::sync::CancellationToken;

use crate::{
    cells::{self, CellsArguments},
    doctor::{self, DoctorArguments},
    health_command::{self, HealthArguments},
    log, master_key, metrics, roles,
    settings::{Environment, Flags, SettingError, Settings, reference},
    up,
};

/// The exit status for an invalid setting or argument.
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
    #[command(flatten)]
    Role(Role),
    #[command(flatten)]
    Tool(Tool),
    /// Print the OpenAPI 3.1 document of the HTTP API
    Openapi {
        /// Has no effect: the document is JSON
        #[arg(long)]
        json: bool,
    },
    /// Check that the process on this machine is ready, for container health checks
    Health(HealthArguments),
    /// Print every setting with its default and description
    Settings {
        /// Output JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Subcommand)]
enum Role {
    /// Run everything in one process: dispatcher, API and dashboard, with an embedded Postgres if no database URL is set
    Up(Flags),
    /// Send due deliveries; several dispatchers share the work
    Dispatcher(Flags),
    /// Serve the API and the dashboard
    Dashboard(Flags),
    /// Bring the database schema up to date
    Migrate {
        #[command(flatten)]
        flags: Flags,
        /// Only the emit function and a small outbox, in a producer's own database; POSTRIDER_SOURCES relays from it
        #[arg(long)]
        outbox_only: bool,
        /// Print what would be applied and change nothing; the exit status is 0 if there is nothing, 3 if there is something
        #[arg(long, conflicts_with = "outbox_only")]
        check: bool,
    },
    /// Check the installation and say what to do; the exit status is 0 if all is well, 3 with warnings, 1 with errors
    Doctor(DoctorArguments),
    /// Add cells, which are databases for part of the tenants, and list them; run on the home database
    Cells(CellsArguments),
    /// Encrypt stored secrets with the first key of POSTRIDER_MASTER_KEY, without downtime
    RotateMasterKey {
        #[command(flatten)]
        flags: Flags,
        /// Continue even if running roles lack the key and will not be able to read the secrets
        #[arg(long)]
        force: bool,
    },
}

pub(crate) fn run() -> ExitCode {
    tls::install_provider();
    match CommandLine::parse().command {
        Command::Role(role) => {
            let as_json = role.flags().log_as_json();
            finish(run_role(role), as_json)
        }
        Command::Tool(tool) => run_tool(tool),
        Command::Openapi { json: _ } => {
            exit_on_closed_pipe();
            print!("{}", postrider_dashboard::openapi_document());
            ExitCode::SUCCESS
        }
        Command::Health(arguments) => run_health(arguments),
        Command::Settings { json } => {
            exit_on_closed_pipe();
            match json {
                true => println!("{}", reference::document()),
                false => print!("{}", reference::markdown()),
            }
            ExitCode::SUCCESS
        }
    }
}

impl Role {
    fn flags(&self) -> &Flags {
        let (Self::Up(flags)
        | Self::Dispatcher(flags)
        | Self::Dashboard(flags)
        | Self::Migrate { flags, .. }
        | Self::Doctor(DoctorArguments { flags, .. })
        | Self::Cells(CellsArguments { flags, .. })
        | Self::RotateMasterKey { flags, .. }) = self;
        flags
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Up(_) => "up",
            Self::Dispatcher(_) => "dispatcher",
            Self::Dashboard(_) => "dashboard",
            Self::Migrate { .. } => "migrate",
            Self::Doctor(_) => "doctor",
            Self::Cells(_) => "cells",
            Self::RotateMasterKey { .. } => "rotate-master-key",
        }
    }
}

fn run_role(role: Role) -> anyhow::Result<ExitCode> {
    let settings = Settings::read(role.flags(), &Environment::of_process())?;
    log::start(&settings.values);
    let (name, version) = (role.name(), env!("CARGO_PKG_VERSION"));
    if !matches!(role, Role::Doctor(_) | Role::Cells(_)) {
        tracing::info!(
            version,
            role = name,
            settings = settings.changed.join(" "),
            "starting"
        );
    }
    for variable in &settings.unknown_variables {
        tracing::warn!(variable, "unknown setting: the variable is ignored");
    }
    start_runtime()?.block_on(async {
        metrics::start(name)?;
        tokio::spawn(metrics::keep_tidy());
        let stop = stop_on_signal(matches!(role, Role::Up(_)))?;
        match role {
            Role::Up(_) => stopped(up::up(settings, stop).await)?,
            Role::Dispatcher(_) => stopped(roles::dispatcher(settings, stop).await)?,
            Role::Dashboard(_) => stopped(roles::dashboard(settings, stop).await)?,
            Role::Migrate { check: true, .. } => return roles::check_migrations(settings).await,
            Role::Migrate {
                outbox_only: false, ..
            } => roles::migrate(settings).await?,
            Role::Migrate {
                outbox_only: true, ..
            } => roles::migrate_outbox(settings).await?,
            Role::Doctor(arguments) => return doctor::run(&arguments, &settings).await,
            Role::Cells(arguments) => cells::run(&arguments, &settings).await?,
            Role::RotateMasterKey { force, .. } => master_key::rotate(settings, force, stop).await?,
        }
        Ok(ExitCode::SUCCESS)
    })
}

fn stopped(result: anyhow::Result<()>) -> anyhow::Result<()> {
    if result.is_ok() {
        tracing::info!("stopped");
    }
    result
}

fn run_tool(tool: Tool) -> ExitCode {
    exit_on_closed_pipe();
    let environment = Environment::of_process();
    match start_runtime() {
        Ok(runtime) => runtime.block_on(postrider_cli::run(tool, &environment, command())),
        Err(error) => finish(Err(error), false),
    }
}

fn run_health(arguments: HealthArguments) -> ExitCode {
    exit_on_closed_pipe();
    let environment = Environment::of_process();
    let done =
        start_runtime().and_then(|runtime| runtime.block_on(health_command::run(arguments, &environment)));
    finish(done, false)
}

/// The reader of a tool's output may stop early, as `head` does. The tool then exits quietly, as others do.
fn exit_on_closed_pipe() {
    const LIKE_SIGPIPE: i32 = 141;
    let default = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        let message = panic.payload().downcast_ref::<String>();
        if message
            .is_some_and(|text| text.starts_with("failed printing to stdout") && text.contains("Broken pipe"))
        {
            std::process::exit(LIKE_SIGPIPE);
        }
        default(panic);
    }));
}

fn start_runtime() -> anyhow::Result<Runtime> {
    let runtime = runtime::Builder::new_multi_thread().enable_all().build();
    runtime.context("cannot start the async runtime")
}

/// The whole command line, for completions.
pub(crate) fn command() -> clap::Command {
    CommandLine::command()
}

fn finish(result: anyhow::Result<ExitCode>, as_json: bool) -> ExitCode {
    let error = match result {
        Ok(status) => return status,
        Err(error) => error,
    };
    log::fatal(as_json, &in_one_line(&error));
    match error.is::<SettingError>() {
        true => ExitCode::from(EXIT_USAGE),
        false => ExitCode::FAILURE,
    }
}

/// With its causes. Many errors include their cause in their own message: it is not repeated.
fn in_one_line(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |message, cause| {
        let cause = cause.to_string();
        match message.is_empty() {
            true => cause,
            false if message.contains(&cause) => message,
            false => format!("{message}: {cause}"),
        }
    })
}

/// SIGTERM and SIGINT both request a clean stop. A second one exits immediately: a stop that hangs must not need a
/// `kill -9` from another terminal. SIGHUP changes nothing, because no setting can change while a process runs; only `up`
/// in a terminal stops when that is closed.
fn stop_on_signal(is_up: bool) -> std::io::Result<CancellationToken> {
    let stop = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let has_terminal = is_up && std::io::IsTerminal::is_terminal(&std::io::stderr());
    let requested = stop.clone();
    tokio::spawn(async move {
        let mut asked = false;
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
                _ = hangup.recv() => {
                    if !has_terminal {
                        tracing::info!("SIGHUP ignored: restart to change settings");
                        continue;
                    }
                }
            }
            if asked {
                std::process::exit(1);
            }
            asked = true;
            tracing::info!("stopping");
            requested.cancel();
        }
    });
    Ok(stop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_arguments_have_one_name() {
        command().debug_assert();
    }

    /// Those of `cells` have no result.
    const NOT_TOOLS: [&str; 9] = [
        "up",
        "dispatcher",
        "dashboard",
        "migrate",
        "rotate-master-key",
        "add",
        "drain",
        "open",
        "help",
    ];

    fn without_json(command: &clap::Command, path: &str, found: &mut Vec<String>) {
        let path = format!("{path} {}", command.get_name());
        let mut has_parts = false;
        for part in command.get_subcommands() {
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
    fn every_tool_has_a_json_flag() {
        let mut found = Vec::new();
        without_json(&command(), "", &mut found);
        assert!(found.is_empty(), "{found:?}");
    }
}
