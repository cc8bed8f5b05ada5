//! A version of an event type before it is published: reviewed first, then published as it was reviewed.

use std::collections::BTreeMap;

use data_encoding::HEXLOWER;
use postrider_proto::{
    api::{Break, EventTypeSettings},
    json::find_duplicate,
    routing::{is_type_name, version_rank},
};
use serde_json::{Value, value::RawValue};
use sha2::{Digest, Sha256};

use crate::{
    App, Shared,
    actions::event_types,
    auth::Actor,
    http::problem::{Fault, Kind, Problem},
    tables::{event_types as table, schemas::SchemaRow},
};

/// The input of a person.
pub(crate) struct Draft {
    pub(crate) name: String,
    /// A type of this name must not exist; otherwise it must.
    pub(crate) is_new_type: bool,
    pub(crate) description: String,
    pub(crate) thin: bool,
    pub(crate) version: String,
    /// JSON text.
    pub(crate) schema: String,
}

/// What publishing the draft means for consumers.
pub(crate) struct Review {
    /// Identifies the draft and what it was compared with.
    pub(crate) digest: String,
    pub(crate) version: String,
    pub(crate) schema: Value,
    /// The version before it, if there is one.
    pub(crate) previous: Option<(String, Value)>,
    pub(crate) breaks: Vec<Break>,
    /// A published version that sorts after this one and stays the newest.
    pub(crate) newer: Option<String>,
}

pub(crate) enum Outcome {
    Published,
    /// This was not reviewed, or another version was published in between.
    Unreviewed(Review),
}

pub(crate) async fn review(app: &App, draft: &Draft) -> Result<Review, Problem> {
    let mut faults = Vec::new();
    if let Err(problem) = check_name(app, draft).await {
        faults.extend(at_fields(problem, &draft.version)?);
    }
    let reviewed = match draft.settings() {
        // A name that can't be one has no versions, and the database could not even read it.
        Ok(settings) => {
            let name = if is_type_name(&draft.name) {
                &draft.name
            } else {
                ""
            };
            event_types::review(app, name, &settings).await
        }
        Err(problem) => Err(problem),
    };
    let (published, report) = match reviewed {
        Ok(reviewed) if faults.is_empty() => reviewed,
        Ok(_) => return Err(Problem::faults(faults)),
        Err(problem) => {
            faults.extend(at_fields(problem, &draft.version)?);
            return Err(Problem::faults(faults));
        }
    };
    if published.iter().any(|row| row.version == draft.version) {
        let detail = format!("is already published: {:?}. Choose another one", draft.version);
        return Err(Problem::invalid("/version", detail));
    }
    let rank = version_rank(&draft.version);
    let (before, after): (Vec<&SchemaRow>, Vec<&SchemaRow>) = published
        .iter()
        .partition(|row| version_rank(&row.version) < rank);
    let previous = before.last().map(|row| (row.version.clone(), value_of(row)));
    Ok(Review {
        digest: draft.digest(previous.as_ref().map(|(version, _)| version.as_str())),
        version: draft.version.clone(),
        schema: serde_json::from_str(&draft.schema).unwrap_or(Value::Bool(true)),
        previous,
        breaks: report.into_iter().flat_map(|one| one.breaking_changes).collect(),
        newer: after.last().map(|row| row.version.clone()),
    })
}

/// Publishes the draft if `reviewed` is the digest of its review.
pub(crate) async fn publish(
    app: &Shared,
    actor: &Actor,
    draft: &Draft,
    reviewed: &str,
) -> Result<Outcome, Problem> {
    let review = review(app, draft).await?;
    if review.digest != reviewed {
        return Ok(Outcome::Unreviewed(review));
    }
    event_types::put(app, actor, &draft.name, &draft.settings()?).await?;
    Ok(Outcome::Published)
}

async fn check_name(app: &App, draft: &Draft) -> Result<(), Problem> {
    event_types::check_name(&draft.name)?;
    match (draft.is_new_type, table::find(&app.pool, &draft.name).await?) {
        (true, Some(_)) => Err(Problem::invalid(
            "",
            format!("event type `{}` already exists: add a version to it", draft.name),
        )),
        (false, None) => Err(Problem::not_found("event type")),
        _ => Ok(()),
    }
}

