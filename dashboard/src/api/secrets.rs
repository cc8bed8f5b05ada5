//! Signing secrets: revealed to their owner, and rotated with an overlap in which both sign.

use axum::{
    Extension, Json,
    extract::{Path, State},
    http::StatusCode,
    response::Response,
};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Answer;
use crate::{
    Shared,
    actions::secrets::{self, Opened, Rotation, Shown},
    auth::{Actor, Tenant},
    http::{
        idempotency::{Claim, Work},
        input::OptionalBody,
        problem::Problem,
        shapes,
        wait_until_applied::settled,
    },
};

#[derive(Serialize, ToSchema)]
#[schema(as = Secret)]
pub(crate) struct SecretView {
    #[serde(flatten)]
    shown: Shown,
    /// `current`, or `retiring` until a set time.
    #[schema(schema_with = shapes::secret_state)]
    state: &'static str,
    created_at: DateTime<Utc>,
    retires_at: Option<DateTime<Utc>>,
}

impl From<Opened> for SecretView {
    fn from(opened: Opened) -> Self {
        Self {
            shown: Shown::from(&opened.secret),
            state: match opened.retires_at {
                None => "current",
                Some(_) => "retiring",
            },
            created_at: opened.created_at,
            retires_at: opened.retires_at,
        }
    }
}

#[derive(Serialize, ToSchema)]
pub(crate) struct Secrets {
    /// Newest first.
    data: Vec<SecretView>,
}

impl From<Vec<Opened>> for Secrets {
    fn from(opened: Vec<Opened>) -> Self {
        Self {
            data: opened.into_iter().map(SecretView::from).collect(),
        }
    }
}

#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = SecretRotationRequest)]
pub(crate) struct RotateForm {
    #[schema(schema_with = shapes::overlap_or_null)]
    overlap_seconds: Option<i64>,
    #[schema(schema_with = shapes::secret_or_null)]
    secret: Option<String>,
}

pub(crate) async fn reveal(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    Path((_, id)): Path<(String, String)>,
) -> Answer<Secrets> {
    let opened = secrets::reveal(&app, &actor, &tenant, &id).await?;
    Ok(Json(Secrets::from(opened)))
}

pub(crate) async fn rotate(
    State(app): State<Shared>,
    Extension(actor): Extension<Actor>,
    Extension(tenant): Extension<Tenant>,
    Path((_, id)): Path<(String, String)>,
    claim: Claim,
    OptionalBody(form): OptionalBody<RotateForm>,
) -> Result<Response, Problem> {
    let rotation = Rotation::read(form.overlap_seconds, form.secret)?;
    let mut work = Work::begin(&app, claim).await?;
    let rotated = secrets::rotate(&app, &actor, &tenant, &id, &mut work, rotation).await?;
    let xid = work.settles(rotated.shard).await?;
    let response = work
        .commit(StatusCode::OK, &Secrets::from(rotated.secrets))
        .await?;
    app.wake.now();
    settled(&app.pool, rotated.shard, &xid).await?;
    Ok(response)
}
