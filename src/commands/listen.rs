//! `listen --forward-to URL`: a tenant's events on this machine. The server holds a temporary endpoint; what it would
//! send comes here over one connection, and goes on to the receiver with the same headers and the same bytes.
//! Invariant: the endpoint ends with this process, and each event is forwarded once, in the order it came in.

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

use super::{
    endpoints::parse_signature,
    output::{BAD, SOFT, STRONG, json_line, status_style, told_to_stop},
    reach::{Failure, InTenant},
};
use crate::settings::Environment;

const SECRET: &str = "POSTRIDER_ENDPOINT_SECRET";
const RECONNECT_TIMES_MAX: u32 = 30;
const RECONNECT_WAIT: Duration = Duration::from_secs(1);

/// A secret of your own, which stays the same each time, is in POSTRIDER_ENDPOINT_SECRET.
#[derive(Args)]
pub(crate) struct ListenArguments {
    /// The receiver on this machine
    #[arg(long, value_name = "URL")]
    forward_to: Url,
    /// Types to listen for: invoice.paid, invoice.*, * [default: *]
    #[arg(long, value_delimiter = ',')]
    types: Vec<String>,
    /// t-v1 or standard [default: t-v1]
    #[arg(long, value_parser = parse_signature)]
    signature: Option<SignatureFormat>,
    /// Seconds the receiver has for an answer
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
        bail!("--forward-to takes a URL like http://localhost:3000/hook");
    }
    let (client, tenant) = arguments.at.open(environment).await?;
    let asked = NewListener {
        types: (!arguments.types.is_empty()).then(|| arguments.types.clone()),
        signature: arguments.signature,
        secret: environment.secret(SECRET)?,
    };
    let mut session = Session {
        forward: Forward::new(arguments)?,
        client,
        tenant,
        asked,
        listener: None,
        json: arguments.at.reach.json,
    };
    let ended = tokio::select! {
        ended = session.run() => ended,
        () = told_to_stop() => Ok(()),
    };
    session.close().await;
    ended.map(|()| ExitCode::SUCCESS)
}

struct Session {
    client: Client,
    tenant: String,
    asked: NewListener,
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
                    self.pass_on(stream).await
                }
                Err(error) => Err(error),
            };
            if let Err(error) = ended {
                // What the server refuses will be refused again; a connection may come back.
                if matches!(error.problem(), Some(problem) if problem.status < 500 && problem.status != 404 && problem.status != 429)
                {
                    return Err(error.into());
                }
                failures += 1;
                if failures > RECONNECT_TIMES_MAX || self.listener.is_none() {
                    return Err(error.into());
                }
                if !self.json {
                    anstream::eprintln!("{SOFT}{error}; trying again{SOFT:#}");
                }
            }
            tokio::time::sleep(RECONNECT_WAIT).await;
        }
    }

    /// To the listener that is there, or to a new one when that has run out.
    async fn connect(&mut self) -> Result<Stream, postrider_client::Error> {
        if let Some(listener) = &self.listener {
            match self.client.listen(&self.tenant, &listener.id).await {
                Err(error) if error.problem().is_some_and(|problem| problem.status == 404) => {}
                opened => return opened,
            }
        }
        let made = self.client.create_listener(&self.tenant, &self.asked).await?;
        // The receiver goes on verifying with what it was told at first.
        if made.signature != SignatureFormat::StandardEd25519 {
            self.asked.secret = Some(made.secret.clone());
        }
        if self.listener.is_none() {
            self.greet(&made);
        }
        let id = made.id.clone();
        self.listener = Some(made);
        self.client.listen(&self.tenant, &id).await
    }

    fn greet(&self, listener: &Listener) {
        if self.json {
            json_line(&json!({"listener": listener, "forward_to": self.forward.url.as_str()}));
            return;
        }
        anstream::println!(
            "Listening for {} of {STRONG}{}{STRONG:#}, forwarding to {STRONG}{}{STRONG:#}",
            listener.types.join(", "),
            self.tenant,
            self.forward.url
        );
        anstream::println!("The receiver verifies with {}", listener.secret);
    }

    async fn pass_on(&self, mut stream: Stream) -> Result<(), postrider_client::Error> {
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
        let answer = match (&result.status, &result.error) {
            (Some(status), _) => status.to_string(),
            (None, Some(error)) => error.clone(),
            (None, None) => String::new(),
        };
        anstream::println!(
            "{SOFT}{}{SOFT:#} {} {SOFT}{}{SOFT:#} {style}{answer}{style:#} {SOFT}{} ms{SOFT:#}",
            Local::now().format("%H:%M:%S"),
            handover.type_name,
            handover.event,
            result.duration.as_millis()
        );
    }

    /// The server would end it by itself soon; nothing has to wait for that.
    async fn close(&self) {
        if let Some(listener) = &self.listener
            && let Err(error) = self.client.delete_listener(&self.tenant, &listener.id).await
            && error.problem().is_none_or(|problem| problem.status != 404)
        {
            anstream::eprintln!("{BAD}{error}{BAD:#}");
        }
    }
}

/// The way to the receiver on this machine.
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
            .context("the HTTP client could not be made")?;
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
            Ok(answer) => (Some(answer.status().as_u16()), None),
            Err(error) if error.is_timeout() => (None, Some("no answer in time".to_owned())),
            Err(error) if error.is_connect() => (None, Some(format!("nobody answers at {}", self.url))),
            Err(error) => (None, Some(error.to_string())),
        };
        Forwarded {
            status,
            error,
            duration: began.elapsed(),
        }
    }
}
