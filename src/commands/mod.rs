//! The tools for people, a file for each: all of them work over the HTTP API, through `postrider-client`.
//! Invariant: no tool touches the database, and what goes wrong is told with what to do about it.

mod completions;
mod emit;
mod endpoints;
mod events;
mod listen;
mod output;
mod probe;
mod reach;
mod replay;
mod secrets;
mod types;

use std::process::ExitCode;

use clap::Subcommand;

use crate::settings::Environment;
pub(crate) use output::told_as_problem;
use reach::Failure;

#[derive(Subcommand)]
pub(crate) enum Tool {
    /// Emits an event; without data a sample is made from the type's schema
    Emit(emit::EmitArguments),
    /// Takes a tenant's events on this machine and forwards them to a receiver, signed as they always are
    Listen(listen::ListenArguments),
    /// Finds out whether a receiver is right: signatures, duplicates, order, speed, TLS
    Probe(probe::ProbeArguments),
    /// Sends deliveries again: one, or all that a filter names
    Replay(replay::ReplayArguments),
    /// A tenant's events
    #[command(subcommand)]
    Events(events::EventsCommand),
    /// A tenant's endpoints
    #[command(subcommand)]
    Endpoints(endpoints::EndpointsCommand),
    /// An endpoint's signing secrets
    #[command(subcommand)]
    Secrets(secrets::SecretsCommand),
    /// Event types as files
    #[command(subcommand)]
    Types(types::TypesCommand),
    /// Writes what a shell needs to complete commands: `postrider completions bash`
    Completions(completions::CompletionsArguments),
}

/// Status 0 when it is done, 1 when it failed or found something bad, 2 when it was asked for wrongly.
pub(crate) async fn run(tool: Tool, environment: &Environment) -> ExitCode {
    let done = match tool {
        Tool::Emit(arguments) => emit::run(arguments, environment).await,
        Tool::Listen(arguments) => listen::run(arguments, environment).await,
        Tool::Probe(arguments) => probe::run(arguments, environment).await,
        Tool::Replay(arguments) => replay::run(arguments, environment).await,
        Tool::Events(command) => events::run(command, environment).await,
        Tool::Endpoints(command) => endpoints::run(command, environment).await,
        Tool::Secrets(command) => secrets::run(command, environment).await,
        Tool::Types(command) => types::run(command, environment).await,
        Tool::Completions(arguments) => completions::run(&arguments),
    };
    match done {
        Ok(status) => status,
        Err(Failure { error, json }) => output::refuse(&error, json),
    }
}
