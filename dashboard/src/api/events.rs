//! Events: emit, list, read with their deliveries.
//! Invariant: `data` is stored and returned byte for byte; it is never re-serialized.

use axum::{
    Json,
    extract::Path,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use chrono::DateTime;
use postrider_proto::{
    EventId,
    api::{Delivery, Event, EventForm},
    limits::{EVENT_DATA_BYTES_MAX, LIST_PAGE_MAX},
};
use postrider_sender::Emitted;
use serde::Deserialize;
use serde_json::value::RawValue;
use sqlx::PgConnection;
use uuid::Uuid;

use super::ApiResult;
use crate::{
    Shared,
    actions::emits::{
        OwnedEvent, place,
        rules::{checked, refusal},
    },
    auth::{
        Call,
        Rule::{Emit, Own},
        Tenant,
    },
    http::{
        cells::Here,
        idempotency::{Claim, Work},
        input::{Query, Text},
        metrics::{METRICS, Source},
        pagination::{Page, PageQuery, encode},
        problem::Problem,
        trace_context::Traced,
    },
    openapi::Operation,
    tables::{
        deliveries::{self, Filter},
        events::{self, EventRow},
        tenants,
    },
};

/// The data plus the fields around it.
const EMIT_BODY_BYTES_MAX: usize = EVENT_DATA_BYTES_MAX + 4 * 1024;
/// A page ends early once its bodies reach this size.
const PAGE_BYTES_MAX: i64 = 8 * 1024 * 1024;

pub(crate) fn operations() -> Vec<Operation> {
    const EVENTS: &str = "/v1/tenants/{tenant}/events";
    vec![
        Operation::post(Emit, EVENTS, emit)
            .named("emitEvent", "Emit an event")
            .accepts::<EventForm<'_>>()
            .returns::<Event>(202, "The event was stored and is queued for delivery.")
            .returns::<Event>(
                200,
                "An event with this id and the same content already exists; nothing is sent again.",
            ),
        Operation::read(Own, EVENTS, list)
            .named("listEvents", "List events")
            .returns_page::<Event>("A page of events, newest first."),
        Operation::read(Own, "/v1/tenants/{tenant}/events/{event}", get)
            .named("getEvent", "Retrieve an event with its deliveries")
            .returns::<Event>(200, "The event with its deliveries."),
    ]
}

impl From<EventRow> for Event {
    fn from(row: EventRow) -> Self {
        Self {
            id: row.public_id(),
            created_at: DateTime::from_timestamp_millis(row.id.unix_ms()).unwrap_or_default(),
            data: match &row.full_data {
                Some(data) => serde_json::from_slice(data).ok(),
                None => data_of(&row.body),
            },
            r#type: row.type_name,
            version: row.version,
            ordering_key: row.ordering_key,
            sequence: row.sequence,
            deliveries: None,
        }
    }
}

/// Sliced from the stored body without re-serializing.
fn data_of(body: &[u8]) -> Option<Box<RawValue>> {
    #[derive(Deserialize)]
    struct Stored {
        data: Box<RawValue>,
    }
    match serde_json::from_slice::<Stored>(body) {
        Ok(stored) => Some(stored.data),
        Err(error) => {
            tracing::error!(%error, "stored event body is not valid JSON");
            None
        }
    }
}

async fn emit(
    here: Here,
    Path(tenant): Path<String>,
    claim: Claim,
    traced: Traced,
    text: Text<EMIT_BODY_BYTES_MAX>,
) -> Result<Response, Problem> {
    let taken = take(&here, &tenant, claim, &traced, &text).await;
    let ids = taken.as_ref().map(|(_, id)| std::slice::from_ref(id));
    traced.end(Source::Http, &tenant, ids);
    taken.map(|(response, _)| response)
}

/// Returns the response and the event's id.
async fn take(
    here: &Here,
    tenant: &str,
    claim: Claim,
    traced: &Traced,
    text: &Text<EMIT_BODY_BYTES_MAX>,
) -> Result<(Response, String), Problem> {
    let form: EventForm<'_> = text.read()?;
    let event = OwnedEvent {
        trace: traced.carried(),
        ..check(form, tenant)?
    };
    if claim.is_some() {
        let event = place::with_id(here, &claim, 0, event);
        let keys: Vec<&str> = event.ordering_key.as_deref().into_iter().collect();
        let app = here.emitting(tenant, &keys).await?;
        let event = app.emits.checks().check(event).await?;
        let mut work = Work::begin_emit(app, claim, tenant).await?;
        let emitted = app.emits.emitter().emit(&mut work, &event.borrow()).await;
        let emitted = emitted.map_err(|error| refusal(error, ""))?;
        let (status, view) = respond(&mut work, emitted.clone(), event).await?;
        let response = work.commit(status, &view).await?;
        METRICS.emitted(Source::Http, [&emitted]);
        app.wake.now();
        return Ok((response, emitted.id));
    }
    let (emitted, app) = place::emit(here, event.clone()).await?;
    METRICS.emitted(Source::Http, [&emitted]);
    let id = emitted.id.clone();
    if !emitted.duplicate {
        let response = (StatusCode::ACCEPTED, Json(fresh(emitted, event))).into_response();
        return Ok((response, id));
    }
    let mut connection = app.lookups.acquire().await?;
    let (status, view) = respond(&mut connection, emitted, event).await?;
    Ok(((status, Json(view)).into_response(), id))
}

/// The validation that happens before the database: the data as it will be stored, or the HTTP status of the error.
pub fn read_emit_body(body: &[u8]) -> Result<String, u16> {
    let text = Text::<EMIT_BODY_BYTES_MAX>::of(body.to_vec().into()).ok_or(413_u16)?;
    let status = |problem: Problem| problem.status().as_u16();
    let form: EventForm<'_> = text.read().map_err(status)?;
    Ok(check(form, "acme").map_err(status)?.data)
}

/// Validates the event. Malformed data is 400; data that is not an object is 422.
pub(super) fn check(form: EventForm<'_>, tenant: &str) -> Result<OwnedEvent, Problem> {
    checked(OwnedEvent {
        tenant: tenant.to_owned(),
        data: form.data.get().to_owned(),
        type_name: form.r#type,
        id: form.id,
        version: form.version,
        ordering_key: form.ordering_key,
        trace: None,
        checked: None,
    })
}

/// A new event needs no read from the database.
fn fresh(emitted: Emitted, event: OwnedEvent) -> Event {
    Event {
        id: emitted.id,
        r#type: event.type_name,
        version: emitted.version,
        created_at: emitted.created_at,
        ordering_key: event.ordering_key,
        sequence: emitted.sequence,
        data: RawValue::from_string(event.data).ok(),
        deliveries: None,
    }
}

async fn respond(
    connection: &mut PgConnection,
    emitted: Emitted,
    event: OwnedEvent,
) -> Result<(StatusCode, Event), Problem> {
    if !emitted.duplicate {
        return Ok((StatusCode::ACCEPTED, fresh(emitted, event)));
    }
    let missing = || Problem::not_found("event");
    let tenant = tenants::find(&mut *connection, &event.tenant)
        .await?
        .ok_or_else(missing)?;
    let first = events::load(connection, tenant.id, &[emitted.event]).await?.pop();
    // One that still waits at home has the content of this request.
    let first = first.map_or_else(|| fresh(emitted, event), Event::from);
    Ok((StatusCode::OK, first))
}

/// Newest first.
async fn list(call: Call, Query(query): Query<PageQuery>) -> ApiResult<Page<Event>> {
    let limit = query.limit()?;
    let before = EventId(query.after::<Uuid>()?.unwrap_or(Uuid::max()));
    let found = events::list(&call.app.pool, call.tenant.id, before, limit + 1).await?;
    let shown = fitting(&found, limit as usize);
    let next_cursor = (shown.len() < found.len())
        .then(|| shown.last().map(|id| encode(&id.0)))
        .flatten();
    let rows = events::load(&call.app.pool, call.tenant.id, &shown).await?;
    Ok(Json(Page {
        data: rows.into_iter().map(Event::from).collect(),
        next_cursor,
    }))
}

/// The leading events that fit on the page; at least one.
fn fitting(found: &[(EventId, i32)], limit: usize) -> Vec<EventId> {
    let mut bytes = 0;
    found
        .iter()
        .take(limit)
        .enumerate()
        .take_while(|(index, (_, length))| {
            bytes += i64::from(*length);
            *index == 0 || bytes <= PAGE_BYTES_MAX
        })
        .map(|(_, (id, _))| *id)
        .collect()
}

async fn get(call: Call, Path((_, id)): Path<(String, String)>) -> ApiResult<Event> {
    let missing = || Problem::not_found("event");
    let id = find_number(&call.app, &call.tenant, &id)
        .await?
        .ok_or_else(missing)?;
    let row = events::load(&call.app.pool, call.tenant.id, &[id])
        .await?
        .pop()
        .ok_or_else(missing)?;
    let filter = Filter {
        tenant: Some(call.tenant.id),
        event: Some(id),
        ..Filter::default()
    };
    let (found, _) = deliveries::list(&call.app.pool, &filter, None, LIST_PAGE_MAX).await?;
    let mut view = Event::from(row);
    view.deliveries = Some(found.iter().map(Delivery::from).collect());
    Ok(Json(view))
}

/// A malformed id is not looked up.
pub(super) async fn find_number(app: &Shared, tenant: &Tenant, id: &str) -> Result<Option<EventId>, Problem> {
    let fits = !id.is_empty()
        && id.len() <= postrider_proto::limits::EVENT_ID_CHARS_MAX
        && id
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b':' | b'-'));
    if !fits {
        return Ok(None);
    }
    Ok(events::find_number(&app.pool, tenant.id, id).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_comes_out_as_it_went_in() {
        let data = r#"{ "b":1.0,"a" : 12345678901234567890123, "n":"\u0000\ud800", "a":1e400 }"#;
        let body = format!(r#"{{"id":"e","type":"a","api_version":"1","data":{data}}}"#);
        assert_eq!(data_of(body.as_bytes()).expect("data").get(), data);
    }

    #[test]
    fn a_page_has_room_for_one_event_of_any_size() {
        let id = |n| EventId(Uuid::from_u128(n));
        let big = i32::MAX;
        assert_eq!(fitting(&[(id(2), big), (id(1), 1)], 10), [id(2)]);
        assert_eq!(fitting(&[(id(2), 1), (id(1), 1)], 10), [id(2), id(1)]);
        assert_eq!(fitting(&[(id(2), 1), (id(1), 1)], 1), [id(2)]);
    }
}
