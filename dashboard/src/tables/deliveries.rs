//! Deliveries as the API shows them. They have no table: each is a row of `queue` or `retries`, or the attempt that
//! ended it. A list merges those by (event, endpoint), newest first; the cursor is that pair.
//! Invariant: a page takes at most `SCAN_STEPS_MAX` steps, no further one after `SCAN_MAX` deliveries were examined, and
//! loads at most `LOADED_MAX`, or as many as it shows, however few of them match. The cursor continues from there.

use std::collections::HashSet;

use chrono::{DateTime, TimeDelta, Utc};
use postrider_dispatcher::{bind::BindAll, statistics::Class};
use postrider_proto::{
    DeadReason, DeliveryId, DeliveryState, EndpointId, EventId, FinalState, OutcomeKind, TenantId,
    limits::LIST_PAGE_MAX,
};
use sqlx::{FromRow, PgExecutor};
use uuid::Uuid;

use crate::{
    Pool,
    tables::{
        attempts,
        delivery_scope::Scope,
        event_types,
        holds::{Hold, Switches},
    },
};

/// Deliveries examined for one page before it is returned as it is, with a cursor.
const SCAN_MAX: usize = 1_000;
/// Deliveries loaded for one page because their rows could not tell whether they match.
const LOADED_MAX: usize = 400;
const SCAN_STEPS_MAX: usize = 5;
/// Deliveries looked up in one statement, if that many are available.
const DESCRIBED_LEAST: usize = 100;
/// Between the database, which dates events, and a dispatcher, which dates attempts.
const CLOCKS_DIFFER_MAX: TimeDelta = TimeDelta::minutes(1);

/// The range and batch size of a list, and the conditions that a row itself can decide.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span<'a> {
    /// Exclusive.
    pub(crate) before: DeliveryId,
    pub(crate) lowest: EventId,
    pub(crate) limit: i64,
    /// Ids of the requested type; a name may have had several.
    pub(crate) types: Option<&'a [i32]>,
    pub(crate) status: Option<i16>,
    /// For dead letters.
    pub(crate) reason: Option<DeadReason>,
    /// Of ended deliveries.
    pub(crate) state: Option<DeliveryState>,
    pub(crate) attempted: Option<Attempted>,
    /// Only deliveries with an attempt that failed.
    pub(crate) has_failed: bool,
    pub(crate) attempts_min: Option<i16>,
    /// Of the latest attempt.
    pub(crate) failure: Option<Failure>,
}

/// When an attempt ended, to the second; `until` is exclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Attempted {
    pub(crate) since: Option<DateTime<Utc>>,
    pub(crate) until: Option<DateTime<Utc>>,
}

impl<'a> Span<'a> {
    /// Consecutive parameters of every list.
    pub(crate) fn values(&self) -> (EventId, EventId, EndpointId, i64, Option<&'a [i32]>) {
        let DeliveryId { event, endpoint } = self.before;
        (self.lowest, event, endpoint, self.limit, self.types)
    }

    /// Consecutive parameters of the lists of ended deliveries, after those.
    pub(crate) fn ended_values(&self) -> EndedValues {
        let Attempted { since, until } = self.attempted.unwrap_or_default();
        let state = self.state.map(DeliveryState::as_str);
        (
            self.status,
            state,
            since,
            until,
            self.has_failed,
            self.attempts_min,
        )
    }

    /// Whether a delivery without an attempt can't match.
    pub(crate) fn is_attempted(&self) -> bool {
        let asked = [
            self.status.is_some(),
            self.attempted.is_some(),
            self.attempts_min.is_some(),
            self.failure.is_some(),
        ];
        asked.contains(&true)
    }

