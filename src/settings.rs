//! What the operator may set. Read once from flags and environment, checked, and turned into types.
//! Invariant: a value that can't be used stops the start with a sentence that names its variable.

mod environment;
pub mod reference;
mod values;

use std::{net::SocketAddr, num::NonZeroU32, path::PathBuf, str::FromStr};

use clap::Args;
use ipnet::IpNet;
use postrider_dashboard::{REQUEST_RATE_DEFAULT, TENANT_REQUEST_RATE_DEFAULT};
use postrider_dispatcher::{guard::Guard, proxy::Proxy, retry::Schedule, vault::Vault};
use reqwest::header::{HeaderName, HeaderValue};
use sqlx::postgres::PgConnectOptions;
use url::Url;

pub use environment::Environment;
use values::{
    number_between, parse_address, parse_bool, parse_collector, parse_filter, parse_format, parse_headers,
    parse_jitter, parse_networks, parse_ports, parse_proxies, parse_public_url, parse_rate, parse_retention,
    parse_share, parse_timeout,
};

const PASSWORD_CHARS_MIN: usize = 8;
const ADMIN_KEY_CHARS_MIN: usize = 16;

/// Each is also an environment variable. Secrets and database URLs are not here: other users of the machine can read
/// a process's arguments. They are variables, or files named by a variable that ends in `_FILE`.
#[derive(Args, Debug, Default)]
pub struct Flags {
    /// Embedded Postgres and generated keys [default: .postrider]
    #[arg(long, env = "POSTRIDER_DATA_DIR")]
    data_dir: Option<String>,
    /// Address of the API and the dashboard [default: 127.0.0.1:8080]
    #[arg(long, env = "POSTRIDER_LISTEN")]
    listen: Option<String>,
    /// Address of health and readiness without a key [default: none]
    #[arg(long, env = "POSTRIDER_METRICS_LISTEN")]
    metrics_listen: Option<String>,
    /// Address of gRPC [default: none]
    #[arg(long, env = "POSTRIDER_GRPC_LISTEN")]
    grpc_listen: Option<String>,
    /// Base of links to the dashboard [default: made from the listen address]
    #[arg(long, env = "POSTRIDER_PUBLIC_URL")]
    public_url: Option<String>,
    /// Wait before each attempt, counted from the one before [default: 0s,1m,5m,30m,2h,10h,24h]
    #[arg(long, env = "POSTRIDER_RETRY_SCHEDULE")]
    retry_schedule: Option<String>,
    /// Each wait is stretched by a random factor in [1, 1+jitter] [default: 0.2]
    #[arg(long, env = "POSTRIDER_RETRY_JITTER")]
    retry_jitter: Option<String>,
    /// Time for one attempt [default: 10s]
    #[arg(long, env = "POSTRIDER_TIMEOUT")]
    timeout: Option<String>,
    /// Attempts one endpoint may have in flight, across all dispatchers [default: 16]
    #[arg(long, env = "POSTRIDER_ENDPOINT_CONCURRENCY")]
    endpoint_concurrency: Option<String>,
    /// Attempts on the wire in one dispatcher [default: 4096]
    #[arg(long, env = "POSTRIDER_MAX_IN_FLIGHT")]
    max_in_flight: Option<String>,
    /// How long events, attempts and dead letters are kept [default: 30d]
    #[arg(long, env = "POSTRIDER_RETENTION")]
    retention: Option<String>,
    /// Networks that endpoints may be in although they are not public [default: none; `up` without a database: loopback]
    #[arg(long, env = "POSTRIDER_ALLOW_NETWORKS")]
    allow_networks: Option<String>,
    /// Networks that endpoints may not be in [default: none]
    #[arg(long, env = "POSTRIDER_DENY_NETWORKS")]
    deny_networks: Option<String>,
    /// Ports that endpoints may not use [default: the Fetch standard's bad ports and the usual database ports]
    #[arg(long, env = "POSTRIDER_DENY_PORTS")]
    deny_ports: Option<String>,
    /// An HTTP proxy that every request to an endpoint goes through, by CONNECT [default: none]
    #[arg(long, env = "POSTRIDER_EGRESS_PROXY", hide_env_values = true)]
    egress_proxy: Option<String>,
    /// Requests a second that an admin or producer key may make [default: 10000]
    #[arg(long, env = "POSTRIDER_REQUEST_RATE")]
    request_rate: Option<String>,
    /// Requests a second that a tenant key may make [default: 200]
    #[arg(long, env = "POSTRIDER_TENANT_REQUEST_RATE")]
    tenant_request_rate: Option<String>,
    /// Proxies in front of the API whose X-Forwarded-For names the client [default: none]
    #[arg(long, env = "POSTRIDER_TRUSTED_PROXIES")]
    trusted_proxies: Option<String>,
    /// Whether endpoints may be plain http [default: false; `up` without a database: true]
    #[arg(long, env = "POSTRIDER_ALLOW_HTTP")]
    allow_http: Option<String>,
    /// What is logged, as a filter like `info` or `postrider_dispatcher=debug,info` [default: info]
    #[arg(long, env = "POSTRIDER_LOG")]
    log: Option<String>,
    /// `text` or `json` [default: text]
    #[arg(long, env = "POSTRIDER_LOG_FORMAT")]
    log_format: Option<String>,
    /// Collector that traces are sent to, by OTLP over HTTP [default: none, no traces]
    #[arg(long, env = "POSTRIDER_OTLP_ENDPOINT", hide_env_values = true)]
    otlp_endpoint: Option<String>,
    /// Share of the traces that begin here which are sent, from 0 to 1 [default: 1]
    #[arg(long, env = "POSTRIDER_OTLP_SAMPLE")]
    otlp_sample: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum SettingError {
    #[error("{name} can't be used: {reason}")]
    Unusable { name: String, reason: String },
    #[error("{0} is not set, and this command needs it")]
    Missing(&'static str),
    #[error("{0} and {0}_FILE are both set: keep one")]
    Twice(&'static str),
}

impl SettingError {
    fn unusable(name: &str, reason: impl ToString) -> Self {
        Self::Unusable {
            name: name.to_owned(),
            reason: reason.to_string(),
        }
    }
}

/// A database and, where the way to it leads through a pooler, the way around that.
#[derive(Debug, Clone)]
pub struct Database {
    pub pooled: PgConnectOptions,
    pub direct: PgConnectOptions,
    /// A copy that follows it, for reads that may be a little old.
    pub replica: Option<PgConnectOptions>,
}

#[derive(Debug, Clone)]
pub struct Log {
    pub filter: String,
    pub json: bool,
}

/// Where traces go.
#[derive(Clone)]
pub struct Collector {
    pub url: Url,
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Of traces that begin here.
    pub share: f64,
}

#[derive(Clone)]
pub struct Settings {
    /// None: the embedded one.
    pub database: Option<Database>,
    /// Producers' own databases to relay from.
    pub sources: Vec<PgConnectOptions>,
    pub data_dir: PathBuf,
    pub listen: SocketAddr,
    pub metrics_listen: Option<SocketAddr>,
    pub grpc_listen: Option<SocketAddr>,
    pub public_url: Option<String>,
    pub admin_api_key: Option<String>,
    pub admin_password: Option<String>,
    pub vault: Option<Vault>,
    pub dispatcher: postrider_dispatcher::Settings,
    /// What was set; `guard` fills in what depends on the command.
    allow_networks: Option<Vec<IpNet>>,
    allow_http: Option<bool>,
    deny_networks: Vec<IpNet>,
    deny_ports: Option<Vec<u16>>,
    egress_proxy: Option<Proxy>,
    pub request_rate: NonZeroU32,
    pub tenant_request_rate: NonZeroU32,
    pub trusted_proxies: Vec<IpNet>,
    pub log: Log,
    /// None: no traces.
    pub collector: Option<Collector>,
    /// Variables that look like ours and are not: most often a slip of the pen.
    pub unknown: Vec<String>,
}

impl Settings {
    pub fn read(flags: &Flags, environment: &Environment) -> Result<Self, SettingError> {
        let database = read_database(environment)?;
        let admin_api_key = environment.secret("POSTRIDER_ADMIN_API_KEY")?;
        if admin_api_key
            .as_ref()
            .is_some_and(|key| key.len() < ADMIN_KEY_CHARS_MIN)
        {
            let reason = format!("an API key has at least {ADMIN_KEY_CHARS_MIN} characters");
            return Err(SettingError::unusable("POSTRIDER_ADMIN_API_KEY", reason));
        }
        let admin_password = environment.secret("POSTRIDER_ADMIN_PASSWORD")?;
        if admin_password
            .as_ref()
            .is_some_and(|word| word.chars().count() < PASSWORD_CHARS_MIN)
        {
            let reason = format!("a password has at least {PASSWORD_CHARS_MIN} characters");
            return Err(SettingError::unusable("POSTRIDER_ADMIN_PASSWORD", reason));
        }
        let vault = environment
            .secret("POSTRIDER_MASTER_KEY")?
            .map(|keys| Vault::parse(&keys).map_err(|e| SettingError::unusable("POSTRIDER_MASTER_KEY", e)))
            .transpose()?;
        let defaults = postrider_dispatcher::Settings::default();
        let dispatcher = postrider_dispatcher::Settings {
            schedule: parse(
                "POSTRIDER_RETRY_SCHEDULE",
                &flags.retry_schedule,
                Schedule::from_str,
            )?
            .unwrap_or(defaults.schedule),
            jitter: parse("POSTRIDER_RETRY_JITTER", &flags.retry_jitter, parse_jitter)?
                .unwrap_or(defaults.jitter),
            timeout: parse("POSTRIDER_TIMEOUT", &flags.timeout, parse_timeout)?.unwrap_or(defaults.timeout),
            concurrency: parse(
                "POSTRIDER_ENDPOINT_CONCURRENCY",
                &flags.endpoint_concurrency,
                |text| number_between(text, 1, 1024),
            )?
            .unwrap_or(defaults.concurrency),
            max_in_flight: parse("POSTRIDER_MAX_IN_FLIGHT", &flags.max_in_flight, |text| {
                number_between(text, 1, 1_000_000)
            })?
            .unwrap_or(defaults.max_in_flight),
            retention: parse("POSTRIDER_RETENTION", &flags.retention, parse_retention)?
                .unwrap_or(defaults.retention),
            public_url: parse("POSTRIDER_PUBLIC_URL", &flags.public_url, parse_public_url)?,
            name: defaults.name,
        };
        Ok(Self {
            database,
            sources: read_sources(environment)?,
            data_dir: set(&flags.data_dir).unwrap_or(".postrider").into(),
            listen: parse("POSTRIDER_LISTEN", &flags.listen, parse_address)?
                .unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 8080))),
            metrics_listen: parse("POSTRIDER_METRICS_LISTEN", &flags.metrics_listen, parse_address)?,
            grpc_listen: parse("POSTRIDER_GRPC_LISTEN", &flags.grpc_listen, parse_address)?,
            public_url: parse("POSTRIDER_PUBLIC_URL", &flags.public_url, parse_public_url)?,
            admin_api_key,
            admin_password,
            vault,
            dispatcher,
            allow_networks: parse("POSTRIDER_ALLOW_NETWORKS", &flags.allow_networks, parse_networks)?,
            allow_http: parse("POSTRIDER_ALLOW_HTTP", &flags.allow_http, parse_bool)?,
            deny_networks: parse("POSTRIDER_DENY_NETWORKS", &flags.deny_networks, parse_networks)?
                .unwrap_or_default(),
            deny_ports: parse("POSTRIDER_DENY_PORTS", &flags.deny_ports, parse_ports)?,
            egress_proxy: parse("POSTRIDER_EGRESS_PROXY", &flags.egress_proxy, Proxy::from_str)?,
            request_rate: parse("POSTRIDER_REQUEST_RATE", &flags.request_rate, parse_rate)?
                .unwrap_or(REQUEST_RATE_DEFAULT),
            tenant_request_rate: parse(
                "POSTRIDER_TENANT_REQUEST_RATE",
                &flags.tenant_request_rate,
                parse_rate,
            )?
            .unwrap_or(TENANT_REQUEST_RATE_DEFAULT),
            trusted_proxies: parse("POSTRIDER_TRUSTED_PROXIES", &flags.trusted_proxies, parse_proxies)?
                .unwrap_or_default(),
            log: Log {
                filter: parse("POSTRIDER_LOG", &flags.log, parse_filter)?
                    .unwrap_or_else(|| "info,apalis_core=warn,sqlx::postgres::notice=warn".to_owned()),
                json: parse("POSTRIDER_LOG_FORMAT", &flags.log_format, parse_format)?.unwrap_or(false),
            },
            collector: read_collector(flags, environment)?,
            unknown: environment.unknown(),
        })
    }

