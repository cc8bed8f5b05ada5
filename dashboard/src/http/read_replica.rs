//! Reads from a streaming replica. Routes marked with `read` in `routes` exist twice: on the primary, and with the
//! replica's pool.
//! Invariants: authentication and authorization use the primary; the replica serves only callers that accept stale
//! data, and only while it keeps up; requests it can't serve go to the primary.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header},
    response::Response,
};
use tokio::time::{interval, timeout};
use tokio_util::sync::CancellationToken;
use tower_service::Service;

use crate::{Pool, http::input::cookie};

const LOOK_EVERY: Duration = Duration::from_secs(1);
const LOOK_TIME_MAX: Duration = Duration::from_secs(1);
/// The replica must have replayed the primary's position of this many checks ago.
const LOOKS_BEHIND_MAX: usize = 5;
/// Longer than the accepted replica lag: a client that changed something reads from the primary for this long.
const FRESH_SECONDS: u32 = 10;
const FRESH_COOKIE: &str = "postrider_fresh";
/// Set on responses from the replica.
const FROM: HeaderName = HeaderName::from_static("postrider-read");

#[derive(Clone)]
pub(crate) struct Copies {
    primary: Router,
    replica: Router,
    follows: Arc<AtomicBool>,
}

/// The whole API, with stale-tolerant reads served from the replica.
pub(crate) fn serve(primary: Router, replica: Router, follows: Arc<AtomicBool>) -> Router {
    let copies = Copies {
        primary,
        replica,
        follows,
    };
    Router::new().fallback(choose).with_state(copies)
}

async fn choose(State(mut copies): State<Copies>, request: Request) -> Response {
    if !copies.follows.load(Ordering::Relaxed) || !may_be_old(&request) {
        let changes_page = !request.method().is_safe() && !is_api(&request);
        let mut response = ask(&mut copies.primary, request).await;
        if changes_page {
            response.headers_mut().append(header::SET_COOKIE, fresh_cookie());
        }
        return response;
    }
    // It has no body, so it can be sent twice.
    let mut again = Request::new(Body::empty());
    again.method_mut().clone_from(request.method());
    again.uri_mut().clone_from(request.uri());
    again.headers_mut().clone_from(request.headers());
    again.extensions_mut().clone_from(request.extensions());
    let mut response = ask(&mut copies.replica, request).await;
    let status = response.status();
    if status.is_server_error() {
        // Not used again before the next check.
        copies.follows.store(false, Ordering::Relaxed);
    }
    // A missing row may have been created a moment ago.
    if status.is_server_error() || status == StatusCode::NOT_FOUND {
        return ask(&mut copies.primary, again).await;
    }
    response
        .headers_mut()
        .insert(FROM, HeaderValue::from_static("replica"));
    response
}

async fn ask(router: &mut Router, request: Request) -> Response {
    match router.call(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

/// A page, unless its reader has just changed something. For the API, only if the caller accepts stale data.
fn may_be_old(request: &Request) -> bool {
    request.method() == Method::GET
        && match is_api(request) {
            true => accepts_old(request.headers()),
            false => cookie(request.headers(), FRESH_COOKIE).is_none(),
        }
}

fn is_api(request: &Request) -> bool {
    request.uri().path().starts_with("/v1/")
}

/// `Cache-Control: max-stale`, with or without a number: RFC 9111.
fn accepts_old(headers: &HeaderMap) -> bool {
    headers
        .get_all(header::CACHE_CONTROL)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|part| part.trim().split('=').next() == Some("max-stale"))
}

/// It carries no other information, so it may be sent over plain http.
fn fresh_cookie() -> HeaderValue {
    let value = format!("{FRESH_COOKIE}=1; Path=/; HttpOnly; SameSite=Lax; Max-Age={FRESH_SECONDS}");
    HeaderValue::from_str(&value).unwrap_or(HeaderValue::from_static(""))
}

/// Checks until `stop` whether the replica responds and keeps up.
pub(crate) async fn watch(primary: Pool, replica: Pool, follows: Arc<AtomicBool>, stop: CancellationToken) {
    let mut every = interval(LOOK_EVERY);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut written = VecDeque::with_capacity(LOOKS_BEHIND_MAX);
    let mut before = None;
    loop {
        tokio::select! {
            _ = every.tick() => {}
            () = stop.cancelled() => return,
        }
        let now = match timeout(LOOK_TIME_MAX, look(&primary, &replica, &mut written)).await {
            Ok(Ok(true)) => Ok(()),
            Ok(Ok(false)) => Err("lagging".to_owned()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("not responding".to_owned()),
        };
        follows.store(now.is_ok(), Ordering::Relaxed);
        if before != Some(now.is_ok()) {
            match &now {
                Ok(()) => tracing::info!("reading pages from the replica"),
                Err(reason) => tracing::warn!(reason, "replica not usable; reading from the primary"),
            }
            before = Some(now.is_ok());
        }
    }
}

/// By WAL position and not by clock: on an idle database the replica's last change is old.
async fn look(primary: &Pool, replica: &Pool, written: &mut VecDeque<String>) -> sqlx::Result<bool> {
    let position: String = sqlx::query_scalar("select pg_current_wal_lsn()::text")
        .fetch_one(primary)
        .await?;
    if written.len() == LOOKS_BEHIND_MAX {
        written.pop_front();
    }
    written.push_back(position);
    // A promoted server is no longer a replica.
    sqlx::query_scalar(
        "select pg_is_in_recovery() and coalesce(pg_last_wal_replay_lsn() >= $1::text::pg_lsn, false)",
    )
    .bind(written.front())
    .fetch_one(replica)
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(method: Method, path: &str, headers: &[(HeaderName, &str)]) -> Request {
        let mut request = Request::new(Body::empty());
        *request.method_mut() = method;
        *request.uri_mut() = path.parse().expect("a path");
        for (name, value) in headers {
            request
                .headers_mut()
                .append(name, value.parse().expect("a value"));
        }
        request
    }

    #[test]
    fn only_those_to_whom_old_is_good_enough_are_answered_from_it() {
        let old = |method, path, headers: &[(HeaderName, &str)]| may_be_old(&request(method, path, headers));
        assert!(old(Method::GET, "/deliveries", &[]));
        assert!(!old(Method::POST, "/deliveries", &[]));
        assert!(!old(Method::HEAD, "/deliveries", &[]));
        let fresh = [(header::COOKIE, "a=b; postrider_fresh=1")];
        assert!(!old(Method::GET, "/deliveries", &fresh));
        assert!(!old(Method::GET, "/v1/tenants", &[]));
        for yes in ["max-stale", "no-transform, max-stale=30"] {
            assert!(old(Method::GET, "/v1/tenants", &[(header::CACHE_CONTROL, yes)]));
        }
        for no in ["no-cache", "max-stalest"] {
            assert!(!old(Method::GET, "/v1/tenants", &[(header::CACHE_CONTROL, no)]));
        }
    }
}
