//! API keys: create and revoke.

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
        self, api_keys,
        audit::{self, Action, Entry},
        tenants,
    },
};

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
    let key = format!("prk_{}", BASE64URL_NOPAD.encode(&rand::random::<[u8; 32]>()));
    let public_id = tables::random_public_id("key");
    if let Some(tenant) = tenant
        && !tenants::lock(&mut *connection, tenant).await?
    {
        return Err(Problem::invalid("/tenant", "tenant does not exist"));
    }
    let hash = fingerprint(&key);
    let created_at =
        api_keys::insert(&mut *connection, &public_id, &hash, form.role, tenant, &form.name).await?;
    let entry = Entry::new(actor, Action::KeyCreated, tenant, &public_id)
        .with(json!({"role": form.role, "name": form.name}));
    audit::write(connection, entry).await?;
    Ok(ApiKey {
        id: public_id,
        role: form.role,
        tenant: form.tenant,
        name: form.name,
        created_at,
        revoked_at: None,
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
