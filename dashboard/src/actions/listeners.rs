//! Listeners: temporary endpoints for people who develop a receiver. The server can't reach their machine, so their
//! machine opens a connection and receives the requests that would have been sent (`listening`).

use std::time::Duration;

use postrider_dispatcher::vault::Owner;
use postrider_proto::{
    EndpointState, Shard,
    api::{Listener, NewListener},
    limits::{ENDPOINTS_PER_TENANT_MAX, SHARDS},
    signature::Secret,
    state::SignatureFormat,
};
use rand::RngExt;
use serde_json::json;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::{
    App,
    actions::{
        endpoints::{
            form::blank,
            rules::{check_secret, check_types},
        },
        listening::{LIFE, STREAMS_MAX, STREAMS_PER_TENANT_MAX, Session},
        secrets::{keep, open_in_force},
        tenants::lock_here,
    },
    auth::{Actor, Tenant},
    http::problem::{Faults, Problem},
    tables::{
        self,
        audit::{self, Action, Entry},
        endpoints::{self, EndpointSettings},
        listeners,
    },
};

const LISTENERS_PER_TENANT_MAX: i64 = 10;
/// Nothing is ever sent there: `.invalid` never resolves (RFC 6761).
const NOWHERE: &str = "https://listener.invalid/";

/// A validated listener that is not stored yet.
pub(crate) struct Wanted {
    settings: EndpointSettings,
    secret: Secret,
}

impl Wanted {
    /// Every check that needs no database.
    pub(crate) fn read(form: NewListener) -> Result<Self, Problem> {
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
        Ok(Self { settings, secret })
    }
}

/// Runs in the caller's transaction.
pub(crate) async fn create(
    app: &App,
    actor: &Actor,
    tenant: &Tenant,
    connection: &mut PgConnection,
    wanted: Wanted,
) -> Result<Listener, Problem> {
    let Wanted { settings, secret } = wanted;
    let shard = Shard(rand::rng().random_range(0..SHARDS));
    lock_here(connection, tenant.id).await?;
    // Expired listeners must not count.
    listeners::sweep(&mut *connection).await?;
    let full = endpoints::count(&mut *connection, tenant.id).await? >= ENDPOINTS_PER_TENANT_MAX;
    if full || listeners::count(&mut *connection, tenant.id).await? >= LISTENERS_PER_TENANT_MAX {
        return Err(Problem::limit_reached(format!(
            "A tenant can have at most {LISTENERS_PER_TENANT_MAX} listeners and {ENDPOINTS_PER_TENANT_MAX} endpoints."
        )));
    }
    let public_id = tables::random_public_id(listeners::PREFIX);
    let row = endpoints::insert(&mut *connection, tenant.id, &public_id, shard, &settings).await?;
    // In the same transaction, so that it is never seen active.
    let row = endpoints::update(&mut *connection, row.id, &settings, None).await?;
    let shown = keep(&app.vault, connection, row.owner(), &secret).await?;
    let listener = Listener {
        expires_at: listeners::insert(&mut *connection, row.id, LIFE).await?,
        id: public_id,
        types: settings.types,
        signature: settings.signature,
        secret: shown.secret.or(shown.public_key).unwrap_or_default(),
    };
    let entry = Entry::new(actor, Action::ListenerCreated, Some(tenant.id), &listener.id)
        .with(json!({"types": listener.types}));
    audit::write(connection, entry).await?;
    Ok(listener)
}

/// The latest reader takes over, without waiting for a dead connection to time out.
pub(crate) async fn open(app: &App, tenant: &Tenant, id: &str) -> Result<Session, Problem> {
    let place = app.streams.take(Some(tenant.id)).ok_or_else(|| {
        Problem::too_many(
            format!(
                "One process serves at most {STREAMS_PER_TENANT_MAX} listener connections of a tenant and {STREAMS_MAX} in total."
            ),
            Duration::from_secs(5),
        )
    })?;
    let mut connection = app.pool.acquire().await?;
    let listener = listeners::find(&mut *connection, tenant.id, id)
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
    Ok(Session {
        pool: app.pool.clone(),
        listener,
        secrets: opened.into_iter().map(|one| one.secret).collect(),
        holder,
        stop: app.stop.clone(),
        place,
    })
}

pub(crate) async fn delete(app: &App, tenant: &Tenant, id: &str) -> Result<(), Problem> {
    let listener = listeners::find(&app.pool, tenant.id, id)
        .await?
        .ok_or_else(|| Problem::not_found("listener"))?;
    listeners::end(&app.pool, listener.id).await?;
    app.wake.now();
    Ok(())
}
