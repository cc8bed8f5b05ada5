//! Sends spans to a collector: OTLP over HTTP, as JSON. It never blocks anything else: spans that cannot be sent soon are
//! dropped and counted.

use std::time::Duration;

use chrono::{DateTime, Utc};
use postrider_dispatcher::traces::{self, Span, SpanKind, Tracer, Value};
use reqwest::{Client, StatusCode, header::HeaderMap};
use serde_json::json;
use tokio::{
    sync::mpsc,
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::settings::{Collector, Settings};

/// Spans per request.
const BATCH_MAX: usize = 512;
/// How long to wait for more spans before a partial batch is sent.
const BATCH_DELAY: Duration = Duration::from_millis(500);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
const TRIES: u32 = 3;
const RETRY_DELAY: Duration = Duration::from_millis(500);
/// For the spans left when the process stops.
const FINISH_TIMEOUT: Duration = Duration::from_secs(3);

/// The export of this process, if any.
#[derive(Default)]
pub(crate) struct Export(Option<JoinHandle<()>>);

impl Export {
    /// Starts the export if a collector is set. It ends when every clone of the tracer is gone.
    pub(crate) fn start(
        settings: &Settings,
        role: &'static str,
        stop: CancellationToken,
    ) -> anyhow::Result<(Self, Tracer)> {
        traces::start();
        let Some(collector) = settings.collector.clone() else {
            return Ok(Default::default());
        };
        let (tracer, spans) = Tracer::new(collector.sample);
        let exporter = Exporter::new(collector, &settings.dispatcher.name, role)?;
        let task = tokio::spawn(exporter.run(spans, stop));
        Ok((Self(Some(task)), tracer))
    }

    /// Sends the remaining spans. Call it when every user of the tracer has ended.
    pub(crate) async fn finish(self) {
        if let Some(task) = self.0 {
            let _ = timeout(FINISH_TIMEOUT, task).await;
        }
    }
}

struct Exporter {
    client: Client,
    collector: Collector,
    /// The attributes shared by all spans of this process.
    resource: serde_json::Value,
}

#[derive(Debug, thiserror::Error)]
enum ExportError {
    #[error("cannot reach the collector: {0}")]
    Unreachable(reqwest::Error),
    #[error("the collector responded with {0}")]
    Refused(StatusCode),
}

impl ExportError {
    /// As the protocol defines it.
    fn is_retryable(&self) -> bool {
        match self {
            Self::Unreachable(_) => true,
            Self::Refused(status) => matches!(status.as_u16(), 429 | 502 | 503 | 504),
        }
    }
}

impl Exporter {
    fn new(collector: Collector, name: &str, role: &str) -> anyhow::Result<Self> {
        let mut headers = HeaderMap::new();
        for (name, value) in &collector.headers {
            headers.insert(name.clone(), value.clone());
        }
        let client = Client::builder()
            .default_headers(headers)
            .timeout(REQUEST_TIMEOUT)
            .no_proxy()
            // The headers contain the collector's token, which nobody else may see.
            .redirect(reqwest::redirect::Policy::none())
            .build()?;
        let resource = json!({ "attributes": [
            attribute("service.name", &Value::Text("postrider".to_owned())),
            attribute("service.version", &Value::Text(env!("CARGO_PKG_VERSION").to_owned())),
            attribute("service.instance.id", &Value::Text(name.to_owned())),
            attribute("postrider.role", &Value::Text(role.to_owned())),
        ]});
        Ok(Self {
            client,
            collector,
            resource,
        })
    }

    /// Until every clone of the tracer is gone.
    async fn run(self, mut spans: mpsc::Receiver<Span>, stop: CancellationToken) {
        let mut batch = Vec::with_capacity(BATCH_MAX);
        while spans.recv_many(&mut batch, BATCH_MAX).await > 0 {
            if batch.len() < BATCH_MAX {
                stop.run_until_cancelled(sleep(BATCH_DELAY)).await;
                while batch.len() < BATCH_MAX
                    && let Ok(span) = spans.try_recv()
                {
                    batch.push(span);
                }
            }
            self.send(&batch).await;
            batch.clear();
        }
    }

    async fn send(&self, batch: &[Span]) {
        if batch.is_empty() {
            return;
        }
        let body = document(&self.resource, batch).to_string();
        for number in 1..=TRIES {
            match self.post(&body).await {
                Ok(()) => return traces::count_sent(batch.len()),
                Err(error) if error.is_retryable() && number < TRIES => sleep(RETRY_DELAY * number).await,
                Err(error) => {
                    tracing::warn!(%error, spans = batch.len(), "cannot send spans to the collector; they are dropped");
                    break;
                }
            }
        }
        traces::count_dropped(batch.len());
    }

    async fn post(&self, body: &str) -> Result<(), ExportError> {
        let request = self
            .client
            .post(self.collector.url.clone())
            .header("content-type", "application/json")
            .body(body.to_owned());
        let response = request
            .send()
            .await
            // The URL may contain a token.
            .map_err(|error| ExportError::Unreachable(error.without_url()))?;
        match response.status() {
            status if status.is_success() => Ok(()),
            status => Err(ExportError::Refused(status)),
        }
    }
}

fn document(resource: &serde_json::Value, batch: &[Span]) -> serde_json::Value {
    let spans: Vec<serde_json::Value> = batch.iter().map(span_document).collect();
    json!({ "resourceSpans": [{
        "resource": resource,
        "scopeSpans": [{
            "scope": { "name": "postrider", "version": env!("CARGO_PKG_VERSION") },
            "spans": spans,
        }],
    }]})
}

/// OTLP's JSON: ids are hexadecimal and 64-bit numbers are strings.
fn span_document(span: &Span) -> serde_json::Value {
    const STATUS_ERROR: u8 = 2;
    let kind = match span.kind {
        SpanKind::Internal => 1,
        SpanKind::Client => 3,
        SpanKind::Producer => 4,
    };
    let attributes: Vec<_> = span
        .attributes
        .iter()
        .map(|(key, value)| attribute(key, value))
        .collect();
    let mut written = json!({
        "traceId": span.trace.to_string(),
        "spanId": span.id.to_string(),
        "name": span.name,
        "kind": kind,
        "startTimeUnixNano": nanoseconds(span.began),
        "endTimeUnixNano": nanoseconds(span.ended),
        "attributes": attributes,
    });
    if let Some(parent) = span.parent {
        written["parentSpanId"] = json!(parent.to_string());
    }
    if let Some(error) = &span.error {
        written["status"] = json!({ "code": STATUS_ERROR, "message": error });
    }
    written
}

fn attribute(key: &str, value: &Value) -> serde_json::Value {
    let value = match value {
        Value::Text(text) => json!({ "stringValue": text }),
        Value::Number(number) => json!({ "intValue": number.to_string() }),
    };
    json!({ "key": key, "value": value })
}

fn nanoseconds(at: DateTime<Utc>) -> String {
    at.timestamp_nanos_opt().unwrap_or_default().to_string()
}
