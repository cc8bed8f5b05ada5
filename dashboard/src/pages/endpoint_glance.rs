//! The settings of an endpoint at a glance, with the defaults that apply.

use postrider_dispatcher::Settings;

use crate::{
    actions::endpoints::rules::write_wait,
    pages::stats_format::{counted, format_ms},
    tables::endpoints::EndpointSettings,
};

pub(super) struct Glance {
    pub(super) types: Vec<String>,
    /// Types with the version they are pinned to.
    pub(super) versions: Vec<(String, String)>,
    pub(super) filter: Option<String>,
    pub(super) rate: String,
    pub(super) concurrency: String,
    pub(super) timeout: String,
    pub(super) schedule: String,
    pub(super) ordered: bool,
    pub(super) signature: &'static str,
}

impl Glance {
    pub(super) fn of(settings: &EndpointSettings, defaults: &Settings) -> Self {
        let waits: Vec<i32> = match &settings.retry_schedule {
            Some(waits) => waits.clone(),
            None => {
                let waits = defaults.schedule.waits().iter();
                waits
                    .map(|wait| i32::try_from(wait.as_millis()).unwrap_or(i32::MAX))
                    .collect()
            }
        };
        let concurrency = settings
            .concurrency
            .map_or(i64::from(defaults.concurrency), i64::from);
        Self {
            types: settings.types.clone(),
            versions: settings.versions.iter().flat_map(|json| json.0.clone()).collect(),
            filter: settings
                .filter
                .as_ref()
                .and_then(|json| serde_json::to_string_pretty(&json.0).ok()),
            rate: settings.rate_per_second.map_or("no limit".to_owned(), |rate| {
                format!("{} per second", counted(rate, "request", "requests"))
            }),
            concurrency: format!("{} at a time", counted(concurrency, "request", "requests")),
            timeout: format_ms(settings.timeout(defaults.timeout).as_secs_f64() * 1_000.0),
            schedule: waits.into_iter().map(write_wait).collect::<Vec<_>>().join(", "),
            ordered: settings.ordered,
            signature: settings.signature.as_str(),
        }
    }
}
