//! Event types and their versioned schemas. A published version never changes; new versions are added.

use std::collections::BTreeMap;

use postrider_proto::{
    TypeId,
    api::{Compatibility, EventType, EventTypeSettings},
    json::is_same,
    limits::{DESCRIPTION_BYTES_MAX, VERSIONS_PER_TYPE_MAX},
    routing::{RESERVED_PREFIX, is_type_name, is_version, version_rank},
};
use postrider_sender::Schema;
use serde_json::Value;
use sqlx::PgConnection;

use crate::{
    App, Shared,
    actions::compatibility::compare,
    auth::Actor,
    http::{
        cells::copies,
        input::is_plain_text,
        problem::{Fault, Kind, Problem, excerpt},
    },
    tables::{
        self,
        audit::{self, Action, Entry},
        cells::Copied,
        event_types::{self, EventTypeRow},
        schemas::{self, SchemaRow},
    },
};

/// A name that can be published. Checked before the body is read.
pub(crate) fn check_name(name: &str) -> Result<(), Problem> {
    if !is_type_name(name) {
        return Err(Problem::invalid(
            "",
            format!(
                "`{}` is not an event type name: use segments of a-z, 0-9 and _ separated by dots, at most 128 characters",
                excerpt(name)
            ),
        ));
    }
    if name.starts_with(RESERVED_PREFIX) {
        return Err(Problem::invalid(
            "",
            "names starting with `postrider.` are reserved",
        ));
    }
    Ok(())
}

/// Creates or updates the event type; returns whether it is new.
pub(crate) async fn put(
    app: &Shared,
    actor: &Actor,
    name: &str,
    form: &EventTypeSettings,
) -> Result<(EventType, bool), Problem> {
    let values = check(form)?;
    let mut transaction = tables::begin(&app.pool).await?;
    event_types::lock(&mut *transaction, name).await?;
    let is_back = event_types::revive(&mut *transaction, name).await?;
    let (row, is_new) =
        event_types::put(&mut *transaction, name, form.description.as_ref(), form.thin).await?;
    let id = row.id;
    let compatibility = publish(&mut transaction, id, form, &values).await?;
    let view = view(&mut transaction, row).await?;
    record(&mut transaction, actor, Action::EventTypePut, name).await?;
    transaction.commit().await?;
    copies::of_all(app, Copied::EventType(id)).await?;
    let view = EventType {
        compatibility,
        ..view
    };
    Ok((view, is_new || is_back))
}

/// What `put` would report about these settings, without storing them. The published versions are those that the type has
/// or, if it was deleted, would have again.
pub(crate) async fn review(
    app: &App,
    name: &str,
    form: &EventTypeSettings,
) -> Result<(Vec<SchemaRow>, Vec<Compatibility>), Problem> {
    let values = check(form)?;
    let mut connection = app.pool.acquire().await?;
    let newest = event_types::numbers(&mut *connection, name)
        .await?
        .into_iter()
        .max();
    let published = match newest {
        Some(id) => schemas::of_type(&mut *connection, TypeId(id)).await?,
        None => Vec::new(),
    };
    let report = compare_with(&published, form, &values)?;
    Ok((published, report))
}

/// Existing events keep their type and are delivered; new ones are rejected. Published versions remain and reappear
/// when the type is created again.
pub(crate) async fn delete(app: &Shared, actor: &Actor, name: &str) -> Result<(), Problem> {
    if !is_type_name(name) {
        return Err(Problem::not_found("event type"));
    }
    // Operational events have these types.
    check_name(name)?;
    let mut transaction = tables::begin(&app.pool).await?;
    event_types::lock(&mut *transaction, name).await?;
    let row = event_types::find(&mut *transaction, name).await?;
    if !event_types::delete(&mut *transaction, name).await? {
        return Err(Problem::not_found("event type"));
    }
    record(&mut transaction, actor, Action::EventTypeDeleted, name).await?;
    transaction.commit().await?;
    match row {
        Some(row) => copies::of_all(app, Copied::EventType(row.id)).await,
        None => Ok(()),
    }
}

async fn record(
    connection: &mut PgConnection,
    actor: &Actor,
    action: Action,
    name: &str,
) -> Result<(), Problem> {
    let entry = Entry::new(actor, action, None, name);
    Ok(audit::write(connection, entry).await?)
}

pub(crate) async fn find(app: &App, name: &str) -> Result<EventType, Problem> {
    let row = match is_type_name(name) {
        true => event_types::find(&app.pool, name).await?,
        false => None,
    };
    let row = row.ok_or_else(|| Problem::not_found("event type"))?;
    let mut connection = app.pool.acquire().await?;
    view(&mut connection, row).await
}

async fn view(connection: &mut PgConnection, row: EventTypeRow) -> Result<EventType, Problem> {
    let rows = schemas::of_type(connection, row.id).await?;
    Ok(EventType {
        r#type: row.name,
        description: row.description,
        thin: row.thin,
        versions: rows.iter().map(|row| row.version.clone()).collect(),
        schemas: Some(rows.into_iter().map(|row| (row.version, row.schema.0)).collect()),
        created_at: row.created_at,
        compatibility: Vec::new(),
    })
}

