//! Sessions: a random token in a cookie, its hash in the database, and a CSRF token in every form.
//! Invariant: a form that changes something is read only through `Confirmed` or `Submitted`.

use axum::{
    Form,
    body::Body,
    extract::{FromRequest, Request},
    http::HeaderMap,
};
use data_encoding::BASE64URL_NOPAD;
use postrider_dispatcher::sending::IDENTITY_HIDDEN;
use postrider_proto::TenantId;
use serde::{Deserialize, de::DeserializeOwned};
use sqlx::PgConnection;
use subtle::ConstantTimeEq;

use super::{Actor, Role, Tenant, fingerprint};
use crate::{
    Pool,
    http::{
        input::{cookie, read_body},
        page_problem::PageProblem,
        problem::{Kind, Problem},
    },
    tables::sessions::{self, Holder, SessionRow},
};

const SESSION_COOKIE: &str = "postrider_session";
const SESSION_HOURS: i32 = 24;
/// Fits all settings of an endpoint.
const FORM_BYTES_MAX: usize = 256 * 1024;

/// The session of the team member or customer who views a page.
#[derive(Debug, Clone)]
pub(crate) struct Session {
    /// Shown at the top of the page: the person's login, or the tenant's id.
    pub(crate) login: String,
    /// Included in every form as `csrf`. It differs on each page: see `mask`.
    pub(crate) csrf: String,
    csrf_bytes: Vec<u8>,
    pub(crate) role: Role,
    /// The customer's tenant. Pages show nothing of any other.
    pub(crate) tenant: Option<Tenant>,
    /// Shown on every page while nothing is sent.
    pub(crate) hold: Option<String>,
    holder: Holder,
    token_hash: [u8; 32],
}

impl Session {
    pub(crate) async fn of(pool: &Pool, headers: &HeaderMap) -> Result<Option<Self>, Problem> {
        let Some(token) = cookie(headers, SESSION_COOKIE) else {
            return Ok(None);
        };
        let token_hash = fingerprint(token);
        let found = sessions::find(pool, &token_hash).await?;
        Ok(found.and_then(|row| Self::read(row, token_hash)))
    }

    fn read(row: SessionRow, token_hash: [u8; 32]) -> Option<Self> {
        let csrf_bytes = row.csrf.clone();
        let csrf = mask(&csrf_bytes, rand::random());
        let hold = hold(&row);
        match row {
            SessionRow {
                person_id: Some(id),
                login: Some(login),
                role: Some(role),
                ..
            } => Some(Self {
                login,
                csrf,
                csrf_bytes,
                role: role.into(),
                tenant: None,
                hold,
                holder: Holder::Person(id),
                token_hash,
            }),
            SessionRow {
                tenant_id: Some(id),
                slug: Some(slug),
                ..
            } => Some(Self {
                login: slug.clone(),
                csrf,
                csrf_bytes,
                role: Role::Customer,
                tenant: Some(Tenant { id, slug }),
                hold,
                holder: Holder::Tenant(id),
                token_hash,
            }),
            _ => None,
        }
    }

    /// The tenant that pages are limited to, or none for the whole system.
    pub(crate) fn scope(&self) -> Option<TenantId> {
        self.tenant.as_ref().map(|tenant| tenant.id)
    }

    pub(crate) fn actor(&self) -> Actor {
        Actor::new(match &self.tenant {
            None => format!("person:{}", self.login),
            Some(tenant) => format!("portal:{}", tenant.slug),
        })
    }

    /// Creates a session and returns the token for the cookie.
    pub(crate) async fn begin_for_person(connection: &mut PgConnection, id: i32) -> Result<String, Problem> {
        Self::begin(connection, Holder::Person(id), None).await
    }

    pub(crate) async fn begin_for_tenant(
        connection: &mut PgConnection,
        id: TenantId,
        link_hash: &[u8; 32],
    ) -> Result<String, Problem> {
        Self::begin(connection, Holder::Tenant(id), Some(link_hash)).await
    }

    async fn begin(
        connection: &mut PgConnection,
        holder: Holder,
        link_hash: Option<&[u8; 32]>,
    ) -> Result<String, Problem> {
        let token = BASE64URL_NOPAD.encode(&rand::random::<[u8; 32]>());
        let csrf: [u8; 32] = rand::random();
        sessions::delete_expired(&mut *connection).await?;
        let token_hash = fingerprint(&token);
        sessions::insert(connection, &token_hash, holder, &csrf, SESSION_HOURS, link_hash).await?;
        Ok(token)
    }

    pub(crate) async fn end(&self, connection: &mut PgConnection) -> Result<(), Problem> {
        sessions::delete(connection, &self.token_hash).await?;
        Ok(())
    }

    /// The session as it is now, if it is still valid and its person or tenant still exists.
    pub(crate) async fn again(&self, pool: &Pool) -> Result<Option<Self>, Problem> {
        let found = sessions::find(pool, &self.token_hash).await?;
        Ok(found.and_then(|row| Self::read(row, self.token_hash)))
    }

    fn has_csrf(&self, given: &str) -> bool {
        let given = unmask(given);
        given.is_some_and(|given| !given.is_empty() && bool::from(given.ct_eq(&self.csrf_bytes)))
    }

    pub(crate) fn token_hash(&self) -> [u8; 32] {
        self.token_hash
    }

    /// The keys that session limits are counted by: this session and its owner.
    pub(crate) fn holders(&self) -> ([u8; 32], Holder) {
        (self.token_hash, self.holder)
    }

    /// Ends this session and all others of the same person or of the same tenant's customers.
    pub(crate) async fn end_everywhere(&self, connection: &mut PgConnection) -> Result<(), Problem> {
        sessions::delete_all(connection, self.holder).await?;
        Ok(())
    }

