//! The account page of the signed-in user: role, password and active sessions.

use askama::Template;
use askama_web::WebTemplate;
use axum::response::{IntoResponse, Redirect, Response};
use serde::Deserialize;

use super::{Frame, Paged, sign_in::set_cookie};
use crate::{
    Shared,
    actions::people,
    auth::{ADMIN_LOGIN, Session, Submitted, Visit, expired_cookie},
    http::problem::{Kind, Problem},
};

#[derive(Template, WebTemplate)]
#[template(path = "account.html")]
pub(crate) struct AccountPage {
    frame: Frame,
    login: String,
    sessions: i64,
    /// The password comes from POSTRIDER_ADMIN_PASSWORD and can't be changed here.
    is_managed_by_settings: bool,
    /// Why the password was not changed.
    error: Option<String>,
}

#[derive(Deserialize)]
pub(crate) struct PasswordForm {
    current: String,
    new: String,
}

pub(crate) async fn show(visit: Visit) -> Paged<AccountPage> {
    load(&visit.app, visit.session, None).await
}

async fn load(app: &Shared, session: Session, error: Option<String>) -> Paged<AccountPage> {
    Ok(AccountPage {
        login: session.login.clone(),
        sessions: session.count_open(&app.pool).await?,
        is_managed_by_settings: session.login == ADMIN_LOGIN,
        frame: Frame::new(session, "account"),
        error,
    })
}

pub(crate) async fn change_password(
    visit: Visit,
    Submitted(form): Submitted<PasswordForm>,
) -> Paged<Response> {
    match people::change_password(&visit.app, &visit.session, &form.current, &form.new).await {
        Ok(()) => {
            let set = expired_cookie(&visit.app.public_url);
            Ok((set_cookie(&set), Redirect::to("/sign-in")).into_response())
        }
        Err(problem) if problem.kind == Kind::Invalid => {
            let (status, error) = (problem.status(), password_error(&problem));
            Ok((status, load(&visit.app, visit.session, Some(error)).await?).into_response())
        }
        Err(problem) => Err(problem.into()),
    }
}

/// Names the fields as the form does. The problem names them as JSON pointers.
fn password_error(problem: &Problem) -> String {
    match problem.errors.first() {
        Some(fault) if fault.pointer == "/current" => "Current password is incorrect.".to_owned(),
        Some(fault) if fault.pointer == "/new" => format!("New password: {}.", fault.detail),
        _ => problem.in_words(),
    }
}
