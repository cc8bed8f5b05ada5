//! Every setting of the roles: one row makes its field, variable, flag, default, parser and line in the reference.
//! docs/operations.md contains the output of `postrider settings`; a test compares them.

use std::{
    collections::BTreeMap, fmt::Display, net::SocketAddr, num::NonZeroU32, path::PathBuf, time::Duration,
};

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use ipnet::IpNet;
use postrider_cli::settings::{Environment, Fallback, Kind, Setting, SettingError, TOOL_SETTINGS};
use postrider_dispatcher::{
    connector::Connector,
    proxy::Proxy,
    retry::{Jitter, Schedule},
    vault::Vault,
};
use reqwest::header::{HeaderName, HeaderValue};
use url::Url;

use super::{CellUrl, parse};

pub(super) struct Section {
    pub(super) title: &'static str,
    pub(super) settings: &'static [Setting],
    pub(super) note: &'static str,
}

/// The type of a row's field: without a default it may be absent.
macro_rules! field {
    (value $type:ty) => { $type };
    ($kind:ident $type:ty) => { Option<$type> };
}

macro_rules! settings {
    ($( $title:literal { $(
        $kind:ident $field:ident: $type:ty = $variable:literal, $default:literal, $parse:expr, $help:literal;
    )* } $note:literal )*) => {
        /// The values of all settings, parsed.
        #[derive(Clone)]
        pub(crate) struct Values {
            $( $( pub(crate) $field: field!($kind $type), )* )*
        }

        impl Values {
            pub(super) fn read(source: &Source<'_>) -> Result<Self, SettingError> {
                Ok(Self {
                    $( $( $field: source.$kind(&Setting::$kind($variable, $default, $help), $parse)?, )* )*
                })
            }
        }

        const SECTIONS: &[Section] = &[ $(
            Section {
                title: $title,
                settings: &[ $( Setting::$kind($variable, $default, $help), )* ],
                note: $note,
            },
        )* ];
    };
}

