//! A database URL with one host or several, as libpq has them. Everything but the hosts is left to sqlx.

use std::{fmt, str::FromStr, time::Duration};

use sqlx::postgres::PgConnectOptions;
use url::form_urlencoded;

use super::hosts::HOST_TIME_MAX;

const PORT: u16 = 5432;
const ANY_PORT: &str = "";
/// Of `connect_timeout`: a search for the primary, which asks up to three times, must end before its caller gives up.
const TIMEOUT_SECONDS_MAX: u64 = 3;

/// `target_session_attrs`: which of the hosts is the one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    Any,
    ReadWrite,
    ReadOnly,
    Primary,
    Standby,
    PreferStandby,
}

impl Wanted {
    const ALL: [(&'static str, Self); 6] = [
        ("any", Self::Any),
        ("read-write", Self::ReadWrite),
        ("read-only", Self::ReadOnly),
        ("primary", Self::Primary),
        ("standby", Self::Standby),
        ("prefer-standby", Self::PreferStandby),
    ];

    fn parse(text: &str) -> Result<Self, UrlError> {
        let found = Self::ALL.into_iter().find(|(name, _)| *name == text);
        found
            .map(|(_, wanted)| wanted)
            .ok_or_else(|| UrlError::Unknown(text.to_owned()))
    }

    fn leads_to_standby(self) -> bool {
        matches!(self, Self::ReadOnly | Self::Standby | Self::PreferStandby)
    }
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.into_iter().find(|(_, wanted)| wanted == self);
        f.write_str(name.map_or("", |(name, _)| name))
    }
}

/// What a database is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Only a server that accepts writes is of use.
    Writes,
    Reads,
}

/// No message repeats the URL, which contains the password.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum UrlError {
    #[error(
        "must be a URL like postgresql://user:password@host:5432/database, or with several hosts \
         postgresql://user:password@a:5432,b:5432/database?target_session_attrs=read-write"
    )]
    Form,
    #[error(
        "target_session_attrs must be any, read-write, read-only, primary, standby or prefer-standby, not {0:?}"
    )]
    Unknown(String),
    #[error("target_session_attrs={0} leads to a standby, which accepts no writes: use read-write")]
    Standby(String),
    #[error("has {ports} ports for {hosts} hosts: give one for all, or one for each")]
    Ports { hosts: usize, ports: usize },
    #[error("a host is missing before or after a comma")]
    EmptyHost,
    #[error("connect_timeout must be a whole number of seconds")]
    Timeout,
}

#[derive(Debug)]
pub(super) struct Parsed {
    /// How to connect to each host, in order.
    pub(super) hosts: Vec<PgConnectOptions>,
    pub(super) wanted: Wanted,
    pub(super) host_time_max: Duration,
}

/// The parts of a URL.
struct Parts<'t> {
    scheme: &'t str,
    /// With its `@`.
    user: &'t str,
    hosts: &'t str,
    /// With its `/`.
    path: &'t str,
    query: &'t str,
}

impl<'t> Parts<'t> {
    fn of(text: &'t str) -> Result<Self, UrlError> {
        let (scheme, rest) = text.split_once("://").ok_or(UrlError::Form)?;
        if !matches!(scheme, "postgres" | "postgresql") {
            return Err(UrlError::Form);
        }
        let rest = rest.split('#').next().unwrap_or_default();
        let (before, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = before.split_at(before.find('/').unwrap_or(before.len()));
        let (user, hosts) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
        Ok(Self {
            scheme,
            user,
            hosts,
            path,
            query,
        })
    }
}

/// The parameters that concern hosts, and the rest of the query as it is.
#[derive(Default)]
struct Parameters<'t> {
    hosts: Vec<String>,
    addresses: Vec<String>,
    ports: Vec<String>,
    wanted: Option<String>,
    timeout: Option<String>,
    rest: Vec<&'t str>,
}

impl<'t> Parameters<'t> {
    /// A parameter that is given again continues the list.
    fn of(query: &'t str) -> Self {
        let mut found = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let Some((key, value)) = form_urlencoded::parse(pair.as_bytes()).next() else {
                continue;
            };
            let list = || value.split(',').map(|part| part.trim().to_owned());
            match &*key {
                "host" => found.hosts.extend(list()),
                "hostaddr" => found.addresses.extend(list()),
                "port" => found.ports.extend(list()),
                "target_session_attrs" => found.wanted = Some(value.into_owned()),
                "connect_timeout" => found.timeout = Some(value.into_owned()),
                _ => found.rest.push(pair),
            }
        }
        found
    }
}

