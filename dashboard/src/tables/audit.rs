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

macro_rules! actions {
    ($($action:ident = $name:literal),+ $(,)?) => {
        /// Audited actions. `GET /v1/audit` shows these names, so they never change.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Action {
            $($action),+
        }

        impl Action {
            pub(crate) const fn as_str(self) -> &'static str {
                match self { $(Self::$action => $name),+ }
            }
        }
    };
}
actions! {
    TenantPut = "tenant.put",
    TenantDeleted = "tenant.deleted",
    EventTypePut = "event_type.put",
    EventTypeDeleted = "event_type.deleted",
    EndpointCreated = "endpoint.created",
    EndpointChanged = "endpoint.changed",
    EndpointDeleted = "endpoint.deleted",
    EndpointTested = "endpoint.tested",
    EndpointProbed = "endpoint.probed",
    ListenerCreated = "listener.created",
    SecretRevealed = "secret.revealed",
    SecretRotated = "secret.rotated",
    DeliveryReplayed = "delivery.replayed",
    AlertPut = "alert.put",
    AlertDeleted = "alert.deleted",
    ReplayStarted = "replay.started",
    ReplayCancelled = "replay.cancelled",
    KeyCreated = "api_key.created",
    KeyRevoked = "api_key.revoked",
    SignedIn = "person.signed_in",
    SignInFailed = "person.sign_in_failed",
    SignedOut = "person.signed_out",
    SignedOutEverywhere = "person.signed_out_everywhere",
    PasswordChanged = "person.password_changed",
    PersonCreated = "person.created",
    PersonChanged = "person.changed",
    PersonRemoved = "person.removed",
    PortalLinkCreated = "portal_link.created",
    PortalOpened = "portal_link.opened",
}

pub(crate) struct Entry<'a> {
    actor: &'a Actor,
    action: Action,
    tenant: Option<TenantId>,
    /// The public id or name of the changed resource.
    subject: &'a str,
    detail: Option<Value>,
}

impl<'a> Entry<'a> {
    pub(crate) fn new(actor: &'a Actor, action: Action, tenant: Option<TenantId>, subject: &'a str) -> Self {
        Self {
            actor,
            action,
            tenant,
            subject,
            detail: None,
        }
    }

    pub(crate) fn with(self, detail: impl Into<Option<Value>>) -> Self {
        let detail = detail.into();
        Self { detail, ..self }
    }
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