    /// What a dead letter has failed with, as it is stored: from and to. None if any, or if it can't be told by a range.
    pub(crate) fn failures(&self) -> (Option<i16>, Option<i16>) {
        let Some(Failure::Class(class)) = self.failure else {
            return (None, None);
        };
        let range = |from: i16, upto: i16| (Some(from), Some(upto));
        let one = |kind: OutcomeKind| range(kind as i16, kind as i16);
        match class {
            Class::Redirected => range(300, 399),
            Class::ClientError => range(400, 499),
            Class::NameNotFound => one(OutcomeKind::NameNotFound),
            Class::ConnectionFailed => one(OutcomeKind::ConnectionFailed),
            Class::TlsFailed => one(OutcomeKind::TlsFailed),
            Class::TimedOut => one(OutcomeKind::TimedOut),
            Class::InvalidResponse => one(OutcomeKind::InvalidResponse),
            Class::Forbidden => one(OutcomeKind::Forbidden),
            Class::Accepted | Class::ServerError | Class::NotSent => (None, None),
        }
    }
}

type EndedValues = (
    Option<i16>,
    Option<&'static str>,
    Option<DateTime<Utc>>,
    Option<DateTime<Utc>>,
    bool,
    Option<i16>,
);

#[derive(Debug, Clone, Copy, PartialEq, Eq, FromRow)]
pub(crate) struct DeliveryKey {
    pub(crate) event_id: EventId,
    pub(crate) endpoint_id: EndpointId,
    /// Rows that can't match are skipped without a lookup.
    pub(crate) may_match: bool,
}

impl DeliveryKey {
    fn id(&self) -> DeliveryId {
        DeliveryId {
            event: self.event_id,
            endpoint: self.endpoint_id,
        }
    }

    pub(super) fn ids(&self) -> (EventId, EndpointId) {
        (self.event_id, self.endpoint_id)
    }
}

#[derive(Debug, Clone, FromRow)]
pub(crate) struct Delivery {
    event_id: EventId,
    endpoint_id: EndpointId,
    pub(crate) tenant_id: TenantId,
    pub(crate) tenant: String,
    #[sqlx(rename = "type_name")]
    pub(crate) event_type: String,
    chosen_id: Option<String>,
    pub(crate) endpoint: String,
    pub(crate) url: String,
    #[sqlx(flatten)]
    switches: Switches,
    pub(crate) attempt_count: i16,
    pub(crate) status: Option<i16>,
    pub(crate) outcome: Option<i16>,
    pub(crate) error: Option<String>,
    pub(crate) last_attempt_at: Option<DateTime<Utc>>,
    #[sqlx(rename = "final")]
    end: Option<FinalState>,
    pub(crate) due_at: Option<DateTime<Utc>>,
    pub(crate) reason: Option<DeadReason>,
    pub(crate) died_at: Option<DateTime<Utc>>,
}

impl Delivery {
    pub(crate) fn id(&self) -> DeliveryId {
        DeliveryId {
            event: self.event_id,
            endpoint: self.endpoint_id,
        }
    }

    pub(crate) fn state(&self) -> DeliveryState {
        self.end.into()
    }

    pub(crate) fn event(&self) -> String {
        self.chosen_id
            .clone()
            .unwrap_or_else(|| self.event_id.generated())
    }

    pub(crate) fn created_at(&self) -> Option<DateTime<Utc>> {
        time_of(self.event_id)
    }

    /// Why it is not sent, if it is pending.
    pub(crate) fn hold(&self) -> Option<Hold> {
        self.switches.hold().filter(|_| self.end.is_none())
    }

    fn has_failed(&self, failure: Failure) -> bool {
        self.outcome
            .is_some_and(|outcome| failure.matches(outcome, self.status))
    }
}

/// How an attempt failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    Any,
    Class(Class),
}

impl Failure {
    fn matches(self, outcome: i16, status: Option<i16>) -> bool {
        let Some(kind) = OutcomeKind::from_number(outcome) else {
            return false;
        };
        let class = Class::of(kind, status.and_then(|code| u16::try_from(code).ok()));
        match self {
            Self::Any => class != Class::Accepted,
            Self::Class(wanted) => class == wanted,
        }
    }
}

