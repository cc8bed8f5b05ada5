//! The pages, a file for each, rendered on the server and readable without JavaScript.
//! Invariant: everything that came from outside is text: templates escape it, and no URL of a customer is a link.

pub(crate) mod dead_letters;
pub(crate) mod deliveries;
pub(crate) mod delivery;
pub(crate) mod docs;
pub(crate) mod sign_in;

use askama::Template;
use askama_web::WebTemplate;
use axum::{
    http::header,
    response::{IntoResponse, Redirect, Response},
};
use chrono::{DateTime, Utc};

use crate::{auth::Session, deliveries::Delivery, problem::Problem, transcript::outcome_word};

pub(crate) async fn home() -> Redirect {
    Redirect::to("/deliveries")
}

pub(crate) async fn stylesheet() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/css; charset=utf-8"),
        (header::CACHE_CONTROL, "public, max-age=300"),
    ];
    (headers, include_str!("../../assets/style.css")).into_response()
}

/// What stands around every page of a person who is signed in.
#[derive(Debug, Clone)]
struct Frame {
    login: String,
    csrf: String,
    /// Which entry of the menu is marked.
    here: &'static str,
}

impl Frame {
    fn new(session: Session, here: &'static str) -> Self {
        Self {
            login: session.login,
            csrf: session.csrf,
            here,
        }
    }
}

/// A delivery as a line of a list.
#[derive(Debug, Clone)]
struct Line {
    id: String,
    event: String,
    event_type: String,
    tenant: String,
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
            url: delivery.url.clone(),
            state: delivery.state().as_str(),
            attempts: delivery.attempt_count,
            said: said(delivery),
            created: Moment(delivery.created_at()),
        }
    }
}

/// What the latest attempt came to, in a few words.
fn said(delivery: &Delivery) -> String {
    match (delivery.status, &delivery.error, delivery.outcome) {
        (Some(status), _, _) => status.to_string(),
        (None, Some(error), _) => error.clone(),
        (None, None, Some(outcome)) => outcome_word(outcome).replace('_', " "),
        (None, None, None) => "not tried yet".to_owned(),
    }
}

/// A time for people, with the exact one for programs.
#[derive(Debug, Clone, Copy)]
struct Moment(Option<DateTime<Utc>>);

impl Moment {
    fn words(&self) -> String {
        self.0
            .map(|time| time.format("%Y-%m-%d %H:%M:%S UTC").to_string())
            .unwrap_or_default()
    }

    fn exact(&self) -> String {
        self.0.map(|time| time.to_rfc3339()).unwrap_or_default()
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
            title: self.0.title(),
            detail: self.0.detail,
        };
        (status, page).into_response()
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
