//! Traces: an event's emit, its wait and its attempts as spans of one trace. Off unless the operator configures a
//! collector; then nothing is created, read or sent. The composition root exports the spans.
//!
//! One trace: `emit` (by the API) ─▶ `wait` (one per delivery, until its first attempt) ─▶ `attempt` (one each). An
//! event without a trace starts one whose id is derived from its own, so that every process computes the same.

use std::sync::{Arc, LazyLock};

use ::metrics::Counter;
use chrono::{DateTime, TimeDelta, Utc};
use postrider_proto::{
    DeliveryId, Outcome,
    trace::{SpanId, TraceContext, TraceId},
};
use tokio::sync::mpsc;

use crate::telemetry::metrics;

/// Spans waiting to be exported. Beyond this they are dropped: a delivery never waits for a collector.
const WAITING_MAX: usize = 8_192;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanKind {
    Internal,
    /// A call to another service.
    Client,
    /// A message that another service will receive.
    Producer,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Text(String),
    Number(i64),
}

/// A finished unit of work.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    pub name: &'static str,
    pub kind: SpanKind,
    pub trace: TraceId,
    pub id: SpanId,
    pub parent: Option<SpanId>,
    pub began: DateTime<Utc>,
    pub ended: DateTime<Utc>,
    pub attributes: Vec<(&'static str, Value)>,
    /// The error, if it failed.
    pub error: Option<String>,
}

/// Collects spans. Clones share one channel; a disabled tracer drops everything.
#[derive(Clone, Default)]
pub struct Tracer(Option<Arc<Inner>>);

struct Inner {
    spans: mpsc::Sender<Span>,
    /// Sampling ratio of traces that start here, from 0 to 1.
    share: f64,
}

static DROPPED: LazyLock<Counter> = LazyLock::new(|| spans("dropped"));
static SENT: LazyLock<Counter> = LazyLock::new(|| spans("sent"));

fn spans(result: &'static str) -> Counter {
    let help = "Trace spans sent to the collector, or dropped because it was too slow or rejected them";
    metrics::labelled_counter("postrider_spans_total", help, &[("result", result)])
}

/// Registers the series, so that they are exported from the start.
pub fn start() {
    LazyLock::force(&DROPPED);
    LazyLock::force(&SENT);
}

pub fn count_sent(spans: usize) {
    SENT.increment(spans as u64);
}

pub fn count_dropped(spans: usize) {
    DROPPED.increment(spans as u64);
}

impl Tracer {
    /// An enabled tracer, and the receiver of its spans.
    pub fn new(share: f64) -> (Self, mpsc::Receiver<Span>) {
        let (spans, out) = mpsc::channel(WAITING_MAX);
        (Self(Some(Arc::new(Inner { spans, share }))), out)
    }

    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    fn send(&self, span: Span) {
        if let Some(inner) = &self.0
            && inner.spans.try_send(span).is_err()
        {
            count_dropped(1);
        }
    }

    /// An emit begins; its producer may already have a trace. `None` when tracing is off.
    pub fn emit_begins(&self, producer: Option<TraceContext>, now: DateTime<Utc>) -> Option<Emit> {
        let inner = self.0.as_ref()?;
        let trace = match producer {
            Some(context) => context.trace,
            None => TraceId::new(rand::random())?,
        };
        Some(Emit {
            context: TraceContext {
                trace,
                span: SpanId::new(rand::random())?,
                sampled: producer.map_or_else(|| trace.is_among(inner.share), |context| context.sampled),
            },
            parent: producer.map(|context| context.span),
            began: now,
        })
    }

