//! The pages that add an endpoint and change or delete it. The API validates the settings.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    Extension,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Redirect, Response},
};
use serde::Deserialize;
use serde_json::Value;

use super::{
    DoneQuery, Frame, PageProblem, When,
    endpoint::{Subject, framed},
    endpoint_form::{FieldErrors, Fields},
};
use crate::{
    Shared,
    api::{self, endpoint_form::EndpointForm},
    auth::{Actor, Confirmed, Session, Submitted, Tenant},
    http::{
        idempotency::Claim,
        input::{Body, Query, read_body},
        problem::{Kind, Problem},
    },
    tables::{attempt_view::custom_header_names, tenants},
};

const RESPONSE_BYTES_MAX: usize = 1024 * 1024;

#[derive(Template, WebTemplate)]
#[template(path = "endpoint_settings.html")]
struct SettingsPage {
    frame: Frame,
    tab: &'static str,
    subject: Subject,
    fields: Fields,
    errors: FieldErrors,
    header_names: Vec<String>,
    defaults: Defaults,
}

#[derive(Template, WebTemplate)]
#[template(path = "endpoint_new.html")]
struct NewPage {
    frame: Frame,
    fields: Fields,
    errors: FieldErrors,
    header_names: Vec<String>,
    defaults: Defaults,
}

/// The values used for empty fields.
struct Defaults {
    concurrency: u16,
    timeout_ms: u128,
}

impl Defaults {
    fn of(app: &Shared) -> Self {
        Self {
            concurrency: app.defaults.concurrency,
            timeout_ms: app.defaults.timeout.as_millis(),
        }
    }
}

fn settings_page(
    app: &Shared,
    session: &Session,
    subject: Subject,
    fields: Fields,
    errors: FieldErrors,
    done: &str,
) -> SettingsPage {
    SettingsPage {
        frame: framed(session, done),
        tab: "settings",
        header_names: custom_header_names(&app.vault, &subject.row),
        defaults: Defaults::of(app),
        subject,
        fields,
        errors,
    }
}

pub(crate) async fn show(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
    Path(id): Path<String>,
    Query(query): Query<DoneQuery>,
) -> Result<Response, PageProblem> {
    let subject = Subject::find(&app, &session, &id).await?;
    let fields = Fields::from(&subject.row.settings);
    Ok(settings_page(
        &app,
        &session,
        subject,
        fields,
        FieldErrors::default(),
        &query.done,
    )
    .into_response())
}

/// Converts the form to an API request.
fn read(fields: &Fields) -> Result<EndpointForm, Problem> {
    let json = fields.to_json().map_err(Problem::faults)?;
    serde_json::from_value(json).map_err(|error| Problem::invalid("", error.to_string()))
}

pub(crate) async fn save(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
    actor: Extension<Actor>,
    Path(id): Path<String>,
    Submitted(fields): Submitted<Fields>,
) -> Result<Response, PageProblem> {
    let subject = Subject::find(&app, &session, &id).await?;
    let tenant = subject.tenant.clone();
    let saved = match read(&fields) {
        Err(problem) => Err(problem),
        Ok(form) => {
            let path = Path((tenant.slug.clone(), id.clone()));
            api::endpoints::patch(State(app.clone()), actor, Extension(tenant), path, Body(form)).await
        }
    };
    match saved {
        Ok(_) => Ok(Redirect::to(&format!("/endpoints/{id}/settings?done=saved")).into_response()),
        Err(problem) if problem.kind == Kind::Invalid => {
            let page = settings_page(&app, &session, subject, fields, FieldErrors(problem.errors), "");
            Ok((StatusCode::UNPROCESSABLE_ENTITY, page).into_response())
        }
        Err(problem) => Err(problem.into()),
    }
}

pub(crate) async fn delete(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
    actor: Extension<Actor>,
    Path(id): Path<String>,
    _: Confirmed,
) -> Result<Redirect, PageProblem> {
    let subject = Subject::find(&app, &session, &id).await?;
    let path = Path((subject.tenant.slug.clone(), id));
    api::endpoints::delete(State(app), actor, Extension(subject.tenant), path).await?;
    Ok(Redirect::to("/endpoints"))
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct NewQuery {
    tenant: String,
}

pub(crate) async fn blank(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
    Query(query): Query<NewQuery>,
) -> Response {
    let fields = Fields {
        tenant: query.tenant,
        types: "*".to_owned(),
        ..Fields::default()
    };
    new_page(&app, &session, fields, FieldErrors::default()).into_response()
}

fn new_page(app: &Shared, session: &Session, fields: Fields, errors: FieldErrors) -> NewPage {
    NewPage {
        frame: Frame::new(session.clone(), "endpoints"),
        fields,
        errors,
        header_names: Vec::new(),
        defaults: Defaults::of(app),
    }
}

pub(crate) async fn create(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
    actor: Extension<Actor>,
    Submitted(fields): Submitted<Fields>,
) -> Result<Response, PageProblem> {
    let created = async {
        let tenant = owner(&app, &session, &fields.tenant).await?;
        let form = read(&fields)?;
        let claim = Claim::default();
        api::endpoints::create(State(app.clone()), actor, Extension(tenant), claim, Body(form)).await
    };
    match created.await {
        Ok(response) => {
            let body = read_body(response.into_body(), RESPONSE_BYTES_MAX).await?;
            let endpoint: Value = serde_json::from_slice(&body).unwrap_or_default();
            let id = endpoint["id"].as_str().unwrap_or_default();
            Ok(Redirect::to(&format!("/endpoints/{id}/secrets?done=created")).into_response())
        }
        Err(problem) if problem.kind == Kind::Invalid => {
            let page = new_page(&app, &session, fields, FieldErrors(problem.errors));
            Ok((StatusCode::UNPROCESSABLE_ENTITY, page).into_response())
        }
        Err(problem) => Err(problem.into()),
    }
}

/// The tenant of a new endpoint. For customers it is always their own, whatever the form says.
async fn owner(app: &Shared, session: &Session, slug: &str) -> Result<Tenant, Problem> {
    if let Some(own) = &session.tenant {
        return Ok(own.clone());
    }
    let found = tenants::find(&app.pool, slug.trim()).await?;
    let row =
        found.ok_or_else(|| Problem::invalid("/tenant", format!("there is no tenant {:?}", slug.trim())))?;
    Ok(Tenant {
        id: row.id,
        slug: row.slug,
    })
}
