//! The alert of an endpoint, on its settings page.

use axum::{
    extract::Path,
    response::{IntoResponse, Redirect, Response},
};
use postrider_proto::api::AlertSettings;
use serde::Deserialize;

use super::{FormErrors, Paged, endpoint::Subject, endpoint_settings};
use crate::{
    actions::alerts,
    auth::{Submitted, Visit},
    http::problem::{Kind, Problem},
    tables::alerts::{self as table, AlertRow},
};

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct AlertFields {
    pub(super) dead_letters: String,
}

/// The form of the alert, and the alert if there is one.
pub(super) struct AlertView {
    pub(super) fields: AlertFields,
    pub(super) errors: FormErrors,
    pub(super) row: Option<AlertRow>,
    /// Some endpoint gets the event of the alert.
    pub(super) has_receiver: bool,
}

impl AlertView {
    pub(super) async fn load(visit: &Visit, subject: &Subject) -> Result<Self, Problem> {
        let row = table::find(&visit.app.pool, subject.row.id).await?;
        let dead_letters = row
            .as_ref()
            .map(|row| row.dead_letters.to_string())
            .unwrap_or_default();
        Ok(Self {
            fields: AlertFields { dead_letters },
            errors: FormErrors::default(),
            has_receiver: alerts::has_receiver(&visit.app, &subject.tenant).await?,
            row,
        })
    }
}

/// An empty threshold removes the alert.
pub(crate) async fn save(
    visit: Visit,
    Path(id): Path<String>,
    Submitted(fields): Submitted<AlertFields>,
) -> Paged<Response> {
    let subject = Subject::find(&visit, &id).await?;
    match store(&visit, &subject, fields.dead_letters.trim()).await {
        Ok(done) => Ok(Redirect::to(&format!("/endpoints/{id}/settings?done={done}")).into_response()),
        Err(problem) => {
            let errors = FormErrors::of(problem)?;
            let status = errors.status();
            let mut page = endpoint_settings::page(&visit, subject, "").await?;
            page.alert.fields = fields;
            page.alert.errors = errors;
            Ok((status, page).into_response())
        }
    }
}

async fn store(visit: &Visit, subject: &Subject, threshold: &str) -> Result<&'static str, Problem> {
    let (app, actor, tenant) = (&visit.app, &visit.actor, &subject.tenant);
    if threshold.is_empty() {
        return match alerts::delete(app, actor, tenant, subject.id()).await {
            // Nothing to remove.
            Err(problem) if problem.kind == Kind::NotFound => Ok("alert-removed"),
            removed => removed.map(|()| "alert-removed"),
        };
    }
    let dead_letters = threshold.parse().map_err(|_| {
        Problem::invalid(
            "/dead_letters",
            format!("must be a whole number, not {threshold:?}"),
        )
    })?;
    let form = AlertSettings { dead_letters };
    alerts::put(app, actor, tenant, subject.id(), &form).await?;
    Ok("alert-saved")
}
