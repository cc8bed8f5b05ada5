//! Liveness and readiness without a key, and metrics with one.

use std::time::Duration;

use axum::{
    Json,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::Answer;
use crate::{Shared, http::problem::Problem};

const DATABASE_TIME_MAX: Duration = Duration::from_secs(1);

/// The process is running.
pub(crate) async fn healthz() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// The database responds, so requests can be served.
pub(crate) async fn readyz(State(app): State<Shared>) -> Answer<Value> {
    let asked = sqlx::query("select 1").execute(&app.lookups);
    match tokio::time::timeout(DATABASE_TIME_MAX, asked).await {
        Ok(Ok(_)) => Ok(Json(json!({"status": "ready"}))),
        Ok(Err(_)) | Err(_) => Err(Problem::busy()),
    }
}

pub(crate) async fn metrics(State(app): State<Shared>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    (kind, (app.metrics)()).into_response()
}
