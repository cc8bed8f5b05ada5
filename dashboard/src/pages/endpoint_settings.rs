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
    endpoint_alert::AlertView,
    endpoint_form::Fields,
    endpoint_form_view::FormView,
};
use crate::{
    Shared,
    actions::endpoints::{
        self, NewEndpoint,
        subscriptions::{self, FilterTest},
    },
    auth::{Confirmed, Session, Submitted, Tenant, Visit},
    http::{
        cells::Purpose,
        input::Query,
        problem::{Fault, Kind, Problem},
    },
    tables::{self, endpoints::EndpointRow, tenants},
};

#[derive(Template, WebTemplate)]
#[template(path = "endpoint_settings.html")]
pub(super) struct SettingsPage {
    frame: Frame,
    tab: &'static str,
    subject: Subject,
    form: FormView,
    pub(super) alert: AlertView,
}

#[derive(Template, WebTemplate)]
#[template(path = "endpoint_new.html")]
struct NewPage {
    frame: Frame,
    form: FormView,
}

/// With the stored settings.
pub(super) async fn page(visit: &Visit, subject: Subject, done: &str) -> Result<SettingsPage, Problem> {
    let fields = Fields::from(&subject.row.settings);
    let form = FormView::load(visit, fields, Some(&subject.row)).await?;
    Ok(SettingsPage {
        frame: framed(&visit.session, done),
        tab: "settings",
        alert: AlertView::load(visit, &subject).await?,
        subject,
        form,
    })
}

pub(crate) async fn show(visit: Visit, Path(id): Path<String>, Query(query): Query<Done>) -> Paged<Response> {
    let subject = Subject::find(&visit, &id).await?;
    Ok(page(&visit, subject, &query.done).await?.into_response())
}

pub(crate) async fn save(
    visit: Visit,
    Path(id): Path<String>,
    Submitted(fields): Submitted<Fields>,
) -> Paged<Response> {
    let subject = Subject::find(&visit, &id).await?;
    let rejected = match fields.is_filter_test() {
        true => Rejected::tested(test_filter(&visit, &fields, &subject.tenant).await)?,
        false => match change(&visit, &subject, &fields).await? {
            None => {
                return Ok(Redirect::to(&format!("/endpoints/{id}/settings?done=saved")).into_response());
            }
            Some(rejected) => rejected,
        },
    };
    let form = FormView::load(&visit, fields, Some(&subject.row)).await?;
    let page = SettingsPage {
        form: rejected.shown_in(form),
        ..page(&visit, subject, "").await?
    };
    Ok((page.form.errors.status(), page).into_response())
}

/// Why a submitted form was not saved.
#[derive(Default)]
struct Rejected {
    errors: FormErrors,
    unmatched: Vec<String>,
    filter_test: Option<FilterTest>,
}

impl Rejected {
    /// The filter was to be tested and nothing to be saved.
    fn tested(result: Result<FilterTest, Problem>) -> Result<Self, Problem> {
        Ok(match result {
            Ok(test) => Self {
                filter_test: Some(test),
                ..Self::default()
            },
            Err(problem) => Self {
                errors: FormErrors::of(problem)?,
                ..Self::default()
            },
        })
    }

    fn shown_in(self, form: FormView) -> FormView {
        FormView {
            errors: self.errors,
            unmatched: self.unmatched,
            filter_test: self.filter_test,
            ..form
        }
    }
}

async fn test_filter(visit: &Visit, fields: &Fields, tenant: &Tenant) -> Result<FilterTest, Problem> {
    let (form, mut faults) = fields.to_form();
    // Of the other fields nothing is needed.
    faults.retain(|fault| fault.pointer == "/filter" || fault.pointer == "/versions");
    match faults.is_empty() {
        true => subscriptions::test_filter(&visit.app, tenant, &form).await,
        false => Err(Problem::faults(faults)),
    }
}

async fn change(visit: &Visit, subject: &Subject, fields: &Fields) -> Result<Option<Rejected>, Problem> {
    let (app, types) = (&visit.app, &subject.row.settings.types);
    let (form, mut faults) = fields.to_form();
    let unmatched = subscriptions::unmatched(app, &fields.patterns(), types).await?;
    faults.extend(unmatched_fault(fields, &unmatched));
    let saved = match faults.is_empty() {
        true => endpoints::change(app, &visit.actor, &subject.tenant, subject.id(), form).await,
        false => Err(all_faults(app, form, faults)),
    };
    match saved {
        Ok(_) => Ok(None),
        Err(problem) => Ok(Some(Rejected {
            errors: FormErrors::of(problem)?,
            unmatched,
            filter_test: None,
        })),
    }
}

/// Types that do not exist are an error until they are confirmed: their events may be published later.
fn unmatched_fault(fields: &Fields, unmatched: &[String]) -> Option<Fault> {
    let is_fault = !unmatched.is_empty() && !fields.allows_unmatched();
    let listed: Vec<String> = unmatched.iter().map(|pattern| format!("`{pattern}`")).collect();
    is_fault.then(|| Fault {
        pointer: "/types".to_owned(),
        detail: format!("no event type matches {}", listed.join(", ")),
    })
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

pub(crate) async fn blank(visit: Visit, Query(query): Query<NewQuery>) -> Paged<Response> {
    let fields = Fields {
        tenant: query.tenant,
        types: "*".to_owned(),
        ..Fields::default()
    };
    Ok(new_page(&visit, fields, Rejected::default())
        .await?
        .into_response())
}

async fn new_page(visit: &Visit, fields: Fields, rejected: Rejected) -> Result<NewPage, Problem> {
    Ok(NewPage {
        frame: Frame::new(visit.session.clone(), "endpoints"),
        form: rejected.shown_in(FormView::load(visit, fields, None).await?),
    })
}

pub(crate) async fn create(visit: Visit, Submitted(fields): Submitted<Fields>) -> Paged<Response> {
    let visit = visit.at_tenant(fields.tenant.trim(), Purpose::Change).await?;
    let rejected = match fields.is_filter_test() {
        true => {
            let tested = match owner(&visit.app, &visit.session, &fields.tenant).await {
                Ok(tenant) => test_filter(&visit, &fields, &tenant).await,
                Err(problem) => Err(problem),
            };
            Rejected::tested(tested)?
        }
        false => {
            let unmatched = subscriptions::unmatched(&visit.app, &fields.patterns(), &[]).await?;
            match store(&visit, &fields, unmatched_fault(&fields, &unmatched)).await {
                Ok(row) => {
                    let id = row.public_id;
                    return Ok(Redirect::to(&format!("/endpoints/{id}/secrets?done=created")).into_response());
                }
                Err(problem) => Rejected {
                    errors: FormErrors::of(problem)?,
                    unmatched,
                    filter_test: None,
                },
            }
        }
    };
    let page = new_page(&visit, fields, rejected).await?;
    Ok((page.form.errors.status(), page).into_response())
}

async fn store(visit: &Visit, fields: &Fields, more: Option<Fault>) -> Result<EndpointRow, Problem> {
    let app = &visit.app;
    let (form, mut faults) = fields.to_form();
    faults.extend(more);
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
