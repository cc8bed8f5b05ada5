//! `endpoints`: list, create, pause, resume, delete, test. `endpoint_health.rs` has `health`.

use std::process::ExitCode;

use anyhow::bail;
use clap::{Args, Subcommand};
use postrider_client::{Client, Endpoint, EndpointSettings, PageOf};
use postrider_proto::{EndpointState, state::SignatureFormat};

use crate::{
    endpoint_health::{self, HealthArguments},
    output::{BAD, GOOD, SOFT, STRONG, WARNING, json_line, show, status_style},
    reach::{Failure, InTenant},
    settings::Environment,
};

const PAGE: u32 = 1_000;

#[derive(Subcommand)]
pub enum EndpointsCommand {
    /// List endpoints
    List(InTenant),
    /// Show which endpoints fail, of all tenants
    Health(HealthArguments),
    /// Create an endpoint and show its secret
    Create(CreateArguments),
    /// Pause an endpoint: deliveries are queued
    Pause(OneEndpoint),
    /// Resume an endpoint: queued deliveries are sent
    Resume(OneEndpoint),
    /// Delete an endpoint; returns once no new requests to it are started
    Delete(OneEndpoint),
    /// Send a test event now
    Test(TestArguments),
}

#[derive(Args)]
pub struct CreateArguments {
    /// URL that events are sent to
    #[arg(value_name = "URL")]
    endpoint: String,
    /// Event types: invoice.paid, invoice.*, * [default: *]
    #[arg(long, value_delimiter = ',')]
    types: Vec<String>,
    /// Description shown in the dashboard
    #[arg(long)]
    description: Option<String>,
    /// Signature format: t-v1, standard or standard-ed25519 [default: t-v1]
    #[arg(long, value_parser = parse_signature)]
    signature: Option<SignatureFormat>,
    /// Max. concurrent requests
    #[arg(long)]
    concurrency: Option<u16>,
    /// Max. requests per second
    #[arg(long)]
    rate_per_second: Option<u32>,
    /// Send events with the same ordering key one at a time, in order
    #[arg(long)]
    ordered: bool,
    #[command(flatten)]
    at: InTenant,
}

#[derive(Args)]
pub struct OneEndpoint {
    /// Endpoint id (ep_…) or URL
    endpoint: String,
    #[command(flatten)]
    at: InTenant,
}

#[derive(Args)]
pub struct TestArguments {
    /// Endpoint id (ep_…) or URL
    endpoint: String,
    /// Event type [default: the first the endpoint subscribes to]
    #[arg(long = "type")]
    type_name: Option<String>,
    #[command(flatten)]
    at: InTenant,
}

pub(crate) fn parse_signature(text: &str) -> Result<SignatureFormat, String> {
    let mut formats = SignatureFormat::ALL.iter().copied();
    let found = formats.find(|format| format.as_str() == text);
    found.ok_or_else(|| "must be t-v1, standard or standard-ed25519".to_owned())
}

pub(crate) async fn run(command: EndpointsCommand, environment: &Environment) -> Result<ExitCode, Failure> {
    let at = match &command {
        EndpointsCommand::Health(arguments) => return endpoint_health::run(arguments, environment).await,
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
            EndpointsCommand::Health(_) | EndpointsCommand::List(_) => list(&client, &tenant, json).await,
            EndpointsCommand::Create(arguments) => create(&client, &tenant, arguments).await,
            EndpointsCommand::Pause(one) => enable(&client, &tenant, one, false).await,
            EndpointsCommand::Resume(one) => enable(&client, &tenant, one, true).await,
            EndpointsCommand::Delete(one) => {
                let endpoint = find(&client, &tenant, &one.endpoint).await?;
                client.delete_endpoint(&tenant, &endpoint.id).await?;
                let deleted = serde_json::json!({"id": endpoint.id, "deleted": true});
                show(json, &deleted, || println!("{} deleted", endpoint.id));
                Ok(ExitCode::SUCCESS)
            }
            EndpointsCommand::Test(arguments) => test(&client, &tenant, arguments).await,
        }
    };
    done.await.map_err(|error| at.reach.failure(error))
}

