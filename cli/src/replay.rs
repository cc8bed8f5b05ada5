//! `replay`: one delivery, or all that match a filter. Many are counted first and sent only with `--yes`.

use std::{process::ExitCode, time::Duration};

use chrono::{DateTime, Utc};
use clap::Args;
use postrider_client::{Client, NewReplay, Replay};
use postrider_proto::ReplayState;

use crate::{
    endpoints::find,
    output::{progress, show, stop_signal},
    reach::{Failure, InTenant},
    settings::Environment,
};

const POLL_INTERVAL: Duration = Duration::from_millis(300);

#[derive(Args)]
pub struct ReplayArguments {
    /// Delivery id (dlv_…); omit it to use the filters
    delivery: Option<String>,
    /// Only this endpoint: id or URL
    #[arg(long, conflicts_with = "delivery")]
    endpoint: Option<String>,
    /// Only deliveries in this state: dead, delivered or pending [default: dead]
    #[arg(long, conflicts_with_all = ["delivery", "missing"], value_parser = ["dead", "delivered", "pending"])]
    state: Option<String>,
    /// Only this event type
    #[arg(long = "type", conflicts_with = "delivery")]
    type_name: Option<String>,
    /// Only events since this time, like 2026-05-28T10:00:00Z
    #[arg(long, conflicts_with = "delivery")]
    since: Option<DateTime<Utc>>,
    /// Only events before this time
    #[arg(long, conflicts_with = "delivery")]
    until: Option<DateTime<Utc>>,
    /// Missed events, from before the endpoint existed or while it was disabled
    #[arg(long, conflicts_with = "delivery", requires = "endpoint")]
    missing: bool,
    /// Start the replay; without this, matching deliveries are only counted
    #[arg(long, conflicts_with = "delivery")]
    yes: bool,
    /// Return at once instead of waiting until everything has been sent
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
        let (id, state) = (&delivery.delivery.id, delivery.delivery.state.as_str());
        show(json, &delivery, || println!("{id} is {state} again"));
        return Ok(ExitCode::SUCCESS);
    }
    let time = |time: DateTime<Utc>| time.to_rfc3339();
    let request = NewReplay {
        kind: arguments.missing.then(|| "missing".to_owned()),
        endpoint: match &arguments.endpoint {
            Some(named) => Some(find(&client, &tenant, named).await?.id),
            None => None,
        },
        state: match (arguments.missing, &arguments.state) {
            (true, _) => None,
            (false, state) => Some(state.clone().unwrap_or_else(|| "dead".to_owned())),
        },
        r#type: arguments.type_name.clone(),
        since: arguments.since.map(time),
        until: arguments.until.map(time),
        ..NewReplay::default()
    };
    if !arguments.yes {
        let counted = client.preview_replay(&tenant, &request).await?;
        show(json, &counted, || println!("{}", counted_sentence(counted.total)));
        return Ok(ExitCode::SUCCESS);
    }
    let started = client.start_replay(&tenant, &request).await?;
    let ended = match arguments.no_wait {
        true => started,
        false => wait(&client, &tenant, started).await?,
    };
    show(json, &ended, || {
        println!(
            "{} of {} sent; replay {} is {}",
            ended.done, ended.total, ended.id, ended.state
        );
    });
    Ok(ExitCode::SUCCESS)
}

fn counted_sentence(total: i64) -> String {
    match total {
        0 => "Nothing to replay.".to_owned(),
        1 => "1 delivery will be replayed. Run again with --yes to send it.".to_owned(),
        _ => format!("{total} deliveries will be replayed. Run again with --yes to send them."),
    }
}

async fn wait(client: &Client, tenant: &str, mut replay: Replay) -> anyhow::Result<Replay> {
    let bar = progress(replay.total.max(0) as u64, "replaying");
    let mut stop = std::pin::pin!(stop_signal());
    loop {
        bar.set_length(replay.total.max(0) as u64);
        bar.set_position(replay.done.max(0) as u64);
        if replay.state != ReplayState::Running {
            bar.finish_and_clear();
            return Ok(replay);
        }
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL) => {}
            () = &mut stop => {
                bar.abandon();
                // The server continues the replay on its own.
                return Ok(replay);
            }
        }
        replay = client.replay(tenant, &replay.id).await?;
    }
}
