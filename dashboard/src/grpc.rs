//! Emitting over gRPC: maps the messages of `proto/postrider/v1/emit.proto` to the HTTP API's logic.
//! Invariant: every call passes `gate::check`, which verifies the key, before any of its message is read.

pub(crate) mod codec;
mod connections;
mod gate;
#[cfg(test)]
mod generated_tests;

use std::{io, sync::Arc, time::Duration};

use axum::{
    middleware::{from_fn_with_state, map_response},
    response::Response as HttpResponse,
};
use postrider_proto::limits::{BATCH_BYTES_MAX, BATCH_EVENTS_MAX};
use prost_types::Timestamp;
use tokio::{net::TcpListener, task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status, Streaming, metadata::MetadataMap, service::Routes};

use crate::{
    App, Shared,
    actions::emits::{OwnedEvent, batch, place, rules},
    http::{
        cells::{Here, Purpose},
        input::size,
        metrics::{Call, METRICS, Source},
        problem::{Fault, Kind, Problem},
        trace_context::{Carried, Traced},
    },
    tables::pool::proves_rollback,
};

/// Generated from `proto/postrider/v1/emit.proto`.
#[allow(missing_docs, clippy::all, reason = "generated")]
pub mod v1 {
    include!("grpc/generated/postrider.v1.rs");
}

use v1::emitter_server::{Emitter, EmitterServer};

const DESCRIPTION: &[u8] = include_bytes!("grpc/generated/postrider.v1.bin");
const CALL_TIME_MAX: Duration = Duration::from_secs(20);
/// Between two events of a stream.
const STREAM_SILENCE_MAX: Duration = Duration::from_secs(60);
/// Events of one stream that wait for their commit.
const STREAM_OPEN_MAX: usize = 256;
const STREAM_REFUSED_MAX: usize = 1_000;
/// A reflection request is a name.
const REFLECTION_BYTES_MAX: usize = 16 * 1024;
/// The batch plus message overhead.
const REQUEST_BYTES_MAX: usize = BATCH_BYTES_MAX + 64 * 1024;
/// Trailers are small; the status message has the rest.
const FAULTS_TOLD_MAX: usize = 20;
const MESSAGE_BYTES_MAX: usize = 4 * 1024;

pub(crate) async fn serve(listener: TcpListener, app: Arc<App>, stop: CancellationToken) -> io::Result<()> {
    let reflection =
        || tonic_reflection::server::Builder::configure().register_encoded_file_descriptor_set(DESCRIPTION);
    let (gate, proxies) = (gate::Gate::new(app.clone()), app.trusted_proxies.clone());
    let emitter = EmitterServer::new(Service { app }).max_decoding_message_size(REQUEST_BYTES_MAX);
    let v1 = reflection().build_v1().map_err(io::Error::other)?;
    let v1alpha = reflection().build_v1alpha().map_err(io::Error::other)?;
    let routes = Routes::new(emitter)
        .add_service(v1.max_decoding_message_size(REFLECTION_BYTES_MAX))
        // Older tools only know this version.
        .add_service(v1alpha.max_decoding_message_size(REFLECTION_BYTES_MAX));
    let routes = routes
        .into_axum_router()
        .layer(map_response(with_problem))
        .layer(from_fn_with_state(gate, gate::check));
    connections::serve(listener, routes, proxies, stop).await;
    Ok(())
}

/// `tonic` rejects an oversized message before it reaches a service, with a status code used for nothing else.
async fn with_problem(response: HttpResponse) -> HttpResponse {
    match Status::from_header_map(response.headers()) {
        Some(rejection) if rejection.code() == Code::OutOfRange => {
            let detail = format!("The limit for one message is {}.", size(REQUEST_BYTES_MAX));
            status(Problem::new(Kind::TooLarge, detail)).into_http()
        }
        _ => response,
    }
}

struct Service {
    app: Shared,
}

impl Service {
    fn traced(&self, metadata: &MetadataMap) -> Traced {
        Traced::begin(&self.app.tracer, &metadata.clone().into_headers())
    }
}