pub(super) fn parse(text: &str, access: Access) -> Result<Parsed, UrlError> {
    let parts = Parts::of(text)?;
    let parameters = Parameters::of(parts.query);
    let wanted = match &parameters.wanted {
        Some(text) => Wanted::parse(text)?,
        None => Wanted::Any,
    };
    if access == Access::Writes && wanted.leads_to_standby() {
        return Err(UrlError::Standby(wanted.to_string()));
    }
    let hosts = hosts(&parts, &parameters)?;
    if hosts.len() == 1 && wanted == Wanted::Any {
        // Whatever sqlx makes of it.
        return Ok(Parsed {
            hosts: vec![without_parameter(&parts, &parameters, text)?],
            wanted,
            host_time_max: HOST_TIME_MAX,
        });
    }
    let host_time_max = match &parameters.timeout {
        None => HOST_TIME_MAX,
        // As in libpq, 0 is no limit of the operator's.
        Some(text) => match text.parse::<u64>().map_err(|_| UrlError::Timeout)? {
            0 => HOST_TIME_MAX,
            seconds => Duration::from_secs(seconds.min(TIMEOUT_SECONDS_MAX)),
        },
    };
    let hosts = hosts.iter().map(|(host, port)| {
        let port = if port == ANY_PORT {
            String::new()
        } else {
            format!(":{port}")
        };
        let rest = parameters.rest.join("&");
        let Parts {
            scheme, user, path, ..
        } = parts;
        one(&format!("{scheme}://{user}{host}{port}{path}?{rest}"))
    });
    Ok(Parsed {
        hosts: hosts.collect::<Result<_, _>>()?,
        wanted,
        host_time_max,
    })
}

/// `target_session_attrs=any` is the default, and unknown to sqlx.
fn without_parameter(
    parts: &Parts<'_>,
    parameters: &Parameters<'_>,
    text: &str,
) -> Result<PgConnectOptions, UrlError> {
    if parameters.wanted.is_none() {
        return one(text);
    }
    let Parts {
        scheme,
        user,
        hosts,
        path,
        query,
    } = parts;
    let others: Vec<&str> = query
        .split('&')
        .filter(|pair| !pair.starts_with("target_session_attrs"))
        .collect();
    one(&format!("{scheme}://{user}{hosts}{path}?{}", others.join("&")))
}

/// sqlx keeps the brackets of an IPv6 address, and then looks for a host of that name.
fn one(text: &str) -> Result<PgConnectOptions, UrlError> {
    let options = PgConnectOptions::from_str(text).map_err(|_| UrlError::Form)?;
    let bare = options
        .get_host()
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .map(str::to_owned);
    Ok(match bare {
        Some(bare) => options.host(&bare),
        None => options,
    })
}

/// Each host as a URL has it, with its port. Parameters replace what is before the path, as in libpq.
fn hosts(parts: &Parts<'_>, parameters: &Parameters<'_>) -> Result<Vec<(String, String)>, UrlError> {
    let named = match parameters.addresses.is_empty() {
        true => &parameters.hosts,
        false => &parameters.addresses,
    };
    let (mut hosts, mut ports): (Vec<String>, Vec<String>) = match named.is_empty() {
        true => parts.hosts.split(',').map(host_and_port).unzip(),
        false => named
            .iter()
            .map(|host| (escaped(host), ANY_PORT.to_owned()))
            .unzip(),
    };
    if hosts.len() > 1 && hosts.iter().any(String::is_empty) {
        return Err(UrlError::EmptyHost);
    }
    if hosts == [""] {
        hosts = vec!["localhost".to_owned()];
    }
    match parameters.ports.as_slice() {
        [] => {}
        [all] => ports.fill(all.clone()),
        each if each.len() == hosts.len() => ports = each.to_vec(),
        each => {
            let (hosts, ports) = (hosts.len(), each.len());
            return Err(UrlError::Ports { hosts, ports });
        }
    }
    Ok(hosts.into_iter().zip(ports).collect())
}

fn host_and_port(text: &str) -> (String, String) {
    let after_address = text.rfind(']').map_or(0, |at| at + 1);
    match text[after_address..].rfind(':') {
        Some(at) => {
            let (host, port) = text.split_at(after_address + at);
            (host.to_owned(), port[1..].to_owned())
        }
        None => (text.to_owned(), ANY_PORT.to_owned()),
    }
}

/// A path of a socket and an IPv6 address, as a URL has them.
fn escaped(host: &str) -> String {
    if host.starts_with('/') {
        form_urlencoded::byte_serialize(host.as_bytes())
            .collect::<String>()
            .replace('+', "%20")
    } else if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]")
    } else {
        host.to_owned()
    }
}