    /// Where endpoints may be. On the embedded database this is somebody's own machine: receivers run on loopback.
    /// `listeners` are Postrider's own, which no endpoint may be.
    pub fn guard(&self, listeners: &[SocketAddr]) -> Guard {
        let embedded = self.database.is_none();
        let loopback = || {
            [IpNet::from_str("127.0.0.0/8"), IpNet::from_str("::1/128")]
                .into_iter()
                .flatten()
                .collect()
        };
        Guard {
            allow_networks: match &self.allow_networks {
                Some(networks) => networks.clone(),
                None if embedded => loopback(),
                None => Vec::new(),
            },
            deny_networks: self.deny_networks.clone(),
            deny_ports: self.deny_ports.clone(),
            allow_http: self.allow_http.unwrap_or(embedded),
            own_addresses: listeners.to_vec(),
            own_names: self
                .public_url
                .as_deref()
                .and_then(host_and_port)
                .into_iter()
                .collect(),
            egress_proxy: self.egress_proxy.clone(),
        }
    }

    /// For the commands that have no embedded database.
    pub fn require_database(&self) -> Result<&Database, SettingError> {
        self.database
            .as_ref()
            .ok_or(SettingError::Missing("POSTRIDER_DATABASE_URL"))
    }

    /// For the commands that make no master key of their own.
    pub fn require_vault(&self) -> Result<Vault, SettingError> {
        self.vault
            .clone()
            .ok_or(SettingError::Missing("POSTRIDER_MASTER_KEY"))
    }
}

