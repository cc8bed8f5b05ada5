//! Liveness and readiness without a key, and metrics with one.

use std::time::Duration;

use axum::{
    Json,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::ApiResult;
use crate::{
    Shared,
    auth::Rule::{Admin, Open},
    http::problem::Problem,
    openapi::Operation,
};

const DATABASE_TIME_MAX: Duration = Duration::from_secs(1);

pub(crate) fn operations() -> Vec<Operation> {
    let status =
        || json!({"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}});
    vec![
        Operation::get(Open, "/healthz", healthz)
            .named("getHealth", "Liveness check")
            .returns_json(200, status(), "The process is running."),
        Operation::get(Open, "/readyz", readyz)
            .named("getReadiness", "Readiness check")
            .returns_json(200, status(), "Requests can be served."),
        Operation::get(Admin, "/metrics", metrics)
            .named("getMetrics", "Prometheus metrics")
            .describe("Also served without a key at POSTRIDER_METRICS_LISTEN.")
            .returns_in(
                200,
                "text/plain",
                json!({"type": "string"}),
                "Metrics in Prometheus text format.",
            ),
    ]
}

/// The process is running.
async fn healthz() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// The database responds, so requests can be served.
async fn readyz(State(app): State<Shared>) -> ApiResult<Value> {
    let asked = sqlx::query("select 1").execute(&app.lookups);
    match tokio::time::timeout(DATABASE_TIME_MAX, asked).await {
        Ok(Ok(_)) => Ok(Json(json!({"status": "ready"}))),
        Ok(Err(_)) | Err(_) => Err(Problem::busy()),
    }
}

async fn metrics(State(app): State<Shared>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    (kind, (app.metrics)()).into_response()
}
