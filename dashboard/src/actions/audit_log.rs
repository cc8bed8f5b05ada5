//! The audit log for the API, the page and the export: filters and how an entry is shown.

use postrider_proto::api::AuditEntry;
use serde_json::Value;

use crate::{
    Pool, Shared,
    actions::{
        delivery_filter::parse_time,
        export::{Format, write_cell},
    },
    http::{
        input::is_plain_text,
        problem::{Faults, Problem, excerpt},
    },
    tables::{
        audit::{self, Action, AuditRow, Narrowed},
        tenants,
    },
};

const ACTOR_BYTES_MAX: usize = 200;
/// Entries of one export, newest first. The filters select others.
pub(crate) const EXPORT_MAX: usize = 10_000;
const EXPORT_PAGE: i64 = 1_000;
/// Actions of Postrider itself, and of its command line.
const OWN_ACTIONS: [&str; 2] = ["endpoint.disabled", "master_key.rotated"];

/// The filters as given; an empty one matches everything.
#[derive(Debug, Clone, Default)]
pub(crate) struct AuditFilter<'a> {
    pub(crate) tenant: &'a str,
    pub(crate) actor: &'a str,
    pub(crate) action: &'a str,
    pub(crate) since: &'a str,
    pub(crate) until: &'a str,
}

/// Names of actions to filter by.
pub(crate) fn action_names() -> impl Iterator<Item = &'static str> {
    Action::ALL.into_iter().map(Action::as_str).chain(OWN_ACTIONS)
}

impl AuditFilter<'_> {
    /// None matches nothing: there is no such tenant.
    pub(crate) async fn narrow(&self, app: &Shared) -> Result<Option<Narrowed>, Problem> {
        let given = |text: &str| Some(text.trim().to_owned()).filter(|text| !text.is_empty());
        let mut faults = Faults::default();
        let mut time = |field: &str, text: &str| {
            let text = given(text)?;
            let parsed = parse_time(field, &text);
            if parsed.is_err() {
                let detail = format!(
                    "must be an RFC 3339 time, like 2026-05-28T10:00:00Z, not {:?}",
                    excerpt(&text)
                );
                faults.add(field, detail);
            }
            parsed.ok()
        };
        let (since, until) = (time("since", self.since), time("until", self.until));
        if !is_plain_text(self.actor, ACTOR_BYTES_MAX) {
            faults.add(
                "actor",
                format!("must be plain text of at most {ACTOR_BYTES_MAX} bytes"),
            );
        }
        let action = given(self.action);
        if let Some(action) = &action
            && !action_names().any(|name| name == action)
        {
            faults.add("action", format!("`{}` is not an action", excerpt(action)));
        }
        faults.done()?;
        let tenant = match given(self.tenant) {
            None => None,
            Some(slug) => match tenants::find(&app.pool, &slug).await? {
                Some(row) => Some(row.id),
                None => return Ok(None),
            },
        };
        Ok(Some(Narrowed {
            tenant,
            actor: given(self.actor),
            action,
            since,
            until,
        }))
    }
}

pub(crate) fn entry(row: AuditRow) -> AuditEntry {
    AuditEntry {
        at: row.at,
        actor: row.actor,
        action: row.action,
        tenant: row.tenant,
        subject: row.subject,
        detail: row.detail,
        address: row.address,
        changes: row.changes,
    }
}

/// The newest matching entries as text.
pub(crate) async fn export(pool: &Pool, narrowed: &Narrowed, format: Format) -> Result<String, Problem> {
    let mut text = match format {
        Format::Csv => "at,actor,address,action,tenant,subject,changes,detail\r\n".to_owned(),
        Format::Ndjson => String::new(),
    };
    let (mut before, mut count) = (i64::MAX, 0);
    while count < EXPORT_MAX {
        let rows = audit::list(pool, narrowed, before, EXPORT_PAGE).await?;
        let Some(last) = rows.last() else { break };
        before = last.id;
        count += rows.len();
        let is_last = (rows.len() as i64) < EXPORT_PAGE;
        for row in rows {
            write_entry(&entry(row), format, &mut text);
        }
        if is_last {
            break;
        }
    }
    Ok(text)
}

fn write_entry(entry: &AuditEntry, format: Format, text: &mut String) {
    if format == Format::Ndjson {
        text.push_str(&serde_json::to_string(entry).unwrap_or_default());
        text.push('\n');
        return;
    }
    let json = |value: &Option<Value>| value.as_ref().map(Value::to_string).unwrap_or_default();
    let cells = [
        entry.at.to_rfc3339(),
        entry.actor.clone(),
        entry.address.clone().unwrap_or_default(),
        entry.action.clone(),
        entry.tenant.clone().unwrap_or_default(),
        entry.subject.clone(),
        json(&entry.changes),
        json(&entry.detail),
    ];
    for (index, cell) in cells.iter().enumerate() {
        if index > 0 {
            text.push(',');
        }
        write_cell(cell, text);
    }
    text.push_str("\r\n");
}
