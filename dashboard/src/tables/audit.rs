//! `audit`: one row per change, written in the transaction of the change and never changed.
//! Invariant: a row never contains a secret or a key.

use std::{collections::BTreeMap, net::IpAddr};

use chrono::{DateTime, Utc};
use postrider_dispatcher::bind::BindAll;
use postrider_proto::TenantId;
use serde::Serialize;
use serde_json::Value;
use sqlx::{FromRow, PgConnection, PgExecutor};

use crate::Pool;

/// The acting person or key, as the audit log names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Actor {
    /// `person:ada`, `key:key_…`, `portal:acme`.
    pub(crate) name: String,
    /// Where the request came from, if known.
    pub(crate) address: Option<IpAddr>,
}

impl Actor {
    pub(crate) fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            address: None,
        }
    }

    pub(crate) fn at(self, address: Option<IpAddr>) -> Self {
        Self { address, ..self }
    }
}

/// A changed setting: its values before and after.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Change {
    pub(crate) before: Value,
    pub(crate) after: Value,
}

/// Changed settings by name. They never contain a secret.
pub(crate) type Changes = BTreeMap<&'static str, Change>;

/// The settings that differ. Both lists have the same names in the same order.
pub(crate) fn changes<const N: usize>(
    before: [(&'static str, Value); N],
    after: [(&'static str, Value); N],
) -> Changes {
    let pairs = before.into_iter().zip(after);
    pairs
        .filter(|((_, before), (_, after))| before != after)
        .map(|((name, before), (_, after))| (name, Change { before, after }))
        .collect()
}

#[derive(Debug, FromRow)]
pub(crate) struct AuditRow {
    pub(crate) id: i64,
    pub(crate) at: DateTime<Utc>,
    pub(crate) actor: String,
    pub(crate) action: String,
    pub(crate) tenant: Option<String>,
    pub(crate) subject: String,
    pub(crate) detail: Option<Value>,
    pub(crate) address: Option<String>,
    /// `{"name": {"before": …, "after": …}}`.
    pub(crate) changes: Option<Value>,
}

macro_rules! actions {
    ($($action:ident = $name:literal),+ $(,)?) => {
        /// Audited actions. `GET /v1/audit` shows these names, so they never change.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Action {
            $($action),+
        }

        impl Action {
            pub(crate) const ALL: [Self; [$($name),+].len()] = [$(Self::$action),+];

            pub(crate) const fn as_str(self) -> &'static str {
                match self { $(Self::$action => $name),+ }
            }
        }
    };
}
actions! {
    TenantPut = "tenant.put",
    TenantDeleted = "tenant.deleted",
    TenantPaused = "tenant.paused",
    TenantResumed = "tenant.resumed",
    TenantMoveBegun = "tenant.move_begun",
    TenantMoveCancelled = "tenant.move_cancelled",
    CellPut = "cell.put",
    QuotasPut = "quotas.put",
    LogFilterPut = "log_filter.put",
    SendingStopped = "sending.stopped",
    SendingResumed = "sending.resumed",
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
    DeliveryDiscarded = "delivery.discarded",
    DeadLettersDiscarded = "dead_letters.discarded",
    AlertPut = "alert.put",
    AlertDeleted = "alert.deleted",
    ReplayStarted = "replay.started",
    ReplayCancelled = "replay.cancelled",
    ReplayResumed = "replay.resumed",
    ReplayChanged = "replay.changed",
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
    changes: Option<Value>,
}

impl<'a> Entry<'a> {
    pub(crate) fn new(actor: &'a Actor, action: Action, tenant: Option<TenantId>, subject: &'a str) -> Self {
        Self {
            actor,
            action,
            tenant,
            subject,
            detail: None,
            changes: None,
        }
    }

    pub(crate) fn with(self, detail: impl Into<Option<Value>>) -> Self {
        let detail = detail.into();
        Self { detail, ..self }
    }

    /// Without a change there is nothing to show.
    pub(crate) fn changed(self, changes: &Changes) -> Self {
        let changes = match changes.is_empty() {
            true => None,
            false => serde_json::to_value(changes).ok(),
        };
        Self { changes, ..self }
    }
}

pub(crate) async fn write(connection: &mut PgConnection, entry: Entry<'_>) -> sqlx::Result<()> {
    sqlx::query(
        "insert into postrider.audit (actor, action, tenant_id, subject, detail, address, changes)
         values ($1, $2, $3, $4, $5, $6, $7)",
    )
    .bind_all((&entry.actor.name, entry.action.as_str()))
    .bind_all((entry.tenant, entry.subject, entry.detail))
    .bind_all((
        entry.actor.address.map(|address| address.to_string()),
        entry.changes,
    ))
    .execute(connection)
    .await?;
    Ok(())
}

/// Filter of the audit log.
#[derive(Debug, Clone, Default)]
pub(crate) struct Narrowed {
    pub(crate) tenant: Option<TenantId>,
    pub(crate) actor: Option<String>,
    pub(crate) action: Option<String>,
    pub(crate) since: Option<DateTime<Utc>>,
    /// Exclusive.
    pub(crate) until: Option<DateTime<Utc>>,
}

/// Newest first.
pub(crate) async fn list(
    db: impl PgExecutor<'_>,
    narrowed: &Narrowed,
    before: i64,
    limit: i64,
) -> sqlx::Result<Vec<AuditRow>> {
    sqlx::query_as(include_str!("sql/audit_list.sql"))
        .bind_all((before, limit, narrowed.tenant, &narrowed.actor))
        .bind_all((&narrowed.action, narrowed.since, narrowed.until))
        .fetch_all(db)
        .await
}

/// Entries of a tenant that are searched for changes of its endpoints, newest first, and changes that are read.
const ENTRIES_SEARCHED_MAX: i64 = 2_000;
const CHANGES_READ_MAX: i64 = 300;

/// A change of what an endpoint receives. A setting that was not changed is `None`.
#[derive(Debug, Clone, Default, FromRow)]
pub(crate) struct EndpointChange {
    pub(crate) at: DateTime<Utc>,
    /// The endpoint's public id.
    pub(crate) endpoint: String,
    pub(crate) state_before: Option<Value>,
    pub(crate) state_after: Option<Value>,
    pub(crate) types_before: Option<Value>,
    pub(crate) versions_before: Option<Value>,
    pub(crate) filter_before: Option<Value>,
    /// Why Postrider disabled it.
    pub(crate) reason: Option<String>,
}

/// The latest changes of what a tenant's endpoints receive, newest first, and since when they are complete: `None` if
/// there are no others.
pub(crate) async fn endpoint_changes(
    db: &Pool,
    tenant: TenantId,
) -> sqlx::Result<(Vec<EndpointChange>, Option<DateTime<Utc>>)> {
    let changes: Vec<EndpointChange> = sqlx::query_as(include_str!("sql/audit_endpoint_changes.sql"))
        .bind_all((tenant, ENTRIES_SEARCHED_MAX, CHANGES_READ_MAX))
        .fetch_all(db)
        .await?;
    let unread: Option<DateTime<Utc>> = sqlx::query_scalar(
        "select at from postrider.audit where tenant_id = $1 order by id desc offset $2 limit 1",
    )
    .bind_all((tenant, ENTRIES_SEARCHED_MAX))
    .fetch_optional(db)
    .await?;
    let last = changes
        .last()
        .filter(|_| changes.len() as i64 == CHANGES_READ_MAX);
    let complete_since = unread.max(last.map(|change| change.at));
    Ok((changes, complete_since))
}
