//! `secrets rotate`: a new current secret; the old one signs too until it retires.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use postrider_client::Rotation;
use postrider_dispatcher::retry::parse_wait;

use super::{
    endpoints::find,
    output::{GOOD, SOFT, json_line},
    reach::{Failure, InTenant},
};
use crate::settings::Environment;

#[derive(Subcommand)]
pub(crate) enum SecretsCommand {
    /// Makes a new current secret; the old one signs too until it retires
    Rotate(RotateArguments),
}

/// A secret of your own is in POSTRIDER_ENDPOINT_SECRET, or in the file that POSTRIDER_ENDPOINT_SECRET_FILE names.
#[derive(Args)]
pub(crate) struct RotateArguments {
    /// Its id, ep_…, or its URL
    endpoint: String,
    /// How long the older secrets sign too, like 90s, 24h or 7d; 0s revokes them at once [default: 24h]
    #[arg(long, value_parser = parse_overlap)]
    overlap: Option<u32>,
    #[command(flatten)]
    at: InTenant,
}

fn parse_overlap(text: &str) -> Result<u32, String> {
    let wait = parse_wait(text).map_err(|error| error.to_string())?;
    u32::try_from(wait.as_secs()).map_err(|_| "that is too long".to_owned())
}

pub(crate) async fn run(command: SecretsCommand, environment: &Environment) -> Result<ExitCode, Failure> {
    let SecretsCommand::Rotate(arguments) = &command;
    rotate(arguments, environment)
        .await
        .map_err(|error| arguments.at.reach.failure(error))
}

async fn rotate(arguments: &RotateArguments, environment: &Environment) -> anyhow::Result<ExitCode> {
    let (client, tenant) = arguments.at.open(environment).await?;
    let endpoint = find(&client, &tenant, &arguments.endpoint).await?;
    let rotation = Rotation {
        overlap_seconds: arguments.overlap,
        secret: environment.secret("POSTRIDER_ENDPOINT_SECRET")?,
    };
    let secrets = client.rotate_secret(&tenant, &endpoint.id, &rotation).await?;
    if arguments.at.reach.json {
        json_line(&secrets);
        return Ok(ExitCode::SUCCESS);
    }
    for one in &secrets.data {
        let shown = one
            .secret
            .as_deref()
            .or(one.public_key.as_deref())
            .unwrap_or_default();
        match one.retires_at {
            None => anstream::println!("{GOOD}{}{GOOD:#} {shown}", one.state),
            Some(at) => anstream::println!("{} {shown} {SOFT}until {at}{SOFT:#}", one.state),
        }
    }
    Ok(ExitCode::SUCCESS)
}
