//! What the search box finds by name. Ids are looked up where they are stored.
//! Invariant: a search reads at most `ENDPOINTS_SEARCHED_MAX` endpoints and `TENANTS_SEARCHED_MAX` tenants. A flag says that
//! there are more.

use postrider_dispatcher::bind::BindAll;
use postrider_proto::TenantId;
use sqlx::{FromRow, PgExecutor};

use crate::{Pool, tables::endpoints::ListedRow};

/// The newest are searched.
const ENDPOINTS_SEARCHED_MAX: i64 = 20_000;
/// The first by id are searched.
const TENANTS_SEARCHED_MAX: i64 = 20_000;

/// A tenant as a result.
#[derive(Debug, Clone, FromRow)]
pub(crate) struct TenantHit {
    pub(crate) slug: String,
    pub(crate) name: Option<String>,
}

/// Endpoints whose URL or description contains the text, of one tenant or of any, newest first.
pub(crate) async fn endpoints(
    db: impl PgExecutor<'_>,
    scope: Option<TenantId>,
    text: &str,
    limit: i64,
) -> sqlx::Result<Vec<ListedRow>> {
    let statement = match scope {
        Some(_) => include_str!("sql/endpoints_find_in_tenant.sql"),
        None => include_str!("sql/endpoints_find_in_all_tenants.sql"),
    };
    let query = sqlx::query_as(statement).bind_all((text, ENDPOINTS_SEARCHED_MAX, limit));
    match scope {
        Some(tenant) => query.bind(tenant).fetch_all(db).await,
        None => query.fetch_all(db).await,
    }
}

/// Tenants whose id or name contains the text: those whose id or name begins with it first.
pub(crate) async fn tenants(db: impl PgExecutor<'_>, text: &str, limit: i64) -> sqlx::Result<Vec<TenantHit>> {
    sqlx::query_as(
        "select slug, name from (
            select slug, name from postrider.tenants where deleted_at is null order by slug limit $2
         ) t
         where position(lower($1) in lower(slug)) > 0 or position(lower($1) in lower(name)) > 0
         order by lower(slug) <> lower($1), not starts_with(lower(slug), lower($1)),
            starts_with(lower(name), lower($1)) is not true, slug
         limit $3",
    )
    .bind_all((text, TENANTS_SEARCHED_MAX, limit))
    .fetch_all(db)
    .await
}

/// Whether there are more endpoints, or tenants, than a search of all reads.
pub(crate) async fn is_partial(pool: &Pool) -> sqlx::Result<bool> {
    sqlx::query_scalar(
        "select exists (select from postrider.endpoints where state <> 'deleted' order by id desc offset $1 limit 1)
            or exists (select from postrider.tenants where deleted_at is null order by slug offset $2 limit 1)",
    )
    .bind_all((ENDPOINTS_SEARCHED_MAX, TENANTS_SEARCHED_MAX))
    .fetch_one(pool)
    .await
}

/// Whether there are more tenants than this.
pub(crate) async fn has_more_tenants(pool: &Pool, count: i64) -> sqlx::Result<bool> {
    sqlx::query_scalar(
        "select exists (select from postrider.tenants where deleted_at is null order by slug offset $1 limit 1)",
    )
    .bind(count)
    .fetch_one(pool)
    .await
}
