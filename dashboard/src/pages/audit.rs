//! Who did what, the newest first.

use askama::Template;
use askama_web::WebTemplate;
use axum::{Extension, extract::State};
use serde::Deserialize;

use super::{Frame, Moment, PageProblem};
use crate::{
    Shared,
    auth::Session,
    input::{Query, is_plain_text},
    listing,
    problem::Problem,
    tables::{
        audit::{self, AuditRow, Narrowed},
        tenants,
    },
};

const LINES: i64 = 50;
const ACTOR_BYTES_MAX: usize = 200;

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct AuditQuery {
    tenant: String,
    actor: String,
    cursor: Option<String>,
}

struct Entry {
    at: Moment,
    actor: String,
    action: String,
    tenant: Option<String>,
    subject: String,
    detail: String,
}

impl From<AuditRow> for Entry {
    fn from(row: AuditRow) -> Self {
        Self {
            at: Moment(Some(row.at)),
            actor: row.actor,
            action: row.action,
            tenant: row.tenant,
            subject: row.subject,
            detail: row.detail.map(|detail| detail.to_string()).unwrap_or_default(),
        }
    }
}

#[derive(Template, WebTemplate)]
#[template(path = "audit.html")]
pub(crate) struct AuditPage {
    frame: Frame,
    tenant: String,
    actor: String,
    entries: Vec<Entry>,
    next: Option<String>,
}

pub(crate) async fn show(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
    Query(query): Query<AuditQuery>,
) -> Result<AuditPage, PageProblem> {
    if !is_plain_text(&query.actor, ACTOR_BYTES_MAX) {
        return Err(Problem::bad_request("There is no such actor.").into());
    }
    let before = query.cursor.as_deref().map(listing::decode::<i64>).transpose()?;
    let tenant = match query.tenant.as_str() {
        "" => None,
        slug => Some(tenants::find(&app.pool, slug).await?.map(|row| row.id)),
    };
    let page = match tenant {
        // A tenant that is not there did nothing.
        Some(None) => listing::Page {
            data: Vec::new(),
            next_cursor: None,
        },
        known => {
            let narrowed = Narrowed {
                tenant: known.flatten(),
                actor: Some(query.actor.trim().to_owned()).filter(|actor| !actor.is_empty()),
            };
            let rows = audit::list(&app.pool, &narrowed, before.unwrap_or(i64::MAX), LINES + 1).await?;
            listing::Page::cut(rows, LINES, |row| row.id).map(Entry::from)
        }
    };
    Ok(AuditPage {
        frame: Frame::new(session, "audit"),
        tenant: query.tenant,
        actor: query.actor,
        entries: page.data,
        next: page.next_cursor,
    })
}
