//! Endpoints: where a tenant's events are sent, and how.

use std::collections::BTreeMap;

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::StatusCode,
    response::Response,
};
use chrono::{DateTime, Utc};
use postrider_dispatcher::{tls::TlsFingerprints, vault::Vault};
use postrider_proto::{EndpointState, state::SignatureFormat};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::Answer;
use crate::{
    Shared,
    actions::{
        attempt_view::{HIDDEN, custom_header_names},
        endpoints::{self, NewEndpoint, certificates, form::EndpointForm, rules::write_wait},
    },
    auth::{Actor, Tenant},
    http::{
        idempotency::{Claim, Work},
        input::{Body, Query},
        pagination::{Page, PageQuery},
        problem::Problem,
        shapes,
    },
    tables::endpoints::{self as table, EndpointRow},
};

/// Null where the platform default applies.
#[derive(Serialize, ToSchema)]
#[schema(as = Endpoint)]
pub(crate) struct EndpointView {
    id: String,
    url: String,
    description: Option<String>,
    types: Vec<String>,
    versions: BTreeMap<String, String>,
    #[schema(schema_with = shapes::object_or_null)]
    filter: Option<Value>,
    concurrency: Option<i16>,
    rate_per_second: Option<i32>,
    ordered: bool,
    retry_schedule: Option<Vec<String>>,
    timeout_ms: Option<i32>,
    #[schema(schema_with = shapes::signature)]
    signature: SignatureFormat,
    /// Null: the tenant's policy. 0: never.
    rotate_every_days: Option<i16>,
    /// Header names; the values are masked.
    headers: BTreeMap<String, &'static str>,
    #[schema(schema_with = shapes::tls_fingerprints_or_null)]
    tls: Option<TlsFingerprints>,
    enabled: bool,
    #[schema(schema_with = shapes::endpoint_state)]
    state: EndpointState,
    state_reason: Option<String>,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
    /// The public key that the receiver verifies with, for key pair signatures.
    #[serde(skip_serializing_if = "Option::is_none")]
    public_key: Option<String>,
    /// Returned only on creation, and never a private key.
    #[serde(skip_serializing_if = "Option::is_none")]
    secret: Option<String>,
}

fn view(vault: &Vault, row: EndpointRow) -> EndpointView {
    let headers = custom_header_names(vault, &row);
    let tls = certificates::shown(vault, &row);
    let settings = row.settings;
    EndpointView {
        id: row.public_id,
        url: settings.url,
        description: settings.description,
        types: settings.types,
        versions: settings.versions.map(|json| json.0).unwrap_or_default(),
        filter: settings.filter.map(|json| json.0),
        concurrency: settings.concurrency,
        rate_per_second: settings.rate_per_second,
        ordered: settings.ordered,
        retry_schedule: settings
            .retry_schedule
            .map(|waits| waits.into_iter().map(write_wait).collect()),
        timeout_ms: settings.timeout_ms,
        signature: settings.signature,
        rotate_every_days: settings.rotate_every_days,
        headers: headers.into_iter().map(|name| (name, HIDDEN)).collect(),
        tls,
        enabled: settings.state == EndpointState::Active,
        state: settings.state,
        state_reason: settings.state_reason,
        created_at: row.created_at,
        updated_at: row.updated_at,
        public_key: row.public_key,
        secret: None,
    }
}

pub(crate) async fn create(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    claim: Claim,
    Body(form): Body<EndpointForm>,
) -> Result<Response, Problem> {
    let new = NewEndpoint::read(form, &app.guard)?;
    let mut work = Work::begin(&app, claim).await?;
    let created = endpoints::create(&app, &actor, &tenant, &mut work, new).await?;
    let view = EndpointView {
        secret: created.shown.secret,
        public_key: created.shown.public_key,
        ..view(&app.vault, created.row)
    };
    let response = work.commit(StatusCode::CREATED, &view).await?;
    app.wake.now();
    Ok(response)
}

pub(crate) async fn get(
    State(app): State<Shared>,
    Extension(tenant): Extension<Tenant>,
    Path((_, id)): Path<(String, String)>,
) -> Answer<EndpointView> {
    let row = table::find(&app.pool, tenant.id, &id)
        .await?
        .ok_or_else(|| Problem::not_found("endpoint"))?;
    Ok(Json(view(&app.vault, row)))
}

pub(crate) async fn list(
    State(app): State<Shared>,
    Extension(tenant): Extension<Tenant>,
    Query(query): Query<PageQuery>,
) -> Answer<Page<EndpointView>> {
    let (limit, after) = (query.limit()?, query.after::<i32>()?.unwrap_or_default());
    let rows = table::list(&app.pool, tenant.id, after, limit + 1).await?;
    Ok(Json(
        Page::cut(rows, limit, |row| row.id.0).map(|row| view(&app.vault, row)),
    ))
}

/// Responds once the change is in effect.
pub(crate) async fn patch(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    Path((_, id)): Path<(String, String)>,
    Body(form): Body<EndpointForm>,
) -> Answer<EndpointView> {
    let row = endpoints::change(&app, &actor, &tenant, &id, form).await?;
    Ok(Json(view(&app.vault, row)))
}

/// Responds once no more requests to it are started.
pub(crate) async fn delete(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    Path((_, id)): Path<(String, String)>,
) -> Result<StatusCode, Problem> {
    endpoints::delete(&app, &actor, &tenant, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}
