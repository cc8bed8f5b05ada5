//! A problem as an HTML page, for people instead of programs. `pages::problem` adds the menu for whoever is signed in.

use askama::Template;
use askama_web::WebTemplate;
use axum::response::{IntoResponse, Response};

use super::problem::{Kind, Problem};

/// An error page.
#[derive(Template, WebTemplate)]
#[template(path = "problem.html")]
struct ProblemPage {
    status: u16,
    title: &'static str,
    detail: String,
}

pub(crate) struct PageProblem(Problem);

/// The API's titles refer to API keys.
pub(crate) fn page_title(problem: &Problem) -> &'static str {
    match problem.kind {
        Kind::Forbidden => "You don't have permission",
        Kind::MethodNotAllowed => "This address can't be opened",
        _ => problem.title(),
    }
}

pub(crate) fn page_detail(problem: &Problem) -> String {
    match problem.kind {
        Kind::MethodNotAllowed => {
            "It belongs to a form. Open the page with the form and submit it there.".to_owned()
        }
        _ => problem.in_words(),
    }
}

impl<E: Into<Problem>> From<E> for PageProblem {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for PageProblem {
    fn into_response(self) -> Response {
        let page = ProblemPage {
            status: self.0.status().as_u16(),
            title: page_title(&self.0),
            detail: page_detail(&self.0),
        };
        let mut response = (self.0.status(), page).into_response();
        self.0.set_headers(&mut response);
        response.extensions_mut().insert(self.0);
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
