//! `endpoints`. A trigger stamps each change with its transaction, by which dispatchers find it.

use std::{collections::BTreeMap, time::Duration};

use chrono::{DateTime, Utc};
use postrider_dispatcher::{bind::BindAll, vault::Owner};
use postrider_proto::{EndpointId, EndpointState, Shard, TenantId, state::SignatureFormat};
use serde_json::Value;
use sqlx::{FromRow, PgExecutor, types::Json};

use super::is_public_id;

/// The settings an endpoint's owner controls, as stored. `None` means the platform default.
#[derive(Debug, Clone, PartialEq, FromRow)]
pub(crate) struct EndpointSettings {
    pub(crate) url: String,
    pub(crate) description: Option<String>,
    pub(crate) types: Vec<String>,
    pub(crate) versions: Option<Json<BTreeMap<String, String>>>,
    /// Validated by `postrider_proto::filter`.
    pub(crate) filter: Option<Json<Value>>,
    pub(crate) concurrency: Option<i16>,
    pub(crate) rate_per_second: Option<i32>,
    pub(crate) ordered: bool,
    pub(crate) retry_schedule: Option<Vec<i32>>,
    pub(crate) timeout_ms: Option<i32>,
    pub(crate) signature: SignatureFormat,
    /// `None`: the tenant's policy. 0: never.
    pub(crate) rotate_every_days: Option<i16>,
    /// The columns below have rules of their own when they change.
    pub(crate) state: EndpointState,
    pub(crate) state_reason: Option<String>,
}

impl EndpointSettings {
    pub(crate) fn timeout(&self, default: Duration) -> Duration {
        self.timeout_ms
            .map_or(default, |ms| Duration::from_millis(ms.max(1) as u64))
    }
}

#[derive(Debug, Clone, FromRow)]
pub(crate) struct EndpointRow {
    pub(crate) id: EndpointId,
    pub(crate) tenant_id: TenantId,
    pub(crate) public_id: String,
    pub(crate) shard: Shard,
    #[sqlx(flatten)]
    pub(crate) settings: EndpointSettings,
    /// Encrypted.
    pub(crate) headers: Option<Vec<u8>>,
    /// Encrypted.
    pub(crate) tls: Option<Vec<u8>>,
    /// Of the current key pair, if the endpoint signs with one.
    pub(crate) public_key: Option<String>,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) updated_at: DateTime<Utc>,
}

impl EndpointRow {
    pub(crate) fn owner(&self) -> Owner {
        Owner {
            tenant: self.tenant_id,
            endpoint: self.id,
        }
    }
}

macro_rules! columns {
    () => {
        "id, tenant_id, public_id, shard, url, description, types, versions, filter, concurrency, rate_per_second, \
         ordered, retry_schedule, timeout_ms, signature, rotate_every_days, state, state_reason, headers, tls, \
         created_at, updated_at, \
         (select s.public_key from postrider.secrets s \
          where s.endpoint_id = endpoints.id and s.retires_at is null) as public_key"
    };
}

pub(crate) async fn find(
    db: impl PgExecutor<'_>,
    tenant: TenantId,
    public_id: &str,
) -> sqlx::Result<Option<EndpointRow>> {
    if !is_public_id("ep", public_id) {
        return Ok(None);
    }
    sqlx::query_as(concat!(
        "select ",
        columns!(),
        " from postrider.endpoints where public_id = $1 and tenant_id = $2 and state <> 'deleted'"
    ))
    .bind_all((public_id, tenant))
    .fetch_optional(db)
    .await
}

/// The same, locked until the transaction ends.
pub(crate) async fn lock(
    db: impl PgExecutor<'_>,
    tenant: TenantId,
    public_id: &str,
) -> sqlx::Result<Option<EndpointRow>> {
    if !is_public_id("ep", public_id) {
        return Ok(None);
    }
    sqlx::query_as(concat!(
        "select ",
        columns!(),
        " from postrider.endpoints where public_id = $1 and tenant_id = $2 and state <> 'deleted'
          for no key update"
    ))
    .bind_all((public_id, tenant))
    .fetch_optional(db)
    .await
}

/// Deleted ones too: deliveries outlive their endpoint.
pub(crate) async fn find_by_id(db: impl PgExecutor<'_>, id: EndpointId) -> sqlx::Result<Option<EndpointRow>> {
    sqlx::query_as(concat!(
        "select ",
        columns!(),
        " from postrider.endpoints where id = $1"
    ))
    .bind(id)
    .fetch_optional(db)
    .await
}

/// By its id alone, of one tenant or of any.
pub(crate) async fn find_in(
    db: impl PgExecutor<'_>,
    scope: Option<TenantId>,
    public_id: &str,
) -> sqlx::Result<Option<EndpointRow>> {
    if !is_public_id("ep", public_id) {
        return Ok(None);
    }
    sqlx::query_as(concat!(
        "select ",
        columns!(),
        " from postrider.endpoints
          where public_id = $1 and ($2::int is null or tenant_id = $2) and state <> 'deleted'"
    ))
    .bind_all((public_id, scope))
    .fetch_optional(db)
    .await
}

