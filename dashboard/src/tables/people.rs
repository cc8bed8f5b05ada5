//! `people` who may sign in.

use sqlx::{FromRow, PgExecutor};

#[derive(Debug, FromRow)]
pub(crate) struct PersonRow {
    pub(crate) id: i32,
    pub(crate) password_hash: String,
}

pub(crate) async fn find(db: impl PgExecutor<'_>, login: &str) -> Result<Option<PersonRow>, sqlx::Error> {
    sqlx::query_as("select id, password_hash from postrider.people where login = $1")
        .bind(login)
        .fetch_optional(db)
        .await
}

/// A new password ends the person's sessions.
pub(crate) async fn put(
    db: impl PgExecutor<'_>,
    login: &str,
    password_hash: &str,
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "with person as (
            insert into postrider.people (login, password_hash) values ($1, $2)
            on conflict (login) do update set password_hash = excluded.password_hash
            returning id)
         delete from postrider.sessions s using person p where s.person_id = p.id",
    )
    .bind(login)
    .bind(password_hash)
    .execute(db)
    .await?;
    Ok(())
}
