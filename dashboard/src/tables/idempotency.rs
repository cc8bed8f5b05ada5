//! `idempotency`: answers that are given again. A row is written once, in the transaction of its request's work.

use sqlx::{FromRow, PgConnection, PgExecutor};

#[derive(Debug, FromRow)]
pub(crate) struct AnswerRow {
    pub(crate) fingerprint: Vec<u8>,
    pub(crate) status: i16,
    /// Sealed.
    pub(crate) answer: Vec<u8>,
}

pub(crate) async fn find(db: impl PgExecutor<'_>, scope: &[u8]) -> Result<Option<AnswerRow>, sqlx::Error> {
    sqlx::query_as(
        "select fingerprint, status, answer from postrider.idempotency
         where scope = $1 and created_at > clock_timestamp() - interval '72 hours'",
    )
    .bind(scope)
    .fetch_optional(db)
    .await
}

/// Until this transaction ends nobody else gets it. Whoever held it before has committed or is gone, so that a look at
/// the table afterwards sees what they left.
pub(crate) async fn try_lock(connection: &mut PgConnection, scope: &[u8]) -> Result<bool, sqlx::Error> {
    let mut number = [0; 8];
    number.copy_from_slice(&scope[..8]);
    sqlx::query_scalar("select pg_try_advisory_xact_lock($1)")
        .bind(i64::from_be_bytes(number))
        .fetch_one(connection)
        .await
}

pub(crate) async fn insert(
    connection: &mut PgConnection,
    scope: &[u8],
    fingerprint: &[u8],
    status: i16,
    answer: &[u8],
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "insert into postrider.idempotency as i (scope, fingerprint, status, answer) values ($1, $2, $3, $4)
         on conflict (scope) do update
         set fingerprint = excluded.fingerprint, status = excluded.status, answer = excluded.answer,
             created_at = excluded.created_at
         where i.created_at <= clock_timestamp() - interval '72 hours'",
    )
    .bind(scope)
    .bind(fingerprint)
    .bind(status)
    .bind(answer)
    .execute(connection)
    .await?;
    Ok(())
}
