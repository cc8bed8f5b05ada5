//! Selects the deliveries of a bulk replay from each of its four sources: counted, sampled, and queued.
//!
//! Parameters of every statement: $1 endpoints, $2 after this event, $3 from this event, $4 below this event, $5 when the
//! replay was asked for, $6 type, $7 reason.

use chrono::{DateTime, Utc};
use postrider_proto::{EndpointId, EventId, ReplaySource, TypeId, limits::ATTEMPTS_PER_DELIVERY_MAX};
use sqlx::{FromRow, PgConnection, PgExecutor, postgres::PgArguments, query::QueryAs};

use super::{Ask, Part};

/// Events scanned in one step for those that an endpoint never got.
const WINDOW: i64 = 20_000;

/// The bounds of one part.
#[derive(Debug, Clone)]
pub(super) struct Bounds {
    pub(super) after: EventId,
    pub(super) lowest: EventId,
    pub(super) below: EventId,
    pub(super) asked_at: DateTime<Utc>,
    pub(super) type_id: Option<TypeId>,
    pub(super) reason: Option<postrider_proto::DeadReason>,
}

impl Bounds {
    /// `oldest` is the start of what retention has left.
    pub(super) fn of(ask: &Ask, asked_at: DateTime<Utc>, oldest: DateTime<Utc>) -> Self {
        let first = |time: DateTime<Utc>| EventId::first_of(time.timestamp_millis());
        let never_got = ask.kind == postrider_proto::ReplayKind::Missing;
        let since = match ask.since {
            // An event whose attempts are about to be dropped must not look as if it had none.
            since if never_got => Some(since.map_or(oldest, |since| since.max(oldest))),
            since => since,
        };
        Self {
            after: EventId::LOWEST,
            lowest: since.map_or(EventId::LOWEST, first),
            below: first(ask.until.map_or(asked_at, |until| until.min(asked_at))),
            asked_at,
            type_id: ask.type_id,
            reason: ask.reason,
        }
    }

    fn bind<'q, T>(
        &self,
        query: QueryAs<'q, sqlx::Postgres, T, PgArguments>,
        endpoints: &[EndpointId],
    ) -> QueryAs<'q, sqlx::Postgres, T, PgArguments> {
        query
            .bind(endpoints.iter().map(|id| id.0).collect::<Vec<_>>())
            .bind(self.after)
            .bind(self.lowest)
            .bind(self.below)
            .bind(self.asked_at)
            .bind(self.type_id)
            .bind(self.reason)
    }
}