/// The filter of a list. `since` and `until` are about the creation of the event.
#[derive(Debug, Clone, Default)]
pub(crate) struct Filter {
    pub(crate) tenant: Option<TenantId>,
    pub(crate) state: Option<DeliveryState>,
    pub(crate) endpoint: Option<EndpointId>,
    pub(crate) event: Option<EventId>,
    pub(crate) since: Option<DateTime<Utc>>,
    pub(crate) until: Option<DateTime<Utc>>,
    pub(crate) event_type: Option<String>,
    pub(crate) status_code: Option<i16>,
    /// Of the bulk replay with this public id, which must be one of the tenant.
    pub(crate) replay: Option<String>,
    /// Only with state dead.
    pub(crate) reason: Option<DeadReason>,
    /// Of the latest attempt, so that nothing delivered matches, and nothing discarded unless that state is asked for. With
    /// `attempted`, of any attempt in that time.
    pub(crate) failure: Option<Failure>,
    /// With an attempt that ended in this time.
    pub(crate) attempted: Option<Attempted>,
    pub(crate) attempts_min: Option<i16>,
}

impl Filter {
    /// Whatever index is read, discarded deliveries are listed by that state only.
    fn has_failed(&self, delivery: &Delivery, failure: Failure) -> bool {
        delivery.has_failed(failure) && (self.state.is_some() || delivery.state() != DeliveryState::Discarded)
    }

    fn admits(&self, delivery: &Delivery) -> bool {
        self.state.is_none_or(|state| state == delivery.state())
            && self.status_code.is_none_or(|code| Some(code) == delivery.status)
            && self.reason.is_none_or(|reason| Some(reason) == delivery.reason)
            && (self.attempted.is_some()
                || self
                    .failure
                    .is_none_or(|failure| self.has_failed(delivery, failure)))
            && self
                .attempts_min
                .is_none_or(|least| delivery.attempt_count >= least)
            && self
                .event_type
                .as_ref()
                .is_none_or(|name| *name == delivery.event_type)
    }

    fn span<'a>(&self, after: Option<DeliveryId>, limit: i64, types: Option<&'a [i32]>) -> Span<'a> {
        let at = |time: DateTime<Utc>| first_id_of(time);
        let top = DeliveryId {
            event: EventId(Uuid::max()),
            endpoint: EndpointId(i32::MAX),
        };
        let until = self.until.map(|time| DeliveryId {
            event: at(time),
            endpoint: EndpointId(i32::MIN),
        });
        let event = self.event.map(|event| DeliveryId {
            event,
            endpoint: EndpointId(i32::MAX),
        });
        // No event is attempted before it is created, but clocks differ.
        let attempted = self.attempted.and_then(|attempted| attempted.until);
        let attempted = attempted.map(|time| DeliveryId {
            event: at(time + CLOCKS_DIFFER_MAX),
            endpoint: EndpointId(i32::MIN),
        });
        let bounds = [after, until, event, attempted];
        let before = bounds.into_iter().flatten().fold(top, Ord::min);
        let lowest = [self.since.map(at), self.event]
            .into_iter()
            .flatten()
            .fold(EventId::LOWEST, Ord::max);
        Span {
            before,
            lowest,
            limit,
            types,
            status: self.status_code,
            reason: self.reason,
            state: self.state,
            attempted: self.attempted,
            has_failed: self.attempted.is_some() && self.failure.is_some(),
            attempts_min: self.attempts_min,
            failure: self.failure.filter(|_| self.attempted.is_none()),
        }
    }
}

/// When an event was created.
pub(crate) fn time_of(event: EventId) -> Option<DateTime<Utc>> {
    DateTime::from_timestamp_millis(event.unix_ms())
}

pub(crate) fn first_id_of(time: DateTime<Utc>) -> EventId {
    EventId::first_of(time.timestamp_millis())
}

