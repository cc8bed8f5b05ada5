//! Signing secrets: shown to whom they belong, and rotated with an overlap in which both sign.

use axum::{
    Extension, Json,
    extract::{Path, State},
};
use chrono::{DateTime, Utc};
use postrider_dispatcher::vault::{Purpose, Vault};
use postrider_proto::{EndpointId, signature::Secret};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sqlx::PgConnection;

use super::{Answer, endpoint_rules::check_secret};
use crate::{
    Shared,
    audit::{self, Action, Entry},
    auth::{Actor, Tenant},
    input::OptionalBody,
    problem::{Kind, Problem},
    settled::{self, settled},
    tables::{self, endpoints, secrets},
};

/// Each signs every request: more would only make the header longer.
const SECRETS_IN_FORCE_MAX: usize = 3;
const OVERLAP_SECONDS_MAX: i32 = 7 * 24 * 60 * 60;
const OVERLAP_SECONDS_DEFAULT: i32 = 24 * 60 * 60;

#[derive(Serialize)]
pub(crate) struct SecretView {
    pub(super) secret: String,
    /// `current`, or `retiring` until a set time.
    state: &'static str,
    created_at: DateTime<Utc>,
    retires_at: Option<DateTime<Utc>>,
}

#[derive(Serialize)]
pub(crate) struct Secrets {
    /// The newest first.
    data: Vec<SecretView>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RotateForm {
    overlap_seconds: Option<i64>,
    secret: Option<String>,
}

pub(super) async fn open_in_force(
    vault: &Vault,
    connection: &mut PgConnection,
    endpoint: EndpointId,
) -> Result<Vec<SecretView>, Problem> {
    let rows = secrets::in_force(connection, endpoint).await?;
    rows.into_iter()
        .map(|row| {
            let clear = vault.open(endpoint, Purpose::Secret, &row.ciphertext);
            let text = clear.ok().and_then(|bytes| String::from_utf8(bytes).ok());
            let secret = text.ok_or_else(|| {
                tracing::error!(%endpoint, "a stored secret does not open with the master key");
                Problem::new(
                    Kind::Internal,
                    "A stored secret can't be opened with the master key.",
                )
            })?;
            Ok(SecretView {
                secret,
                state: if row.retires_at.is_none() {
                    "current"
                } else {
                    "retiring"
                },
                created_at: row.created_at,
                retires_at: row.retires_at,
            })
        })
        .collect()
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
    let data = open_in_force(&app.vault, &mut transaction, endpoint.id).await?;
    let entry = Entry {
        actor: &actor,
        action: Action::SecretRevealed,
        tenant: Some(tenant.id),
        subject: &id,
        detail: None,
    };
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    Ok(Json(Secrets { data }))
}

/// The new secret signs from now on; the one before signs too until its time.
pub(crate) async fn rotate(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    Path((_, id)): Path<(String, String)>,
    OptionalBody(form): OptionalBody<RotateForm>,
) -> Answer<Secrets> {
    let overlap = read_overlap(form.overlap_seconds)?;
    let mut transaction = tables::begin(&app.pool).await?;
    let endpoint = endpoints::lock(&mut *transaction, tenant.id, &id)
        .await?
        .ok_or_else(|| Problem::not_found("endpoint"))?;
    let secret = match form.secret {
        Some(own) => {
            check_secret(&own, endpoint.settings.signature)
                .map_err(|why| Problem::invalid("/secret", why))?;
            Secret::new(own)
        }
        None => Secret::from_random(&rand::random()),
    };
    let before = open_in_force(&app.vault, &mut transaction, endpoint.id).await?;
    if before.iter().any(|old| old.secret == secret.reveal()) {
        return Err(Problem::invalid("/secret", "is in force already"));
    }
    secrets::retire_current(&mut *transaction, endpoint.id, overlap).await?;
    let sealed = app
        .vault
        .seal(endpoint.id, Purpose::Secret, secret.reveal().as_bytes());
    secrets::insert(&mut *transaction, endpoint.id, &sealed).await?;
    let data = open_in_force(&app.vault, &mut transaction, endpoint.id).await?;
    if data.len() > SECRETS_IN_FORCE_MAX {
        return Err(Problem::conflict(format!(
            "At most {SECRETS_IN_FORCE_MAX} secrets are in force at a time: wait until one retires."
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
    let xid = settled::current(&mut transaction).await?;
    transaction.commit().await?;
    app.wake.now();
    settled(&app.pool, endpoint.shard, &xid).await?;
    Ok(Json(Secrets { data }))
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
