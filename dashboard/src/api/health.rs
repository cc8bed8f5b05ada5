//! Liveness and readiness without a key, and metrics with one.

use axum::{
    Json,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use postrider_dispatcher::health;
use serde_json::{Value, json};

use super::ApiResult;
use crate::{
    Shared,
    auth::Rule::{Admin, Open},
    http::problem::Problem,
    openapi::Operation,
};

pub(crate) fn operations() -> Vec<Operation> {
    let status =
        || json!({"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}});
    vec![
        Operation::get(Open, "/healthz", healthz)
            .named("getHealth", "Liveness check")
            .returns_json(200, status(), "The process is running."),
        Operation::get(Open, "/readyz", readyz)
            .named("getReadiness", "Readiness check")
            .describe("503 if the process can't do its job now. `detail` names every reason.")
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
pub(crate) async fn healthz() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

async fn readyz() -> ApiResult<Value> {
    let reasons = health::not_ready();
    match reasons.is_empty() {
        true => Ok(Json(json!({"status": "ready"}))),
        false => Err(Problem::not_ready(&reasons)),
    }
}

/// Any request before the API is there.
pub(crate) async fn while_starting() -> Problem {
    Problem::not_ready(&health::not_ready())
}

async fn metrics(State(app): State<Shared>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    (kind, (app.metrics)()).into_response()
}
