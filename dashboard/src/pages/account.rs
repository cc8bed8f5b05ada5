//! The account page of the signed-in user: role, password and active sessions.

use askama::Template;
use askama_web::WebTemplate;
use axum::response::{IntoResponse, Redirect, Response};
use serde::Deserialize;

use super::{FormErrors, Frame, Paged, sign_in::set_cookie};
use crate::{
    Shared,
    actions::people,
    auth::{ADMIN_LOGIN, Session, Submitted, Visit, expired_cookie, return_to::Reason},
};

#[derive(Template, WebTemplate)]
#[template(path = "account.html")]
pub(crate) struct AccountPage {
    frame: Frame,
    login: String,
    sessions: i64,
    /// The password comes from POSTRIDER_ADMIN_PASSWORD and can't be changed here.
    is_managed_by_settings: bool,
    errors: FormErrors,
}

#[derive(Deserialize)]
pub(crate) struct PasswordForm {
    current: String,
    new: String,
}

pub(crate) async fn show(visit: Visit) -> Paged<AccountPage> {
    load(&visit.app, visit.session, FormErrors::default()).await
}

async fn load(app: &Shared, session: Session, errors: FormErrors) -> Paged<AccountPage> {
    Ok(AccountPage {
        login: session.login.clone(),
        sessions: session.count_open(&app.pool).await?,
        is_managed_by_settings: session.login == ADMIN_LOGIN,
        frame: Frame::new(session, "account"),
        errors,
    })
}

pub(crate) async fn change_password(
    visit: Visit,
    Submitted(form): Submitted<PasswordForm>,
) -> Paged<Response> {
    match people::change_password(&visit.app, &visit.actor, &visit.session, &form.current, &form.new).await {
        Ok(()) => {
            let set = expired_cookie(&visit.app.public_url);
            let to = Reason::PasswordChanged.sign_in_address();
            Ok((set_cookie(&set), Redirect::to(&to)).into_response())
        }
        Err(problem) => {
            let errors = FormErrors::of(problem)?;
            Ok((errors.status(), load(&visit.app, visit.session, errors).await?).into_response())
        }
    }
}
