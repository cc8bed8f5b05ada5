//! Parsers of setting values. An error states the requirement; the table adds the setting's name and, unless it is secret,
//! the value.

use std::{
    convert::Infallible,
    fmt::Display,
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

use ipnet::IpNet;
use postrider_dispatcher::{
    connector::{Access, Connector, UrlError},
    proxy::Proxy,
    retry::{Jitter, Schedule, parse_wait},
    vault::Vault,
};
use postrider_proto::limits::SCHEDULE_STEPS_MAX;
use reqwest::header::{HeaderName, HeaderValue};
use url::Url;

use super::CellUrl;
use crate::log::check_filter;

type Requirement = &'static str;

const PASSWORD_CHARS_MIN: usize = 8;
const ADMIN_KEY_CHARS_MIN: usize = 16;
const REQUEST_RATE_MAX: u32 = 1_000_000;
const DAY_SECONDS: u64 = 24 * 60 * 60;

pub(super) fn path(text: &str) -> Result<PathBuf, Infallible> {
    Ok(PathBuf::from(text))
}

pub(super) fn address(text: &str) -> Result<SocketAddr, Requirement> {
    text.parse()
        .map_err(|_| "must be an address and a port like 127.0.0.1:8080")
}

pub(super) fn base_url(text: &str) -> Result<String, Requirement> {
    let host = text
        .strip_prefix("https://")
        .or_else(|| text.strip_prefix("http://"));
    match host {
        Some(host) if !host.is_empty() && !text.contains([' ', '?', '#']) => {
            Ok(text.trim_end_matches('/').to_owned())
        }
        _ => Err("must be a base URL like https://hooks.example.com"),
    }
}

pub(super) fn database_url(text: &str) -> Result<Connector, UrlError> {
    Connector::parse(text, Access::Writes)
}

pub(super) fn cell_url(text: &str) -> Result<CellUrl, UrlError> {
    Ok(CellUrl {
        connector: database_url(text)?,
        text: text.to_owned(),
    })
}

/// Of libpq, which the server that uses it validates.
pub(super) fn connection_string(text: &str) -> Result<String, Requirement> {
    let is_url = text.starts_with("postgresql://") || text.starts_with("postgres://");
    match is_url || text.contains('=') {
        true => Ok(text.to_owned()),
        false => Err(
            "must be a URL like postgresql://user@host:5432/database, or pairs like host=a user=b dbname=c",
        ),
    }
}

pub(super) fn replica_url(text: &str) -> Result<Connector, UrlError> {
    Connector::parse(text, Access::Reads)
}

/// A comma also separates the hosts of one URL: only one that a URL follows separates URLs.
pub(super) fn database_urls(text: &str) -> Result<Vec<Connector>, UrlError> {
    let mut urls: Vec<String> = Vec::new();
    for line in text.split('\n') {
        let mut continues = false;
        for part in line.split(',').map(str::trim) {
            let starts = part.starts_with("postgres://") || part.starts_with("postgresql://");
            match urls.last_mut() {
                Some(url) if continues && !starts => *url += &format!(",{part}"),
                _ if part.is_empty() => {}
                _ => {
                    urls.push(part.to_owned());
                    continues = true;
                }
            }
        }
    }
    // One that ends a list.
    urls.iter()
        .map(|url| database_url(url.trim_end_matches(',')))
        .collect()
}

/// Separated by commas or newlines.
fn list(text: &str) -> impl Iterator<Item = &str> {
    text.split([',', '\n'])
        .map(str::trim)
        .filter(|part| !part.is_empty())
}

pub(super) fn master_key(text: &str) -> Result<Vault, Requirement> {
    Vault::parse(text).map_err(|_| "must be 32 bytes in base64, or several such keys separated by commas")
}

pub(super) fn api_key(text: &str) -> Result<String, String> {
    at_least(text, ADMIN_KEY_CHARS_MIN)
}

pub(super) fn password(text: &str) -> Result<String, String> {
    at_least(text, PASSWORD_CHARS_MIN)
}

fn at_least(text: &str, chars_min: usize) -> Result<String, String> {
    match text.chars().count() >= chars_min {
        true => Ok(text.to_owned()),
        false => Err(format!("must have at least {chars_min} characters")),
    }
}

/// The base of a collector, to which the protocol adds its path, or the full URL.
pub(super) fn collector_url(text: &str) -> Result<Url, Requirement> {
    const PATH: &str = "v1/traces";
    const REQUIREMENT: Requirement = "must be a URL like http://collector:4318";
    let base = text.trim_end_matches('/');
    let full = match base.ends_with(PATH) {
        true => base.to_owned(),
        false => format!("{base}/{PATH}"),
    };
    let url = Url::parse(&full).map_err(|_| REQUIREMENT)?;
    let is_valid = matches!(url.scheme(), "http" | "https") && url.has_host() && url.query().is_none();
    is_valid.then_some(url).ok_or(REQUIREMENT)
}

/// An invalid header is identified by its number: it may be a secret.
pub(super) fn headers(text: &str) -> Result<Vec<(HeaderName, HeaderValue)>, String> {
    let header = |part: &str| {
        let (name, value) = part.split_once('=')?;
        let name = HeaderName::from_bytes(name.trim().as_bytes()).ok()?;
        let mut value = HeaderValue::from_str(value.trim()).ok()?;
        value.set_sensitive(true);
        Some((name, value))
    };
    list(text)
        .enumerate()
        .map(|(index, part)| {
            header(part).ok_or_else(|| format!("header {} must have the form name=value", index + 1))
        })
        .collect()
}

pub(super) fn fraction(text: &str) -> Result<f64, Requirement> {
    text.parse()
        .ok()
        .filter(|fraction| (0.0..=1.0).contains(fraction))
        .ok_or("must be a number from 0 to 1")
}

pub(super) fn jitter(text: &str) -> Result<Jitter, Requirement> {
    Jitter::new(fraction(text)?).ok_or("must be a number from 0 to 1")
}

pub(super) fn schedule(text: &str) -> Result<Schedule, String> {
    Schedule::from_str(text).map_err(|_| {
        format!(
            "must be 1 to {SCHEDULE_STEPS_MAX} delays like 0s,1m,2h separated by commas, each at most 30d"
        )
    })
}

pub(super) fn timeout(text: &str) -> Result<Duration, Requirement> {
    const ALLOWED: std::ops::RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(60);
    parse_wait(text)
        .ok()
        .filter(|timeout| ALLOWED.contains(timeout))
        .ok_or("must be a duration from 100ms to 60s")
}

pub(super) fn drain_delay(text: &str) -> Result<Duration, Requirement> {
    const MAX: Duration = Duration::from_secs(60);
    parse_wait(text)
        .ok()
        .filter(|delay| *delay <= MAX)
        .ok_or("must be a duration from 0s to 60s")
}

/// Seconds are for tests.
pub(super) fn retention(text: &str) -> Result<Duration, Requirement> {
    const REQUIREMENT: Requirement = "must be a duration like 30d, 12h or 90m, from 10s to 3650d";
    const ALLOWED: std::ops::RangeInclusive<u64> = 10..=3_650 * DAY_SECONDS;
    let unit = text.chars().next_back().ok_or(REQUIREMENT)?;
    let unit_seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 60 * 60,
        'd' => DAY_SECONDS,
        _ => return Err(REQUIREMENT),
    };
    let number: u64 = text[..text.len() - 1].trim().parse().map_err(|_| REQUIREMENT)?;
    number
        .checked_mul(unit_seconds)
        .filter(|seconds| ALLOWED.contains(seconds))
        .map(Duration::from_secs)
        .ok_or(REQUIREMENT)
}

