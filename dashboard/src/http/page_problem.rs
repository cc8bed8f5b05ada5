//! A problem as an HTML page, for people instead of programs.

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
            // The API's title refers to API keys.
            title: match self.0.kind {
                Kind::Forbidden => "You don't have permission",
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
