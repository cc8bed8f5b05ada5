//! `events` and `event_ids`: only read here; `postrider.emit` writes them.

use postrider_dispatcher::bind::BindAll;
use postrider_proto::{
    EventId, TenantId,
    limits::EVENT_ID_CHARS_MAX,
    trace::{TraceContext, TraceState},
};
use sqlx::{FromRow, PgExecutor};
use uuid::Uuid;

use crate::Pool;

/// Tenants in which the team's search looks for an id that a producer chose, or for an event that was never attempted: a
/// few milliseconds for each thousand.
const TENANTS_PROBED_MAX: i64 = 20_000;
/// The same after each pause in typing.
pub(crate) const TENANTS_PROBED_TYPING_MAX: i64 = 500;

/// How far a search in all tenants goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effort {
    /// A page was asked for.
    Full,
    /// Someone is typing.
    Typing,
}

impl Effort {
    const fn tenants_max(self) -> i64 {
        match self {
            Self::Full => TENANTS_PROBED_MAX,
            Self::Typing => TENANTS_PROBED_TYPING_MAX,
        }
    }
}

#[derive(Debug, FromRow)]
pub(crate) struct EventRow {
    pub(crate) id: EventId,
    pub(crate) tenant_id: TenantId,
    pub(crate) type_name: String,
    pub(crate) version: String,
    pub(crate) chosen_id: Option<String>,
    pub(crate) ordering_key: Option<String>,
    pub(crate) sequence: Option<i64>,
    /// The exact bytes that every attempt sends.
    pub(crate) body: Vec<u8>,
    /// The complete data of a thin event.
    pub(crate) full_data: Option<Vec<u8>>,
    /// Its partition was dropped, and with it the attempts of its finished deliveries.
    pub(crate) is_archived: bool,
}

impl EventRow {
    pub(crate) fn public_id(&self) -> String {
        self.chosen_id.clone().unwrap_or_else(|| self.id.generated())
    }
}

/// Whether the text has the form of an event id. Others are not looked up.
pub(crate) fn is_public_id(id: &str) -> bool {
    !id.is_empty()
        && id.len() <= EVENT_ID_CHARS_MAX
        && id
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b':' | b'-'))
}

/// The events of all tenants with this id, chosen by a producer or generated. A generated id that was attempted is found by the
/// index of attempts, whatever the effort; others are looked up tenant by tenant.
async fn find_in_all_tenants(db: &Pool, id: &str, effort: Effort) -> sqlx::Result<Vec<(EventId, TenantId)>> {
    let generated = EventId::from_generated(id);
    if let Some(event) = generated {
        let tenant: Option<TenantId> = sqlx::query_scalar(
            "select tenant_id from postrider.attempts where event_id = $1
             union all select tenant_id from postrider.archived_events where id = $1 limit 1",
        )
        .bind(event)
        .fetch_optional(db)
        .await?;
        if let Some(tenant) = tenant {
            return Ok(vec![(event, tenant)]);
        }
    }
    sqlx::query_as(include_str!("sql/events_find_in_all_tenants.sql"))
        .bind_all((id, generated, effort.tenants_max()))
        .fetch_all(db)
        .await
}

/// The event with this id, chosen by its producer or generated.
pub(crate) async fn find_number(
    db: impl PgExecutor<'_>,
    tenant: TenantId,
    id: &str,
) -> sqlx::Result<Option<EventId>> {
    let generated = EventId::from_generated(id);
    sqlx::query_scalar(
        "select coalesce(
            (select event_id from postrider.event_ids where tenant_id = $1 and id = $2),
            (select id from postrider.events where id = $3 and tenant_id = $1 and chosen_id is null),
            (select id from postrider.archived_events where id = $3 and tenant_id = $1 and chosen_id is null))",
    )
    .bind_all((tenant, id, generated))
    .fetch_one(db)
    .await
}

/// The events with this id, of one tenant or of any: a producer's id is unique only within its tenant. Unlike in the API,
/// the generated id finds an event with an id of its own, too.
pub(crate) async fn find_in(
    db: &Pool,
    scope: Option<TenantId>,
    id: &str,
    effort: Effort,
) -> sqlx::Result<Vec<(EventId, TenantId)>> {
    if !is_public_id(id) {
        return Ok(Vec::new());
    }
    let Some(tenant) = scope else {
        return find_in_all_tenants(db, id, effort).await;
    };
    let found: Option<EventId> = sqlx::query_scalar(
        "select coalesce(
            (select event_id from postrider.event_ids where tenant_id = $1 and id = $2),
            (select id from postrider.events where id = $3 and tenant_id = $1),
            (select id from postrider.archived_events where id = $3 and tenant_id = $1))",
    )
    .bind_all((tenant, id, EventId::from_generated(id)))
    .fetch_one(db)
    .await?;
    Ok(found.map(|event| (event, tenant)).into_iter().collect())
}

/// Joined by `unnest`: `id = any($1)` under a generic plan would scan every partition.
pub(crate) async fn load(
    db: impl PgExecutor<'_>,
    tenant: TenantId,
    ids: &[EventId],
) -> sqlx::Result<Vec<EventRow>> {
    let ids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
    sqlx::query_as(include_str!("sql/events_load.sql"))
        .bind_all((tenant, ids))
        .fetch_all(db)
        .await
}

/// What is known of an event's trace.
pub(crate) struct EventTrace {
    /// The producer's context. Without one, the trace is derived from the event.
    pub(crate) stored: Option<(TraceContext, Option<TraceState>)>,
    /// The event is so old that a context may have been stored and deleted.
    pub(crate) may_be_deleted: bool,
}

pub(crate) async fn find_trace(db: impl PgExecutor<'_>, id: EventId) -> sqlx::Result<EventTrace> {
    let (context, may_be_deleted): (Option<Vec<u8>>, bool) = sqlx::query_as(
        "select (select context from postrider.traces where event_id = $1::uuid),
            $1::uuid < postrider.uuid_floor(clock_timestamp() - interval '7 days')",
    )
    .bind(id)
    .fetch_one(db)
    .await?;
    Ok(EventTrace {
        stored: context.and_then(|bytes| TraceContext::from_bytes(&bytes)),
        may_be_deleted,
    })
}

/// What a list shows of an event without reading its body.
#[derive(Debug, FromRow)]
pub(crate) struct RecentEvent {
    pub(crate) id: EventId,
    pub(crate) type_name: String,
    pub(crate) version: String,
    /// Of the body and the data that is stored beside it.
    pub(crate) bytes: i32,
}

/// The newest events of a tenant, newest first.
pub(crate) async fn recent(
    db: impl PgExecutor<'_>,
    tenant: TenantId,
    limit: i64,
) -> sqlx::Result<Vec<RecentEvent>> {
    sqlx::query_as(include_str!("sql/events_recent.sql"))
        .bind_all((tenant, limit))
        .fetch_all(db)
        .await
}

/// Ids and sizes, newest first. The bodies are not read for this.
pub(crate) async fn list(
    db: impl PgExecutor<'_>,
    tenant: TenantId,
    before: EventId,
    limit: i64,
) -> sqlx::Result<Vec<(EventId, i32)>> {
    sqlx::query_as(
        "select id, octet_length(body) + coalesce(octet_length(full_data), 0) from postrider.events
         where tenant_id = $1 and id < $2 order by id desc limit $3",
    )
    .bind_all((tenant, before, limit))
    .fetch_all(db)
    .await
}
