//! Authentication and authorization: the one place where roles are enforced.
//! Invariant: a handler runs only after `check` admitted its request; the extensions it reads (`Actor`, `Tenant`,
//! `Session`, `Arrived`, `ClientAddress`) are set here. It runs within its tenant's share.

pub(crate) mod address;
pub(crate) mod failures;
mod key_use;
mod password;
pub(crate) mod place;
pub(crate) mod portal;
mod request_rate;
pub(crate) mod return_to;
mod rule;
mod session;
mod sign_in;
mod throttle;

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use axum::{
    Extension, RequestExt,
    extract::{ConnectInfo, FromRequestParts, RawPathParams, Request, State, rejection::ExtensionRejection},
    http::{HeaderMap, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Redirect, Response},
};
use postrider_dispatcher::health::database;
use postrider_proto::{TenantId, state::KeyRole};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::time::timeout;
use tracing::Instrument;

pub(crate) use address::ClientAddress;
pub use address::TrustedProxies;
pub(crate) use password::{ADMIN_LOGIN, hash as hash_password, verify as verify_password};
pub use password::{PasswordError, set_admin_password};
use place::Place;
pub use request_rate::{REQUEST_RATE_DEFAULT, RequestRates, TENANT_REQUEST_RATE_DEFAULT};
pub use rule::{Role, Rule};
pub(crate) use session::{
    Confirmed, Session, Submitted, expired_cookie, session_cookie, sign_in_cookie, tokens_match,
};
pub(crate) use sign_in::{SignIn, sign_in};

pub(crate) use crate::tables::audit::Actor;

use crate::{
    Shared,
    http::{
        cells::{Here, Purpose},
        idempotency,
        input::BodyWait,
        page_problem::PageProblem,
        problem::{Kind, Problem},
    },
    tables::{api_keys, cells::Possession, tenants},
};

/// Longer than any legitimate request takes; the request is aborted after it.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(20);

/// How long a request goes on after the database was found to be down.
const DATABASE_DOWN_MAX: Duration = Duration::from_secs(1);

/// When the request arrived, before it waited for anything.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrived(pub(crate) Instant);

/// The tenant in the path, which the caller may access.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tenant {
    pub(crate) id: TenantId,
    pub(crate) slug: String,
}

/// A request for a page by someone who is signed in.
#[derive(Clone)]
pub(crate) struct Visit {
    pub(crate) app: Shared,
    pub(crate) session: Session,
    pub(crate) actor: Actor,
}

impl Visit {
    /// The same visit in the tenant's cell.
    pub(crate) async fn at_tenant(self, slug: &str, purpose: Purpose) -> Result<Self, Problem> {
        let Here { app, .. } = Here::of_tenant(&self.app, slug, purpose).await?;
        Ok(Self { app, ..self })
    }

    /// The same visit in the cell that has this.
    pub(crate) async fn at(self, what: &Possession, purpose: Purpose) -> Result<Self, Problem> {
        let Here { app, .. } = Here::of(&self.app, what, purpose).await?;
        Ok(Self { app, ..self })
    }
}

/// A call of an operation on a tenant.
pub(crate) struct Call {
    pub(crate) app: Shared,
    pub(crate) actor: Actor,
    pub(crate) tenant: Tenant,
}

impl FromRequestParts<Shared> for Visit {
    type Rejection = ExtensionRejection;

    async fn from_request_parts(parts: &mut Parts, app: &Shared) -> Result<Self, ExtensionRejection> {
        let Extension(session) = Extension::from_request_parts(parts, app).await?;
        let Extension(actor) = Extension::from_request_parts(parts, app).await?;
        let Ok(Here { app, .. }) = Here::from_request_parts(parts, app).await;
        Ok(Self { app, session, actor })
    }
}

impl FromRequestParts<Shared> for Call {
    type Rejection = ExtensionRejection;

    async fn from_request_parts(parts: &mut Parts, app: &Shared) -> Result<Self, ExtensionRejection> {
        let Extension(actor) = Extension::from_request_parts(parts, app).await?;
        let Extension(tenant) = Extension::from_request_parts(parts, app).await?;
        let Ok(Here { app, .. }) = Here::from_request_parts(parts, app).await;
        Ok(Self { app, actor, tenant })
    }
}

