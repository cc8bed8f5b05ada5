//! The pages that add an endpoint and change or delete it. `actions::endpoints` validates the settings.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    Extension,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Redirect, Response},
};
use serde::Deserialize;

use super::{
    DoneQuery, Frame, PageProblem, When,
    endpoint::{Subject, framed},
    endpoint_form::{FieldErrors, Fields, Number},
};
use crate::{
    Shared,
    actions::{
        attempt_view::custom_header_names,
        endpoints::{self, NewEndpoint},
    },
    auth::{Actor, Confirmed, Session, Submitted, Tenant},
    http::{
        input::Query,
        problem::{Kind, Problem},
    },
    tables::{self, endpoints::EndpointRow, tenants},
};

#[derive(Template, WebTemplate)]
#[template(path = "endpoint_settings.html")]
struct SettingsPage {
    frame: Frame,
    tab: &'static str,
    subject: Subject,
    fields: Fields,
    errors: FieldErrors,
    header_names: Vec<String>,
    numbers: [Number; 3],
}

#[derive(Template, WebTemplate)]
#[template(path = "endpoint_new.html")]
struct NewPage {
    frame: Frame,
    fields: Fields,
    errors: FieldErrors,
    header_names: Vec<String>,
    numbers: [Number; 3],
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
        numbers: fields.numbers(&app.defaults),
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

pub(crate) async fn save(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
    Extension(actor): Extension<Actor>,
    Path(id): Path<String>,
    Submitted(fields): Submitted<Fields>,
) -> Result<Response, PageProblem> {
    let subject = Subject::find(&app, &session, &id).await?;
    let saved = match fields.to_form() {
        Err(faults) => Err(Problem::faults(faults)),
        Ok(form) => endpoints::change(&app, &actor, &subject.tenant, &id, form).await,
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
    Extension(actor): Extension<Actor>,
    Path(id): Path<String>,
    _: Confirmed,
) -> Result<Redirect, PageProblem> {
    let subject = Subject::find(&app, &session, &id).await?;
    endpoints::delete(&app, &actor, &subject.tenant, &id).await?;
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
        numbers: fields.numbers(&app.defaults),
        fields,
        errors,
        header_names: Vec::new(),
    }
}

pub(crate) async fn create(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
    Extension(actor): Extension<Actor>,
    Submitted(fields): Submitted<Fields>,
) -> Result<Response, PageProblem> {
    match store(&app, &session, &actor, &fields).await {
        Ok(row) => {
            let id = row.public_id;
            Ok(Redirect::to(&format!("/endpoints/{id}/secrets?done=created")).into_response())
        }
        Err(problem) if problem.kind == Kind::Invalid => {
            let page = new_page(&app, &session, fields, FieldErrors(problem.errors));
            Ok((StatusCode::UNPROCESSABLE_ENTITY, page).into_response())
        }
        Err(problem) => Err(problem.into()),
    }
}

async fn store(
    app: &Shared,
    session: &Session,
    actor: &Actor,
    fields: &Fields,
) -> Result<EndpointRow, Problem> {
    let tenant = owner(app, session, &fields.tenant).await?;
    let form = fields.to_form().map_err(Problem::faults)?;
    let new = NewEndpoint::read(form, &app.guard)?;
    let mut transaction = tables::begin(&app.pool).await?;
    let created = endpoints::create(app, actor, &tenant, &mut transaction, new).await?;
    transaction.commit().await?;
    app.wake.now();
    Ok(created.row)
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
