//! Emits many events in one request, all or none. Errors name each invalid event by its index in the list.

use axum::{extract::Path, http::StatusCode, response::Response};
use postrider_proto::{
    api::{BatchForm, EmittedEvent, EmittedEvents, EventForm},
    limits::{BATCH_BYTES_MAX, BATCH_EVENTS_MAX},
};
use postrider_sender::Emitted;

use super::events::check;
use crate::{
    App,
    actions::emits::{
        OwnedEvent,
        batch::{emit_all, prepare, unrepeatable},
        place,
    },
    auth::Rule::Emit,
    http::{
        cells::Here,
        idempotency::{Claim, Work},
        input::{Text, read_form},
        metrics::{METRICS, Source},
        problem::Problem,
        trace_context::Traced,
    },
    openapi::Operation,
};

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::post(Emit, "/v1/tenants/{tenant}/events/batch", emit)
            .named("emitEvents", "Emit a batch of events")
            .describe("Stores all events or none.")
            .accepts::<BatchForm<'_>>()
            .returns::<EmittedEvents>(202, "All events were stored, in the order of the request."),
    ]
}

async fn emit(
    here: Here,
    Path(tenant): Path<String>,
    claim: Claim,
    traced: Traced,
    text: Text<BATCH_BYTES_MAX>,
) -> Result<Response, Problem> {
    let taken = take(&here, &tenant, claim, &traced, &text).await;
    let ids = taken.as_ref().map(|(_, ids)| ids.as_slice());
    traced.end(Source::Http, &tenant, ids);
    taken.map(|(response, _)| response)
}

/// Returns the response and the events' ids.
async fn take(
    here: &Here,
    tenant: &str,
    claim: Claim,
    traced: &Traced,
    text: &Text<BATCH_BYTES_MAX>,
) -> Result<(Response, Vec<String>), Problem> {
    let read = || -> Result<Vec<Result<OwnedEvent, Problem>>, Problem> {
        let events = read(text, tenant)?.into_iter().enumerate();
        let with_id = |(number, event): (usize, Result<OwnedEvent, Problem>)| {
            event.map(|event| place::with_id(here, &claim, number, event))
        };
        Ok(events.map(with_id).collect())
    };
    let events = read()?;
    let given = events.iter().flatten();
    let keys: Vec<&str> = given.filter_map(|event| event.ordering_key.as_deref()).collect();
    let app = here.emitting(tenant, &keys).await?.clone();
    match take_at(&app, tenant, claim.clone(), traced, events).await {
        Err(problem) if place::has_left(here, tenant, &problem) => {
            take_at(&here.home, tenant, claim.clone(), traced, read()?).await
        }
        taken => taken,
    }
}

async fn take_at(
    app: &App,
    tenant: &str,
    claim: Claim,
    traced: &Traced,
    events: Vec<Result<OwnedEvent, Problem>>,
) -> Result<(Response, Vec<String>), Problem> {
    let prepared = prepare(app, events, traced.carried()).await?;
    let mut work = Work::begin_emit(app, claim, tenant).await?;
    let emitted = emit_all(app, &mut work, prepared).await?;
    work.emits(unrepeatable(&emitted));
    let events: Vec<Emitted> = emitted.iter().map(|(one, _)| one.clone()).collect();
    let data = emitted.into_iter().map(view).collect();
    let response = work.commit(StatusCode::ACCEPTED, &EmittedEvents { data }).await?;
    METRICS.emitted(Source::Http, &events);
    app.wake.now();
    Ok((response, events.into_iter().map(|one| one.id).collect()))
}

fn view((emitted, event): (Emitted, OwnedEvent)) -> EmittedEvent {
    EmittedEvent {
        id: emitted.id,
        r#type: event.type_name,
        version: emitted.version,
        created_at: emitted.created_at,
        sequence: emitted.sequence,
        duplicate: emitted.duplicate,
    }
}

fn read(text: &Text<BATCH_BYTES_MAX>, tenant: &str) -> Result<Vec<Result<OwnedEvent, Problem>>, Problem> {
    let form: BatchForm<'_> = text.read()?;
    if form.events.is_empty() || form.events.len() > BATCH_EVENTS_MAX {
        return Err(Problem::invalid(
            "/events",
            format!("must have 1 to {BATCH_EVENTS_MAX} events"),
        ));
    }
    let read = form
        .events
        .iter()
        .map(|raw| read_form::<EventForm<'_>>(raw.get()).and_then(|form| check(form, tenant)));
    Ok(read.collect())
}
