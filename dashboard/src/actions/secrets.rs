//! Signing secrets: revealed to their owner, and rotated with an overlap in which both sign.

use chrono::{DateTime, Utc};
use postrider_dispatcher::{
    planned_rotation::{Rotating, SECRETS_IN_FORCE_MAX},
    vault::{Owner, Purpose, Vault},
};
use postrider_proto::{Shard, api::SecretValue, limits::OVERLAP_SECONDS_MAX, signature::Secret};
use serde_json::json;
use sqlx::PgConnection;

use crate::{
    App,
    actions::endpoints::{lock_endpoint, rules::check_secret},
    auth::{Actor, Tenant},
    http::problem::{Kind, Problem},
    tables::{
        self,
        audit::{self, Action, Entry},
        endpoints, secrets,
    },
};

const OVERLAP_SECONDS_DEFAULT: i32 = 24 * 60 * 60;

/// An active secret, decrypted.
pub(crate) struct Opened {
    pub(crate) secret: Secret,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) retires_at: Option<DateTime<Utc>>,
}

/// Newest first.
pub(crate) async fn open_in_force(
    vault: &Vault,
    connection: &mut PgConnection,
    owner: Owner,
) -> Result<Vec<Opened>, Problem> {
    let rows = secrets::in_force(connection, owner.endpoint).await?;
    rows.into_iter()
        .map(|row| {
            let clear = vault.open(owner, Purpose::Secret, &row.ciphertext);
            let text = clear.ok().and_then(|bytes| String::from_utf8(bytes).ok());
            let text = text.ok_or_else(|| {
                tracing::error!(endpoint = %owner.endpoint, "stored secret can't be decrypted with the master key");
                Problem::new(
                    Kind::Internal,
                    "A stored secret can't be decrypted with the master key.",
                )
            })?;
            Ok(Opened {
                secret: Secret::new(text),
                created_at: row.created_at,
                retires_at: row.retires_at,
            })
        })
        .collect()
}

/// Stores a new current secret, encrypted, and returns the part of it that is shown.
pub(crate) async fn keep(
    vault: &Vault,
    connection: &mut PgConnection,
    owner: Owner,
    secret: &Secret,
) -> Result<SecretValue, Problem> {
    let sealed = vault.seal(owner, Purpose::Secret, secret.reveal().as_bytes());
    let shown = SecretValue::from(secret);
    secrets::insert(connection, owner.endpoint, &sealed, shown.public_key.as_deref()).await?;
    Ok(shown)
}

/// Newest first. Recorded in the audit log.
pub(crate) async fn reveal(
    app: &App,
    actor: &Actor,
    tenant: &Tenant,
    endpoint: &str,
) -> Result<Vec<Opened>, Problem> {
    let mut transaction = tables::begin(&app.pool).await?;
    let row = endpoints::find(&mut *transaction, tenant.id, endpoint)
        .await?
        .ok_or_else(|| Problem::not_found("endpoint"))?;
    let opened = open_in_force(&app.vault, &mut transaction, row.owner()).await?;
    let entry = Entry::new(actor, Action::SecretRevealed, Some(tenant.id), endpoint);
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    Ok(opened)
}

/// A validated request to rotate.
pub(crate) struct Rotation {
    overlap_seconds: i32,
    secret: Option<String>,
}

impl Rotation {
    /// Without a secret, one is generated.
    pub(crate) fn read(overlap_seconds: Option<i64>, secret: Option<String>) -> Result<Self, Problem> {
        Ok(Self {
            overlap_seconds: read_overlap(overlap_seconds)?,
            secret,
        })
    }
}

/// The secrets in force after a rotation, newest first, and the shard that has to apply it.
pub(crate) struct Rotated {
    pub(crate) secrets: Vec<Opened>,
    pub(crate) shard: Shard,
}

/// The new secret signs from now on; the previous one also signs until it retires. Runs in the caller's transaction.
pub(crate) async fn rotate(
    app: &App,
    actor: &Actor,
    tenant: &Tenant,
    endpoint: &str,
    connection: &mut PgConnection,
    rotation: Rotation,
) -> Result<Rotated, Problem> {
    let overlap = rotation.overlap_seconds;
    let row = lock_endpoint(connection, tenant.id, endpoint).await?;
    let secret = match rotation.secret {
        Some(own) => {
            check_secret(&own, row.settings.signature).map_err(|why| Problem::invalid("/secret", why))?;
            Secret::new(own)
        }
        None => Secret::generate(row.settings.signature, &rand::random()),
    };
    let before = open_in_force(&app.vault, connection, row.owner()).await?;
    if before.iter().any(|old| old.secret == secret) {
        return Err(Problem::invalid("/secret", "is already active for this endpoint"));
    }
    secrets::retire(&mut *connection, row.id, overlap).await?;
    keep(&app.vault, connection, row.owner(), &secret).await?;
    let opened = open_in_force(&app.vault, connection, row.owner()).await?;
    if opened.len() as i64 > SECRETS_IN_FORCE_MAX {
        return Err(Problem::limit_reached(format!(
            "At most {SECRETS_IN_FORCE_MAX} secrets can be active at a time. Wait until one retires, or rotate with an overlap \
             of 0, which revokes all older secrets immediately."
        )));
    }
    let entry = Entry::new(actor, Action::SecretRotated, Some(tenant.id), endpoint)
        .with(json!({"overlap_seconds": overlap}));
    audit::write(connection, entry).await?;
    let rotating = Rotating {
        tenant: tenant.id,
        endpoint,
        url: &row.settings.url,
        rotates_at: opened
            .first()
            .map_or_else(DateTime::default, |new| new.created_at),
        overlap_seconds: overlap,
    };
    if let Some(refusal) = rotating.announce(connection).await? {
        tracing::warn!(endpoint, refusal, "could not emit the rotation event");
    }
    Ok(Rotated {
        secrets: opened,
        shard: row.shard,
    })
}

fn read_overlap(seconds: Option<i64>) -> Result<i32, Problem> {
    match seconds {
        None => Ok(OVERLAP_SECONDS_DEFAULT),
        Some(seconds) => i32::try_from(seconds)
            .ok()
            .filter(|seconds| (0..=OVERLAP_SECONDS_MAX).contains(seconds))
            .ok_or_else(|| {
                Problem::invalid(
                    "/overlap_seconds",
                    format!("must be a whole number from 0 to {OVERLAP_SECONDS_MAX}"),
                )
            }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overlap_is_at_most_a_week() {
        assert_eq!(read_overlap(None).ok(), Some(86_400));
        assert_eq!(read_overlap(Some(0)).ok(), Some(0));
        assert_eq!(read_overlap(Some(604_800)).ok(), Some(604_800));
        for bad in [-1, 604_801, i64::MAX] {
            assert!(read_overlap(Some(bad)).is_err(), "{bad}");
        }
    }
}
