//! Liveness and readiness, without a key.

use std::time::Duration;

use axum::{Json, extract::State};
use serde_json::{Value, json};

use super::Answer;
use crate::{Shared, problem::Problem};

const DATABASE_TIME_MAX: Duration = Duration::from_secs(1);

/// The process runs.
pub(crate) async fn healthz() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// Requests can be served: the database answers.
pub(crate) async fn readyz(State(app): State<Shared>) -> Answer<Value> {
    let asked = sqlx::query("select 1").execute(&app.pool);
    match tokio::time::timeout(DATABASE_TIME_MAX, asked).await {
        Ok(Ok(_)) => Ok(Json(json!({"status": "ready"}))),
        Ok(Err(_)) | Err(_) => Err(Problem::busy()),
    }
}
