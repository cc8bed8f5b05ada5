//! `schemas`: the versions of event types. A published one is never changed or removed. They are ordered by version
//! (`rank`), regardless of when they were published; the last is the newest.

use chrono::{DateTime, Utc};
use postrider_dispatcher::bind::BindAll;
use postrider_proto::TypeId;
use serde_json::value::RawValue;
use sqlx::{FromRow, PgExecutor, types::Json};

#[derive(Debug, FromRow)]
pub(crate) struct SchemaRow {
    pub(crate) version: String,
    /// The original text.
    pub(crate) schema: Json<Box<RawValue>>,
    pub(crate) created_at: DateTime<Utc>,
}

pub(crate) async fn of_type(db: impl PgExecutor<'_>, id: TypeId) -> sqlx::Result<Vec<SchemaRow>> {
    sqlx::query_as(
        "select version, schema, created_at from postrider.schemas where type_id = $1 order by rank",
    )
    .bind(id)
    .fetch_all(db)
    .await
}

/// The versions of each of these types, newest last.
pub(crate) async fn versions(
    db: impl PgExecutor<'_>,
    types: &[TypeId],
) -> sqlx::Result<Vec<(TypeId, String)>> {
    let types: Vec<i32> = types.iter().map(|id| id.0).collect();
    sqlx::query_as("select type_id, version from postrider.schemas where type_id = any($1) order by rank")
        .bind(types)
        .fetch_all(db)
        .await
}

pub(crate) async fn insert(
    db: impl PgExecutor<'_>,
    id: TypeId,
    version: &str,
    schema: &RawValue,
) -> sqlx::Result<()> {
    sqlx::query("insert into postrider.schemas (type_id, version, schema) values ($1, $2, $3::text::json)")
        .bind_all((id, version, schema.get()))
        .execute(db)
        .await?;
    Ok(())
}

/// Total size of all versions of all types that are not deleted.
pub(crate) async fn bytes(db: impl PgExecutor<'_>) -> sqlx::Result<i64> {
    sqlx::query_scalar(
        "select coalesce(sum(octet_length(s.schema::text)), 0)::bigint
         from postrider.schemas s join postrider.event_types y on y.id = s.type_id where y.deleted_at is null",
    )
    .fetch_one(db)
    .await
}

/// Which of these types have which of these versions, without deleted types.
pub(crate) async fn are_there(
    db: impl PgExecutor<'_>,
    types: &[&str],
    versions: &[&str],
) -> sqlx::Result<Vec<(String, Option<String>)>> {
    sqlx::query_as(
        "select y.name, s.version
         from unnest($1::text[], $2::text[]) as asked (type, version)
         join postrider.event_types y on y.name = asked.type and y.deleted_at is null
         left join postrider.schemas s on s.type_id = y.id and s.version = asked.version",
    )
    .bind_all((types, versions))
    .fetch_all(db)
    .await
}
