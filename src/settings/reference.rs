//! The reference that `postrider settings` prints.

use std::fmt::Write;

use serde_json::{Value, json};

use super::table;

pub(crate) fn markdown() -> String {
    let mut text = String::new();
    for section in table::sections() {
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "### {}\n\n| variable | default | description |\n|---|---|---|\n",
            section.title
        );
        for setting in section.settings {
            let lock = if setting.is_secret() { " 🔒" } else { "" };
            let _ = writeln!(
                text,
                "| `{}`{lock} | {} | {} |",
                setting.variable,
                setting.default_in_markdown(),
                setting.help
            );
        }
        if !section.note.is_empty() {
            let _ = write!(text, "\n{}\n", section.note);
        }
        text.push('\n');
    }
    text
}

pub(crate) fn document() -> Value {
    table::all()
        .map(|setting| {
            json!({
                "variable": setting.variable,
                "secret": setting.is_secret(),
                "default": setting.default_in_markdown(),
                "description": setting.help,
            })
        })
        .collect()
}
