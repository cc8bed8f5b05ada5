//! Prometheus metrics of the API and the pages. Registered once, as in the dispatcher; see `meters.rs` there.

use std::{
    sync::LazyLock,
    time::{Duration, Instant},
};

use axum::{
    extract::{Request, State},
    http::StatusCode,
    middleware::Next,
    response::Response,
};
use metrics::{Counter, Gauge, Histogram};
use postrider_dispatcher::telemetry::metrics::{histogram, labelled_counter, labelled_histogram};
use postrider_sender::Emitted;

pub(crate) static METRICS: LazyLock<Meters> = LazyLock::new(Meters::new);

/// Registers all series, so that they are visible from the start. Call it after the recorder is installed.
pub(crate) fn start() {
    LazyLock::force(&METRICS);
}

/// How an event came in. Events emitted with SQL are the remainder of what Postgres has stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Http,
    Grpc,
}

impl Source {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
        }
    }
}

/// How a repeated request was recognized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Key {
    EventId,
    IdempotencyKey,
}

/// The result of a repeated request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Repeated {
    /// The same response as the first time.
    Same,
    /// Rejected: its content was different.
    Conflict,
}

/// The kind of path: a label with few values, whatever is added to the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Emit,
    Api,
    Page,
    Open,
}

impl Kind {
    const ALL: [(Self, &'static str); 4] = [
        (Self::Emit, "emit"),
        (Self::Api, "api"),
        (Self::Page, "page"),
        (Self::Open, "open"),
    ];
}

const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

struct Requests {
    by_class: [Counter; CLASSES.len()],
    seconds: Histogram,
}

pub(crate) struct Meters {
    emitted: [Counter; 2],
    repeated: [[Counter; 2]; 2],
    emit_events: Histogram,
    emit_seconds: Histogram,
    requests: [Requests; Kind::ALL.len()],
    calls: [[Counter; 2]; 3],
}

/// A gRPC call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Emit,
    EmitBatch,
    EmitStream,
}

/// Whether this process reaches a cell's database.
pub(crate) fn cell_up(cell: &str) -> Gauge {
    metrics::describe_gauge!(
        "postrider_cell_up",
        "Whether the API reaches the database of a cell (1) or not (0)"
    );
    metrics::gauge!("postrider_cell_up", "cell" => cell.to_owned())
}

impl Meters {
    fn new() -> Self {
        let repeated = |key| {
            ["same", "conflict"].map(|result| {
                labelled_counter(
                    "postrider_duplicates_total",
                    "Repeated events and requests: same response as the first time, or rejected as a conflict",
                    &[("key", key), ("result", result)],
                )
            })
        };
        Self {
            emitted: [Source::Http, Source::Grpc].map(|source| {
                labelled_counter(
                    "postrider_events_emitted_total",
                    "New events, by the protocol they were emitted with",
                    &[("source", source.as_str())],
                )
            }),
            repeated: ["event_id", "idempotency_key"].map(repeated),
            emit_events: histogram("postrider_emit_events", "Events per emit statement"),
            emit_seconds: histogram("postrider_emit_seconds", "Duration of an emit statement"),
            requests: Kind::ALL.map(|(_, kind)| Requests {
                by_class: CLASSES.map(|class| {
                    labelled_counter(
                        "postrider_http_requests_total",
                        "HTTP requests, by kind of path and status class",
                        &[("kind", kind), ("status", class)],
                    )
                }),
                seconds: labelled_histogram(
                    "postrider_http_request_seconds",
                    "Time from a request to its response headers",
                    &[("kind", kind)],
                ),
            }),
            calls: ["emit", "emit_batch", "emit_stream"].map(|method| {
                ["ok", "error"].map(|result| {
                    labelled_counter(
                        "postrider_grpc_calls_total",
                        "gRPC calls by method and result",
                        &[("method", method), ("result", result)],
                    )
                })
            }),
        }
    }

    /// Call it after the commit.
    pub(crate) fn emitted<'e>(&self, source: Source, events: impl IntoIterator<Item = &'e Emitted>) {
        let (mut new, mut again) = (0, 0);
        for event in events {
            match event.duplicate {
                true => again += 1,
                false => new += 1,
            }
        }
        self.emitted[source as usize].increment(new);
        self.repeated[Key::EventId as usize][Repeated::Same as usize].increment(again);
    }

    pub(crate) fn repeated(&self, key: Key, result: Repeated) {
        self.repeated[key as usize][result as usize].increment(1);
    }

    pub(crate) fn statement(&self, events: usize, took: Duration) {
        self.emit_events.record(events as f64);
        self.emit_seconds.record(took);
    }

    pub(crate) fn called<T, E>(&self, call: Call, result: &Result<T, E>) {
        self.calls[call as usize][usize::from(result.is_err())].increment(1);
    }

    fn responded(&self, kind: Kind, status: StatusCode, took: Duration) {
        let requests = &self.requests[kind as usize];
        let class = usize::from(status.as_u16() / 100).clamp(1, CLASSES.len()) - 1;
        requests.by_class[class].increment(1);
        requests.seconds.record(took);
    }
}

/// The outermost layer of a route.
pub(crate) async fn measure(State(kind): State<Kind>, request: Request, next: Next) -> Response {
    let began = Instant::now();
    let response = next.run(request).await;
    METRICS.responded(kind, response.status(), began.elapsed());
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_in_the_order_of_their_counters() {
        for (place, (kind, _)) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, place);
        }
    }
}