/// An API key that was verified.
struct Key {
    actor: Actor,
    role: KeyRole,
    tenant: Option<TenantId>,
}

/// Which concurrency limit a route counts toward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counts {
    /// Unauthenticated routes hold nothing.
    Nowhere,
    /// Emits have limits of their own.
    Emit,
    Request,
    /// Waits for a third party's server and holds no connection meanwhile.
    Trial,
}

#[derive(Clone)]
pub(crate) struct Gate {
    pub(crate) app: Shared,
    pub(crate) rule: Rule,
    pub(crate) place: Place,
    pub(crate) counts: Counts,
    /// The API operation has no query parameters, so any parameter is rejected as unknown.
    pub(crate) refuses_query: bool,
}

pub(crate) async fn check(State(gate): State<Gate>, mut request: Request, next: Next) -> Response {
    request.extensions_mut().insert(Arrived(Instant::now()));
    let client = client_address(&gate.app, &request);
    request.extensions_mut().insert(client);
    let (mut request, body) = BodyWait::watch(request);
    let response = async {
        let admitted = admit(&gate, &mut request).await;
        let session = request.extensions().get::<Session>().cloned();
        let mut response = match admitted {
            Ok(_) if gate.refuses_query && has_query(&request) => no_parameters(&request).into_response(),
            Ok(name) => match gate.place.find(&gate.app, gate.rule, &mut request).await {
                Ok(()) => run(&gate, &name, request, next).await,
                Err(problem) => gate.refused(problem),
            },
            Err(refused) => refused,
        };
        // For the menu of an error page.
        if let Some(session) = session {
            response.extensions_mut().insert(session);
        }
        response
    };
    let ended = tokio::select! {
        biased;
        ended = timeout(REQUEST_TIME_MAX, response) => ended,
        // An emit whose outcome is unknown says so itself.
        () = database_lost(&body), if gate.counts != Counts::Emit => return gate.refused(Problem::busy()),
    };
    match ended {
        Ok(response) => response,
        // The client has not sent the announced body: the server is not busy.
        Err(_) if body.is_waiting() => gate.refused(Problem::new(
            Kind::RequestTimeout,
            "The request body did not arrive in time.",
        )),
        Err(_) => gate.refused(Problem::busy()),
    }
}

/// Returns when the database has been down for a moment: a request that waits for a connection has failed by then. One
/// that waits for a statement on a connection that was cut off silently would wait until its time limit.
async fn database_lost(body: &BodyWait) {
    loop {
        database::down().await;
        tokio::time::sleep(DATABASE_DOWN_MAX).await;
        if database::is_down() && !body.is_waiting() {
            return;
        }
    }
}

/// The same for the cell that a request runs in.
async fn cell_lost(cell: Option<Shared>) {
    let Some(cell) = cell else {
        return std::future::pending().await;
    };
    loop {
        cell.pool.down().await;
        tokio::time::sleep(DATABASE_DOWN_MAX).await;
        if cell.pool.is_down() {
            return;
        }
    }
}

impl Gate {
    /// A page for people, JSON for programs.
    fn refused(&self, problem: Problem) -> Response {
        match self.rule.is_for_sessions() {
            true => PageProblem::from(problem).into_response(),
            false => problem.into_response(),
        }
    }
}

fn client_address(app: &Shared, request: &Request) -> ClientAddress {
    let peer = request.extensions().get::<ConnectInfo<SocketAddr>>();
    ClientAddress(peer.map(|ConnectInfo(peer)| app.trusted_proxies.client(peer.ip(), request.headers())))
}

fn address_of(request: &Request) -> Option<IpAddr> {
    request.extensions().get::<ClientAddress>()?.0
}

fn has_query(request: &Request) -> bool {
    request.uri().query().is_some_and(|query| !query.is_empty())
}

fn no_parameters(request: &Request) -> Problem {
    let query = request.uri().query().unwrap_or_default();
    let name = url::form_urlencoded::parse(query.as_bytes()).next();
    let name = name.map(|(name, _)| name.into_owned()).unwrap_or_default();
    Problem::bad_request(format!(
        "Unknown query parameter `{name}`. This operation has none."
    ))
}

