//! HTML rendered by one of our own templates, which other templates include without escaping it again.

use std::fmt;

use askama::{Template, filters::HtmlSafe};

use crate::http::problem::{Kind, Problem};

#[derive(Debug, Clone, Default)]
pub(crate) struct Markup(pub(super) String);

impl Markup {
    pub(super) const fn empty() -> Self {
        Self(String::new())
    }

    /// A part that is always rendered: its template only writes text. Without it the page is still correct.
    pub(super) fn of_part(template: &impl Template) -> Self {
        Self::of(template).unwrap_or(Self::empty())
    }

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