fn host_and_port(url: &str) -> Option<(String, u16)> {
    let url = Url::parse(url).ok()?;
    Some((url.domain()?.to_owned(), url.port_or_known_default()?))
}

/// URLs with commas between them.
fn read_sources(environment: &Environment) -> Result<Vec<PgConnectOptions>, SettingError> {
    const NAME: &str = "POSTRIDER_SOURCES";
    let text = environment.secret(NAME)?.unwrap_or_default();
    let urls = text
        .split([',', '\n'])
        .map(str::trim)
        .filter(|url| !url.is_empty());
    urls.map(|url| read_url(NAME, url)).collect()
}

fn read_collector(flags: &Flags, environment: &Environment) -> Result<Option<Collector>, SettingError> {
    const HEADERS: &str = "POSTRIDER_OTLP_HEADERS";
    let url = parse("POSTRIDER_OTLP_ENDPOINT", &flags.otlp_endpoint, parse_collector)?;
    let share = parse("POSTRIDER_OTLP_SAMPLE", &flags.otlp_sample, parse_share)?.unwrap_or(1.0);
    let headers = environment.secret(HEADERS)?.unwrap_or_default();
    let headers = parse_headers(&headers).map_err(|reason| SettingError::unusable(HEADERS, reason))?;
    Ok(url.map(|url| Collector { url, headers, share }))
}

