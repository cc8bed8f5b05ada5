//! Errors of a submitted form, shown where they happened: each beside its field, which gets the focus and is announced as
//! invalid. The form keeps the input.
//!
//!   <input id="name" name="name" value="{{ form.name }}"{{ errors.mark("name") }}>{{ errors.note("name", "Name") }}

use std::sync::atomic::{AtomicBool, Ordering};

use askama::Template;
use axum::http::StatusCode;

use super::Markup;
use crate::http::problem::{Fault, Kind, Problem};

/// A detail that begins with one of these words continues the name of its field.
const VERBS: [&str; 8] = ["must", "is", "are", "has", "contains", "can", "can't", "needs"];

#[derive(Debug, Default)]
pub(super) struct FormErrors {
    faults: Vec<Fault>,
    /// An error that is about no single field.
    message: Option<String>,
    status: StatusCode,
    /// The first field with an error has got the focus.
    is_focused: AtomicBool,
}

#[derive(Template)]
#[template(
    ext = "html",
    source = r#"<small class="fault" id="{{ field }}-error">{{ text }}</small>"#
)]
struct Note<'a> {
    field: &'a str,
    text: &'a str,
}

#[derive(Template)]
#[template(
    ext = "html",
    source = r#" aria-invalid="true" aria-describedby="{{ field }}-error"{% if focus %} autofocus{% endif %}"#
)]
struct Mark<'a> {
    field: &'a str,
    focus: bool,
}

impl FormErrors {
    /// Passes on a problem that the input did not cause.
    pub(super) fn of(problem: Problem) -> Result<Self, Problem> {
        let status = problem.status();
        match problem.kind {
            Kind::Invalid if !problem.errors.is_empty() => {
                let (faults, general): (Vec<Fault>, Vec<Fault>) = problem
                    .errors
                    .into_iter()
                    .partition(|fault| !fault.pointer.is_empty());
                let general: Vec<String> = general.iter().map(|fault| sentence("", &fault.detail)).collect();
                Ok(Self {
                    faults,
                    message: (!general.is_empty()).then(|| general.join(" ")),
                    status,
                    ..Self::default()
                })
            }
            Kind::Invalid
            | Kind::BadRequest
            | Kind::Conflict
            | Kind::LimitReached
            | Kind::EndpointDisabled
            | Kind::SendingStopped
            | Kind::TenantPaused
            | Kind::TooMany => Ok(Self {
                message: Some(problem.detail),
                status,
                ..Self::default()
            }),
            _ => Err(problem),
        }
    }

    /// An error of one field.
    pub(super) fn at(field: &str, problem: &Problem) -> Self {
        Self {
            faults: vec![Fault {
                pointer: format!("/{field}"),
                detail: problem.in_words(),
            }],
            status: problem.status(),
            ..Self::default()
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.faults.is_empty() && self.message.is_none()
    }

    pub(super) fn status(&self) -> StatusCode {
        self.status
    }

    /// For the top of the form, where the errors of fields are only mentioned.
    pub(super) fn message(&self) -> Option<&str> {
        match &self.message {
            Some(message) => Some(message),
            None if self.is_empty() => None,
            None => Some("Correct the fields marked below."),
        }
    }

    fn has(&self, field: &str) -> bool {
        self.of_field(field).next().is_some()
    }

    fn of_field(&self, field: &str) -> impl Iterator<Item = &Fault> {
        let (field, below) = (format!("/{field}"), format!("/{field}/"));
        self.faults
            .iter()
            .filter(move |fault| fault.pointer == field || fault.pointer.starts_with(&below))
    }

    /// Attributes of the field's control.
    pub(super) fn mark(&self, field: &str) -> Markup {
        if !self.has(field) {
            return Markup::empty();
        }
        let focus = !self.is_focused.swap(true, Ordering::Relaxed);
        Markup::of_part(&Mark { field, focus })
    }

    /// The text beside the control. `label` is what the page calls the field.
    pub(super) fn note(&self, field: &str, label: &str) -> Markup {
        let details: Vec<String> = self
            .of_field(field)
            .map(|fault| sentence(label, &fault.detail))
            .collect();
        match details.is_empty() {
            true => Markup::empty(),
            false => Markup::of_part(&Note {
                field,
                text: &details.join(" "),
            }),
        }
    }

    /// The attribute of a dialog that shows its form again.
    pub(super) fn open(&self) -> &'static str {
        match self.is_empty() {
            true => "",
            false => " open",
        }
    }
}

/// `must be a number` becomes `Timeout must be a number.`
fn sentence(label: &str, detail: &str) -> String {
    let first = detail.split(' ').next().unwrap_or_default();
    let text = match VERBS.contains(&first) && !label.is_empty() {
        true => format!("{label} {detail}"),
        false => {
            let mut rest = detail.chars();
            let first = rest.next().map(|c| c.to_uppercase().to_string());
            format!("{}{}", first.unwrap_or_default(), rest.as_str())
        }
    };
    match text.ends_with(['.', '!', '?', '…']) {
        true => text,
        false => format!("{text}."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_are_sentences_about_their_field() {
        for (label, detail, text) in [
            (
                "Timeout",
                "must be a number, not \"x\"",
                "Timeout must be a number, not \"x\".",
            ),
            (
                "Tenant",
                "tenant `x` does not exist",
                "Tenant `x` does not exist.",
            ),
            (
                "",
                "Current password is incorrect.",
                "Current password is incorrect.",
            ),
        ] {
            assert_eq!(sentence(label, detail), text);
        }
    }

    #[test]
    fn the_first_field_with_an_error_on_the_page_gets_the_focus() {
        let problem = Problem::faults(vec![
            Fault {
                pointer: "/b/0".to_owned(),
                detail: "must be <b>".to_owned(),
            },
            Fault {
                pointer: "/a".to_owned(),
                detail: "must be a".to_owned(),
            },
        ]);
        let errors = FormErrors::of(problem).expect("errors of a form");
        assert_eq!(errors.mark("c").0, "");
        assert!(errors.mark("a").0.contains("autofocus"));
        let second = errors.mark("b").0;
        assert!(second.contains("aria-describedby=\"b-error\"") && !second.contains("autofocus"));
        assert!(errors.note("b", "B").0.contains("B must be &#60;b&#62;."));
        assert!(FormErrors::of(Problem::busy()).is_err(), "nothing to correct");
    }
}
