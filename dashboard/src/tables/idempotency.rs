//! `idempotency`: stored responses. A row is written once, in the transaction of its request's work.
//! `idempotency_claims`: running requests without a transaction.

use std::time::Duration;

use postrider_dispatcher::bind::BindAll;
use postrider_proto::Shard;
use sqlx::{FromRow, PgConnection, PgExecutor};

#[derive(Debug, FromRow)]
pub(crate) struct ResponseRow {
    pub(crate) fingerprint: Vec<u8>,
    pub(crate) status: i16,
    /// Encrypted.
    pub(crate) response: Vec<u8>,
    /// The shard and transaction that must be applied before the response is true.
    pub(crate) settles_shard: Option<Shard>,
    pub(crate) settles_xid: Option<String>,
}

/// The stored result of a completed request.
pub(crate) struct NewResponse<'a> {
    pub(crate) scope: &'a [u8],
    pub(crate) fingerprint: &'a [u8],
    pub(crate) status: i16,
    /// Encrypted.
    pub(crate) response: &'a [u8],
    pub(crate) tenant: Option<&'a str>,
    pub(crate) settles: Option<(Shard, &'a str)>,
}

pub(crate) async fn find(db: impl PgExecutor<'_>, scope: &[u8]) -> sqlx::Result<Option<ResponseRow>> {
    sqlx::query_as(
        "select fingerprint, status, response, settles_shard, settles_xid::text as settles_xid from postrider.idempotency
         where scope = $1 and created_at > clock_timestamp() - interval '72 hours'",
    )
    .bind(scope)
    .fetch_optional(db)
    .await
}

/// Exclusive until this transaction ends. The previous holder has committed or is gone, so a lookup afterwards sees
/// its result.
pub(crate) async fn try_lock(connection: &mut PgConnection, scope: &[u8]) -> sqlx::Result<bool> {
    let mut number = [0; 8];
    number.copy_from_slice(&scope[..8]);
    sqlx::query_scalar("select pg_try_advisory_xact_lock($1)")
        .bind(i64::from_be_bytes(number))
        .fetch_one(connection)
        .await
}

pub(crate) async fn insert(connection: &mut PgConnection, new: NewResponse<'_>) -> sqlx::Result<()> {
    sqlx::query(include_str!("sql/idempotency_insert.sql"))
        .bind_all((new.scope, new.fingerprint, new.status, new.response))
        .bind_all((
            new.tenant,
            new.settles.map(|(shard, _)| shard),
            new.settles.map(|(_, xid)| xid),
        ))
        .execute(connection)
        .await?;
    Ok(())
}

/// For a request that runs without a transaction. Of several, one gets the claim until it releases it or it expires.
pub(crate) async fn claim(db: impl PgExecutor<'_>, scope: &[u8], most: Duration) -> sqlx::Result<bool> {
    let claimed = sqlx::query(
        "insert into postrider.idempotency_claims as c (scope, expires_at)
         values ($1, clock_timestamp() + make_interval(secs => $2))
         on conflict (scope) do update set expires_at = excluded.expires_at
         where c.expires_at <= clock_timestamp()",
    )
    .bind_all((scope, most.as_secs_f64()))
    .execute(db)
    .await?;
    Ok(claimed.rows_affected() > 0)
}

/// Releases its own claim and removes expired ones.
pub(crate) async fn give_back(db: impl PgExecutor<'_>, scope: &[u8]) -> sqlx::Result<()> {
    sqlx::query(
        "delete from postrider.idempotency_claims where scope = $1 or expires_at <= clock_timestamp()",
    )
    .bind(scope)
    .execute(db)
    .await?;
    Ok(())
}
