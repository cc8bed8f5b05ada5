//! The HTTP API and the dashboard pages: configure Postrider, inspect deliveries, replay.
//! Invariant: only a replay changes a delivery here, and every route goes through `auth::check` first.
//!
//! The path of a request: `routes` (which rule) → `auth` (identity and permission) → `api/<noun>`, `pages/<page>` or
//! `grpc` (thin) → `actions/<noun>` (what the product does) → `tables/<table>`. `http` has what all of them share. A
//! test holds the direction of imports.

mod actions;
mod api;
mod auth;
pub mod grpc;
mod http;
mod openapi;
mod pages;
mod routes;
mod tables;

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, atomic::AtomicBool},
};

use axum::{Router, middleware::from_fn, routing::get, serve::ListenerExt};
use postrider_dispatcher::{Settings, Wake, guard::Guard, traces::Tracer, vault::Vault};
use postrider_proto::TenantId;
use tokio::{net::TcpListener, sync::oneshot};
use tokio_util::sync::CancellationToken;

use http::idle_timeout::TimedListener;
use pages::live::Live;

pub use actions::{emits::Emits, trials::Trials};
pub use api::description::document as openapi_document;
#[doc(hidden)]
pub use api::events::read_emit_body;
pub use auth::{
    PasswordError, REQUEST_RATE_DEFAULT, RequestRates, Role, Rule, TENANT_REQUEST_RATE_DEFAULT,
    TrustedProxies, set_admin_password,
};
pub use http::{
    cells::{Cells, OpenCell, OpenedCell},
    shares::Limits,
    slots::Slots,
};
pub use routes::Route;
pub use tables::pool::{IDLE_TRANSACTION_TIMEOUT, Pool, PooledConnection, Reserves, STATEMENT_TIMEOUT};

/// Everything the API and the pages need; created by the root.
#[derive(Clone)]
pub struct App {
    pub pool: Pool,
    /// For lookups that every request makes before anything else.
    pub lookups: Pool,
    /// Of the database with people, sessions and keys. The same as `pool`, except in the app of a cell.
    pub home: Pool,
    /// The cells beside home.
    pub cells: Cells,
    /// The cell that `pool` belongs to, in an installation that has several.
    pub cell: Option<String>,
    pub limits: Arc<Limits>,
    pub wake: Wake,
    pub emits: Arc<Emits>,
    pub vault: Vault,
    pub guard: Guard,
    pub trials: Trials,
    /// Defaults for endpoints without a setting of their own.
    pub defaults: Settings,
    /// The base of links; also decides whether cookies may be sent over plain http.
    pub public_url: String,
    pub admin_api_key: String,
    /// Ends long-lived streams.
    pub stop: CancellationToken,
    /// Slots for those streams.
    pub streams: Arc<Slots<TenantId>>,
    pub request_rates: Arc<RequestRates>,
    pub trusted_proxies: TrustedProxies,
    /// The metrics of this process in Prometheus text format.
    pub metrics: fn() -> String,
    /// What is wrong with a log filter.
    pub check_log_filter: fn(&str) -> Result<(), String>,
    pub tracer: Tracer,
}

/// Slots for listener streams.
pub fn streams() -> Arc<Slots<TenantId>> {
    Slots::new(
        actions::listening::STREAMS_MAX,
        actions::listening::STREAMS_PER_TENANT_MAX,
    )
}

/// Cloning it for each request only increments a reference count.
type Shared = Arc<App>;

pub fn router(app: App) -> Router {
    routes::build(Arc::new(app), None, Live::default()).0
}

/// Each route with its rule, so that a test can try every route with every role.
pub fn routes(app: App) -> Vec<Route> {
    routes::build(Arc::new(app), None, Live::default()).1
}

/// Serves until `end`, while there is no database yet: the process is alive, and everything else has to wait.
pub async fn serve_while_starting(listener: TcpListener, end: CancellationToken) -> io::Result<()> {
    let router = Router::new()
        .route("/healthz", get(api::health::healthz))
        .fallback(api::health::while_starting);
    axum::serve(listener, router)
        .with_graceful_shutdown(end.cancelled_owned())
        .await
}