pub(super) fn number<N: FromStr + PartialOrd + Display>(text: &str, least: N, most: N) -> Result<N, String> {
    match text.parse::<N>() {
        Ok(number) if number >= least && number <= most => Ok(number),
        _ => Err(format!("must be a whole number from {least} to {most}")),
    }
}

pub(super) fn rate(text: &str) -> Result<NonZeroU32, String> {
    let most = NonZeroU32::new(REQUEST_RATE_MAX).unwrap_or(NonZeroU32::MIN);
    number(text, NonZeroU32::MIN, most)
}

pub(super) fn networks(text: &str) -> Result<Vec<IpNet>, Requirement> {
    text.split(',')
        .map(|part| part.trim().parse())
        .collect::<Result<_, _>>()
        .map_err(|_| "must be networks like 10.0.0.0/8 or fd00::/8, separated by commas")
}

pub(super) fn networks_or_addresses(text: &str) -> Result<Vec<IpNet>, Requirement> {
    let network = |part: &str| {
        let address = || part.parse().ok().map(|address: IpAddr| IpNet::from(address));
        part.parse().ok().or_else(address)
    };
    text.split(',')
        .map(|part| network(part.trim()))
        .collect::<Option<_>>()
        .ok_or("must be networks or addresses like 10.0.0.0/8 or 192.0.2.7, separated by commas")
}

pub(super) fn ports(text: &str) -> Result<Vec<u16>, Requirement> {
    text.split(',')
        .map(|part| number(part.trim(), 1, u16::MAX))
        .collect::<Result<_, _>>()
        .map_err(|_| "must be ports from 1 to 65535, separated by commas")
}

pub(super) fn boolean(text: &str) -> Result<bool, Requirement> {
    match text {
        "true" | "1" | "yes" => Ok(true),
        "false" | "0" | "no" => Ok(false),
        _ => Err("must be true or false"),
    }
}

pub(super) fn proxy(text: &str) -> Result<Proxy, Requirement> {
    Proxy::from_str(text).map_err(|_| "must be a URL like http://user:password@proxy:3128")
}

pub(super) fn log_filter(text: &str) -> Result<String, String> {
    check_filter(text).map(|()| text.to_owned())
}

/// Whether it is JSON.
pub(super) fn log_format(text: &str) -> Result<bool, Requirement> {
    match text {
        "json" => Ok(true),
        "text" => Ok(false),
        _ => Err("must be text or json"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxies_are_networks_or_addresses() {
        let read =
            |text: &str| networks_or_addresses(text).map(|all| all.iter().map(ToString::to_string).collect());
        let expected: Vec<String> = ["10.0.0.0/8", "192.0.2.7/32", "fd00::1/128"]
            .map(String::from)
            .into();
        assert_eq!(read("10.0.0.0/8, 192.0.2.7,fd00::1"), Ok(expected));
        assert!(read("proxy.internal").is_err());
        assert!(read("10.0.0.0/33").is_err());
    }

    #[test]
    fn a_retention_is_a_number_and_a_unit_within_bounds() {
        assert_eq!(retention("30d"), Ok(Duration::from_secs(30 * DAY_SECONDS)));
        assert_eq!(retention("90m"), Ok(Duration::from_secs(5_400)));
        assert_eq!(retention("10s"), Ok(Duration::from_secs(10)));
        for bad in [
            "",
            "d",
            "9s",
            "0d",
            "30",
            "30 weeks",
            "3651d",
            "-1d",
            "1.5h",
            "30ä",
            "99999999999999999999d",
        ] {
            assert!(retention(bad).is_err(), "{bad}");
        }
    }
}
