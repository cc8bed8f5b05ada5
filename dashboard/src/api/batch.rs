//! Many events in one request, all or none. A refusal names each bad one by its place in the list.

use std::{
    collections::{BTreeMap, HashMap},
    time::Instant,
};

use axum::{
    extract::{Path, State},
    http::StatusCode,
    response::Response,
};
use chrono::SecondsFormat;
use postrider_proto::limits::{BATCH_BYTES_MAX, BATCH_EVENTS_MAX};
use postrider_sender::{EmitError, Emitted, Patience};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sqlx::PgConnection;
use utoipa::ToSchema;

use super::events::{EmitForm, refusal};
use crate::{
    App, Shared,
    emits::OwnedEvent,
    idempotency::{Claim, Work},
    input::{Text, read_form},
    meters::{METERS, Source},
    openapi::shapes,
    problem::{Fault, Kind, Problem},
    traced::{Carried, Traced},
};

/// Told of one event, so that a thousand bad ones are told in an answer of some size.
const FAULTS_PER_EVENT_MAX: usize = 5;

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewEvents)]
pub(crate) struct BatchForm<'a> {
    #[serde(borrow)]
    #[schema(schema_with = shapes::batch)]
    events: Vec<&'a RawValue>,
}

/// Without the data, which the caller has.
#[derive(Serialize, ToSchema)]
#[schema(as = EmittedEvent)]
pub(crate) struct EmittedView {
    id: String,
    r#type: String,
    version: String,
    #[schema(format = DateTime)]
    created_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    sequence: Option<i64>,
    /// It was there before: nothing is sent again.
    duplicate: bool,
}

#[derive(Serialize, ToSchema)]
#[schema(as = EmittedEvents)]
pub(crate) struct BatchView {
    data: Vec<EmittedView>,
}

pub(crate) async fn emit(
    State(app): State<Shared>,
    Path(tenant): Path<String>,
    claim: Claim,
    traced: Traced,
    text: Text<BATCH_BYTES_MAX>,
) -> Result<Response, Problem> {
    let taken = take(&app, &tenant, claim, &traced, &text).await;
    let told = taken.as_ref().map(|(_, ids)| ids.as_slice());
    traced.end(Source::Http, &tenant, told);
    taken.map(|(response, _)| response)
}

/// The answer, and the events' ids.
async fn take(
    app: &App,
    tenant: &str,
    claim: Claim,
    traced: &Traced,
    text: &Text<BATCH_BYTES_MAX>,
) -> Result<(Response, Vec<String>), Problem> {
    let prepared = prepare(app, read(text, tenant)?, traced.carried()).await?;
    let mut work = Work::begin_emit(app, claim, tenant).await?;
    let emitted = emit_all(app, &mut work, prepared).await?;
    work.emits(unrepeatable(&emitted));
    let events: Vec<Emitted> = emitted.iter().map(|(one, _)| one.clone()).collect();
    let data = emitted.into_iter().map(view).collect();
    let response = work.commit(StatusCode::ACCEPTED, &BatchView { data }).await?;
    METERS.emitted(Source::Http, &events);
    app.wake.now();
    Ok((response, events.into_iter().map(|one| one.id).collect()))
}

/// One of them that would come twice if the batch was sent twice.
pub(crate) fn unrepeatable(emitted: &[(Emitted, OwnedEvent)]) -> Option<String> {
    let found = emitted.iter().find(|(_, event)| event.id.is_none());
    found.map(|(emitted, _)| emitted.id.clone())
}

/// Events of a batch that can be tried, by their places in it, and what is wrong with the others.
pub(crate) struct Prepared {
    events: Vec<(usize, OwnedEvent)>,
    refused: Refused,
}

