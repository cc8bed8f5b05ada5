//! `tenants`: pause, resume, quotas, move.

use std::{process::ExitCode, time::Duration};

use anyhow::Context;
use clap::{Args, Subcommand};
use postrider_client::{Client, Move, PageOf, QuotaSettings, Quotas};

use crate::{
    output::{GOOD, WARNING, show, stop_signal},
    reach::{Failure, Reach},
    settings::Environment,
};

const MOVE_POLL: Duration = Duration::from_millis(300);

#[derive(Subcommand)]
pub enum TenantsCommand {
    /// Pause a tenant: nothing is sent to its endpoints, events are queued
    Pause(PauseArguments),
    /// Resume a tenant: queued events are sent
    Resume(OneTenant),
    /// Show a tenant's quotas, or set them
    Quotas(QuotasArguments),
    /// Move a tenant to another cell and show the progress until it is done; Ctrl+C leaves the move running
    Move(MoveArguments),
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

#[derive(Args)]
pub struct MoveArguments {
    /// Name of the cell
    #[arg(long, required_unless_present = "cancel")]
    to: Option<String>,
    /// Cancel the tenant's move instead: it goes on where it was
    #[arg(long, conflicts_with = "to")]
    cancel: bool,
    /// Do not wait until the move is done
    #[arg(long)]
    no_wait: bool,
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
        TenantsCommand::Move(arguments) => &arguments.one,
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
            TenantsCommand::Move(arguments) => move_tenant(&client, tenant, arguments, json).await?,
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

async fn move_tenant(
    client: &Client,
    tenant: &str,
    arguments: &MoveArguments,
    json: bool,
) -> anyhow::Result<()> {
    let mut current = match &arguments.to {
        Some(to) => client.move_tenant(tenant, to).await?,
        None => client.cancel_move(&running_move(client, tenant).await?).await?,
    };
    let mut shown = None;
    loop {
        let now = (current.state.clone(), current.waits_for.clone());
        if !json && shown.as_ref() != Some(&now) {
            print_move(&current);
            shown = Some(now);
        }
        if current.ended_at.is_some() || arguments.no_wait {
            break;
        }
        tokio::select! {
            () = tokio::time::sleep(MOVE_POLL) => {}
            () = stop_signal() => break,
        }
        current = client.tenant_move(&current.id).await?;
    }
    if json {
        show(json, &current, || ());
    }
    Ok(())
}

async fn running_move(client: &Client, tenant: &str) -> anyhow::Result<String> {
    let newest = client.moves(&PageOf::default()).await?.data;
    let running = newest
        .into_iter()
        .find(|one| one.tenant == tenant && one.ended_at.is_none());
    running
        .map(|one| one.id)
        .with_context(|| format!("tenant {tenant} is not moving"))
}

fn print_move(
    Move {
        state,
        tenant,
        from,
        to,
        copied,
        waits_for,
        ..
    }: &Move,
) {
    let waits = waits_for
        .as_ref()
        .map(|reason| format!(", waits for {reason}"))
        .unwrap_or_default();
    let style = if state == "done" { GOOD } else { WARNING };
    anstream::println!("{style}{state}{style:#} {tenant} from {from} to {to}: {copied} rows copied{waits}");
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
