//! The process's environment as it was at the start. The one place that reads it, so that tests can pass their own.

use std::collections::BTreeMap;

use super::{SettingError, reference};

const PREFIX: &str = "POSTRIDER_";

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

    /// Only told, not refused: Kubernetes makes variables like `POSTRIDER_SERVICE_HOST` for a service of our name.
    pub(super) fn unknown(&self) -> Vec<String> {
        let unknown = self
            .0
            .keys()
            .filter(|name| name.starts_with(PREFIX) && !reference::is_known(name));
        unknown.cloned().collect()
    }
}

impl FromIterator<(String, String)> for Environment {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(variables: I) -> Self {
        Self(variables.into_iter().collect())
    }
}
