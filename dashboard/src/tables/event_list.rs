//! Lists of events, newest first, whether or not an endpoint got them.
//! Invariant: a page reads at most `SCAN_MAX` events, and probes at most `PROBES_MAX` indexes for those of all tenants. The
//! cursor continues from there.

use chrono::{DateTime, TimeDelta, Utc};
use postrider_dispatcher::bind::BindAll;
use postrider_proto::{EventId, TenantId, limits::LIST_PAGE_MAX};
use sqlx::{FromRow, PgExecutor};
use uuid::Uuid;

use crate::{
    Pool,
    tables::{
        self,
        deliveries::{first_id_of, time_of},
        event_types,
    },
};

/// Events read for one page if few may match: of one tenant, and of all.
const SCAN_MAX: i64 = 1_000;
const SCAN_OF_ALL_MAX: i64 = 200;
/// Of one tenant without deliveries: each may have to be looked for at every endpoint.
const SCAN_UNSENT_MAX: i64 = 200;
/// Tenants whose events are looked up for a list of all.
const TENANTS_PROBED_MAX: i64 = 20_000;
/// Tenants with events that are found without probing each tenant.
const TENANTS_FOUND_MAX: i64 = 1_000;
/// One probe for each tenant and day: a list of many tenants covers fewer days.
const PROBES_MAX: i64 = 25_000;
/// Ended deliveries that are counted of one event.
const ENDED_COUNTED_MAX: i64 = 1_000;
/// Clocks of producers' databases may be ahead.
const AHEAD: TimeDelta = TimeDelta::hours(1);

/// The filter of a list.
#[derive(Debug, Clone, Default)]
pub(crate) struct EventFilter {
    pub(crate) tenant: Option<TenantId>,
    pub(crate) event_type: Option<String>,
    pub(crate) since: Option<DateTime<Utc>>,
    pub(crate) until: Option<DateTime<Utc>>,
    /// Only events without any delivery.
    pub(crate) is_unsent: bool,
}

#[derive(Debug, Clone, Copy, FromRow)]
struct EventKey {
    id: EventId,
    tenant_id: TenantId,
    may_match: bool,
}

/// An event and its deliveries by state.
#[derive(Debug, Clone, FromRow)]
pub(crate) struct EventSummary {
    pub(crate) id: EventId,
    pub(crate) tenant: String,
    pub(crate) type_name: String,
    pub(crate) chosen_id: Option<String>,
    pub(crate) delivered: i64,
    pub(crate) dead: i64,
    pub(crate) discarded: i64,
    pub(crate) pending: i64,
}

impl EventSummary {
    pub(crate) fn public_id(&self) -> String {
        self.chosen_id.clone().unwrap_or_else(|| self.id.generated())
    }

    pub(crate) fn created_at(&self) -> Option<DateTime<Utc>> {
        time_of(self.id)
    }

    /// The states that a delivery of it is in, with their numbers.
    pub(crate) fn by_state(&self) -> Vec<(&'static str, i64)> {
        let all = [
            ("delivered", self.delivered),
            ("pending", self.pending),
            ("dead", self.dead),
            ("discarded", self.discarded),
        ];
        all.into_iter().filter(|(_, count)| *count > 0).collect()
    }

    pub(crate) fn deliveries(&self) -> i64 {
        self.delivered + self.dead + self.discarded + self.pending
    }
}

/// Events that were found by their id.
pub(crate) async fn summaries(
    db: impl PgExecutor<'_>,
    found: &[(EventId, TenantId)],
) -> sqlx::Result<Vec<EventSummary>> {
    if found.is_empty() {
        return Ok(Vec::new());
    }
    let key = |(id, tenant_id): &(EventId, TenantId)| EventKey {
        id: *id,
        tenant_id: *tenant_id,
        may_match: true,
    };
    let keys: Vec<EventKey> = found.iter().map(key).collect();
    summarize(db, &keys, false).await
}

