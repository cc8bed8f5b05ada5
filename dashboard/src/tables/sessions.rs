//! `sessions` of people. Only the hash of a token is kept.

use sqlx::{FromRow, PgExecutor};

#[derive(Debug, FromRow)]
pub(crate) struct SessionRow {
    pub(crate) login: String,
    pub(crate) csrf: Vec<u8>,
}

pub(crate) async fn find(
    db: impl PgExecutor<'_>,
    token_hash: &[u8; 32],
) -> Result<Option<SessionRow>, sqlx::Error> {
    sqlx::query_as(
        "select p.login, s.csrf from postrider.sessions s join postrider.people p on p.id = s.person_id
         where s.token_hash = $1 and s.expires_at > clock_timestamp()",
    )
    .bind(token_hash.as_slice())
    .fetch_optional(db)
    .await
}

pub(crate) async fn insert(
    db: impl PgExecutor<'_>,
    token_hash: &[u8; 32],
    person_id: i32,
    csrf: &[u8; 32],
    hours: i32,
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "insert into postrider.sessions (token_hash, person_id, csrf, expires_at)
         values ($1, $2, $3, clock_timestamp() + make_interval(hours => $4))",
    )
    .bind(token_hash.as_slice())
    .bind(person_id)
    .bind(csrf.as_slice())
    .bind(hours)
    .execute(db)
    .await?;
    Ok(())
}

pub(crate) async fn delete(db: impl PgExecutor<'_>, token_hash: &[u8; 32]) -> Result<(), sqlx::Error> {
    sqlx::query("delete from postrider.sessions where token_hash = $1")
        .bind(token_hash.as_slice())
        .execute(db)
        .await?;
    Ok(())
}

pub(crate) async fn delete_expired(db: impl PgExecutor<'_>) -> Result<(), sqlx::Error> {
    sqlx::query("delete from postrider.sessions where expires_at <= clock_timestamp()")
        .execute(db)
        .await?;
    Ok(())
}
