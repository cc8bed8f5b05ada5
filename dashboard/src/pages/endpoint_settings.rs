//! The pages that add an endpoint and change or delete it. `actions::endpoints` validates the settings.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    extract::Path,
    response::{IntoResponse, Redirect, Response},
};
use postrider_proto::api;
use serde::Deserialize;

use super::{
    Done, FormErrors, Frame, Paged, When,
    endpoint::{Subject, framed},
    endpoint_form::{Fields, Number},
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
        problem::{Fault, Kind, Problem},
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
    errors: FormErrors,
    header_names: Vec<String>,
    numbers: [Number; 3],
}

#[derive(Template, WebTemplate)]
#[template(path = "endpoint_new.html")]
struct NewPage {
    frame: Frame,
    fields: Fields,
    errors: FormErrors,
    header_names: Vec<String>,
    numbers: [Number; 3],
}

fn settings_page(
    visit: &Visit,
    subject: Subject,
    fields: Fields,
    errors: FormErrors,
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
    Ok(settings_page(&visit, subject, fields, FormErrors::default(), &query.done).into_response())
}

pub(crate) async fn save(
    visit: Visit,
    Path(id): Path<String>,
    Submitted(fields): Submitted<Fields>,
) -> Paged<Response> {
    let subject = Subject::find(&visit, &id).await?;
    let saved = match fields.to_form() {
        (form, faults) if faults.is_empty() => {
            endpoints::change(&visit.app, &visit.actor, &subject.tenant, &id, form).await
        }
        (form, faults) => Err(all_faults(&visit.app, form, faults)),
    };
    match saved {
        Ok(_) => Ok(Redirect::to(&format!("/endpoints/{id}/settings?done=saved")).into_response()),
        Err(problem) => {
            let errors = FormErrors::of(problem)?;
            let page = settings_page(&visit, subject, fields, errors, "");
            Ok((page.errors.status(), page).into_response())
        }
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
    new_page(&visit, fields, FormErrors::default()).into_response()
}

fn new_page(visit: &Visit, fields: Fields, errors: FormErrors) -> NewPage {
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
        Err(problem) => {
            let page = new_page(&visit, fields, FormErrors::of(problem)?);
            Ok((page.errors.status(), page).into_response())
        }
    }
}

async fn store(visit: &Visit, fields: &Fields) -> Result<EndpointRow, Problem> {
    let app = &visit.app;
    let (form, mut faults) = fields.to_form();
    let tenant = match owner(app, &visit.session, &fields.tenant).await {
        Err(problem) if problem.kind == Kind::Invalid => {
            faults.extend(problem.errors);
            None
        }
        found => Some(found?),
    };
    let Some(tenant) = tenant.filter(|_| faults.is_empty()) else {
        return Err(all_faults(app, form, faults));
    };
    let new = NewEndpoint::read(form, &app.guard)?;
    let mut transaction = tables::begin(&app.pool).await?;
    let created = endpoints::create(app, &visit.actor, &tenant, &mut transaction, new).await?;
    transaction.commit().await?;
    app.wake.now();
    Ok(created.row)
}

/// Also validates the fields that could be read, so that all errors are shown at once.
fn all_faults(app: &Shared, form: api::EndpointSettings, mut faults: Vec<Fault>) -> Problem {
    if let Err(problem) = NewEndpoint::read(form, &app.guard) {
        faults.extend(problem.errors);
    }
    Problem::faults(faults)
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
