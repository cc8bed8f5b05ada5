//! Endpoints: where a tenant's events are sent, and how.

use std::collections::BTreeMap;

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::StatusCode,
    response::Response,
};
use chrono::{DateTime, Utc};
use postrider_dispatcher::{
    tls::TlsFingerprints,
    vault::{Owner, Purpose, Vault},
};
use postrider_proto::{
    EndpointState, Shard,
    limits::{ENDPOINTS_PER_TENANT_MAX, SHARDS},
    signature::Secret,
    state::SignatureFormat,
};
use rand::RngExt;
use serde::Serialize;
use serde_json::Value;
use sqlx::PgConnection;
use url::Url;
use utoipa::ToSchema;

use super::{
    Answer,
    endpoint_certificates::{self, keep_tls},
    endpoint_form::EndpointForm,
    endpoint_rules::{Faults, check_secret, write_wait},
    secrets::{keep, open_in_force},
};
use crate::{
    Shared,
    actions::{
        audit::{self, Action, Entry},
        wait_until_applied::{self, settled},
    },
    auth::{Actor, Tenant},
    http::{
        idempotency::{Claim, Work},
        input::{Body, Query},
        pagination::{Page, PageQuery},
        problem::Problem,
    },
    openapi::shapes,
    tables::{
        self,
        attempt_view::{HIDDEN, custom_header_names},
        endpoints::{self as table, EndpointRow, EndpointSettings},
        schemas,
    },
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
    let tls = endpoint_certificates::shown(vault, &row);
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

/// Bound to the endpoint's number, so the row must exist first.
fn seal_headers(
    vault: &Vault,
    owner: Owner,
    headers: &BTreeMap<String, String>,
) -> Result<Option<Vec<u8>>, Problem> {
    if headers.is_empty() {
        return Ok(None);
    }
    let clear = serde_json::to_vec(headers)
        .map_err(|error| Problem::bad_request(format!("The headers could not be stored: {error}.")))?;
    Ok(Some(vault.seal(owner, Purpose::Headers, &clear)))
}

pub(crate) async fn create(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    claim: Claim,
    Body(form): Body<EndpointForm>,
) -> Result<Response, Problem> {
    let settings = form.create(&app.guard)?;
    let secret = match form.secret.flatten() {
        Some(own) => Secret::new(own),
        None => Secret::generate(settings.signature, &rand::random()),
    };
    let shard = Shard(rand::rng().random_range(0..SHARDS));

    let mut transaction = Work::begin(&app, claim).await?;
    check_pins(&mut transaction, &settings, None).await?;
    if !tables::tenants::lock(&mut *transaction, tenant.id).await? {
        return Err(Problem::not_found("tenant"));
    }
    if table::count(&mut *transaction, tenant.id).await? >= ENDPOINTS_PER_TENANT_MAX {
        return Err(Problem::limit_reached(format!(
            "A tenant can have at most {ENDPOINTS_PER_TENANT_MAX} endpoints. Delete one first."
        )));
    }
    let public_id = tables::random_public_id("ep");
    let mut row = table::insert(&mut *transaction, tenant.id, &public_id, shard, &settings).await?;
    let headers = form.headers.flatten().unwrap_or_default();
    if let Some(sealed) = seal_headers(&app.vault, row.owner(), &headers)? {
        row = table::update(&mut *transaction, row.id, &settings, Some(&sealed)).await?;
    }
    keep_tls(&app.vault, &mut *transaction, &mut row, form.tls).await?;
    let shown = keep(&app.vault, &mut transaction, row.owner(), &secret).await?;
    let entry = Entry {
        actor: &actor,
        action: Action::EndpointCreated,
        tenant: Some(tenant.id),
        subject: &public_id,
        detail: Some(serde_json::json!({"url": settings.url})),
    };
    audit::write(&mut transaction, entry).await?;
    let mut view = view(&app.vault, row);
    (view.secret, view.public_key) = (shown.secret, shown.public_key);
    let response = transaction.commit(StatusCode::CREATED, &view).await?;
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
    let mut transaction = tables::begin(&app.pool).await?;
    let before = table::lock(&mut *transaction, tenant.id, &id)
        .await?
        .ok_or_else(|| Problem::not_found("endpoint"))?;
    let settings = form.patch(before.settings.clone(), &app.guard)?;
    check_pins(&mut transaction, &settings, Some(&before.settings)).await?;
    if settings.signature != before.settings.signature {
        for opened in open_in_force(&app.vault, &mut transaction, before.owner()).await? {
            check_secret(opened.secret.reveal(), settings.signature).map_err(|why| {
                Problem::invalid(
                    "/signature",
                    format!("the endpoint's current secret can't be used with this format: it {why}"),
                )
            })?;
        }
    }
    let sealed = match form.headers {
        Some(headers) => seal_headers(&app.vault, before.owner(), &headers.unwrap_or_default())?,
        // A caller who can change the URL must not receive the old host's credentials.
        None if is_elsewhere(&before.settings, &settings) => None,
        None => before.headers,
    };
    let mut row = table::update(&mut *transaction, before.id, &settings, sealed.as_deref()).await?;
    keep_tls(&app.vault, &mut *transaction, &mut row, form.tls).await?;
    let was_active = before.settings.state == EndpointState::Active;
    if !was_active && settings.state == EndpointState::Active {
        table::forget_failures(&mut *transaction, row.id).await?;
    }
    let entry = Entry {
        actor: &actor,
        action: Action::EndpointChanged,
        tenant: Some(tenant.id),
        subject: &id,
        detail: Some(serde_json::json!({"url": settings.url, "state": settings.state})),
    };
    audit::write(&mut transaction, entry).await?;
    let xid = wait_until_applied::current(&mut transaction).await?;
    transaction.commit().await?;
    app.wake.now();
    settled(&app.pool, row.shard, &xid).await?;
    Ok(Json(view(&app.vault, row)))
}

/// A pin to an unpublished version would never match. Existing pins are kept even if their type was deleted: that is
/// no reason to reject an unrelated change.
async fn check_pins(
    connection: &mut PgConnection,
    settings: &EndpointSettings,
    before: Option<&EndpointSettings>,
) -> Result<(), Problem> {
    let pins = |settings: &EndpointSettings| settings.versions.clone().map(|json| json.0).unwrap_or_default();
    let had = before.map(pins).unwrap_or_default();
    let mut wanted = pins(settings);
    wanted.retain(|name, version| had.get(name) != Some(version));
    if wanted.is_empty() {
        return Ok(());
    }
    let (types, versions): (Vec<&str>, Vec<&str>) = wanted
        .iter()
        .map(|(name, version)| (name.as_str(), version.as_str()))
        .unzip();
    let there: BTreeMap<String, Option<String>> = schemas::are_there(connection, &types, &versions)
        .await?
        .into_iter()
        .collect();
    let mut faults = Faults::default();
    for (name, version) in &wanted {
        match there.get(name) {
            None => faults.add(
                &format!("versions/{name}"),
                format!("event type `{name}` does not exist"),
            ),
            Some(None) => faults.add(
                &format!("versions/{name}"),
                format!("event type `{name}` has no version `{version}`"),
            ),
            Some(Some(_)) => {}
        }
    }
    faults.done()
}

/// A different host or port, or the same host without TLS.
fn is_elsewhere(before: &EndpointSettings, after: &EndpointSettings) -> bool {
    let place = |settings: &EndpointSettings| {
        let url = Url::parse(&settings.url).ok()?;
        Some((
            url.scheme().to_owned(),
            url.host_str()?.to_owned(),
            url.port_or_known_default(),
        ))
    };
    place(before) != place(after)
}

/// Responds once no more requests to it are started.
pub(crate) async fn delete(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    Path((_, id)): Path<(String, String)>,
) -> Result<StatusCode, Problem> {
    let mut transaction = tables::begin(&app.pool).await?;
    let row = table::lock(&mut *transaction, tenant.id, &id)
        .await?
        .ok_or_else(|| Problem::not_found("endpoint"))?;
    table::delete(&mut *transaction, row.id).await?;
    let entry = Entry {
        actor: &actor,
        action: Action::EndpointDeleted,
        tenant: Some(tenant.id),
        subject: &id,
        detail: None,
    };
    audit::write(&mut transaction, entry).await?;
    let xid = wait_until_applied::current(&mut transaction).await?;
    transaction.commit().await?;
    app.wake.now();
    settled(&app.pool, row.shard, &xid).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::endpoint_form::blank;

    #[test]
    fn another_host_or_port_is_elsewhere_and_another_path_is_not() {
        let at = |url: &str| EndpointSettings {
            url: url.to_owned(),
            ..blank()
        };
        let before = at("https://a.example.com/x");
        assert!(!is_elsewhere(&before, &at("https://a.example.com:443/y?z")));
        assert!(is_elsewhere(&before, &at("https://b.example.com/x")));
        assert!(is_elsewhere(&before, &at("https://a.example.com:444/x")));
        assert!(is_elsewhere(&before, &at("http://a.example.com/x")));
        assert!(is_elsewhere(
            &at("https://a.example.com:8443/x"),
            &at("http://a.example.com:8443/x")
        ));
    }
}
