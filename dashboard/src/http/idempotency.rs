//! `Idempotency-Key`: a repeated request gets the same response, and its work is done once.
//!
//! The layer `keep` looks up a stored response and otherwise gives the handler a `Claim`. The handler's `Work` takes
//! an advisory lock for the claim in its own transaction and stores the response there before it commits. Work and
//! response are therefore committed together or not at all, even if the process is killed; the lock of a killed
//! request ends with its transaction, and no cleanup is needed before a retry.
//! A request that must not keep a transaction open while it waits holds a row instead (`Running`).
//! Error responses are not stored: the request had no effect and is evaluated again. What a rejected request held is
//! released before its response is sent, so that a client that corrects it at once is not told that it is still
//! running.

use std::{
    convert::Infallible,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{
    RequestPartsExt,
    body::Body,
    extract::{FromRequestParts, RawPathParams, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use data_encoding::HEXLOWER;
use postrider_dispatcher::vault::Vault;
use postrider_proto::{
    Shard,
    limits::{BATCH_BYTES_MAX, IDEMPOTENCY_KEY_CHARS_MAX},
};
use serde::Serialize;
use sha2::{Digest, Sha256};
use sqlx::{PgConnection, Postgres, Transaction};

use crate::{
    App, Pool, Shared,
    http::{
        cells::Here,
        input::read_body,
        metrics::{Key, METRICS, Repeated},
        problem::{HandledBefore, Kind, Problem},
        shares::Share,
        wait_until_applied::{self, Xid},
    },
    tables::{self, audit::Actor, idempotency, pool::proves_rollback},
};

pub(crate) const HEADER: HeaderName = HeaderName::from_static("idempotency-key");
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
/// Longer than any request may take. The claim of a killed request expires after it.
const RUNNING_MAX: Duration = Duration::from_secs(60);

/// Identifies a request with a key.
#[derive(Debug)]
struct Claimed {
    scope: [u8; 32],
    fingerprint: [u8; 32],
    /// The tenant in the path.
    tenant: Option<String>,
    /// The transaction of a rejected request: its lock ends with it.
    left: Mutex<Option<Transaction<'static, Postgres>>>,
}

/// The claim of the current request; empty without a key.
#[derive(Debug, Clone, Default)]
pub(crate) struct Claim(Option<Arc<Claimed>>);

impl Claim {
    pub(crate) fn is_some(&self) -> bool {
        self.0.is_some()
    }

    /// The same id whenever the request is repeated: an event of a tenant elsewhere may be stored in its cell or at home, and the
    /// response only in one of them.
    pub(crate) fn event_id(&self, number: usize) -> Option<String> {
        let claimed = self.0.as_ref()?;
        let hash = digest(&[&claimed.scope, &(number as u64).to_be_bytes()]);
        Some(format!("evt_k{}", HEXLOWER.encode(&hash[..16])))
    }
}

impl<S: Sync> FromRequestParts<S> for Claim {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get().cloned().unwrap_or_default())
    }
}

/// The layer around every POST of the API.
pub(crate) async fn keep(State(app): State<Shared>, request: Request, next: Next) -> Response {
    // Where the request stores its change.
    let app = request
        .extensions()
        .get()
        .map_or(app, |here: &Here| here.app.clone());
    match read_key(request.headers()) {
        Ok(None) => next.run(request).await,
        Ok(Some(key)) => match respond(&app, &key, request, next).await {
            Ok(response) => response,
            Err(problem) => problem.into_response(),
        },
        Err(problem) => problem.into_response(),
    }
}

fn read_key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let mut values = headers.get_all(HEADER).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    let fits = |key: &&str| {
        (1..=IDEMPOTENCY_KEY_CHARS_MAX).contains(&key.len())
            && key.bytes().all(|b| b.is_ascii_graphic() || b == b' ')
    };
    match value.to_str().ok().map(str::trim).filter(fits) {
        Some(key) if values.next().is_none() => Ok(Some(key.to_owned())),
        _ => Err(Problem::bad_request(format!(
            "Idempotency-Key must be sent once and have 1 to {IDEMPOTENCY_KEY_CHARS_MAX} visible ASCII characters."
        ))),
    }
}

