//! Counts and samples the deliveries that a bulk replay would take from each of its four sources. The conditions are those
//! of `store/sql/replay_*.sql`.
//!
//! Parameters of every statement: $1 endpoints, $2 after this event, $3 from this event, $4 below this event, $5 when the
//! replay was asked for, $6 type, $7 reason, $8 failure.

use chrono::{DateTime, Utc};
use postrider_proto::{EndpointId, EventId, ReplayKind, ReplaySource};
use sqlx::{AssertSqlSafe, FromRow, PgConnection, PgExecutor};

use super::{Ask, Part};
use crate::{bind::BindAll, store::transitions::ReplayBounds};

/// The bounds of a replay. `oldest` is what retention has left.
pub(super) fn bounds(ask: &Ask, requested_at: DateTime<Utc>, oldest: DateTime<Utc>) -> ReplayBounds {
    let first = |time: DateTime<Utc>| EventId::first_of(time.timestamp_millis());
    let since = match ask.kind {
        // An event whose attempts are about to be dropped must not look as if it had none.
        ReplayKind::Missing => Some(ask.since.map_or(oldest, |since| since.max(oldest))),
        _ => ask.since,
    };
    ReplayBounds {
        after: EventId::LOWEST,
        lowest: since.map_or(EventId::LOWEST, first),
        below: first(ask.until.map_or(requested_at, |until| until.min(requested_at))),
        requested_at,
        type_id: ask.type_id,
        reason: ask.reason,
        failure: ask.failure,
    }
}

const SPAN: &str = "d.endpoint_id = e.id and d.event_id > $2 and d.event_id >= $3 and d.event_id < $4
    and ($6::int is null or d.type_id = $6)";

/// Rows `d` of the endpoint `e.id`.
fn chosen(source: ReplaySource) -> String {
    match source {
        ReplaySource::Dead => format!(
            "from postrider.dead_letters d where {SPAN}
               and d.died_at <= $5 and ($7::text is null or d.reason = $7::postrider.dead_reason)
               and ($8::smallint is null or d.failure = $8)"
        ),
        ReplaySource::Delivered => format!(
            "from postrider.attempts d where {SPAN}
               and d.final is not null and d.final = 'delivered' and d.started_at <= $5 and $7::text is null and $8::smallint is null"
        ),
        ReplaySource::Retrying => format!(
            "from postrider.retries d where {SPAN} and $5::timestamptz is not null and $7::text is null
               and $8::smallint is null"
        ),
        // Events of the tenant that the endpoint subscribes to and has never been sent.
        ReplaySource::Missing => "from (
                select v.id as event_id, v.tenant_id, v.type_id, v.schema_id from postrider.events v
                where v.tenant_id = (select n.tenant_id from postrider.endpoints n where n.id = e.id)
                  and v.id > $2 and v.id >= $3 and v.id < $4 order by v.id) d
             join postrider.endpoints p on p.id = e.id
             join postrider.event_types y on y.id = d.type_id
             join postrider.schemas s on s.id = d.schema_id
             where ($6::int is null or d.type_id = $6) and $5::timestamptz is not null and $7::text is null
               and $8::smallint is null
               and y.matches && p.types
               and (p.versions is null or coalesce(p.versions ->> y.name, s.version) = s.version)
               and not exists (select from postrider.queue q where q.endpoint_id = e.id and q.event_id = d.event_id)
               and not exists (select from postrider.retries q where q.endpoint_id = e.id and q.event_id = d.event_id)
               and not exists (select from postrider.attempts a where a.event_id = d.event_id and a.endpoint_id = e.id)"
            .to_owned(),
    }
}

/// Counts what a replay would send, by endpoint and source. Disabled endpoints are excluded.
pub async fn count(
    connection: &mut PgConnection,
    ask: &Ask,
    now: DateTime<Utc>,
    oldest: DateTime<Utc>,
) -> Result<Vec<Part>, sqlx::Error> {
    let endpoints = candidates(&mut *connection, ask).await?;
    let bounds = bounds(ask, now, oldest);
    let mut parts = Vec::new();
    for source in ask.sources().iter().copied() {
        let statement = format!(
            "select e.id, c.count from unnest($1::int[]) as e (id)
             cross join lateral (select count(*) as count {}) c where c.count > 0 order by e.id",
            chosen(source)
        );
        let counted: Vec<(EndpointId, i64)> = sqlx::query_as(AssertSqlSafe(statement))
            .bind(&endpoints)
            .bind_all(bounds.parameters())
            .fetch_all(&mut *connection)
            .await?;
        parts.extend(counted.into_iter().map(|(endpoint, total)| Part {
            endpoint,
            source,
            total,
        }));
    }
    Ok(parts)
}

/// A sample of what would be sent.
#[derive(Debug, Clone, FromRow)]
pub struct Sampled {
    pub event_id: EventId,
    pub endpoint_id: EndpointId,
    pub chosen_id: Option<String>,
    pub event_type: String,
    pub endpoint: String,
}

/// The oldest few.
pub async fn sample(
    connection: &mut PgConnection,
    ask: &Ask,
    now: DateTime<Utc>,
    oldest: DateTime<Utc>,
    limit: i64,
) -> Result<Vec<Sampled>, sqlx::Error> {
    let endpoints = candidates(&mut *connection, ask).await?;
    let bounds = bounds(ask, now, oldest);
    let mut places: Vec<(EventId, EndpointId)> = Vec::new();
    for source in ask.sources() {
        let statement = format!(
            "select c.event_id, e.id as endpoint_id from unnest($1::int[]) as e (id)
             cross join lateral (select d.event_id {} order by d.event_id limit $9) c limit $9",
            chosen(*source)
        );
        let found: Vec<(EventId, EndpointId)> = sqlx::query_as(AssertSqlSafe(statement))
            .bind(&endpoints)
            .bind_all(bounds.parameters())
            .bind(limit)
            .fetch_all(&mut *connection)
            .await?;
        places.extend(found);
    }
    places.sort_unstable();
    places.truncate(limit as usize);
    let (events, endpoints): (Vec<EventId>, Vec<EndpointId>) = places.into_iter().unzip();
    sqlx::query_as(include_str!("../sql/replay_sample.sql"))
        .bind_all((events, endpoints))
        .fetch_all(connection)
        .await
}

/// Excludes listeners: nothing is sent to them.
async fn candidates(db: impl PgExecutor<'_>, ask: &Ask) -> Result<Vec<EndpointId>, sqlx::Error> {
    sqlx::query_scalar(
        "select e.id from postrider.endpoints e
         where e.tenant_id = $1 and e.state in ('active', 'paused') and ($2::int is null or e.id = $2)
           and not exists (select from postrider.listeners l where l.endpoint_id = e.id)
         order by e.id",
    )
    .bind_all((ask.tenant, ask.endpoint))
    .fetch_all(db)
    .await
}