/// All that can be told before a connection is held.
pub(crate) async fn prepare(
    app: &App,
    read: Vec<Result<OwnedEvent, Problem>>,
    trace: Option<Carried>,
) -> Result<Prepared, Problem> {
    let mut refused = Refused::default();
    let mut events = Vec::with_capacity(read.len());
    let mut ids = HashMap::new();
    for (index, event) in read.into_iter().enumerate() {
        let event = event.and_then(|event| match &event.id {
            Some(id) => match ids.insert(id.clone(), index) {
                Some(first) => {
                    let detail = format!("event {first} of this batch has the same id");
                    Err(Problem::invalid("/id", detail))
                }
                None => Ok(event),
            },
            None => Ok(event),
        });
        // A check takes a moment, and there may be a thousand of them.
        tokio::task::yield_now().await;
        let event = match event {
            Ok(event) => app.emits.checks().check(event).await,
            Err(problem) => Err(problem),
        };
        match event {
            Ok(event) => events.push((
                index,
                OwnedEvent {
                    trace: trace.clone(),
                    ..event
                },
            )),
            Err(problem) if problem.status().is_client_error() && problem.kind != Kind::TooMany => {
                refused.add(problem, index);
            }
            // It passes: the whole batch is put off.
            Err(problem) => return Err(problem),
        }
    }
    Ok(Prepared { events, refused })
}

/// In the transaction of the caller, who gives it up when one is refused. Those that can be read are tried although others
/// can't, so that the refusal names all that are bad.
pub(crate) async fn emit_all(
    app: &App,
    connection: &mut PgConnection,
    Prepared { events, mut refused }: Prepared,
) -> Result<Vec<(Emitted, OwnedEvent)>, Problem> {
    let borrowed: Vec<_> = events.iter().map(|(_, event)| event.borrow()).collect();
    let began = Instant::now();
    let answers = app
        .emits
        .sender()
        .emit_all(connection, &borrowed, Patience::Own)
        .await
        .map_err(|error| refusal(EmitError::Database(error), "/events"))?;
    METERS.statement(borrowed.len(), began.elapsed());
    let mut emitted = Vec::with_capacity(answers.len());
    for ((index, event), answer) in events.into_iter().zip(answers) {
        match answer {
            Ok(one) => emitted.push((one, event)),
            // The tenant stands in the path: all of them have it, or none.
            Err(EmitError::UnknownTenant) => return Err(Problem::not_found("tenant")),
            Err(EmitError::Database(error)) => return Err(error.into()),
            Err(error) => refused.add(refusal(error, ""), index),
        }
    }
    refused.done().map(|()| emitted)
}

fn view((emitted, event): (Emitted, OwnedEvent)) -> EmittedView {
    EmittedView {
        id: emitted.id,
        r#type: event.type_name,
        version: emitted.version,
        created_at: emitted.created_at.to_rfc3339_opts(SecondsFormat::Millis, true),
        sequence: emitted.sequence,
        duplicate: emitted.duplicate,
    }
}

fn read(text: &Text<BATCH_BYTES_MAX>, tenant: &str) -> Result<Vec<Result<OwnedEvent, Problem>>, Problem> {
    let form: BatchForm<'_> = text.read()?;
    if form.events.is_empty() || form.events.len() > BATCH_EVENTS_MAX {
        return Err(Problem::invalid(
            "/events",
            format!("a batch has 1 to {BATCH_EVENTS_MAX} events"),
        ));
    }
    let read = form
        .events
        .iter()
        .map(|raw| read_form::<EmitForm<'_>>(raw.get()).and_then(|form| form.check(tenant)));
    Ok(read.collect())
}

/// What is wrong with each bad one; the kind that most of the answer is about.
#[derive(Default)]
struct Refused {
    /// By the places of their events.
    faults: BTreeMap<usize, Vec<Fault>>,
    kinds: BTreeMap<u16, Kind>,
}

impl Refused {
    fn add(&mut self, problem: Problem, index: usize) {
        let below = format!("/events/{index}");
        self.kinds.insert(problem.status().as_u16(), problem.kind);
        let found = self.faults.entry(index).or_default();
        if problem.errors.is_empty() {
            found.push(Fault {
                pointer: below,
                detail: problem.detail,
            });
            return;
        }
        let faults = problem.errors.into_iter().take(FAULTS_PER_EVENT_MAX);
        found.extend(faults.map(|fault| Fault {
            pointer: format!("{below}{}", fault.pointer),
            detail: fault.detail,
        }));
    }

    /// One kind of refusal keeps its status; a mixture is 422, which every kind is a case of.
    fn done(self) -> Result<(), Problem> {
        if self.faults.is_empty() {
            return Ok(());
        }
        let mut problem = Problem::faults(self.faults.into_values().flatten().collect());
        if self.kinds.len() == 1
            && let Some(kind) = self.kinds.into_values().next()
        {
            problem.kind = kind;
        }
        Err(problem)
    }
}
