//! `sessions` of team members and customers. Only the hash of a token is stored.

use postrider_dispatcher::bind::BindAll;
use postrider_proto::{PersonRole, TenantId};
use sqlx::{FromRow, PgExecutor};

/// Of a person or of a tenant; the other columns are null.
#[derive(Debug, FromRow)]
pub(crate) struct SessionRow {
    pub(crate) csrf: Vec<u8>,
    pub(crate) person_id: Option<i32>,
    pub(crate) login: Option<String>,
    pub(crate) role: Option<PersonRole>,
    pub(crate) tenant_id: Option<TenantId>,
    pub(crate) slug: Option<String>,
    /// The customer's tenant is paused.
    pub(crate) tenant_paused: bool,
    /// All sending is stopped.
    pub(crate) sending_stopped: bool,
    pub(crate) sending_restored: bool,
    pub(crate) identity_hidden: bool,
    pub(crate) stopped_by: Option<String>,
    pub(crate) stop_reason: Option<String>,
}

/// The owner of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Holder {
    Person(i32),
    Tenant(TenantId),
}

impl Holder {
    fn columns(self) -> (Option<i32>, Option<TenantId>) {
        match self {
            Self::Person(id) => (Some(id), None),
            Self::Tenant(id) => (None, Some(id)),
        }
    }
}

/// Sessions of a deleted tenant are invalid.
pub(crate) async fn find(db: impl PgExecutor<'_>, token_hash: &[u8; 32]) -> sqlx::Result<Option<SessionRow>> {
    sqlx::query_as(
        "select s.csrf, p.id as person_id, p.login, p.role, t.id as tenant_id, t.slug,
                t.paused_at is not null as tenant_paused, coalesce(w.stopped, true) as sending_stopped,
                coalesce(w.restored, false) as sending_restored,
                coalesce(w.identity_hidden, false) as identity_hidden, w.stopped_by, w.reason as stop_reason
         from postrider.sessions s
         left join postrider.people p on p.id = s.person_id
         left join postrider.tenants t on t.id = s.tenant_id and t.deleted_at is null
         left join postrider.sending_state() w on true
         where s.token_hash = $1 and s.expires_at > clock_timestamp() and (p.id is not null or t.id is not null)",
    )
    .bind(token_hash.as_slice())
    .fetch_optional(db)
    .await
}

pub(crate) async fn insert(
    db: impl PgExecutor<'_>,
    token_hash: &[u8; 32],
    holder: Holder,
    csrf: &[u8; 32],
    hours: i32,
    link_hash: Option<&[u8; 32]>,
) -> sqlx::Result<()> {
    let (person, tenant) = holder.columns();
    sqlx::query(
        "insert into postrider.sessions (token_hash, person_id, tenant_id, csrf, expires_at, link_hash)
         values ($1, $2, $3, $4, clock_timestamp() + make_interval(hours => $5), $6)",
    )
    .bind_all((token_hash.as_slice(), person, tenant, csrf.as_slice(), hours))
    .bind(link_hash.map(|hash| hash.as_slice()))
    .execute(db)
    .await?;
    Ok(())
}

/// Whether this portal link opened the session.
pub(crate) async fn was_opened_by(
    db: impl PgExecutor<'_>,
    token_hash: &[u8; 32],
    link_hash: &[u8; 32],
) -> sqlx::Result<bool> {
    sqlx::query_scalar(
        "select exists (select from postrider.sessions where token_hash = $1 and link_hash = $2)",
    )
    .bind_all((token_hash.as_slice(), link_hash.as_slice()))
    .fetch_one(db)
    .await
}

pub(crate) async fn delete(db: impl PgExecutor<'_>, token_hash: &[u8; 32]) -> sqlx::Result<()> {
    sqlx::query("delete from postrider.sessions where token_hash = $1")
        .bind(token_hash.as_slice())
        .execute(db)
        .await?;
    Ok(())
}

/// All sessions of one person, or all opened by links of one tenant.
pub(crate) async fn delete_all(db: impl PgExecutor<'_>, holder: Holder) -> sqlx::Result<u64> {
    let (person, tenant) = holder.columns();
    let done = sqlx::query("delete from postrider.sessions where person_id = $1 or tenant_id = $2")
        .bind_all((person, tenant))
        .execute(db)
        .await?;
    Ok(done.rows_affected())
}

pub(crate) async fn count(db: impl PgExecutor<'_>, holder: Holder) -> sqlx::Result<i64> {
    let (person, tenant) = holder.columns();
    sqlx::query_scalar(
        "select count(*) from postrider.sessions
         where (person_id = $1 or tenant_id = $2) and expires_at > clock_timestamp()",
    )
    .bind_all((person, tenant))
    .fetch_one(db)
    .await
}

pub(crate) async fn delete_expired(db: impl PgExecutor<'_>) -> sqlx::Result<()> {
    sqlx::query("delete from postrider.sessions where expires_at <= clock_timestamp()")
        .execute(db)
        .await?;
    Ok(())
}
