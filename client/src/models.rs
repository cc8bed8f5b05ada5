//! What callers give that is not a request as it is sent. Requests and responses are in `postrider_proto::api`.

use chrono::{DateTime, Utc};
use postrider_proto::{
    DeliveryState,
    api::EventForm,
    state::{CircuitState, HealthStatus},
};

/// An event to emit. `data` is the text of a JSON object and is sent unchanged. It is not checked before it is sent,
/// unlike the request's body, which borrows checked JSON.
#[derive(Debug, Clone)]
pub struct NewEvent {
    type_name: String,
    data: String,
    id: Option<String>,
    version: Option<String>,
    ordering_key: Option<String>,
}

impl NewEvent {
    pub fn new(type_name: impl Into<String>, data: impl Into<String>) -> Self {
        Self {
            type_name: type_name.into(),
            data: data.into(),
            id: None,
            version: None,
            ordering_key: None,
        }
    }

    /// Your own stable id: an event with the same id is sent once.
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    pub fn version(mut self, version: impl Into<String>) -> Self {
        self.version = Some(version.into());
        self
    }

    pub fn ordering_key(mut self, key: impl Into<String>) -> Self {
        self.ordering_key = Some(key.into());
        self
    }

    /// The request body; fails if the data is not JSON.
    pub(crate) fn form(&self) -> Result<EventForm<'_>, serde_json::Error> {
        Ok(EventForm {
            r#type: self.type_name.clone(),
            data: serde_json::from_str(&self.data)?,
            id: self.id.clone(),
            version: self.version.clone(),
            ordering_key: self.ordering_key.clone(),
        })
    }
}

/// Filter of a list of deliveries.
#[derive(Debug, Clone, Default)]
pub struct DeliveryFilter {
    pub state: Option<DeliveryState>,
    pub endpoint: Option<String>,
    pub type_name: Option<String>,
    pub event: Option<String>,
    pub status_code: Option<u16>,
    pub since: Option<DateTime<Utc>>,
    pub until: Option<DateTime<Utc>>,
}

/// Filter of a list of endpoints by their health.
#[derive(Debug, Clone, Default)]
pub struct HealthFilter {
    pub health: Option<HealthStatus>,
    pub circuit: Option<CircuitState>,
    pub tenant: Option<String>,
    /// By failed attempts in the last hour. There is one page then.
    pub most_failures_first: bool,
}
