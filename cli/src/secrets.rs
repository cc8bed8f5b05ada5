//! `secrets rotate`: creates a new current secret; the old one signs too until it retires.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use postrider_client::Rotation;
use postrider_proto::limits::OVERLAP_SECONDS_MAX;

use crate::{
    endpoints::find,
    output::{GOOD, SOFT, json_line},
    reach::{Failure, InTenant},
    settings::{ENDPOINT_SECRET, Environment},
};

#[derive(Subcommand)]
pub enum SecretsCommand {
    /// Rotate the secret: requests are signed with both until the old one expires
    Rotate(RotateArguments),
}

/// To use your own secret, set POSTRIDER_ENDPOINT_SECRET or POSTRIDER_ENDPOINT_SECRET_FILE.
#[derive(Args)]
pub struct RotateArguments {
    /// Endpoint id (ep_…) or URL
    endpoint: String,
    /// How long the old secret stays valid, like 90s, 24h or 7d; 0s revokes it now [default: 24h]
    #[arg(long, value_parser = parse_overlap)]
    overlap: Option<u32>,
    #[command(flatten)]
    at: InTenant,
}

fn parse_overlap(text: &str) -> Result<u32, String> {
    const DAY: u32 = 24 * 60 * 60;
    let most = OVERLAP_SECONDS_MAX.unsigned_abs();
    let requirement = || format!("must be a duration like 90s or 24h, at most {}d", most / DAY);
    let text = text.trim();
    let (number, unit) = text
        .split_at_checked(text.len().saturating_sub(1))
        .ok_or_else(requirement)?;
    let unit_seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 60 * 60,
        "d" => DAY,
        _ => return Err(requirement()),
    };
    let number: u32 = number.parse().map_err(|_| requirement())?;
    number
        .checked_mul(unit_seconds)
        .filter(|seconds| *seconds <= most)
        .ok_or_else(requirement)
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
        overlap_seconds: arguments.overlap.map(i64::from),
        secret: environment.secret(&ENDPOINT_SECRET)?,
    };
    let secrets = client.rotate_secret(&tenant, &endpoint.id, &rotation).await?;
    if arguments.at.reach.json {
        json_line(&secrets);
        return Ok(ExitCode::SUCCESS);
    }
    for one in &secrets.data {
        let shown = one.value.secret.as_deref().or(one.value.public_key.as_deref());
        let shown = shown.unwrap_or_default();
        match one.retires_at {
            None => anstream::println!("{GOOD}{}{GOOD:#} {shown}", one.state),
            Some(at) => anstream::println!("{} {shown} {SOFT}until {at}{SOFT:#}", one.state),
        }
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overlap_is_a_number_and_a_unit() {
        for (text, seconds) in [("0s", 0), (" 90s ", 90), ("24h", 86_400), ("7d", 604_800)] {
            assert_eq!(parse_overlap(text), Ok(seconds), "{text}");
        }
        for bad in ["", "s", "24", "1ä", "8d", "-1s", "99999999999d", "1.5h"] {
            assert!(parse_overlap(bad).is_err(), "{bad}");
        }
    }
}
