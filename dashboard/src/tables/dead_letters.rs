//! `dead_letters`: read here by endpoint or tenant; the recorder inserts them and a replay deletes them.

use postrider_dispatcher::bind::BindAll;
use postrider_proto::{DeadReason, EndpointId, EndpointState, EventId, Failure, TenantId, TypeId};
use sqlx::{FromRow, PgExecutor, Postgres, postgres::PgArguments, query::QueryAs};

use crate::tables::deliveries::{DeliveryKey, Span};

pub(crate) async fn list_of_endpoint(
    db: impl PgExecutor<'_>,
    endpoint: EndpointId,
    span: Span<'_>,
) -> sqlx::Result<Vec<DeliveryKey>> {
    sqlx::query_as(
        "select event_id, endpoint_id,
            ($6::int[] is null or type_id = any($6)) and ($7::text is null or reason = $7::postrider.dead_reason)
                and ($8::smallint is null or failure between $8 and $9) as may_match
         from postrider.dead_letters
         where endpoint_id = $1 and event_id between $2 and $3 and (event_id < $3 or endpoint_id < $4)
         order by event_id desc limit $5",
    )
    .bind(endpoint)
    .bind_all(span.values())
    .bind(span.reason)
    .bind_all(span.failures())
    .fetch_all(db)
    .await
}

pub(crate) async fn list_of_tenant(
    db: impl PgExecutor<'_>,
    tenant: TenantId,
    span: Span<'_>,
) -> sqlx::Result<Vec<DeliveryKey>> {
    sqlx::query_as(
        "select event_id, endpoint_id,
            ($6::int[] is null or type_id = any($6)) and ($7::text is null or reason = $7::postrider.dead_reason)
                and ($8::smallint is null or failure between $8 and $9) as may_match
         from postrider.dead_letters
         where tenant_id = $1 and event_id between $2 and $3 and (event_id < $3 or endpoint_id < $4)
         order by event_id desc, endpoint_id desc limit $5",
    )
    .bind(tenant)
    .bind_all(span.values())
    .bind(span.reason)
    .bind_all(span.failures())
    .fetch_all(db)
    .await
}

/// Across all tenants.
pub(crate) async fn list(db: impl PgExecutor<'_>, span: Span<'_>) -> sqlx::Result<Vec<DeliveryKey>> {
    sqlx::query_as(
        "select event_id, endpoint_id,
            ($5::int[] is null or type_id = any($5)) and ($6::text is null or reason = $6::postrider.dead_reason)
                and ($7::smallint is null or failure between $7 and $8) as may_match
         from postrider.dead_letters
         where event_id between $1 and $2 and (event_id < $2 or endpoint_id < $3)
         order by event_id desc, endpoint_id desc limit $4",
    )
    .bind_all(span.values())
    .bind(span.reason)
    .bind_all(span.failures())
    .fetch_all(db)
    .await
}

/// How many there are, of one tenant or endpoint or of all.
pub(crate) async fn total(
    db: impl PgExecutor<'_>,
    tenant: Option<TenantId>,
    endpoint: Option<EndpointId>,
) -> sqlx::Result<i64> {
    sqlx::query_scalar(
        "select coalesce(sum(c.count), 0)::bigint from postrider.dead_letter_counts c
         where ($1::int is null or c.tenant_id = $1) and ($2::int is null or c.endpoint_id = $2)",
    )
    .bind_all((tenant, endpoint))
    .fetch_one(db)
    .await
}

/// Dead letters with the same endpoint, type, reason and failure.
#[derive(Debug, Clone, FromRow)]
pub(crate) struct Group {
    pub(crate) tenant: String,
    endpoint_id: EndpointId,
    type_id: TypeId,
    pub(crate) endpoint: String,
    pub(crate) url: String,
    pub(crate) event_type: String,
    pub(crate) reason: DeadReason,
    pub(crate) failure: Failure,
    pub(crate) count: i64,
    pub(crate) endpoint_state: EndpointState,
}