/// How a host is shown: never with a user or a password.
pub(super) fn name(options: &PgConnectOptions) -> String {
    let host = match options.get_socket() {
        Some(socket) => socket.display().to_string(),
        None if options.get_host().contains(':') => format!("[{}]", options.get_host()),
        None => options.get_host().to_owned(),
    };
    match options.get_port() {
        0 => format!("{host}:{PORT}"),
        port => format!("{host}:{port}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        let parsed = parse(text, Access::Reads).expect(text);
        parsed.hosts.iter().map(name).collect()
    }

    #[test]
    fn hosts_and_ports_are_those_of_libpq() {
        for (text, expected) in [
            ("postgresql://u:p@a:5433,b/db", vec!["a:5433", "b:5432"]),
            (
                "postgres://a,b,c:1/db?target_session_attrs=read-write",
                vec!["a:5432", "b:5432", "c:1"],
            ),
            (
                "postgresql://[::1]:5433,[fd00::2]/db",
                vec!["[::1]:5433", "[fd00::2]:5432"],
            ),
            ("postgresql://u@[::1]:5433/db", vec!["[::1]:5433"]),
            ("postgresql:///db?host=a,b&port=1,2", vec!["a:1", "b:2"]),
            ("postgresql:///db?host=a,b&port=7", vec!["a:7", "b:7"]),
            ("postgresql:///db?host=a&host=b&port=1&port=2", vec!["a:1", "b:2"]),
            (
                "postgresql:///db?host=/run/a,/run/b&port=7",
                vec!["/run/a:7", "/run/b:7"],
            ),
            ("postgresql://%2Frun%2Fa:1,b:2/db", vec!["/run/a:1", "b:2"]),
            (
                "postgresql://x:9/db?hostaddr=127.0.0.1,::1&port=1,2",
                vec!["127.0.0.1:1", "[::1]:2"],
            ),
            // The last `@` ends the password.
            ("postgresql://u:p@ss,w@a,b/db", vec!["a:5432", "b:5432"]),
            (
                "postgresql://u:p@a:5433/db?target_session_attrs=primary",
                vec!["a:5433"],
            ),
        ] {
            assert_eq!(names(text), expected, "{text}");
        }
    }

    #[test]
    fn everything_else_is_the_same_for_each_host() {
        let text = "postgresql://us%40er:p%2Cw@a,b:2/d%20b?target_session_attrs=primary&sslmode=require&options=-c%20jit%3Doff";
        let parsed = parse(text, Access::Writes).expect("a URL");
        assert_eq!((parsed.wanted, parsed.hosts.len()), (Wanted::Primary, 2));
        for host in parsed.hosts {
            assert_eq!(host.get_username(), "us@er");
            assert_eq!(host.get_database(), Some("d b"));
            assert_eq!(host.get_options(), Some("-c jit=off"));
            assert!(matches!(host.get_ssl_mode(), sqlx::postgres::PgSslMode::Require));
            assert!(
                format!("{host:?}").contains("p,w"),
                "the password is that of the URL"
            );
        }
    }

    #[test]
    fn an_invalid_url_says_what_is_allowed_and_not_what_is_secret() {
        for (text, expected) in [
            ("mysql://hunter2@a,b/db", "must be a URL like"),
            (
                "postgresql://u:hunter2@a,b/db?target_session_attrs=readwrite",
                "not \"readwrite\"",
            ),
            (
                "postgresql://u:hunter2@a,b/db?target_session_attrs=standby",
                "accepts no writes",
            ),
            ("postgresql://u:hunter2@a,,b/db", "a host is missing"),
            ("postgresql://u:hunter2@a,b/db?port=1,2,3", "3 ports for 2 hosts"),
            ("postgresql://u:hunter2@a,b:x/db", "must be a URL like"),
            (
                "postgresql://u:hunter2@a,b/db?connect_timeout=soon",
                "connect_timeout must be",
            ),
        ] {
            let error = parse(text, Access::Writes).expect_err(text).to_string();
            assert!(error.contains(expected), "{text}: {error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
        for wanted in [
            "any",
            "read-write",
            "read-only",
            "primary",
            "standby",
            "prefer-standby",
        ] {
            let text = format!("postgresql://a,b/db?target_session_attrs={wanted}");
            assert_eq!(
                parse(&text, Access::Reads).expect(wanted).wanted.to_string(),
                wanted
            );
        }
    }

    #[test]
    fn one_host_is_what_sqlx_makes_of_it() {
        for text in [
            "postgresql://postrider@localhost/db?host=/tmp/x",
            "postgres:///db?host=/tmp/x&port=5433",
            "postgres://u:p@db/x?sslmode=disable",
            "postgresql://%2Ftmp%2Fx/db",
        ] {
            let parsed = parse(text, Access::Writes).expect(text);
            let expected = PgConnectOptions::from_str(text).expect(text);
            assert_eq!(format!("{:?}", parsed.hosts), format!("{:?}", [expected]));
        }
    }
}
