//! An emit's place in the trace of whoever asked for it: `traceparent` comes in with the request and goes into the events.
//! With traces off nothing is read.

use std::{convert::Infallible, time::SystemTime};

use axum::{
    extract::FromRequestParts,
    http::{HeaderMap, request::Parts},
};
use postrider_dispatcher::traces::{Emit, Tracer, Value};
use postrider_proto::trace::TraceContext;

use crate::{Shared, meters::Source, problem::Problem};

const HEADER: &str = "traceparent";

/// An emit under way.
#[derive(Clone)]
pub(crate) struct Traced {
    tracer: Tracer,
    emit: Option<Emit>,
}

impl Traced {
    pub(crate) fn begin(tracer: &Tracer, headers: &HeaderMap) -> Self {
        let emit = match tracer.is_on() {
            true => tracer.emit_begins(producer(headers), now()),
            false => None,
        };
        Self {
            tracer: tracer.clone(),
            emit,
        }
    }

    /// What its events carry.
    pub(crate) fn context(&self) -> Option<TraceContext> {
        self.emit.map(|emit| emit.context)
    }

    /// `ids` are the events that were asked for, by the ids the outside sees.
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

/// More than one is none.
fn producer(headers: &HeaderMap) -> Option<TraceContext> {
    let mut values = headers.get_all(HEADER).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    TraceContext::parse(value.to_str().ok()?)
}

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
    }
}
