//! Checks that every gRPC call passes before any of its message is read: the key, the call limits, the deadline.
//! Invariant: without a key no message is decoded except the small ones of reflection.

use std::{
    net::Ipv6Addr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::{Request, State},
    http::HeaderMap,
    middleware::Next,
    response::Response,
};
use http_body_util::BodyExt;
use hyper::body::Frame;
use tokio::time::{Sleep, sleep, timeout};
use tonic::Status;

use super::{
    connections::{Connection, STREAMS_PER_CONNECTION_MAX},
    status,
};
use crate::{
    Shared,
    auth::{self, address::network},
    http::{
        metrics::{Call, METRICS},
        problem::{Kind, Problem},
        slots::{Slot, Slots},
    },
};

/// Open calls of this process: each may hold a message.
const CALLS_MAX: usize = 1_024;
const CALLS_PER_KEY_MAX: usize = 512;
/// For receiving the message and the work on it. The work alone has less.
const UNARY_TIME_MAX: Duration = Duration::from_secs(40);
/// Reflection needs no key.
const OPEN_CALLS_MAX: usize = 64;
const OPEN_CALLS_PER_ADDRESS_MAX: usize = 16;
const OPEN_CALL_TIME_MAX: Duration = Duration::from_secs(30);

#[derive(Clone)]
pub(super) struct Gate {
    app: Shared,
    calls: Arc<Slots<String>>,
    open_calls: Arc<Slots<Ipv6Addr>>,
}

impl Gate {
    pub(super) fn new(app: Shared) -> Self {
        Self {
            app,
            calls: Slots::new(CALLS_MAX, CALLS_PER_KEY_MAX),
            open_calls: Slots::new(OPEN_CALLS_MAX, OPEN_CALLS_PER_ADDRESS_MAX),
        }
    }
}

/// Permits that a call holds until it has ended.
struct Admitted {
    _call: Slot<String>,
    _stream: Option<Slot<()>>,
}

pub(super) async fn check(State(gate): State<Gate>, request: Request, next: Next) -> Response {
    let Some(call) = call_of(request.uri().path()) else {
        return open(&gate, request, next).await;
    };
    let own = (call != Call::EmitStream).then_some(UNARY_TIME_MAX);
    let limit = deadline(request.headers()).into_iter().chain(own).min();
    let (headers, connection) = (request.headers().clone(), connection_of(&request));
    let response = async {
        let _admitted = match admit(&gate, call, &headers, connection).await {
            Ok(admitted) => admitted,
            Err(problem) => return refused(call, problem),
        };
        next.run(request).await
    };
    match limit {
        None => response.await,
        Some(limit) => timeout(limit, response).await.unwrap_or_else(|_| {
            let detail = "The deadline was exceeded.";
            refused(call, Problem::new(Kind::RequestTimeout, detail))
        }),
    }
}

fn call_of(path: &str) -> Option<Call> {
    match path.strip_prefix("/postrider.v1.Emitter/")? {
        "Emit" => Some(Call::Emit),
        "EmitBatch" => Some(Call::EmitBatch),
        "EmitStream" => Some(Call::EmitStream),
        _ => None,
    }
}

fn connection_of(request: &Request) -> Option<Arc<Connection>> {
    request.extensions().get().cloned()
}

async fn admit(
    gate: &Gate,
    call: Call,
    headers: &HeaderMap,
    connection: Option<Arc<Connection>>,
) -> Result<Admitted, Problem> {
    let actor = auth::admit_producer(&gate.app, headers).await?;
    let slot = gate.calls.take(Some(actor.name)).ok_or_else(|| {
        let detail = format!("A key can have at most {CALLS_PER_KEY_MAX} concurrent calls.");
        Problem::too_many(detail, Duration::from_secs(1))
    })?;
    let stream = match connection.filter(|_| call == Call::EmitStream) {
        None => None,
        Some(connection) => Some(connection.take_stream().ok_or_else(|| {
            let detail = format!(
                "A connection can have at most {STREAMS_PER_CONNECTION_MAX} open streams. Use another connection."
            );
            Problem::too_many(detail, Duration::from_secs(1))
        })?),
    };
    Ok(Admitted {
        _call: slot,
        _stream: stream,
    })
}

fn refused(call: Call, problem: Problem) -> Response {
    METRICS.called(call, &Err::<(), _>(()));
    rejected(status(problem))
}

fn rejected(status: Status) -> Response {
    status.into_http::<tonic::body::Body>().map(Body::new)
}

/// Reflection, and unknown methods.
async fn open(gate: &Gate, request: Request, next: Next) -> Response {
    let peer = connection_of(&request).map(|connection| network(connection.peer()));
    let Some(slot) = gate.open_calls.take(peer) else {
        let detail = "Too many concurrent calls without a key.";
        return rejected(status(Problem::too_many(detail, Duration::from_secs(1))));
    };
    let request = request.map(|inner| {
        Body::new(Ending {
            inner,
            end: Box::pin(sleep(OPEN_CALL_TIME_MAX)),
        })
    });
    next.run(request).await.map(|body| {
        Body::new(body.map_frame(move |frame| {
            let _slot = &slot;
            frame
        }))
    })
}

/// A request body that must arrive completely before a deadline.
struct Ending {
    inner: Body,
    end: Pin<Box<Sleep>>,
}

impl HttpBody for Ending {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.end.as_mut().poll(context).is_ready() {
            let late = std::io::Error::from(std::io::ErrorKind::TimedOut);
            return Poll::Ready(Some(Err(axum::Error::new(late))));
        }
        Pin::new(&mut self.inner).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }
}

/// Parses `grpc-timeout`: up to eight digits and a unit. A malformed value is ignored.
fn deadline(headers: &HeaderMap) -> Option<Duration> {
    const DIGITS_MAX: usize = 8;
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let is_number = (1..=DIGITS_MAX).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
    let number: u64 = is_number.then(|| digits.parse().ok())??;
    match unit {
        "H" => Some(Duration::from_secs(number * 3_600)),
        "M" => Some(Duration::from_secs(number * 60)),
        "S" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_millis(number)),
        "u" => Some(Duration::from_micros(number)),
        "n" => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_digits_and_a_unit() {
        let read = |text: &str| {
            deadline(&HeaderMap::from_iter([(
                axum::http::HeaderName::from_static("grpc-timeout"),
                text.parse().expect("a value"),
            )]))
        };
        assert_eq!(read("400m"), Some(Duration::from_millis(400)));
        assert_eq!(read("99999999H"), Some(Duration::from_secs(99_999_999 * 3_600)));
        assert_eq!(read("1S"), Some(Duration::from_secs(1)));
        assert_eq!(read("7u"), Some(Duration::from_micros(7)));
        for none in ["", "m", "1", "+1S", "1 S", "123456789S", "1s", "-1S"] {
            assert_eq!(read(none), None, "{none}");
        }
    }

    #[tokio::test]
    async fn a_request_without_a_key_that_does_not_end_is_ended() {
        let frames = tokio_stream::pending::<Result<Bytes, axum::Error>>();
        let body = Ending {
            inner: Body::from_stream(frames),
            end: Box::pin(sleep(Duration::from_millis(50))),
        };
        assert!(body.collect().await.is_err());
    }
}
