//! HTML that a template of ours has rendered, to be put into another page as it is.

use std::fmt;

use askama::{Template, filters::HtmlSafe};

use crate::problem::{Kind, Problem};

#[derive(Debug, Clone)]
pub(crate) struct Markup(pub(super) String);

impl Markup {
    /// A template escapes what comes from outside; nothing else can become markup.
    pub(super) fn of(template: &impl Template) -> Result<Self, Problem> {
        template.render().map(Self).map_err(|error| {
            tracing::error!(%error, "a part of a page could not be rendered");
            Problem::new(Kind::Internal, "It has been logged.")
        })
    }
}

impl fmt::Display for Markup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl HtmlSafe for Markup {}
