//! The pages, a file for each, rendered on the server and readable without JavaScript.
//! Invariant: everything that came from outside is text: templates escape it, and no URL of a customer is a link.

pub(crate) mod account;
pub(crate) mod api_keys;
pub(crate) mod audit;
pub(crate) mod dead_letters;
pub(crate) mod deliveries;
pub(crate) mod delivery;
pub(crate) mod docs;
pub(crate) mod endpoint;
mod endpoint_form;
pub(crate) mod endpoint_secrets;
pub(crate) mod endpoint_settings;
mod endpoint_trials;
pub(crate) mod endpoints;
pub(crate) mod event;
pub(crate) mod event_types;
mod markup;
mod menu;
pub(crate) mod overview;
pub(crate) mod people;
pub(crate) mod portal;
pub(crate) mod replays;
pub(crate) mod sign_in;
pub(crate) mod signatures;
pub(crate) mod system;
pub(crate) mod tenants;
pub(crate) mod verify;

use std::fmt;

use askama::{Template, filters::HtmlSafe};
use askama_web::WebTemplate;
use axum::{
    http::header,
    response::{IntoResponse, Response},
};
use chrono::{DateTime, SecondsFormat, Utc};
use postrider_proto::json::{LaidOut, lay_out_within};
use serde::Deserialize;

pub(crate) use markup::Markup;

use crate::{
    auth::{Role, Rule, Session},
    deliveries::Delivery,
    problem::{Kind, Problem},
    transcript::{error_words, outcome_word},
};

pub(crate) async fn stylesheet() -> Response {
    asset("text/css; charset=utf-8", include_str!("../../assets/style.css"))
}

pub(crate) async fn script() -> Response {
    asset(
        "text/javascript; charset=utf-8",
        include_str!("../../assets/app.js"),
    )
}

pub(crate) async fn mark() -> Response {
    asset("image/svg+xml", include_str!("../../assets/mark.svg"))
}

pub(crate) async fn font() -> Response {
    asset(
        "font/woff2",
        include_bytes!("../../assets/inter.woff2").as_slice(),
    )
}

/// Served by the program itself. Looked for again after a while, so that a new version is seen soon.
fn asset(kind: &'static str, content: impl IntoResponse) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "public, max-age=300"),
    ];
    (headers, content).into_response()
}

/// What stands around every page of a person who is signed in.
#[derive(Debug, Clone)]
struct Frame {
    login: String,
    csrf: String,
    /// Which entry of the menu is marked.
    here: &'static str,
    /// What was just done: a sentence that goes away by itself.
    said: Option<&'static str>,
    role: Role,
}

impl Frame {
    fn new(session: Session, here: &'static str) -> Self {
        Self {
            login: session.login,
            csrf: session.csrf,
            here,
            said: None,
            role: session.role,
        }
    }

    /// Whether to show the forms and buttons that lead to routes of this rule.
    fn may_operate(&self) -> bool {
        Rule::Operate.admits(self.role)
    }

    fn may_manage(&self) -> bool {
        Rule::Manage.admits(self.role)
    }

    fn may_administer(&self) -> bool {
        Rule::Administer.admits(self.role)
    }

    fn is_team(&self) -> bool {
        self.role != Role::Customer
    }

    fn role_word(&self) -> &'static str {
        match self.role {
            Role::Admin => "admin",
            Role::Operator => "operator",
            Role::ReadOnly => "read-only",
            Role::Customer => "customer",
        }
    }

    /// With the sentence for `?done=…`, which a form's handler put there. An unknown word says nothing: what stands in an
    /// address was perhaps written by somebody else.
    fn with_done(mut self, done: &str, sentences: &[(&str, &'static str)]) -> Self {
        self.said = sentences
            .iter()
            .find_map(|(word, sentence)| (*word == done).then_some(*sentence));
        self
    }

    fn menu(&self) -> impl Iterator<Item = &'static menu::Group> {
        let team = if self.is_team() { menu::TEAM } else { &[] };
        let admin = if self.role == Role::Admin {
            menu::ADMIN
        } else {
            &[]
        };
        menu::MENU.iter().chain(team).chain(admin)
    }
}

/// The query of a page that a form leads back to.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(crate) struct DoneQuery {
    done: String,
}

