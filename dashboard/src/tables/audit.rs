//! `audit`: one row per change, written in the transaction of the change and never changed.
//! Invariant: a row never contains a secret or a key.

use chrono::{DateTime, Utc};
use postrider_dispatcher::bind::BindAll;
use postrider_proto::TenantId;
use serde_json::Value;
use sqlx::{FromRow, PgConnection, PgExecutor};

/// The acting person or key, as the audit log names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Actor(pub(crate) String);

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

/// Audited actions. `GET /v1/audit` shows these names, so they never change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    TenantPut,
    TenantDeleted,
    EventTypePut,
    EventTypeDeleted,
    EndpointCreated,
    EndpointChanged,
    EndpointDeleted,
    EndpointTested,
    EndpointProbed,
    ListenerCreated,
    SecretRevealed,
    SecretRotated,
    DeliveryReplayed,
    AlertPut,
    AlertDeleted,
    ReplayStarted,
    ReplayCancelled,
    KeyCreated,
    KeyRevoked,
    SignedIn,
    SignInFailed,
    SignedOut,
    SignedOutEverywhere,
    PasswordChanged,
    PersonCreated,
    PersonChanged,
    PersonRemoved,
    PortalLinkCreated,
    PortalOpened,
}

impl Action {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::TenantPut => "tenant.put",
            Self::TenantDeleted => "tenant.deleted",
            Self::EventTypePut => "event_type.put",
            Self::EventTypeDeleted => "event_type.deleted",
            Self::EndpointCreated => "endpoint.created",
            Self::EndpointChanged => "endpoint.changed",
            Self::EndpointDeleted => "endpoint.deleted",
            Self::EndpointTested => "endpoint.tested",
            Self::EndpointProbed => "endpoint.probed",
            Self::ListenerCreated => "listener.created",
            Self::SecretRevealed => "secret.revealed",
            Self::SecretRotated => "secret.rotated",
            Self::DeliveryReplayed => "delivery.replayed",
            Self::AlertPut => "alert.put",
            Self::AlertDeleted => "alert.deleted",
            Self::ReplayStarted => "replay.started",
            Self::ReplayCancelled => "replay.cancelled",
            Self::KeyCreated => "api_key.created",
            Self::KeyRevoked => "api_key.revoked",
            Self::SignedIn => "person.signed_in",
            Self::SignInFailed => "person.sign_in_failed",
            Self::SignedOut => "person.signed_out",
            Self::SignedOutEverywhere => "person.signed_out_everywhere",
            Self::PasswordChanged => "person.password_changed",
            Self::PersonCreated => "person.created",
            Self::PersonChanged => "person.changed",
            Self::PersonRemoved => "person.removed",
            Self::PortalLinkCreated => "portal_link.created",
            Self::PortalOpened => "portal_link.opened",
        }
    }
}

pub(crate) struct Entry<'a> {
    pub(crate) actor: &'a Actor,
    pub(crate) action: Action,
    pub(crate) tenant: Option<TenantId>,
    /// The public id or name of the changed resource.
    pub(crate) subject: &'a str,
    pub(crate) detail: Option<Value>,
}

pub(crate) async fn write(connection: &mut PgConnection, entry: Entry<'_>) -> sqlx::Result<()> {
    sqlx::query(
        "insert into postrider.audit (actor, action, tenant_id, subject, detail) values ($1, $2, $3, $4, $5)",
    )
    .bind_all((&entry.actor.0, entry.action.as_str()))
    .bind_all((entry.tenant, entry.subject, entry.detail))
    .execute(connection)
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
) -> sqlx::Result<Vec<AuditRow>> {
    sqlx::query_as(
        "select a.id, a.at, a.actor, a.action, t.slug as tenant, a.subject, a.detail
         from postrider.audit a left join postrider.tenants t on t.id = a.tenant_id
         where a.id < $1 and ($3::int is null or a.tenant_id = $3) and ($4::text is null or a.actor = $4)
         order by a.id desc limit $2",
    )
    .bind_all((before, limit, narrowed.tenant, &narrowed.actor))
    .fetch_all(db)
    .await
}