// `value` has a default value; `optional` has none; `private` is an optional flag that may contain a password; `secret` is
// no flag and may come from a file.
settings! {
    "Database" {
        secret database_url: Connector = "POSTRIDER_DATABASE_URL",
            "none: `up` starts an embedded Postgres; the other roles require it",
            parse::database_url,
            "`postgresql://user:password@host:5432/database`, or [several hosts](failover.md#several-hosts): `postgresql://user:password@a,b,c/database?target_session_attrs=read-write`";
        secret database_url_direct: Connector = "POSTRIDER_DATABASE_URL_DIRECT",
            "same as `POSTRIDER_DATABASE_URL`",
            parse::database_url,
            "for `dispatcher`, `migrate` and `rotate-master-key`, when `POSTRIDER_DATABASE_URL` goes through PgBouncer";
        secret database_url_read: Connector = "POSTRIDER_DATABASE_URL_READ",
            "none",
            parse::replica_url,
            "streaming replica that [pages and lists are read from](#read-replicas)";
        secret sources: Vec<Connector> = "POSTRIDER_SOURCES",
            "none",
            parse::database_urls,
            "databases of producers to relay from: URLs separated by commas or newlines, each with one host or several: [outbox](outbox.md)";
        secret home_database_url: Connector = "POSTRIDER_HOME_DATABASE_URL",
            "none",
            parse::database_url,
            "for the dispatchers of a cell: the home database, past any pooler, to relay events from: [cells](cells.md)";
        secret cell_database_url: CellUrl = "POSTRIDER_CELL_DATABASE_URL",
            "none",
            parse::cell_url,
            "for `cells add`: the new cell's database, as API processes connect to it; stored encrypted: [cells](cells.md)";
        secret cell_superuser_url: Connector = "POSTRIDER_CELL_SUPERUSER_URL",
            "same as `POSTRIDER_CELL_DATABASE_URL`",
            parse::database_url,
            "for `cells add`: the same database as a superuser, who may create subscriptions";
        secret replication_url: String = "POSTRIDER_REPLICATION_URL",
            "none",
            parse::connection_string,
            "for `cells add`: how the new cell's server connects to the home database, as a URL or `key=value` pairs of libpq. It is stored in the cell's `pg_subscription`: give the password by `passfile`";
        value data_dir: PathBuf = "POSTRIDER_DATA_DIR", ".postrider", parse::path,
            "where `up` keeps its Postgres and generated keys";
    } ""

    "Addresses" {
        value listen: SocketAddr = "POSTRIDER_LISTEN", "127.0.0.1:8080", parse::address,
            "address of the API and the dashboard";
        optional metrics_listen: SocketAddr = "POSTRIDER_METRICS_LISTEN", "none", parse::address,
            "address for health, readiness and metrics without a key. A dispatcher serves them only here";
        optional grpc_listen: SocketAddr = "POSTRIDER_GRPC_LISTEN", "none", parse::address,
            "address for gRPC, served by `dashboard` and `up`";
        optional drain_delay: Duration = "POSTRIDER_DRAIN_DELAY", "`5s`; `up`: `0s`", parse::drain_delay,
            "how long a stopping `dashboard` or `up` still serves requests, while `/readyz` reports `stopping`; `0s` to `60s`: [health](#health)";
        optional public_url: String = "POSTRIDER_PUBLIC_URL", "derived from the listen address", parse::base_url,
            "base URL of links for customers. With https, cookies are sent over https only. Endpoints may not use this address";
    } ""

    "Secrets" {
        secret master_key: Vault = "POSTRIDER_MASTER_KEY",
            "`up` generates one in the data directory; the other roles require it",
            parse::master_key,
            "32 bytes in base64. Encrypts secrets at rest. To [rotate it](rotation.md#the-master-key), list several separated by commas: the first encrypts";
        secret admin_api_key: String = "POSTRIDER_ADMIN_API_KEY", "generated and shown once", parse::api_key,
            "an admin key that always works; at least 16 characters";
        secret admin_password: String = "POSTRIDER_ADMIN_PASSWORD", "generated and shown once", parse::password,
            "password of the dashboard login `admin`; at least 8 characters";
    } ""

    "Sending" {
        value retry_schedule: Schedule = "POSTRIDER_RETRY_SCHEDULE", "0s,1m,5m,30m,2h,10h,24h", parse::schedule,
            "delay before each attempt, counted from the previous one: up to 50, each at most 30 days. Units `ms`, `s`, `m`, `h`, `d`";
        value retry_jitter: Jitter = "POSTRIDER_RETRY_JITTER", "0.2", parse::jitter,
            "each delay is multiplied by a random factor between 1 and 1 + jitter; 0 to 1";
        value timeout: Duration = "POSTRIDER_TIMEOUT", "10s", parse::timeout,
            "time limit of one attempt, from connecting to the last byte needed; `100ms` to `60s`";
        value endpoint_concurrency: u16 = "POSTRIDER_ENDPOINT_CONCURRENCY", "16",
            |text| parse::number(text, 1, 1024),
            "max. requests in flight to one endpoint, across all dispatchers; 1 to 1,024";
        value max_in_flight: usize = "POSTRIDER_MAX_IN_FLIGHT", "4096",
            |text| parse::number(text, 1, 1_000_000),
            "max. requests in flight in one dispatcher; 1 to 1,000,000. Reduced to 80 % of the open file limit minus 256 if that is lower";
        value retention: Duration = "POSTRIDER_RETENTION", "30d", parse::retention,
            "how long events, attempts and dead letters are kept; `10s` to `3650d`: [retention](retention.md)";
        optional start_paused: bool = "POSTRIDER_START_PAUSED", "`false`", parse::boolean,
            "whether a dispatcher that starts stops all sending until an operator [resumes it](#switches)";
    } "An endpoint can have its own schedule, timeout and concurrency."

    "Egress" {
        optional allow_networks: Vec<IpNet> = "POSTRIDER_ALLOW_NETWORKS",
            "none; `up` on its own database: loopback",
            parse::networks,
            "private networks that endpoints may be in";
        optional deny_networks: Vec<IpNet> = "POSTRIDER_DENY_NETWORKS", "none", parse::networks,
            "networks that endpoints may not be in";
        optional deny_ports: Vec<u16> = "POSTRIDER_DENY_PORTS",
            "the Fetch standard's bad ports and the usual database ports",
            parse::ports,
            "ports that endpoints may not use. Networks in `POSTRIDER_ALLOW_NETWORKS` are exempt";
        optional allow_http: bool = "POSTRIDER_ALLOW_HTTP",
            "`false`; `up` on its own database: `true`",
            parse::boolean,
            "whether endpoints may use plain http: `true`, `1`, `yes`, `false`, `0` or `no`";
        private egress_proxy: Proxy = "POSTRIDER_EGRESS_PROXY", "none", parse::proxy,
            "HTTP CONNECT proxy for every request to an endpoint: `http://user:password@proxy:3128`. If it has a password, set the variable instead of the flag";
    } "Dashboards need these too: they check URLs when they are saved, and send test events and probes."

    "API and log" {
        value request_rate: NonZeroU32 = "POSTRIDER_REQUEST_RATE", "10000", parse::rate,
            "max. requests per second of an admin or producer key, counted by each process; 1 to 1,000,000";
        value tenant_request_rate: NonZeroU32 = "POSTRIDER_TENANT_REQUEST_RATE", "200", parse::rate,
            "the same for a tenant key";
        optional trusted_proxies: Vec<IpNet> = "POSTRIDER_TRUSTED_PROXIES", "none", parse::networks_or_addresses,
            "proxies in front of the API, as networks or addresses separated by commas. For requests from them, the client's address is taken from `X-Forwarded-For`; [failed sign-ins](#behind-a-proxy) and connections are counted by it";
        value log_filter: String = "POSTRIDER_LOG", "info", parse::log_filter,
            "log filter, like `warn` or `info,postrider_dispatcher=debug`. Libraries stay quiet unless it mentions them: [logs](#logs)";
        value log_as_json: bool = "POSTRIDER_LOG_FORMAT", "text", parse::log_format,
            "`text` or `json`";
        private otlp_endpoint: Url = "POSTRIDER_OTLP_ENDPOINT", "none", parse::collector_url,
            "collector that [traces](traces.md) are sent to: `http://collector:4318`";
        secret otlp_headers: Vec<(HeaderName, HeaderValue)> = "POSTRIDER_OTLP_HEADERS", "none", parse::headers,
            "headers for the collector: `name=value`, separated by commas";
        value otlp_sample: f64 = "POSTRIDER_OTLP_SAMPLE", "1", parse::fraction,
            "fraction of the traces started by Postrider that are sent; 0 to 1";
        value metrics_top_endpoints: usize = "POSTRIDER_METRICS_TOP_ENDPOINTS", "0",
            |text| parse::number(text, 0, 100),
            "how many of the [endpoints with the most failed attempts](#failing-endpoints) dispatchers export as a metric; 0 to 100";
    } ""
}