/// Returns the parsed schemas, or all errors of the form.
fn check(form: &EventTypeSettings) -> Result<BTreeMap<&str, Value>, Problem> {
    let mut faults = Vec::new();
    let mut fault = |pointer: String, detail: &str| {
        faults.push(Fault {
            pointer,
            detail: detail.to_owned(),
        });
    };
    if let Some(Some(text)) = &form.description
        && !is_plain_text(text, DESCRIPTION_BYTES_MAX)
    {
        fault(
            "/description".to_owned(),
            "must be at most 1024 bytes of text without control characters",
        );
    }
    if form.schemas.is_empty() || form.schemas.len() > VERSIONS_PER_TYPE_MAX {
        fault("/schemas".to_owned(), "must have 1 to 100 versions");
    }
    let mut values = BTreeMap::new();
    for (version, schema) in &form.schemas {
        let pointer = format!("/schemas/{}", version.replace('~', "~0").replace('/', "~1"));
        if !is_version(version) {
            fault(
                pointer.clone(),
                "version must start with a letter or digit and have at most 64 characters of A-Z a-z 0-9 _ . -",
            );
        }
        match serde_json::from_str(schema.get()) {
            Ok(value @ (Value::Object(_) | Value::Bool(_))) => {
                if let Err(violations) = Schema::compile(&value) {
                    for violation in violations {
                        fault(format!("{pointer}{}", violation.pointer), &violation.message);
                    }
                }
                values.insert(version.as_str(), value);
            }
            Ok(_) => fault(pointer, "schema must be a JSON object, true or false"),
            Err(error) => fault(pointer, &format!("schema is not valid JSON: {error}")),
        }
    }
    if faults.is_empty() {
        Ok(values)
    } else {
        Err(Problem::faults(faults))
    }
}

/// Adds the new versions.
async fn publish(
    connection: &mut PgConnection,
    id: TypeId,
    form: &EventTypeSettings,
    values: &BTreeMap<&str, Value>,
) -> Result<Vec<Compatibility>, Problem> {
    let published = schemas::of_type(&mut *connection, id).await?;
    let report = compare_with(&published, form, values)?;
    for (version, schema) in &form.schemas {
        if !published.iter().any(|row| row.version == *version) {
            schemas::insert(&mut *connection, id, version, schema).await?;
        }
    }
    Ok(report)
}

/// What the new versions break. A version that exists must be the same JSON value, to the last digit.
fn compare_with(
    published: &[SchemaRow],
    form: &EventTypeSettings,
    values: &BTreeMap<&str, Value>,
) -> Result<Vec<Compatibility>, Problem> {
    let added: Vec<&String> = form
        .schemas
        .keys()
        .filter(|version| !published.iter().any(|row| row.version == **version))
        .collect();
    if added.len() + published.len() > VERSIONS_PER_TYPE_MAX {
        return Err(Problem::invalid(
            "/schemas",
            "an event type can have at most 100 versions, published ones included",
        ));
    }
    for row in published {
        let Some(given) = form.schemas.get(&row.version) else {
            continue;
        };
        if !is_same(row.schema.get(), given.get()) {
            return Err(Problem::new(
                Kind::SchemaPublished,
                format!(
                    "Version {} is already published with a different schema. Published schemas are immutable, even if the type \
                 was deleted in between: add a new version.",
                    row.version
                ),
            ));
        }
    }
    let mut all: BTreeMap<String, (&str, Value)> = published
        .iter()
        .filter_map(|row| {
            let value = serde_json::from_str(row.schema.get()).ok()?;
            Some((version_rank(&row.version), (row.version.as_str(), value)))
        })
        .collect();
    let mut ranks = Vec::new();
    for version in added {
        if let Some(value) = values.get(version.as_str()) {
            let rank = version_rank(version);
            all.insert(rank.clone(), (version, value.clone()));
            ranks.push(rank);
        }
    }
    Ok(compared(&all, ranks))
}

/// Compares each of these versions with the one before it.
fn compared(all: &BTreeMap<String, (&str, Value)>, mut ranks: Vec<String>) -> Vec<Compatibility> {
    ranks.sort();
    let report = |rank: &String| {
        let (version, schema) = all.get(rank)?;
        let (before, old) = all.range(..rank.clone()).next_back()?.1;
        Some(Compatibility {
            version: (*version).to_owned(),
            previous_version: (*before).to_owned(),
            breaking_changes: compare(old, schema),
        })
    };
    ranks.iter().filter_map(report).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(text: &str) -> Vec<String> {
        let form: EventTypeSettings = serde_json::from_str(text).expect("a form");
        match check(&form) {
            Ok(_) => Vec::new(),
            Err(problem) => {
                assert_eq!(problem.kind, Kind::Invalid);
                problem.errors.into_iter().map(|fault| fault.pointer).collect()
            }
        }
    }

    #[test]
    fn a_schema_that_is_none_is_refused_by_its_place() {
        assert_eq!(
            faults(r#"{"schemas":{"v1":{"type":"object","properties":{"a":{"type":"strng"}}}}}"#),
            ["/schemas/v1/properties/a/type"]
        );
        assert_eq!(
            faults(r#"{"schemas":{"v1":{"$ref":"http://example.com/s"}}}"#),
            ["/schemas/v1/$ref"]
        );
    }

    #[test]
    fn schemas_are_objects_or_booleans_under_good_versions() {
        assert!(faults(r#"{"schemas":{"2026-01-15":{"type":"object"},"v2":true}}"#).is_empty());
        assert_eq!(faults(r#"{"schemas":{}}"#), ["/schemas"]);
        assert_eq!(
            faults(r#"{"schemas":{"a/b":{},"v1":[]}}"#),
            ["/schemas/a~1b", "/schemas/v1"]
        );
        assert_eq!(
            faults(r#"{"description":"\u0000","schemas":{"v1":{"a":"\ud800"}}}"#),
            ["/description", "/schemas/v1"]
        );
        let deep = format!(
            r#"{{"schemas":{{"v1":{{"a":{}{}}}}}}}"#,
            "[".repeat(5_000),
            "]".repeat(5_000)
        );
        assert_eq!(faults(&deep), ["/schemas/v1"]);
    }
}
