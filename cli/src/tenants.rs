//! `tenants`: pause, resume, quotas.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use postrider_client::{Client, QuotaSettings, Quotas};

use crate::{
    output::{GOOD, WARNING, show},
    reach::{Failure, Reach},
    settings::Environment,
};

#[derive(Subcommand)]
pub enum TenantsCommand {
    /// Pause a tenant: nothing is sent to its endpoints, events are queued
    Pause(PauseArguments),
    /// Resume a tenant: queued events are sent
    Resume(OneTenant),
    /// Show a tenant's quotas, or set them
    Quotas(QuotasArguments),
}

#[derive(Args)]
pub struct OneTenant {
    /// Tenant id
    tenant: String,
    #[command(flatten)]
    reach: Reach,
}

#[derive(Args)]
pub struct PauseArguments {
    /// Reason shown to your team
    #[arg(long)]
    reason: Option<String>,
    #[command(flatten)]
    one: OneTenant,
}

#[derive(Args)]
pub struct QuotasArguments {
    /// Events that may be emitted in a minute, or `unlimited`
    #[arg(long, value_parser = parse_quota)]
    emits_per_minute: Option<Quota>,
    /// Bytes of events that are kept, or `unlimited`
    #[arg(long, value_parser = parse_quota)]
    stored_bytes: Option<Quota>,
    #[command(flatten)]
    one: OneTenant,
}

/// `None` is unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Quota(Option<i64>);

fn parse_quota(text: &str) -> Result<Quota, String> {
    match text {
        "unlimited" => Ok(Quota(None)),
        number => number
            .parse()
            .map(|number| Quota(Some(number)))
            .map_err(|_| "must be a whole number or `unlimited`".to_owned()),
    }
}

pub(crate) async fn run(command: TenantsCommand, environment: &Environment) -> Result<ExitCode, Failure> {
    let one = match &command {
        TenantsCommand::Pause(arguments) => &arguments.one,
        TenantsCommand::Resume(one) => one,
        TenantsCommand::Quotas(arguments) => &arguments.one,
    };
    let (tenant, json) = (&one.tenant, one.reach.json);
    let done = async {
        let client = one.reach.client(environment)?;
        match &command {
            TenantsCommand::Pause(arguments) => {
                let paused = client.pause_tenant(tenant, arguments.reason.as_deref()).await?;
                show(json, &paused, || {
                    anstream::println!("{WARNING}paused{WARNING:#} {tenant}")
                });
            }
            TenantsCommand::Resume(_) => {
                client.resume_tenant(tenant).await?;
                let resumed = client.tenant(tenant).await?;
                show(json, &resumed, || {
                    anstream::println!("{GOOD}resumed{GOOD:#} {tenant}")
                });
            }
            TenantsCommand::Quotas(arguments) => {
                let quotas = quotas(&client, tenant, arguments).await?;
                show(json, &quotas, || print(&quotas));
            }
        }
        Ok(ExitCode::SUCCESS)
    };
    done.await.map_err(|error| one.reach.failure(error))
}

/// A quota that is not named stays as it is.
async fn quotas(client: &Client, tenant: &str, arguments: &QuotasArguments) -> anyhow::Result<Quotas> {
    let now = client.quotas(tenant).await?;
    if arguments.emits_per_minute.is_none() && arguments.stored_bytes.is_none() {
        return Ok(now);
    }
    let kept = |given: Option<Quota>, now: Option<i64>| given.map_or(now, |Quota(quota)| quota);
    let settings = QuotaSettings {
        emits_per_minute: kept(arguments.emits_per_minute, now.emits_per_minute.map(i64::from)),
        stored_bytes: kept(arguments.stored_bytes, now.stored_bytes),
    };
    Ok(client.put_quotas(tenant, &settings).await?)
}

fn print(quotas: &Quotas) {
    let of = |used: i64, most: Option<i64>| match most {
        Some(most) => format!("{used} of {most}"),
        None => "unlimited".to_owned(),
    };
    let emits = of(quotas.emits_this_minute, quotas.emits_per_minute.map(i64::from));
    println!("emits this minute: {emits}");
    println!(
        "stored bytes: {}",
        of(quotas.stored_bytes_used, quotas.stored_bytes)
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_is_a_number_or_unlimited() {
        assert_eq!(parse_quota("unlimited"), Ok(Quota(None)));
        assert_eq!(parse_quota("100"), Ok(Quota(Some(100))));
        for bad in ["", "1.5", "many", "10k"] {
            assert!(parse_quota(bad).is_err(), "{bad}");
        }
    }
}
