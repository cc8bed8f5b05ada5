//! Connects an emit to the caller's trace: `traceparent` arrives with the request and is stored with the events.
//! Nothing is read if tracing is off.

use std::{convert::Infallible, time::SystemTime};

use axum::{
    extract::FromRequestParts,
    http::{HeaderMap, request::Parts},
};
use postrider_dispatcher::traces::{Emit, Tracer, Value};
use postrider_proto::trace::{TraceContext, TraceState};

use crate::{
    Shared,
    http::{metrics::Source, problem::Problem},
};

const HEADER: &str = "traceparent";
const STATE_HEADER: &str = "tracestate";

/// The trace context stored with an event.
#[derive(Debug, Clone)]
pub(crate) struct Carried {
    pub(crate) context: TraceContext,
    pub(crate) state: Option<TraceState>,
}

/// An emit in progress.
#[derive(Clone)]
pub(crate) struct Traced {
    tracer: Tracer,
    emit: Option<Emit>,
    state: Option<TraceState>,
}

impl Traced {
    pub(crate) fn begin(tracer: &Tracer, headers: &HeaderMap) -> Self {
        let producer = producer(headers).filter(|_| tracer.is_on());
        Self {
            tracer: tracer.clone(),
            emit: tracer.emit_begins(producer, now()),
            // It belongs to the producer's trace and to no other.
            state: producer.and_then(|_| state(headers)),
        }
    }

    /// The context that its events carry.
    pub(crate) fn carried(&self) -> Option<Carried> {
        self.emit.map(|emit| Carried {
            context: emit.context,
            state: self.state.clone(),
        })
    }

    /// `ids` are the public ids of the emitted events.
    pub(crate) fn end(&self, source: Source, tenant: &str, ids: Result<&[String], &Problem>) {
        let Some(emit) = &self.emit else { return };
        let mut attributes = vec![
            ("messaging.system", Value::Text("postrider".to_owned())),
            ("messaging.operation.type", Value::Text("send".to_owned())),
            ("postrider.source", Value::Text(source.as_str().to_owned())),
            ("postrider.tenant", Value::Text(tenant.to_owned())),
        ];
        let error = match ids {
            Ok([id]) => {
                attributes.push(("messaging.message.id", Value::Text(id.clone())));
                None
            }
            Ok(ids) => {
                attributes.push(("messaging.batch.message_count", Value::Number(ids.len() as i64)));
                None
            }
            Err(problem) => Some(problem.detail.clone()),
        };
        self.tracer.emit_ended(emit, now(), attributes, error);
    }
}

/// More than one header counts as none.
fn producer(headers: &HeaderMap) -> Option<TraceContext> {
    let mut values = headers.get_all(HEADER).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    TraceContext::parse(value.to_str().ok()?)
}

/// Several headers form one list.
fn state(headers: &HeaderMap) -> Option<TraceState> {
    let values = headers.get_all(STATE_HEADER).iter();
    let values: Vec<&str> = values.map(|value| value.to_str().ok()).collect::<Option<_>>()?;
    TraceState::parse(&values.join(","))
}

#[expect(
    clippy::disallowed_methods,
    reason = "spans carry the wall clock of the process"
)]
fn now() -> chrono::DateTime<chrono::Utc> {
    SystemTime::now().into()
}

impl FromRequestParts<Shared> for Traced {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, app: &Shared) -> Result<Self, Infallible> {
        Ok(Self::begin(&app.tracer, &parts.headers))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn a_traceparent_that_comes_twice_is_none() {
        let one = HeaderValue::from_static("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
        let mut headers = HeaderMap::new();
        assert!(producer(&headers).is_none());
        headers.append(HEADER, one.clone());
        assert!(producer(&headers).is_some());
        headers.append(HEADER, one);
        assert!(producer(&headers).is_none());

        headers.append(STATE_HEADER, HeaderValue::from_static("a=1"));
        headers.append(STATE_HEADER, HeaderValue::from_static("b=2"));
        assert_eq!(state(&headers).expect("of the form").as_str(), "a=1,b=2");
        headers.append(STATE_HEADER, HeaderValue::from_static("nonsense"));
        assert!(state(&headers).is_none());
    }
}
