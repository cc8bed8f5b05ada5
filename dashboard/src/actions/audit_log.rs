//! The audit log for the API, the page and the export: filters and how an entry is shown.

use postrider_proto::api::AuditEntry;
use serde_json::Value;

use crate::{
    Shared,
    actions::{
        delivery_filter::parse_time,
        export::{Format, write_cell},
    },
    http::{
        cells::{Positions, ask_from, interleave, not_responding},
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

/// Entries of all cells, newest first.
pub(crate) struct Listed {
    pub(crate) rows: Vec<AuditRow>,
    pub(crate) next: Option<Positions>,
    /// Cells that did not respond.
    pub(crate) silent: Vec<String>,
}

pub(crate) async fn list(
    app: &Shared,
    narrowed: &Narrowed,
    before: &Positions,
    limit: i64,
) -> Result<Listed, Problem> {
    let answers = ask_from(app, before, |app, before| {
        let narrowed = narrowed.clone();
        async move { Ok(audit::list(&app.pool, &narrowed, before.unwrap_or(i64::MAX), limit + 1).await?) }
    })
    .await?;
    let (rows, next) = interleave(answers.found, before, limit, |row| row.at, |row| row.id);
    Ok(Listed {
        rows,
        next,
        silent: answers.silent,
    })
}

/// The newest matching entries as text.
pub(crate) async fn export(app: &Shared, narrowed: &Narrowed, format: Format) -> Result<String, Problem> {
    let mut text = match format {
        Format::Csv => "at,actor,address,action,tenant,subject,changes,detail\r\n".to_owned(),
        Format::Ndjson => String::new(),
    };
    let (mut before, mut count) = (Positions::default(), 0);
    while count < EXPORT_MAX {
        let page = list(app, narrowed, &before, EXPORT_PAGE).await?;
        // A file must not look complete without a part of it.
        if !page.silent.is_empty() {
            return Err(not_responding(&page.silent));
        }
        count += page.rows.len();
        for row in page.rows {
            write_entry(&entry(row), format, &mut text);
        }
        match page.next {
            Some(next) => before = next,
            None => break,
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
