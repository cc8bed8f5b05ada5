//! `endpoints health`: which endpoints fail, across tenants.

use std::process::ExitCode;

use clap::Args;
use postrider_client::{Client, EndpointStatus, HealthFilter, PageOf};
use postrider_proto::state::{CircuitState, HealthStatus};

use crate::{
    output::{BAD, GOOD, SOFT, STRONG, WARNING, json_line},
    reach::{Failure, Reach},
    settings::Environment,
};

const PAGE_MAX: usize = 1_000;
const SHOWN_MAX: i64 = 100_000;

#[derive(Args)]
pub struct HealthArguments {
    /// Which ones: failing, healthy, paused, disabled, open (circuit), top (most failures in the last hour) or all
    #[arg(default_value = "failing", value_parser = parse_which)]
    which: Which,
    /// Only endpoints of this tenant [default: of all tenants]
    #[arg(long, short)]
    tenant: Option<String>,
    /// Show at most this many
    #[arg(long, short = 'n', default_value_t = 100, value_parser = clap::value_parser!(i64).range(1..=SHOWN_MAX))]
    limit: i64,
    #[command(flatten)]
    reach: Reach,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    Status(HealthStatus),
    Open,
    Top,
    All,
}

fn parse_which(text: &str) -> Result<Which, String> {
    let status = HealthStatus::ALL.iter().find(|status| status.as_str() == text);
    match (status, text) {
        (Some(status), _) => Ok(Which::Status(*status)),
        (None, "open") => Ok(Which::Open),
        (None, "top") => Ok(Which::Top),
        (None, "all") => Ok(Which::All),
        _ => Err("must be failing, healthy, paused, disabled, open, top or all".to_owned()),
    }
}

pub(crate) async fn run(arguments: &HealthArguments, environment: &Environment) -> Result<ExitCode, Failure> {
    let done = async {
        let client = arguments.reach.client(environment)?;
        show(&client, arguments).await
    };
    done.await.map_err(|error| arguments.reach.failure(error))
}

async fn show(client: &Client, arguments: &HealthArguments) -> anyhow::Result<ExitCode> {
    let (found, more) = fetch(client, arguments).await?;
    if arguments.reach.json {
        found.iter().for_each(json_line);
        return Ok(ExitCode::SUCCESS);
    }
    found.iter().for_each(print);
    match (found.is_empty(), more) {
        (true, _) => println!("No such endpoints."),
        (false, true) => anstream::println!("{SOFT}There may be more: see --limit.{SOFT:#}"),
        (false, false) => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// At most as many as asked for, and whether there may be more.
async fn fetch(client: &Client, arguments: &HealthArguments) -> anyhow::Result<(Vec<EndpointStatus>, bool)> {
    let limit = arguments.limit as usize;
    let filter = HealthFilter {
        health: match arguments.which {
            Which::Status(status) => Some(status),
            Which::Open | Which::Top | Which::All => None,
        },
        circuit: (arguments.which == Which::Open).then_some(CircuitState::Open),
        tenant: arguments.tenant.clone(),
        most_failures_first: arguments.which == Which::Top,
    };
    let mut found = Vec::new();
    let mut page = PageOf::limit(limit.min(PAGE_MAX) as u32);
    loop {
        let next = client.endpoint_health(&filter, &page).await?;
        found.extend(next.data);
        if found.len() > limit {
            found.truncate(limit);
            return Ok((found, true));
        }
        match next.next_cursor {
            Some(_) if found.len() == limit => return Ok((found, true)),
            Some(cursor) => page.cursor = Some(cursor),
            None => return Ok((found, false)),
        }
    }
}

fn print(one: &EndpointStatus) {
    let style = match one.health.status {
        HealthStatus::Healthy => GOOD,
        HealthStatus::Paused => WARNING,
        HealthStatus::Failing | HealthStatus::Disabled => BAD,
    };
    let circuit = match one.health.circuit {
        CircuitState::Open => " circuit open",
        CircuitState::Closed => "",
    };
    let since = one
        .health
        .failing_since
        .map(|at| format!(" since {}", at.format("%F %T UTC")));
    let (hour, mut kinds) = (&one.last_hour, String::new());
    for (kind, count) in &hour.failures {
        kinds.push_str(&format!(", {count} {kind}"));
    }
    anstream::println!(
        "{STRONG}{} {}{STRONG:#} {style}{}{circuit}{style:#}{} {} {SOFT}last hour: {} delivered, {} failed{kinds}{SOFT:#}",
        one.tenant,
        one.id,
        one.health.status,
        since.unwrap_or_default(),
        one.url,
        hour.delivered,
        hour.failed,
    );
}