fn read_url(name: &str, url: &str) -> Result<PgConnectOptions, SettingError> {
    // The library's own message may repeat the URL, which has the password in it.
    let reason = "it is not a URL like postgresql://user:password@host:5432/database";
    let right_scheme = url.starts_with("postgres://") || url.starts_with("postgresql://");
    right_scheme
        .then(|| PgConnectOptions::from_str(url).ok())
        .flatten()
        .ok_or_else(|| SettingError::unusable(name, reason))
}

fn read_database(environment: &Environment) -> Result<Option<Database>, SettingError> {
    let read = |name: &'static str| {
        let url = environment.secret(name)?;
        url.map(|url| read_url(name, &url)).transpose()
    };
    const DIRECT: &str = "POSTRIDER_DATABASE_URL_DIRECT";
    const READ: &str = "POSTRIDER_DATABASE_URL_READ";
    let (direct, replica) = (read(DIRECT)?, read(READ)?);
    let alone = |name| {
        let reason = "it goes with POSTRIDER_DATABASE_URL, which is not set";
        Err(SettingError::unusable(name, reason))
    };
    match (read("POSTRIDER_DATABASE_URL")?, direct, replica) {
        (Some(pooled), direct, replica) => Ok(Some(Database {
            direct: direct.unwrap_or_else(|| pooled.clone()),
            pooled,
            replica,
        })),
        (None, Some(_), _) => alone(DIRECT),
        (None, None, Some(_)) => alone(READ),
        (None, None, None) => Ok(None),
    }
}

/// An empty value counts as not set: compose files pass variables on that way.
fn set(value: &Option<String>) -> Option<&str> {
    value.as_deref().map(str::trim).filter(|text| !text.is_empty())
}

fn parse<T, E: ToString>(
    name: &str,
    value: &Option<String>,
    read: impl Fn(&str) -> Result<T, E>,
) -> Result<Option<T>, SettingError> {
    set(value)
        .map(|text| read(text).map_err(|e| SettingError::unusable(name, e)))
        .transpose()
}

#[cfg(test)]
mod tests;
