//! Listeners: temporary endpoints for people who develop a receiver. The server can't reach their machine, so their
//! machine opens a connection and receives the requests that would have been sent.

use axum::{
    Extension,
    extract::{Path, State},
    http::{HeaderName, Method, StatusCode, header},
    response::{IntoResponse, Response},
};
use chrono::{DateTime, Utc};
use postrider_proto::{
    EndpointState, Shard,
    limits::{ENDPOINTS_PER_TENANT_MAX, SHARDS},
    signature::Secret,
    state::SignatureFormat,
};
use rand::RngExt;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::time::Duration;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{
    Shared,
    actions::{
        endpoints::{
            form::blank,
            rules::{check_secret, check_types},
        },
        listening::{LIFE, STREAMS_MAX, STREAMS_PER_TENANT_MAX, Session},
        secrets::{keep, open_in_force},
    },
    auth::{Actor, Tenant},
    http::{
        idempotency::{Claim, Work},
        input::OptionalBody,
        problem::{Faults, Kind, Problem},
        shapes,
    },
    tables::{
        self,
        audit::{self, Action, Entry},
        endpoints::{self, EndpointSettings},
        listeners,
    },
};
use postrider_dispatcher::vault::Owner;

const LISTENERS_PER_TENANT_MAX: i64 = 10;
/// Nothing is ever sent there: `.invalid` never resolves (RFC 6761).
const NOWHERE: &str = "https://listener.invalid/";

#[derive(Default, Deserialize, ToSchema)]
#[schema(as = NewListener)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListenerForm {
    #[schema(schema_with = shapes::patterns_or_null)]
    types: Option<Vec<String>>,
    #[schema(schema_with = shapes::signature_or_null)]
    signature: Option<SignatureFormat>,
    #[schema(schema_with = shapes::secret_or_null)]
    secret: Option<String>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = Listener)]
pub(crate) struct ListenerView {
    id: String,
    types: Vec<String>,
    #[schema(schema_with = shapes::signature)]
    signature: SignatureFormat,
    /// What the receiver verifies with: the secret, or the public key.
    secret: String,
    /// Extended while a client reads its requests.
    expires_at: DateTime<Utc>,
}

pub(crate) async fn create(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    claim: Claim,
    OptionalBody(form): OptionalBody<ListenerForm>,
) -> Result<Response, Problem> {
    let (settings, secret) = check(form)?;
    let shard = Shard(rand::rng().random_range(0..SHARDS));
    let mut work = Work::begin(&app, claim).await?;
    if !tables::tenants::lock(&mut *work, tenant.id).await? {
        return Err(Problem::not_found("tenant"));
    }
    // Expired listeners must not count.
    listeners::sweep(&mut *work).await?;
    let full = endpoints::count(&mut *work, tenant.id).await? >= ENDPOINTS_PER_TENANT_MAX;
    if full || listeners::count(&mut *work, tenant.id).await? >= LISTENERS_PER_TENANT_MAX {
        return Err(Problem::limit_reached(format!(
            "A tenant can have at most {LISTENERS_PER_TENANT_MAX} listeners and {ENDPOINTS_PER_TENANT_MAX} endpoints."
        )));
    }
    let public_id = tables::random_public_id(listeners::PREFIX);
    let row = endpoints::insert(&mut *work, tenant.id, &public_id, shard, &settings).await?;
    // In the same transaction, so that it is never seen active.
    let row = endpoints::update(&mut *work, row.id, &settings, None).await?;
    let shown = keep(&app.vault, &mut work, row.owner(), &secret).await?;
    let view = ListenerView {
        expires_at: listeners::insert(&mut *work, row.id, LIFE).await?,
        id: public_id,
        types: settings.types,
        signature: settings.signature,
        secret: shown.secret.or(shown.public_key).unwrap_or_default(),
    };
    let entry = Entry {
        actor: &actor,
        action: Action::ListenerCreated,
        tenant: Some(tenant.id),
        subject: &view.id,
        detail: Some(json!({"types": view.types})),
    };
    audit::write(&mut work, entry).await?;
    work.commit(StatusCode::CREATED, &view).await
}

fn check(form: ListenerForm) -> Result<(EndpointSettings, Secret), Problem> {
    let settings = EndpointSettings {
        url: NOWHERE.to_owned(),
        description: Some("A listener".to_owned()),
        types: form.types.unwrap_or_else(|| blank().types),
        signature: form.signature.unwrap_or(SignatureFormat::TV1),
        state: EndpointState::Paused,
        state_reason: Some("listener".to_owned()),
        rotate_every_days: Some(0),
        ..blank()
    };
    let mut faults = Faults::default();
    check_types(&settings.types, &mut faults);
    let secret = match form.secret {
        Some(own) => {
            if let Err(why) = check_secret(&own, settings.signature) {
                faults.add("secret", why);
            }
            Secret::new(own)
        }
        None => Secret::generate(settings.signature, &rand::random()),
    };
    faults.done()?;
    Ok((settings, secret))
}

/// The latest reader takes over, without waiting for a dead connection to time out.
pub(crate) async fn requests(
    State(app): State<Shared>,
    Extension(tenant): Extension<Tenant>,
    Path((_, id)): Path<(String, String)>,
    method: Method,
) -> Result<Response, Problem> {
    // HEAD is routed like GET and would consume and discard requests.
    if method != Method::GET {
        return Err(Problem::new(
            Kind::MethodNotAllowed,
            "Use GET to read a listener's requests.",
        ));
    }
    let place = app.streams.take(Some(tenant.id)).ok_or_else(|| {
        Problem::too_many(
            format!(
                "One process serves at most {STREAMS_PER_TENANT_MAX} listener connections of a tenant and {STREAMS_MAX} in total."
            ),
            Duration::from_secs(5),
        )
    })?;
    let mut connection = app.pool.acquire().await?;
    let listener = listeners::find(&mut *connection, tenant.id, &id)
        .await?
        .ok_or_else(|| Problem::not_found("listener"))?;
    let holder = Uuid::new_v4();
    listeners::hold(&mut *connection, listener.id, holder, LIFE).await?;
    let owner = Owner {
        tenant: listener.tenant_id,
        endpoint: listener.id,
    };
    let opened = open_in_force(&app.vault, &mut connection, owner).await?;
    connection.done().await?;
    let session = Session {
        pool: app.pool.clone(),
        listener,
        secrets: opened.into_iter().map(|one| one.secret).collect(),
        holder,
        stop: app.stop.clone(),
        place,
    };
    let headers = [
        (header::CONTENT_TYPE, "application/x-ndjson"),
        // Buffering proxies would hold everything back.
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((headers, session.body()).into_response())
}

pub(crate) async fn delete(
    State(app): State<Shared>,
    Extension(tenant): Extension<Tenant>,
    Path((_, id)): Path<(String, String)>,
) -> Result<StatusCode, Problem> {
    let listener = listeners::find(&app.pool, tenant.id, &id)
        .await?
        .ok_or_else(|| Problem::not_found("listener"))?;
    listeners::end(&app.pool, listener.id).await?;
    app.wake.now();
    Ok(StatusCode::NO_CONTENT)
}
