//! The audit log, newest first.

use axum::{Json, extract::State};
use postrider_proto::api::AuditEntry;

use super::ApiResult;
use crate::{
    Shared,
    auth::Rule::Admin,
    http::{
        input::Query,
        pagination::{Page, PageQuery, cut},
    },
    openapi::Operation,
    tables::audit::{self, Narrowed},
};

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::read(Admin, "/v1/audit", list)
            .named("listAudit", "List audit log entries")
            .returns_page::<AuditEntry>("A page of audit log entries, newest first."),
    ]
}

async fn list(State(app): State<Shared>, Query(query): Query<PageQuery>) -> ApiResult<Page<AuditEntry>> {
    let (limit, before) = (query.limit()?, query.after::<i64>()?.unwrap_or(i64::MAX));
    let rows = audit::list(&app.pool, &Narrowed::default(), before, limit + 1).await?;
    Ok(Json(cut(rows, limit, |row| row.id).map(|row| AuditEntry {
        at: row.at,
        actor: row.actor,
        action: row.action,
        tenant: row.tenant,
        subject: row.subject,
        detail: row.detail,
    })))
}
