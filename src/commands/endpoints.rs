//! `endpoints`: list, create, pause, resume, delete, test.

use std::process::ExitCode;

use anyhow::bail;
use clap::{Args, Subcommand};
use postrider_client::{Client, Endpoint, EndpointSettings, PageOf};
use postrider_proto::{EndpointState, state::SignatureFormat};

use super::{
    output::{BAD, GOOD, SOFT, STRONG, WAIT, json_line, status_style},
    reach::{Failure, InTenant},
};
use crate::settings::Environment;

const PAGE: u32 = 1_000;

#[derive(Subcommand)]
pub(crate) enum EndpointsCommand {
    /// Lists a tenant's endpoints
    List(InTenant),
    /// Makes an endpoint and shows its secret
    Create(CreateArguments),
    /// Sends nothing more to it; deliveries wait
    Pause(OneEndpoint),
    /// Sends what has waited
    Resume(OneEndpoint),
    /// Deletes it; answers when no more requests to it are begun
    Delete(OneEndpoint),
    /// Sends it one test event now
    Test(TestArguments),
}

#[derive(Args)]
pub(crate) struct CreateArguments {
    /// Where events are to be sent
    #[arg(value_name = "URL")]
    endpoint: String,
    /// Types it wants: invoice.paid, invoice.*, * [default: *]
    #[arg(long, value_delimiter = ',')]
    types: Vec<String>,
    #[arg(long)]
    description: Option<String>,
    /// t-v1, standard or standard-ed25519 [default: t-v1]
    #[arg(long, value_parser = parse_signature)]
    signature: Option<SignatureFormat>,
    /// Requests on the wire at once
    #[arg(long)]
    concurrency: Option<u16>,
    #[arg(long)]
    rate_per_second: Option<u32>,
    /// Events of an ordering key one at a time
    #[arg(long)]
    ordered: bool,
    #[command(flatten)]
    at: InTenant,
}

#[derive(Args)]
pub(crate) struct OneEndpoint {
    /// Its id, ep_…, or its URL
    endpoint: String,
    #[command(flatten)]
    at: InTenant,
}

#[derive(Args)]
pub(crate) struct TestArguments {
    /// Its id, ep_…, or its URL
    endpoint: String,
    /// The event type [default: the first it wants]
    #[arg(long = "type")]
    type_name: Option<String>,
    #[command(flatten)]
    at: InTenant,
}

pub(super) fn parse_signature(text: &str) -> Result<SignatureFormat, String> {
    SignatureFormat::ALL
        .iter()
        .copied()
        .find(|format| format.as_str() == text)
        .ok_or_else(|| "it is t-v1, standard or standard-ed25519".to_owned())
}

pub(crate) async fn run(command: EndpointsCommand, environment: &Environment) -> Result<ExitCode, Failure> {
    let at = match &command {
        EndpointsCommand::List(at) => at,
        EndpointsCommand::Create(arguments) => &arguments.at,
        EndpointsCommand::Pause(one) | EndpointsCommand::Resume(one) | EndpointsCommand::Delete(one) => {
            &one.at
        }
        EndpointsCommand::Test(arguments) => &arguments.at,
    };
    let done = async {
        let (client, tenant) = at.open(environment).await?;
        let json = at.reach.json;
        match &command {
            EndpointsCommand::List(_) => list(&client, &tenant, json).await,
            EndpointsCommand::Create(arguments) => create(&client, &tenant, arguments).await,
            EndpointsCommand::Pause(one) => enable(&client, &tenant, one, false).await,
            EndpointsCommand::Resume(one) => enable(&client, &tenant, one, true).await,
            EndpointsCommand::Delete(one) => {
                let endpoint = find(&client, &tenant, &one.endpoint).await?;
                client.delete_endpoint(&tenant, &endpoint.id).await?;
                if json {
                    json_line(&serde_json::json!({"id": endpoint.id, "deleted": true}));
                } else {
                    println!("{} is deleted", endpoint.id);
                }
                Ok(ExitCode::SUCCESS)
            }
            EndpointsCommand::Test(arguments) => test(&client, &tenant, arguments).await,
        }
    };
    done.await.map_err(|error| at.reach.failure(error))
}

