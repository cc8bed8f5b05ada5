//! Signing in and out. The way people sign in is here and in `auth`, nowhere else.

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    Extension, Form,
    extract::State,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Redirect, Response},
};
use data_encoding::BASE64URL_NOPAD;
use serde::Deserialize;

use super::PageProblem;
use crate::{
    Shared,
    auth::{
        Confirmed, Session, cookie, expired_cookie, session_cookie, sign_in_cookie, tokens_match,
        verify_password,
    },
    problem::{Kind, Problem},
    tables::people,
};

/// Ties the form to the browser that asked for it: there is no session yet.
const FORM_COOKIE: &str = "postrider_sign_in";
const LOGIN_BYTES_MAX: usize = 256;

#[derive(Template, WebTemplate)]
#[template(path = "sign_in.html")]
struct SignInPage {
    csrf: String,
    failed: bool,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct SignInForm {
    csrf: String,
    login: String,
    password: String,
}

pub(crate) async fn show(State(app): State<Shared>) -> Response {
    form_page(&app, StatusCode::OK, false)
}

fn form_page(app: &Shared, status: StatusCode, failed: bool) -> Response {
    let csrf = BASE64URL_NOPAD.encode(&rand::random::<[u8; 24]>());
    let set = sign_in_cookie(FORM_COOKIE, &csrf, &app.public_url);
    (status, set_cookie(&set), SignInPage { csrf, failed }).into_response()
}

pub(crate) async fn submit(
    State(app): State<Shared>,
    headers: HeaderMap,
    form: Result<Form<SignInForm>, axum::extract::rejection::FormRejection>,
) -> Result<Response, PageProblem> {
    let Form(form) = form.map_err(|_| Problem::bad_request("The form can't be read."))?;
    let expected = cookie(&headers, FORM_COOKIE).unwrap_or_default();
    if !tokens_match(&form.csrf, expected) {
        return Ok(form_page(&app, StatusCode::FORBIDDEN, false));
    }
    let is_possible = form.login.len() <= LOGIN_BYTES_MAX && !form.login.contains('\0');
    let person = match is_possible {
        true => people::find(&app.pool, &form.login).await?,
        false => None,
    };
    let hash = person.as_ref().map(|person| person.password_hash.as_str());
    let is_right = verify_password(hash, &form.password).await.map_err(|error| {
        tracing::error!(%error, "a password could not be checked");
        Problem::new(Kind::Internal, "It has been logged.")
    })?;
    match person {
        Some(person) if is_right => {
            let token = Session::begin(&app.pool, person.id).await?;
            let set = session_cookie(&token, &app.public_url);
            Ok((set_cookie(&set), Redirect::to("/deliveries")).into_response())
        }
        _ => Ok(form_page(&app, StatusCode::UNAUTHORIZED, true)),
    }
}

pub(crate) async fn leave(
    State(app): State<Shared>,
    Extension(session): Extension<Session>,
    _: Confirmed,
) -> Result<Response, PageProblem> {
    session.end(&app.pool).await?;
    let set = expired_cookie(&app.public_url);
    Ok((set_cookie(&set), Redirect::to("/sign-in")).into_response())
}

fn set_cookie(value: &str) -> [(header::HeaderName, HeaderValue); 1] {
    let value = HeaderValue::from_str(value).unwrap_or(HeaderValue::from_static(""));
    [(header::SET_COOKIE, value)]
}