async fn respond(app: &App, key: &str, request: Request, next: Next) -> Result<Response, Problem> {
    let (mut parts, body) = request.into_parts();
    let actor = parts.extensions.get::<Actor>().map_or("", |actor| &actor.name);
    let body = read_body(body, BATCH_BYTES_MAX).await?;
    let path = parts.uri.path_and_query().map_or("", |path| path.as_str());
    let claimed = Claimed {
        scope: digest(&[actor.as_bytes(), path.as_bytes(), key.as_bytes()]),
        fingerprint: digest(&[&body]),
        tenant: tenant_of(&mut parts).await,
        left: Mutex::default(),
    };
    if let Some(given) = claimed.stored_response(app).await? {
        return Ok(given);
    }
    let claimed = Arc::new(claimed);
    parts.extensions.insert(Claim(Some(claimed.clone())));
    let response = next.run(Request::from_parts(parts, Body::from(body))).await;
    claimed.roll_back().await;
    if response.extensions().get::<HandledBefore>().is_some()
        && let Some(given) = claimed.stored_response(app).await?
    {
        return Ok(given);
    }
    Ok(response)
}

async fn tenant_of(parts: &mut Parts) -> Option<String> {
    let params = parts.extract::<RawPathParams>().await.ok()?;
    let tenant = params.iter().find(|(name, _)| *name == "tenant");
    tenant.map(|(_, slug)| slug.to_owned())
}

