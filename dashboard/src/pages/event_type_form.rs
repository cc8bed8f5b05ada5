//! The form that publishes an event type or a version of one. It is reviewed first: what the version changes and breaks.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    extract::Path,
    response::{IntoResponse, Redirect, Response},
};
use postrider_proto::{api::Break, routing::is_type_name};
use serde::Deserialize;

use super::{FormErrors, Frame, Paged, Pretty};
use crate::{
    actions::event_type_drafts::{self as drafts, Draft, Outcome, Review},
    auth::{Submitted, Visit},
    http::problem::Problem,
    pages::schema_table::{Difference, Field, differences, fields},
    tables::{self, event_types, schemas},
};

/// What the schema of a new type starts from.
const BLANK_SCHEMA: &str = r#"{
  "type": "object",
  "required": ["id"],
  "properties": {
    "id": { "type": "string", "description": "" }
  }
}"#;

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct TypeFields {
    name: String,
    /// `type` or `version`: what is new.
    new: String,
    description: String,
    version: String,
    schema: String,
    thin: Option<String>,
    /// The digest of the review on the page.
    reviewed: String,
    /// The button that was pressed: `review` or `publish`.
    step: String,
}

impl TypeFields {
    fn is_new_type(&self) -> bool {
        self.new == "type"
    }

    fn is_thin(&self) -> bool {
        self.thin.as_deref() == Some("on")
    }

    fn draft(&self) -> Draft {
        Draft {
            name: self.name.trim().to_owned(),
            is_new_type: self.is_new_type(),
            description: self.description.clone(),
            thin: self.is_thin(),
            version: self.version.trim().to_owned(),
            // Browsers send line ends as CR LF.
            schema: self.schema.replace("\r\n", "\n"),
        }
    }
}

#[derive(Template, WebTemplate)]
#[template(path = "event_type_form.html")]
struct FormPage {
    frame: Frame,
    fields: TypeFields,
    errors: FormErrors,
    review: Option<ReviewView>,
}

struct ReviewView {
    digest: String,
    version: String,
    /// The version it is compared with.
    against: Option<String>,
    differences: Vec<Difference>,
    breaks: Vec<Break>,
    newer: Option<String>,
    fields: Vec<Field>,
}

impl From<Review> for ReviewView {
    fn from(review: Review) -> Self {
        let own = fields(&review.schema);
        let old = review.previous.as_ref().map(|(_, schema)| fields(schema));
        Self {
            digest: review.digest,
            version: review.version,
            differences: old.map_or(Vec::new(), |old| differences(&old, &own)),
            against: review.previous.map(|(version, _)| version),
            breaks: review.breaks,
            newer: review.newer,
            fields: own,
        }
    }
}

fn page(visit: &Visit, fields: TypeFields) -> FormPage {
    FormPage {
        frame: Frame::new(visit.session.clone(), "event-types"),
        fields,
        errors: FormErrors::default(),
        review: None,
    }
}

pub(crate) async fn new_type(visit: Visit) -> Paged<Response> {
    let fields = TypeFields {
        new: "type".to_owned(),
        version: today(&visit).await?,
        schema: BLANK_SCHEMA.to_owned(),
        ..TypeFields::default()
    };
    Ok(page(&visit, fields).into_response())
}

/// Starts from the newest version.
pub(crate) async fn new_version(visit: Visit, Path(name): Path<String>) -> Paged<Response> {
    let pool = &visit.app.pool;
    let row = match is_type_name(&name) {
        true => event_types::find(pool, &name).await?,
        false => None,
    };
    let row = row.ok_or_else(|| Problem::not_found("event type"))?;
    let newest = schemas::of_type(pool, row.id).await?.pop();
    let fields = TypeFields {
        name: row.name,
        new: "version".to_owned(),
        description: row.description.unwrap_or_default(),
        version: today(&visit).await?,
        schema: newest.map_or(BLANK_SCHEMA.to_owned(), |row| Pretty::whole(row.schema.get())),
        thin: row.thin.then(|| "on".to_owned()),
        ..TypeFields::default()
    };
    Ok(page(&visit, fields).into_response())
}

/// Versions are usually dates.
async fn today(visit: &Visit) -> Result<String, Problem> {
    let now = tables::now(&visit.app.pool).await?;
    Ok(now.format("%Y-%m-%d").to_string())
}

/// Reviews or publishes. Nothing is published that was not reviewed as it is.
pub(crate) async fn submit(visit: Visit, Submitted(fields): Submitted<TypeFields>) -> Paged<Response> {
    let (app, draft) = (&visit.app, fields.draft());
    let result = match fields.step.as_str() {
        "publish" => drafts::publish(app, &visit.actor, &draft, &fields.reviewed).await,
        _ => drafts::review(app, &draft).await.map(Outcome::Unreviewed),
    };
    let page = match result {
        Ok(Outcome::Published) => {
            return Ok(Redirect::to(&format!("/event-types/{}?done=published", draft.name)).into_response());
        }
        Ok(Outcome::Unreviewed(review)) => FormPage {
            review: Some(review.into()),
            ..page(&visit, fields)
        },
        Err(problem) => FormPage {
            errors: FormErrors::of(problem)?,
            ..page(&visit, fields)
        },
    };
    Ok((page.errors.status(), page).into_response())
}
