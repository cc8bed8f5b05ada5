//! `listen --forward-to URL`: a tenant's events on this machine. The server creates a temporary endpoint and streams its
//! requests here over one connection; they are forwarded to the receiver with the same headers and the same bytes.
//! Invariant: the endpoint ends with this process, and each event is forwarded at least once, in the order received.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use chrono::Local;
use clap::Args;
use postrider_client::{Client, Handover, Listener, NewListener, Stream};
use postrider_proto::state::SignatureFormat;
use reqwest::redirect::Policy;
use serde_json::json;
use url::Url;

use crate::{
    endpoints::parse_signature,
    output::{BAD, SOFT, STRONG, json_line, status_style, stop_signal},
    reach::{Failure, InTenant},
    settings::{ENDPOINT_SECRET, Environment},
};

const RECONNECT_TIMES_MAX: u32 = 30;
const RECONNECT_WAIT: Duration = Duration::from_secs(1);

/// Set POSTRIDER_ENDPOINT_SECRET to use the same signing secret each time.
#[derive(Args)]
pub struct ListenArguments {
    /// URL of the receiver on this machine
    #[arg(long, value_name = "URL")]
    forward_to: Url,
    /// Event types: invoice.paid, invoice.*, * [default: *]
    #[arg(long, value_delimiter = ',')]
    types: Vec<String>,
    /// Signature format: t-v1, standard or standard-ed25519 [default: t-v1]
    #[arg(long, value_parser = parse_signature)]
    signature: Option<SignatureFormat>,
    /// Response timeout of the receiver, in seconds
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=60))]
    timeout: u64,
    #[command(flatten)]
    at: InTenant,
}

pub(crate) async fn run(arguments: ListenArguments, environment: &Environment) -> Result<ExitCode, Failure> {
    listen(&arguments, environment)
        .await
        .map_err(|error| arguments.at.reach.failure(error))
}

async fn listen(arguments: &ListenArguments, environment: &Environment) -> anyhow::Result<ExitCode> {
    if !matches!(arguments.forward_to.scheme(), "http" | "https") {
        bail!("--forward-to must be a URL like http://localhost:3000/hook");
    }
    let (client, tenant) = arguments.at.open(environment).await?;
    let request = NewListener {
        types: (!arguments.types.is_empty()).then(|| arguments.types.clone()),
        signature: arguments.signature,
        secret: environment.secret(&ENDPOINT_SECRET)?,
    };
    let mut session = Session {
        forward: Forward::new(arguments)?,
        client,
        tenant,
        request,
        listener: None,
        json: arguments.at.reach.json,
    };
    let ended = tokio::select! {
        ended = session.run() => ended,
        () = stop_signal() => Ok(()),
    };
    session.close().await;
    ended.map(|()| ExitCode::SUCCESS)
}

struct Session {
    client: Client,
    tenant: String,
    request: NewListener,
    forward: Forward,
    listener: Option<Listener>,
    json: bool,
}

impl Session {
    async fn run(&mut self) -> anyhow::Result<()> {
        let mut failures = 0;
        loop {
            let ended = match self.connect().await {
                Ok(stream) => {
                    failures = 0;
                    self.forward_all(stream).await
                }
                Err(error) => Err(error),
            };
            if let Err(error) = ended {
                // A rejected request would be rejected again; a lost connection may come back.
                if matches!(error.problem(), Some(problem) if problem.status < 500 && problem.status != 404 && problem.status != 429)
                {
                    return Err(error.into());
                }
                failures += 1;
                if failures > RECONNECT_TIMES_MAX || self.listener.is_none() {
                    return Err(error.into());
                }
                if !self.json {
                    anstream::eprintln!("{SOFT}{error}; reconnecting{SOFT:#}");
                }
            }
            tokio::time::sleep(RECONNECT_WAIT).await;
        }
    }

