//! The command-line tools, one file per command. They use the HTTP API through `postrider-client`.
//! Invariant: no tool touches the database, and an error says what to do about it.

pub mod settings;

mod completions;
mod emit;
mod endpoint_health;
mod endpoints;
mod events;
mod listen;
mod log_filter;
mod output;
mod probe;
mod reach;
mod replay;
mod secrets;
mod sending;
mod tenants;
mod types;
mod verify;

use std::process::ExitCode;

use clap::{Command, Subcommand};

use settings::Environment;

#[derive(Subcommand)]
pub enum Tool {
    /// Emit an event; without --data, sample data is generated from the type's schema
    Emit(emit::EmitArguments),
    /// Forward a tenant's events to a receiver on this machine, signed as in production
    Listen(listen::ListenArguments),
    /// Test a receiver's implementation: signatures, duplicates, ordering, speed, TLS
    Probe(probe::ProbeArguments),
    /// Replay one delivery, or all that match a filter
    Replay(replay::ReplayArguments),
    /// Show a tenant's events
    #[command(subcommand)]
    Events(events::EventsCommand),
    /// Manage a tenant's endpoints
    #[command(subcommand)]
    Endpoints(endpoints::EndpointsCommand),
    /// Manage an endpoint's signing secrets
    #[command(subcommand)]
    Secrets(secrets::SecretsCommand),
    /// Pause and resume tenants, and set their quotas
    #[command(subcommand)]
    Tenants(tenants::TenantsCommand),
    /// Stop and resume all sending
    #[command(subcommand)]
    Sending(sending::SendingCommand),
    /// Show or change the log filter of all processes while they run
    LogFilter(log_filter::LogFilterArguments),
    /// Export and import event types as files
    #[command(subcommand)]
    Types(types::TypesCommand),
    /// Verify the signature of a captured request and explain why it fails
    Verify(verify::VerifyArguments),
    /// Print the completion script for a shell: `postrider completions bash`
    Completions(completions::CompletionsArguments),
}

/// Status 0 on success, 1 when it failed or found a problem, 2 for a usage error. `command` is the whole command line.
pub async fn run(tool: Tool, environment: &Environment, command: Command) -> ExitCode {
    let done = match tool {
        Tool::Emit(arguments) => emit::run(arguments, environment).await,
        Tool::Listen(arguments) => listen::run(arguments, environment).await,
        Tool::Probe(arguments) => probe::run(arguments, environment).await,
        Tool::Replay(arguments) => replay::run(arguments, environment).await,
        Tool::Events(command) => events::run(command, environment).await,
        Tool::Endpoints(command) => endpoints::run(command, environment).await,
        Tool::Secrets(command) => secrets::run(command, environment).await,
        Tool::Tenants(command) => tenants::run(command, environment).await,
        Tool::Sending(command) => sending::run(command, environment).await,
        Tool::LogFilter(arguments) => log_filter::run(arguments, environment).await,
        Tool::Types(command) => types::run(command, environment).await,
        Tool::Verify(arguments) => verify::run(&arguments, environment),
        Tool::Completions(arguments) => completions::run(&arguments, command),
    };
    match done {
        Ok(status) => status,
        Err(failure) => output::report(&failure),
    }
}
