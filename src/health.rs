//! Liveness, readiness and metrics on a separate address, without a key.

use std::time::Duration;

use axum::{
    Router,
    extract::State,
    http::{HeaderName, StatusCode, header},
    routing::get,
};
use postrider_dashboard::Pool;
use tokio::{net::TcpListener, time::timeout};
use tokio_util::sync::CancellationToken;

use crate::metrics;

/// Probes usually give up after a second or two.
const DATABASE_TIMEOUT: Duration = Duration::from_secs(1);

pub(crate) async fn serve(listener: TcpListener, pool: Pool, stop: CancellationToken) -> std::io::Result<()> {
    let routes = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(prometheus))
        .with_state((pool, stop.clone()));
    axum::serve(listener, routes)
        .with_graceful_shutdown(stop.cancelled_owned())
        .await
}

async fn prometheus() -> ([(HeaderName, &'static str); 1], String) {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    (kind, metrics::render())
}

/// Ready: not stopping, and the database responds.
async fn ready(State((pool, stop)): State<(Pool, CancellationToken)>) -> (StatusCode, &'static str) {
    if stop.is_cancelled() {
        return (StatusCode::SERVICE_UNAVAILABLE, "stopping\n");
    }
    match timeout(DATABASE_TIMEOUT, sqlx::query("select 1").execute(&pool)).await {
        Ok(Ok(_)) => (StatusCode::OK, "ready\n"),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "database unavailable\n"),
    }
}
