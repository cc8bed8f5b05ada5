//! One's own account: role, password, open sessions.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    Extension,
    extract::State,
    response::{IntoResponse, Redirect, Response},
};
use serde::Deserialize;

use super::{Frame, PageProblem, sign_in::set_cookie};
use crate::{
    Shared,
    auth::{ADMIN_LOGIN, Session, Submitted, expired_cookie},
    people,
    problem::Kind,
};

#[derive(Template, WebTemplate)]
#[template(path = "account.html")]
pub(crate) struct AccountPage {
    frame: Frame,
    login: String,
    sessions: i64,
    is_of_settings: bool,
    /// What is wrong with the password that was given.
    fault: Option<String>,
}

#[derive(Deserialize)]
pub(crate) struct PasswordForm {
    current: String,
    new: String,
}

pub(crate) async fn show(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
) -> Result<AccountPage, PageProblem> {
    load(&app, session, None).await
}

async fn load(app: &Shared, session: Session, fault: Option<String>) -> Result<AccountPage, PageProblem> {
    Ok(AccountPage {
        login: session.login.clone(),
        sessions: session.count_open(&app.pool).await?,
        is_of_settings: session.login == ADMIN_LOGIN,
        frame: Frame::new(session, "account"),
        fault,
    })
}

pub(crate) async fn change_password(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
    Submitted(form): Submitted<PasswordForm>,
) -> Result<Response, PageProblem> {
    match people::change_password(&app, &session, &form.current, &form.new).await {
        Ok(()) => {
            let set = expired_cookie(&app.public_url);
            Ok((set_cookie(&set), Redirect::to("/sign-in")).into_response())
        }
        Err(problem) if problem.kind == Kind::Invalid => {
            let (status, fault) = (problem.status(), problem.in_words());
            Ok((status, load(&app, session, Some(fault)).await?).into_response())
        }
        Err(problem) => Err(problem.into()),
    }
}
