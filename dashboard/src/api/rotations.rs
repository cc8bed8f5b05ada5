//! How far the rotation of a tenant's secrets is: when each was rotated, until when the old one signs, when the next is
//! due, and whether the receiver has refused requests since. That a receiver still needs the old secret can't be known to
//! a sender; an answer of 401 or 403 since the rotation is the nearest sign of it.

use axum::{Extension, Json, extract::State};

use super::Answer;
use crate::{
    Shared,
    auth::Tenant,
    input::Query,
    listing::{Page, PageQuery},
    tables::rotations::{self, Of, RotationRow},
};

pub(crate) async fn list(
    State(app): State<Shared>,
    Extension(tenant): Extension<Tenant>,
    Query(query): Query<PageQuery>,
) -> Answer<Page<RotationRow>> {
    let (limit, after) = (query.limit()?, query.after::<i32>()?.unwrap_or_default());
    let rows = rotations::list(&app.pool, Of::Tenant(tenant.id), after, limit + 1).await?;
    Ok(Json(Page::cut(rows, limit, |row| row.number.0)))
}
