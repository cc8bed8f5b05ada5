//! The audit log, newest entries first.

use askama::Template;
use askama_web::WebTemplate;
use serde::Deserialize;
use serde_json::Value;

use super::{Frame, Moment, Paged};
use crate::{
    auth::Visit,
    http::{
        input::{Query, is_plain_text},
        pagination,
        problem::Problem,
    },
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
    /// Name and value.
    details: Vec<(String, String)>,
}

impl From<AuditRow> for Entry {
    fn from(row: AuditRow) -> Self {
        Self {
            at: Moment(Some(row.at)),
            actor: row.actor,
            action: row.action,
            tenant: row.tenant,
            subject: row.subject,
            details: row.detail.map(details).unwrap_or_default(),
        }
    }
}

/// The fields of an entry's details, without nulls.
fn details(detail: Value) -> Vec<(String, String)> {
    let text = |value: Value| match value {
        Value::String(text) => text,
        value => value.to_string(),
    };
    match detail {
        Value::Object(fields) => fields
            .into_iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(name, value)| (name.replace('_', " "), text(value)))
            .collect(),
        value => vec![(String::new(), text(value))],
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

pub(crate) async fn show(visit: Visit, Query(query): Query<AuditQuery>) -> Paged<AuditPage> {
    if !is_plain_text(&query.actor, ACTOR_BYTES_MAX) {
        return Err(Problem::bad_request(format!(
            "Invalid actor: must be plain text of at most {ACTOR_BYTES_MAX} bytes."
        ))
        .into());
    }
    let before: Option<i64> = pagination::after(query.cursor.as_deref())?;
    let tenant = match query.tenant.as_str() {
        "" => None,
        slug => Some(tenants::find(&visit.app.pool, slug).await?.map(|row| row.id)),
    };
    let page = match tenant {
        // An unknown tenant has no entries.
        Some(None) => pagination::Page {
            data: Vec::new(),
            next_cursor: None,
        },
        known => {
            let narrowed = Narrowed {
                tenant: known.flatten(),
                actor: Some(query.actor.trim().to_owned()).filter(|actor| !actor.is_empty()),
            };
            let rows = audit::list(&visit.app.pool, &narrowed, before.unwrap_or(i64::MAX), LINES + 1).await?;
            pagination::cut(rows, LINES, |row| row.id).map(Entry::from)
        }
    };
    Ok(AuditPage {
        frame: Frame::new(visit.session, "audit"),
        tenant: query.tenant,
        actor: query.actor,
        entries: page.data,
        next: page.next_cursor,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn details_are_named_and_nulls_are_omitted() {
        let found = details(json!({ "overlap_seconds": 60, "type": null, "url": "https://a.example" }));
        let pairs = [("overlap seconds", "60"), ("url", "https://a.example")];
        assert_eq!(
            found,
            pairs.map(|(name, value)| (name.to_owned(), value.to_owned()))
        );
        assert_eq!(details(json!(7)), [(String::new(), "7".to_owned())]);
    }
}
