//! How each kind of value is read, and what is said when it can't be.

use std::{
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
    str::FromStr,
    time::Duration,
};

use ipnet::IpNet;
use postrider_dispatcher::retry::{Jitter, parse_wait};
use reqwest::header::{HeaderName, HeaderValue};
use tracing_subscriber::EnvFilter;
use url::Url;

const TIMEOUT_MIN: Duration = Duration::from_millis(100);
const TIMEOUT_MAX: Duration = Duration::from_secs(60);
const RETENTION_SECONDS_MIN: u64 = 10;
const MINUTE: u64 = 60;
const RETENTION_DAYS_MAX: u64 = 3_650;

pub(super) fn parse_address(text: &str) -> Result<SocketAddr, String> {
    text.parse()
        .map_err(|_| format!("`{text}` is not an address and a port like 127.0.0.1:8080"))
}

pub(super) fn parse_public_url(text: &str) -> Result<String, String> {
    let host = text
        .strip_prefix("https://")
        .or_else(|| text.strip_prefix("http://"));
    match host {
        Some(host) if !host.is_empty() && !text.contains([' ', '?', '#']) => {
            Ok(text.trim_end_matches('/').to_owned())
        }
        _ => Err(format!(
            "`{text}` is not a base URL like https://hooks.example.com"
        )),
    }
}

/// The base of a collector, to which the protocol adds its path, or the whole of it.
pub(super) fn parse_collector(text: &str) -> Result<Url, String> {
    const PATH: &str = "v1/traces";
    let wrong = || "it is not a URL like http://collector:4318".to_owned();
    let base = text.trim_end_matches('/');
    let whole = match base.ends_with(PATH) {
        true => base.to_owned(),
        false => format!("{base}/{PATH}"),
    };
    let url = Url::parse(&whole).map_err(|_| wrong())?;
    let fits = matches!(url.scheme(), "http" | "https") && url.has_host() && url.query().is_none();
    fits.then_some(url).ok_or_else(wrong)
}

/// `name=value`, with commas or line ends between them. What is wrong with one is told by its place: it may be a secret.
pub(super) fn parse_headers(text: &str) -> Result<Vec<(HeaderName, HeaderValue)>, String> {
    let parts = text
        .split([',', '\n'])
        .map(str::trim)
        .filter(|part| !part.is_empty());
    let header = |part: &str| {
        let (name, value) = part.split_once('=')?;
        let name = HeaderName::from_bytes(name.trim().as_bytes()).ok()?;
        let mut value = HeaderValue::from_str(value.trim()).ok()?;
        value.set_sensitive(true);
        Some((name, value))
    };
    let wrong = |number| format!("header {number} is not of the form name=value");
    parts
        .enumerate()
        .map(|(place, part)| header(part).ok_or_else(|| wrong(place + 1)))
        .collect()
}

pub(super) fn parse_share(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|share| (0.0..=1.0).contains(share))
        .ok_or_else(|| format!("`{text}` is not a number from 0 to 1"))
}

pub(super) fn parse_jitter(text: &str) -> Result<Jitter, String> {
    let share = text.parse().ok().and_then(Jitter::new);
    share.ok_or_else(|| format!("`{text}` is not a number from 0 to 1"))
}

pub(super) fn parse_timeout(text: &str) -> Result<Duration, String> {
    let wait = parse_wait(text).map_err(|e| e.to_string())?;
    if (TIMEOUT_MIN..=TIMEOUT_MAX).contains(&wait) {
        Ok(wait)
    } else {
        Err(format!("`{text}` is not between 100ms and 60s"))
    }
}

