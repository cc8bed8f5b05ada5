//! The sign-in and sign-out forms. `auth` checks passwords and manages sessions.

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
use serde_json::json;

use super::Paged;
use crate::{
    Shared,
    auth::{
        ClientAddress, Confirmed, SignIn, Visit, expired_cookie,
        return_to::{Reason, is_local},
        session_cookie, sign_in, sign_in_cookie, tokens_match,
    },
    http::{
        input::{Query, cookie},
        problem::Problem,
    },
    pages::stats_format::counted,
    tables::{
        self,
        audit::{self, Action, Entry},
    },
};

/// Ties the form to the browser that requested it, because there is no session yet.
const FORM_COOKIE: &str = "postrider_sign_in";

#[derive(Template, WebTemplate)]
#[template(path = "sign_in.html")]
struct SignInPage {
    csrf: String,
    /// Why the sign-in was rejected.
    notice: Option<String>,
    /// Why signing in is necessary.
    reason: Option<Reason>,
    /// Kept for another try.
    login: String,
    /// The page to open afterwards.
    next: String,
}

impl SignInPage {
    /// Without another page, the overview is opened.
    fn goes_on(&self) -> bool {
        !self.next.is_empty()
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct SignInQuery {
    next: String,
    reason: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct SignInForm {
    csrf: String,
    login: String,
    password: String,
    next: String,
}

pub(crate) async fn show(State(app): State<Shared>, Query(query): Query<SignInQuery>) -> Response {
    let page = SignInPage {
        csrf: String::new(),
        notice: None,
        reason: Reason::read(&query.reason),
        login: String::new(),
        next: Some(query.next).filter(|next| is_local(next)).unwrap_or_default(),
    };
    form_page(&app, StatusCode::OK, page)
}

fn form_page(app: &Shared, status: StatusCode, page: SignInPage) -> Response {
    let csrf = BASE64URL_NOPAD.encode(&rand::random::<[u8; 24]>());
    let set = sign_in_cookie(FORM_COOKIE, &csrf, &app.public_url);
    (status, set_cookie(&set), SignInPage { csrf, ..page }).into_response()
}

pub(crate) async fn submit(
    State(app): State<Shared>,
    Extension(ClientAddress(address)): Extension<ClientAddress>,
    headers: HeaderMap,
    form: Result<Form<SignInForm>, axum::extract::rejection::FormRejection>,
) -> Paged<Response> {
    let Form(form) = form.map_err(|_| Problem::bad_request("Malformed form."))?;
    let next = Some(form.next.clone()).filter(|next| is_local(next));
    let again = |status: StatusCode, notice: String| {
        let page = SignInPage {
            csrf: String::new(),
            notice: Some(notice),
            reason: None,
            login: form.login.clone(),
            next: next.clone().unwrap_or_default(),
        };
        form_page(&app, status, page)
    };
    let expected = cookie(&headers, FORM_COOKIE).unwrap_or_default();
    if !tokens_match(&form.csrf, expected) {
        let notice = "This page expired. Please sign in again.".to_owned();
        return Ok(again(StatusCode::FORBIDDEN, notice));
    }
    Ok(match sign_in(&app, address, &form.login, &form.password).await? {
        SignIn::Done(token) => {
            let set = session_cookie(&token, &app.public_url);
            let next = next.as_deref().unwrap_or("/");
            (set_cookie(&set), Redirect::to(next)).into_response()
        }
        SignIn::Wrong => {
            let notice = "Incorrect login or password.".to_owned();
            again(StatusCode::UNAUTHORIZED, notice)
        }
        SignIn::TooOften(wait) => {
            let seconds = wait.as_secs() + 1;
            let notice = format!(
                "Too many attempts. Try again in {}.",
                counted(seconds, "second", "seconds")
            );
            let mut response = again(StatusCode::TOO_MANY_REQUESTS, notice);
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
            response
        }
    })
}

pub(crate) async fn leave(
    visit: Visit,
    Extension(ClientAddress(address)): Extension<ClientAddress>,
    _: Confirmed,
) -> Paged<Response> {
    let mut transaction = tables::begin(&visit.app.pool).await?;
    visit.session.end(&mut transaction).await?;
    let (scope, login) = (visit.session.scope(), &visit.session.login);
    let entry = Entry::new(&visit.actor, Action::SignedOut, scope, login).with(json!({"address": address}));
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    let set = expired_cookie(&visit.app.public_url);
    let to = Reason::SignedOut.sign_in_address();
    Ok((set_cookie(&set), Redirect::to(&to)).into_response())
}

/// Ends all sessions of the user. For customers these are all sessions of their tenant.
pub(crate) async fn leave_everywhere(visit: Visit, _: Confirmed) -> Paged<Response> {
    let mut transaction = tables::begin(&visit.app.pool).await?;
    visit.session.end_everywhere(&mut transaction).await?;
    let (scope, login) = (visit.session.scope(), &visit.session.login);
    let entry = Entry::new(&visit.actor, Action::SignedOutEverywhere, scope, login);
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    let set = expired_cookie(&visit.app.public_url);
    let to = Reason::SignedOutEverywhere.sign_in_address();
    Ok((set_cookie(&set), Redirect::to(&to)).into_response())
}

pub(super) fn set_cookie(value: &str) -> [(header::HeaderName, HeaderValue); 1] {
    let value = HeaderValue::from_str(value).unwrap_or(HeaderValue::from_static(""));
    [(header::SET_COOKIE, value)]
}
