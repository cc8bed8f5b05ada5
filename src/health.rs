//! Liveness, readiness and metrics on a separate address, without a key. Served from before the database is there until
//! everything else has ended, so that a start that waits and a stop that hangs can be seen.

use std::fmt::Write;

use axum::{
    Router,
    http::{HeaderName, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use postrider_dispatcher::health;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::metrics;

/// The same as on the API's address.
const RETRY_AFTER_SECONDS: &str = "1";

pub(crate) async fn serve(listener: TcpListener, stop: CancellationToken) -> std::io::Result<()> {
    let routes = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(prometheus));
    axum::serve(listener, routes)
        .with_graceful_shutdown(stop.cancelled_owned())
        .await
}

async fn prometheus() -> ([(HeaderName, &'static str); 1], String) {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    (kind, metrics::render())
}

/// Every reason on a line of its own.
async fn ready() -> Response {
    let reasons = health::not_ready();
    if reasons.is_empty() {
        return "ready\n".into_response();
    }
    let mut text = String::new();
    for reason in reasons {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{reason}");
    }
    let soon = [(header::RETRY_AFTER, RETRY_AFTER_SECONDS)];
    (StatusCode::SERVICE_UNAVAILABLE, soon, text).into_response()
}
