//! The process's environment as it was at the start. The one place that reads it, so that tests can pass their own.

use std::collections::BTreeMap;

use super::SettingError;

const PREFIX: &str = "POSTRIDER_";

/// Variables, or files named by the same variable with `_FILE`.
const SECRETS: [&str; 8] = [
    "POSTRIDER_SOURCES",
    "POSTRIDER_API_KEY",
    "POSTRIDER_DATABASE_URL",
    "POSTRIDER_DATABASE_URL_DIRECT",
    "POSTRIDER_ADMIN_API_KEY",
    "POSTRIDER_ADMIN_PASSWORD",
    "POSTRIDER_MASTER_KEY",
    // Of `postrider verify`: an endpoint's, not ours.
    "POSTRIDER_ENDPOINT_SECRET",
];

const FLAGS: [&str; 22] = [
    // Of the tools.
    "POSTRIDER_URL",
    "POSTRIDER_TENANT",
    "POSTRIDER_DATA_DIR",
    "POSTRIDER_LISTEN",
    "POSTRIDER_METRICS_LISTEN",
    "POSTRIDER_GRPC_LISTEN",
    "POSTRIDER_PUBLIC_URL",
    "POSTRIDER_RETRY_SCHEDULE",
    "POSTRIDER_RETRY_JITTER",
    "POSTRIDER_TIMEOUT",
    "POSTRIDER_ENDPOINT_CONCURRENCY",
    "POSTRIDER_MAX_IN_FLIGHT",
    "POSTRIDER_RETENTION",
    "POSTRIDER_ALLOW_NETWORKS",
    "POSTRIDER_DENY_NETWORKS",
    "POSTRIDER_DENY_PORTS",
    "POSTRIDER_ALLOW_HTTP",
    "POSTRIDER_EGRESS_PROXY",
    "POSTRIDER_REQUEST_RATE",
    "POSTRIDER_TENANT_REQUEST_RATE",
    "POSTRIDER_LOG",
    "POSTRIDER_LOG_FORMAT",
];

/// Promised, but not there yet. Refused and not passed over: somebody who sets it relies on it.
const NOT_YET: [&str; 1] = ["POSTRIDER_OTLP_ENDPOINT"];

pub struct Environment(BTreeMap<String, String>);

impl Environment {
    pub fn of_process() -> Self {
        std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect()
    }

    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        let value = self.0.get(name)?.trim();
        (!value.is_empty()).then_some(value)
    }

    /// A secret's value, from its variable or from the file that `…_FILE` names.
    pub(crate) fn secret(&self, name: &'static str) -> Result<Option<String>, SettingError> {
        let file_name = format!("{name}_FILE");
        match (self.get(name), self.get(&file_name)) {
            (Some(_), Some(_)) => Err(SettingError::Twice(name)),
            (Some(value), None) => Ok(Some(value.to_owned())),
            (None, None) => Ok(None),
            (None, Some(path)) => {
                let text = std::fs::read_to_string(path)
                    .map_err(|e| SettingError::unusable(&file_name, format!("{path} can't be read: {e}")))?;
                let text = text.trim();
                if text.is_empty() {
                    return Err(SettingError::unusable(&file_name, format!("{path} is empty")));
                }
                Ok(Some(text.to_owned()))
            }
        }
    }

    pub(super) fn refuse_what_is_not_yet_there(&self) -> Result<(), SettingError> {
        match NOT_YET.into_iter().find(|name| self.get(name).is_some()) {
            Some(name) => Err(SettingError::NotYet(name)),
            None => Ok(()),
        }
    }

    /// Only told, not refused: Kubernetes makes variables like `POSTRIDER_SERVICE_HOST` for a service of our name.
    pub(super) fn unknown(&self) -> Vec<String> {
        let known = |name: &str| {
            FLAGS.contains(&name) || SECRETS.contains(&name.strip_suffix("_FILE").unwrap_or(name))
        };
        let unknown = self
            .0
            .keys()
            .filter(|name| name.starts_with(PREFIX) && !known(name));
        unknown.cloned().collect()
    }
}

impl FromIterator<(String, String)> for Environment {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(variables: I) -> Self {
        Self(variables.into_iter().collect())
    }
}