/// An endpoint as a list entry.
#[derive(Debug, Clone, FromRow)]
pub(crate) struct ListedRow {
    pub(crate) id: EndpointId,
    pub(crate) public_id: String,
    pub(crate) tenant: String,
    pub(crate) url: String,
    pub(crate) description: Option<String>,
    pub(crate) types: Vec<String>,
    pub(crate) state: EndpointState,
    pub(crate) failing_since: Option<DateTime<Utc>>,
    /// A search by name does not look.
    #[sqlx(default)]
    pub(crate) tenant_paused: bool,
    #[sqlx(default)]
    pub(crate) sending_stopped: bool,
}

/// Filter of a list of endpoints.
#[derive(Debug, Clone, Default)]
pub(crate) struct Narrow {
    pub(crate) tenant: Option<TenantId>,
    pub(crate) state: Option<EndpointState>,
    /// Matches the URL or the description.
    pub(crate) text: Option<String>,
}

/// Newest first.
pub(crate) async fn search(
    db: impl PgExecutor<'_>,
    narrow: &Narrow,
    before: i32,
    limit: i64,
) -> sqlx::Result<Vec<ListedRow>> {
    sqlx::query_as(include_str!("sql/endpoints_search.sql"))
        .bind_all((before, narrow.tenant, narrow.state, &narrow.text, limit))
        .fetch_all(db)
        .await
}

/// A pinned version whose type has a newer one.
#[derive(Debug, Clone, FromRow)]
pub(crate) struct OutdatedPin {
    pub(crate) endpoint_id: EndpointId,
    pub(crate) event_type: String,
    pub(crate) pinned: String,
    pub(crate) newest: String,
    /// The newest version ever emitted, if newer than the pinned one: the endpoint gets none of those events.
    pub(crate) emitted: Option<String>,
}

pub(crate) async fn outdated_pins(
    db: impl PgExecutor<'_>,
    ids: &[EndpointId],
) -> sqlx::Result<Vec<OutdatedPin>> {
    let ids: Vec<i32> = ids.iter().map(|id| id.0).collect();
    sqlx::query_as(include_str!("sql/endpoints_outdated_pins.sql"))
        .bind(ids)
        .fetch_all(db)
        .await
}

/// The number of an endpoint, deleted or not, of one tenant or of any.
pub(crate) async fn find_number(
    db: impl PgExecutor<'_>,
    tenant: Option<TenantId>,
    public_id: &str,
) -> sqlx::Result<Option<EndpointId>> {
    if !is_public_id("ep", public_id) {
        return Ok(None);
    }
    sqlx::query_scalar(
        "select id from postrider.endpoints where public_id = $1 and ($2::int is null or tenant_id = $2)",
    )
    .bind_all((public_id, tenant))
    .fetch_optional(db)
    .await
}

/// Without listeners, which people do not manage.
pub(crate) async fn list(
    db: impl PgExecutor<'_>,
    tenant: TenantId,
    after: i32,
    limit: i64,
) -> sqlx::Result<Vec<EndpointRow>> {
    sqlx::query_as(concat!(
        "select ",
        columns!(),
        " from postrider.endpoints where tenant_id = $1 and state <> 'deleted' and id > $2
            and not exists (select from postrider.listeners l where l.endpoint_id = endpoints.id)
          order by id limit $3"
    ))
    .bind_all((tenant, after, limit))
    .fetch_all(db)
    .await
}

/// What decides whether an endpoint receives an event.
#[derive(Debug, Clone, FromRow)]
pub(crate) struct Subscription {
    pub(crate) public_id: String,
    pub(crate) url: String,
    pub(crate) state: EndpointState,
    pub(crate) types: Vec<String>,
    pub(crate) versions: Option<Json<BTreeMap<String, String>>>,
    pub(crate) filter: Option<Json<Value>>,
    pub(crate) created_at: DateTime<Utc>,
}

/// Those of a tenant's endpoints, without listeners and without the encrypted columns.
pub(crate) async fn subscriptions(
    db: impl PgExecutor<'_>,
    tenant: TenantId,
    limit: i64,
) -> sqlx::Result<Vec<Subscription>> {
    sqlx::query_as(
        "select public_id, url, state, types, versions, filter, created_at from postrider.endpoints
         where tenant_id = $1 and state <> 'deleted'
           and not exists (select from postrider.listeners l where l.endpoint_id = endpoints.id)
         order by id limit $2",
    )
    .bind_all((tenant, limit))
    .fetch_all(db)
    .await
}

/// Of one tenant or of any, newest first.
pub(crate) async fn newest(
    db: impl PgExecutor<'_>,
    tenant: Option<TenantId>,
    limit: i64,
) -> sqlx::Result<Vec<EndpointRow>> {
    sqlx::query_as(concat!(
        "select ",
        columns!(),
        " from postrider.endpoints
          where state <> 'deleted' and ($1::int is null or tenant_id = $1) order by id desc limit $2"
    ))
    .bind_all((tenant, limit))
    .fetch_all(db)
    .await
}

