//! `tenants`. A deleted one is kept, and its slug may be reused.

use chrono::{DateTime, Utc};
use postrider_dispatcher::bind::BindAll;
use postrider_proto::{TenantId, routing::is_tenant_slug};
use sqlx::{FromRow, PgExecutor};

#[derive(Debug, Clone, FromRow)]
pub(crate) struct TenantRow {
    pub(crate) id: TenantId,
    pub(crate) slug: String,
    pub(crate) name: Option<String>,
    pub(crate) rotate_every_days: Option<i16>,
    /// None means the platform's retention.
    pub(crate) retention_days: Option<i16>,
    /// Receives the operational events of every tenant, not only its own.
    pub(crate) all_operational_events: bool,
    /// Since when nothing is sent to its endpoints.
    pub(crate) paused_at: Option<DateTime<Utc>>,
    pub(crate) pause_reason: Option<String>,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) cell_id: i16,
}

pub(crate) async fn find(db: impl PgExecutor<'_>, slug: &str) -> sqlx::Result<Option<TenantRow>> {
    if !is_tenant_slug(slug) {
        return Ok(None);
    }
    sqlx::query_as(
        "select id, slug, name, rotate_every_days, retention_days, all_operational_events, paused_at, pause_reason,
            created_at, cell_id
         from postrider.tenants where slug = $1 and deleted_at is null",
    )
    .bind(slug)
    .fetch_optional(db)
    .await
}

/// Locked, so that the values read are the ones a change replaces.
pub(crate) async fn find_to_change(db: impl PgExecutor<'_>, slug: &str) -> sqlx::Result<Option<TenantRow>> {
    sqlx::query_as(
        "select id, slug, name, rotate_every_days, retention_days, all_operational_events, paused_at, pause_reason,
            created_at, cell_id
         from postrider.tenants
         where slug = $1 and deleted_at is null for no key update",
    )
    .bind(slug)
    .fetch_optional(db)
    .await
}

/// Deleted tenants too: their events may still be viewed.
pub(crate) async fn slug(db: impl PgExecutor<'_>, id: TenantId) -> sqlx::Result<Option<String>> {
    sqlx::query_scalar("select slug from postrider.tenants where id = $1")
        .bind(id)
        .fetch_optional(db)
        .await
}

/// Deleted tenants too. With whether it is paused.
pub(crate) async fn slug_and_pause(
    db: impl PgExecutor<'_>,
    id: TenantId,
) -> sqlx::Result<Option<(String, bool)>> {
    sqlx::query_as("select slug, paused_at is not null from postrider.tenants where id = $1")
        .bind(id)
        .fetch_optional(db)
        .await
}

/// Pauses the tenant, or resumes it if `by` is none. Its endpoints have to be stamped in the same transaction. Whoever paused it
/// first is kept, with the time and the reason; a missing reason is added.
pub(crate) async fn set_pause(
    db: impl PgExecutor<'_>,
    id: TenantId,
    by: Option<&str>,
    reason: Option<&str>,
) -> sqlx::Result<TenantRow> {
    sqlx::query_as(
        "update postrider.tenants
         set paused_at = case when $2::text is not null then coalesce(paused_at, clock_timestamp()) end,
             paused_by = case when $2 is not null and paused_at is not null then paused_by else $2 end,
             pause_reason = case when $2 is not null then coalesce(pause_reason, $3) end
         where id = $1
         returning id, slug, name, rotate_every_days, retention_days, all_operational_events, paused_at, pause_reason,
            created_at, cell_id",
    )
    .bind_all((id, by, reason))
    .fetch_one(db)
    .await
}

/// Creates the tenant in this cell, or updates it where it is; returns whether it is new.
pub(crate) async fn put(
    db: impl PgExecutor<'_>,
    slug: &str,
    name: Option<&str>,
    rotate_every_days: Option<i16>,
    retention_days: Option<i16>,
    all_operational_events: bool,
    cell: i16,
) -> sqlx::Result<(TenantRow, bool)> {
    #[derive(FromRow)]
    struct Put {
        #[sqlx(flatten)]
        row: TenantRow,
        is_new: bool,
    }
    let put: Put = sqlx::query_as(
        "insert into postrider.tenants (slug, name, rotate_every_days, retention_days, all_operational_events, cell_id)
         values ($1, $2, $3, $4, $5, $6)
         on conflict (slug) where deleted_at is null
         do update set name = excluded.name, rotate_every_days = excluded.rotate_every_days,
            retention_days = excluded.retention_days, all_operational_events = excluded.all_operational_events
         returning id, slug, name, rotate_every_days, retention_days, all_operational_events, paused_at, pause_reason,
            created_at, cell_id, xmax = 0 as is_new",
    )
    .bind_all((slug, name, rotate_every_days, retention_days, all_operational_events))
    .bind(cell)
    .fetch_one(db)
    .await?;
    Ok((put.row, put.is_new))
}

