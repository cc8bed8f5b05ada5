//! The pages that add an endpoint and change or delete it. `actions::endpoints` validates the settings.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    extract::Path,
    http::StatusCode,
    response::{IntoResponse, Redirect, Response},
};
use serde::Deserialize;

use super::{
    Done, Frame, Paged, When,
    endpoint::{Subject, framed},
    endpoint_form::{FieldErrors, Fields, Number},
};
use crate::{
    Shared,
    actions::{
        attempt_view::custom_header_names,
        endpoints::{self, NewEndpoint},
    },
    auth::{Confirmed, Session, Submitted, Tenant, Visit},
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
    visit: &Visit,
    subject: Subject,
    fields: Fields,
    errors: FieldErrors,
    done: &str,
) -> SettingsPage {
    SettingsPage {
        frame: framed(&visit.session, done),
        tab: "settings",
        header_names: custom_header_names(&visit.app.vault, &subject.row),
        numbers: fields.numbers(&visit.app.defaults),
        subject,
        fields,
        errors,
    }
}

pub(crate) async fn show(visit: Visit, Path(id): Path<String>, Query(query): Query<Done>) -> Paged<Response> {
    let subject = Subject::find(&visit, &id).await?;
    let fields = Fields::from(&subject.row.settings);
    Ok(settings_page(&visit, subject, fields, FieldErrors::default(), &query.done).into_response())
}

pub(crate) async fn save(
    visit: Visit,
    Path(id): Path<String>,
    Submitted(fields): Submitted<Fields>,
) -> Paged<Response> {
    let subject = Subject::find(&visit, &id).await?;
    let saved = match fields.to_form() {
        Err(faults) => Err(Problem::faults(faults)),
        Ok(form) => endpoints::change(&visit.app, &visit.actor, &subject.tenant, &id, form).await,
    };
    match saved {
        Ok(_) => Ok(Redirect::to(&format!("/endpoints/{id}/settings?done=saved")).into_response()),
        Err(problem) if problem.kind == Kind::Invalid => {
            let page = settings_page(&visit, subject, fields, FieldErrors(problem.errors), "");
            Ok((StatusCode::UNPROCESSABLE_ENTITY, page).into_response())
        }
        Err(problem) => Err(problem.into()),
    }
}

pub(crate) async fn delete(visit: Visit, Path(id): Path<String>, _: Confirmed) -> Paged<Redirect> {
    let subject = Subject::find(&visit, &id).await?;
    endpoints::delete(&visit.app, &visit.actor, &subject.tenant, &id).await?;
    Ok(Redirect::to("/endpoints"))
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct NewQuery {
    tenant: String,
}

pub(crate) async fn blank(visit: Visit, Query(query): Query<NewQuery>) -> Response {
    let fields = Fields {
        tenant: query.tenant,
        types: "*".to_owned(),
        ..Fields::default()
    };
    new_page(&visit, fields, FieldErrors::default()).into_response()
}

fn new_page(visit: &Visit, fields: Fields, errors: FieldErrors) -> NewPage {
    NewPage {
        frame: Frame::new(visit.session.clone(), "endpoints"),
        numbers: fields.numbers(&visit.app.defaults),
        fields,
        errors,
        header_names: Vec::new(),
    }
}

pub(crate) async fn create(visit: Visit, Submitted(fields): Submitted<Fields>) -> Paged<Response> {
    match store(&visit, &fields).await {
        Ok(row) => {
            let id = row.public_id;
            Ok(Redirect::to(&format!("/endpoints/{id}/secrets?done=created")).into_response())
        }
        Err(problem) if problem.kind == Kind::Invalid => {
            let page = new_page(&visit, fields, FieldErrors(problem.errors));
            Ok((StatusCode::UNPROCESSABLE_ENTITY, page).into_response())
        }
        Err(problem) => Err(problem.into()),
    }
}

async fn store(visit: &Visit, fields: &Fields) -> Result<EndpointRow, Problem> {
    let app = &visit.app;
    let tenant = owner(app, &visit.session, &fields.tenant).await?;
    let form = fields.to_form().map_err(Problem::faults)?;
    let new = NewEndpoint::read(form, &app.guard)?;
    let mut transaction = tables::begin(&app.pool).await?;
    let created = endpoints::create(app, &visit.actor, &tenant, &mut transaction, new).await?;
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