/// `30d`, `12h`, `90m`; seconds are for trials.
pub(super) fn parse_retention(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is not a time like 30d, 12h or 90m, from 10s to {RETENTION_DAYS_MAX}d");
    let unit = text.chars().next_back().ok_or_else(wrong)?;
    let unit_seconds = match unit {
        's' => 1,
        'm' => MINUTE,
        'h' => 60 * MINUTE,
        'd' => 24 * 60 * MINUTE,
        _ => return Err(wrong()),
    };
    let number: u64 = text[..text.len() - 1].trim().parse().map_err(|_| wrong())?;
    number
        .checked_mul(unit_seconds)
        .filter(|seconds| (RETENTION_SECONDS_MIN..=RETENTION_DAYS_MAX * 24 * 60 * MINUTE).contains(seconds))
        .map(Duration::from_secs)
        .ok_or_else(wrong)
}

pub(super) fn number_between<N: FromStr + PartialOrd + std::fmt::Display>(
    text: &str,
    least: N,
    most: N,
) -> Result<N, String> {
    match text.parse::<N>() {
        Ok(number) if number >= least && number <= most => Ok(number),
        _ => Err(format!("`{text}` is not a whole number from {least} to {most}")),
    }
}

pub(super) fn parse_networks(text: &str) -> Result<Vec<IpNet>, String> {
    let network = |part: &str| {
        let part = part.trim();
        part.parse::<IpNet>()
            .map_err(|_| format!("`{part}` is not a network like 10.0.0.0/8 or fd00::/8"))
    };
    text.split(',').map(network).collect()
}

/// Networks, or single addresses: there are often one or two proxies.
pub(super) fn parse_proxies(text: &str) -> Result<Vec<IpNet>, String> {
    let network = |part: &str| {
        let part = part.trim();
        let single = || part.parse().ok().map(|address: IpAddr| IpNet::from(address));
        let found = part.parse().ok().or_else(single);
        found.ok_or_else(|| format!("`{part}` is not an address or a network like 10.0.0.0/8"))
    };
    text.split(',').map(network).collect()
}

pub(super) fn parse_ports(text: &str) -> Result<Vec<u16>, String> {
    text.split(',')
        .map(|part| number_between(part.trim(), 1, u16::MAX))
        .collect()
}

pub(super) fn parse_rate(text: &str) -> Result<NonZeroU32, String> {
    const MOST: u32 = 1_000_000;
    let rate = number_between(text, 1, MOST)?;
    NonZeroU32::new(rate).ok_or_else(|| format!("`{text}` is not a whole number from 1 to {MOST}"))
}

pub(super) fn parse_bool(text: &str) -> Result<bool, String> {
    match text {
        "true" | "1" | "yes" => Ok(true),
        "false" | "0" | "no" => Ok(false),
        _ => Err(format!("`{text}` is neither true nor false")),
    }
}

pub(super) fn parse_filter(text: &str) -> Result<String, String> {
    match EnvFilter::try_new(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(format!(
            "`{text}` is not a filter like info or postrider=debug: {error}"
        )),
    }
}

pub(super) fn parse_format(text: &str) -> Result<bool, String> {
    match text {
        "json" => Ok(true),
        "text" => Ok(false),
        _ => Err(format!("`{text}` is neither text nor json")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxies_are_networks_or_addresses() {
        let read = |text: &str| parse_proxies(text).map(|all| all.iter().map(ToString::to_string).collect());
        let expected: Vec<String> = ["10.0.0.0/8", "192.0.2.7/32", "fd00::1/128"]
            .map(String::from)
            .into();
        assert_eq!(read("10.0.0.0/8, 192.0.2.7,fd00::1"), Ok(expected));
        assert!(read("proxy.internal").is_err());
        assert!(read("10.0.0.0/33").is_err());
    }

    #[test]
    fn a_retention_is_a_number_and_a_unit_within_bounds() {
        assert_eq!(parse_retention("30d"), Ok(Duration::from_secs(30 * 86_400)));
        assert_eq!(parse_retention("90m"), Ok(Duration::from_secs(5_400)));
        assert_eq!(parse_retention("10s"), Ok(Duration::from_secs(10)));
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
            assert!(parse_retention(bad).is_err(), "{bad}");
        }
    }
}