/// Returns a page and, if there may be more, the event before which to continue.
pub(crate) async fn list(
    pool: &Pool,
    filter: &EventFilter,
    before: Option<EventId>,
    limit: i64,
) -> sqlx::Result<(Vec<EventSummary>, Option<EventId>)> {
    let limit = limit.clamp(1, LIST_PAGE_MAX);
    let types = match &filter.event_type {
        None => None,
        Some(name) => Some(event_types::numbers(pool, name).await?),
    };
    if types.as_ref().is_some_and(Vec::is_empty) {
        return Ok((Vec::new(), None));
    }
    let now = tables::now(pool).await?;
    let until = filter
        .until
        .map_or_else(|| now + AHEAD, |until| until.min(now + AHEAD));
    let before = before.unwrap_or(EventId(Uuid::max())).min(first_id_of(until));
    let lowest = filter.since.map_or(EventId::LOWEST, first_id_of);
    let is_narrow = types.is_some() || filter.is_unsent;
    let (window, scan_max) = match filter.tenant {
        Some(_) if filter.is_unsent => (lowest, SCAN_UNSENT_MAX),
        Some(_) => (lowest, SCAN_MAX),
        None => (window(pool, before).await?.max(lowest), SCAN_OF_ALL_MAX),
    };
    let scan = if is_narrow {
        scan_max.max(limit + 1)
    } else {
        limit + 1
    };
    let mut keys = keys(pool, filter.tenant, (window, before), scan, types.as_deref()).await?;
    let read_to = match keys.last() {
        Some(last) if keys.len() as i64 == scan => Some(last.id),
        _ => Some(window).filter(|window| *window > lowest),
    };
    // An event that is being archived is in both tables.
    keys.dedup_by_key(|key| key.id);
    let mut found = Vec::new();
    let matching: Vec<EventKey> = keys.into_iter().filter(|key| key.may_match).collect();
    // In parts: the first may be enough.
    for part in matching.chunks(limit as usize + 1) {
        let part = summarize(pool, part, filter.is_unsent).await?;
        found.extend(
            part.into_iter()
                .filter(|event| !filter.is_unsent || event.deliveries() == 0),
        );
        if found.len() as i64 > limit {
            found.truncate(limit as usize);
            let last = found.last().map(|event| event.id);
            return Ok((found, last));
        }
    }
    Ok((found, read_to))
}

/// How far back a page of the events of all tenants looks: further if there are few tenants. Nothing is older than the
/// oldest partition, or than the archived events.
async fn window(pool: &Pool, before: EventId) -> sqlx::Result<EventId> {
    let (tenants, oldest): (i64, Option<EventId>) = sqlx::query_as(include_str!("sql/events_extent.sql"))
        .bind(TENANTS_PROBED_MAX)
        .fetch_one(pool)
        .await?;
    let days = TimeDelta::days((PROBES_MAX / tenants.max(1)).min(36_500));
    let start = time_of(before).and_then(|time| time.checked_sub_signed(days));
    let start = start.map_or(EventId::LOWEST, first_id_of);
    Ok(match oldest {
        Some(oldest) if start <= oldest => EventId::LOWEST,
        _ => start,
    })
}

async fn keys(
    db: impl PgExecutor<'_>,
    tenant: Option<TenantId>,
    (from, before): (EventId, EventId),
    limit: i64,
    types: Option<&[i32]>,
) -> sqlx::Result<Vec<EventKey>> {
    let statement = match tenant {
        Some(_) => include_str!("sql/events_list_of_tenant.sql"),
        None => include_str!("sql/events_list_in_all_tenants.sql"),
    };
    let query = sqlx::query_as(statement).bind_all((from, before, limit, types));
    match tenant {
        Some(tenant) => query.bind(tenant).fetch_all(db).await,
        None => {
            let days = (day_of(from, 0), day_of(before, 1), TENANTS_FOUND_MAX);
            let query = query.bind(TENANTS_PROBED_MAX).bind_all(days);
            query.fetch_all(db).await
        }
    }
}

/// The first id of the event's day, or of a day after it. Partitions begin with days.
fn day_of(event: EventId, later: i64) -> EventId {
    const DAY_MS: i64 = 24 * 60 * 60 * 1000;
    EventId::first_of((event.unix_ms().div_euclid(DAY_MS) + later) * DAY_MS)
}

async fn summarize(
    db: impl PgExecutor<'_>,
    keys: &[EventKey],
    is_unsent: bool,
) -> sqlx::Result<Vec<EventSummary>> {
    let ids: Vec<Uuid> = keys.iter().map(|key| key.id.0).collect();
    let tenants: Vec<i32> = keys.iter().map(|key| key.tenant_id.0).collect();
    sqlx::query_as(include_str!("sql/events_summarize.sql"))
        .bind_all((ids, tenants, ENDED_COUNTED_MAX, is_unsent))
        .fetch_all(db)
        .await
}