    pub(crate) async fn count_open(&self, pool: &Pool) -> Result<i64, Problem> {
        Ok(sessions::count(pool, self.holder).await?)
    }
}

/// Why nothing is sent, for the person who looks. Customers learn nothing about the installation.
fn hold(row: &SessionRow) -> Option<String> {
    let is_team = row.person_id.is_some();
    if is_team && row.identity_hidden {
        return Some(format!("{IDENTITY_HIDDEN}. Nothing is sent. Events are queued."));
    }
    if is_team && row.sending_restored {
        return Some(
            "This database is a restored copy. Nothing is sent until an operator confirms it. Events are queued.".to_owned(),
        );
    }
    if is_team && row.sending_stopped {
        let by = row.stopped_by.as_deref().unwrap_or("postrider");
        let reason = row
            .stop_reason
            .as_deref()
            .map(|reason| format!(" Reason: {reason}"));
        let reason = reason.unwrap_or_default();
        return Some(format!(
            "All sending is stopped by {by}. Events are queued.{reason}"
        ));
    }
    let is_held = !is_team && (row.sending_stopped || row.tenant_paused);
    is_held.then(|| "Sending is paused by the operator. New events are queued and sent later.".to_owned())
}

#[cfg(test)]
impl Session {
    pub(crate) fn of_customer(tenant: i32, token: u8) -> Self {
        let id = TenantId(tenant);
        Self {
            login: "acme".to_owned(),
            csrf: String::new(),
            csrf_bytes: Vec::new(),
            role: Role::Customer,
            tenant: Some(Tenant {
                id,
                slug: "acme".to_owned(),
            }),
            hold: None,
            holder: Holder::Tenant(id),
            token_hash: [token; 32],
        }
    }
}

/// Whether the request comes from a browser that had a session.
pub(super) fn has_cookie(headers: &HeaderMap) -> bool {
    cookie(headers, SESSION_COOKIE).is_some_and(|token| !token.is_empty())
}

/// `Set-Cookie` for a session. Lax, so that a link from an email opens the page; forms have a token of their own.
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

/// For the sign-in form. Strict: it is only ever sent from our own page.
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

/// The token combined with random bytes, and those bytes. Pages are compressed and repeat what is in their address, so
/// the length of a page would reveal a token that is always the same (BREACH).
fn mask(csrf: &[u8], pad: [u8; 32]) -> String {
    let hidden = csrf.iter().zip(pad).map(|(byte, pad)| byte ^ pad);
    let bytes: Vec<u8> = pad.into_iter().chain(hidden).collect();
    BASE64URL_NOPAD.encode(&bytes)
}

fn unmask(text: &str) -> Option<Vec<u8>> {
    let bytes = BASE64URL_NOPAD.decode(text.as_bytes()).ok()?;
    let (pad, hidden) = bytes.split_at_checked(32)?;
    Some(hidden.iter().zip(pad).map(|(byte, pad)| byte ^ pad).collect())
}

/// A form submitted from one of this session's own pages.
pub(crate) struct Submitted<T>(pub(crate) T);

#[derive(Default, Deserialize)]
#[serde(default)]
struct Token {
    csrf: String,
}

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Submitted<T> {
    type Rejection = PageProblem;

    async fn from_request(request: Request, state: &S) -> Result<Self, PageProblem> {
        let (parts, body) = request.into_parts();
        let body = read_body(body, FORM_BYTES_MAX).await?;
        let again = || Request::from_parts(parts.clone(), Body::from(body.clone()));
        let session = parts.extensions.get::<Session>();
        let given = Form::<Token>::from_request(again(), state).await;
        let given = given.map(|Form(token)| token).unwrap_or_default();
        if !session.is_some_and(|session| session.has_csrf(&given.csrf)) {
            return Err(Problem::new(
                Kind::Forbidden,
                "This form was not sent from a page of your session. Go back, reload the page and try again.",
            )
            .into());
        }
        match Form::<T>::from_request(again(), state).await {
            Ok(Form(form)) => Ok(Self(form)),
            Err(rejection) => Err(Problem::bad_request(rejection.body_text()).into()),
        }
    }
}

/// A form with no fields except which attempt the page showed.
pub(crate) struct Confirmed {
    /// The number of the latest attempt on the page, if the form is about a delivery.
    pub(crate) seen: Option<i16>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ConfirmedForm {
    seen: Option<i16>,
}

impl<S: Send + Sync> FromRequest<S> for Confirmed {
    type Rejection = PageProblem;

    async fn from_request(request: Request, state: &S) -> Result<Self, PageProblem> {
        let Submitted(form) = Submitted::<ConfirmedForm>::from_request(request, state).await?;
        Ok(Self { seen: form.seen })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_is_found_by_its_whole_name() {
        let headers = HeaderMap::from_iter([(
            axum::http::header::COOKIE,
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
    fn a_masked_token_differs_each_time_and_is_read_again() {
        let token = [7; 32];
        let (one, other) = (mask(&token, [1; 32]), mask(&token, [2; 32]));
        assert_ne!(one, other);
        for masked in [one, other] {
            assert_eq!(unmask(&masked).as_deref(), Some(token.as_slice()));
        }
        let session = Session::of_customer(1, 1);
        for bad in ["", "AAAA", &mask(&[], [1; 32])] {
            assert!(!session.has_csrf(bad), "{bad}");
        }
    }

    #[test]
    fn an_empty_token_matches_nothing() {
        assert!(!tokens_match("", ""));
        assert!(!tokens_match("a", "b"));
        assert!(tokens_match("a", "a"));
    }
}
