//! The audit log: one row per change, written in the transaction of the change.
//! Invariant: a row never contains a secret or a key.

use postrider_proto::TenantId;
use serde_json::Value;
use sqlx::PgConnection;

use crate::{auth::Actor, tables};

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

pub(crate) async fn write(connection: &mut PgConnection, entry: Entry<'_>) -> Result<(), sqlx::Error> {
    tables::audit::insert(
        connection,
        &entry.actor.0,
        entry.action.as_str(),
        entry.tenant,
        entry.subject,
        entry.detail,
    )
    .await
}
