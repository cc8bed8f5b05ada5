//! API keys: create and revoke.

use chrono::{DateTime, TimeDelta, Utc};
use data_encoding::BASE64URL_NOPAD;
use postrider_proto::{
    api::{ApiKey, NewApiKey},
    limits::KEY_NAME_BYTES_MAX,
    state::KeyRole,
};
use serde_json::json;
use sqlx::PgConnection;

use crate::{
    App,
    auth::{Actor, fingerprint},
    http::{
        input::is_plain_text,
        problem::{Problem, excerpt},
    },
    tables::{
        self,
        api_keys::{self, NewKey},
        audit::{self, Action, Entry},
        tenants,
    },
};

/// A key that is meant to last longer has no expiry.
const EXPIRY_MAX: TimeDelta = TimeDelta::days(3_650);
/// The start of a key that stays visible: `prk_` and four characters.
const PREFIX_CHARS: usize = 8;

fn check_expiry(expires_at: Option<DateTime<Utc>>, now: DateTime<Utc>) -> Result<(), Problem> {
    match expires_at {
        Some(time) if time <= now || time > now + EXPIRY_MAX => Err(Problem::invalid(
            "/expires_at",
            format!(
                "must be in the future and at most {} days away, not {}",
                EXPIRY_MAX.num_days(),
                time.to_rfc3339()
            ),
        )),
        _ => Ok(()),
    }
}

/// Runs in the caller's transaction. The key is returned here and not stored anywhere.
pub(crate) async fn make(
    connection: &mut PgConnection,
    actor: &Actor,
    form: NewApiKey,
) -> Result<ApiKey, Problem> {
    if form.name.trim().is_empty() || !is_plain_text(&form.name, KEY_NAME_BYTES_MAX) {
        return Err(Problem::invalid(
            "/name",
            "must be 1 to 128 bytes of text without control characters",
        ));
    }
    let tenant = match (form.role, &form.tenant) {
        (KeyRole::Tenant, Some(slug)) => Some(
            tenants::find(&mut *connection, slug)
                .await?
                .ok_or_else(|| {
                    Problem::invalid("/tenant", format!("tenant `{}` does not exist", excerpt(slug)))
                })?
                .id,
        ),
        (KeyRole::Tenant, None) => {
            return Err(Problem::invalid(
                "/tenant",
                "is required for a key with role `tenant`",
            ));
        }
        (_, Some(_)) => {
            return Err(Problem::invalid(
                "/tenant",
                "is only allowed for a key with role `tenant`",
            ));
        }
        (_, None) => None,
    };
    check_expiry(form.expires_at, tables::now(&mut *connection).await?)?;
    let key = format!("prk_{}", BASE64URL_NOPAD.encode(&rand::random::<[u8; 32]>()));
    let public_id = tables::random_public_id("key");
    if let Some(tenant) = tenant
        && !tenants::lock(&mut *connection, tenant).await?
    {
        return Err(Problem::invalid("/tenant", "tenant does not exist"));
    }
    let hash = fingerprint(&key);
    let prefix = &key[..PREFIX_CHARS];
    let new = NewKey {
        public_id: &public_id,
        hash: &hash,
        prefix,
        role: form.role,
        tenant,
        name: &form.name,
        expires_at: form.expires_at,
    };
    let created_at = api_keys::insert(&mut *connection, new).await?;
    let detail = json!({"role": form.role, "name": form.name, "expires_at": form.expires_at});
    let entry = Entry::new(actor, Action::KeyCreated, tenant, &public_id).with(detail);
    audit::write(connection, entry).await?;
    Ok(ApiKey {
        id: public_id,
        role: form.role,
        tenant: form.tenant,
        name: form.name,
        created_at,
        revoked_at: None,
        prefix: prefix.to_owned(),
        expires_at: form.expires_at,
        last_used_at: None,
        key: Some(key),
    })
}

/// Takes effect immediately.
pub(crate) async fn end(app: &App, actor: &Actor, id: &str) -> Result<(), Problem> {
    let mut transaction = tables::begin(&app.pool).await?;
    if !api_keys::revoke(&mut *transaction, id).await? {
        return Err(Problem::not_found("active API key"));
    }
    let entry = Entry::new(actor, Action::KeyRevoked, None, id);
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    Ok(())
}
