//! The audit log, newest first.

use axum::{Json, extract::State};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::Answer;
use crate::{
    Shared,
    http::{
        input::Query,
        pagination::{Page, PageQuery},
        shapes,
    },
    tables::audit::{self, Narrowed},
};

#[derive(Serialize, ToSchema)]
#[schema(as = AuditEntry)]
pub(crate) struct AuditView {
    at: DateTime<Utc>,
    actor: String,
    action: String,
    tenant: Option<String>,
    subject: String,
    #[schema(schema_with = shapes::object_or_null)]
    detail: Option<Value>,
}

pub(crate) async fn list(
    State(app): State<Shared>,
    Query(query): Query<PageQuery>,
) -> Answer<Page<AuditView>> {
    let (limit, before) = (query.limit()?, query.after::<i64>()?.unwrap_or(i64::MAX));
    let rows = audit::list(&app.pool, &Narrowed::default(), before, limit + 1).await?;
    Ok(Json(Page::cut(rows, limit, |row| row.id).map(|row| AuditView {
        at: row.at,
        actor: row.actor,
        action: row.action,
        tenant: row.tenant,
        subject: row.subject,
        detail: row.detail,
    })))
}