/// Runs within the caller's share. A client that disconnects does not cancel the handler: its statement would
/// continue in the database without being counted.
async fn run(gate: &Gate, name: &str, request: Request, next: Next) -> Response {
    let limits = &gate.app.limits;
    let share = match gate.counts {
        Counts::Nowhere => return next.run(request).await,
        // A group continues without its clients in any case.
        Counts::Emit if is_in_group(&request) => return next.run(request).await,
        Counts::Emit => Ok(None),
        Counts::Request => limits.requests.take(name).await.map(Some),
        Counts::Trial => limits.trials.take(name).await.map(Some),
    };
    let share = match share {
        Ok(share) => share,
        Err(problem) => return gate.refused(problem),
    };
    let here = request.extensions().get::<Here>();
    let cell = here.filter(|here| here.is_away()).map(|here| here.app.clone());
    let is_emit = gate.counts == Counts::Emit;
    let handled = async move {
        let running = timeout(REQUEST_TIME_MAX, next.run(request));
        let response = tokio::select! {
            biased;
            response = running => response.ok(),
            () = cell_lost(cell), if !is_emit => None,
        };
        drop(share);
        response
    };
    match tokio::spawn(handled.in_current_span()).await {
        Ok(Some(response)) => response,
        Ok(None) => gate.refused(Problem::busy()),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => gate.refused(Problem::busy()),
        },
    }
}

/// A single emit that shares a transaction with others.
fn is_in_group(request: &Request) -> bool {
    !request.headers().contains_key(idempotency::HEADER) && !request.uri().path().ends_with("/batch")
}

/// Returns the name whose share the request counts toward.
async fn admit(gate: &Gate, request: &mut Request) -> Result<String, Response> {
    // Read before any handler does, so that a path that is not UTF-8 is always rejected the same way.
    let params = request
        .extract_parts::<RawPathParams>()
        .await
        .map_err(|_| Problem::not_found("path").into_response())?;
    match gate.rule {
        Rule::Open => Ok(String::new()),
        rule if rule.is_for_sessions() => admit_session(gate, request).await,
        _ => {
            let slug = params
                .iter()
                .find_map(|(name, value)| (name == "tenant").then(|| value.to_owned()));
            admit_key(gate, request, slug)
                .await
                .map_err(IntoResponse::into_response)
        }
    }
}

async fn admit_session(gate: &Gate, request: &mut Request) -> Result<String, Response> {
    let page = |problem: Problem| PageProblem::from(problem).into_response();
    let session = Session::of(&gate.app.lookups, request.headers())
        .await
        .map_err(page)?
        .ok_or_else(|| Redirect::to(&return_to::sign_in_address(request)).into_response())?;
    request.extensions_mut().insert(session.clone());
    gate.app
        .request_rates
        .take_for_session(&session.actor().name)
        .map_err(page)?;
    if !gate
        .rule
        .admits_request(session.role, !request.method().is_safe())
    {
        return Err(page(match session.role {
            // Customers must not learn which team pages exist.
            Role::Customer => Problem::not_found("page"),
            _ => Problem::new(Kind::Forbidden, "Your role does not allow this. Ask an admin."),
        }));
    }
    let actor = session.actor().at(address_of(request));
    let name = match &session.tenant {
        Some(tenant) => counted_as(tenant),
        None => actor.name.clone(),
    };
    request.extensions_mut().insert(actor);
    Ok(name)
}

/// Keys, customers and team members count together for requests about one tenant.
fn counted_as(tenant: &Tenant) -> String {
    format!("tenant:{}", tenant.slug)
}

async fn admit_key(gate: &Gate, request: &mut Request, slug: Option<String>) -> Result<String, Problem> {
    let key = find_key(&gate.app, request.headers()).await?.ok_or_else(|| {
        Problem::new(
            Kind::Unauthorized,
            "Send `Authorization: Bearer KEY` with an active key.",
        )
    })?;
    gate.app.request_rates.take(&key.actor.name, key.role)?;
    if !gate.rule.admits_key(key.role) {
        let detail = format!("A key with role `{}` can't perform this operation.", key.role);
        return Err(Problem::new(Kind::Forbidden, detail));
    }
    let mut name = key.actor.name.clone();
    if let (Rule::Own, Some(slug)) = (gate.rule, slug) {
        let tenant = tenants::find(&gate.app.lookups, &slug)
            .await?
            .filter(|tenant| key.tenant.is_none_or(|own| own == tenant.id))
            .ok_or_else(|| Problem::not_found("tenant"))?;
        let tenant = Tenant {
            id: tenant.id,
            slug: tenant.slug,
        };
        name = counted_as(&tenant);
        request.extensions_mut().insert(tenant);
    }
    let address = address_of(request);
    request.extensions_mut().insert(key.actor.at(address));
    Ok(name)
}