async fn in_time<T>(work: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    timeout(CALL_TIME_MAX, work)
        .await
        .unwrap_or_else(|_| Err(status(Problem::busy())))
}

#[tonic::async_trait]
impl Emitter for Service {
    async fn emit(&self, request: Request<v1::EmitRequest>) -> Result<Response<v1::EmitResponse>, Status> {
        let response = self.take_one(request).await;
        METRICS.called(Call::Emit, &response);
        response
    }

    async fn emit_batch(
        &self,
        request: Request<v1::EmitBatchRequest>,
    ) -> Result<Response<v1::EmitBatchResponse>, Status> {
        let response = self.take_batch(request).await;
        METRICS.called(Call::EmitBatch, &response);
        response
    }

    async fn emit_stream(
        &self,
        request: Request<Streaming<v1::EmitRequest>>,
    ) -> Result<Response<v1::EmitStreamResponse>, Status> {
        let response = self.take_stream(request).await;
        METRICS.called(Call::EmitStream, &response);
        response
    }
}

impl Service {
    async fn take_one(
        &self,
        request: Request<v1::EmitRequest>,
    ) -> Result<Response<v1::EmitResponse>, Status> {
        let traced = self.traced(request.metadata());
        let emitted = in_time(async {
            let request = request.into_inner();
            emit_one(&self.app, request, &traced).await.map_err(status)
        })
        .await?;
        Ok(Response::new(v1::EmitResponse { event: Some(emitted) }))
    }

    async fn take_batch(
        &self,
        request: Request<v1::EmitBatchRequest>,
    ) -> Result<Response<v1::EmitBatchResponse>, Status> {
        let traced = self.traced(request.metadata());
        let v1::EmitBatchRequest { tenant, events } = request.into_inner();
        let emitted = in_time(async {
            let emitted = emit_batch(&self.app, &tenant, events, traced.carried()).await;
            let ids: Result<Vec<String>, _> = emitted
                .as_ref()
                .map(|all| all.iter().map(|one| one.id.clone()).collect());
            traced.end(Source::Grpc, &tenant, ids.as_deref().map_err(|problem| *problem));
            emitted.map_err(status)
        })
        .await?;
        Ok(Response::new(v1::EmitBatchResponse { events: emitted }))
    }

    async fn take_stream(
        &self,
        request: Request<Streaming<v1::EmitRequest>>,
    ) -> Result<Response<v1::EmitStreamResponse>, Status> {
        let headers = request.metadata().clone().into_headers();
        let mut stream = request.into_inner();
        let mut done = v1::EmitStreamResponse::default();
        let mut open = JoinSet::new();
        let mut index = 0;
        loop {
            let next = timeout(STREAM_SILENCE_MAX, stream.message())
                .await
                .map_err(|_| {
                    status(Problem::new(
                        Kind::RequestTimeout,
                        "No event arrived for 60 seconds.",
                    ))
                })??;
            let Some(request) = next else { break };
            let (app, number) = (self.app.clone(), index);
            index += 1;
            // Events with the same ordering key keep their order only if sent one after the other.
            let in_order = request
                .event
                .as_ref()
                .is_some_and(|event| event.ordering_key.is_some());
            let most = if in_order { 0 } else { STREAM_OPEN_MAX - 1 };
            close(&mut open, most, &mut done).await?;
            // Each event of a stream is an emit of its own.
            let traced = Traced::begin(&app.tracer, &headers);
            open.spawn(async move {
                let emitted = emit_one(&app, request, &traced).await;
                (number, emitted.map(|_| ()))
            });
            if in_order {
                close(&mut open, 0, &mut done).await?;
            }
        }
        close(&mut open, 0, &mut done).await?;
        done.refused.sort_by_key(|refusal| refusal.index);
        Ok(Response::new(done))
    }
}

type Open = JoinSet<(u64, Result<(), Problem>)>;

