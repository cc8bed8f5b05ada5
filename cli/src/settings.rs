//! What a setting is: its variable, its default, its help text, and how its value is read from the environment.
//! Invariant: the value of a secret appears in no message.

use std::{collections::BTreeMap, fmt::Display};

const PREFIX: &str = "POSTRIDER_";

/// One row of the settings table.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    pub variable: &'static str,
    pub kind: Kind,
    pub default: Fallback,
    /// Markdown, for the reference.
    pub help: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Flag,
    /// A flag whose value may contain a password: it is not repeated anywhere.
    PrivateFlag,
    /// No flag, because other users of the machine can read a process's arguments. May come from a file instead.
    Secret,
}

/// What applies when a setting is not set.
#[derive(Debug, Clone, Copy)]
pub enum Fallback {
    Value(&'static str),
    /// Nothing, or what depends on the command, in Markdown.
    Described(&'static str),
}

#[derive(Debug, thiserror::Error)]
pub enum SettingError {
    #[error("{variable} is invalid: {reason}")]
    Invalid { variable: String, reason: String },
    #[error("{0} is not set, but this command requires it")]
    Missing(&'static str),
    #[error("{0} and {0}_FILE are both set: remove one of them")]
    SetTwice(&'static str),
}

impl SettingError {
    pub fn invalid(variable: &str, reason: impl Display) -> Self {
        Self::Invalid {
            variable: variable.to_owned(),
            reason: reason.to_string(),
        }
    }
}

impl Setting {
    /// A flag with a default value.
    pub const fn value(variable: &'static str, default: &'static str, help: &'static str) -> Self {
        Self::new(variable, Kind::Flag, Fallback::Value(default), help)
    }

    /// A flag without a fixed default.
    pub const fn optional(variable: &'static str, default: &'static str, help: &'static str) -> Self {
        Self::new(variable, Kind::Flag, Fallback::Described(default), help)
    }

    pub const fn private(variable: &'static str, default: &'static str, help: &'static str) -> Self {
        Self::new(variable, Kind::PrivateFlag, Fallback::Described(default), help)
    }

    pub const fn secret(variable: &'static str, default: &'static str, help: &'static str) -> Self {
        Self::new(variable, Kind::Secret, Fallback::Described(default), help)
    }

    const fn new(variable: &'static str, kind: Kind, default: Fallback, help: &'static str) -> Self {
        Self {
            variable,
            kind,
            default,
            help,
        }
    }

    pub fn is_secret(&self) -> bool {
        self.kind == Kind::Secret
    }

    /// Whether a variable sets this, directly or by naming the file that a secret is in.
    pub fn is_set_by(&self, variable: &str) -> bool {
        self.variable == variable
            || (self.is_secret() && variable.strip_suffix("_FILE") == Some(self.variable))
    }

    /// `POSTRIDER_RETRY_JITTER` is `--retry-jitter`.
    pub fn flag(&self) -> String {
        self.short_name().replace('_', "-").to_lowercase()
    }

    pub fn short_name(&self) -> &'static str {
        self.variable.strip_prefix(PREFIX).unwrap_or(self.variable)
    }

    /// The reference's texts, for a terminal.
    pub fn flag_help(&self) -> String {
        let help = without_markup(self.help);
        let default = match self.default {
            Fallback::Value(value) => value.to_owned(),
            Fallback::Described(words) => without_markup(words),
        };
        let first = help.chars().next().map(|c| c.to_uppercase().to_string());
        let rest: String = help.chars().skip(1).collect();
        format!("{}{rest} [default: {default}]", first.unwrap_or_default())
    }

    pub fn default_in_markdown(&self) -> String {
        match self.default {
            Fallback::Value(value) => format!("`{value}`"),
            Fallback::Described(words) => words.to_owned(),
        }
    }

    /// A value that does not meet the requirement, which reads like "must be …".
    pub fn refuse(&self, value: &str, requirement: impl Display) -> SettingError {
        match self.kind {
            Kind::Flag => SettingError::invalid(
                self.variable,
                format!("{requirement}, got `{}`", value.escape_debug()),
            ),
            Kind::PrivateFlag | Kind::Secret => SettingError::invalid(self.variable, requirement),
        }
    }
}

/// Without backticks, and with the words of links only.
fn without_markup(markdown: &str) -> String {
    let mut text = String::new();
    let mut rest = markdown;
    while let Some((before, target)) = rest.split_once("](") {
        let (before, words) = before.rsplit_once('[').unwrap_or((before, ""));
        text.push_str(before);
        text.push_str(words);
        rest = target.split_once(')').map_or("", |(_, after)| after);
    }
    text.push_str(rest);
    text.replace('`', "")
}

/// What the tools read beside the flags of each command.
pub const TOOL_SETTINGS: &[Setting] = &[URL, API_KEY, TENANT, ENDPOINT_SECRET];

pub(crate) const URL: Setting = Setting::value("POSTRIDER_URL", "http://127.0.0.1:8080", "API base URL");
pub(crate) const API_KEY: Setting = Setting::secret(
    "POSTRIDER_API_KEY",
    "the key in the data directory of `up`",
    "API key",
);
pub(crate) const TENANT: Setting = Setting::optional(
    "POSTRIDER_TENANT",
    "the only tenant",
    "tenant (optional if there is only one)",
);
pub(crate) const ENDPOINT_SECRET: Setting = Setting::secret(
    "POSTRIDER_ENDPOINT_SECRET",
    "none",
    "an endpoint's secret, for `verify`, `listen` and `secrets rotate`",
);

/// The process's environment as it was at the start. Passed around, so that tests can use their own.
pub struct Environment(BTreeMap<String, String>);

impl Environment {
    pub fn of_process() -> Self {
        std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect()
    }

    /// An empty value counts as not set: compose files pass variables on that way.
    pub fn get(&self, variable: &str) -> Option<&str> {
        let value = self.0.get(variable)?.trim();
        (!value.is_empty()).then_some(value)
    }

    /// From the secret's variable, or from the file that `…_FILE` names.
    pub fn secret(&self, setting: &Setting) -> Result<Option<String>, SettingError> {
        let file_variable = format!("{}_FILE", setting.variable);
        match (self.get(setting.variable), self.get(&file_variable)) {
            (Some(_), Some(_)) => Err(SettingError::SetTwice(setting.variable)),
            (Some(value), None) => Ok(Some(value.to_owned())),
            (None, None) => Ok(None),
            (None, Some(path)) => {
                let text = std::fs::read_to_string(path).map_err(|error| {
                    SettingError::invalid(&file_variable, format!("cannot read {path}: {error}"))
                })?;
                match text.trim() {
                    "" => Err(SettingError::invalid(&file_variable, format!("{path} is empty"))),
                    text => Ok(Some(text.to_owned())),
                }
            }
        }
    }

    /// Variables with our prefix.
    pub fn own_variables(&self) -> impl Iterator<Item = &str> {
        self.0
            .keys()
            .map(String::as_str)
            .filter(|name| name.starts_with(PREFIX))
    }
}

impl FromIterator<(String, String)> for Environment {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(variables: I) -> Self {
        Self(variables.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_s_help_is_the_reference_s_text_without_markup() {
        let setting = Setting::optional(
            "POSTRIDER_SOME_PORT",
            "`1`; `up`: none",
            "ports: [see](x.md#y), `a`",
        );
        assert_eq!(setting.flag(), "some-port");
        assert_eq!(setting.flag_help(), "Ports: see, a [default: 1; up: none]");
    }
}
