//! `emit`: one event, with the given data or a sample generated from the type's schema.

use std::{io::Read, process::ExitCode};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use postrider_client::{Client, NewEvent};
use postrider_proto::limits::EVENT_DATA_BYTES_MAX;

use crate::{
    output::{GOOD, SOFT, show},
    reach::{Failure, InTenant},
    settings::Environment,
};

#[derive(Args)]
pub struct EmitArguments {
    /// Event type, like invoice.paid
    #[arg(value_name = "TYPE")]
    type_name: String,
    /// JSON object, @FILE, or - for standard input [default: a sample generated from the type's schema]
    #[arg(long, short)]
    data: Option<String>,
    /// Your own stable id; a second event with the same id is not sent
    #[arg(long)]
    id: Option<String>,
    /// Schema version [default: the newest of the type]
    #[arg(long)]
    version: Option<String>,
    /// Events with the same key are delivered in order to ordered endpoints
    #[arg(long)]
    ordering_key: Option<String>,
    #[command(flatten)]
    at: InTenant,
}

pub(crate) async fn run(arguments: EmitArguments, environment: &Environment) -> Result<ExitCode, Failure> {
    emit(&arguments, environment)
        .await
        .map_err(|error| arguments.at.reach.failure(error))
}

async fn emit(arguments: &EmitArguments, environment: &Environment) -> anyhow::Result<ExitCode> {
    let (client, tenant) = arguments.at.open(environment).await?;
    let data = match &arguments.data {
        Some(given) => read(given)?,
        None => sample(&client, &arguments.type_name, arguments.version.as_deref()).await?,
    };
    serde_json::from_str::<serde_json::Map<_, _>>(&data).context("the data is not a JSON object")?;
    let mut event = NewEvent::new(&arguments.type_name, &data);
    if let Some(id) = &arguments.id {
        event = event.id(id);
    }
    if let Some(version) = &arguments.version {
        event = event.version(version);
    }
    if let Some(key) = &arguments.ordering_key {
        event = event.ordering_key(key);
    }
    let emitted = client.emit(&tenant, &event).await?;
    show(arguments.at.reach.json, &emitted, || {
        let (id, type_name, version) = (&emitted.id, &emitted.r#type, &emitted.version);
        anstream::println!("{GOOD}{id}{GOOD:#} {type_name} {version}\n{SOFT}{data}{SOFT:#}");
    });
    Ok(ExitCode::SUCCESS)
}

fn read(given: &str) -> anyhow::Result<String> {
    let mut text = String::new();
    let limit = EVENT_DATA_BYTES_MAX as u64 + 1;
    match given.strip_prefix('@') {
        Some(path) => {
            let file = std::fs::File::open(path).with_context(|| format!("cannot open {path}"))?;
            file.take(limit)
                .read_to_string(&mut text)
                .with_context(|| format!("cannot read {path}"))?;
        }
        None if given == "-" => {
            std::io::stdin()
                .take(limit)
                .read_to_string(&mut text)
                .context("cannot read standard input")?;
        }
        None => text = given.to_owned(),
    }
    if text.len() > EVENT_DATA_BYTES_MAX {
        bail!("the data is too large. The limit is {EVENT_DATA_BYTES_MAX} bytes");
    }
    Ok(text)
}

async fn sample(client: &Client, type_name: &str, version: Option<&str>) -> anyhow::Result<String> {
    let found = client.event_type(type_name).await?;
    let newest = found.versions.last().map(String::as_str);
    let version = version.or(newest).context("the type has no versions")?;
    let schema = found.schemas.as_ref().and_then(|schemas| schemas.get(version));
    let schema = schema.with_context(|| {
        let versions = found.versions.join(", ");
        format!("{type_name} has no version {version}. Available: {versions}")
    })?;
    let schema = serde_json::from_str(schema.get()).context("cannot parse the schema")?;
    postrider_sender::sample(&schema).map_err(|violations| {
        let first = violations.iter().take(3);
        let reasons: Vec<String> = first
            .map(|one| format!("{} {}", one.pointer, one.message))
            .collect();
        let reasons = reasons.join("; ");
        anyhow!("no sample could be generated for the schema, pass --data instead: {reasons}")
    })
}
