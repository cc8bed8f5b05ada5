//! `form_results`: encrypted results of forms, each shown once on the page that the form redirects to.

use postrider_dispatcher::bind::BindAll;
use sqlx::PgExecutor;

/// How long a result waits to be shown. The redirect takes a moment.
const MINUTES: i32 = 10;
/// Waiting results per session; older ones are dropped.
const PER_SESSION_MAX: i64 = 8;

pub(crate) async fn insert(
    db: impl PgExecutor<'_>,
    public_id: &str,
    session: &[u8; 32],
    sealed: &[u8],
) -> sqlx::Result<()> {
    sqlx::query(
        "with dropped as (
           delete from postrider.form_results where public_id in (
             select public_id from postrider.form_results where session = $2
             order by created_at desc offset $4))
         insert into postrider.form_results (public_id, session, sealed) values ($1, $2, $3)",
    )
    .bind_all((public_id, session.as_slice(), sealed, PER_SESSION_MAX - 1))
    .execute(db)
    .await?;
    Ok(())
}

/// The delete is the guard: a result is shown once.
pub(crate) async fn take(
    db: impl PgExecutor<'_>,
    public_id: &str,
    session: &[u8; 32],
) -> sqlx::Result<Option<Vec<u8>>> {
    sqlx::query_scalar(
        "delete from postrider.form_results where public_id = $1 and session = $2
           and created_at > clock_timestamp() - make_interval(mins => $3)
         returning sealed",
    )
    .bind_all((public_id, session.as_slice(), MINUTES))
    .fetch_optional(db)
    .await
}

pub(crate) async fn delete_expired(db: impl PgExecutor<'_>) -> sqlx::Result<()> {
    sqlx::query(
        "delete from postrider.form_results where created_at <= clock_timestamp() - make_interval(mins => $1)",
    )
    .bind(MINUTES)
    .execute(db)
    .await?;
    Ok(())
}
