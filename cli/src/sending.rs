//! `sending`: stop all requests to endpoints, and resume them.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use postrider_client::{Sending, SendingSettings};

use crate::{
    output::{GOOD, SOFT, WARNING, show},
    reach::{Failure, Reach},
    settings::Environment,
};

#[derive(Subcommand)]
pub enum SendingCommand {
    /// Show whether anything is sent
    Status(StatusArguments),
    /// Stop all requests to endpoints; returns once every dispatcher has confirmed it. Events are queued
    Stop(StopArguments),
    /// Resume sending
    Resume(ResumeArguments),
}

#[derive(Args)]
pub struct StatusArguments {
    #[command(flatten)]
    reach: Reach,
}

#[derive(Args)]
pub struct StopArguments {
    /// Reason shown to your team
    #[arg(long)]
    reason: Option<String>,
    #[command(flatten)]
    reach: Reach,
}

#[derive(Args)]
pub struct ResumeArguments {
    /// Send from this restored copy: only if the installation it is a copy of no longer sends
    #[arg(long)]
    confirm_restored: bool,
    #[command(flatten)]
    reach: Reach,
}

pub(crate) async fn run(command: SendingCommand, environment: &Environment) -> Result<ExitCode, Failure> {
    let reach = match &command {
        SendingCommand::Status(arguments) => &arguments.reach,
        SendingCommand::Stop(arguments) => &arguments.reach,
        SendingCommand::Resume(arguments) => &arguments.reach,
    };
    let done = async {
        let client = reach.client(environment)?;
        let sending = match &command {
            SendingCommand::Status(_) => client.sending().await?,
            SendingCommand::Stop(arguments) => {
                let settings = SendingSettings {
                    stopped: true,
                    reason: arguments.reason.clone(),
                    ..SendingSettings::default()
                };
                client.put_sending(&settings).await?
            }
            SendingCommand::Resume(arguments) => {
                let settings = SendingSettings {
                    confirm_restored: arguments.confirm_restored,
                    ..SendingSettings::default()
                };
                client.put_sending(&settings).await?
            }
        };
        show(reach.json, &sending, || print(&sending));
        Ok(ExitCode::SUCCESS)
    };
    done.await.map_err(|error| reach.failure(error))
}

fn print(sending: &Sending) {
    if sending.identity_hidden {
        anstream::println!(
            "{WARNING}stopped{WARNING:#} Postrider's database role may not execute pg_control_system(), so it is unknown \
             whether this database is a restored copy. Grant it that right, or, if no other installation sends from a copy of \
             this database, run `postrider sending resume --confirm-restored`."
        );
    } else if sending.restored {
        anstream::println!(
            "{WARNING}stopped{WARNING:#} This database is a restored copy. `postrider sending resume --confirm-restored` \
             sends from it."
        );
    }
    if sending.stopped_at.is_some() {
        let by = sending.stopped_by.as_deref().unwrap_or("postrider");
        let since = sending
            .stopped_at
            .map(|at| format!(" since {at}"))
            .unwrap_or_default();
        let reason = sending
            .reason
            .as_deref()
            .map(|reason| format!(": {reason}"))
            .unwrap_or_default();
        anstream::println!("{WARNING}stopped{WARNING:#} by {by}{SOFT}{since}{SOFT:#}{reason}");
    } else if !sending.stopped {
        anstream::println!("{GOOD}sending{GOOD:#}");
    }
}
