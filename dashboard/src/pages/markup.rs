//! HTML rendered by one of our own templates, which other templates include without escaping it again.

use std::fmt;

use askama::{Template, filters::HtmlSafe};

use crate::http::problem::{Kind, Problem};

#[derive(Debug, Clone)]
pub(crate) struct Markup(pub(super) String);

impl Markup {
    /// Only templates can produce markup, and templates escape external input.
    pub(super) fn of(template: &impl Template) -> Result<Self, Problem> {
        template.render().map(Self).map_err(|error| {
            tracing::error!(%error, "failed to render part of a page");
            Problem::new(
                Kind::Internal,
                "The page could not be rendered. The error has been logged.",
            )
        })
    }
}

impl fmt::Display for Markup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl HtmlSafe for Markup {}
