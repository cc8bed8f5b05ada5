//! Liveness, readiness and metrics on an address of their own, without a key.

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
const DATABASE_WAIT: Duration = Duration::from_secs(1);

pub(crate) async fn serve(listener: TcpListener, pool: Pool, stop: CancellationToken) -> std::io::Result<()> {
    let routes = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(figures))
        .with_state((pool, stop.clone()));
    axum::serve(listener, routes)
        .with_graceful_shutdown(stop.cancelled_owned())
        .await
}

async fn figures() -> ([(HeaderName, &'static str); 1], String) {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    (kind, metrics::render())
}

/// Ready is: not stopping, and the database answers.
async fn ready(State((pool, stop)): State<(Pool, CancellationToken)>) -> (StatusCode, &'static str) {
    if stop.is_cancelled() {
        return (StatusCode::SERVICE_UNAVAILABLE, "stopping\n");
    }
    match timeout(DATABASE_WAIT, sqlx::query("select 1").execute(&pool)).await {
        Ok(Ok(_)) => (StatusCode::OK, "ready\n"),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "the database does not answer\n"),
    }
}