/// Returns a page and, if there may be more, where to continue.
pub(crate) async fn list(
    pool: &Pool,
    filter: &Filter,
    after: Option<DeliveryId>,
    limit: i64,
) -> sqlx::Result<(Vec<Delivery>, Option<DeliveryId>)> {
    let limit = limit.clamp(1, LIST_PAGE_MAX);
    let types = match &filter.event_type {
        None => None,
        Some(name) => Some(event_types::numbers(pool, name).await?),
    };
    if types.as_ref().is_some_and(Vec::is_empty) {
        return Ok((Vec::new(), None));
    }
    if filter.failure.is_some()
        && filter.attempted.is_none()
        && filter.state == Some(DeliveryState::Delivered)
    {
        return Ok((Vec::new(), None));
    }
    let scope = Scope::of(pool, filter).await?;
    let is_narrow = types.is_some()
        || filter.reason.is_some()
        || filter.failure.is_some()
        || filter.attempts_min.is_some()
        || filter.state == Some(DeliveryState::Discarded);
    let step = scope.step_first(is_narrow).max(limit + 1);
    let step_max = scope.step_max().max(step);
    let mut span = filter.span(after, step, types.as_deref());
    let mut found: Vec<Delivery> = Vec::new();
    let loaded_max = LOADED_MAX.max(limit as usize + 1);
    let (mut scanned, mut loaded) = (0, 0);
    for _ in 0..SCAN_STEPS_MAX {
        let keys = scope.keys(pool, filter, span).await?;
        let mut matching: Vec<DeliveryKey> = keys.iter().filter(|key| key.may_match).copied().collect();
        if let Some(failure) = span.failure {
            retain_failed(pool, &mut matching, failure).await?;
        }
        let is_cut = loaded + matching.len() > loaded_max;
        matching.truncate(loaded_max - loaded);
        for delivery in describe_in_parts(pool, &matching, limit as usize - found.len() + 1, filter).await? {
            if found.len() as i64 == limit {
                let last = found.last().map(Delivery::id);
                return Ok((found, last));
            }
            found.push(delivery);
        }
        if is_cut {
            let read_to = matching.last().map_or(span.before, DeliveryKey::id);
            return Ok((found, Some(read_to)));
        }
        scanned += keys.len();
        loaded += matching.len();
        match keys.last() {
            Some(last) if keys.len() as i64 == span.limit => {
                span.before = last.id();
                // If few rows match, the steps grow.
                span.limit = (span.limit * 3).min(step_max);
            }
            _ => return Ok((found, None)),
        }
        if scanned >= SCAN_MAX {
            break;
        }
    }
    Ok((found, Some(span.before)))
}

/// One delivery, of one tenant or of any.
pub(crate) async fn find(
    db: impl PgExecutor<'_>,
    tenant: Option<TenantId>,
    id: DeliveryId,
) -> sqlx::Result<Option<Delivery>> {
    Ok(find_all(db, tenant, &[id]).await?.pop())
}

/// Those that exist, of one tenant or of any, newest first.
pub(crate) async fn find_all(
    db: impl PgExecutor<'_>,
    tenant: Option<TenantId>,
    ids: &[DeliveryId],
) -> sqlx::Result<Vec<Delivery>> {
    let key = |id: &DeliveryId| DeliveryKey {
        event_id: id.event,
        endpoint_id: id.endpoint,
        may_match: true,
    };
    let keys: Vec<DeliveryKey> = ids.iter().map(key).collect();
    let mut found = describe(db, &keys).await?;
    found.retain(|delivery| tenant.is_none_or(|tenant| tenant == delivery.tenant_id));
    Ok(found)
}

