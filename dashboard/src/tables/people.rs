//! `people`: team members who may sign in, each with a role.

use chrono::{DateTime, Utc};
use postrider_dispatcher::bind::BindAll;
use postrider_proto::PersonRole;
use sqlx::{FromRow, PgExecutor};

#[derive(Debug, FromRow)]
pub(crate) struct PersonRow {
    pub(crate) id: i32,
    pub(crate) login: String,
    pub(crate) password_hash: String,
    pub(crate) role: PersonRole,
    pub(crate) created_at: DateTime<Utc>,
    /// Number of active sessions.
    pub(crate) sessions: i64,
}

macro_rules! person {
    ($rest:literal) => {
        concat!(
            "select p.id, p.login, p.password_hash, p.role, p.created_at,
                (select count(*) from postrider.sessions s
                 where s.person_id = p.id and s.expires_at > clock_timestamp()) as sessions
             from postrider.people p ",
            $rest
        )
    };
}

pub(crate) async fn find(db: impl PgExecutor<'_>, login: &str) -> sqlx::Result<Option<PersonRow>> {
    sqlx::query_as(person!("where p.login = $1"))
        .bind(login)
        .fetch_optional(db)
        .await
}

pub(crate) async fn list(db: impl PgExecutor<'_>, after: &str, limit: i64) -> sqlx::Result<Vec<PersonRow>> {
    sqlx::query_as(person!("where p.login > $1 order by p.login limit $2"))
        .bind_all((after, limit))
        .fetch_all(db)
        .await
}

/// Returns false if the login is taken.
pub(crate) async fn insert(
    db: impl PgExecutor<'_>,
    login: &str,
    password_hash: &str,
    role: PersonRole,
) -> sqlx::Result<bool> {
    let done = sqlx::query(
        "insert into postrider.people (login, password_hash, role) values ($1, $2, $3::postrider.person_role)
         on conflict (login) do nothing",
    )
    .bind_all((login, password_hash, role))
    .execute(db)
    .await?;
    Ok(done.rows_affected() > 0)
}

/// Creates an admin with this login and password, or updates the existing one. A new password ends the person's
/// sessions.
pub(crate) async fn put_admin(db: impl PgExecutor<'_>, login: &str, password_hash: &str) -> sqlx::Result<()> {
    sqlx::query(
        "with person as (
            insert into postrider.people (login, password_hash, role) values ($1, $2, 'admin')
            on conflict (login) do update set password_hash = excluded.password_hash, role = 'admin'
            returning id)
         delete from postrider.sessions s using person p where s.person_id = p.id",
    )
    .bind_all((login, password_hash))
    .execute(db)
    .await?;
    Ok(())
}

/// Returns the person's number; the caller must end their sessions.
pub(crate) async fn set_password(
    db: impl PgExecutor<'_>,
    login: &str,
    password_hash: &str,
) -> sqlx::Result<Option<i32>> {
    sqlx::query_scalar("update postrider.people set password_hash = $2 where login = $1 returning id")
        .bind_all((login, password_hash))
        .fetch_optional(db)
        .await
}

/// Takes effect with the person's next request.
pub(crate) async fn set_role(db: impl PgExecutor<'_>, login: &str, role: PersonRole) -> sqlx::Result<bool> {
    let done = sqlx::query("update postrider.people set role = $2::postrider.person_role where login = $1")
        .bind_all((login, role))
        .execute(db)
        .await?;
    Ok(done.rows_affected() > 0)
}

/// The person's sessions must be deleted first.
pub(crate) async fn delete(db: impl PgExecutor<'_>, id: i32) -> sqlx::Result<()> {
    sqlx::query("delete from postrider.people where id = $1")
        .bind(id)
        .execute(db)
        .await?;
    Ok(())
}