macro_rules! span {
    () => {
        " d.endpoint_id = e.id and d.event_id > $2 and d.event_id >= $3 and d.event_id < $4
          and ($6::int is null or d.type_id = $6) "
    };
}
macro_rules! dead {
    () => {
        concat!(
            " from postrider.dead_letters d where ",
            span!(),
            " and d.died_at <= $5 and ($7::text is null or d.reason = $7::postrider.dead_reason) "
        )
    };
}
macro_rules! delivered {
    () => {
        concat!(
            " from postrider.attempts d where ",
            span!(),
            " and d.final is not null and d.final = 'delivered' and d.started_at <= $5 and $7::text is null "
        )
    };
}
macro_rules! waiting {
    () => {
        concat!(
            " from postrider.retries d where ",
            span!(),
            " and $5::timestamptz is not null and $7::text is null "
        )
    };
}
/// Rows `d` of a list of events that the endpoint subscribes to and has never been sent.
macro_rules! missing {
    ($events:expr) => {
        concat!(
            " from ",
            $events,
            " d
             join postrider.endpoints p on p.id = e.id
             join postrider.event_types y on y.id = d.type_id
             join postrider.schemas s on s.id = d.schema_id
             where ($6::int is null or d.type_id = $6) and $5::timestamptz is not null and $7::text is null
               and y.matches && p.types
               and (p.versions is null or coalesce(p.versions ->> y.name, s.version) = s.version)
               and not exists (select from postrider.queue q where q.endpoint_id = e.id and q.event_id = d.event_id)
               and not exists (select from postrider.retries q where q.endpoint_id = e.id and q.event_id = d.event_id)
               and not exists (select from postrider.attempts a where a.event_id = d.event_id and a.endpoint_id = e.id) "
        )
    };
}
/// Events of the endpoint's tenant within the bounds.
macro_rules! events_of_tenant {
    ($more:literal) => {
        concat!(
            "(select v.id as event_id, v.tenant_id, v.type_id, v.schema_id from postrider.events v
              where v.tenant_id = (select n.tenant_id from postrider.endpoints n where n.id = e.id)
                and v.id > $2 and v.id >= $3 and v.id < $4 order by v.id ",
            $more,
            ")"
        )
    };
}
macro_rules! count_of {
    ($chosen:expr) => {
        concat!(
            "select e.id, c.count from unnest($1::int[]) as e (id)
             cross join lateral (select count(*) as count ",
            $chosen,
            ") c where c.count > 0 order by e.id"
        )
    };
}
macro_rules! sample_of {
    ($chosen:expr) => {
        concat!(
            "select c.event_id, e.id as endpoint_id from unnest($1::int[]) as e (id)
             cross join lateral (select d.event_id ",
            $chosen,
            " order by d.event_id limit $8) c limit $8"
        )
    };
}

/// Counts what a replay would send, by endpoint and source. Disabled endpoints are excluded.
pub async fn count(
    connection: &mut PgConnection,
    ask: &Ask,
    now: DateTime<Utc>,
    oldest: DateTime<Utc>,
) -> Result<Vec<Part>, sqlx::Error> {
    let endpoints = candidates(&mut *connection, ask).await?;
    let bounds = Bounds::of(ask, now, oldest);
    let mut parts = Vec::new();
    for source in ask.sources().iter().copied() {
        let statement = match source {
            ReplaySource::Dead => count_of!(dead!()),
            ReplaySource::Delivered => count_of!(delivered!()),
            ReplaySource::Waiting => count_of!(waiting!()),
            ReplaySource::Missing => count_of!(missing!(events_of_tenant!(""))),
        };
        let counted: Vec<(EndpointId, i64)> = bounds
            .bind(sqlx::query_as(statement), &endpoints)
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
    let bounds = Bounds::of(ask, now, oldest);
    let mut places: Vec<(EventId, EndpointId)> = Vec::new();
    for source in ask.sources() {
        let statement = match source {
            ReplaySource::Dead => sample_of!(dead!()),
            ReplaySource::Delivered => sample_of!(delivered!()),
            ReplaySource::Waiting => sample_of!(waiting!()),
            ReplaySource::Missing => sample_of!(missing!(events_of_tenant!(""))),
        };
        let found: Vec<(EventId, EndpointId)> = bounds
            .bind(sqlx::query_as(statement), &endpoints)
            .bind(limit)
            .fetch_all(&mut *connection)
            .await?;
        places.extend(found);
    }
    places.sort_unstable();
    places.truncate(limit as usize);
    let (events, endpoints): (Vec<EventId>, Vec<EndpointId>) = places.into_iter().unzip();
    sqlx::query_as(
        "select d.event_id, d.endpoint_id, v.chosen_id, y.name as event_type, p.public_id as endpoint
         from unnest($1::uuid[], $2::int[]) with ordinality as d (event_id, endpoint_id, n)
         join postrider.endpoints p on p.id = d.endpoint_id
         cross join lateral (
            select chosen_id, type_id from postrider.events where id = d.event_id
            union all
            select chosen_id, type_id from postrider.events_held where id = d.event_id
            limit 1
         ) v
         join postrider.event_types y on y.id = v.type_id
         order by d.n",
    )
    .bind(events)
    .bind(endpoints)
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
    .bind(ask.tenant)
    .bind(ask.endpoint)
    .fetch_all(db)
    .await
}

/// Result of one step: how many it found, how many it queued, and where it stopped.
#[derive(Debug, FromRow)]
pub(super) struct Moved {
    pub(super) moved: i64,
    pub(super) last: Option<EventId>,
    /// Nothing is left after it.
    pub(super) exhausted: bool,
}

/// Queues up to `limit` of one endpoint, in the caller's transaction. $8 is the limit, $9 the replay's id, $10 the
/// maximum attempts of a delivery. One that has reached it is skipped and counted as such when the part ends.
pub(super) async fn put_in_line(
    connection: &mut PgConnection,
    endpoint: EndpointId,
    source: ReplaySource,
    bounds: &Bounds,
    limit: i64,
    replay: &str,
) -> Result<Moved, sqlx::Error> {
    let statement = match source {
        // The dead letter's own row is the guard: its attempts may have been dropped with their partition.
        ReplaySource::Dead => concat!(
            "with e as (select id, shard from postrider.endpoints where id = any($1)),
             picked as materialized (select d.event_id from e cross join lateral (select d.event_id ",
            dead!(),
            " and d.attempt < $10 order by d.event_id limit $8) d),
             unburied as (
                delete from postrider.dead_letters d using picked p, e
                where d.endpoint_id = e.id and d.event_id = p.event_id
                returning d.event_id, d.tenant_id, d.type_id, d.reason, d.attempt, d.died_at, d.replay_id
             ),
             uncounted as (
                update postrider.dead_letter_counts n set count = n.count - u.count
                from e, (select type_id, reason, count(*) from unburied group by type_id, reason) u
                where n.endpoint_id = e.id and n.type_id = u.type_id and n.reason = u.reason
             ),
             cleared as (
                update postrider.attempts a set final = null from unburied u, e
                where a.event_id = u.event_id and a.endpoint_id = e.id and a.number = u.attempt
             ),
             cleared_held as (
                update postrider.attempts_held a set final = null from unburied u, e
                where a.event_id = u.event_id and a.endpoint_id = e.id and a.number = u.attempt
             ),
             queued as (
                insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id, replay_id, attempt,
                    was_source, was_reason, was_at, was_replay)
                select e.id, u.event_id, e.shard, u.tenant_id, u.type_id, $9, u.attempt, 'dead', u.reason, u.died_at,
                    u.replay_id
                from unburied u, e
             )
             select (select count(*) from unburied) as moved, (select event_id from picked order by event_id desc limit 1) as last,
                (select count(*) from picked) < $8 as exhausted"
        ),
        ReplaySource::Delivered => concat!(
            "with e as (select id, shard from postrider.endpoints where id = any($1)),
             picked as materialized (select d.event_id, d.number from e cross join lateral (select d.event_id, d.number ",
            delivered!(),
            " and d.number < $10 order by d.event_id limit $8) d),
             cleared as (
                update postrider.attempts a set final = null from picked p, e
                where a.event_id = p.event_id and a.endpoint_id = e.id and a.number = p.number and a.final = 'delivered'
                returning a.event_id, a.tenant_id, a.type_id, a.number
             ),
             queued as (
                insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id, replay_id, attempt,
                    was_source)
                select e.id, c.event_id, e.shard, c.tenant_id, c.type_id, $9, c.number, 'delivered' from cleared c, e
             )
             select (select count(*) from cleared) as moved, (select event_id from picked order by event_id desc limit 1) as last,
                (select count(*) from picked) < $8 as exhausted"
        ),
        // At its previous position in the order.
        ReplaySource::Waiting => concat!(
            "with e as (select id, shard from postrider.endpoints where id = any($1)),
             picked as materialized (select d.event_id from e cross join lateral (select d.event_id ",
            waiting!(),
            " and d.attempt < $10 order by d.event_id limit $8) d),
             taken as (
                delete from postrider.retries r using picked p, e
                where r.endpoint_id = e.id and r.event_id = p.event_id
                returning r.event_id, r.tenant_id, r.type_id, r.key_id, r.sequence, r.attempt, r.due_at, r.step, r.replay_id
             ),
             queued as (
                insert into postrider.queue
                    (endpoint_id, event_id, shard, tenant_id, type_id, key_id, sequence, replay_id, attempt,
                     was_source, was_at, was_step, was_replay)
                select e.id, t.event_id, e.shard, t.tenant_id, t.type_id, t.key_id, t.sequence, $9, t.attempt,
                    'waiting', t.due_at, t.step, t.replay_id
                from taken t, e
             )
             select (select count(*) from taken) as moved, (select event_id from picked order by event_id desc limit 1) as last,
                (select count(*) from picked) < $8 as exhausted"
        ),
        // Scans a bounded number of events ($10), however few of them match.
        ReplaySource::Missing => concat!(
            "with e as (select id, shard from postrider.endpoints where id = any($1)),
             seen as materialized (select d.* from e cross join lateral ",
            events_of_tenant!("limit $10"),
            " d),
             picked as materialized (select d.event_id, d.tenant_id, d.type_id from e cross join lateral (
                select d.event_id, d.tenant_id, d.type_id ",
            missing!("seen"),
            " order by d.event_id limit $8) d),
             queued as (
                insert into postrider.queue (endpoint_id, event_id, shard, tenant_id, type_id, replay_id, was_source)
                select e.id, p.event_id, e.shard, p.tenant_id, p.type_id, $9, 'missing' from picked p, e
                on conflict do nothing
                returning event_id
             )
             select (select count(*) from queued) as moved,
                case when (select count(*) from picked) < $8 then (select event_id from seen order by event_id desc limit 1)
                     else (select event_id from picked order by event_id desc limit 1) end as last,
                (select count(*) from picked) < $8 and (select count(*) from seen) < $10 as exhausted"
        ),
    };
    let query = bounds
        .bind(sqlx::query_as(statement), &[endpoint])
        .bind(limit)
        .bind(replay);
    match source {
        ReplaySource::Missing => query.bind(WINDOW),
        ReplaySource::Dead | ReplaySource::Delivered | ReplaySource::Waiting => {
            query.bind(i64::from(ATTEMPTS_PER_DELIVERY_MAX))
        }
    }
    .fetch_one(connection)
    .await
}