const TOOLS: Section = Section {
    title: "Command-line tools",
    settings: TOOL_SETTINGS,
    note: "",
};

pub(super) fn sections() -> impl Iterator<Item = &'static Section> {
    SECTIONS.iter().chain([&TOOLS])
}

pub(super) fn all() -> impl Iterator<Item = &'static Setting> {
    sections().flat_map(|section| section.settings)
}

/// Variables with our prefix that set nothing, most often because of a typo. Not an error: Kubernetes sets variables like
/// `POSTRIDER_SERVICE_HOST` for a service of this name.
pub(super) fn unknown_variables(environment: &Environment) -> Vec<String> {
    let is_known = |variable: &&str| all().any(|setting| setting.is_set_by(variable));
    environment
        .own_variables()
        .filter(|variable| !is_known(variable))
        .map(str::to_owned)
        .collect()
}

/// The settings that differ from their defaults, for the log. Those that may contain a secret only by name.
pub(super) fn changed(source: &Source<'_>) -> Vec<String> {
    let settings = SECTIONS.iter().flat_map(|section| section.settings);
    let shown = settings.filter_map(|setting| {
        let is_default =
            |value: &str| matches!(setting.default, Fallback::Value(default) if default == value);
        match setting.kind {
            Kind::Flag => source
                .flag(setting)
                .filter(|value| !is_default(value))
                .map(|value| format!("{}={value}", setting.variable)),
            Kind::PrivateFlag => source.flag(setting).map(|_| hidden(setting)),
            Kind::Secret => {
                let is_set = |variable: &&str| {
                    setting.is_set_by(variable) && source.environment.get(variable).is_some()
                };
                let mut set = source.environment.own_variables();
                set.any(|variable| is_set(&variable)).then(|| hidden(setting))
            }
        }
    });
    shown.collect()
}

