//! The audit log, newest first.

use axum::extract::State;
use postrider_proto::api::AuditEntry;
use serde::Deserialize;
use serde_json::json;

use super::Partial;
use crate::{
    Shared,
    actions::audit_log::{self, AuditFilter, action_names, entry},
    auth::Rule::Admin,
    http::{
        cells::Positions,
        input::Query,
        pagination::{self, Page, cut},
        problem::{Kind, Problem},
    },
    openapi::Operation,
};

pub(crate) fn operations() -> Vec<Operation> {
    let text = || json!({"type": "string"});
    let time = || json!({"type": "string", "format": "date-time"});
    let actions: Vec<&str> = action_names().collect();
    vec![
        Operation::read(Admin, "/v1/audit", list)
            .named("listAudit", "List audit log entries")
            .query("tenant", text(), "Only entries about this tenant.")
            .query("actor", text(), "Only entries of this actor, like `person:ada`.")
            .query(
                "action",
                json!({"type": "string", "enum": actions}),
                "Only entries of this action.",
            )
            .query("since", time(), "Only entries at or after this time.")
            .query("until", time(), "Only entries before this time.")
            .returns_page::<AuditEntry>("A page of audit log entries, newest first."),
    ]
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct AuditQuery {
    limit: Option<String>,
    cursor: Option<String>,
    tenant: String,
    actor: String,
    action: String,
    since: String,
    until: String,
}

/// Errors in a query string are 400, those in a body 422.
fn of_query(problem: Problem) -> Problem {
    match problem.errors.first() {
        Some(fault) if problem.kind == Kind::Invalid => Problem::bad_request(format!(
            "Invalid query parameter `{}`: {}.",
            fault.pointer.trim_start_matches('/'),
            fault.detail
        )),
        _ => problem,
    }
}

async fn list(
    State(app): State<Shared>,
    Query(query): Query<AuditQuery>,
) -> Result<Partial<Page<AuditEntry>>, Problem> {
    let limit = pagination::limit(query.limit.as_deref())?;
    let before: Positions = pagination::after(query.cursor.as_deref())?.unwrap_or_default();
    let filter = AuditFilter {
        tenant: &query.tenant,
        actor: &query.actor,
        action: &query.action,
        since: &query.since,
        until: &query.until,
    };
    let Some(narrowed) = filter.narrow(&app).await.map_err(of_query)? else {
        return Ok(Partial::whole(cut(Vec::new(), limit, |_: &AuditEntry| 0_i64)));
    };
    let found = audit_log::list(&app, &narrowed, &before, limit).await?;
    let page = Page {
        data: found.rows.into_iter().map(entry).collect(),
        next_cursor: found.next.map(|next| pagination::encode(&next)),
    };
    Ok(Partial::without(page, &found.silent))
}
