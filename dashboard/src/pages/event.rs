//! One event: its body, its schema version, and every endpoint it went to.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    Extension,
    extract::{Path, State},
};
use chrono::DateTime;
use postrider_proto::{EventId, TenantId, limits::LIST_PAGE_MAX};

use super::{Frame, Line, Moment, PageProblem, Pretty};
use crate::{
    Shared,
    auth::Session,
    deliveries::{self, Filter},
    problem::Problem,
    tables::{events, tenants},
};

#[derive(Template, WebTemplate)]
#[template(path = "event.html")]
pub(crate) struct EventPage {
    frame: Frame,
    id: String,
    /// The one that Postrider made, when the producer chose another.
    generated: Option<String>,
    event_type: String,
    version: String,
    tenant: String,
    created: Moment,
    ordering_key: Option<String>,
    sequence: Option<i64>,
    bytes: i64,
    pretty: Pretty,
    raw: String,
    /// Of a thin event: what its receivers fetch.
    full_data: Option<String>,
    lines: Vec<Line>,
}

pub(crate) async fn show(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
    Path(id): Path<String>,
) -> Result<EventPage, PageProblem> {
    let missing = || Problem::not_found("event");
    let number = find(&app, session.scope(), &id).await?.ok_or_else(missing)?;
    let event = events::load(&app.pool, &[number])
        .await?
        .pop()
        .filter(|event| session.scope().is_none_or(|own| own == event.tenant_id))
        .ok_or_else(missing)?;
    let filter = Filter {
        tenant: Some(event.tenant_id),
        event: Some(number),
        ..Filter::default()
    };
    let (found, _) = deliveries::list(&app.pool, &filter, None, LIST_PAGE_MAX).await?;
    let raw = String::from_utf8_lossy(&event.body).into_owned();
    Ok(EventPage {
        frame: Frame::new(session, "deliveries"),
        id: event.public_id(),
        generated: event.chosen_id.is_some().then(|| number.generated()),
        tenant: tenants::slug(&app.pool, event.tenant_id)
            .await?
            .unwrap_or_default(),
        created: Moment(DateTime::from_timestamp_millis(number.unix_ms())),
        bytes: event.body.len() as i64,
        pretty: Pretty::of(&raw),
        raw,
        full_data: event
            .full_data
            .map(|data| Pretty::whole(&String::from_utf8_lossy(&data))),
        event_type: event.type_name,
        version: event.version,
        ordering_key: event.ordering_key,
        sequence: event.sequence,
        lines: found.iter().map(Line::from).collect(),
    })
}

/// By the id that Postrider made, which is in our own links, or by the one that its producer chose: the newest, when
/// several tenants have chosen it.
async fn find(app: &Shared, scope: Option<TenantId>, id: &str) -> Result<Option<EventId>, sqlx::Error> {
    if let Some(number) = EventId::from_generated(id) {
        return Ok(Some(number));
    }
    if !events::is_public_id(id) {
        return Ok(None);
    }
    match scope {
        Some(tenant) => events::find_number(&app.pool, tenant, id).await,
        None => Ok(events::find_numbers(&app.pool, id).await?.into_iter().max()),
    }
}
