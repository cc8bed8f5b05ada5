//! The people page for admins: team members and their roles.

use askama::Template;
use askama_web::WebTemplate;
use axum::{extract::Path, response::Redirect};
use postrider_proto::PersonRole;
use serde::Deserialize;

use super::{Done, Frame, Moment, Paged};
use crate::{
    Shared,
    actions::people,
    auth::{ADMIN_LOGIN, Confirmed, Session, Submitted, Visit},
    http::input::Query,
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

/// A generated password, which is shown only once.
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
}

#[derive(Deserialize)]
pub(crate) struct AddForm {
    login: String,
    role: PersonRole,
}

#[derive(Deserialize)]
pub(crate) struct RoleForm {
    role: PersonRole,
}

pub(crate) async fn show(visit: Visit, Query(query): Query<Done>) -> Paged<PeoplePage> {
    let mut page = load(&visit.app, visit.session, None).await?;
    page.frame = page.frame.with_done(&query.done, &DONE);
    Ok(page)
}

async fn load(app: &Shared, session: Session, new: Option<NewPassword>) -> Paged<PeoplePage> {
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
        new,
    })
}

pub(crate) async fn add(visit: Visit, Submitted(form): Submitted<AddForm>) -> Paged<PeoplePage> {
    let login = form.login.trim().to_owned();
    let password = people::add(&visit.app, &visit.actor, &login, form.role).await?;
    load(&visit.app, visit.session, Some(NewPassword { login, password })).await
}

pub(crate) async fn set_role(
    visit: Visit,
    Path(login): Path<String>,
    Submitted(form): Submitted<RoleForm>,
) -> Paged<Redirect> {
    people::set_role(&visit.app, &visit.actor, &login, form.role).await?;
    Ok(Redirect::to("/people?done=changed"))
}

pub(crate) async fn reset_password(
    visit: Visit,
    Path(login): Path<String>,
    _: Confirmed,
) -> Paged<PeoplePage> {
    let password = people::reset_password(&visit.app, &visit.actor, &login).await?;
    load(&visit.app, visit.session, Some(NewPassword { login, password })).await
}

pub(crate) async fn remove(visit: Visit, Path(login): Path<String>, _: Confirmed) -> Paged<Redirect> {
    people::remove(&visit.app, &visit.actor, &login).await?;
    Ok(Redirect::to("/people?done=removed"))
}
