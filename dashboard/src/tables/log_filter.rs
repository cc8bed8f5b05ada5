//! `log_filter`: one row, which every process reads every few seconds.

use postrider_dispatcher::bind::BindAll;
use sqlx::PgExecutor;

pub(crate) async fn find(db: impl PgExecutor<'_>) -> sqlx::Result<Option<String>> {
    sqlx::query_scalar("select filter from postrider.log_filter")
        .fetch_one(db)
        .await
}

pub(crate) async fn put(db: impl PgExecutor<'_>, filter: Option<&str>, by: &str) -> sqlx::Result<()> {
    sqlx::query(
        "update postrider.log_filter set filter = $1, changed_by = $2, changed_at = clock_timestamp()",
    )
    .bind_all((filter, by))
    .execute(db)
    .await?;
    Ok(())
}