pub(crate) async fn find(client: &Client, tenant: &str, named: &str) -> anyhow::Result<Endpoint> {
    if named.starts_with("ep_") {
        return Ok(client.endpoint(tenant, named).await?);
    }
    // The API stores URLs in normalised form.
    let url = url::Url::parse(named).map_or_else(|_| named.to_owned(), String::from);
    let all = all(client, tenant).await?;
    let mut found = all.into_iter().filter(|endpoint| endpoint.url == url);
    match (found.next(), found.next()) {
        (Some(one), None) => Ok(one),
        (Some(_), Some(_)) => bail!("{tenant} has several endpoints with this URL: use the id instead"),
        (None, _) if url::Url::parse(named).is_err() => bail!(
            "{tenant} has no endpoint {named}: expected an id or a URL. List them with `postrider endpoints list --tenant {tenant}`"
        ),
        (None, _) => bail!(
            "{tenant} has no endpoint {named}. Only registered endpoints can be used: register it with \
             `postrider endpoints create {named} --tenant {tenant}`"
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
            EndpointState::Paused => WARNING,
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
        println!("{tenant} has no endpoints. Create one with `postrider endpoints create URL`.");
    }
    Ok(ExitCode::SUCCESS)
}

async fn create(client: &Client, tenant: &str, arguments: &CreateArguments) -> anyhow::Result<ExitCode> {
    let settings = EndpointSettings {
        url: Some(Some(arguments.endpoint.clone())),
        description: arguments.description.clone().map(Some),
        types: (!arguments.types.is_empty()).then(|| Some(arguments.types.clone())),
        signature: arguments.signature.map(|format| Some(format.to_string())),
        concurrency: arguments.concurrency.map(|n| Some(n.into())),
        rate_per_second: arguments.rate_per_second.map(|n| Some(n.into())),
        ordered: arguments.ordered.then_some(Some(true)),
        ..EndpointSettings::default()
    };
    let created = client.create_endpoint(tenant, &settings).await?;
    show(arguments.at.reach.json, &created, || {
        anstream::println!("{STRONG}{}{STRONG:#} {}", created.id, created.url);
        match (&created.secret, &created.public_key) {
            (Some(secret), _) => println!("Signing secret: {secret}"),
            (None, Some(key)) => println!("Public key: {key}"),
            (None, None) => {}
        }
    });
    Ok(ExitCode::SUCCESS)
}

async fn enable(client: &Client, tenant: &str, one: &OneEndpoint, enabled: bool) -> anyhow::Result<ExitCode> {
    let endpoint = find(client, tenant, &one.endpoint).await?;
    let settings = EndpointSettings {
        enabled: Some(Some(enabled)),
        ..EndpointSettings::default()
    };
    let changed = client.update_endpoint(tenant, &endpoint.id, &settings).await?;
    let state = || println!("{} is {}", changed.id, changed.state);
    show(one.at.reach.json, &changed, state);
    Ok(ExitCode::SUCCESS)
}

/// Status 1 when the receiver did not accept it.
async fn test(client: &Client, tenant: &str, arguments: &TestArguments) -> anyhow::Result<ExitCode> {
    let endpoint = find(client, tenant, &arguments.endpoint).await?;
    let sent = client
        .test_endpoint(tenant, &endpoint.id, arguments.type_name.as_deref())
        .await?;
    let attempt = &sent.attempt;
    show(arguments.at.reach.json, &sent, || {
        let style = status_style(attempt.status.map(i64::from));
        let result = match (attempt.status, &attempt.error) {
            (Some(status), _) => &status.to_string(),
            (None, Some(error)) => error,
            (None, None) => &attempt.outcome,
        };
        let (type_name, event, ms) = (&sent.r#type, &sent.event, attempt.duration_ms);
        anstream::println!("{type_name} {event} {style}{result}{style:#} {SOFT}{ms} ms{SOFT:#}");
    });
    Ok(match attempt.outcome.as_str() {
        "accepted" => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}