/// Authorizes an emit for callers without a route.
pub(crate) async fn admit_producer(app: &Shared, headers: &HeaderMap) -> Result<Actor, Problem> {
    let key = find_key(app, headers).await?.ok_or_else(|| {
        Problem::new(
            Kind::Unauthorized,
            "Send `authorization: Bearer KEY` with an active key.",
        )
    })?;
    app.request_rates.take(&key.actor.name, key.role)?;
    if Rule::Emit.admits_key(key.role) {
        return Ok(key.actor);
    }
    let detail = format!("A key with role `{}` can't perform this operation.", key.role);
    Err(Problem::new(Kind::Forbidden, detail))
}

async fn find_key(app: &Shared, headers: &HeaderMap) -> Result<Option<Key>, Problem> {
    if headers.get_all(header::AUTHORIZATION).iter().nth(1).is_some() {
        return Err(Problem::bad_request(
            "More than one Authorization header was sent.",
        ));
    }
    let Some(given) = bearer(headers) else {
        return Ok(None);
    };
    let hash = fingerprint(given);
    let is_settings_key =
        !app.admin_api_key.is_empty() && bool::from(fingerprint(&app.admin_api_key).ct_eq(&hash));
    if is_settings_key {
        return Ok(Some(Key {
            actor: Actor::new("key:admin"),
            role: KeyRole::Admin,
            tenant: None,
        }));
    }
    // The index compares hashes, so timing reveals nothing about the key.
    let found = api_keys::find_by_hash(&app.lookups, &hash).await?;
    if let Some(key) = &found {
        key_use::note(app, key);
    }
    Ok(found.map(|key| Key {
        actor: Actor::new(format!("key:{}", key.public_id)),
        role: key.role,
        tenant: key.tenant_id,
    }))
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, key) = headers
        .get(header::AUTHORIZATION)?
        .to_str()
        .ok()?
        .split_once(' ')?;
    let key = key.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !key.is_empty()).then_some(key)
}

/// The stored hash of a key or session token. Both are random, so a plain hash is enough.
pub(crate) fn fingerprint(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::App;
    use std::sync::Arc;

    /// An app whose database is never queried.
    pub(crate) async fn app() -> Shared {
        let pool = sqlx::PgPool::connect_lazy("postgres://nobody@127.0.0.1:1/none").expect("a form");
        let vault = postrider_dispatcher::vault::Vault::parse("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=");
        Arc::new(App {
            emits: crate::Emits::new(pool.clone().into(), Default::default()).into(),
            pool: pool.clone().into(),
            lookups: pool.clone().into(),
            home: pool.into(),
            cells: Default::default(),
            cell: None,
            limits: Default::default(),
            wake: Default::default(),
            vault: vault.expect("a key"),
            guard: Default::default(),
            defaults: Default::default(),
            public_url: "http://127.0.0.1".to_owned(),
            admin_api_key: "right".to_owned(),
            request_rates: Default::default(),
            trusted_proxies: Default::default(),
            metrics: String::new,
            check_log_filter: |_| Ok(()),
            tracer: Default::default(),
            stop: Default::default(),
            streams: crate::streams(),
            trials: crate::Trials::new(Default::default()).expect("a client"),
        })
    }

    fn with(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().expect("a value"))])
    }

    #[tokio::test]
    async fn the_key_of_the_settings_is_an_admin() {
        let key = find_key(&app().await, &with("Bearer right")).await;
        assert!(matches!(key, Ok(Some(key)) if key.role == KeyRole::Admin));
        for none in ["right", "Basic right", "Bearer", "Bearer  "] {
            assert!(
                matches!(find_key(&app().await, &with(none)).await, Ok(None)),
                "{none}"
            );
        }
    }
}
