//! `event_types`. A deleted type is kept for its events. Created again, it is the same type with its old versions:
//! published schemas never change.

use chrono::{DateTime, Utc};
use postrider_dispatcher::bind::BindAll;
use postrider_proto::{TypeId, routing::matching_patterns};
use sqlx::{FromRow, PgExecutor};

#[derive(Debug, Clone, FromRow)]
pub(crate) struct EventTypeRow {
    pub(crate) id: TypeId,
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    /// Its events' bodies carry only the object's id and type.
    pub(crate) thin: bool,
    pub(crate) created_at: DateTime<Utc>,
}

pub(crate) async fn find(db: impl PgExecutor<'_>, name: &str) -> sqlx::Result<Option<EventTypeRow>> {
    sqlx::query_as(
        "select id, name, description, thin, created_at from postrider.event_types
         where name = $1 and deleted_at is null",
    )
    .bind(name)
    .fetch_optional(db)
    .await
}

/// All ids that types of this name have or had: events of a deleted one still exist.
pub(crate) async fn numbers(db: impl PgExecutor<'_>, name: &str) -> sqlx::Result<Vec<i32>> {
    sqlx::query_scalar("select id from postrider.event_types where name = $1")
        .bind(name)
        .fetch_all(db)
        .await
}

/// Until the transaction ends nobody else creates, changes or deletes a type of this name.
pub(crate) async fn lock(db: impl PgExecutor<'_>, name: &str) -> sqlx::Result<()> {
    sqlx::query("select pg_advisory_xact_lock(hashtextextended('event type ' || $1, 0))")
        .bind(name)
        .execute(db)
        .await?;
    Ok(())
}

/// Restores the deleted type of this name, unless an active one exists. The caller holds the lock.
pub(crate) async fn revive(db: impl PgExecutor<'_>, name: &str) -> sqlx::Result<bool> {
    let done = sqlx::query(
        "update postrider.event_types set deleted_at = null, thin = false, description = null
         where id = (select max(id) from postrider.event_types where name = $1)
           and not exists (select from postrider.event_types where name = $1 and deleted_at is null)",
    )
    .bind(name)
    .execute(db)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// Creates the type or updates its description and `thin`, if given; returns whether it is new.
pub(crate) async fn put(
    db: impl PgExecutor<'_>,
    name: &str,
    description: Option<&Option<String>>,
    thin: Option<bool>,
) -> sqlx::Result<(EventTypeRow, bool)> {
    #[derive(FromRow)]
    struct Put {
        #[sqlx(flatten)]
        row: EventTypeRow,
        is_new: bool,
    }
    let put: Put = sqlx::query_as(
        "insert into postrider.event_types as y (name, description, matches, thin)
         values ($1, $2, $3, coalesce($4, false))
         on conflict (name) where deleted_at is null
         do update set description = case when $5 then excluded.description else y.description end,
            thin = coalesce($4, y.thin)
         returning id, name, description, thin, created_at, xmax = 0 as is_new",
    )
    .bind_all((
        name,
        description.and_then(Option::as_deref),
        matching_patterns(name),
        thin,
        description.is_some(),
    ))
    .fetch_one(db)
    .await?;
    Ok((put.row, put.is_new))
}

pub(crate) async fn list(
    db: impl PgExecutor<'_>,
    after: &str,
    limit: i64,
) -> sqlx::Result<Vec<EventTypeRow>> {
    sqlx::query_as(
        "select id, name, description, thin, created_at from postrider.event_types
         where deleted_at is null and name > $1 order by name limit $2",
    )
    .bind_all((after, limit))
    .fetch_all(db)
    .await
}

/// Types that match one of these patterns, by name.
pub(crate) async fn matching(
    db: impl PgExecutor<'_>,
    patterns: &[String],
    limit: i64,
) -> sqlx::Result<Vec<EventTypeRow>> {
    sqlx::query_as(
        "select id, name, description, thin, created_at from postrider.event_types
         where deleted_at is null and matches && $1 order by name limit $2",
    )
    .bind_all((patterns, limit))
    .fetch_all(db)
    .await
}

/// Those of these patterns that match at least one type.
pub(crate) async fn matched_patterns(
    db: impl PgExecutor<'_>,
    patterns: &[&str],
) -> sqlx::Result<Vec<String>> {
    sqlx::query_scalar(
        "select distinct m.pattern from postrider.event_types y cross join unnest(y.matches) as m (pattern)
         where y.deleted_at is null and m.pattern = any($1)",
    )
    .bind(patterns)
    .fetch_all(db)
    .await
}

pub(crate) async fn delete(db: impl PgExecutor<'_>, name: &str) -> sqlx::Result<bool> {
    let done = sqlx::query(
        "update postrider.event_types set deleted_at = clock_timestamp() where name = $1 and deleted_at is null",
    )
    .bind(name)
    .execute(db)
    .await?;
    Ok(done.rows_affected() > 0)
}
