//! Signing secrets: revealed to their owner, and rotated with an overlap in which both sign.

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::StatusCode,
    response::Response,
};
use chrono::{DateTime, Utc};
use postrider_dispatcher::{
    planned_rotation::{Rotating, SECRETS_IN_FORCE_MAX},
    vault::{Owner, Purpose, Vault},
};
use postrider_proto::{limits::OVERLAP_SECONDS_MAX, signature::Secret};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sqlx::PgConnection;
use utoipa::ToSchema;

use super::{Answer, endpoint_rules::check_secret};
use crate::{
    Shared,
    actions::{
        audit::{self, Action, Entry},
        wait_until_applied::settled,
    },
    auth::{Actor, Tenant},
    http::{
        idempotency::{Claim, Work},
        input::OptionalBody,
        problem::{Kind, Problem},
    },
    openapi::shapes,
    tables::{self, endpoints, secrets},
};

const OVERLAP_SECONDS_DEFAULT: i32 = 24 * 60 * 60;

/// The part of a secret that is shown: an HMAC secret itself, but only the public key of a key pair.
#[derive(Serialize, ToSchema)]
#[schema(as = SecretValue)]
pub(crate) struct Shown {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) secret: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) public_key: Option<String>,
}

impl From<&Secret> for Shown {
    fn from(secret: &Secret) -> Self {
        match secret.public_key() {
            Some(key) => Self {
                secret: None,
                public_key: Some(key.to_string()),
            },
            None => Self {
                secret: Some(secret.reveal().to_owned()),
                public_key: None,
            },
        }
    }
}

#[derive(Serialize, ToSchema)]
#[schema(as = Secret)]
pub(crate) struct SecretView {
    #[serde(flatten)]
    shown: Shown,
    /// `current`, or `retiring` until a set time.
    #[schema(schema_with = shapes::secret_state)]
    state: &'static str,
    created_at: DateTime<Utc>,
    retires_at: Option<DateTime<Utc>>,
}

/// An active secret, decrypted.
pub(crate) struct Opened {
    pub(crate) secret: Secret,
    created_at: DateTime<Utc>,
    retires_at: Option<DateTime<Utc>>,
}

impl From<Opened> for SecretView {
    fn from(opened: Opened) -> Self {
        Self {
            shown: Shown::from(&opened.secret),
            state: match opened.retires_at {
                None => "current",
                Some(_) => "retiring",
            },
            created_at: opened.created_at,
            retires_at: opened.retires_at,
        }
    }
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Secrets {
    /// Newest first.
    data: Vec<SecretView>,
}

impl From<Vec<Opened>> for Secrets {
    fn from(opened: Vec<Opened>) -> Self {
        Self {
            data: opened.into_iter().map(SecretView::from).collect(),
        }
    }
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = SecretRotationRequest)]
pub(crate) struct RotateForm {
    #[schema(schema_with = shapes::overlap_or_null)]
    overlap_seconds: Option<i64>,
    #[schema(schema_with = shapes::secret_or_null)]
    secret: Option<String>,
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
pub(super) async fn keep(
    vault: &Vault,
    connection: &mut PgConnection,
    owner: Owner,
    secret: &Secret,
) -> Result<Shown, Problem> {
    let sealed = vault.seal(owner, Purpose::Secret, secret.reveal().as_bytes());
    let shown = Shown::from(secret);
    secrets::insert(connection, owner.endpoint, &sealed, shown.public_key.as_deref()).await?;
    Ok(shown)
}

pub(crate) async fn reveal(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    Path((_, id)): Path<(String, String)>,
) -> Answer<Secrets> {
    let mut transaction = tables::begin(&app.pool).await?;
    let endpoint = endpoints::find(&mut *transaction, tenant.id, &id)
        .await?
        .ok_or_else(|| Problem::not_found("endpoint"))?;
    let opened = open_in_force(&app.vault, &mut transaction, endpoint.owner()).await?;
    let entry = Entry {
        actor: &actor,
        action: Action::SecretRevealed,
        tenant: Some(tenant.id),
        subject: &id,
        detail: None,
    };
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    Ok(Json(Secrets::from(opened)))
}

/// The new secret signs from now on; the previous one also signs until it retires.
pub(crate) async fn rotate(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    Path((_, id)): Path<(String, String)>,
    claim: Claim,
    OptionalBody(form): OptionalBody<RotateForm>,
) -> Result<Response, Problem> {
    let overlap = read_overlap(form.overlap_seconds)?;
    let mut transaction = Work::begin(&app, claim).await?;
    let endpoint = endpoints::lock(&mut *transaction, tenant.id, &id)
        .await?
        .ok_or_else(|| Problem::not_found("endpoint"))?;
    let secret = match form.secret {
        Some(own) => {
            check_secret(&own, endpoint.settings.signature)
                .map_err(|why| Problem::invalid("/secret", why))?;
            Secret::new(own)
        }
        None => Secret::generate(endpoint.settings.signature, &rand::random()),
    };
    let before = open_in_force(&app.vault, &mut transaction, endpoint.owner()).await?;
    if before.iter().any(|old| old.secret == secret) {
        return Err(Problem::invalid("/secret", "is already active for this endpoint"));
    }
    secrets::retire(&mut *transaction, endpoint.id, overlap).await?;
    keep(&app.vault, &mut transaction, endpoint.owner(), &secret).await?;
    let opened = open_in_force(&app.vault, &mut transaction, endpoint.owner()).await?;
    if opened.len() as i64 > SECRETS_IN_FORCE_MAX {
        return Err(Problem::limit_reached(format!(
            "At most {SECRETS_IN_FORCE_MAX} secrets can be active at a time. Wait until one retires, or rotate with an overlap \
             of 0, which revokes all older secrets immediately."
        )));
    }
    let entry = Entry {
        actor: &actor,
        action: Action::SecretRotated,
        tenant: Some(tenant.id),
        subject: &id,
        detail: Some(json!({"overlap_seconds": overlap})),
    };
    audit::write(&mut transaction, entry).await?;
    let rotating = Rotating {
        tenant: tenant.id,
        endpoint: &id,
        url: &endpoint.settings.url,
        rotates_at: opened
            .first()
            .map_or_else(DateTime::default, |new| new.created_at),
        overlap_seconds: overlap,
    };
    if let Some(refusal) = rotating.tell(&mut transaction).await? {
        tracing::warn!(endpoint = id, refusal, "could not emit the rotation event");
    }
    let xid = transaction.settles(endpoint.shard).await?;
    let response = transaction.commit(StatusCode::OK, &Secrets::from(opened)).await?;
    app.wake.now();
    settled(&app.pool, endpoint.shard, &xid).await?;
    Ok(response)
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