/// Endpoints that can have pending deliveries.
pub(crate) async fn live_numbers(
    db: impl PgExecutor<'_>,
    tenant: Option<TenantId>,
    limit: i64,
) -> sqlx::Result<Vec<EndpointId>> {
    sqlx::query_scalar(
        "select id from postrider.endpoints
         where state <> 'deleted' and ($1::int is null or tenant_id = $1) order by id desc limit $2",
    )
    .bind_all((tenant, limit))
    .fetch_all(db)
    .await
}

pub(crate) async fn count(db: impl PgExecutor<'_>, tenant: TenantId) -> sqlx::Result<i64> {
    sqlx::query_scalar("select count(*) from postrider.endpoints where tenant_id = $1 and state <> 'deleted'")
        .bind(tenant)
        .fetch_one(db)
        .await
}

pub(crate) async fn insert(
    db: impl PgExecutor<'_>,
    tenant: TenantId,
    public_id: &str,
    shard: Shard,
    settings: &EndpointSettings,
) -> sqlx::Result<EndpointRow> {
    sqlx::query_as(concat!(
        "insert into postrider.endpoints (tenant_id, public_id, shard, url, description, types, versions,
            concurrency, rate_per_second, ordered, retry_schedule, timeout_ms, signature, filter, rotate_every_days)
         values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13::postrider.signature_format, $14::jsonb::json,
            $15)
         returning ",
        columns!()
    ))
    .bind_all((tenant, public_id, shard, &settings.url))
    .bind_all((&settings.description, &settings.types, &settings.versions, settings.concurrency))
    .bind_all((settings.rate_per_second, settings.ordered, &settings.retry_schedule, settings.timeout_ms))
    .bind_all((settings.signature, &settings.filter, settings.rotate_every_days))
    .fetch_one(db)
    .await
}

pub(crate) async fn update(
    db: impl PgExecutor<'_>,
    id: EndpointId,
    settings: &EndpointSettings,
    headers: Option<&[u8]>,
) -> sqlx::Result<EndpointRow> {
    sqlx::query_as(concat!(
        "update postrider.endpoints set url = $2, description = $3, types = $4, versions = $5, concurrency = $6,
            rate_per_second = $7, ordered = $8, retry_schedule = $9, timeout_ms = $10,
            signature = $11::postrider.signature_format, state = $12::postrider.endpoint_state, state_reason = $13, headers = $14,
            filter = $15::jsonb::json, rotate_every_days = $16, updated_at = clock_timestamp()
         where id = $1 returning ",
        columns!()
    ))
    .bind_all((id, &settings.url, &settings.description, &settings.types))
    .bind_all((&settings.versions, settings.concurrency, settings.rate_per_second, settings.ordered))
    .bind_all((&settings.retry_schedule, settings.timeout_ms, settings.signature, settings.state))
    .bind_all((&settings.state_reason, headers, &settings.filter, settings.rotate_every_days))
    .fetch_one(db)
    .await
}

/// The endpoint's TLS settings, encrypted.
pub(crate) async fn set_tls(
    db: impl PgExecutor<'_>,
    id: EndpointId,
    sealed: Option<&[u8]>,
) -> sqlx::Result<()> {
    sqlx::query("update postrider.endpoints set tls = $2 where id = $1")
        .bind_all((id, sealed))
        .execute(db)
        .await?;
    Ok(())
}

/// Re-enabling an endpoint resets its failure count.
pub(crate) async fn forget_failures(db: impl PgExecutor<'_>, id: EndpointId) -> sqlx::Result<()> {
    sqlx::query(
        "with kept as (delete from postrider.endpoints_to_disable where endpoint_id = $1)
         update postrider.endpoint_health
         set failing_since = clock_timestamp(), failed_days = 1, last_failed_on = (clock_timestamp() at time zone 'UTC')::date
         where endpoint_id = $1",
    )
    .bind(id)
    .execute(db)
    .await?;
    Ok(())
}

pub(crate) async fn delete(db: impl PgExecutor<'_>, id: EndpointId) -> sqlx::Result<()> {
    sqlx::query(
        "update postrider.endpoints set state = 'deleted', updated_at = clock_timestamp() where id = $1",
    )
    .bind(id)
    .execute(db)
    .await?;
    Ok(())
}

/// Returns the shards whose owners must apply the change.
pub(crate) async fn delete_all(db: impl PgExecutor<'_>, tenant: TenantId) -> sqlx::Result<Vec<Shard>> {
    sqlx::query_scalar(
        "update postrider.endpoints set state = 'deleted', updated_at = clock_timestamp()
         where tenant_id = $1 and state <> 'deleted' returning shard",
    )
    .bind(tenant)
    .fetch_all(db)
    .await
}

/// Makes dispatchers read the settings of all the tenant's endpoints again: a trigger stamps the rows. Returns their shards.
pub(crate) async fn touch_all(db: impl PgExecutor<'_>, tenant: TenantId) -> sqlx::Result<Vec<Shard>> {
    sqlx::query_scalar(
        "update postrider.endpoints set state = state where tenant_id = $1 and state <> 'deleted' returning shard",
    )
    .bind(tenant)
    .fetch_all(db)
    .await
}
