//! `audit`: written in the transaction of the change, never changed.

use chrono::{DateTime, Utc};
use postrider_proto::TenantId;
use serde_json::Value;
use sqlx::{FromRow, PgExecutor};

#[derive(Debug, FromRow)]
pub(crate) struct AuditRow {
    pub(crate) id: i64,
    pub(crate) at: DateTime<Utc>,
    pub(crate) actor: String,
    pub(crate) action: String,
    pub(crate) tenant: Option<String>,
    pub(crate) subject: String,
    pub(crate) detail: Option<Value>,
}

pub(crate) async fn insert(
    db: impl PgExecutor<'_>,
    actor: &str,
    action: &str,
    tenant: Option<TenantId>,
    subject: &str,
    detail: Option<Value>,
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "insert into postrider.audit (actor, action, tenant_id, subject, detail) values ($1, $2, $3, $4, $5)",
    )
    .bind(actor)
    .bind(action)
    .bind(tenant)
    .bind(subject)
    .bind(detail)
    .execute(db)
    .await?;
    Ok(())
}

/// Filter of the audit log.
#[derive(Debug, Clone, Default)]
pub(crate) struct Narrowed {
    pub(crate) tenant: Option<TenantId>,
    pub(crate) actor: Option<String>,
}

/// Newest first.
pub(crate) async fn list(
    db: impl PgExecutor<'_>,
    narrowed: &Narrowed,
    before: i64,
    limit: i64,
) -> Result<Vec<AuditRow>, sqlx::Error> {
    sqlx::query_as(
        "select a.id, a.at, a.actor, a.action, t.slug as tenant, a.subject, a.detail
         from postrider.audit a left join postrider.tenants t on t.id = a.tenant_id
         where a.id < $1 and ($3::int is null or a.tenant_id = $3) and ($4::text is null or a.actor = $4)
         order by a.id desc limit $2",
    )
    .bind(before)
    .bind(limit)
    .bind(narrowed.tenant)
    .bind(&narrowed.actor)
    .fetch_all(db)
    .await
}
