//! The audit log, newest entries first, with filters and an export.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    http::header,
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::Value;
use url::form_urlencoded::Serializer;

use super::{FormErrors, Frame, Moment, Paged, list_filters::time_from_form};
use crate::{
    Shared,
    actions::{
        audit_log::{self, AuditFilter, EXPORT_MAX},
        export::Format,
    },
    auth::Visit,
    http::{
        cells::Positions,
        input::Query,
        pagination,
        problem::{Problem, excerpt},
    },
    pages::stats_format::grouped,
    tables::audit::{AuditRow, Narrowed},
};

const LINES: i64 = 50;
/// Characters of a value before or after a change.
const VALUE_CHARS_MAX: usize = 300;

/// The filters as given in the address. Times without a zone are UTC.
#[derive(Default, Clone, Deserialize)]
#[serde(default)]
pub(crate) struct AuditQuery {
    tenant: String,
    actor: String,
    action: String,
    since: String,
    until: String,
    cursor: Option<String>,
    format: String,
}

impl AuditQuery {
    fn is_empty(&self) -> bool {
        self.filters().is_empty()
    }

    /// The address of the same filters.
    fn filters(&self) -> String {
        let mut address = Serializer::new(String::new());
        let fields = [
            ("tenant", &self.tenant),
            ("actor", &self.actor),
            ("action", &self.action),
            ("since", &self.since),
            ("until", &self.until),
        ];
        address.extend_pairs(fields.into_iter().filter(|(_, value)| !value.is_empty()));
        address.finish()
    }

    async fn narrow(&self, app: &Shared) -> Result<Option<Narrowed>, Problem> {
        let (since, until) = (time_from_form(&self.since), time_from_form(&self.until));
        let filter = AuditFilter {
            tenant: &self.tenant,
            actor: &self.actor,
            action: &self.action,
            since: &since,
            until: &until,
        };
        filter.narrow(app).await
    }
}

/// A setting before and after a change.
struct Changed {
    name: String,
    before: String,
    after: String,
}

struct Entry {
    at: Moment,
    actor: String,
    address: Option<String>,
    action: String,
    tenant: Option<String>,
    subject: String,
    /// The page of the subject.
    link: Option<String>,
    changes: Vec<Changed>,
    /// Name and value.
    details: Vec<(String, String)>,
}

impl Entry {
    /// Whether the subject is an id rather than a name.
    fn is_id(&self) -> bool {
        self.subject.contains('_')
    }
}

impl From<AuditRow> for Entry {
    fn from(row: AuditRow) -> Self {
        let changes = row.changes.map(changes).unwrap_or_default();
        let mut details = row.detail.map(details).unwrap_or_default();
        // What changed says more than the new value.
        details.retain(|(name, _)| name != "address" && changes.iter().all(|changed| changed.name != *name));
        Self {
            at: Moment(Some(row.at)),
            link: link(&row.action, &row.subject),
            actor: row.actor,
            address: row.address,
            action: row.action,
            tenant: row.tenant,
            subject: row.subject,
            changes,
            details,
        }
    }
}

fn link(action: &str, subject: &str) -> Option<String> {
    match action.split('.').next()? {
        _ if action.ends_with(".deleted") => None,
        "endpoint" | "secret" | "alert" => Some(format!("/endpoints/{subject}")),
        "tenant" | "portal_link" => Some(format!("/tenants/{subject}")),
        "delivery" => Some(format!("/deliveries/{subject}")),
        "replay" => Some(format!("/replays/{subject}")),
        "event_type" => Some(format!("/event-types/{subject}")),
        _ => None,
    }
}

fn text(value: Value) -> String {
    match value {
        Value::String(text) => text,
        value => value.to_string(),
    }
}

/// `{"name": {"before": …, "after": …}}`.
fn changes(value: Value) -> Vec<Changed> {
    let Value::Object(fields) = value else {
        return Vec::new();
    };
    let side = |change: &Value, name: &str| match change.get(name).cloned().unwrap_or_default() {
        Value::Null => "default".to_owned(),
        value => shortened(text(value)),
    };
    fields
        .into_iter()
        .map(|(name, change)| Changed {
            before: side(&change, "before"),
            after: side(&change, "after"),
            name: name.replace('_', " "),
        })
        .collect()
}

fn shortened(text: String) -> String {
    match text.char_indices().nth(VALUE_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// The fields of an entry's details, without nulls.
fn details(detail: Value) -> Vec<(String, String)> {
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
    query: AuditQuery,
    errors: FormErrors,
    actions: Vec<&'static str>,
    entries: Vec<Entry>,
    next: Option<String>,
}

impl AuditPage {
    fn export_max(&self) -> String {
        grouped(EXPORT_MAX)
    }
}

pub(crate) async fn show(visit: Visit, Query(query): Query<AuditQuery>) -> Paged<Response> {
    let before: Positions = pagination::after(query.cursor.as_deref())?.unwrap_or_default();
    let mut actions: Vec<&'static str> = audit_log::action_names().collect();
    actions.sort_unstable();
    let mut page = AuditPage {
        frame: Frame::new(visit.session, "audit"),
        errors: FormErrors::default(),
        actions,
        entries: Vec::new(),
        next: None,
        query,
    };
    match page.query.narrow(&visit.app).await {
        Ok(Some(narrowed)) => {
            let found = audit_log::list(&visit.app, &narrowed, &before, LINES).await?;
            page.frame = page.frame.without(&found.silent);
            page.entries = found.rows.into_iter().map(Entry::from).collect();
            page.next = found.next.map(|next| pagination::encode(&next));
        }
        // An unknown tenant has no entries.
        Ok(None) => {}
        Err(problem) => page.errors = FormErrors::of(problem)?,
    }
    Ok((page.errors.status(), page).into_response())
}

/// The same entries as a file.
pub(crate) async fn export(visit: Visit, Query(query): Query<AuditQuery>) -> Paged<Response> {
    let (format, content_type, ending) = match query.format.as_str() {
        "csv" => (Format::Csv, "text/csv; charset=utf-8", "csv"),
        "ndjson" => (Format::Ndjson, "application/x-ndjson", "ndjson"),
        other => {
            let detail = format!("Invalid format {:?}: must be csv or ndjson.", excerpt(other));
            return Err(Problem::bad_request(detail).into());
        }
    };
    let _share = visit.app.limits.exports.take(&visit.actor.name).await?;
    let text = match query.narrow(&visit.app).await? {
        Some(narrowed) => audit_log::export(&visit.app, &narrowed, format).await?,
        None => String::new(),
    };
    let headers = [
        (header::CONTENT_TYPE, content_type.to_owned()),
        (
            header::CONTENT_DISPOSITION,
            format!("attachment; filename=\"audit.{ending}\""),
        ),
    ];
    Ok((headers, text).into_response())
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

    #[test]
    fn changes_have_both_values() {
        let found = changes(json!({ "rate_per_second": { "before": null, "after": 5 } }));
        assert_eq!(found[0].name, "rate per second");
        assert_eq!(
            (found[0].before.as_str(), found[0].after.as_str()),
            ("default", "5")
        );
    }
}
