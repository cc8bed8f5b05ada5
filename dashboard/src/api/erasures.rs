//! Erasures: the jobs that delete a deleted tenant's data, with their progress.

use axum::{
    Json,
    extract::{Path, State},
};
use chrono::{DateTime, Utc};
use postrider_dispatcher::erasure::{self, Erasure};
use serde::Serialize;
use utoipa::ToSchema;

use super::Answer;
use crate::{
    Shared,
    http::{
        input::Query,
        pagination::{Page, PageQuery},
        problem::Problem,
        shapes,
    },
    tables::is_public_id,
};

#[derive(Serialize, ToSchema)]
#[schema(as = Erasure)]
pub(crate) struct ErasureView {
    id: String,
    tenant: String,
    #[schema(schema_with = shapes::erasure_state)]
    state: &'static str,
    /// Number of events; related rows are deleted with them.
    total: i64,
    done: i64,
    created_by: String,
    created_at: DateTime<Utc>,
    ended_at: Option<DateTime<Utc>>,
}

impl From<Erasure> for ErasureView {
    fn from(row: Erasure) -> Self {
        Self {
            id: row.public_id,
            tenant: row.slug,
            state: if row.ended_at.is_some() { "done" } else { "running" },
            total: row.total.max(row.done),
            done: row.done,
            created_by: row.asked_by,
            created_at: row.created_at,
            ended_at: row.ended_at,
        }
    }
}

pub(crate) async fn get(State(app): State<Shared>, Path(id): Path<String>) -> Answer<ErasureView> {
    let found = match is_public_id("era", &id) {
        true => erasure::find(&app.pool, &id).await?,
        false => None,
    };
    let found = found.ok_or_else(|| Problem::not_found("erasure"))?;
    Ok(Json(found.into()))
}

pub(crate) async fn list(
    State(app): State<Shared>,
    Query(query): Query<PageQuery>,
) -> Answer<Page<ErasureView>> {
    let (limit, before) = (query.limit()?, query.after::<i64>()?.unwrap_or(i64::MAX));
    let rows = erasure::list(&app.pool, before, limit + 1).await?;
    Ok(Json(Page::cut(rows, limit, |row| row.id).map(ErasureView::from)))
}
