//! `postrider health`: asks a running process on this machine whether it is ready, or alive. For container health checks
//! and scripts: the image has no curl.

use std::{
    net::SocketAddr,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use clap::Args;
use reqwest::{Client, redirect::Policy};
use serde_json::json;

use crate::{
    connect,
    settings::{Environment, SettingError},
};

/// More than the second that readiness waits for the database, less than health checks usually wait.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(2_500);
const ASK_AGAIN: Duration = Duration::from_millis(100);
const WAIT_SECONDS_MAX: u64 = 600;
/// Of the response's body, in bytes.
const SHOWN_MAX: usize = 1_000;
const LISTEN_DEFAULT: &str = "127.0.0.1:8080";

#[derive(Args)]
pub(crate) struct HealthArguments {
    /// Only check that the process is running, not that it is ready
    #[arg(long)]
    live: bool,
    /// Base URL to ask [default: the address in POSTRIDER_METRICS_LISTEN, or else in POSTRIDER_LISTEN]
    #[arg(long)]
    url: Option<String>,
    /// Ask until it is ready, for at most this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=WAIT_SECONDS_MAX))]
    wait: u64,
    /// Output JSON
    #[arg(long)]
    json: bool,
}

/// A response: whether it is good news, and what it says.
struct Answer {
    status: Option<u16>,
    text: String,
}

impl Answer {
    fn is_good(&self) -> bool {
        self.status == Some(200)
    }
}

/// Status 0 if it is ready (or alive), 1 if it is not, 2 for a usage error.
pub(crate) async fn run(arguments: HealthArguments, environment: &Environment) -> anyhow::Result<ExitCode> {
    let base = match arguments
        .url
        .as_deref()
        .map(str::trim)
        .filter(|url| !url.is_empty())
    {
        Some(url) => url.trim_end_matches('/').to_owned(),
        None => own_address(environment)?,
    };
    let path = if arguments.live { "/healthz" } else { "/readyz" };
    let url = format!("{base}{path}");
    let client = client()?;
    let end = Instant::now() + Duration::from_secs(arguments.wait);
    let answer = loop {
        let answer = ask(&client, &url).await;
        if answer.is_good() || Instant::now() >= end {
            break answer;
        }
        tokio::time::sleep(ASK_AGAIN).await;
    };
    report(&arguments, &url, &answer);
    Ok(match answer.is_good() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Where a process with these settings listens. The metrics address comes first: a dispatcher has no other.
fn own_address(environment: &Environment) -> anyhow::Result<String> {
    let (variable, text) = ["POSTRIDER_METRICS_LISTEN", "POSTRIDER_LISTEN"]
        .into_iter()
        .find_map(|variable| Some((variable, environment.get(variable)?)))
        .unwrap_or(("POSTRIDER_LISTEN", LISTEN_DEFAULT));
    let address: SocketAddr = text
        .parse()
        .map_err(|_| SettingError::invalid(variable, "must be an address and a port, like 127.0.0.1:9464"))?;
    if address.port() == 0 {
        bail!("{variable} leaves the port open: use --url");
    }
    Ok(connect::local_url(address))
}

/// Never through a proxy: the process is on this machine.
fn client() -> anyhow::Result<Client> {
    let client = Client::builder()
        .no_proxy()
        .redirect(Policy::none())
        .timeout(ANSWER_TIMEOUT)
        .build();
    client.context("cannot create the HTTP client")
}

async fn ask(client: &Client, url: &str) -> Answer {
    let mut response = match client.get(url).send().await {
        Ok(response) => response,
        Err(error) => {
            return Answer {
                status: None,
                text: format!("no response: {:#}", anyhow::Error::new(error.without_url())),
            };
        }
    };
    let mut body = Vec::new();
    while body.len() < SHOWN_MAX
        && let Ok(Some(part)) = response.chunk().await
    {
        body.extend_from_slice(&part);
    }
    body.truncate(SHOWN_MAX);
    Answer {
        status: Some(response.status().as_u16()),
        text: String::from_utf8_lossy(&body).trim().to_owned(),
    }
}

fn report(arguments: &HealthArguments, url: &str, answer: &Answer) {
    if arguments.json {
        let (ok, status, detail) = (answer.is_good(), answer.status, &answer.text);
        println!(
            "{}",
            json!({"ok": ok, "url": url, "status": status, "detail": detail})
        );
    } else if answer.is_good() {
        println!("{}", answer.text);
    } else {
        let word = if arguments.live { "not alive" } else { "not ready" };
        eprintln!("postrider: {word}: {url}: {}", answer.text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(pairs: &[(&str, &str)]) -> Environment {
        let owned = |(name, value): &(&str, &str)| (name.to_string(), value.to_string());
        pairs.iter().map(owned).collect()
    }

    #[test]
    fn the_address_is_that_of_the_process_with_these_settings() {
        let of = |pairs: &[(&str, &str)]| own_address(&owned(pairs)).ok();
        let url = |text: &str| Some(text.to_owned());
        assert_eq!(of(&[]), url("http://127.0.0.1:8080"));
        assert_eq!(
            of(&[("POSTRIDER_LISTEN", "10.0.0.7:81")]),
            url("http://10.0.0.7:81")
        );
        let both = [
            ("POSTRIDER_LISTEN", "0.0.0.0:8080"),
            ("POSTRIDER_METRICS_LISTEN", "0.0.0.0:9464"),
        ];
        assert_eq!(of(&both), url("http://127.0.0.1:9464"));
        assert_eq!(
            of(&[("POSTRIDER_METRICS_LISTEN", "[::]:9464")]),
            url("http://[::1]:9464")
        );
        assert_eq!(of(&[("POSTRIDER_LISTEN", "somewhere")]), None);
        assert_eq!(of(&[("POSTRIDER_LISTEN", "127.0.0.1:0")]), None);
    }
}