    pub fn emit_ended(
        &self,
        emit: &Emit,
        now: DateTime<Utc>,
        attributes: Vec<(&'static str, Value)>,
        error: Option<String>,
    ) {
        if emit.context.sampled {
            self.send(Span {
                name: "emit",
                kind: SpanKind::Producer,
                trace: emit.context.trace,
                id: emit.context.span,
                parent: emit.parent,
                began: emit.began,
                ended: now,
                attributes,
                error,
            });
        }
    }

    /// The context that an attempt sends to the receiver; `stored` is the event's. `None` when tracing is off.
    pub fn attempt_context(
        &self,
        delivery: DeliveryId,
        stored: Option<TraceContext>,
        started_at: DateTime<Utc>,
    ) -> Option<TraceContext> {
        let inner = self.0.as_ref()?;
        let trace = stored.map_or_else(|| TraceId::of_event(delivery.event), |context| context.trace);
        Some(TraceContext {
            trace,
            span: SpanId::of_attempt(delivery, started_at.timestamp_micros()),
            sampled: stored.map_or_else(|| trace.is_among(inner.share), |context| context.sampled),
        })
    }

    /// An attempt begins. `stored` is the event's stored trace context.
    pub(crate) fn attempt_begins(
        &self,
        delivery: DeliveryId,
        stored: Option<TraceContext>,
        started_at: DateTime<Utc>,
        is_replay: bool,
    ) -> Option<Attempt> {
        let emit = stored.map(|context| context.span);
        Some(Attempt {
            context: self.attempt_context(delivery, stored, started_at)?,
            emit,
            // A replay did not wait since the emit.
            parent: if is_replay {
                emit
            } else {
                Some(SpanId::of_delivery(delivery))
            },
            delivery,
        })
    }

    pub(crate) fn attempt_ended(&self, attempt: &Attempt, made: &AttemptDetails<'_>) {
        if !attempt.context.sampled {
            return;
        }
        if made.number == 1 && attempt.parent != attempt.emit {
            self.send(attempt.waited(made));
        }
        self.send(attempt.span(made));
    }
}

/// An emit in progress.
#[derive(Debug, Clone, Copy)]
pub struct Emit {
    /// The context its events carry.
    pub context: TraceContext,
    parent: Option<SpanId>,
    began: DateTime<Utc>,
}

/// An attempt in progress.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attempt {
    /// The context sent to the receiver.
    pub(crate) context: TraceContext,
    emit: Option<SpanId>,
    parent: Option<SpanId>,
    delivery: DeliveryId,
}

/// Details of a finished attempt.
pub(crate) struct AttemptDetails<'a> {
    pub(crate) public_id: &'a str,
    pub(crate) host: Option<&'a str>,
    pub(crate) number: u16,
    pub(crate) began: DateTime<Utc>,
    pub(crate) took: std::time::Duration,
    pub(crate) outcome: &'a Outcome,
}

impl Attempt {
    fn waited(&self, made: &AttemptDetails<'_>) -> Span {
        Span {
            name: "wait",
            kind: SpanKind::Internal,
            trace: self.context.trace,
            id: SpanId::of_delivery(self.delivery),
            parent: self.emit,
            began: DateTime::from_timestamp_millis(self.delivery.event.unix_ms()).unwrap_or(made.began),
            ended: made.began,
            attributes: self.attributes(made),
            error: None,
        }
    }

    fn span(&self, made: &AttemptDetails<'_>) -> Span {
        let mut attributes = self.attributes(made);
        attributes.push(("http.request.method", Value::Text("POST".to_owned())));
        attributes.push(("postrider.attempt", Value::Number(made.number.into())));
        let outcome = made.outcome.kind().as_str();
        attributes.push(("postrider.outcome", Value::Text(outcome.to_owned())));
        // Not the URL: customers put tokens into it.
        let host = made.host.map(|host| Value::Text(host.to_owned()));
        attributes.extend(host.map(|host| ("server.address", host)));
        let status = made.outcome.status();
        attributes.extend(status.map(|status| ("http.response.status_code", Value::Number(status.into()))));
        let failed = !made.outcome.is_success();
        Span {
            name: "attempt",
            kind: SpanKind::Client,
            trace: self.context.trace,
            id: self.context.span,
            parent: self.parent,
            began: made.began,
            ended: made.began + TimeDelta::from_std(made.took).unwrap_or_default(),
            attributes,
            error: failed.then(|| made.outcome.error().unwrap_or(outcome).to_owned()),
        }
    }