/// Waits until at most this many are open.
async fn close(open: &mut Open, most: usize, done: &mut v1::EmitStreamResponse) -> Result<(), Status> {
    while open.len() > most {
        let Some(ended) = open.join_next().await else {
            break;
        };
        let (index, result) = ended.map_err(|error| status(Problem::internal("emit task failed", error)))?;
        match result {
            Ok(()) => done.emitted += 1,
            // Temporary errors end the stream: the client retries all of it, which ids make safe.
            Err(problem)
                if matches!(
                    problem.kind,
                    Kind::Busy
                        | Kind::OtherCell
                        | Kind::Internal
                        | Kind::TooMany
                        | Kind::EmitQuota
                        | Kind::StorageQuota
                        | Kind::OutcomeUnknown
                ) =>
            {
                return Err(status(problem));
            }
            Err(problem) => done.refused.push(v1::Refusal {
                index,
                status: problem.status().as_u16().into(),
                message: shortened(problem.detail),
            }),
        }
        if done.refused.len() > STREAM_REFUSED_MAX {
            return Err(status(too_many_refused(done)));
        }
    }
    Ok(())
}

/// Lists the first of them by their index in the stream.
fn too_many_refused(done: &v1::EmitStreamResponse) -> Problem {
    let detail = format!(
        "More than {STREAM_REFUSED_MAX} events of this stream were rejected; {} were accepted.",
        done.emitted
    );
    let refused = done.refused.iter().take(FAULTS_TOLD_MAX);
    let errors = refused.map(|refusal| Fault {
        pointer: format!("/{}", refusal.index),
        detail: refusal.message.clone(),
    });
    let mut problem = Problem::new(Kind::Invalid, detail);
    problem.errors = errors.collect();
    problem
}

fn read(request: v1::EmitRequest) -> Result<OwnedEvent, Problem> {
    let event = request
        .event
        .ok_or_else(|| Problem::invalid("/event", "is required"))?;
    own(&request.tenant, event)
}

fn own(tenant: &str, event: v1::Event) -> Result<OwnedEvent, Problem> {
    rules::checked(OwnedEvent {
        tenant: tenant.to_owned(),
        type_name: event.r#type,
        data: event.data,
        id: event.id,
        version: event.version,
        ordering_key: event.ordering_key,
        trace: None,
        checked: None,
    })
}

async fn emit_one(app: &Shared, request: v1::EmitRequest, traced: &Traced) -> Result<v1::Emitted, Problem> {
    let tenant = request.tenant.clone();
    let emitted = match read(request) {
        Ok(event) => emit_traced(app, event, traced.carried()).await,
        Err(problem) => Err(problem),
    };
    let ids = emitted.as_ref().map(|one| std::slice::from_ref(&one.id));
    traced.end(Source::Grpc, &tenant, ids);
    emitted
}

async fn emit_traced(
    app: &Shared,
    event: OwnedEvent,
    trace: Option<Carried>,
) -> Result<v1::Emitted, Problem> {
    let event = OwnedEvent { trace, ..event };
    let type_name = event.type_name.clone();
    let here = Here::of_tenant(app, &event.tenant, Purpose::Emit).await?;
    let (emitted, _) = place::emit(&here, event).await?;
    METRICS.emitted(Source::Grpc, [&emitted]);
    Ok(view(emitted, type_name))
}

async fn emit_batch(
    app: &Shared,
    tenant: &str,
    given: Vec<v1::Event>,
    trace: Option<Carried>,
) -> Result<Vec<v1::Emitted>, Problem> {
    let here = Here::of_tenant(app, tenant, Purpose::Emit).await?;
    let keys: Vec<&str> = given
        .iter()
        .filter_map(|event| event.ordering_key.as_deref())
        .collect();
    let app = here.emitting(tenant, &keys).await?;
    if !here.is_away() {
        return emit_batch_at(app, tenant, given, trace).await;
    }
    match emit_batch_at(app, tenant, given.clone(), trace.clone()).await {
        Err(problem) if place::has_left(&here, tenant, &problem) => {
            emit_batch_at(&here.home, tenant, given, trace).await
        }
        emitted => emitted,
    }
}