/// Those that match, newest first. In parts: fifty of a thousand candidates may be enough.
async fn describe_in_parts(
    pool: &Pool,
    keys: &[DeliveryKey],
    wanted: usize,
    filter: &Filter,
) -> sqlx::Result<Vec<Delivery>> {
    let mut found = Vec::new();
    for part in keys.chunks(wanted.max(DESCRIBED_LEAST)) {
        let mut described = describe(pool, part).await?;
        described.retain(|delivery| filter.admits(delivery));
        retain_attempted(pool, &mut described, filter).await?;
        found.extend(described);
        if found.len() >= wanted {
            break;
        }
    }
    Ok(found)
}

/// Keeps those whose latest attempt has failed like this.
async fn retain_failed(pool: &Pool, keys: &mut Vec<DeliveryKey>, failure: Failure) -> sqlx::Result<()> {
    if keys.is_empty() {
        return Ok(());
    }
    let latest = attempts::latest_of(pool, keys).await?;
    let failed: HashSet<DeliveryId> = latest
        .iter()
        .filter(|one| failure.matches(one.outcome, one.status))
        .map(|one| one.delivery())
        .collect();
    keys.retain(|key| failed.contains(&key.id()));
    Ok(())
}

/// Keeps those with an attempt that the filter asks for.
async fn retain_attempted(
    db: impl PgExecutor<'_>,
    found: &mut Vec<Delivery>,
    filter: &Filter,
) -> sqlx::Result<()> {
    let Some(attempted) = filter.attempted.filter(|_| !found.is_empty()) else {
        return Ok(());
    };
    let ids: Vec<DeliveryId> = found.iter().map(Delivery::id).collect();
    let attempts = attempts::made_within(db, &ids, attempted).await?;
    let wanted: HashSet<DeliveryId> = attempts
        .iter()
        .filter(|one| {
            filter
                .failure
                .is_none_or(|failure| failure.matches(one.outcome, one.status))
        })
        .map(|one| one.delivery())
        .collect();
    found.retain(|delivery| wanted.contains(&delivery.id()));
    Ok(())
}

/// Loads the deliveries in one snapshot, newest first.
async fn describe(db: impl PgExecutor<'_>, keys: &[DeliveryKey]) -> sqlx::Result<Vec<Delivery>> {
    if keys.is_empty() {
        return Ok(Vec::new());
    }
    let events: Vec<Uuid> = keys.iter().map(|key| key.event_id.0).collect();
    let endpoints: Vec<i32> = keys.iter().map(|key| key.endpoint_id.0).collect();
    sqlx::query_as(include_str!("sql/deliveries_describe.sql"))
        .bind_all((events, endpoints))
        .fetch_all(db)
        .await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(event: u128, endpoint: i32) -> DeliveryId {
        DeliveryId {
            event: EventId(Uuid::from_u128(event)),
            endpoint: EndpointId(endpoint),
        }
    }

    #[test]
    fn a_span_begins_at_the_lowest_of_its_bounds() {
        let filter = Filter::default();
        assert_eq!(filter.span(None, 1, None).before.endpoint, EndpointId(i32::MAX));
        assert_eq!(filter.span(Some(id(5, 7)), 1, None).before, id(5, 7));

        let one = Filter {
            event: Some(EventId(Uuid::from_u128(9))),
            ..Filter::default()
        };
        assert_eq!(one.span(None, 1, None).before, id(9, i32::MAX));
        assert_eq!(one.span(None, 1, None).lowest, id(9, 0).event);
        assert_eq!(one.span(Some(id(9, 3)), 1, None).before, id(9, 3));
    }

    #[test]
    fn until_leaves_its_own_instant_out_and_since_takes_it_in() {
        let time = DateTime::from_timestamp_millis(1_700_000_000_000).expect("a time");
        let filter = Filter {
            since: Some(time),
            until: Some(time),
            ..Filter::default()
        };
        let span = filter.span(None, 1, None);
        assert_eq!(span.lowest.unix_ms(), 1_700_000_000_000);
        assert_eq!(span.before.event, span.lowest);
        assert_eq!(span.before.endpoint, EndpointId(i32::MIN));
    }
}
