//! `POST …/endpoints/{e}/test`: one made-up event now, answered with the attempt.

use axum::{
    Extension, Json,
    extract::{Path, State},
};
use serde::Deserialize;

use super::Answer;
use crate::{
    Shared,
    auth::{Actor, Tenant},
    input::OptionalBody,
    problem::Problem,
    tables::endpoints,
    test_event,
    transcript::Attempt,
};

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TestForm {
    r#type: Option<String>,
}

pub(crate) async fn send(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    Path((_, id)): Path<(String, String)>,
    OptionalBody(form): OptionalBody<TestForm>,
) -> Answer<Attempt> {
    let endpoint = endpoints::find(&app.pool, tenant.id, &id)
        .await?
        .ok_or_else(|| Problem::not_found("endpoint"))?;
    let sent = test_event::send(&app, &actor, &tenant, &endpoint, form.r#type.as_deref()).await?;
    Ok(Json(sent))
}