    /// To the existing listener, or to a new one when that has expired.
    async fn connect(&mut self) -> Result<Stream, postrider_client::Error> {
        if let Some(listener) = &self.listener {
            match self.client.listen(&self.tenant, &listener.id).await {
                Err(error) if error.problem().is_some_and(|problem| problem.status == 404) => {}
                opened => return opened,
            }
        }
        let created = self.client.create_listener(&self.tenant, &self.request).await?;
        // A new listener keeps the secret, so that the receiver can go on verifying.
        if created.signature != SignatureFormat::StandardEd25519 {
            self.request.secret = Some(created.secret.clone());
        }
        if self.listener.is_none() {
            self.greet(&created);
        }
        let id = created.id.clone();
        self.listener = Some(created);
        self.client.listen(&self.tenant, &id).await
    }

    fn greet(&self, listener: &Listener) {
        if self.json {
            json_line(&json!({"listener": listener, "forward_to": self.forward.url.as_str()}));
            return;
        }
        anstream::println!(
            "Forwarding {} of {STRONG}{}{STRONG:#} to {STRONG}{}{STRONG:#}",
            listener.types.join(", "),
            self.tenant,
            self.forward.url
        );
        anstream::println!("Signing secret: {}", listener.secret);
    }

    async fn forward_all(&self, mut stream: Stream) -> Result<(), postrider_client::Error> {
        while let Some(handover) = stream.next().await? {
            let result = self.forward.send(&handover).await;
            self.show(&handover, &result);
        }
        Ok(())
    }

    fn show(&self, handover: &Handover, result: &Forwarded) {
        if self.json {
            json_line(&json!({
                "event": handover.event, "type": handover.type_name, "status": result.status,
                "error": result.error, "duration_ms": result.duration.as_millis() as u64,
            }));
            return;
        }
        let style = status_style(result.status.map(i64::from));
        let outcome = match (&result.status, &result.error) {
            (Some(status), _) => status.to_string(),
            (None, Some(error)) => error.clone(),
            (None, None) => String::new(),
        };
        anstream::println!(
            "{SOFT}{}{SOFT:#} {} {SOFT}{}{SOFT:#} {style}{outcome}{style:#} {SOFT}{} ms{SOFT:#}",
            Local::now().format("%H:%M:%S"),
            handover.type_name,
            handover.event,
            result.duration.as_millis()
        );
    }

    /// The server would remove it soon anyway; this does not wait for that.
    async fn close(&self) {
        if let Some(listener) = &self.listener
            && let Err(error) = self.client.delete_listener(&self.tenant, &listener.id).await
            && error.problem().is_none_or(|problem| problem.status != 404)
        {
            anstream::eprintln!("{BAD}{error}{BAD:#}");
        }
    }
}

struct Forward {
    http: reqwest::Client,
    url: Url,
}

struct Forwarded {
    status: Option<u16>,
    error: Option<String>,
    duration: Duration,
}

impl Forward {
    fn new(arguments: &ListenArguments) -> anyhow::Result<Self> {
        let http = reqwest::Client::builder()
            .redirect(Policy::none())
            .no_proxy()
            .timeout(Duration::from_secs(arguments.timeout))
            .build()
            .context("cannot create the HTTP client")?;
        Ok(Self {
            http,
            url: arguments.forward_to.clone(),
        })
    }

    async fn send(&self, handover: &Handover) -> Forwarded {
        let began = Instant::now();
        let mut request = self.http.post(self.url.clone()).body(handover.body.clone());
        for (name, value) in &handover.headers {
            request = request.header(name, value);
        }
        let sent = request.send().await;
        let (status, error) = match sent {
            Ok(response) => (Some(response.status().as_u16()), None),
            Err(error) if error.is_timeout() => (None, Some("timed out".to_owned())),
            Err(error) if error.is_connect() => (None, Some(format!("cannot connect to {}", self.url))),
            Err(error) => (None, Some(error.to_string())),
        };
        Forwarded {
            status,
            error,
            duration: began.elapsed(),
        }
    }
}
