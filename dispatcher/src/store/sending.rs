//! The switch that stops all sending, kept in the database. Dispatchers read it with their settings; the API confirms a
//! change once every dispatcher has applied it.
//!
//! Invariant: nothing is sent from a restored copy until someone has confirmed it. No process has to notice the restore:
//! the stored identity is not that of the database it is in.

use chrono::{DateTime, Utc};
use sqlx::{FromRow, PgConnection, PgExecutor, PgPool};

use crate::bind::BindAll;

/// Why nothing is sent where the identity was known and no longer is.
pub const IDENTITY_HIDDEN: &str = "Postrider's database role may not execute pg_control_system(), so it is unknown whether \
                                   this database is a restored copy";
pub const IDENTITY_ADVICE: &str = "Run `grant execute on function pg_catalog.pg_control_system() to …` with that role as a \
                                   superuser, in this database: sending continues within seconds. Or, if no other installation \
                                   sends from a copy of this database, `postrider sending resume --confirm-restored`.";

#[derive(Debug, Clone, Default, PartialEq, Eq, FromRow)]
pub struct SendingState {
    pub stopped: bool,
    /// Stopped because this is a restored copy, or may be one.
    pub restored: bool,
    /// It is unknown whether it is one: Postrider's role may not ask the server for its identity any more.
    pub identity_hidden: bool,
    pub stopped_at: Option<DateTime<Utc>>,
    pub stopped_by: Option<String>,
    pub reason: Option<String>,
}

pub async fn state(db: impl PgExecutor<'_>) -> Result<SendingState, sqlx::Error> {
    sqlx::query_as(
        "select stopped, restored, identity_hidden, stopped_at, stopped_by, reason from postrider.sending_state()",
    )
    .fetch_one(db)
    .await
}

/// The state, locked until the end of the transaction that changes it.
pub async fn lock(connection: &mut PgConnection) -> Result<SendingState, sqlx::Error> {
    sqlx::query("select from postrider.sending for update")
        .execute(&mut *connection)
        .await?;
    state(connection).await
}

/// A restored copy stays one: a stop is not a confirmation. Whoever stopped first is kept, with the time and the reason: the
/// next one must not hide why nothing is sent. A missing reason is added.
pub async fn stop(db: impl PgExecutor<'_>, by: &str, reason: Option<&str>) -> Result<(), sqlx::Error> {
    sqlx::query(
        "update postrider.sending
         set stopped_at = coalesce(stopped_at, clock_timestamp()), reason = coalesce(reason, $2),
             stopped_by = case when stopped_at is null then $1 else stopped_by end",
    )
    .bind_all((by, reason))
    .execute(db)
    .await?;
    Ok(())
}

/// Also confirms that this database may send.
pub async fn resume(db: impl PgExecutor<'_>) -> Result<(), sqlx::Error> {
    sqlx::query(
        "update postrider.sending set stopped_at = null, stopped_by = null, reason = null,
             identity = coalesce(postrider.database_identity(), postrider.database_oids())",
    )
    .execute(db)
    .await?;
    Ok(())
}

/// Remembers the database that the schema was created in, and remembers it better when the server no longer hides its
/// identity. Never replaces another one: that would confirm a restored copy.
pub(crate) async fn remember_database(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::query(
        "update postrider.sending s set identity = i.identity
         from (select coalesce(postrider.database_identity(), postrider.database_oids()) as identity) i
         where s.identity is distinct from i.identity
           and (s.identity is null or s.identity = postrider.database_oids())",
    )
    .execute(connection)
    .await?;
    Ok(())
}

/// For `POSTRIDER_START_PAUSED`: nothing is sent from the first moment on. An earlier stop keeps its reason.
pub(crate) async fn stop_at_start(pool: &PgPool) -> Result<(), sqlx::Error> {
    let mut transaction = pool.begin().await?;
    if lock(&mut transaction).await?.stopped_at.is_none() {
        const REASON: &str = "POSTRIDER_START_PAUSED is set";
        stop(&mut *transaction, "postrider", Some(REASON)).await?;
        sqlx::query(
            "insert into postrider.audit (actor, action, subject, detail)
             values ('postrider', 'sending.stopped', 'sending', jsonb_build_object('reason', $1::text))",
        )
        .bind(REASON)
        .execute(&mut *transaction)
        .await?;
    }
    transaction.commit().await
}

/// Says in the log what keeps a starting process from sending.
pub async fn warn_if_stopped(db: impl PgExecutor<'_>) -> Result<(), sqlx::Error> {
    let state = state(db).await?;
    if state.identity_hidden {
        tracing::warn!("{IDENTITY_HIDDEN}: nothing is sent. {IDENTITY_ADVICE}");
    } else if state.restored {
        tracing::warn!(
            "this database is a restored copy: nothing is sent until it is confirmed with \
             `postrider sending resume --confirm-restored` or on the System page"
        );
    } else if state.stopped {
        let (by, reason) = (state.stopped_by, state.reason);
        tracing::warn!(
            by,
            reason,
            "sending is stopped: nothing is sent until it is resumed"
        );
    }
    Ok(())
}
