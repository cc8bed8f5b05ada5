//! Tenants: the customers of the team that runs Postrider.

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use chrono::{DateTime, Utc};
use postrider_proto::{
    limits::{DESCRIPTION_BYTES_MAX, ROTATE_DAYS_MAX, ROTATE_DAYS_MIN},
    routing::is_tenant_slug,
};
use serde::{Deserialize, Serialize};

use super::{Answer, endpoint_rules::Faults};
use crate::{
    Shared,
    audit::{self, Action, Entry},
    auth::{Actor, Tenant},
    input::{OptionalBody, Query, is_plain_text},
    listing::{Page, PageQuery},
    problem::Problem,
    settled::{self, settled},
    tables::{self, api_keys, endpoints, tenants::TenantRow},
};

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TenantForm {
    pub(crate) name: Option<String>,
    /// Null is never. Endpoints may have their own.
    pub(crate) rotate_every_days: Option<i64>,
}

#[derive(Serialize)]
pub(crate) struct TenantView {
    id: String,
    name: Option<String>,
    rotate_every_days: Option<i16>,
    created_at: DateTime<Utc>,
}

impl From<TenantRow> for TenantView {
    fn from(row: TenantRow) -> Self {
        Self {
            id: row.slug,
            name: row.name,
            rotate_every_days: row.rotate_every_days,
            created_at: row.created_at,
        }
    }
}

pub(crate) async fn put(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Path(slug): Path<String>,
    OptionalBody(form): OptionalBody<TenantForm>,
) -> Result<Response, Problem> {
    let (row, is_new) = store(&app, &actor, &slug, form).await?;
    let status = if is_new {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    Ok((status, Json(TenantView::from(row))).into_response())
}

/// Makes the tenant or changes it; tells whether it is new.
pub(crate) async fn store(
    app: &Shared,
    actor: &Actor,
    slug: &str,
    form: TenantForm,
) -> Result<(TenantRow, bool), Problem> {
    if !is_tenant_slug(slug) {
        return Err(Problem::invalid(
            "",
            "a tenant's id begins with a letter or digit and has at most 64 of A-Z a-z 0-9 _ . -",
        ));
    }
    let fits = |name: &String| is_plain_text(name, DESCRIPTION_BYTES_MAX);
    if !form.name.as_ref().is_none_or(fits) {
        return Err(Problem::invalid(
            "/name",
            format!("a name is text of at most {DESCRIPTION_BYTES_MAX} bytes"),
        ));
    }
    let mut faults = Faults::default();
    let rotate_every_days = faults.number(
        "rotate_every_days",
        form.rotate_every_days,
        ROTATE_DAYS_MIN,
        ROTATE_DAYS_MAX,
    );
    faults.done()?;
    let mut transaction = tables::begin(&app.pool).await?;
    let (row, is_new) =
        tables::tenants::put(&mut *transaction, slug, form.name.as_deref(), rotate_every_days).await?;
    let entry = Entry {
        actor,
        action: Action::TenantPut,
        tenant: Some(row.id),
        subject: slug,
        detail: None,
    };
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    Ok((row, is_new))
}

pub(crate) async fn get(
    State(app): State<Shared>,
    Extension(tenant): Extension<Tenant>,
) -> Answer<TenantView> {
    let row = tables::tenants::find(&app.pool, &tenant.slug)
        .await?
        .ok_or_else(|| Problem::not_found("tenant"))?;
    Ok(Json(row.into()))
}

/// Its endpoints go with it, and its keys no longer work. Answers when nothing more is sent for it.
pub(crate) async fn delete(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Path(slug): Path<String>,
) -> Result<StatusCode, Problem> {
    remove(&app, &actor, &slug).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(crate) async fn remove(app: &Shared, actor: &Actor, slug: &str) -> Result<(), Problem> {
    let tenant = tables::tenants::find(&app.pool, slug)
        .await?
        .ok_or_else(|| Problem::not_found("tenant"))?;
    let mut transaction = tables::begin(&app.pool).await?;
    if !tables::tenants::lock(&mut *transaction, tenant.id).await? {
        return Err(Problem::not_found("tenant"));
    }
    tables::tenants::delete(&mut *transaction, tenant.id).await?;
    let mut shards = endpoints::delete_all(&mut *transaction, tenant.id).await?;
    api_keys::revoke_all(&mut *transaction, tenant.id).await?;
    let entry = Entry {
        actor,
        action: Action::TenantDeleted,
        tenant: Some(tenant.id),
        subject: slug,
        detail: None,
    };
    audit::write(&mut transaction, entry).await?;
    let xid = settled::current(&mut transaction).await?;
    transaction.commit().await?;
    app.wake.now();
    shards.sort_unstable();
    shards.dedup();
    for shard in shards {
        settled(&app.pool, shard, &xid).await?;
    }
    Ok(())
}

pub(crate) async fn list(
    State(app): State<Shared>,
    Query(query): Query<PageQuery>,
) -> Answer<Page<TenantView>> {
    let (limit, after) = (query.limit()?, query.after::<String>()?.unwrap_or_default());
    let rows = tables::tenants::list(&app.pool, &after, limit + 1).await?;
    Ok(Json(
        Page::cut(rows, limit, |row| row.slug.clone()).map(TenantView::from),
    ))
}
