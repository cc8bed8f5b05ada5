//! `Idempotency-Key`: a request that is sent again is answered again, and its work is done once.
//!
//! The layer `keep` looks for a stored answer and otherwise hands the handler a `Claim`. The handler's `Work` takes an
//! advisory lock for the claim in the very transaction in which it works, and stores the answer there before it
//! commits. So work and answer are there together or not at all, whenever the process is killed; a killed request's
//! lock is gone with its transaction, and nothing has to be cleaned up before it may be tried again.
//! A request that must not have a transaction open while it waits holds a row instead (`Running`).
//! Refusals are not stored: they did nothing, and are judged again. What a refused request held is given back before its
//! answer goes out, so that a client that corrects it at once is not told that it still runs.

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
    auth::Actor,
    input::read_body,
    meters::{Key, METERS, Repeated},
    pool::proves_rollback,
    problem::{AnsweredBefore, Kind, Problem},
    settled::{self, Xid},
    shares::Share,
    tables::{self, idempotency},
};

pub(crate) const HEADER: HeaderName = HeaderName::from_static("idempotency-key");
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
/// Longer than any request may take. A claim of one that was killed is void after it.
const RUNNING_MAX: Duration = Duration::from_secs(60);

/// What a request with a key is known by.
#[derive(Debug)]
struct Claimed {
    scope: [u8; 32],
    fingerprint: [u8; 32],
    /// The tenant of the path.
    tenant: Option<String>,
    /// What a handler that refused left behind: its lock ends with it.
    left: Mutex<Option<Transaction<'static, Postgres>>>,
}

/// Of the request that a handler is given; empty when it came without a key.
#[derive(Debug, Clone, Default)]
pub(crate) struct Claim(Option<Arc<Claimed>>);

impl Claim {
    pub(crate) fn is_some(&self) -> bool {
        self.0.is_some()
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
    match read_key(request.headers()) {
        Ok(None) => next.run(request).await,
        Ok(Some(key)) => match answer(&app, &key, request, next).await {
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
            "Idempotency-Key is sent once, and is 1 to {IDEMPOTENCY_KEY_CHARS_MAX} visible ASCII characters."
        ))),
    }
}