/// Each part is prefixed with its length, so that different lists of parts never hash the same input.
fn digest(parts: &[&[u8]]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

impl Claimed {
    /// Before the response is sent.
    async fn roll_back(&self) {
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(transaction) = left
            && let Err(error) = transaction.rollback().await
        {
            tracing::warn!(%error, "could not roll back a rejected request; closing its connection");
        }
    }

    async fn stored_response(&self, app: &App) -> Result<Option<Response>, Problem> {
        let Some(row) = idempotency::find(&app.lookups, &self.scope).await? else {
            return Ok(None);
        };
        if row.fingerprint != self.fingerprint {
            METRICS.repeated(Key::IdempotencyKey, Repeated::Conflict);
            return Err(Problem::new(
                Kind::KeyReused,
                "This Idempotency-Key was already used with a different body.",
            ));
        }
        let opened = app.vault.open_response(&self.scope, &row.response);
        let (Ok(body), Ok(status)) = (opened, StatusCode::from_u16(row.status as u16)) else {
            return Err(Problem::conflict(
                "The request was already completed, but its response can no longer be decrypted because the master key changed.",
            ));
        };
        // The first response may have been `change-pending`, or it was lost.
        if let (Some(shard), Some(xid)) = (row.settles_shard, row.settles_xid) {
            wait_until_applied::settled(&app.pool, shard, &Xid::read(xid)).await?;
        }
        let mut response = json(status, body);
        response
            .headers_mut()
            .insert(REPLAYED, HeaderValue::from_static("true"));
        METRICS.repeated(Key::IdempotencyKey, Repeated::Same);
        Ok(Some(response))
    }
}

fn json(status: StatusCode, body: Vec<u8>) -> Response {
    let kind = (header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    (status, [kind], body).into_response()
}

/// The transaction of a request that changes something, and the only way to respond to it.
pub(crate) struct Work {
    /// None only while it is being dropped or committed.
    transaction: Option<Transaction<'static, Postgres>>,
    _share: Option<Share>,
    /// One of the emitted events that could be duplicated by a retry.
    emits: Option<String>,
    claim: Claim,
    /// The tenant that the stored response belongs to.
    tenant: Option<String>,
    /// Where the change must be applied before the response is true.
    settles: Option<(Shard, Xid)>,
    vault: Vault,
    pool: Pool,
}

impl Work {
    /// Of concurrent requests with one key, one gets past this; the others are rejected.
    pub(crate) async fn begin(app: &App, claim: Claim) -> Result<Self, Problem> {
        let transaction = tables::begin(&app.pool).await?;
        Self::begin_in(app, claim, transaction, None).await
    }

    /// The same for a request that emits.
    pub(crate) async fn begin_emit(app: &App, claim: Claim, tenant: &str) -> Result<Self, Problem> {
        let (transaction, share) = app.emits.begin(tenant).await?;
        Self::begin_in(app, claim, transaction, Some(share)).await
    }

    async fn begin_in(
        app: &App,
        claim: Claim,
        transaction: Transaction<'static, Postgres>,
        share: Option<Share>,
    ) -> Result<Self, Problem> {
        let mut work = Self {
            transaction: Some(transaction),
            _share: share,
            emits: None,
            tenant: claim.0.as_ref().and_then(|claimed| claimed.tenant.clone()),
            claim,
            settles: None,
            vault: app.vault.clone(),
            pool: app.pool.clone(),
        };
        if let Some(claimed) = work.claim.0.clone() {
            if !idempotency::try_lock(&mut work, &claimed.scope).await? {
                return Err(still_running());
            }
            if idempotency::find(&mut *work, &claimed.scope).await?.is_some() {
                return Err(done_just_now());
            }
        }
        Ok(work)
    }

    /// Notes an event that a retry could duplicate, in case the outcome of the commit stays unknown.
    pub(crate) fn emits(&mut self, event_id: Option<String>) {
        self.emits = event_id.filter(|_| !self.claim.is_some());
    }

    /// The response is true once the shard's owner has applied this transaction; a repeated response waits for that
    /// too.
    pub(crate) async fn settles(&mut self, shard: Shard) -> sqlx::Result<Xid> {
        let xid = wait_until_applied::current(&mut *self).await?;
        self.settles = Some((shard, xid.clone()));
        Ok(xid)
    }

    /// For a request whose path names no tenant: the stored response belongs to this one.
    pub(crate) fn is_of(&mut self, tenant: &str) {
        self.tenant = Some(tenant.to_owned());
    }

    /// Commits the work together with its response.
    pub(crate) async fn commit<T: Serialize>(
        mut self,
        status: StatusCode,
        view: &T,
    ) -> Result<Response, Problem> {
        let body = serde_json::to_vec(view)
            .map_err(|error| Problem::internal("could not serialize a response", error))?;
        if let Some(claimed) = self.claim.0.clone() {
            let sealed = self.vault.seal_response(&claimed.scope, &body);
            let (tenant, settles) = (self.tenant.clone(), self.settles.clone());
            let new = idempotency::NewResponse {
                scope: &claimed.scope,
                fingerprint: &claimed.fingerprint,
                status: status.as_u16() as i16,
                response: &sealed,
                tenant: tenant.as_deref(),
                settles: settles.as_ref().map(|(shard, xid)| (*shard, xid.as_str())),
            };
            idempotency::insert(&mut self, new).await?;
        }
        let committed = match self.transaction.take() {
            Some(transaction) => self.pool.unless_down(transaction.commit()).await,
            None => Ok(()),
        };
        match (committed, self.emits.take()) {
            (Ok(()), _) => Ok(json(status, body)),
            (Err(error), Some(event)) if !proves_rollback(&error) => {
                tracing::warn!(%error, "outcome of an emit batch is unknown");
                Err(Problem::unknown(Some(event)))
            }
            (Err(error), _) => Err(error.into()),
        }
    }
}

/// Rejected or aborted: `keep` rolls it back before responding.
impl Drop for Work {
    fn drop(&mut self) {
        if let Some(claimed) = &self.claim.0
            && let Some(transaction) = self.transaction.take()
        {
            *claimed.left.lock().unwrap_or_else(PoisonError::into_inner) = Some(transaction);
        }
    }
}

/// A request that waits for a third party's server, so that no transaction may be open meanwhile. It is held until
/// its `Work` is committed; if it is dropped because the client is gone, the next request is admitted.
pub(crate) struct Running {
    pool: Pool,
    claimed: Option<Arc<Claimed>>,
}

impl Running {
    /// Of concurrent requests with one key, one gets past this; the others are rejected.
    pub(crate) async fn begin(app: &App, claim: &Claim) -> Result<Self, Problem> {
        let mut running = Self {
            pool: app.pool.clone(),
            claimed: None,
        };
        if let Some(claimed) = &claim.0 {
            if !idempotency::claim(&app.pool, &claimed.scope, RUNNING_MAX).await? {
                return Err(still_running());
            }
            running.claimed = Some(claimed.clone());
            if idempotency::find(&app.pool, &claimed.scope).await?.is_some() {
                return Err(done_just_now());
            }
        }
        Ok(running)
    }

    /// Before the response is sent, so that an immediate retry is not rejected.
    pub(crate) async fn end(mut self) {
        if let Some(claimed) = self.claimed.take() {
            give_back(&self.pool, &claimed).await;
        }
    }
}

async fn give_back(pool: &Pool, claimed: &Claimed) {
    if let Err(error) = idempotency::give_back(pool, &claimed.scope).await {
        tracing::warn!(%error, "could not release an Idempotency-Key claim; it will expire");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Some(claimed) = self.claimed.take() else {
            return;
        };
        let pool = self.pool.clone();
        tokio::spawn(async move { give_back(&pool, &claimed).await });
    }
}

fn still_running() -> Problem {
    METRICS.repeated(Key::IdempotencyKey, Repeated::Conflict);
    Problem::new(
        Kind::KeyInProgress,
        "A request with this Idempotency-Key is still in progress. Try again shortly.",
    )
}

fn done_just_now() -> Problem {
    Problem::new(
        Kind::Handled,
        "A request with this Idempotency-Key was completed a moment ago.",
    )
}

impl Deref for Work {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        self.transaction.as_ref().expect("only commit and drop take it")
    }
}

impl DerefMut for Work {
    fn deref_mut(&mut self) -> &mut PgConnection {
        self.transaction.as_mut().expect("only commit and drop take it")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(values: &[&[u8]]) -> Result<Option<String>, ()> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(HEADER, HeaderValue::from_bytes(value).expect("a value"));
        }
        read_key(&headers).map_err(|_| ())
    }

    #[test]
    fn a_key_is_short_visible_and_alone() {
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[b"order 1"]), Ok(Some("order 1".to_owned())));
        assert_eq!(read(&[&[b'a'; 255]]), Ok(Some("a".repeat(255))));
        for bad in [
            &[&b""[..]][..],
            &[b"  "],
            &[&[b'a'; 256]],
            &["schlüssel".as_bytes()],
            &[b"a\tb"],
            &[b"a", b"a"],
        ] {
            assert_eq!(read(bad), Err(()), "{bad:?}");
        }
    }

    #[test]
    fn a_repeated_request_has_the_same_event_ids() {
        let claim = |scope: u8| {
            Claim(Some(Arc::new(Claimed {
                scope: [scope; 32],
                fingerprint: [0; 32],
                tenant: None,
                left: Mutex::default(),
            })))
        };
        assert_eq!(claim(1).event_id(0), claim(1).event_id(0));
        assert_ne!(claim(1).event_id(0), claim(1).event_id(1));
        assert_ne!(claim(1).event_id(0), claim(2).event_id(0));
        assert_eq!(Claim::default().event_id(0), None);
    }

    #[test]
    fn parts_are_told_apart() {
        assert_ne!(digest(&[b"ab", b"c"]), digest(&[b"a", b"bc"]));
        assert_eq!(digest(&[b"ab", b"c"]), digest(&[b"ab", b"c"]));
    }
}