pub(crate) async fn list(db: impl PgExecutor<'_>, after: &str, limit: i64) -> sqlx::Result<Vec<TenantRow>> {
    sqlx::query_as(
        "select id, slug, name, rotate_every_days, retention_days, all_operational_events, paused_at, pause_reason,
            created_at, cell_id
         from postrider.tenants
         where deleted_at is null and slug > $1 order by slug limit $2",
    )
    .bind_all((after, limit))
    .fetch_all(db)
    .await
}

/// A tenant with counts, for the dashboard.
#[derive(Debug, Clone, FromRow)]
pub(crate) struct TenantSummary {
    #[sqlx(flatten)]
    pub(crate) row: TenantRow,
    pub(crate) endpoints: i64,
    pub(crate) dead_letters: i64,
}

/// Tenants whose id or name contains the text, ordered by id.
pub(crate) async fn search(
    db: impl PgExecutor<'_>,
    words: &str,
    after: &str,
    limit: i64,
) -> sqlx::Result<Vec<TenantSummary>> {
    sqlx::query_as(include_str!("sql/tenants_search.sql"))
        .bind_all((words, after, limit))
        .fetch_all(db)
        .await
}

/// Endpoints and dead letters of tenants, as far as this database has them.
pub(crate) async fn counts(
    db: impl PgExecutor<'_>,
    ids: &[TenantId],
) -> sqlx::Result<Vec<(TenantId, i64, i64)>> {
    sqlx::query_as(
        "select t.id,
            (select count(*) from postrider.endpoints e where e.tenant_id = t.id and e.state <> 'deleted'),
            (select coalesce(sum(n.count), 0)::bigint from postrider.dead_letter_counts n where n.tenant_id = t.id)
         from unnest($1::int[]) as t (id)",
    )
    .bind(ids)
    .fetch_all(db)
    .await
}

pub(crate) async fn summary(db: impl PgExecutor<'_>, id: TenantId) -> sqlx::Result<TenantSummary> {
    sqlx::query_as(
        "select t.id, t.slug, t.name, t.rotate_every_days, t.retention_days, t.all_operational_events,
            t.paused_at, t.pause_reason, t.created_at, t.cell_id,
            (select count(*) from postrider.endpoints e
             where e.tenant_id = t.id and e.state <> 'deleted') as endpoints,
            (select coalesce(sum(n.count), 0)::bigint from postrider.dead_letter_counts n
             where n.tenant_id = t.id) as dead_letters
         from postrider.tenants t where t.id = $1",
    )
    .bind(id)
    .fetch_one(db)
    .await
}

/// Locks the tenant as `lock` does. Returns whether this database is the tenant's.
pub(crate) async fn lock_here(db: impl PgExecutor<'_>, id: TenantId) -> sqlx::Result<Option<bool>> {
    sqlx::query_scalar(
        "select is_here from postrider.tenants where id = $1 and deleted_at is null for no key update",
    )
    .bind(id)
    .fetch_optional(db)
    .await
}

/// Blocks others from adding to the tenant or deleting it. Emits continue: they lock no tenant.
pub(crate) async fn lock(db: impl PgExecutor<'_>, id: TenantId) -> sqlx::Result<bool> {
    let row: Option<(TenantId,)> = sqlx::query_as(
        "select id from postrider.tenants where id = $1 and deleted_at is null for no key update",
    )
    .bind(id)
    .fetch_optional(db)
    .await?;
    Ok(row.is_some())
}

/// Of a locked tenant, at home.
pub(crate) async fn is_moving(db: impl PgExecutor<'_>, id: TenantId) -> sqlx::Result<bool> {
    sqlx::query_scalar("select moving from postrider.tenants where id = $1")
        .bind(id)
        .fetch_one(db)
        .await
}

pub(crate) async fn delete(db: impl PgExecutor<'_>, id: TenantId) -> sqlx::Result<()> {
    sqlx::query("update postrider.tenants set deleted_at = clock_timestamp() where id = $1")
        .bind(id)
        .execute(db)
        .await?;
    Ok(())
}
