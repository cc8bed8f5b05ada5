//! How a tool reaches the API, and in which tenant it works.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use postrider_client::{Client, PageOf};

use crate::settings::Environment;

const DEFAULT_URL: &str = "http://127.0.0.1:8080";
const KEY: &str = "POSTRIDER_API_KEY";
/// Named in an error that asks for one of them.
const TENANTS_TOLD_MAX: u32 = 10;

/// The key is in POSTRIDER_API_KEY, or in the file that POSTRIDER_API_KEY_FILE names.
#[derive(Args)]
pub(crate) struct Reach {
    /// Where the API is [default: http://127.0.0.1:8080]
    #[arg(long, env = "POSTRIDER_URL")]
    url: Option<String>,
    /// Write JSON, for programs
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub(crate) struct InTenant {
    #[command(flatten)]
    pub(crate) reach: Reach,
    /// Whose; may be left out where there is only one
    #[arg(long, short, env = "POSTRIDER_TENANT")]
    tenant: Option<String>,
}

/// What went wrong, and whether it is told to a program.
pub(crate) struct Failure {
    pub(crate) error: anyhow::Error,
    pub(crate) json: bool,
}

impl Reach {
    pub(crate) fn client(&self, environment: &Environment) -> anyhow::Result<Client> {
        let url = self.url.as_deref().map(str::trim).filter(|url| !url.is_empty());
        let key = match environment.secret(KEY)? {
            Some(key) => key,
            None => key_of_this_machine(environment, url).with_context(|| {
                format!(
                    "{KEY} or {KEY}_FILE is not set: it has the API key to use{}",
                    hint(environment)
                )
            })?,
        };
        Ok(Client::new(url.unwrap_or(DEFAULT_URL), &key)?)
    }

    pub(crate) fn failure(&self, error: anyhow::Error) -> Failure {
        Failure {
            error,
            json: self.json,
        }
    }
}

/// At another address it may be another's: its key is not sent there unasked.
fn hint(environment: &Environment) -> String {
    let file = key_file(environment);
    match file.exists() {
        true => format!(". That of the installation here: {KEY}_FILE={}", file.display()),
        false => String::new(),
    }
}

fn key_file(environment: &Environment) -> PathBuf {
    let folder = environment.get("POSTRIDER_DATA_DIR").unwrap_or(".postrider");
    Path::new(folder).join("admin-api-key")
}

/// `postrider up` on its own database keeps its key in a file: beside it no key has to be set.
fn key_of_this_machine(environment: &Environment, url: Option<&str>) -> Option<String> {
    if url.is_some_and(|url| url.trim_end_matches('/') != DEFAULT_URL) {
        return None;
    }
    let key = std::fs::read_to_string(key_file(environment)).ok()?;
    Some(key.trim().to_owned()).filter(|key| !key.is_empty())
}

impl InTenant {
    /// The client, and the tenant: the one that was named, or the only one there is.
    pub(crate) async fn open(&self, environment: &Environment) -> anyhow::Result<(Client, String)> {
        let client = self.reach.client(environment)?;
        if let Some(tenant) = self
            .tenant
            .as_deref()
            .map(str::trim)
            .filter(|name| !name.is_empty())
        {
            return Ok((client, tenant.to_owned()));
        }
        let page = match client.tenants(&PageOf::limit(TENANTS_TOLD_MAX)).await {
            Ok(page) => page,
            // Only admin keys may list tenants.
            Err(error) if error.problem().is_some_and(|problem| problem.status == 403) => {
                bail!("say whose: --tenant ID, or POSTRIDER_TENANT")
            }
            Err(error) => return Err(error.into()),
        };
        let names: Vec<&str> = page.data.iter().map(|tenant| tenant.id.as_str()).collect();
        match names[..] {
            [] => Err(anyhow!(
                "there is no tenant yet: make one with PUT /v1/tenants/ID"
            )),
            [one] => Ok((client, one.to_owned())),
            _ => Err(anyhow!(
                "say whose: --tenant ID, or POSTRIDER_TENANT. There are {}",
                names.join(", ")
            )),
        }
    }
}
