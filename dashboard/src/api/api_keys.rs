//! API keys: create, list without the secret part, revoke.

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::StatusCode,
    response::Response,
};
use chrono::{DateTime, Utc};
use data_encoding::BASE64URL_NOPAD;
use postrider_proto::{limits::KEY_NAME_BYTES_MAX, state::KeyRole};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sqlx::PgConnection;
use utoipa::ToSchema;

use super::Answer;
use crate::{
    Shared,
    auth::{Actor, fingerprint},
    http::{
        idempotency::{Claim, Work},
        input::{Body, Query, is_plain_text},
        pagination::{Page, PageQuery},
        problem::{Problem, excerpt},
        shapes,
    },
    tables::{
        self, api_keys,
        audit::{self, Action, Entry},
        tenants,
    },
};

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewApiKey)]
pub(crate) struct KeyForm {
    #[schema(schema_with = shapes::key_role)]
    pub(crate) role: KeyRole,
    pub(crate) tenant: Option<String>,
    #[schema(schema_with = shapes::key_name)]
    pub(crate) name: String,
}

#[derive(Serialize, ToSchema)]
#[schema(as = ApiKey)]
pub(crate) struct KeyView {
    id: String,
    #[schema(schema_with = shapes::key_role)]
    role: KeyRole,
    tenant: Option<String>,
    pub(crate) name: String,
    created_at: DateTime<Utc>,
    revoked_at: Option<DateTime<Utc>>,
    /// Returned only on creation: the key itself is not stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) key: Option<String>,
}

pub(crate) async fn create(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    claim: Claim,
    Body(form): Body<KeyForm>,
) -> Result<Response, Problem> {
    let mut work = Work::begin(&app, claim).await?;
    let view = make(&mut work, &actor, form).await?;
    if let Some(tenant) = &view.tenant {
        work.is_of(tenant);
    }
    work.commit(StatusCode::CREATED, &view).await
}

/// Runs in the caller's transaction. The key is returned here and not stored anywhere.
pub(crate) async fn make(
    connection: &mut PgConnection,
    actor: &Actor,
    form: KeyForm,
) -> Result<KeyView, Problem> {
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
    let entry = Entry {
        actor,
        action: Action::KeyCreated,
        tenant,
        subject: &public_id,
        detail: Some(json!({"role": form.role, "name": form.name})),
    };
    audit::write(connection, entry).await?;
    Ok(KeyView {
        id: public_id,
        role: form.role,
        tenant: form.tenant,
        name: form.name,
        created_at,
        revoked_at: None,
        key: Some(key),
    })
}

pub(crate) async fn list(State(app): State<Shared>, Query(query): Query<PageQuery>) -> Answer<Page<KeyView>> {
    let (limit, after) = (query.limit()?, query.after::<i32>()?.unwrap_or_default());
    let rows = api_keys::list(&app.pool, after, limit + 1).await?;
    Ok(Json(Page::cut(rows, limit, |row| row.id).map(|row| KeyView {
        id: row.public_id,
        role: row.role,
        tenant: row.tenant,
        name: row.name,
        created_at: row.created_at,
        revoked_at: row.revoked_at,
        key: None,
    })))
}

pub(crate) async fn revoke(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Path(id): Path<String>,
) -> Result<StatusCode, Problem> {
    end(&app, &actor, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Takes effect immediately.
pub(crate) async fn end(app: &Shared, actor: &Actor, id: &str) -> Result<(), Problem> {
    let mut transaction = tables::begin(&app.pool).await?;
    if !api_keys::revoke(&mut *transaction, id).await? {
        return Err(Problem::not_found("active API key"));
    }
    let entry = Entry {
        actor,
        action: Action::KeyRevoked,
        tenant: None,
        subject: id,
        detail: None,
    };
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    Ok(())
}