async fn answer(app: &App, key: &str, request: Request, next: Next) -> Result<Response, Problem> {
    let (mut parts, body) = request.into_parts();
    let actor = parts.extensions.get::<Actor>().map_or("", |actor| &actor.0);
    let body = read_body(body, BATCH_BYTES_MAX).await?;
    let path = parts.uri.path_and_query().map_or("", |path| path.as_str());
    let claimed = Claimed {
        scope: digest(&[actor.as_bytes(), path.as_bytes(), key.as_bytes()]),
        fingerprint: digest(&[&body]),
        tenant: tenant_of(&mut parts).await,
        left: Mutex::default(),
    };
    if let Some(given) = claimed.stored_answer(app).await? {
        return Ok(given);
    }
    let claimed = Arc::new(claimed);
    parts.extensions.insert(Claim(Some(claimed.clone())));
    let response = next.run(Request::from_parts(parts, Body::from(body))).await;
    claimed.roll_back().await;
    if response.extensions().get::<AnsweredBefore>().is_some()
        && let Some(given) = claimed.stored_answer(app).await?
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

/// Each part with its length before it, so that no two lists of parts read the same.
fn digest(parts: &[&[u8]]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

impl Claimed {
    /// Before the answer goes out.
    async fn roll_back(&self) {
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(transaction) = left
            && let Err(error) = transaction.rollback().await
        {
            tracing::warn!(%error, "a refused request could not be rolled back: it ends with its connection");
        }
    }

    async fn stored_answer(&self, app: &App) -> Result<Option<Response>, Problem> {
        let Some(row) = idempotency::find(&app.lookups, &self.scope).await? else {
            return Ok(None);
        };
        if row.fingerprint != self.fingerprint {
            METERS.repeated(Key::IdempotencyKey, Repeated::Conflict);
            return Err(Problem::new(
                Kind::KeyReused,
                "This Idempotency-Key was used before with another body.",
            ));
        }
        let opened = app.vault.open_answer(&self.scope, &row.answer);
        let (Ok(body), Ok(status)) = (opened, StatusCode::from_u16(row.status as u16)) else {
            return Err(Problem::conflict(
                "The request was done before, but its answer can't be read any more: the master key has changed.",
            ));
        };
        // The first answer may have been that it is stored and not in effect yet, or it was lost.
        if let (Some(shard), Some(xid)) = (row.settles_shard, row.settles_xid) {
            settled::settled(&app.pool, shard, &Xid::read(xid)).await?;
        }
        let mut response = json(status, body);
        response
            .headers_mut()
            .insert(REPLAYED, HeaderValue::from_static("true"));
        METERS.repeated(Key::IdempotencyKey, Repeated::Same);
        Ok(Some(response))
    }
}

fn json(status: StatusCode, body: Vec<u8>) -> Response {
    let kind = (header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    (status, [kind], body).into_response()
}

/// The transaction of a request that changes something, and the one way in which it is answered.
pub(crate) struct Work {
    /// None only while it is given up.
    transaction: Option<Transaction<'static, Postgres>>,
    _share: Option<Share>,
    /// One of the events that it emits and that could be emitted twice.
    emits: Option<String>,
    claim: Claim,
    /// Whose the answer is.
    tenant: Option<String>,
    /// Where it has to be applied before the answer is true.
    settles: Option<(Shard, Xid)>,
    vault: Vault,
}

impl Work {
    /// Of requests with one key that run at the same time one gets here; the others are refused.
    pub(crate) async fn begin(app: &App, claim: Claim) -> Result<Self, Problem> {
        let transaction = tables::begin(&app.pool).await?;
        Self::begin_in(app, claim, transaction, None).await
    }

    /// The same, of a request that emits.
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

    /// Whether its commit was done may stay unknown: one of its events, when sending them again could make them twice.
    pub(crate) fn emits(&mut self, event_id: Option<String>) {
        self.emits = event_id.filter(|_| !self.claim.is_some());
    }

    /// The answer is true when the shard's owner has applied this transaction: the same answer to a repeated request waits
    /// for that too.
    pub(crate) async fn settles(&mut self, shard: Shard) -> Result<Xid, sqlx::Error> {
        let xid = settled::current(&mut *self).await?;
        self.settles = Some((shard, xid.clone()));
        Ok(xid)
    }

    /// Of a request whose path names no tenant: the answer goes with this one.
    pub(crate) fn is_of(&mut self, tenant: &str) {
        self.tenant = Some(tenant.to_owned());
    }

    /// Commits what was done together with the answer to it.
    pub(crate) async fn commit<T: Serialize>(
        mut self,
        status: StatusCode,
        answer: &T,
    ) -> Result<Response, Problem> {
        let body = serde_json::to_vec(answer).map_err(|error| {
            tracing::error!(%error, "an answer can't be written");
            Problem::new(Kind::Internal, "It has been logged.")
        })?;
        if let Some(claimed) = self.claim.0.clone() {
            let sealed = self.vault.seal_answer(&claimed.scope, &body);
            let (tenant, settles) = (self.tenant.clone(), self.settles.clone());
            let new = idempotency::NewAnswer {
                scope: &claimed.scope,
                fingerprint: &claimed.fingerprint,
                status: status.as_u16() as i16,
                answer: &sealed,
                tenant: tenant.as_deref(),
                settles: settles.as_ref().map(|(shard, xid)| (*shard, xid.as_str())),
            };
            idempotency::insert(&mut self, new).await?;
        }
        let committed = match self.transaction.take() {
            Some(transaction) => transaction.commit().await,
            None => Ok(()),
        };
        match (committed, self.emits.take()) {
            (Ok(()), _) => Ok(json(status, body)),
            (Err(error), Some(event)) if !proves_rollback(&error) => {
                tracing::warn!(%error, "whether a batch of emits was stored is not known");
                Err(Problem::unknown(Some(event)))
            }
            (Err(error), _) => Err(error.into()),
        }
    }
}

/// It was refused, or given up: `keep` rolls it back before it answers.
impl Drop for Work {
    fn drop(&mut self) {
        if let Some(claimed) = &self.claim.0
            && let Some(transaction) = self.transaction.take()
        {
            *claimed.left.lock().unwrap_or_else(PoisonError::into_inner) = Some(transaction);
        }
    }
}

/// A request that waits for somebody else's server, so that no transaction may be open meanwhile. It goes on to its `Work`
/// and is held until that is committed; one that was dropped, because nobody waits for its answer, lets the next one in.
pub(crate) struct Running {
    pool: Pool,
    claimed: Option<Arc<Claimed>>,
}

impl Running {
    /// Of requests with one key that run at the same time one gets here; the others are refused.
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

    /// Before the answer goes out, so that whoever asks again is not refused for it.
    pub(crate) async fn end(mut self) {
        if let Some(claimed) = self.claimed.take() {
            give_back(&self.pool, &claimed).await;
        }
    }
}

async fn give_back(pool: &Pool, claimed: &Claimed) {
    if let Err(error) = idempotency::give_back(pool, &claimed.scope).await {
        tracing::warn!(%error, "a claim on an Idempotency-Key could not be given back: it ends by itself");
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
    METERS.repeated(Key::IdempotencyKey, Repeated::Conflict);
    Problem::new(
        Kind::KeyInProgress,
        "A request with this Idempotency-Key is still running: try again soon.",
    )
}

fn done_just_now() -> Problem {
    Problem::new(
        Kind::Answered,
        "A request with this Idempotency-Key was done just now.",
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
    fn parts_are_told_apart() {
        assert_ne!(digest(&[b"ab", b"c"]), digest(&[b"a", b"bc"]));
        assert_eq!(digest(&[b"ab", b"c"]), digest(&[b"ab", b"c"]));
    }
}
