//! Sessions of people: a random token in a cookie, its hash in the database, and a CSRF token for every form.
//! Invariant: a form that changes something is read only through `Confirmed`.

use axum::{
    Form,
    extract::{DefaultBodyLimit, FromRequest, Request},
    http::{HeaderMap, header},
};
use data_encoding::BASE64URL_NOPAD;
use serde::Deserialize;
use sqlx::PgPool;
use subtle::ConstantTimeEq;

use super::fingerprint;
use crate::{
    problem::{Kind, Problem},
    tables::sessions,
};

const SESSION_COOKIE: &str = "postrider_session";
const SESSION_HOURS: i32 = 24;
const FORM_BYTES_MAX: usize = 16 * 1024;

/// Of the person who is signed in.
#[derive(Debug, Clone)]
pub(crate) struct Session {
    pub(crate) login: String,
    /// Goes into every form as `csrf`.
    pub(crate) csrf: String,
    token_hash: [u8; 32],
}

impl Session {
    pub(crate) async fn of(pool: &PgPool, headers: &HeaderMap) -> Result<Option<Self>, Problem> {
        let Some(token) = cookie(headers, SESSION_COOKIE) else {
            return Ok(None);
        };
        let token_hash = fingerprint(token);
        let found = sessions::find(pool, &token_hash).await?;
        Ok(found.map(|row| Self {
            login: row.login,
            csrf: BASE64URL_NOPAD.encode(&row.csrf),
            token_hash,
        }))
    }

    /// Makes a session and answers the token that the cookie carries.
    pub(crate) async fn begin(pool: &PgPool, person_id: i32) -> Result<String, Problem> {
        let token = BASE64URL_NOPAD.encode(&rand::random::<[u8; 32]>());
        let csrf: [u8; 32] = rand::random();
        sessions::delete_expired(pool).await?;
        sessions::insert(pool, &fingerprint(&token), person_id, &csrf, SESSION_HOURS).await?;
        Ok(token)
    }

    pub(crate) async fn end(&self, pool: &PgPool) -> Result<(), Problem> {
        sessions::delete(pool, &self.token_hash).await?;
        Ok(())
    }
}

pub(crate) fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers
        .get_all(header::COOKIE)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(';'))
        .filter_map(|pair| pair.trim().split_once('='))
        .find_map(|(found, value)| (found == name).then_some(value))
}

/// `Set-Cookie` for a session. Lax, so that a link from a mail opens the page; forms have their own token.
pub(crate) fn session_cookie(token: &str, public_url: &str) -> String {
    let max_age = i64::from(SESSION_HOURS) * 3600;
    format!(
        "{SESSION_COOKIE}={token}; Path=/; HttpOnly; SameSite=Lax; Max-Age={max_age}{}",
        secure(public_url)
    )
}

pub(crate) fn expired_cookie(public_url: &str) -> String {
    format!(
        "{SESSION_COOKIE}=; Path=/; HttpOnly; SameSite=Lax; Max-Age=0{}",
        secure(public_url)
    )
}

/// For the form that opens a session. Strict: it is only ever sent from our own page.
pub(crate) fn sign_in_cookie(name: &str, token: &str, public_url: &str) -> String {
    format!(
        "{name}={token}; Path=/sign-in; HttpOnly; SameSite=Strict; Max-Age=3600{}",
        secure(public_url)
    )
}

fn secure(public_url: &str) -> &'static str {
    if public_url.starts_with("https://") {
        "; Secure"
    } else {
        ""
    }
}

pub(crate) fn tokens_match(given: &str, expected: &str) -> bool {
    !expected.is_empty() && bool::from(given.as_bytes().ct_eq(expected.as_bytes()))
}

/// A form of the person who is signed in, sent from one of our own pages.
pub(crate) struct Confirmed {
    /// The number of the latest attempt on the page, where the form is about a delivery.
    pub(crate) seen: Option<i16>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ConfirmedForm {
    csrf: String,
    seen: Option<i16>,
}

impl<S: Send + Sync> FromRequest<S> for Confirmed {
    type Rejection = Problem;

    async fn from_request(mut request: Request, state: &S) -> Result<Self, Problem> {
        let expected = request
            .extensions()
            .get::<Session>()
            .map(|session| session.csrf.clone())
            .unwrap_or_default();
        DefaultBodyLimit::max(FORM_BYTES_MAX).apply(&mut request);
        let given = Form::<ConfirmedForm>::from_request(request, state)
            .await
            .map(|Form(form)| form)
            .unwrap_or_default();
        if tokens_match(&given.csrf, &expected) {
            Ok(Self { seen: given.seen })
        } else {
            Err(Problem::new(
                Kind::Forbidden,
                "The form did not come from a page of this session. Go back, reload it and try again.",
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_is_found_by_its_whole_name() {
        let headers = HeaderMap::from_iter([(
            header::COOKIE,
            "xpostrider_session=no; a=b; postrider_session=yes"
                .parse()
                .expect("a value"),
        )]);
        assert_eq!(cookie(&headers, SESSION_COOKIE), Some("yes"));
        assert_eq!(cookie(&headers, "c"), None);
    }

    #[test]
    fn cookies_are_for_https_only_when_the_address_is() {
        assert!(session_cookie("t", "https://hooks.example.com").ends_with("; Secure"));
        assert!(!session_cookie("t", "http://127.0.0.1:8080").contains("Secure"));
    }

    #[test]
    fn an_empty_token_matches_nothing() {
        assert!(!tokens_match("", ""));
        assert!(!tokens_match("a", "b"));
        assert!(tokens_match("a", "a"));
    }
}
