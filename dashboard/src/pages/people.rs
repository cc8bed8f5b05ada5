//! The people page for admins: team members and their roles.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    extract::Path,
    response::{IntoResponse, Redirect, Response},
};
use postrider_proto::PersonRole;
use serde::{Deserialize, Serialize};

use super::{Done, FormErrors, Frame, Moment, Paged};
use crate::{
    Shared,
    actions::{form_results, people},
    auth::{ADMIN_LOGIN, Confirmed, Session, Submitted, Visit},
    http::{
        input::Query,
        problem::{Kind, Problem, excerpt},
    },
    tables::people as table,
};

const PEOPLE_SHOWN_MAX: i64 = 500;
const DONE: [(&str, &str); 2] = [
    ("changed", "Role updated."),
    ("removed", "Person removed and signed out everywhere."),
];

struct Person {
    login: String,
    role: PersonRole,
    created: Moment,
    sessions: i64,
    /// The admin from the settings and the current user can't be changed here.
    is_fixed: bool,
}

/// The result of the forms that generate a password.
const NEW_PASSWORD: &str = "password";

/// A generated password, which is shown only once.
#[derive(Serialize, Deserialize)]
struct NewPassword {
    login: String,
    password: String,
}

#[derive(Template, WebTemplate)]
#[template(path = "people.html")]
pub(crate) struct PeoplePage {
    frame: Frame,
    people: Vec<Person>,
    new: Option<NewPassword>,
    form: AddForm,
    errors: FormErrors,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct AddForm {
    login: String,
    role: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct RoleForm {
    role: String,
    /// `yes` once the person has confirmed the change. The script asks on the page itself.
    confirmed: String,
}

/// Asks before a role is changed.
#[derive(Template, WebTemplate)]
#[template(path = "role_confirm.html")]
struct ConfirmPage {
    frame: Frame,
    login: String,
    before: PersonRole,
    after: PersonRole,
}

fn read_role(text: &str) -> Result<PersonRole, Problem> {
    let role = PersonRole::ALL.iter().find(|role| role.as_str() == text);
    let unknown = || Problem::invalid("/role", format!("`{}` is not a role", excerpt(text)));
    role.copied().ok_or_else(unknown)
}

pub(crate) async fn show(visit: Visit, Query(query): Query<Done>) -> Paged<PeoplePage> {
    let new = form_results::take(&visit.app, &visit.session, NEW_PASSWORD, &query.result).await?;
    let mut page = load(&visit.app, visit.session).await?;
    page.new = new;
    page.frame = page.frame.with_done(&query.done, &DONE);
    Ok(page)
}

async fn load(app: &Shared, session: Session) -> Paged<PeoplePage> {
    let people = table::list(&app.pool, "", PEOPLE_SHOWN_MAX)
        .await?
        .into_iter()
        .map(|row| Person {
            is_fixed: row.login == ADMIN_LOGIN || row.login == session.login,
            login: row.login,
            role: row.role,
            created: Moment(Some(row.created_at)),
            sessions: row.sessions,
        })
        .collect();
    Ok(PeoplePage {
        frame: Frame::new(session, "people"),
        people,
        new: None,
        form: AddForm::default(),
        errors: FormErrors::default(),
    })
}

pub(crate) async fn add(visit: Visit, Submitted(form): Submitted<AddForm>) -> Paged<Response> {
    match store(&visit, &form).await {
        Ok(new) => Ok(shown_once(&visit, new).await?.into_response()),
        Err(problem) => {
            let errors = match problem.kind {
                Kind::Conflict => FormErrors::at("login", &problem),
                _ => FormErrors::of(problem)?,
            };
            let page = load(&visit.app, visit.session).await?;
            Ok((errors.status(), PeoplePage { form, errors, ..page }).into_response())
        }
    }
}

async fn store(visit: &Visit, form: &AddForm) -> Result<NewPassword, Problem> {
    let login = form.login.trim().to_owned();
    let role = read_role(&form.role)?;
    let password = people::add(&visit.app, &visit.actor, &login, role).await?;
    Ok(NewPassword { login, password })
}

async fn shown_once(visit: &Visit, new: NewPassword) -> Result<Redirect, Problem> {
    let kept = form_results::keep(&visit.app, &visit.app.pool, &visit.session, NEW_PASSWORD, &new);
    Ok(Redirect::to(&format!("/people?result={}", kept.await?)))
}

pub(crate) async fn set_role(
    visit: Visit,
    Path(login): Path<String>,
    Submitted(form): Submitted<RoleForm>,
) -> Paged<Response> {
    let after = read_role(&form.role)?;
    if form.confirmed != "yes" {
        let person = table::find(&visit.app.pool, &login).await?;
        let page = ConfirmPage {
            frame: Frame::new(visit.session, "people"),
            before: person.ok_or_else(|| Problem::not_found("person"))?.role,
            login,
            after,
        };
        return Ok(page.into_response());
    }
    people::set_role(&visit.app, &visit.actor, &login, after).await?;
    Ok(Redirect::to("/people?done=changed").into_response())
}

pub(crate) async fn reset_password(visit: Visit, Path(login): Path<String>, _: Confirmed) -> Paged<Redirect> {
    let password = people::reset_password(&visit.app, &visit.actor, &login).await?;
    Ok(shown_once(&visit, NewPassword { login, password }).await?)
}

pub(crate) async fn remove(visit: Visit, Path(login): Path<String>, _: Confirmed) -> Paged<Redirect> {
    people::remove(&visit.app, &visit.actor, &login).await?;
    Ok(Redirect::to("/people?done=removed"))
}