async fn emit_batch_at(
    app: &App,
    tenant: &str,
    given: Vec<v1::Event>,
    trace: Option<Carried>,
) -> Result<Vec<v1::Emitted>, Problem> {
    if given.is_empty() || given.len() > BATCH_EVENTS_MAX {
        return Err(Problem::invalid(
            "/events",
            format!("must have 1 to {BATCH_EVENTS_MAX} events"),
        ));
    }
    let events = given.into_iter().map(|event| own(tenant, event)).collect();
    let prepared = batch::prepare(app, events, trace).await?;
    let (mut transaction, _share) = app.emits.begin(tenant).await?;
    let emitted = batch::emit_all(app, &mut transaction, prepared).await?;
    if let Err(error) = transaction.commit().await {
        return Err(match batch::unrepeatable(&emitted) {
            Some(event) if !proves_rollback(&error) => Problem::unknown(Some(event)),
            _ => error.into(),
        });
    }
    METRICS.emitted(Source::Grpc, emitted.iter().map(|(one, _)| one));
    app.wake.now();
    Ok(emitted
        .into_iter()
        .map(|(one, event)| view(one, event.type_name))
        .collect())
}

fn view(emitted: postrider_sender::Emitted, type_name: String) -> v1::Emitted {
    v1::Emitted {
        id: emitted.id,
        r#type: type_name,
        version: emitted.version,
        created_at: Some(Timestamp {
            seconds: emitted.created_at.timestamp(),
            nanos: emitted.created_at.timestamp_subsec_nanos() as i32,
        }),
        sequence: emitted.sequence,
        duplicate: emitted.duplicate,
    }
}

fn shortened(mut text: String) -> String {
    if text.len() > MESSAGE_BYTES_MAX {
        let end = (0..=MESSAGE_BYTES_MAX)
            .rev()
            .find(|at| text.is_char_boundary(*at));
        text.truncate(end.unwrap_or(0));
        text.push('…');
    }
    text
}

fn status(mut problem: Problem) -> Status {
    let code = match problem.kind {
        Kind::BadRequest
        | Kind::Invalid
        | Kind::TooLarge
        | Kind::UnsupportedEncoding
        | Kind::UnsupportedMediaType
        | Kind::MethodNotAllowed => Code::InvalidArgument,
        Kind::Unauthorized => Code::Unauthenticated,
        Kind::Forbidden => Code::PermissionDenied,
        Kind::NotFound => Code::NotFound,
        Kind::Conflict | Kind::Handled | Kind::KeyReused | Kind::EventIdConflict => Code::AlreadyExists,
        Kind::SchemaPublished
        | Kind::EndpointDisabled
        | Kind::LimitReached
        | Kind::SendingStopped
        | Kind::TenantPaused => Code::FailedPrecondition,
        Kind::KeyInProgress => Code::Aborted,
        Kind::TooMany | Kind::EmitQuota | Kind::StorageQuota => Code::ResourceExhausted,
        Kind::RequestTimeout => Code::DeadlineExceeded,
        Kind::Busy | Kind::OtherCell | Kind::ChangePending | Kind::CountTimeout => Code::Unavailable,
        // Not UNAVAILABLE, which clients retry automatically.
        Kind::OutcomeUnknown => Code::Unknown,
        Kind::Internal => Code::Internal,
    };
    problem.detail = shortened(problem.detail);
    problem.errors.truncate(FAULTS_TOLD_MAX);
    let mut status = Status::new(code, problem.detail.clone());
    if let Some(seconds) = problem.retry_after_seconds() {
        status.metadata_mut().insert("retry-after", seconds.into());
    }
    if let Ok(json) = serde_json::to_vec(&problem.body())
        && json.len() <= 2 * MESSAGE_BYTES_MAX
    {
        let value = tonic::metadata::MetadataValue::from_bytes(&json);
        status.metadata_mut().insert_bin("postrider-problem-bin", value);
    }
    status
}