fn hidden(setting: &Setting) -> String {
    format!("{}=[hidden]", setting.variable)
}

/// Flags whose value names the installation or its owner.
const IDENTIFYING: [&str; 1] = ["POSTRIDER_PUBLIC_URL"];

/// Every setting of the roles with its value, for a support bundle. Of those that may contain a password or identify the
/// installation only whether they are set.
pub(crate) fn shown_values(flags: &Flags, environment: &Environment) -> BTreeMap<&'static str, String> {
    let source = Source { flags, environment };
    let settings = SECTIONS.iter().flat_map(|section| section.settings);
    settings
        .map(|setting| {
            let is_set = environment
                .own_variables()
                .any(|variable| setting.is_set_by(variable));
            let value = match (setting.kind, source.flag(setting)) {
                (Kind::Flag, Some(_)) if IDENTIFYING.contains(&setting.variable) => "[set]".to_owned(),
                (Kind::Flag, Some(value)) => value.to_owned(),
                (Kind::PrivateFlag, Some(_)) => "[set]".to_owned(),
                (Kind::Secret, _) if is_set => "[set]".to_owned(),
                _ => "[not set]".to_owned(),
            };
            (setting.variable, value)
        })
        .collect()
}

/// The flags of a role, by variable. Each flag is also read from its variable.
#[derive(Debug, Default)]
pub(crate) struct Flags(BTreeMap<&'static str, String>);

fn flag_settings() -> impl Iterator<Item = &'static Setting> {
    SECTIONS
        .iter()
        .flat_map(|section| section.settings)
        .filter(|setting| !setting.is_secret())
}

impl Args for Flags {
    fn augment_args(command: Command) -> Command {
        command.args(flag_settings().map(|setting| {
            Arg::new(setting.variable)
                .long(setting.flag())
                .value_name(setting.short_name())
                .env(setting.variable)
                .hide_env_values(setting.kind == Kind::PrivateFlag)
                .help(setting.flag_help())
        }))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Flags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches).map(|()| flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for setting in flag_settings() {
            if let Some(value) = matches.get_one::<String>(setting.variable) {
                self.0.insert(setting.variable, value.clone());
            }
        }
        Ok(())
    }
}

impl Flags {
    /// Whether fatal errors are JSON, even if another setting is invalid.
    pub(crate) fn log_as_json(&self) -> bool {
        self.0
            .get("POSTRIDER_LOG_FORMAT")
            .is_some_and(|value| value.trim() == "json")
    }
}

type Parse<T, E> = fn(&str) -> Result<T, E>;

fn parsed<T, E: Display>(setting: &Setting, text: &str, parse: Parse<T, E>) -> Result<T, SettingError> {
    parse(text).map_err(|requirement| setting.refuse(text, requirement))
}

/// Where values come from. Its methods are named like the kinds of rows.
pub(super) struct Source<'s> {
    pub(super) flags: &'s Flags,
    pub(super) environment: &'s Environment,
}

impl Source<'_> {
    fn value<T, E: Display>(&self, setting: &Setting, parse: Parse<T, E>) -> Result<T, SettingError> {
        let default = match setting.default {
            Fallback::Value(value) => value,
            Fallback::Described(_) => "",
        };
        parsed(setting, self.flag(setting).unwrap_or(default), parse)
    }

    fn optional<T, E: Display>(
        &self,
        setting: &Setting,
        parse: Parse<T, E>,
    ) -> Result<Option<T>, SettingError> {
        let text = self.flag(setting);
        text.map(|text| parsed(setting, text, parse)).transpose()
    }

    fn private<T, E: Display>(
        &self,
        setting: &Setting,
        parse: Parse<T, E>,
    ) -> Result<Option<T>, SettingError> {
        self.optional(setting, parse)
    }

    fn secret<T, E: Display>(
        &self,
        setting: &Setting,
        parse: Parse<T, E>,
    ) -> Result<Option<T>, SettingError> {
        let text = self.environment.secret(setting)?;
        text.map(|text| parsed(setting, &text, parse)).transpose()
    }

    /// An empty value counts as not set: compose files pass variables on that way.
    fn flag(&self, setting: &Setting) -> Option<&str> {
        let text = self.flags.0.get(setting.variable)?.trim();
        (!text.is_empty()).then_some(text)
    }
}