    fn attributes(&self, made: &AttemptDetails<'_>) -> Vec<(&'static str, Value)> {
        vec![
            ("messaging.system", Value::Text("postrider".to_owned())),
            ("messaging.message.id", Value::Text(made.public_id.to_owned())),
            ("postrider.delivery", Value::Text(self.delivery.to_string())),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use postrider_proto::{EndpointId, EventId};
    use std::time::Duration;
    use uuid::Uuid;

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(seconds, 0).expect("a time")
    }

    fn delivery() -> DeliveryId {
        DeliveryId {
            event: EventId(Uuid::now_v7()),
            endpoint: EndpointId(1),
        }
    }

    fn made(number: u16, outcome: &Outcome) -> AttemptDetails<'_> {
        AttemptDetails {
            public_id: "evt_1",
            host: Some("example.com"),
            number,
            began: at(2_000_000_000),
            took: Duration::from_millis(5),
            outcome,
        }
    }

    fn refused() -> Outcome {
        Outcome::NotSent {
            error: "no".to_owned(),
        }
    }

    #[test]
    fn one_that_is_off_makes_nothing() {
        let off = Tracer::default();
        assert!(off.emit_begins(None, at(0)).is_none());
        assert!(off.attempt_begins(delivery(), None, at(1), false).is_none());
    }

    #[test]
    fn emit_wait_and_attempts_are_one_trace() {
        let (tracer, mut out) = Tracer::new(1.0);
        let producer = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let producer = TraceContext::parse(producer).expect("of the form");
        let emit = tracer.emit_begins(Some(producer), at(1)).expect("on");
        tracer.emit_ended(&emit, at(2), Vec::new(), None);
        let delivery = delivery();
        for number in [1, 2] {
            let attempt = tracer.attempt_begins(delivery, Some(emit.context), at(number.into()), false);
            tracer.attempt_ended(&attempt.expect("on"), &made(number, &refused()));
        }
        let spans: Vec<Span> = std::iter::from_fn(|| out.try_recv().ok()).collect();
        let names: Vec<&str> = spans.iter().map(|span| span.name).collect();
        assert_eq!(names, ["emit", "wait", "attempt", "attempt"]);
        assert!(spans.iter().all(|span| span.trace == producer.trace));
        assert_eq!(spans[0].parent, Some(producer.span));
        assert_eq!(spans[1].parent, Some(spans[0].id));
        assert_eq!(spans[2].parent, Some(spans[1].id));
        assert_eq!(spans[3].parent, Some(spans[1].id));
        assert_ne!(spans[2].id, spans[3].id);
        assert_eq!(spans[3].error.as_deref(), Some("no"));
    }

    #[test]
    fn what_a_producer_does_not_sample_is_not_told() {
        let (tracer, mut out) = Tracer::new(1.0);
        let producer = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";
        let emit = tracer
            .emit_begins(TraceContext::parse(producer), at(1))
            .expect("on");
        tracer.emit_ended(&emit, at(2), Vec::new(), None);
        let attempt = tracer
            .attempt_begins(delivery(), Some(emit.context), at(1), false)
            .expect("passed on all the same");
        assert!(attempt.context.to_string().ends_with("-00"));
        tracer.attempt_ended(&attempt, &made(1, &refused()));
        assert!(out.try_recv().is_err());
    }

    #[test]
    fn an_event_without_a_trace_begins_one_of_its_own() {
        let (tracer, mut out) = Tracer::new(1.0);
        let delivery = delivery();
        let attempt = tracer.attempt_begins(delivery, None, at(1), false).expect("on");
        tracer.attempt_ended(&attempt, &made(1, &refused()));
        let root = out.try_recv().expect("a span");
        assert_eq!((root.name, root.parent), ("wait", None));
        assert_eq!(root.trace, TraceId::of_event(delivery.event));
        let (none, mut out) = Tracer::new(0.0);
        let attempt = none.attempt_begins(delivery, None, at(1), false).expect("on");
        none.attempt_ended(&attempt, &made(1, &refused()));
        assert!(out.try_recv().is_err(), "none are to be sampled");
    }

    #[test]
    fn a_full_queue_drops_and_does_not_wait() {
        let (tracer, mut out) = Tracer::new(1.0);
        let emit = tracer.emit_begins(None, at(1)).expect("on");
        for _ in 0..WAITING_MAX + 10 {
            tracer.emit_ended(&emit, at(2), Vec::new(), None);
        }
        assert_eq!(std::iter::from_fn(|| out.try_recv().ok()).count(), WAITING_MAX);
    }
}
