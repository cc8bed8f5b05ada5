//! Dead letters in numbers: by endpoint, type and reason, from counts that are kept beside them. The dead letters
//! themselves are `GET …/deliveries?state=dead`.

use axum::{Extension, Json, extract::State};
use serde::Serialize;
use utoipa::ToSchema;

use super::Answer;
use crate::{
    Shared,
    auth::Tenant,
    tables::dead_letters::{self, Group},
};

/// An endpoint has few types and reasons: this is more than a tenant may have endpoints.
const GROUPS_MAX: i64 = 10_000;

#[derive(Serialize, ToSchema)]
#[schema(as = DeadLetterGroups)]
pub(crate) struct Groups {
    /// The largest first.
    data: Vec<Group>,
    /// Always null: it is one page.
    next_cursor: Option<String>,
}

pub(crate) async fn groups(
    State(app): State<Shared>,
    Extension(tenant): Extension<Tenant>,
) -> Answer<Groups> {
    let data = dead_letters::groups(&app.pool, Some(tenant.id), None, GROUPS_MAX).await?;
    Ok(Json(Groups {
        data,
        next_cursor: None,
    }))
}
