//! Alerts: one operational event when an endpoint's dead letters reach a threshold.

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::StatusCode,
};
use postrider_proto::limits::ALERT_DEAD_LETTERS_MAX;
use serde::Deserialize;
use serde_json::json;
use utoipa::ToSchema;

use super::Answer;
use crate::{
    Shared,
    auth::{Actor, Tenant},
    http::{
        input::Body,
        problem::{Faults, Problem},
        shapes,
    },
    tables::{
        self,
        alerts::{self, AlertRow},
        audit::{self, Action, Entry},
        endpoints,
    },
};

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = AlertSettings)]
pub(crate) struct AlertForm {
    #[schema(schema_with = shapes::threshold)]
    dead_letters: i64,
}

pub(crate) async fn put(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    Path((_, endpoint)): Path<(String, String)>,
    Body(form): Body<AlertForm>,
) -> Answer<AlertRow> {
    let mut faults = Faults::default();
    let threshold: Option<i64> =
        faults.number("dead_letters", Some(form.dead_letters), 1, ALERT_DEAD_LETTERS_MAX);
    faults.done()?;
    let mut transaction = tables::begin(&app.pool).await?;
    let row = endpoints::lock(&mut *transaction, tenant.id, &endpoint)
        .await?
        .ok_or_else(|| Problem::not_found("endpoint"))?;
    let alert = alerts::put(&mut *transaction, row.id, threshold.unwrap_or(1), &actor.0).await?;
    let entry = Entry {
        actor: &actor,
        action: Action::AlertPut,
        tenant: Some(tenant.id),
        subject: &endpoint,
        detail: Some(json!({ "dead_letters": alert.dead_letters })),
    };
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    Ok(Json(alert))
}

pub(crate) async fn get(
    State(app): State<Shared>,
    Extension(tenant): Extension<Tenant>,
    Path((_, endpoint)): Path<(String, String)>,
) -> Answer<AlertRow> {
    let row = endpoints::find(&app.pool, tenant.id, &endpoint)
        .await?
        .ok_or_else(|| Problem::not_found("endpoint"))?;
    let alert = alerts::find(&app.pool, row.id).await?;
    alert.map(Json).ok_or_else(|| Problem::not_found("alert"))
}

pub(crate) async fn delete(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    Path((_, endpoint)): Path<(String, String)>,
) -> Result<StatusCode, Problem> {
    let mut transaction = tables::begin(&app.pool).await?;
    let row = endpoints::lock(&mut *transaction, tenant.id, &endpoint)
        .await?
        .ok_or_else(|| Problem::not_found("endpoint"))?;
    if !alerts::delete(&mut *transaction, row.id).await? {
        return Err(Problem::not_found("alert"));
    }
    let entry = Entry {
        actor: &actor,
        action: Action::AlertDeleted,
        tenant: Some(tenant.id),
        subject: &endpoint,
        detail: None,
    };
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    Ok(StatusCode::NO_CONTENT)
}