/// Serves until `stop`; then accepts nothing new and finishes running requests. Reads that may be stale use
/// `replica`, if there is one.
pub async fn serve(
    listener: TcpListener,
    grpc: Option<TcpListener>,
    app: App,
    replica: Option<Pool>,
    open_cell: OpenCell,
    stop: CancellationToken,
) -> io::Result<()> {
    http::metrics::start();
    let app = Arc::new(app);
    let begin = http::cells::Begin {
        open: open_cell,
        work: |app, stop| {
            tokio::spawn(actions::listening::sweep(app, stop));
        },
    };
    let (say, known) = oneshot::channel();
    tokio::spawn(http::cells::follow(app.clone(), begin, say, stop.clone()));
    // An error: the process stops.
    let _ = known.await;
    tokio::spawn(actions::listening::sweep(app.clone(), stop.clone()));
    tokio::spawn(actions::form_results::sweep(app.clone(), stop.clone()));
    let failures = auth::failures::keep(app.clone(), stop.clone());
    // With the peer's address: failed sign-ins are counted by it.
    let live = Live::until(stop.clone());
    let mut router = routes::build(app.clone(), None, live.clone()).0;
    if let Some(pool) = replica {
        let follows = Arc::new(AtomicBool::new(false));
        tokio::spawn(http::read_replica::watch(
            app.pool.clone(),
            pool.clone(),
            follows.clone(),
            stop.clone(),
        ));
        let reading = App {
            pool,
            ..App::clone(&app)
        };
        let reads = routes::build(app.clone(), Some(Arc::new(reading)), live).0;
        router = http::read_replica::serve(router.clone(), reads.fallback_service(router), follows);
    }
    let router = router.layer(from_fn(http::draining::close_when_stopping));
    let service = router.into_make_service_with_connect_info::<SocketAddr>();
    // `tap_io` does nothing here except that it provides the peer's address for a custom listener.
    let http = axum::serve(TimedListener(listener).tap_io(|_| {}), service)
        .with_graceful_shutdown(stop.clone().cancelled_owned())
        .into_future();
    let http = async { tokio::join!(http, failures).0 };
    match grpc {
        None => http.await,
        Some(listener) => tokio::try_join!(http, grpc::serve(listener, app, stop)).map(|_| ()),
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    /// Each room with the rooms it may import from. A room never imports from one above it, so there is no cycle.
    const ROOMS: [(&str, &[&str]); 9] = [
        ("routes", &["api", "pages", "openapi", "auth", "http"]),
        ("pages", &["api", "openapi", "actions", "auth", "http", "tables"]),
        ("api", &["openapi", "actions", "auth", "http", "tables"]),
        ("grpc", &["actions", "auth", "http", "tables"]),
        ("actions", &["auth", "http", "tables"]),
        ("openapi", &["auth", "http"]),
        ("auth", &["http", "tables"]),
        ("http", &["tables"]),
        ("tables", &[]),
    ];

    #[test]
    fn rooms_import_only_downwards() {
        for (place, (room, below)) in ROOMS.iter().enumerate() {
            let is_below = |name: &&str| ROOMS[place + 1..].iter().any(|(room, _)| room == name);
            assert!(below.iter().all(is_below), "{room}");
            for (file, text) in sources(room) {
                for found in rooms_named(&text) {
                    assert!(
                        found == *room || below.contains(&found),
                        "{file} imports from {found}, which {room} may not"
                    );
                }
            }
        }
    }

    /// The room's files, `room.rs` and below `room/`, without their tests.
    fn sources(room: &str) -> Vec<(String, String)> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let (mut open, mut found) = (vec![root.join(room), root.join(format!("{room}.rs"))], Vec::new());
        while let Some(path) = open.pop() {
            if path.is_dir() {
                let entries = fs::read_dir(&path).expect("a room");
                open.extend(entries.map(|entry| entry.expect("an entry").path()));
            } else if path.extension().is_some_and(|ending| ending == "rs")
                && path.is_file()
                && !path.ends_with("tests.rs")
            {
                let text = fs::read_to_string(&path).expect("a source file");
                let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
                found.push((path.display().to_string(), code.to_owned()));
            }
        }
        assert!(!found.is_empty(), "{room} has no files");
        found
    }

    /// The rooms in `crate::room` and in the first level of `crate::{…}`.
    fn rooms_named(code: &str) -> BTreeSet<&'static str> {
        let mut names = BTreeSet::new();
        for rest in code.split("crate::").skip(1) {
            let level = i32::from(rest.starts_with('{'));
            let mut depth = 0;
            let mut top = String::new();
            for letter in rest.chars() {
                match letter {
                    '{' => depth += 1,
                    '}' => depth -= 1,
                    _ if depth <= level => top.push(letter),
                    _ => {}
                }
                let is_over = depth == 0 && !(letter.is_alphanumeric() || "_:".contains(letter));
                if letter == ';' || is_over {
                    break;
                }
            }
            let paths = top.split([',', ';']).map(|path| path.trim().split("::").next());
            let of_rooms = ROOMS.iter().map(|(room, _)| *room);
            let first: BTreeSet<&str> = paths.flatten().collect();
            names.extend(of_rooms.filter(|room| first.contains(room)));
        }
        names
    }

    #[test]
    fn rooms_are_found_in_every_form_of_an_import() {
        let found = |code: &str| rooms_named(code).into_iter().collect::<Vec<_>>();
        assert_eq!(
            found("use crate::{\n    App,\n    http::{api, x},\n    tables,\n};"),
            ["http", "tables"]
        );
        assert_eq!(found("use crate::auth::{Rule, api};"), ["auth"]);
        assert_eq!(found("crate::actions::replay::replay(&mut http)"), ["actions"]);
        assert!(found("use crate::{Pool, Shared};").is_empty());
    }
}