impl Group {
    pub(crate) fn position(&self) -> GroupPosition {
        GroupPosition {
            count: self.count,
            endpoint: self.endpoint_id,
            type_id: self.type_id,
            reason: self.reason,
            failure: self.failure,
        }
    }
}

/// A position in a list of groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GroupPosition {
    pub(crate) count: i64,
    pub(crate) endpoint: EndpointId,
    pub(crate) type_id: TypeId,
    pub(crate) reason: DeadReason,
    pub(crate) failure: Failure,
}

pub(crate) fn read_reason(text: &str) -> Option<DeadReason> {
    DeadReason::ALL
        .iter()
        .copied()
        .find(|reason| reason.as_str() == text)
}

/// Filter of the groups.
#[derive(Debug, Clone, Default)]
pub(crate) struct GroupFilter {
    pub(crate) tenant: Option<TenantId>,
    pub(crate) endpoint: Option<EndpointId>,
    /// Ids of one type.
    pub(crate) types: Option<Vec<i32>>,
    pub(crate) reason: Option<DeadReason>,
    pub(crate) failure: Option<Failure>,
    pub(crate) after: Option<GroupPosition>,
}

macro_rules! groups_of {
    ($counts:literal) => {
        concat!(
            "select t.slug as tenant, c.endpoint_id, c.type_id, e.public_id as endpoint, e.url, y.name as event_type,
                c.reason, c.failure, c.count, e.state as endpoint_state
             from ",
            $counts,
            " c
             join postrider.endpoints e on e.id = c.endpoint_id
             join postrider.tenants t on t.id = c.tenant_id and t.deleted_at is null
             join postrider.event_types y on y.id = c.type_id
             where c.count > 0 and ($1::int is null or c.tenant_id = $1) and ($2::int is null or c.endpoint_id = $2)
               and ($3::int[] is null or c.type_id = any($3))
               and ($4::text is null or c.reason = $4::postrider.dead_reason)
               and ($5::smallint is null or c.failure = $5)
               and ($6::bigint is null
                    or (-c.count, c.endpoint_id, c.type_id, c.reason, c.failure)
                       > (-$6::bigint, $7::int, $8::int, $9::text::postrider.dead_reason, $10::smallint))
             order by c.count desc, c.endpoint_id, c.type_id, c.reason, c.failure limit $11"
        )
    };
}

/// Largest first, from counters, without reading the dead letters themselves.
pub(crate) async fn groups(
    db: impl PgExecutor<'_>,
    filter: &GroupFilter,
    limit: i64,
) -> sqlx::Result<Vec<Group>> {
    bind(
        sqlx::query_as(groups_of!("postrider.dead_letter_counts")),
        filter,
        limit,
    )
    .fetch_all(db)
    .await
}

/// The same for a range of events: counted row by row, because the counters have no times.
pub(crate) async fn groups_within(
    db: impl PgExecutor<'_>,
    filter: &GroupFilter,
    from: EventId,
    upto: EventId,
    limit: i64,
) -> sqlx::Result<Vec<Group>> {
    let statement = groups_of!(
        "(select d.tenant_id, d.endpoint_id, d.type_id, d.reason, d.failure, count(*) from postrider.dead_letters d
          where d.tenant_id = $1 and d.event_id between $12 and $13 group by 1, 2, 3, 4, 5)"
    );
    bind(sqlx::query_as(statement), filter, limit)
        .bind_all((from, upto))
        .fetch_all(db)
        .await
}

fn bind<'q>(
    query: QueryAs<'q, Postgres, Group, PgArguments>,
    filter: &GroupFilter,
    limit: i64,
) -> QueryAs<'q, Postgres, Group, PgArguments> {
    query
        .bind_all((
            filter.tenant,
            filter.endpoint,
            filter.types.clone(),
            filter.reason,
        ))
        .bind(filter.failure)
        .bind(filter.after.map(|after| after.count))
        .bind(filter.after.map(|after| after.endpoint))
        .bind(filter.after.map(|after| after.type_id))
        .bind(filter.after.map(|after| after.reason))
        .bind(filter.after.map(|after| after.failure))
        .bind(limit)
}
