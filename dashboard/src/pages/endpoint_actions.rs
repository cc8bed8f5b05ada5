//! Actions on the page of an endpoint: pause, resume, test and probe it.

use axum::{
    extract::Path,
    response::{IntoResponse, Redirect, Response},
};
use postrider_proto::{EndpointState, api::EndpointSettings};
use serde::Deserialize;

use super::{
    FormErrors, Paged,
    endpoint::{Subject, page},
    endpoint_trials::{TRIED, Tried},
};
use crate::{
    Shared,
    actions::{
        self, form_results,
        trials::{self, Asked, Recorded},
    },
    auth::{Confirmed, Submitted, Visit},
    http::problem::Problem,
    tables,
};

pub(crate) async fn pause(visit: Visit, Path(id): Path<String>, _: Confirmed) -> Paged<Redirect> {
    let done = match enable(&visit, &id, false).await? {
        EndpointState::Active => "paused",
        EndpointState::Paused => "already-paused",
        EndpointState::Disabled | EndpointState::Deleted => "already-disabled",
    };
    Ok(Redirect::to(&format!("/endpoints/{id}?done={done}")))
}

pub(crate) async fn resume(visit: Visit, Path(id): Path<String>, _: Confirmed) -> Paged<Redirect> {
    let done = match enable(&visit, &id, true).await? {
        EndpointState::Active => "already-active",
        EndpointState::Paused | EndpointState::Disabled | EndpointState::Deleted => "resumed",
    };
    Ok(Redirect::to(&format!("/endpoints/{id}?done={done}")))
}

/// Returns the state before. Nothing is changed if that is the state asked for.
async fn enable(visit: &Visit, id: &str, enabled: bool) -> Result<EndpointState, Problem> {
    let subject = Subject::find(visit, id).await?;
    let asked = match enabled {
        true => EndpointState::Active,
        false => EndpointState::Paused,
    };
    if subject.state() == asked {
        return Ok(asked);
    }
    let change = EndpointSettings {
        enabled: Some(Some(enabled)),
        ..EndpointSettings::default()
    };
    actions::endpoints::change(&visit.app, &visit.actor, &subject.tenant, id, change).await?;
    Ok(subject.state())
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct TrialFields {
    r#type: String,
}

impl TrialFields {
    fn event_type(&self) -> Option<&str> {
        Some(self.r#type.trim()).filter(|name| !name.is_empty())
    }
}

/// Sends a test event; the page shows its result.
pub(crate) async fn test(
    visit: Visit,
    Path(id): Path<String>,
    Submitted(form): Submitted<TrialFields>,
) -> Paged<Response> {
    let mut subject = Subject::find(&visit, &id).await?;
    let asked = asked(&visit, &subject);
    match trials::test(&visit.app, &asked, form.event_type()).await {
        Ok(test) => {
            record(&visit.app, &asked, &test).await?;
            let (test, probe) = (Some(test), None);
            shown_once(&visit, &subject, Tried { test, probe }).await
        }
        Err(problem) => {
            subject.trial.test_errors = FormErrors::of(problem)?;
            rejected(&visit, subject, form).await
        }
    }
}

/// Runs the probe; the page shows its findings.
pub(crate) async fn probe(
    visit: Visit,
    Path(id): Path<String>,
    Submitted(form): Submitted<TrialFields>,
) -> Paged<Response> {
    let mut subject = Subject::find(&visit, &id).await?;
    let asked = asked(&visit, &subject);
    match trials::probe(&visit.app, &asked, form.event_type()).await {
        Ok(report) => {
            record(&visit.app, &asked, &report).await?;
            let (test, probe) = (None, Some(report));
            shown_once(&visit, &subject, Tried { test, probe }).await
        }
        Err(problem) => {
            subject.trial.probe_errors = FormErrors::of(problem)?;
            rejected(&visit, subject, form).await
        }
    }
}

async fn shown_once(visit: &Visit, subject: &Subject, tried: Tried) -> Paged<Response> {
    let result = form_results::keep(&visit.app, &visit.app.home, &visit.session, TRIED, &tried).await?;
    Ok(Redirect::to(&format!("/endpoints/{}?result={result}", subject.id())).into_response())
}

async fn rejected(visit: &Visit, mut subject: Subject, form: TrialFields) -> Paged<Response> {
    let errors = match subject.trial.test_errors.is_empty() {
        true => &subject.trial.probe_errors,
        false => &subject.trial.test_errors,
    };
    let status = errors.status();
    subject.trial.r#type = form.r#type;
    Ok((status, page(visit, subject, "", Tried::default()).await?).into_response())
}

fn asked(visit: &Visit, subject: &Subject) -> Asked {
    Asked {
        actor: visit.actor.clone(),
        tenant: subject.tenant.clone(),
        endpoint: subject.id().to_owned(),
    }
}

async fn record(app: &Shared, asked: &Asked, result: &impl Recorded) -> Result<(), Problem> {
    let mut transaction = tables::begin(&app.pool).await?;
    trials::record(&mut transaction, asked, result).await?;
    Ok(transaction.commit().await?)
}