/// By its id or its URL.
pub(super) async fn find(client: &Client, tenant: &str, named: &str) -> anyhow::Result<Endpoint> {
    if named.starts_with("ep_") {
        return Ok(client.endpoint(tenant, named).await?);
    }
    // The API keeps URLs in the form that the parser writes.
    let url = url::Url::parse(named).map_or_else(|_| named.to_owned(), String::from);
    let all = all(client, tenant).await?;
    let mut found = all.into_iter().filter(|endpoint| endpoint.url == url);
    match (found.next(), found.next()) {
        (Some(one), None) => Ok(one),
        (Some(_), Some(_)) => bail!("{tenant} has several endpoints with that URL: name one by its id"),
        (None, _) if url::Url::parse(named).is_err() => bail!(
            "{tenant} has no endpoint {named}: an endpoint is named by its id or its URL. `postrider endpoints list --tenant \
             {tenant}` shows them"
        ),
        (None, _) => bail!(
            "{tenant} has no endpoint {named}. Only registered endpoints are sent to: \
             `postrider endpoints create {named} --tenant {tenant}` registers it"
        ),
    }
}

async fn all(client: &Client, tenant: &str) -> anyhow::Result<Vec<Endpoint>> {
    let mut page = PageOf::limit(PAGE);
    let mut all = Vec::new();
    loop {
        let found = client.endpoints(tenant, &page).await?;
        all.extend(found.data);
        match found.next_cursor {
            Some(cursor) => page.cursor = Some(cursor),
            None => return Ok(all),
        }
    }
}

async fn list(client: &Client, tenant: &str, json: bool) -> anyhow::Result<ExitCode> {
    let all = all(client, tenant).await?;
    for endpoint in &all {
        if json {
            json_line(endpoint);
            continue;
        }
        let style = match endpoint.state {
            EndpointState::Active => GOOD,
            EndpointState::Paused => WAIT,
            EndpointState::Disabled | EndpointState::Deleted => BAD,
        };
        anstream::println!(
            "{STRONG}{}{STRONG:#} {style}{:8}{style:#} {} {SOFT}{}{SOFT:#}",
            endpoint.id,
            endpoint.state.as_str(),
            endpoint.url,
            endpoint.types.join(" ")
        );
    }
    if all.is_empty() && !json {
        println!("{tenant} has no endpoints. `postrider endpoints create URL` makes one.");
    }
    Ok(ExitCode::SUCCESS)
}

async fn create(client: &Client, tenant: &str, arguments: &CreateArguments) -> anyhow::Result<ExitCode> {
    let settings = EndpointSettings {
        url: Some(arguments.endpoint.clone()),
        description: arguments.description.clone(),
        types: (!arguments.types.is_empty()).then(|| arguments.types.clone()),
        signature: arguments.signature,
        concurrency: arguments.concurrency,
        rate_per_second: arguments.rate_per_second,
        ordered: arguments.ordered.then_some(true),
        ..EndpointSettings::default()
    };
    let made = client.create_endpoint(tenant, &settings).await?;
    if arguments.at.reach.json {
        json_line(&made);
        return Ok(ExitCode::SUCCESS);
    }
    anstream::println!("{STRONG}{}{STRONG:#} {}", made.id, made.url);
    match (&made.secret, &made.public_key) {
        (Some(secret), _) => println!("The receiver verifies with {secret}"),
        (None, Some(key)) => println!("The receiver verifies with the public key {key}"),
        (None, None) => {}
    }
    Ok(ExitCode::SUCCESS)
}

async fn enable(client: &Client, tenant: &str, one: &OneEndpoint, enabled: bool) -> anyhow::Result<ExitCode> {
    let endpoint = find(client, tenant, &one.endpoint).await?;
    let settings = EndpointSettings {
        enabled: Some(enabled),
        ..EndpointSettings::default()
    };
    let changed = client.update_endpoint(tenant, &endpoint.id, &settings).await?;
    if one.at.reach.json {
        json_line(&changed);
    } else {
        println!("{} is {}", changed.id, changed.state);
    }
    Ok(ExitCode::SUCCESS)
}

/// Status 1 when the receiver did not take it.
async fn test(client: &Client, tenant: &str, arguments: &TestArguments) -> anyhow::Result<ExitCode> {
    let endpoint = find(client, tenant, &arguments.endpoint).await?;
    let sent = client
        .test_endpoint(tenant, &endpoint.id, arguments.type_name.as_deref())
        .await?;
    let attempt = &sent.attempt;
    if arguments.at.reach.json {
        json_line(&sent);
    } else {
        let style = status_style(attempt.status.map(i64::from));
        let answer = match (attempt.status, &attempt.error) {
            (Some(status), _) => status.to_string(),
            (None, Some(error)) => error.clone(),
            (None, None) => attempt.outcome.clone(),
        };
        anstream::println!(
            "{} {} {style}{answer}{style:#} {SOFT}{} ms{SOFT:#}",
            sent.type_name,
            sent.event,
            attempt.duration_ms
        );
    }
    Ok(match attempt.outcome.as_str() {
        "accepted" => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}
