//! The API keys page for admins: keys are created, shown once and revoked here.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    extract::Path,
    response::{IntoResponse, Redirect, Response},
};
use chrono::{DateTime, TimeDelta, Utc};
use postrider_proto::{
    api::{ApiKey, NewApiKey},
    state::KeyRole,
};
use serde::Deserialize;

use super::{Done, FormErrors, Frame, Moment, Paged, When};
use crate::{
    Shared,
    actions::{
        api_keys::{end, make},
        form_results,
    },
    auth::{Confirmed, Session, Submitted, Visit},
    http::{
        input::Query,
        problem::{Problem, excerpt},
    },
    tables::{
        self,
        api_keys::{self, KeyRow},
    },
};

const KEYS_SHOWN_MAX: i64 = 500;
const DONE: [(&str, &str); 1] = [("revoked", "Key revoked.")];
/// The lifetimes offered: days and label.
const LIFETIMES: [(&str, &str); 4] = [
    ("", "never"),
    ("30", "after 30 days"),
    ("90", "after 90 days"),
    ("365", "after 1 year"),
];
/// The result of the form.
const NEW_KEY: &str = "api-key";

#[derive(Template, WebTemplate)]
#[template(path = "api_keys.html")]
pub(crate) struct KeysPage {
    frame: Frame,
    keys: Vec<KeyRow>,
    /// The key that was just created; it is shown only once.
    new: Option<ApiKey>,
    form: MakeForm,
    errors: FormErrors,
}

impl KeysPage {
    fn created(&self, key: &KeyRow) -> Moment {
        Moment(Some(key.created_at))
    }

    fn revoked(&self, key: &KeyRow) -> Moment {
        Moment(key.revoked_at)
    }

    fn lifetimes(&self) -> [(&'static str, &'static str); 4] {
        LIFETIMES
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct MakeForm {
    role: String,
    name: String,
    tenant: String,
    /// Days until the key expires; empty is never.
    expires_in_days: String,
}

impl MakeForm {
    fn expires_at(&self, now: DateTime<Utc>) -> Result<Option<DateTime<Utc>>, Problem> {
        let given = self.expires_in_days.trim();
        if given.is_empty() {
            return Ok(None);
        }
        let days = given.parse().ok().and_then(TimeDelta::try_days);
        let expires_at = days.and_then(|days| now.checked_add_signed(days));
        let bad = || {
            let detail = format!("must be a number of days, not {:?}", excerpt(given));
            Problem::invalid("/expires_at", detail)
        };
        Ok(Some(expires_at.ok_or_else(bad)?))
    }

    fn read(&self, now: DateTime<Utc>) -> Result<NewApiKey, Problem> {
        let role = KeyRole::ALL.iter().find(|role| role.as_str() == self.role);
        let unknown = || Problem::invalid("/role", format!("`{}` is not a role", excerpt(&self.role)));
        Ok(NewApiKey {
            role: *role.ok_or_else(unknown)?,
            tenant: Some(self.tenant.trim().to_owned()).filter(|slug| !slug.is_empty()),
            name: self.name.clone(),
            expires_at: self.expires_at(now)?,
        })
    }
}

pub(crate) async fn show(visit: Visit, Query(query): Query<Done>) -> Paged<KeysPage> {
    let new = form_results::take(&visit.app, &visit.session, NEW_KEY, &query.result).await?;
    let mut page = load(&visit.app, visit.session).await?;
    page.new = new;
    page.frame = page.frame.with_done(&query.done, &DONE);
    Ok(page)
}

async fn load(app: &Shared, session: Session) -> Paged<KeysPage> {
    Ok(KeysPage {
        frame: Frame::new(session, "api-keys"),
        keys: api_keys::list_newest(&app.pool, KEYS_SHOWN_MAX).await?,
        new: None,
        form: MakeForm::default(),
        errors: FormErrors::default(),
    })
}

pub(crate) async fn create(visit: Visit, Submitted(form): Submitted<MakeForm>) -> Paged<Response> {
    match store(&visit, &form).await {
        Ok(result) => Ok(Redirect::to(&format!("/api-keys?result={result}")).into_response()),
        Err(problem) => {
            let errors = FormErrors::of(problem)?;
            let page = load(&visit.app, visit.session).await?;
            Ok((errors.status(), KeysPage { form, errors, ..page }).into_response())
        }
    }
}

/// The key and the result that shows it are stored together.
async fn store(visit: &Visit, form: &MakeForm) -> Result<String, Problem> {
    let mut transaction = tables::begin(&visit.app.pool).await?;
    let wanted = form.read(tables::now(&mut *transaction).await?)?;
    let created = make(&mut transaction, &visit.actor, wanted).await?;
    let result = form_results::keep(&visit.app, &mut *transaction, &visit.session, NEW_KEY, &created).await?;
    transaction.commit().await?;
    Ok(result)
}

pub(crate) async fn revoke(visit: Visit, Path(id): Path<String>, _: Confirmed) -> Paged<Redirect> {
    end(&visit.app, &visit.actor, &id).await?;
    Ok(Redirect::to("/api-keys?done=revoked"))
}