/// A delivery as a line of a list.
#[derive(Debug, Clone)]
struct Line {
    id: String,
    event: String,
    event_type: String,
    tenant: String,
    /// Its public id.
    endpoint: String,
    url: String,
    state: &'static str,
    attempts: i16,
    said: String,
    created: Moment,
}

impl From<&Delivery> for Line {
    fn from(delivery: &Delivery) -> Self {
        Self {
            id: delivery.id().to_string(),
            event: delivery.event(),
            event_type: delivery.event_type.clone(),
            tenant: delivery.tenant.clone(),
            endpoint: delivery.endpoint.clone(),
            url: delivery.url.clone(),
            state: delivery.state().as_str(),
            attempts: delivery.attempt_count,
            said: said(delivery),
            created: Moment(delivery.created_at()),
        }
    }
}

/// Of a body that is laid out for people. Most are shown whole; what is nested deeply could grow a hundredfold.
const LAID_OUT_BYTES_MAX: usize = 256 * 1024;

/// A body for people, with a note where only its beginning is shown.
#[derive(Debug, Clone)]
struct Pretty {
    text: String,
    is_cut: bool,
}

impl Pretty {
    const KIB_MAX: usize = LAID_OUT_BYTES_MAX / 1024;

    fn of(body: &str) -> Self {
        let LaidOut { text, is_cut } = lay_out_within(body, LAID_OUT_BYTES_MAX);
        Self { text, is_cut }
    }

    /// For what is shown nowhere else: as it is, where it would be cut.
    fn whole(text: &str) -> String {
        match Self::of(text) {
            Self { is_cut: true, .. } => text.to_owned(),
            Self { text, .. } => text,
        }
    }
}

/// What the latest attempt came to, in a few words.
fn said(delivery: &Delivery) -> String {
    match (delivery.status, &delivery.error, delivery.outcome) {
        (Some(status), _, _) => status.to_string(),
        (None, Some(error), _) => error_words(error),
        (None, None, Some(outcome)) => outcome_word(outcome).replace('_', " "),
        (None, None, None) => "not tried yet".to_owned(),
    }
}

/// A time for people, with the exact one for programs. In a template `{{ moment }}` is a `<time>`, which the script turns
/// into the reader's zone.
#[derive(Debug, Clone, Copy)]
struct Moment(Option<DateTime<Utc>>);

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => Ok(()),
            Some(_) => write!(
                f,
                "<time datetime=\"{exact}\" title=\"{exact}\">{}</time>",
                self.words(),
                exact = self.exact()
            ),
        }
    }
}

/// Nothing in it comes from outside.
impl HtmlSafe for Moment {}

/// For templates: `{{ row.created_at.when() }}`.
trait When {
    fn when(&self) -> Moment;
}

impl When for DateTime<Utc> {
    fn when(&self) -> Moment {
        Moment(Some(*self))
    }
}

impl When for Option<DateTime<Utc>> {
    fn when(&self) -> Moment {
        Moment(*self)
    }
}

impl Moment {
    fn words(&self) -> String {
        self.0
            .map(|time| time.format("%Y-%m-%d %H:%M:%S UTC").to_string())
            .unwrap_or_default()
    }

    fn exact(&self) -> String {
        self.0
            .map(|time| time.to_rfc3339_opts(SecondsFormat::Millis, true))
            .unwrap_or_default()
    }
}

/// A problem as a page.
#[derive(Template, WebTemplate)]
#[template(path = "problem.html")]
struct ProblemPage {
    status: u16,
    title: &'static str,
    detail: String,
}

pub(crate) struct PageProblem(Problem);

impl<E: Into<Problem>> From<E> for PageProblem {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for PageProblem {
    fn into_response(self) -> Response {
        let status = self.0.status();
        let page = ProblemPage {
            status: status.as_u16(),
            // The API's own title speaks of keys.
            title: match self.0.kind {
                Kind::Forbidden => "That is not for you to do",
                _ => self.0.title(),
            },
            detail: self.0.in_words(),
        };
        let mut response = (status, page).into_response();
        self.0.set_headers(&mut response);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_text_is_escaped() {
        let page = ProblemPage {
            status: 404,
            title: "t",
            detail: "<script>alert(1)</script>\"'&".to_owned(),
        };
        let html = page.render().expect("a page");
        assert!(!html.contains("<script>"));
        assert!(html.contains("script&#62;"));
    }
}