impl Draft {
    fn settings(&self) -> Result<EventTypeSettings, Problem> {
        let schema = match (
            RawValue::from_string(self.schema.trim().to_owned()),
            find_duplicate(&self.schema),
        ) {
            (Err(error), _) => Err(format!("is not valid JSON: {error}")),
            (Ok(_), Some(twice)) => Err(format!("contains {twice} more than once")),
            (Ok(schema), None) => Ok(schema),
        };
        let schema = schema.map_err(|detail| Problem::invalid("/schemas", detail))?;
        let description = Some(self.description.trim().to_owned());
        Ok(EventTypeSettings {
            description: Some(description.filter(|text| !text.is_empty())),
            thin: Some(self.thin),
            schemas: BTreeMap::from([(self.version.clone(), schema)]),
        })
    }

    fn digest(&self, previous: Option<&str>) -> String {
        let mut hash = Sha256::new();
        for part in [
            self.name.as_str(),
            &self.version,
            &self.schema,
            &self.description,
            if self.thin { "thin" } else { "" },
            previous.unwrap_or_default(),
        ] {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part.as_bytes());
        }
        HEXLOWER.encode(&hash.finalize())
    }
}

/// The errors of a draft by the fields of its form: `name`, `description`, `version` and `schema`.
fn at_fields(problem: Problem, version: &str) -> Result<Vec<Fault>, Problem> {
    match problem.kind {
        Kind::Invalid => {}
        Kind::SchemaPublished => {
            return Ok(vec![Fault {
                pointer: "/version".to_owned(),
                detail: problem.detail,
            }]);
        }
        _ => return Err(problem),
    }
    let place = format!("/schemas/{}", version.replace('~', "~0").replace('/', "~1"));
    let moved = |fault: Fault| {
        let (pointer, detail) = match fault.pointer.strip_prefix(&place) {
            _ if fault.pointer.is_empty() => ("/name".to_owned(), fault.detail),
            Some("") if fault.detail.starts_with("version ") => ("/version".to_owned(), fault.detail),
            Some("") => ("/schema".to_owned(), fault.detail),
            Some(inner) => ("/schema".to_owned(), format!("at {inner}: {}", fault.detail)),
            None if fault.pointer == "/schemas" => ("/schema".to_owned(), fault.detail),
            None => (fault.pointer, fault.detail),
        };
        Fault { pointer, detail }
    };
    Ok(problem.errors.into_iter().map(moved).collect())
}

fn value_of(row: &SchemaRow) -> Value {
    serde_json::from_str(row.schema.get()).unwrap_or(Value::Bool(true))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(schema: &str) -> Draft {
        Draft {
            name: "invoice.paid".to_owned(),
            is_new_type: false,
            description: String::new(),
            thin: false,
            version: "v1".to_owned(),
            schema: schema.to_owned(),
        }
    }

    #[test]
    fn a_digest_is_of_everything_that_was_reviewed() {
        let one = draft("{}").digest(None);
        assert_eq!(one, draft("{}").digest(None));
        assert_ne!(one, draft("{ }").digest(None));
        assert_ne!(one, draft("{}").digest(Some("v0")));
    }

    #[test]
    fn errors_are_about_fields_of_the_form() {
        for (pointer, detail, field, text) in [
            ("", "no name", "/name", "no name"),
            (
                "/schemas/v~11",
                "version must start",
                "/version",
                "version must start",
            ),
            ("/schemas/v~11", "schema must be", "/schema", "schema must be"),
            ("/schemas/v~11/type", "is wrong", "/schema", "at /type: is wrong"),
            ("/schemas", "is not valid JSON", "/schema", "is not valid JSON"),
            ("/description", "must be text", "/description", "must be text"),
        ] {
            let found = at_fields(Problem::invalid(pointer, detail), "v/1").expect("errors of a form");
            assert_eq!(
                (found[0].pointer.as_str(), found[0].detail.as_str()),
                (field, text)
            );
        }
        let published = Problem::new(Kind::SchemaPublished, "Version v1 is already published.");
        let found = at_fields(published, "v1").expect("an error of a field");
        assert_eq!(found[0].pointer, "/version");
        assert!(draft("{").settings().is_err());
        assert!(draft(r#"{"a":1,"a":2}"#).settings().is_err());
    }
}
