//! `secrets`: an endpoint's signing secrets, encrypted. One is current, others retire at a set time.

use chrono::{DateTime, Utc};
use postrider_dispatcher::bind::BindAll;
use postrider_proto::EndpointId;
use sqlx::{FromRow, PgExecutor};

#[derive(Debug, FromRow)]
pub(crate) struct SecretRow {
    pub(crate) ciphertext: Vec<u8>,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) retires_at: Option<DateTime<Utc>>,
}

/// Newest first.
pub(crate) async fn in_force(db: impl PgExecutor<'_>, endpoint: EndpointId) -> sqlx::Result<Vec<SecretRow>> {
    sqlx::query_as(
        "select ciphertext, created_at, retires_at from postrider.secrets
         where endpoint_id = $1 and (retires_at is null or retires_at > clock_timestamp()) order by id desc",
    )
    .bind(endpoint)
    .fetch_all(db)
    .await
}

/// Includes retired secrets, newest first: to find which one made an old signature.
pub(crate) async fn latest(
    db: impl PgExecutor<'_>,
    endpoint: EndpointId,
    limit: i64,
) -> sqlx::Result<Vec<SecretRow>> {
    sqlx::query_as(
        "select ciphertext, created_at, retires_at from postrider.secrets
         where endpoint_id = $1 order by id desc limit $2",
    )
    .bind_all((endpoint, limit))
    .fetch_all(db)
    .await
}

pub(crate) async fn insert(
    db: impl PgExecutor<'_>,
    endpoint: EndpointId,
    ciphertext: &[u8],
    public_key: Option<&str>,
) -> sqlx::Result<()> {
    sqlx::query("insert into postrider.secrets (endpoint_id, ciphertext, public_key) values ($1, $2, $3)")
        .bind_all((endpoint, ciphertext, public_key))
        .execute(db)
        .await?;
    Ok(())
}

/// Secrets that are already retiring keep their time, but an overlap of zero revokes them all: after a leak only the
/// new one may sign.
pub(crate) async fn retire(
    db: impl PgExecutor<'_>,
    endpoint: EndpointId,
    overlap_seconds: i32,
) -> sqlx::Result<()> {
    sqlx::query(
        "update postrider.secrets set retires_at = clock_timestamp() + make_interval(secs => $2)
         where endpoint_id = $1
           and (retires_at is null or $2 = 0 and retires_at > clock_timestamp())",
    )
    .bind_all((endpoint, f64::from(overlap_seconds)))
    .execute(db)
    .await?;
    Ok(())
}
