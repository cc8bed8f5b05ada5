//! Alerts: one operational event when an endpoint's dead letters reach a threshold.

use axum::{Json, extract::Path, http::StatusCode};
use postrider_proto::api::AlertSettings;

use super::ApiResult;
use crate::{
    actions::alerts,
    auth::{Call, Rule::Own},
    http::{input::Body, problem::Problem},
    openapi::Operation,
    tables::alerts::AlertRow,
};

const ALERT: &str = "/v1/tenants/{tenant}/endpoints/{endpoint}/alert";

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::put(Own, ALERT, put)
            .named("putAlert", "Create or update an alert")
            .describe(
                "Emits one event `postrider.alert.dead_letters` when the endpoint's dead letters reach the threshold, and \
                 the next one only after they have dropped below it.",
            )
            .accepts::<AlertSettings>()
            .returns::<AlertRow>(200, "The alert."),
        Operation::get(Own, ALERT, get)
            .named("getAlert", "Retrieve an alert")
            .returns::<AlertRow>(200, "The alert."),
        Operation::delete(Own, ALERT, delete)
            .named("deleteAlert", "Delete an alert")
            .returns_nothing("The alert was deleted."),
    ]
}

async fn put(
    call: Call,
    Path((_, endpoint)): Path<(String, String)>,
    Body(form): Body<AlertSettings>,
) -> ApiResult<AlertRow> {
    alerts::put(&call.app, &call.actor, &call.tenant, &endpoint, &form)
        .await
        .map(Json)
}

async fn get(call: Call, Path((_, endpoint)): Path<(String, String)>) -> ApiResult<AlertRow> {
    alerts::find(&call.app, &call.tenant, &endpoint).await.map(Json)
}

async fn delete(call: Call, Path((_, endpoint)): Path<(String, String)>) -> Result<StatusCode, Problem> {
    alerts::delete(&call.app, &call.actor, &call.tenant, &endpoint).await?;
    Ok(StatusCode::NO_CONTENT)
}
