//! `replay`: one delivery, or all that a filter names. Many are counted first and sent only with `--yes`.

use std::{process::ExitCode, time::Duration};

use anyhow::bail;
use chrono::{DateTime, Utc};
use clap::Args;
use postrider_client::{Client, NewReplay, Replay};

use super::{
    endpoints::find,
    output::{json_line, progress, told_to_stop},
    reach::{Failure, InTenant},
};
use crate::settings::Environment;

const LOOK_EVERY: Duration = Duration::from_millis(300);

#[derive(Args)]
pub(crate) struct ReplayArguments {
    /// One delivery, dlv_…; without it the filters say which
    delivery: Option<String>,
    /// Of this endpoint: its id or its URL
    #[arg(long, conflicts_with = "delivery")]
    endpoint: Option<String>,
    /// In this state: dead, delivered or pending [default: dead]
    #[arg(long, conflicts_with_all = ["delivery", "missing"], value_parser = ["dead", "delivered", "pending"])]
    state: Option<String>,
    /// Of this event type
    #[arg(long = "type", conflicts_with = "delivery")]
    type_name: Option<String>,
    /// Of events from then on, like 2026-05-28T10:00:00Z
    #[arg(long, conflicts_with = "delivery")]
    since: Option<DateTime<Utc>>,
    /// Of events before then
    #[arg(long, conflicts_with = "delivery")]
    until: Option<DateTime<Utc>>,
    /// What the endpoint never got
    #[arg(long, conflicts_with = "delivery", requires = "endpoint")]
    missing: bool,
    /// Send what was counted
    #[arg(long, conflicts_with = "delivery")]
    yes: bool,
    /// Do not wait until they are sent
    #[arg(long, requires = "yes")]
    no_wait: bool,
    #[command(flatten)]
    at: InTenant,
}

pub(crate) async fn run(arguments: ReplayArguments, environment: &Environment) -> Result<ExitCode, Failure> {
    replay(&arguments, environment)
        .await
        .map_err(|error| arguments.at.reach.failure(error))
}

async fn replay(arguments: &ReplayArguments, environment: &Environment) -> anyhow::Result<ExitCode> {
    let (client, tenant) = arguments.at.open(environment).await?;
    let json = arguments.at.reach.json;
    if let Some(id) = &arguments.delivery {
        let delivery = client.replay_delivery(&tenant, id).await?;
        if json {
            json_line(&delivery);
        } else {
            println!(
                "{} is {} again",
                delivery.delivery.id,
                delivery.delivery.state.as_str()
            );
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut asked = NewReplay {
        kind: arguments.missing.then(|| "missing".to_owned()),
        endpoint: match &arguments.endpoint {
            Some(named) => Some(find(&client, &tenant, named).await?.id),
            None => None,
        },
        state: match (arguments.missing, &arguments.state) {
            (true, _) => None,
            (false, state) => Some(state.clone().unwrap_or_else(|| "dead".to_owned())),
        },
        type_name: arguments.type_name.clone(),
        since: arguments.since,
        until: arguments.until,
        dry_run: Some(true),
    };
    if !arguments.yes {
        let counted = client.start_replay(&tenant, &asked).await?;
        if json {
            json_line(&counted);
        } else {
            println!(
                "{} would be sent. Run it again with --yes to send them.",
                counted.total
            );
        }
        return Ok(ExitCode::SUCCESS);
    }
    asked.dry_run = None;
    let started = client.start_replay(&tenant, &asked).await?;
    let ended = match arguments.no_wait {
        true => started,
        false => wait(&client, &tenant, started).await?,
    };
    if json {
        json_line(&ended);
    } else {
        println!(
            "{} of {} sent; the replay {} is {}",
            ended.done,
            ended.total,
            ended.id.as_deref().unwrap_or_default(),
            ended.state.as_deref().unwrap_or_default()
        );
    }
    Ok(ExitCode::SUCCESS)
}

async fn wait(client: &Client, tenant: &str, mut replay: Replay) -> anyhow::Result<Replay> {
    let bar = progress(replay.total.max(0) as u64, "replaying");
    let mut stop = std::pin::pin!(told_to_stop());
    loop {
        bar.set_length(replay.total.max(0) as u64);
        bar.set_position(replay.done.max(0) as u64);
        if !matches!(replay.state.as_deref(), Some("running" | "pending" | "queued")) {
            bar.finish_and_clear();
            return Ok(replay);
        }
        let Some(id) = replay.id.clone() else {
            bail!("the server started a replay without an id");
        };
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            () = &mut stop => {
                bar.abandon();
                // It is the server's job: it goes on without us.
                return Ok(replay);
            }
        }
        replay = client.replay(tenant, &id).await?;
    }
}
