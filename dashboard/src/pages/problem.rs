//! Problems as browsers see them: HTML instead of JSON, with the menu for whoever is signed in.

use std::time::Duration;

use askama::Template;
use axum::{
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use tokio::time::timeout;

use super::Frame;
use crate::{
    Shared,
    auth::Session,
    http::{
        page_problem::{PageProblem, page_detail, page_title},
        problem::Problem,
    },
};

/// For a problem that is reported before the session was looked up. Without an answer the page has no menu.
const SESSION_TIME_MAX: Duration = Duration::from_secs(1);

#[derive(Template)]
#[template(path = "problem_framed.html")]
struct FramedProblemPage {
    frame: Frame,
    status: u16,
    title: &'static str,
    detail: String,
}

/// Renders every problem of a page again, whoever reported it: a handler, access control, or the router.
pub(crate) async fn render(State(app): State<Shared>, request: Request, next: Next) -> Response {
    let is_api = request.uri().path().starts_with("/v1/");
    let headers = request.headers().clone();
    let mut response = next.run(request).await;
    let is_shown = !is_api && (accepts_html(&headers) || is_html(response.headers()));
    match response.extensions_mut().remove::<Problem>() {
        Some(problem) if is_shown => {
            let session = match response.extensions_mut().remove::<Session>() {
                Some(session) => Some(session),
                None => find_session(&app, &headers).await,
            };
            with_page(response, problem, session)
        }
        _ => response,
    }
}

async fn find_session(app: &Shared, headers: &HeaderMap) -> Option<Session> {
    let found = timeout(SESSION_TIME_MAX, Session::of(&app.lookups, headers)).await;
    found.ok()?.ok()?
}

/// Keeps the headers of the response.
fn with_page(response: Response, problem: Problem, session: Option<Session>) -> Response {
    let framed = session.and_then(|session| {
        let page = FramedProblemPage {
            frame: Frame::new(session, ""),
            status: problem.status().as_u16(),
            title: page_title(&problem),
            detail: page_detail(&problem),
        };
        page.render().ok()
    });
    let body = match framed {
        Some(html) => Body::from(html),
        None => PageProblem::from(problem).into_response().into_body(),
    };
    let (mut parts, _) = response.into_parts();
    parts.headers.remove(header::CONTENT_LENGTH);
    let html = HeaderValue::from_static("text/html; charset=utf-8");
    parts.headers.insert(header::CONTENT_TYPE, html);
    Response::from_parts(parts, body)
}

fn accepts_html(headers: &HeaderMap) -> bool {
    contains(headers, &header::ACCEPT, "text/html")
}

fn is_html(headers: &HeaderMap) -> bool {
    contains(headers, &header::CONTENT_TYPE, "text/html")
}

fn contains(headers: &HeaderMap, name: &header::HeaderName, text: &str) -> bool {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .any(|value| value.to_ascii_lowercase().contains(text))
}
