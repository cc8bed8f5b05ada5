//! How a tool reaches the API, and the tenant it works in.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use postrider_client::{Client, PageOf};

use crate::settings::{API_KEY, Environment, Fallback, TENANT, URL};

/// Tenants named in an error that asks for one of them.
const TENANTS_NAMED_MAX: u32 = 10;

/// The API key is read from POSTRIDER_API_KEY, or from the file that POSTRIDER_API_KEY_FILE names.
#[derive(Args)]
pub(crate) struct Reach {
    #[arg(long, env = URL.variable, help = URL.flag_help())]
    url: Option<String>,
    /// Output JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args)]
pub struct InTenant {
    #[command(flatten)]
    pub(crate) reach: Reach,
    #[arg(long, short, env = TENANT.variable, help = TENANT.flag_help())]
    tenant: Option<String>,
}

pub(crate) struct Failure {
    pub(crate) error: anyhow::Error,
    /// Report it as JSON.
    pub(crate) json: bool,
    /// The arguments are at fault.
    pub(crate) usage: bool,
}

impl Reach {
    pub(crate) fn client(&self, environment: &Environment) -> anyhow::Result<Client> {
        let given = self.url.as_deref().map(str::trim).filter(|url| !url.is_empty());
        let is_default = given.is_none_or(|url| url.trim_end_matches('/') == default_url());
        let key = match environment.secret(&API_KEY)? {
            Some(key) => key,
            None => local_key(environment, is_default).with_context(|| missing_key(environment))?,
        };
        Ok(Client::new(given.unwrap_or(default_url()), &key)?)
    }

    pub(crate) fn failure(&self, error: anyhow::Error) -> Failure {
        Failure {
            error,
            json: self.json,
            usage: false,
        }
    }
}

fn default_url() -> &'static str {
    match URL.default {
        Fallback::Value(url) => url,
        Fallback::Described(_) => "",
    }
}

fn key_file(environment: &Environment) -> PathBuf {
    let folder = environment.get("POSTRIDER_DATA_DIR").unwrap_or(".postrider");
    Path::new(folder).join("admin-api-key")
}

fn missing_key(environment: &Environment) -> String {
    let (variable, file) = (API_KEY.variable, key_file(environment));
    match file.exists() {
        true => format!(
            "no API key: set {variable} or {variable}_FILE. The key of this installation is in {}",
            file.display()
        ),
        false => format!("no API key: set {variable} or {variable}_FILE"),
    }
}

/// The key that `postrider up` keeps in its data directory. A server at any other address may belong to someone else, so
/// it is not sent there.
fn local_key(environment: &Environment, is_default_url: bool) -> Option<String> {
    if !is_default_url {
        return None;
    }
    let key = std::fs::read_to_string(key_file(environment)).ok()?;
    Some(key.trim().to_owned()).filter(|key| !key.is_empty())
}

impl InTenant {
    /// The client, and the given tenant or the only one there is.
    pub(crate) async fn open(&self, environment: &Environment) -> anyhow::Result<(Client, String)> {
        let client = self.reach.client(environment)?;
        let given = self.tenant.as_deref().map(str::trim);
        if let Some(tenant) = given.filter(|name| !name.is_empty()) {
            return Ok((client, tenant.to_owned()));
        }
        let page = match client.tenants(&PageOf::limit(TENANTS_NAMED_MAX)).await {
            Ok(page) => page,
            // Only admin keys may list tenants.
            Err(error) if error.problem().is_some_and(|problem| problem.status == 403) => {
                bail!("specify a tenant: --tenant ID or POSTRIDER_TENANT")
            }
            Err(error) => return Err(error.into()),
        };
        let names: Vec<&str> = page.data.iter().map(|tenant| tenant.id.as_str()).collect();
        match names[..] {
            [] => bail!("there are no tenants yet: create one with PUT /v1/tenants/ID"),
            [one] => Ok((client, one.to_owned())),
            _ => bail!(
                "specify a tenant: --tenant ID or POSTRIDER_TENANT. Tenants: {}",
                names.join(", ")
            ),
        }
    }
}
