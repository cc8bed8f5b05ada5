//! What the operator may set, read once from flags and environment.
//! Invariant: an invalid value stops the start with a sentence that names its variable.

mod parse;
pub(crate) mod reference;
mod table;

use std::{net::SocketAddr, str::FromStr};

use ipnet::IpNet;
pub(crate) use postrider_cli::settings::{Environment, SettingError};
use postrider_dispatcher::{connector::Connector, guard::Guard, vault::Vault};
use reqwest::header::{HeaderName, HeaderValue};
use url::Url;

pub(crate) use table::{Flags, Values, shown_values};

/// The database, and how to reach it directly where the usual way goes through a pooler.
#[derive(Debug, Clone)]
pub(crate) struct Database {
    pub(crate) pooled: Connector,
    pub(crate) direct: Connector,
    /// A streaming replica, for reads that may be slightly stale.
    pub(crate) replica: Option<Connector>,
}

/// The database of a cell to be added. The text is stored, encrypted.
#[derive(Clone)]
pub(crate) struct CellUrl {
    pub(crate) text: String,
    pub(crate) connector: Connector,
}

/// Where traces are sent.
#[derive(Clone)]
pub(crate) struct Collector {
    pub(crate) url: Url,
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
    /// The fraction of the traces started here that are sent.
    pub(crate) sample: f64,
}

#[derive(Clone)]
pub(crate) struct Settings {
    /// None: `up` runs an embedded server.
    pub(crate) database: Option<Database>,
    pub(crate) dispatcher: postrider_dispatcher::Settings,
    /// None: no traces.
    pub(crate) collector: Option<Collector>,
    /// Variables with our prefix that set nothing.
    pub(crate) unknown_variables: Vec<String>,
    /// Those that differ from their defaults, without secrets.
    pub(crate) changed: Vec<String>,
    pub(crate) values: Values,
}

impl Settings {
    pub(crate) fn read(flags: &Flags, environment: &Environment) -> Result<Self, SettingError> {
        let source = table::Source { flags, environment };
        let values = Values::read(&source)?;
        Ok(Self {
            database: database(&values)?,
            dispatcher: postrider_dispatcher::Settings {
                schedule: values.retry_schedule.clone(),
                jitter: values.retry_jitter,
                timeout: values.timeout,
                concurrency: values.endpoint_concurrency,
                max_in_flight: values.max_in_flight,
                retention: values.retention,
                start_paused: values.start_paused.unwrap_or(false),
                public_url: values.public_url.clone(),
                ..Default::default()
            },
            collector: values.otlp_endpoint.clone().map(|url| Collector {
                url,
                headers: values.otlp_headers.clone().unwrap_or_default(),
                sample: values.otlp_sample,
            }),
            unknown_variables: table::unknown_variables(environment),
            changed: table::changed(&source),
            values,
        })
    }

    /// Where endpoints may be. With an embedded database this is a developer's machine, where receivers run on loopback.
    /// `listeners` are Postrider's own addresses, which no endpoint may use.
    pub(crate) fn guard(&self, listeners: &[SocketAddr]) -> Guard {
        let embedded = self.database.is_none();
        let values = &self.values;
        Guard {
            allow_networks: match &values.allow_networks {
                Some(networks) => networks.clone(),
                None if embedded => loopback(),
                None => Vec::new(),
            },
            deny_networks: values.deny_networks.clone().unwrap_or_default(),
            deny_ports: values.deny_ports.clone(),
            allow_http: values.allow_http.unwrap_or(embedded),
            own_addresses: listeners.to_vec(),
            own_names: values
                .public_url
                .as_deref()
                .and_then(host_and_port)
                .into_iter()
                .collect(),
            egress_proxy: values.egress_proxy.clone(),
        }
    }

    /// For commands that never start an embedded database.
    pub(crate) fn require_database(&self) -> Result<&Database, SettingError> {
        self.database
            .as_ref()
            .ok_or(SettingError::Missing("POSTRIDER_DATABASE_URL"))
    }

    /// For commands that do not generate a master key.
    pub(crate) fn require_vault(&self) -> Result<Vault, SettingError> {
        self.values
            .master_key
            .clone()
            .ok_or(SettingError::Missing("POSTRIDER_MASTER_KEY"))
    }
}

fn database(values: &Values) -> Result<Option<Database>, SettingError> {
    let (direct, replica) = (&values.database_url_direct, &values.database_url_read);
    if let Some(pooled) = &values.database_url {
        return Ok(Some(Database {
            direct: direct.as_ref().unwrap_or(pooled).clone(),
            pooled: pooled.clone(),
            replica: replica.clone(),
        }));
    }
    let alone = |variable| {
        let reason = "requires POSTRIDER_DATABASE_URL, which is not set";
        Err(SettingError::invalid(variable, reason))
    };
    match (direct, replica) {
        (Some(_), _) => alone("POSTRIDER_DATABASE_URL_DIRECT"),
        (None, Some(_)) => alone("POSTRIDER_DATABASE_URL_READ"),
        (None, None) => Ok(None),
    }
}

fn loopback() -> Vec<IpNet> {
    [IpNet::from_str("127.0.0.0/8"), IpNet::from_str("::1/128")]
        .into_iter()
        .flatten()
        .collect()
}

fn host_and_port(url: &str) -> Option<(String, u16)> {
    let url = Url::parse(url).ok()?;
    Some((url.domain()?.to_owned(), url.port_or_known_default()?))
}

#[cfg(test)]
mod tests;
