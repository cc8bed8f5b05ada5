//! `cells`, and the cell of each tenant. Read at home, which has the directory; a cell knows only itself.

use chrono::{DateTime, Utc};
use postrider_dispatcher::bind::BindAll;
use postrider_proto::{DeliveryId, EndpointId, TenantId, TypeId};
use sqlx::{FromRow, PgExecutor};

use crate::{
    Pool,
    tables::{
        events::{self, Effort},
        is_public_id,
    },
};

/// The cell with the directory.
pub(crate) const HOME: i16 = 0;
pub(crate) const CELLS_MAX: i64 = 64;

#[derive(Debug, Clone, FromRow)]
pub(crate) struct CellRow {
    pub(crate) id: i16,
    pub(crate) name: String,
    /// Encrypted. None: home.
    pub(crate) url: Option<Vec<u8>>,
    /// `open` takes new tenants, `draining` does not.
    pub(crate) state: String,
    pub(crate) created_at: DateTime<Utc>,
}

/// In the order in which they were added; home is first.
pub(crate) async fn list(db: impl PgExecutor<'_>) -> sqlx::Result<Vec<CellRow>> {
    sqlx::query_as("select id, name, url, state, created_at from postrider.cells order by id limit $1")
        .bind(CELLS_MAX)
        .fetch_all(db)
        .await
}

/// How many tenants live in each cell, by its id. A cell without tenants has no entry.
pub(crate) async fn tenants(db: impl PgExecutor<'_>) -> sqlx::Result<Vec<(i16, i64)>> {
    sqlx::query_as(
        "select cell_id, count(*) from postrider.tenants where deleted_at is null group by cell_id",
    )
    .fetch_all(db)
    .await
}

/// Where a tenant lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromRow)]
pub(crate) struct Location {
    pub(crate) cell_id: i16,
    /// It is being moved to another cell.
    pub(crate) moving: bool,
}

pub(crate) async fn location(db: impl PgExecutor<'_>, slug: &str) -> sqlx::Result<Option<Location>> {
    sqlx::query_as("select cell_id, moving from postrider.tenants where slug = $1 and deleted_at is null")
        .bind(slug)
        .fetch_optional(db)
        .await
}

/// A deleted tenant's data is erased where it lived.
pub(crate) async fn location_of(db: impl PgExecutor<'_>, id: TenantId) -> sqlx::Result<Option<Location>> {
    sqlx::query_as("select cell_id, moving from postrider.tenants where id = $1")
        .bind(id)
        .fetch_optional(db)
        .await
}

/// The cell with this name, if it takes new tenants. Without a name, the one of them with the fewest.
pub(crate) async fn for_new_tenant(db: impl PgExecutor<'_>, name: Option<&str>) -> sqlx::Result<Option<i16>> {
    sqlx::query_scalar(
        "select c.id from postrider.cells c
         where c.state = 'open' and ($1::text is null or c.name = $1)
         order by (select count(*) from postrider.tenants t where t.cell_id = c.id and t.deleted_at is null), c.id
         limit 1",
    )
    .bind(name)
    .fetch_optional(db)
    .await
}

/// Whether an event of this ordering key waits to be copied to the tenant's cell. An event that is emitted there meanwhile
/// would overtake it.
pub(crate) async fn is_key_waiting(
    db: impl PgExecutor<'_>,
    tenant: &str,
    keys: &[&str],
) -> sqlx::Result<bool> {
    sqlx::query_scalar(
        "select exists (
            select from postrider.cell_outbox o join postrider.tenants t on t.id = o.tenant_id
            where t.slug = $1 and t.deleted_at is null and o.ordering_key = any($2))",
    )
    .bind_all((tenant, keys))
    .fetch_one(db)
    .await
}

/// Something that a tenant has, by the id in an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Possession {
    Endpoint(String),
    Delivery(String),
    Event(String),
    Replay(String),
}

/// Whose it is, as far as this cell knows.
pub(crate) async fn owner(pool: &Pool, what: &Possession) -> sqlx::Result<Option<TenantId>> {
    match what {
        Possession::Endpoint(id) if is_public_id("ep", id) => {
            sqlx::query_scalar("select tenant_id from postrider.endpoints where public_id = $1")
                .bind(id)
                .fetch_optional(pool)
                .await
        }
        Possession::Replay(id) if is_public_id("rpl", id) => {
            sqlx::query_scalar("select tenant_id from postrider.replays where public_id = $1")
                .bind(id)
                .fetch_optional(pool)
                .await
        }
        Possession::Delivery(id) => match id.parse::<DeliveryId>() {
            Ok(id) => owner_of_endpoint(pool, id.endpoint).await,
            Err(_) => Ok(None),
        },
        Possession::Event(id) => {
            let found = events::find_in(pool, None, id, Effort::Full).await?;
            Ok(found.into_iter().max().map(|(_, tenant)| tenant))
        }
        Possession::Endpoint(_) | Possession::Replay(_) => Ok(None),
    }
}

async fn owner_of_endpoint(db: impl PgExecutor<'_>, id: EndpointId) -> sqlx::Result<Option<TenantId>> {
    sqlx::query_scalar("select tenant_id from postrider.endpoints where id = $1")
        .bind(id)
        .fetch_optional(db)
        .await
}

/// What a cell has a copy of.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Copied {
    Tenant(TenantId),
    EventType(TypeId),
}

/// A digest of a row and what belongs to it. A cell's copy is complete once its digest is that of home.
pub(crate) async fn digest(db: impl PgExecutor<'_>, what: Copied) -> sqlx::Result<Option<String>> {
    let (statement, id) = match what {
        Copied::Tenant(id) => (
            "select md5(row(slug, name, rotate_every_days, retention_days, all_operational_events, cell_id, moving,
                            paused_at, pause_reason, emits_per_minute, stored_bytes_max, deleted_at is null)::text)
             from postrider.tenants where id = $1",
            id.0,
        ),
        Copied::EventType(id) => (
            "select md5(row(y.name, y.description, y.matches, y.thin, y.deleted_at is null,
                            (select array_agg(s.version order by s.id) from postrider.schemas s
                             where s.type_id = y.id))::text)
             from postrider.event_types y where y.id = $1",
            id.0,
        ),
    };
    sqlx::query_scalar(statement).bind(id).fetch_optional(db).await
}
